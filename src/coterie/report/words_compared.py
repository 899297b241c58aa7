"""Several runs in words: which is best at what, at which cost, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.report.figures.clients import worst
from coterie.report.figures.compared import KindOfRun, alike, amount_spent, final, kinds_of
from coterie.report.figures.scores import at_bytes, at_seconds
from coterie.report.reading import RUNNING, STOPPED, Reading
from coterie.report.tables import size
from coterie.report.words import duration, value, word

_TIE = 0.001  # scores that differ by less are equal


def headline_compared(readings: Sequence[Reading]) -> list[str]:
    """The sentences above a comparison: which run is best at what, its cost, and the limits."""
    if not readings:
        return []
    by, runs = alike(readings)
    kinds = kinds_of(runs)
    scores = {k.title: mean([final(r) for r in k.runs]) for k in kinds}
    scored = {title: v for title, v in scores.items() if v is not None}
    lines = []
    if scored:
        lines.append(_best("reaches the highest", "reach the highest", scored, by, word(by)))
    low = {k.title: mean([_lowest(r) for r in k.runs]) for k in kinds}
    lowest = {title: v for title, v in low.items() if v is not None}
    if len(lowest) > 1:
        text = _best("has the best worst client", "have the best worst clients", lowest, by, "")
        several = any(len(k.runs) > 1 for k in kinds)
        lines.append(f"{text[:-1]} (means over seeds)." if several else text)
    lines += _cheapest(kinds, scores, by) + _fastest(kinds)
    lines += _caution(readings, runs, kinds)
    return lines


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known.

    >>> mean([1.0, None, 2.0])
    1.5
    """
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _lowest(reading: Reading) -> float | None:
    lowest = worst(reading, reading.headline)
    return None if lowest is None else lowest[1]


def _best(does: str, do: str, scores: Mapping[str, float], by: str, what: str) -> str:
    top = max(scores.values())
    first = [title for title, v in scores.items() if top - v < _TIE]
    scored = f"{what}, {value(top, by)}" if what else f"with {value(top, by)}"
    rest = {t: v for t, v in scores.items() if t not in first}
    if not rest:
        if len(scores) == 1:
            return f"{first[0]} {does} {scored}."
        return f"All {len(scores)} are equal: {value(top, by)}" + (
            f" {what}." if what else " for the worst client."
        )
    second = max(rest, key=lambda t: rest[t])
    after = f", followed by {second} with {value(rest[second], by)}"
    verb = does if len(first) == 1 else do
    return f"{_and(first)} {verb} {scored}{after}."


def _cheapest(kinds: Sequence[KindOfRun], scores: Mapping[str, float | None], by: str) -> list[str]:
    moved = {k.title: mean([amount_spent(r, at_bytes) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in moved.items() if v is not None}
    sending = {title: v for title, v in known.items() if v > 0}
    if len(sending) < 2:
        return []
    least, most = min(sending, key=lambda t: sending[t]), max(sending, key=lambda t: sending[t])
    nothing = [title for title, v in known.items() if v == 0]
    sends = "transfers" if len(nothing) == 1 else "transfer"
    silent = f"{_and(nothing)} {sends} nothing; " if nothing else ""
    if sending[most] < 1.02 * sending[least]:
        they = "the others" if nothing else "They"
        return [f"{silent}{they} transfer about the same, {size(sending[most])} each."]
    score = scores.get(least)
    reached = f" for {value(score, by)}" if score is not None else ""
    text = (
        f"{silent}{least} transfers the least{' of the others' if nothing else ''}, "
        f"{size(sending[least])}{reached}, and {most} the most, {size(sending[most])}."
    )
    return [text]


def _fastest(kinds: Sequence[KindOfRun]) -> list[str]:
    times = {k.title: mean([amount_spent(r, at_seconds) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in times.items() if v is not None}
    if len(known) < 2:
        return []
    first, last = min(known, key=lambda t: known[t]), max(known, key=lambda t: known[t])
    if known[last] < 1.02 * known[first]:
        return []
    return [
        f"By the simulated clock {first} takes the least time, {duration(known[first])}, and "
        f"{last} the most, {duration(known[last])}."
    ]


def _caution(
    readings: Sequence[Reading], runs: Sequence[Reading], kinds: Sequence[KindOfRun]
) -> list[str]:
    """Sentences about what limits the comparison."""
    lines = []
    seeds = {len(k.runs) for k in kinds}
    if seeds == {1} and len(kinds) > 1:
        one = runs[0].seed is not None and len({r.seed for r in runs}) == 1
        what = "All runs have the same seed" if one else "No method was run with several seeds"
        lines.append(f"{what}: small differences may be chance.")
    elif len(kinds) > 1:
        least, most = min(seeds), max(seeds)
        each = f"{least} seeds" if least == most else f"{least} to {most} seeds"
        lines.append(f"Scores are means over {each}.")
    others = [r.name for r in readings if not any(r is run for run in runs)]
    if others:
        lines.append(f"Not compared, since they are judged by another score: {_and(others)}.")
    if text := judged_after(kinds):
        lines.append(text)
    going = [r.name for r in runs if r.status == RUNNING]
    if going:
        lines.append(f"Still running: {_and(going)}.")
    stopped = [r.name for r in runs if r.status == STOPPED]
    if stopped:
        lines.append(f"Not finished: {_and(stopped)}.")
    lengths = {len(r.rounds) for r in runs if r.status not in (RUNNING, STOPPED)}
    if len(lengths) > 1:
        lines.append(f"The runs had between {min(lengths)} and {max(lengths)} rounds.")
    return lines


def judged_after(kinds: Sequence[KindOfRun]) -> str:
    """A sentence about the runs that are judged after adapting; "" if none or all of them are."""
    adapting = [k.title for k in kinds if any(r.headline == "adapted" for r in k.runs)]
    if not adapting or len(adapting) == len(kinds):
        return ""
    their = "its worst client" if len(adapting) == 1 else "their worst clients"
    return f"Judged after adapting, including {their}: {_and(adapting)}."


def _and(names: Sequence[str], limit: int = 6) -> str:
    """Names as a list in a sentence.

    >>> _and(["a", "b", "c"])
    'a, b and c'
    """
    shown = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
