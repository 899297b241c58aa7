"""A run in words: the sentences of its headline, and the pieces that captions are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.channel.exposure import sentences
from coterie.errors import ConfigError
from coterie.report.figures.clients import gains, scores_of, worst
from coterie.report.figures.compared import amount_spent
from coterie.report.figures.scores import at_bytes, at_seconds, curve
from coterie.report.figures.style import Event
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading, number
from coterie.report.tables import score, size
from coterie.results.findings import between_groups, how_sure, own_weight, probing_cost

# What the server saw unprotected of single clients, the most first.
SEEN = {
    "each": "single clients",
    "revealed": "what was revealed",
    "noised": "noised clients",
    "means": "means",
    "sums": "sums only",
    "nothing": "nothing",
}


def saw_of(row: Mapping[str, Any]) -> str:
    """What the server saw, in a few words; "" if it is not known.

    >>> saw_of({"sees": "each"})
    'single clients'
    >>> saw_of({"sees": "each", "sees_mostly": "means", "exposed": 1, "exposed_rounds": 1})
    'means; 1 client exposed once, alone in a group'
    """
    if not row.get("exposed"):
        sees = str(row.get("sees") or "")
        return SEEN.get(sees, sees)
    rounds = row["exposed_rounds"]
    times = "once" if rounds == 1 else f"in {rounds} rounds"
    mostly = SEEN.get(row["sees_mostly"], row["sees_mostly"])
    return f"{mostly}; {count(row['exposed'], 'client')} exposed {times}, alone in a group"


# What the words of tables and tiles mean, where they stand.
MEANINGS = {
    "received": "the score of the model that a client gets from the server, on the client's own "
    "test data; the mean over clients",
    "adapted": "the score after a client has trained the received model once more on its own data",
    "to the best": "the difference to the usable method with the highest score, and whether it is "
    "real: see “Is it real?”",
    "worst client": "the lowest score of a client",
    "newcomers": "the adapted score of clients that were held out and joined at the end",
    "over local": "the mean gain of clients over training alone, in points",
    "better / same / worse": "how many clients are better off than if they had trained alone, the "
    "same, and worse off",
    "groups": "the number of groups of clients that shared a model at the end; their names and "
    "numbers mean nothing beyond that",
    "agreement": "the adjusted Rand index of the found groups and the true ones: 1 is perfect, "
    "0 is chance",
    "bytes": "everything that the method sent, down to clients and up to the server",
    "to within 1 point": "the bytes until the score stayed within a point of its last",
    "simulated time": "what the rounds would have taken on the run's simulated clock",
    "time": "what the rounds took on the machine that simulated them",
    "ε": "the privacy loss: the smaller, the less the results tell of a client",
    "server saw": "the most that reached the server unprotected: single clients' updates, means "
    "over several clients, or nothing",
    "group": "the group of clients with which a client shared its model at the end",
    "true group": "the group that the data were made with",
    "alone": "the score of a model trained on the client's own data only",
    "over alone": "the judged score less that of training alone",
}

# Errors that damaged files cause, or notes of another version or method.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def value(found: float | None, by: str) -> str:
    """A headline score with its unit.

    >>> value(0.8861, "accuracy"), value(0.5, "r2"), value(None, "r2")
    ('88.6 %', '0.500', '–')
    """
    return score(found, by) + (" %" if by == "accuracy" and found is not None else "")


def change(found: float, by: str) -> str:
    """A difference of two headline scores.

    >>> change(0.031, "accuracy"), change(-0.2, "r2")
    ('+3.1 points', '-0.200')
    """
    text = f"{100 * found:+.1f}" if by == "accuracy" else f"{found:+.3f}"
    text = text if float(text) else text.replace("-", "+")  # rounding must not turn 0 into a loss
    return f"{text} points" if by == "accuracy" else text


def count(number: int, what: str, many: str = "") -> str:
    """A number with its noun, in the singular or the plural.

    >>> count(1, "client"), count(3, "reply", "replies")
    ('1 client', '3 replies')
    """
    return f"{number} {what if number == 1 else many or what + 's'}"


def word(by: str) -> str:
    """The name of the headline score in a sentence."""
    return {"accuracy": "accuracy", "r2": "R²"}.get(by, by)


def duration(found: float) -> str:
    """A length of time in words.

    >>> duration(3.21), duration(75), duration(7300)
    ('3.2 s', '1 min 15 s', '2 h 1 min')
    >>> duration(0.0357), duration(0.0042), duration(0)
    ('36 ms', '4.2 ms', '0.0 s')
    """
    if 0 < found < 0.1:
        return f"{1000 * found:.{0 if found >= 0.01 else 1}f} ms"
    if found < 60:
        return f"{found:.1f} s"
    whole = round(found)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# --- one run --------------------------------------------------------------------------------------


def outcome(reading: Reading) -> list[str]:
    """The outcome of a run in a few sentences, the most important first."""
    lines: list[str] = []
    parts = (_reached, _state, _warned, _worst, _alone, _groups, grouping, _newcomers, _cost, _seen)
    for part in parts:
        try:
            lines += part(reading)
        except DAMAGE:
            continue  # the page lists separately what could not be read
    return lines


def _reached(reading: Reading) -> list[str]:
    done = len(reading.rounds)
    members = sum(g is not None for g in reading.groups) or len(reading.names)
    run = f"{reading.method} with {count(members, 'client')}" if members else reading.method
    by = reading.judged_by
    scores = [(t, _at_end(reading, t)) for t in ("received", "adapted")]
    values = [f"{value(v, by)} {t}" for t, v in scores if v is not None]
    if not values:
        return [f"{run}: {count(done, 'round')} completed, none of them scored."]
    mean = " on average over the clients' own test data" if len(reading.names) != 1 else ""
    text = f"{run} reached {word(by)} {' and '.join(values)} after {count(done, 'round')}{mean}."
    if reading.headline == "adapted":
        return [text, f"{reading.method} is judged after adapting, and so is its worst client."]
    return [text]


def _at_end(reading: Reading, title: str) -> float | None:
    scores = reading.result.get(title)
    last = number(scores.get(reading.judged_by)) if isinstance(scores, Mapping) else None
    if last is not None:
        return last
    points = curve(reading.rounds, title, reading.judged_by)
    return points[-1][1] if points else None


def _state(reading: Reading) -> list[str]:
    done, planned = len(reading.rounds), reading.planned
    if reading.status == RUNNING:
        are = "round is" if planned == 1 else "rounds are"
        return [f"It is running: {done} of {planned} {are} completed, so nothing here is final."]
    if reading.status == STOPPED:
        return [
            f"It did not finish: it was stopped or failed after {done} of "
            f"{count(planned, 'round')}, and can be resumed. This page shows the run up to then."
        ]
    why = str(reading.result.get("stopped") or "")
    if why:
        return [f"It ended early, after {count(done, 'round')}: {why.rstrip('.')}."]
    return []


def _warned(reading: Reading) -> list[str]:
    return [f"Warning: {text.rstrip('.')}." for text in reading.warnings]


def _worst(reading: Reading) -> list[str]:
    title, by = reading.headline, reading.judged_by
    lowest = worst(reading, title) or worst(reading, "received")
    if lowest is None or len(reading.names) < 2:
        return []
    name, low = lowest
    scores = [v for _, v in scores_of(reading, title) or scores_of(reading, "received")]
    equal = [v for v in scores if v - low < 1e-9]
    if len(equal) == len(scores):
        if len(scores) == 1:
            return [f"The only client with a score, {name}, has {value(low, by)}."]
        return [f"All {len(scores)} clients have {value(low, by)}."]
    others = f" and {count(len(equal) - 1, 'other')}" if len(equal) > 1 else ""
    return [f"The lowest score is {value(low, by)}, of {name}{others}."]


def _alone(reading: Reading) -> list[str]:
    try:
        gained = gains(reading)
    except ConfigError:
        return []
    by = reading.judged_by
    mean = sum(g for _, g in gained) / len(gained)
    better, worse = sum(g > 0 for _, g in gained), sum(g < 0 for _, g in gained)
    return [
        f"Compared with training alone, clients gain {change(mean, by)} on average: {better} of "
        f"{len(gained)} are better off and {worse} worse off."
    ]


def _groups(reading: Reading) -> list[str]:
    sizes = Counter(str(g) for g in reading.groups if g is not None)
    if not sizes:
        return []
    if len(sizes) == 1 and reading.grouping:
        return []  # the sentence about the grouping says so, and why
    if len(sizes) == 1:
        ended = "ended" if reading.status == FINISHED else "are"
        return [f"All clients {ended} in one group."] if sizes.total() > 1 else []
    lone = sum(n == 1 for n in sizes.values())
    if lone == len(sizes):
        return [f"Each of the {len(sizes)} clients is in a group of its own."]
    singles = f" ({lone} with only one client)" if lone else ""
    index = agreement_with_truth(reading)
    agreement_text = "" if index is None else f" {_agreeing(index)}"
    largest = max(sizes.values())
    known = {"oracle", "known-groups"} & set(reading.method.split("+"))
    verb, members = "was given" if known else "found", count(largest, "client")
    return [f"It {verb} {len(sizes)} groups{singles}, the largest with {members}.{agreement_text}"]


def grouping(reading: Reading) -> list[str]:
    """How the run found its groups, how certain they are, and which clients are between groups."""
    result = reading.grouping
    between = between_groups(result, _called(reading))
    parts = (result.get("sentence"), how_sure(result), between, own_weight(result))
    text = " ".join(str(part) for part in parts if part)
    return [text] if text else []


def _called(reading: Reading) -> Callable[[int], str] | None:
    """The names of clients by number; None if they only have numbers."""
    names = reading.names
    if all(name == f"client {c}" for c, name in enumerate(names)):
        return None
    return lambda c: names[c] if c < len(names) else f"client {c}"


def agreement_with_truth(reading: Reading) -> float | None:
    """The adjusted Rand index of the last groups and the true groups, where these are known."""
    from coterie.results.rows import agreement

    true, groups = reading.data.get("groups") or [], reading.groups
    rows = [
        {"group": str(g), "true_group": str(t)}
        for g, t in zip(groups, true, strict=False)
        if g is not None
    ]
    return agreement(rows) if rows else None


def _agreeing(index: float) -> str:
    if index > 1 - 1e-9:
        return "They are exactly the true groups."
    return f"Their agreement with the true groups is {index:.2f} (1 is perfect, 0 is chance)."


def _newcomers(reading: Reading) -> list[str]:
    newcomers = reading.result.get("newcomers")
    if not isinstance(newcomers, Mapping) or not newcomers.get("clients"):
        return []
    by = reading.judged_by
    joined = count(len(newcomers["clients"]), "client")
    both = {"received": newcomers.get("received"), "adapted": newcomers.get("adapted")}
    scores = [(t, number((own or {}).get(by))) for t, own in both.items()]
    values = [f"{value(v, by)} {t}" for t, v in scores if v is not None]
    return [f"{joined} joined at the end, with {' and '.join(values) or 'no score'}."]


def _cost(reading: Reading) -> list[str]:
    moved, clock = amount_spent(reading, at_bytes), amount_spent(reading, at_seconds)
    if moved is None:
        return []
    timed = "" if clock is None else f" and {duration(clock)} of simulated time"
    wasted = _wasted(reading)
    waste = f"; another {size(wasted)} were wasted" if wasted else ""
    probes = probing_cost(reading.grouping)
    return [
        f"It cost {size(moved)} (downloads and uploads together){timed}{waste}."
        + f" {probes}" * bool(probes)
    ]


def _wasted(reading: Reading) -> float:
    totals = dict((reading.rounds[-1].get("total_wasted") if reading.rounds else None) or {})
    return sum(number(v) or 0.0 for v in totals.values())


def _seen(reading: Reading) -> list[str]:
    exposed, promised = reading.result.get("exposure"), reading.result.get("privacy")
    lines = []
    if isinstance(exposed, Mapping):
        lines.append(_safely_said(exposed))
    eps = number(promised.get("epsilon")) if isinstance(promised, Mapping) else None
    if eps is not None and isinstance(promised, Mapping):
        delta = number(promised.get("delta"))
        lines.append(f"Privacy: ε = {eps:.3g}" + (f" at δ = {delta:.2g}." if delta else "."))
    elif reading.rounds and isinstance(reading.rounds[-1].get("privacy"), Mapping):
        so_far = number(reading.rounds[-1]["privacy"].get("epsilon"))
        if so_far is not None:
            lines.append(f"Privacy so far: ε ≤ {so_far:.3g}.")
    return [text for text in lines if text]


def _safely_said(seen: Mapping[str, Any]) -> str:
    try:
        return " ".join(sentences(seen)[:2])
    except DAMAGE:
        return ""  # a run of an older version


def rose(points: Sequence[tuple[float, float]], what: str, by: str) -> str:
    """The start of a sentence about how a score changed from its first point to its last."""
    (first, start), (last, end) = points[0], points[-1]
    if len(points) == 1:
        return f"{what} is {value(end, by)} in round {first:.0f}, the only round that was scored"
    verb = "rose" if end - start > 1e-9 else "fell" if start - end > 1e-9 else "stayed"
    if verb == "stayed":
        return f"{what} is {value(end, by)} in round {last:.0f}, as in round {first:.0f}"
    return (
        f"{what} {verb} from {value(start, by)} in round {first:.0f} to {value(end, by)} in round "
        f"{last:.0f}"
    )


def noted_round(event: Event) -> str:
    """The time of an event, in words."""
    return "before round 1" if event.get("event") == "init" else f"in round {event['round']}"
