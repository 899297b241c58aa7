"""Runs in words: headlines, and what is to be seen in each picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.channel.exposure import sentences
from coterie.errors import ConfigError
from coterie.report.figures.clients import gains, scores_of, worst
from coterie.report.figures.compared import spent
from coterie.report.figures.scores import at_bytes, at_seconds, curve
from coterie.report.figures.style import Event
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading, number
from coterie.report.tables import score, size
from coterie.results.findings import between_groups, how_sure, own_weight, probing_cost

# What a run's files can hold in place of what they should: notes may be damaged, or another's.
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
    return f"{100 * found:+.1f} points" if by == "accuracy" else f"{found:+.3f}"


def count(number: int, what: str, many: str = "") -> str:
    """So many of something.

    >>> count(1, "client"), count(3, "reply", "replies")
    ('1 client', '3 replies')
    """
    return f"{number} {what if number == 1 else many or what + 's'}"


def word(by: str) -> str:
    """What the headline score is called in a sentence."""
    return {"accuracy": "accuracy", "r2": "R²"}.get(by, by)


def seconds(found: float) -> str:
    """A length of time for people.

    >>> seconds(3.21), seconds(75), seconds(7300)
    ('3.2 s', '1 min 15 s', '2 h 1 min')
    >>> seconds(0.0357), seconds(0.0042), seconds(0)
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


def headline(reading: Reading) -> list[str]:
    """What a run came to, in a few sentences, the most important first."""
    found: list[str] = []
    parts = (_reached, _state, _warned, _worst, _alone, _groups, grouping, _newcomers, _cost, _seen)
    for part in parts:
        try:
            found += part(reading)
        except DAMAGE:
            continue  # the pages say apart from this what could not be read
    return found


def _reached(reading: Reading) -> list[str]:
    done = len(reading.rounds)
    members = sum(g is not None for g in reading.groups) or len(reading.names)
    who = f"{reading.method} with {count(members, 'client')}" if members else reading.method
    by = reading.judged_by
    scores = [(t, _at_end(reading, t)) for t in ("received", "adapted")]
    told = [f"{value(v, by)} {t}" for t, v in scores if v is not None]
    if not told:
        return [f"{who}: {count(done, 'round')} done, none of them scored."]
    mean = " on average over clients' own test data" if len(reading.names) != 1 else ""
    text = f"{who} reached {word(by)} {' and '.join(told)} after {count(done, 'round')}{mean}."
    if reading.headline == "adapted":
        return [text, f"{reading.method} is judged after adapting, by its worst client too."]
    return [text]


def _at_end(reading: Reading, title: str) -> float | None:
    own = reading.result.get(title)
    told = number(own.get(reading.judged_by)) if isinstance(own, Mapping) else None
    if told is not None:
        return told
    points = curve(reading.rounds, title, reading.judged_by)
    return points[-1][1] if points else None


def _state(reading: Reading) -> list[str]:
    done, planned = len(reading.rounds), reading.planned
    if reading.status == RUNNING:
        are = "round is" if planned == 1 else "rounds are"
        return [f"It is running: {done} of {planned} {are} done, so nothing here is final."]
    if reading.status == STOPPED:
        return [
            f"It did not finish: it was stopped or failed after {done} of "
            f"{count(planned, 'round')}, and can be resumed. What is shown is as of then."
        ]
    why = str(reading.result.get("stopped") or "")
    if why:
        return [f"It ended early, after {count(done, 'round')}: {why.rstrip('.')}."]
    return []


def _warned(reading: Reading) -> list[str]:
    return [f"Warning: {text.rstrip('.')}." for text in reading.warnings]


def _worst(reading: Reading) -> list[str]:
    title, by = reading.headline, reading.judged_by
    found = worst(reading, title) or worst(reading, "received")
    if found is None or len(reading.names) < 2:
        return []
    name, low = found
    own = [v for _, v in scores_of(reading, title) or scores_of(reading, "received")]
    level = [v for v in own if v - low < 1e-9]
    if len(level) == len(own):
        if len(own) == 1:
            return [f"The only client with a score, {name}, has {value(low, by)}."]
        return [f"All {len(own)} clients have {value(low, by)}."]
    also = f" and {count(len(level) - 1, 'other')}" if len(level) > 1 else ""
    verb = "are" if also else "is"
    return [f"Worst off {verb} {name}{also} with {value(low, by)}."]


def _alone(reading: Reading) -> list[str]:
    try:
        found = gains(reading)
    except ConfigError:
        return []
    by = reading.judged_by
    mean = sum(g for _, g in found) / len(found)
    better, worse = sum(g > 0 for _, g in found), sum(g < 0 for _, g in found)
    return [
        f"Against training alone clients gain {change(mean, by)} on average: {better} of "
        f"{len(found)} are better off, {worse} worse."
    ]


