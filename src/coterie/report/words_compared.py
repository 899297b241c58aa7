"""Several runs in words: which is best at what, at which cost, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.report.answers import listed, one_sample
from coterie.report.compared_runs import ComparedRuns, compared_runs
from coterie.report.figures.clients import worst
from coterie.report.figures.compared import KindOfRun, alike, amount_spent, final, kinds_of
from coterie.report.figures.scores import at_bytes, at_seconds
from coterie.report.reading import RUNNING, STOPPED, Reading
from coterie.report.tables import size
from coterie.report.words import duration, value

_TIE = 0.001  # scores that differ by less are equal
_MOST_SETTINGS = 4  # settings whose answers are in the headline


def headline_compared(readings: Sequence[Reading], found: ComparedRuns | None = None) -> list[str]:
    """The sentences above a comparison: which method, was it worth it, who loses, limits."""
    if not readings:
        return []
    found = found or compared_runs(readings)
    runs = alike(readings)[1]
    kinds = kinds_of(runs)
    lines = []
    for answer in found.answers[:_MOST_SETTINGS]:
        before = f"{answer.setting}: " if answer.setting else ""
        lines += [f"{before}{text}" for text in answer.sentences]
    if more := len(found.answers) - _MOST_SETTINGS:
        lines += [f"The table has {more} more settings."] if more > 0 else []
    low = {k.title: mean([_lowest(r) for r in k.runs]) for k in kinds if not k.reference}
    lowest = {title: v for title, v in low.items() if v is not None}
    if len(lowest) > 1 and len(found.blocks) == 1:
        text = _best("has the best worst client", "have the best worst clients", lowest, found.by)
        if note := one_sample(found.rows, found.by):
            text += f" {note[:1].upper()}{note[1:]}."
        lines.append(text)
    lines += _cheapest(kinds, found.by) + _fastest(kinds)
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


def _best(does: str, do: str, scores: Mapping[str, float], by: str) -> str:
    top = max(scores.values())
    first = [title for title, v in scores.items() if top - v < _TIE]
    rest = {t: v for t, v in scores.items() if t not in first}
    if not rest:
        return f"All {len(scores)} are equal for the worst client: {value(top, by)}."
    second = max(rest, key=lambda t: rest[t])
    after = f", followed by {second} with {value(rest[second], by)}"
    verb = does if len(first) == 1 else do
    return f"{listed(first)} {verb}, {value(top, by)}{after}."


def _cheapest(kinds: Sequence[KindOfRun], by: str) -> list[str]:
    scores = {k.title: mean([final(r) for r in k.runs]) for k in kinds}
    moved = {k.title: mean([amount_spent(r, at_bytes) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in moved.items() if v is not None}
    sending = {title: v for title, v in known.items() if v > 0}
    if len(sending) < 2:
        return []
    least, most = min(sending, key=lambda t: sending[t]), max(sending, key=lambda t: sending[t])
    nothing = [title for title, v in known.items() if v == 0]
    sends = "transfers" if len(nothing) == 1 else "transfer"
    silent = f"{listed(nothing)} {sends} nothing; " if nothing else ""
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
    others = [r.name for r in readings if not any(r is run for run in runs)]
    if others:
        lines.append(f"Not compared, since they are judged by another score: {listed(others)}.")
    if text := judged_after(kinds):
        lines.append(text)
    going = [r.name for r in runs if r.status == RUNNING]
    if going:
        lines.append(f"Still running: {listed(going)}.")
    stopped = [r.name for r in runs if r.status == STOPPED]
    if stopped:
        lines.append(f"Not finished: {listed(stopped)}.")
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
    return f"Judged after adapting, including {their}: {listed(adapting)}."
