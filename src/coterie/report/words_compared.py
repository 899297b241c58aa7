"""Several runs in words: who is best at what, at which cost, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.report.figures.clients import worst
from coterie.report.figures.compared import Kind, alike, final, kinds_of, spent
from coterie.report.figures.scores import at_bytes, at_seconds
from coterie.report.reading import RUNNING, STOPPED, Reading
from coterie.report.tables import size
from coterie.report.words import seconds, value, word

_TIE = 0.001  # of a score: less than that between two runs is no difference


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
    scored = f"{what}, {value(top, by)}" if what else f"with {value(top, by)}"
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