def _groups(reading: Reading) -> list[str]:
    sizes = Counter(str(g) for g in reading.groups if g is not None)
    if not sizes:
        return []
    if len(sizes) == 1 and reading.grouping:
        return []  # which says so, and why
    if len(sizes) == 1:
        ended = "ended" if reading.status == FINISHED else "are"
        return [f"All clients {ended} in one group."] if sizes.total() > 1 else []
    lone = sum(n == 1 for n in sizes.values())
    if lone == len(sizes):
        return [f"Each of the {len(sizes)} clients is in a group of its own."]
    alone = f", {lone} of them of one client" if lone else ""
    agreed = agreement_of(reading)
    like = "" if agreed is None else f" {_agreeing(agreed)}"
    largest = max(sizes.values())
    given = {"oracle", "known-groups"} & set(reading.method.split("+"))
    verb, most = "was given" if given else "found", count(largest, "client")
    return [f"It {verb} {len(sizes)} groups{alone}, the largest of {most}.{like}"]


def grouping(reading: Reading) -> list[str]:
    """How the run came to its groups, how sure they are, and who is between two of them."""
    told = reading.grouping
    who = between_groups(told, _called(reading))
    parts = (told.get("sentence"), how_sure(told), who, own_weight(told))
    text = " ".join(str(part) for part in parts if part)
    return [text] if text else []


def _called(reading: Reading) -> Callable[[int], str] | None:
    """What clients are called, if they have names of their own."""
    names = reading.names
    if all(name == f"client {c}" for c, name in enumerate(names)):
        return None
    return lambda c: names[c] if c < len(names) else f"client {c}"


def agreement_of(reading: Reading) -> float | None:
    """The adjusted Rand index of the last groups and the true ones, if these are known."""
    from coterie.results.rows import agreement

    true, groups = reading.data.get("groups") or [], reading.groups
    rows = [
        {"group": str(g), "true_group": str(t)}
        for g, t in zip(groups, true, strict=False)
        if g is not None
    ]
    return agreement(rows) if rows else None


def _agreeing(agreed: float) -> str:
    if agreed > 1 - 1e-9:
        return "They are exactly the true ones."
    return f"Their agreement with the true ones is {agreed:.2f} (1 is perfect, 0 is chance)."


def _newcomers(reading: Reading) -> list[str]:
    came = reading.result.get("newcomers")
    if not isinstance(came, Mapping) or not came.get("clients"):
        return []
    by = reading.judged_by
    joined = count(len(came["clients"]), "client")
    both = {"received": came.get("received"), "adapted": came.get("adapted")}
    scores = [(t, number((own or {}).get(by))) for t, own in both.items()]
    told = [f"{value(v, by)} {t}" for t, v in scores if v is not None]
    return [f"{joined} joined at the end, with {' and '.join(told) or 'no score'}."]


def _cost(reading: Reading) -> list[str]:
    moved, clock = spent(reading, at_bytes), spent(reading, at_seconds)
    if moved is None:
        return []
    timed = "" if clock is None else f" and {seconds(clock)} of simulated time"
    wasted = _wasted(reading)
    more = f"; {size(wasted)} more were wasted" if wasted else ""
    probes = probing_cost(reading.grouping)
    return [
        f"It cost {size(moved)} (down and up together){timed}{more}." + f" {probes}" * bool(probes)
    ]


def _wasted(reading: Reading) -> float:
    told = dict((reading.rounds[-1].get("total_wasted") if reading.rounds else None) or {})
    return sum(number(v) or 0.0 for v in told.values())


def _seen(reading: Reading) -> list[str]:
    seen, promised = reading.result.get("exposure"), reading.result.get("privacy")
    found = []
    if isinstance(seen, Mapping):
        found.append(_safely_said(seen))
    eps = number(promised.get("epsilon")) if isinstance(promised, Mapping) else None
    if eps is not None and isinstance(promised, Mapping):
        delta = number(promised.get("delta"))
        found.append(f"Privacy: ε = {eps:.3g}" + (f" at δ = {delta:.2g}." if delta else "."))
    elif reading.rounds and isinstance(reading.rounds[-1].get("privacy"), Mapping):
        so_far = number(reading.rounds[-1]["privacy"].get("epsilon"))
        if so_far is not None:
            found.append(f"Privacy so far: ε ≤ {so_far:.3g}.")
    return [text for text in found if text]


def _safely_said(seen: Mapping[str, Any]) -> str:
    try:
        return " ".join(sentences(seen)[:2])
    except DAMAGE:
        return ""  # of an older run


def rose(points: Sequence[tuple[float, float]], what: str, by: str) -> str:
    """How a score went from its first to its last point."""
    (first, start), (last, end) = points[0], points[-1]
    if len(points) == 1:
        return f"{what} is {value(end, by)} in round {first:.0f}, the only one that was scored"
    verb = "rose" if end - start > 1e-9 else "fell" if start - end > 1e-9 else "stayed"
    if verb == "stayed":
        return f"{what} is {value(end, by)} in round {last:.0f}, as in round {first:.0f}"
    return (
        f"{what} {verb} from {value(start, by)} in round {first:.0f} to {value(end, by)} in round "
        f"{last:.0f}"
    )


def noted_round(event: Event) -> str:
    """When an event was, in words."""
    return "before round 1" if event.get("event") == "init" else f"in round {event['round']}"
