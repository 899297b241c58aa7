"""What is to be seen where several runs are drawn together, with the numbers that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.report.figures.clients import quarters, scores_of
from coterie.report.figures.compared import Kind, alike, final, kinds_of, spent
from coterie.report.figures.compared_bars import Timed, timed, varied
from coterie.report.figures.scores import AXES
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import count, seconds, value, word
from coterie.report.words_compared import mean

MOST = 6  # runs whose numbers are said; pictures and tables have the rest


def lines(readings: Sequence[Reading], against: str = "rounds") -> str:
    """Of the score against rounds, bytes or seconds: where each ends."""
    by, runs = alike(readings)
    kinds = kinds_of(runs)
    ends = {k.title: mean([final(r) for r in k.runs]) for k in kinds}
    known = {title: v for title, v in ends.items() if v is not None}
    best = sorted(known, key=lambda t: -known[t])
    if against == "rounds":
        told = [f"{title} {value(known[title], by)}" for title in best]
        return f"Mean {word(by)} of clients at the end: {_first(told)}.{_seeds(kinds)}"
    amount: Callable[[float], str] = size if against == "bytes" else seconds
    cost = {k.title: mean([spent(r, AXES[against][0]) for r in k.runs]) for k in kinds}
    told = [
        f"{title} {value(known[title], by)} after {amount(moved)}"
        for title in best
        if (moved := cost[title]) is not None
    ]
    what = "all that was sent, down and up" if against == "bytes" else "the simulated clock"
    return f"The same against {what}: {_first(told)}."


def clients(readings: Sequence[Reading]) -> str:
    """Of clients side by side: the worst and the median of each run."""
    by, runs = alike(readings)
    kinds = kinds_of(runs)
    told = []
    for kind in kinds:
        scores = [[v for _, v in scores_of(r, r.headline)] for r in kind.runs]
        ends = [(min(own), max(own), quarters(own)[1]) for own in scores if own]
        if ends:
            low, high, middle = (sum(each) / len(ends) for each in zip(*ends, strict=True))
            text = f"{kind.title} {value(low, by)} to {value(high, by)}, median {value(middle, by)}"
            told.append((low, text))
    told.sort(key=lambda pair: -pair[0])
    several = " (means over seeds)" if any(len(k.runs) > 1 for k in kinds) else ""
    return (
        "Each dot is a client; the box holds the middle half of them, its line is the median. "
        f"From the best worst client on{several}: {_first([text for _, text in told], '; ')}."
    )


def cost(readings: Sequence[Reading]) -> str:
    """Of score against bytes: who is not beaten in both by another."""
    by, runs = alike(readings)
    found = []
    for kind in kinds_of(runs):
        moved, got = (
            mean([spent(r, AXES["bytes"][0]) for r in kind.runs]),
            mean([final(r) for r in kind.runs]),
        )
        if moved is not None and got is not None:
            found.append((moved, got, kind.title))
    front = [
        one
        for one in sorted(found)
        if not any(o[0] <= one[0] and o[1] >= one[1] and o[:2] != one[:2] for o in found)
    ]
    told = [f"{title} ({value(got, by)} for {size(moved)})" for moved, got, title in front]
    return f"Up and left is better. No other is both better and cheaper than: {_first(told)}."


def total_seconds(readings: Sequence[Reading]) -> str:
    """Of score and seconds: what the whole run took, and what a round did."""
    by = alike(readings)[0]
    title, rows = timed(readings)
    told = []
    for row in sorted(rows, key=lambda row: row.total):
        parts = [f"{seconds(v)} {part}" for part, v in row.parts.items() if v]
        full = f", {value(mean(row.full), by)} with all layers" if row.full else ""
        each = seconds(sum(row.a_round.values()))
        told.append(
            f"{row.kind.title} {value(mean(row.scores), by)}{full}, {seconds(row.total)} in all "
            f"({', '.join(parts)}; {each} a round)"
        )
    most = 3 if len(told) > 4 else 4
    more = f" and {len(told) - most} more" if len(told) > most else ""
    text = f"The {title} clock, the fastest first: {'; '.join(told[:most])}{more}."
    return text.replace("The real clock", "Seconds of this machine") + _resting(rows, by)


def _resting(rows: Sequence[Timed], by: str) -> str:
    """What resting layers do to the score, where they do anything."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        end, full = mean(row.scores), mean(row.full)
        if end is None or full is None or value(end, by) == value(full, by):
            continue
        ways.setdefault("higher" if end > full else "lower", []).append(row.kind.title)
    told = [f"{way} with {_first(titles)}" for way, titles in ways.items()]
    text = " While layers rest, clients use their own; by the end this scores"
    return f"{text} {', '.join(told)}." if told else ""


def parameter(readings: Sequence[Reading]) -> str:
    """Of score and groups over a parameter: where the score is highest."""
    found = varied(readings)
    every = {f"{v:g}": own for v, own in found.values.items()} | dict(found.named)
    best = max(every, key=lambda v: mean(every[v][0]) or 0.0)
    told = []
    for name, (scores, groups) in every.items():
        middle = sum(groups) / len(groups)
        many = count(groups[0], "group") if len(set(groups)) == 1 else f"{middle:.1f} groups"
        told.append(f"{name}: {value(mean(scores), found.by)}, {many}")
    seeds = max(len(scores) for scores, _ in every.values())
    several = f" Means over up to {seeds} seeds; bands are their range." if seeds > 1 else ""
    return (
        f"{word(found.by).capitalize()} at the end and number of groups by {found.key} of "
        f"{found.method}. {_first(told, '; ')}. The highest is at {best}.{several}"
    )


def _first(told: Sequence[str], between: str = ", ") -> str:
    rest = len(told) - MOST
    return between.join(told[:MOST]) + (f" and {rest} more" if rest > 0 else "")


def _seeds(kinds: Sequence[Kind]) -> str:
    several = any(len(k.runs) > 1 for k in kinds)
    return " Lines are means over seeds, bands from the lowest to the highest." if several else ""
