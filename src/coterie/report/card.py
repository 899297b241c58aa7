"""A run as a small HTML card for notebooks, without scripts and style sheets."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.report.numbers import bytes_so_far, clock, privacy_loss, score_with_unit, scored
from coterie.report.reading import FINISHED, RUNNING, Reading
from coterie.report.rendering import render
from coterie.report.tables import size
from coterie.report.words import DAMAGE, grouping, outcome

_SENTENCES = 3  # after the first: a card is shorter than a report
_NAMED = 3  # clients at each end of the table
_WIDTH, _HEIGHT = 220, 48  # of the curve, in pixels


def card(reading: Reading) -> str:
    """The headline, the key numbers, the curve, and the best and the worst clients."""
    first, *more = outcome(reading)
    groups = _groups(reading)
    judged, best, worst, between = _clients(reading)
    return render(
        "card/run.html",
        first=first,
        more=" ".join([m for m in more if m not in groups][:_SENTENCES]),
        groups=" ".join(groups),
        circumstances=_circumstances(reading),
        numbers=_numbers(reading),
        curve=_curve(reading),
        judged=judged,
        worst=worst,
        between=between,
        best=best,
    )


def _groups(reading: Reading) -> list[str]:
    try:
        return grouping(reading)
    except DAMAGE:
        return []


def _circumstances(reading: Reading) -> str:
    parts = []
    if reading.status != FINISHED:
        state = "running" if reading.status == RUNNING else "stopped"
        parts.append(f"{state}, {len(reading.rounds)} of {reading.planned} rounds")
    elif reading.result.get("stopped"):
        parts.append(f"ended early: {reading.result['stopped']}")
    if reading.names:
        parts.append(f"{len(reading.names)} clients")
    if reading.seed is not None:
        parts.append(f"seed {reading.seed}")
    if reading.path is not None:
        parts.append(str(reading.path))
    return " · ".join(parts)


def _numbers(reading: Reading) -> list[tuple[str, str]]:
    by, rows = reading.judged_by, list[tuple[str, str]]()
    for title in ("received", "adapted"):
        if scores := scored(reading, title):
            rows.append((title, score_with_unit(scores.get(by), by)))
    if joined := (reading.result.get("newcomers") or {}).get("adapted"):
        rows.append(("newcomers", score_with_unit(joined.get(by), by)))
    if total := bytes_so_far(reading):
        down, up = total.get("down", 0), total.get("up", 0)
        rows.append(("bytes", f"{size(down)} down, {size(up)} up"))
    if spent := clock(reading):
        rows.append(("clock", f"{spent['total']:.1f} s"))
    if noise := privacy_loss(reading):
        rows.append(("privacy", f"ε ≤ {noise['epsilon']:.3g}"))
    return rows


Row = tuple[str, str, str]


def _clients(reading: Reading) -> tuple[str, list[Row], list[Row], int]:
    """The score that clients are judged by, the best and the worst, and how many are between them.

    Newcomers are not among them.
    """
    title = reading.headline if any(reading.scores(reading.headline)) else "received"
    scores, names, groups = reading.scores(title), reading.names, reading.groups
    members = set(range(len(names))) - reading.newcomers
    ranked = sorted((s, c) for c, s in enumerate(scores) if s is not None and c in members)

    def row(score: float, client: int) -> Row:
        group = groups[client] if client < len(groups) else None
        group = "–" if group in (None, "") else str(group)
        return names[client], group, score_with_unit(score, reading.judged_by)

    rows = [row(*each) for each in ranked]
    if len(rows) <= 2 * _NAMED:
        return title, [], rows, 0
    return title, rows[-_NAMED:], rows[:_NAMED], len(rows) - 2 * _NAMED


@dataclass(frozen=True)
class Curve:
    """A line in a small picture: its points in pixels, and what it shows in words."""

    line: str
    words: str
    width: int = _WIDTH
    height: int = _HEIGHT


def _curve(reading: Reading) -> Curve | None:
    """The score over rounds, as a line."""
    by, title = reading.judged_by, "received"
    points = [
        (e["round"], float(score))
        for e in reading.rounds
        if isinstance(score := (e.get("received") or {}).get(by), int | float)
    ]
    if len(points) < 2:
        return None
    first, last = points[0][0], points[-1][0]
    low, high = min(s for _, s in points), max(s for _, s in points)
    line = " ".join(
        f"{2 + (_WIDTH - 4) * (r - first) / (last - first):.1f},"
        f"{_HEIGHT - 3 - (_HEIGHT - 6) * (s - low) / (high - low or 1):.1f}"
        for r, s in points
    )
    words = (
        f"{title} score from round {first} to {last}: {score_with_unit(points[0][1], by)} to "
        f"{score_with_unit(points[-1][1], by)}, between {score_with_unit(low, by)} and "
        f"{score_with_unit(high, by)}"
    )
    return Curve(line, words)
