"""What is to be seen where several runs are drawn together, with the numbers that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.report.figures.clients import quarters, scores_of
from coterie.report.figures.compared import Kind, alike, final, kinds_of, spent
from coterie.report.figures.scores import AXES
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import seconds, value, word
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


def _first(told: Sequence[str], between: str = ", ") -> str:
    rest = len(told) - MOST
    return between.join(told[:MOST]) + (f" and {rest} more" if rest > 0 else "")


def _seeds(kinds: Sequence[Kind]) -> str:
    several = any(len(k.runs) > 1 for k in kinds)
    return " Lines are means over seeds, bands from the lowest to the highest." if several else ""
