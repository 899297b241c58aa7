"""Runs in words: headlines, and what is to be seen in each picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.door.exposure import sentences
from coterie.errors import ConfigError
from coterie.report.figures.clients import gains, scores_of, worst
from coterie.report.figures.compared import Kind, alike, final, kinds_of, spent
from coterie.report.figures.scores import at_bytes, at_seconds, curve
from coterie.report.figures.style import Event
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading, number
from coterie.report.tables import score, size

# What a run's files can hold in place of what they should: notes may be damaged, or another's.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
_TIE = 0.001  # of a score: less than that between two runs is no difference


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
    for part in (_reached, _state, _worst, _alone, _groups, _newcomers, _cost, _seen):
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
    return [
        f"It found {len(sizes)} groups{alone}, the largest of {count(largest, 'client')}.{like}"
    ]


def agreement_of(reading: Reading) -> float | None:
    """The adjusted Rand index of the last groups and the true ones, if these are known."""
    from coterie.run.rows import agreement

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
    scores = [(t, number((came.get(t) or {}).get(by))) for t in ("received", "adapted")]
    told = [f"{value(v, by)} {t}" for t, v in scores if v is not None]
    return [f"{joined} joined at the end, with {' and '.join(told) or 'no score'}."]


def _cost(reading: Reading) -> list[str]:
    moved, clock = spent(reading, at_bytes), spent(reading, at_seconds)
    if moved is None:
        return []
    timed = "" if clock is None else f" and {seconds(clock)} of simulated time"
    wasted = _wasted(reading)
    more = f"; {size(wasted)} more were wasted" if wasted else ""
    return [f"It cost {size(moved)} (down and up together){timed}{more}."]


def _wasted(reading: Reading) -> float:
    told = (reading.rounds[-1].get("total_wasted") if reading.rounds else None) or {}
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


# --- several runs ---------------------------------------------------------------------------------


def headline_compared(readings: Sequence[Reading]) -> list[str]:
    """Who is best at what, and at which cost; how far that can be trusted."""
    if not readings:
        return []
    by, runs = alike(readings)
    kinds = kinds_of(runs)
    scores = {k.title: mean([final(r) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in scores.items() if v is not None}
    found = []
    if known:
        found.append(_best("reaches the highest", "reach the highest", known, by, word(by)))
    low = {k.title: mean([_lowest(r) for r in k.runs]) for k in kinds}
    lowest = {title: v for title, v in low.items() if v is not None}
    if len(lowest) > 1:
        text = _best("has the best worst client", "have the best worst clients", lowest, by, "")
        several = any(len(k.runs) > 1 for k in kinds)
        found.append(f"{text[:-1]} (means over seeds)." if several else text)
    found += _cheapest(kinds, scores, by) + _fastest(kinds)
    found += _caution(readings, runs, kinds)
    return found


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is there.

    >>> mean([1.0, None, 2.0])
    1.5
    """
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def _lowest(reading: Reading) -> float | None:
    found = worst(reading, reading.headline)
    return None if found is None else found[1]


def _best(does: str, do: str, found: Mapping[str, float], by: str, what: str) -> str:
    top = max(found.values())
    first = [title for title, v in found.items() if top - v < _TIE]
    scored = f"{what}, {value(top, by)}" if what else f", with {value(top, by)}"
    scored = scored if what else scored.removeprefix(", ")
    rest = {t: v for t, v in found.items() if t not in first}
    if not rest:
        if len(found) == 1:
            return f"{first[0]} {does} {scored}."
        return f"There is no difference between the {len(found)} in this: {value(top, by)}" + (
            f" {what}." if what else " for the worst client."
        )
    second = max(rest, key=lambda t: rest[t])
    after = f"; then {second} with {value(rest[second], by)}"
    verb = does if len(first) == 1 else do
    return f"{_and(first)} {verb} {scored}{after}."


def _cheapest(kinds: Sequence[Kind], scores: Mapping[str, float | None], by: str) -> list[str]:
    moved = {k.title: mean([spent(r, at_bytes) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in moved.items() if v is not None}
    sending = {title: v for title, v in known.items() if v > 0}
    if len(sending) < 2:
        return []
    least, most = min(sending, key=lambda t: sending[t]), max(sending, key=lambda t: sending[t])
    nothing = [title for title, v in known.items() if v == 0]
    sends = "sends" if len(nothing) == 1 else "send"
    silent = f"{_and(nothing)} {sends} nothing; " if nothing else ""
    if sending[most] < 1.02 * sending[least]:
        they = "the others" if nothing else "They"
        return [f"{silent}{they} cost about the same, {size(sending[most])} each."]
    got = scores.get(least)
    reached = f" for {value(got, by)}" if got is not None else ""
    text = (
        f"{silent}{least} sends {'the least of the others' if nothing else 'least'}, "
        f"{size(sending[least])}{reached}, {most} most, {size(sending[most])}."
    )
    return [text]


def _fastest(kinds: Sequence[Kind]) -> list[str]:
    taken = {k.title: mean([spent(r, at_seconds) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in taken.items() if v is not None}
    if len(known) < 2:
        return []
    first, last = min(known, key=lambda t: known[t]), max(known, key=lambda t: known[t])
    if known[last] < 1.02 * known[first]:
        return []
    return [
        f"By the simulated clock {first} takes least, {seconds(known[first])}, and {last} most, "
        f"{seconds(known[last])}."
    ]


def _caution(
    readings: Sequence[Reading], runs: Sequence[Reading], kinds: Sequence[Kind]
) -> list[str]:
    """What keeps these sentences from being more than they are."""
    found = []
    seeds = {len(k.runs) for k in kinds}
    if seeds == {1} and len(kinds) > 1:
        one = runs[0].seed is not None and len({r.seed for r in runs}) == 1
        what = "All of this is on one seed" if one else "None of them was run on several seeds"
        found.append(f"{what}: small differences may be chance.")
    elif len(kinds) > 1:
        least, most = min(seeds), max(seeds)
        each = f"{least} seeds" if least == most else f"{least} to {most} seeds"
        found.append(f"Scores are means over {each}.")
    others = [r.name for r in readings if not any(r is own for own in runs)]
    if others:
        found.append(f"Judged by another score, and not compared: {_and(others)}.")
    if text := judged_after(kinds):
        found.append(text)
    going = [r.name for r in runs if r.status == RUNNING]
    if going:
        found.append(f"Still running: {_and(going)}.")
    torn = [r.name for r in runs if r.status == STOPPED]
    if torn:
        found.append(f"Not finished: {_and(torn)}.")
    lengths = {len(r.rounds) for r in runs if r.status not in (RUNNING, STOPPED)}
    if len(lengths) > 1:
        found.append(f"They had between {min(lengths)} and {max(lengths)} rounds.")
    return found


def judged_after(kinds: Sequence[Kind]) -> str:
    """Which of several are judged after adapting, while others are not; "" if none or all are."""
    found = [k.title for k in kinds if any(r.headline == "adapted" for r in k.runs)]
    if not found or len(found) == len(kinds):
        return ""
    their = "its worst client" if len(found) == 1 else "their worst clients"
    return f"Judged after adapting, by {their} too: {_and(found)}."


def _and(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence.

    >>> _and(["a", "b", "c"])
    'a, b and c'
    """
    told = list(names[:most])
    if len(names) > most:
        return f"{', '.join(told)} and {len(names) - most} more"
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


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
