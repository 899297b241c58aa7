"""Captions of the pictures of several runs, with the numbers that matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.report.answers import gainers
from coterie.report.figures.clients import quarters, scores_of
from coterie.report.figures.compared import (
    KindOfRun,
    alike,
    amount_spent,
    final,
    gains_of,
    ranked,
)
from coterie.report.figures.compared_bars import TimedScores, full_score, timed_scores, varied
from coterie.report.figures.scores import AXES
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import count, duration, value, word
from coterie.report.words_compared import mean
from coterie.results.findings import rested
from coterie.results.rows import gained

MOST = 6  # runs whose numbers are given; pictures and tables have the rest


def lines(readings: Sequence[Reading], against: str = "rounds") -> str:
    """The caption of the score against rounds, bytes or seconds: each run's last score."""
    by, runs = alike(readings)
    kinds = ranked(runs)
    ends = {k.title: mean([final(r) for r in k.runs]) for k in kinds}
    scored = {title: v for title, v in ends.items() if v is not None}
    best = sorted(scored, key=lambda t: -scored[t])
    if against == "rounds":
        entries = [f"{title} {value(scored[title], by)}" for title in best]
        text = f"Mean {word(by)} of clients at the end: {_first(entries)}.{_seeds(kinds)}"
        return text + _with_all_layers(kinds, by)
    amount: Callable[[float], str] = size if against == "bytes" else duration
    cost = {k.title: mean([amount_spent(r, AXES[against][0]) for r in k.runs]) for k in kinds}
    entries = [
        f"{title} {value(scored[title], by)} after {amount(moved)}"
        for title in best
        if (moved := cost[title]) is not None
    ]
    what = "all bytes, downloads and uploads" if against == "bytes" else "the simulated clock"
    return f"The score against {what}: {_first(entries)}.{_with_all_layers(kinds, by)}"


def _with_all_layers(kinds: Sequence[KindOfRun], by: str) -> str:
    """The scores of the last full rounds, where clients' own layers took part in those above."""
    entries = []
    for kind in kinds:
        ended = [r for r in kind.runs if r.rounds and rested(r.rounds)[-1]]
        full = mean([full_score(r) for r in kind.runs])
        if ended and full is not None:
            entries.append(f"{kind.title} {value(full, by)}")
    if not entries:
        return ""
    return (
        " At the end some layers rested, and clients were scored with their own; in the last round "
        f"with all layers: {_first(entries)}."
    )


def clients(readings: Sequence[Reading]) -> str:
    """The caption of clients side by side: each run's worst, best and median client."""
    by, runs = alike(readings)
    kinds = ranked(runs)
    entries = []
    for kind in kinds:
        scores = [v for r in kind.runs for _, v in scores_of(r, r.headline)]
        if scores:
            low, high, middle = min(scores), max(scores), quarters(scores)[1]
            text = f"{kind.title} {value(low, by)} to {value(high, by)}, median {value(middle, by)}"
            entries.append((low, text))
    entries.sort(key=lambda pair: -pair[0])
    return (
        f"{_dots(kinds)}; the box covers the middle half, and its line is the median. "
        f"By the lowest dot: {_first([text for _, text in entries], '; ')}."
    )


def _dots(kinds: Sequence[KindOfRun]) -> str:
    """What a dot is: with several seeds, there is one for each client of each seed."""
    most = max((len(k.runs) for k in kinds), default=1)
    if most == 1:
        return "Each dot is a client"
    return f"Each dot is a client in one of {most} seeds, which have different clients"


def gains(readings: Sequence[Reading]) -> str:
    """The caption of gains over training alone: who gains and loses by each method."""
    by = alike(readings)[0]
    rows = gains_of(readings)
    entries = []
    for kind, dots in rows:
        row, runs = gained([gain for *_, gain in dots]), len(kind.runs)
        for key in ("better", "as_good", "worse_off"):
            row[key] /= runs
        entries.append(f"{kind.title}: {gainers(row, by)}")
    several = any(len(kind.runs) > 1 for kind, _ in rows)
    means = " (numbers of clients are means over seeds)" * several
    return (
        f"{_dots([kind for kind, _ in rows])}: right of the line it is better off than if it had "
        f"trained alone, left of it worse. {_first(entries, '; ')}{means}."
    )


