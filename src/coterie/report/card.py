"""A run as a small card of HTML, for notebooks: no script, no style sheet, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.report.markup import Markup, tag
from coterie.report.numbers import clock, epsilon, moved, scored, shown
from coterie.report.reading import FINISHED, RUNNING, Reading
from coterie.report.tables import size
from coterie.report.words import DAMAGE, grouping, headline

_SENTENCES = 3  # after the first: a card is no report
_NAMED = 3  # clients at each end of the table
_WIDTH, _HEIGHT = 220, 48  # of the curve, in pixels
# Colours are the notebook's own, or grey that both a light and a dark page can bear.
_FAINT = "rgba(128,128,128,.35)"
_TABLE = "border-collapse:collapse;margin:0;font-size:inherit;color:inherit"
_CELL = "text-align:right;padding:1px 14px 1px 0;background:none;font-weight:400"


def card(reading: Reading) -> str:
    """The headline in words, the numbers, the curve, and the clients at both ends."""
    first, *more = headline(reading)
    groups = _groups(reading)
    inside = [
        tag("div", first, style="font-weight:600"),
        tag("div", " ".join([m for m in more if m not in groups][:_SENTENCES])),
        tag("div", " ".join(groups)) if groups else None,
        tag("div", _circumstances(reading), style="opacity:.75;margin-bottom:6px"),
        tag(
            "div",
            tag("div", _numbers(reading), _curve(reading)),
            _clients(reading),
            style="display:flex;flex-wrap:wrap;gap:8px 36px;align-items:flex-start",
        ),
    ]
    return framed(inside)


def framed(inside: Sequence[Markup | None]) -> str:
    """What a card holds, with its frame."""
    style = (
        f"display:inline-block;max-width:min(100%,46em);border:1px solid {_FAINT};"
        "border-radius:6px;padding:10px 14px;font-size:13px;line-height:1.45;overflow-x:auto"
    )
    return tag("div", inside, style=style)


def _groups(reading: Reading) -> list[str]:
    try:
        return grouping(reading)
    except DAMAGE:
        return []


def _circumstances(reading: Reading) -> str:
    parts = []
    if reading.status != FINISHED:
        state = "going on" if reading.status == RUNNING else "stopped"
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


def _numbers(reading: Reading) -> Markup:
    by, rows = reading.judged_by, list[tuple[str, str]]()
    for title in ("received", "adapted"):
        if found := scored(reading, title):
            rows.append((title, shown(found.get(by), by)))
    if joined := (reading.result.get("newcomers") or {}).get("adapted"):
        rows.append(("newcomers", shown(joined.get(by), by)))
    if total := moved(reading):
        down, up = total.get("down", 0), total.get("up", 0)
        rows.append(("bytes", f"{size(down)} down, {size(up)} up"))
    if spent := clock(reading):
        rows.append(("clock", f"{spent['total']:.1f} s"))
    if noise := epsilon(reading):
        rows.append(("privacy", f"ε ≤ {noise['epsilon']:.3g}"))
    cells = [
        [tag("th", name, scope="row", style=_left()), tag("td", value, style=_left())]
        for name, value in rows
    ]
    return plain_table([], cells)


def _clients(reading: Reading) -> Markup | None:
    """The best and the worst clients, by the score that the run is judged by; no newcomers."""
    title = reading.headline if any(reading.scores(reading.headline)) else "received"
    scores, names, groups = reading.scores(title), reading.names, reading.groups
    members = set(range(len(names))) - reading.newcomers
    told = sorted((s, c) for c, s in enumerate(scores) if s is not None and c in members)
    if not told:
        return None
    ends = told if len(told) <= 2 * _NAMED else [*told[:_NAMED], None, *told[-_NAMED:]]
    rows: list[Sequence[Any]] = []
    for each in ends:
        if each is None:
            rows.append([tag("td", f"… {len(told) - 2 * _NAMED} more", colspan=3, style=_left())])
            continue
        value, client = each
        group = groups[client] if client < len(groups) else None
        named = tag("th", names[client], scope="row", style=_left())
        rows.append([named, "–" if group in (None, "") else group, shown(value, reading.judged_by)])
    return plain_table(["client", "group", title], rows)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table in a card: cells that are markup are cells already."""
    top = [
        tag("th", h, scope="col", style=_left() if not i else _CELL) for i, h in enumerate(heads)
    ]
    body = [
        tag("tr", [c if isinstance(c, Markup) else tag("td", c, style=_CELL) for c in row])
        for row in rows
    ]
    head = tag("thead", tag("tr", top)) if heads else None
    return tag("table", head, tag("tbody", body), style=_TABLE)


def _left() -> str:
    return _CELL.replace("right", "left")


def _curve(reading: Reading) -> Markup | None:
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
        f"{title} score from round {first} to {last}: {shown(points[0][1], by)} to "
        f"{shown(points[-1][1], by)}, between {shown(low, by)} and {shown(high, by)}"
    )
    drawn = tag("polyline", points=line, fill="none", stroke="currentColor", stroke_width="1.5")
    return tag(
        "svg",
        tag("title", words),
        drawn,
        width=_WIDTH,
        height=_HEIGHT,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=words,
        style="display:block;margin-top:6px",
    )