def cost(readings: Sequence[Reading]) -> str:
    """The caption of score against bytes: the runs that no other beats in both."""
    by, runs = alike(readings)
    kinds, points = ranked(runs), []
    for kind in [k for k in kinds if not k.reference]:
        moved, score = (
            mean([amount_spent(r, AXES["bytes"][0]) for r in kind.runs]),
            mean([final(r) for r in kind.runs]),
        )
        if moved is not None and score is not None:
            points.append((moved, score, kind.title))
    if not points:
        return "Up and to the left is better."
    front = [
        point
        for point in sorted(points)
        if not any(o[0] <= point[0] and o[1] >= point[1] and o[:2] != point[:2] for o in points)
    ]
    entries = [f"{title} ({value(score, by)} for {size(moved)})" for moved, score, title in front]
    return (
        "Up and to the left is better. No other usable method is both better and cheaper than "
        f"{_first(entries)}.{_with_all_layers(kinds, by)}"
    )


def total_seconds(readings: Sequence[Reading]) -> str:
    """The caption of score and seconds: the time of a whole run, and of a round."""
    by = alike(readings)[0]
    title, rows = timed_scores(readings)
    entries = []
    for row in sorted(rows, key=lambda row: row.total):
        parts = [f"{duration(v)} {part}" for part, v in row.parts.items() if v]
        full = f", {value(mean(row.full), by)} with all layers" if row.full else ""
        per_round = duration(sum(row.a_round.values()))
        entries.append(
            f"{row.kind.title} {value(mean(row.scores), by)}{full}, {duration(row.total)} in total "
            f"({', '.join(parts)}; {per_round} a round)"
        )
    most = 3 if len(entries) > 4 else 4
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    text = f"By the {title} clock, the fastest first: {'; '.join(entries[:most])}{more}."
    return text.replace("By the real clock", "In seconds of this machine") + _resting(rows, by)


def _resting(rows: Sequence[TimedScores], by: str) -> str:
    """A sentence about how skipped layers change the score, where they do."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        end, full = mean(row.scores), mean(row.full)
        if end is None or full is None or value(end, by) == value(full, by):
            continue
        ways.setdefault("higher" if end > full else "lower", []).append(row.kind.title)
    changes = [f"{way} with {_first(titles)}" for way, titles in ways.items()]
    text = " In rounds with skipped layers, clients use their own; at the end this scores"
    return f"{text} {', '.join(changes)}." if changes else ""


def parameter(readings: Sequence[Reading]) -> str:
    """The caption of score and groups over a parameter: where the score is highest."""
    sweep = varied(readings)
    every = {f"{v:g}": values for v, values in sweep.values.items()} | dict(sweep.named)
    best = max(every, key=lambda v: mean(every[v][0]) or 0.0)
    entries = []
    for name, (scores, groups) in every.items():
        middle = sum(groups) / len(groups)
        many = count(groups[0], "group") if len(set(groups)) == 1 else f"{middle:.1f} groups"
        entries.append(f"{name}: {value(mean(scores), sweep.by)}, {many}")
    seeds = max(len(scores) for scores, _ in every.values())
    several = f" Means over up to {seeds} seeds; bands are their range." if seeds > 1 else ""
    return (
        f"{word(sweep.by).capitalize()} at the end and number of groups by {sweep.key} of "
        f"{sweep.method}. {_first(entries, '; ')}. The score is highest at {best}.{several}"
    )


def _first(entries: Sequence[str], separator: str = ", ") -> str:
    rest = len(entries) - MOST
    return separator.join(entries[:MOST]) + (f" and {rest} more" if rest > 0 else "")


def _seeds(kinds: Sequence[KindOfRun]) -> str:
    several = any(len(k.runs) > 1 for k in kinds)
    return " Lines are means over seeds, bands from the lowest to the highest." if several else ""
