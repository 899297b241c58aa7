"""Pictures of each client's scores, at the end and over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.following import followed
from coterie.report.figures.groups import client_axis, client_height
from coterie.report.figures.scores import said, y_axis
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    SHARE,
    Event,
    clear,
    figure_of,
    grid,
    heatmap,
    plain,
    short,
    styled,
    ticks_of,
)
from coterie.report.palette import BLUE, GREEN, INK, LINES, RED
from coterie.report.reading import Reading, number

KINDS = ("received", "adapted", "alone")
_COLOURS = {"received": BLUE, "adapted": LINES[4], "alone": LINES[3]}
_SYMBOLS = {"received": "circle", "adapted": "diamond", "alone": "square"}
NAMED = 3  # worst clients, with their names beside their points


def jitter(count: int, width: float = 0.22) -> list[float]:
    """Offsets that spread dots over a width, always the same, with neighbours far apart.

    They step by the golden ratio, which fills a width evenly for any number of dots.

    >>> [round(x, 3) for x in jitter(3)]
    [-0.22, 0.052, -0.116]
    """
    return [width * (2 * (i * 0.6180339887498949 % 1) - 1) for i in range(count)]


def spread(reading: Reading) -> Sketch:
    """Each client's scores at the end: strips for received, adapted and alone, the worst named."""
    scores_by_kind = {kind: scores_of(reading, kind) for kind in KINDS}
    scores_by_kind = {kind: scores for kind, scores in scores_by_kind.items() if scores}
    if not scores_by_kind:
        raise ConfigError(f"{reading.name}: no client has its own score")
    about = _about(reading)
    traces: list[Any] = []
    notes: list[dict[str, Any]] = []
    for place, (kind, scores) in enumerate(scores_by_kind.items()):
        traces += [_strip(place, kind, scores, about), _box(place, kind, [v for _, v in scores])]
        notes += _names_below(reading, place, scores)
    figure = figure_of(traces, annotations=notes, showlegend=False)
    figure.x(
        tickvals=list(range(len(scores_by_kind))),
        ticktext=[f"{kind}" for kind in scores_by_kind],
        range=[-0.55, len(scores_by_kind) - 0.3],
        showgrid=False,
        fixedrange=True,
    )
    y_axis(figure, reading.judged_by)
    return styled(figure, "Scores of clients at the end", 440)


def scores_of(reading: Reading, kind: str) -> list[tuple[int, float]]:
    """Each client's score, without newcomers, whose scores are reported separately."""
    newcomers = {c for c, row in enumerate(reading.clients) if number(row.get("newcomer"))}
    scores = enumerate(reading.scores(kind))
    return [(c, v) for c, v in scores if v is not None and c not in newcomers]


def _tick(reading: Reading, client: int) -> str:
    names = reading.names
    return names[client] if client < len(names) else f"client {client}"


def _about(reading: Reading) -> list[str]:
    """The hover text of each client: its name, group and samples."""
    groups, rows = reading.groups, reading.clients
    descriptions = []
    for c, name in enumerate(reading.names):
        parts = [plain(name)]
        group = rows[c].get("group") if c < len(rows) else groups[c] if c < len(groups) else None
        if group not in (None, ""):
            parts.append(f"group {plain(group)}")
        samples = number(rows[c].get("train")) if c < len(rows) else None
        if samples is not None:
            parts.append(f"{samples:.0f} training samples")
        descriptions.append("<br>".join(parts))
    return descriptions


def _strip(
    place: float, kind: str, scores: Sequence[tuple[int, float]], about: Sequence[str]
) -> Any:
    descriptions = [about[c] if c < len(about) else f"client {c}" for c, _ in scores]
    marker = {"color": _COLOURS[kind], "symbol": _SYMBOLS[kind], "size": 7, "opacity": 0.75}
    return {
        "type": "scatter",
        "x": clear([place + x for x in jitter(len(scores))], 4),
        "y": clear([v for _, v in scores]),
        "mode": "markers",
        "marker": marker,
        "hovertext": descriptions,
        "hovertemplate": f"%{{hovertext}}<br>{kind} %{{y}}<extra></extra>",
        "name": kind,
    }


def quarters(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile.

    >>> quarters([4, 1, 3, 2, 5])
    (2.0, 3.0, 4.0)
    """
    import numpy as np

    low, middle, high = np.percentile(list(values), (25, 50, 75))
    return low.item(), middle.item(), high.item()


def _box(place: float, kind: str, values: Sequence[float]) -> Any:
    """The middle half of the clients as a bracket, their median as a thick line."""
    low, middle, high = quarters(values)
    a, b = place - 0.27, place + 0.27
    return {
        "type": "scatter",
        "x": [a, b, None, a, a, b, b, a],
        "y": clear([middle, middle, None, low, high, high, low, low]),
        "mode": "lines",
        "line": {"color": INK, "width": 1.5},
        "opacity": 0.8,
        "hovertemplate": f"{kind}: median and quarters of clients, %{{y}}<extra></extra>",
        "name": f"{kind}: median and quarters",
    }


def _names_below(
    reading: Reading, place: float, scores: Sequence[tuple[int, float]]
) -> list[dict[str, Any]]:
    """Names of the worst clients, below their points.

    Where two names would overlap, the worse client keeps its name.
    """
    values = [v for _, v in scores]
    line = 0.045 * ((max(values) - min(values)) or 1.0) + 0.004
    points = [(place + x, v, c) for x, (c, v) in zip(jitter(len(scores)), scores, strict=True)]
    notes: list[dict[str, Any]] = []
    for x, y, client in sorted(points, key=lambda p: (p[1], p[2]))[:NAMED]:
        if any(abs(n["y"] - y) < line for n in notes):
            continue
        text = short(_tick(reading, client), 12)
        font = {"size": 11, "color": INK}
        at = {"x": x, "y": y, "xanchor": "center", "yshift": -11}
        notes.append({**at, "text": text, "showarrow": False, "font": font})
    return notes


def scored_rounds(reading: Reading) -> tuple[str, Sequence[Event]]:
    """The kind of score that clients have, the headline if possible, and the rounds that have it.

    Raises a ``ConfigError`` if there are none: without test data each client's score is empty.
    """
    for kind in dict.fromkeys((reading.headline, "received")):
        scores_by_round = [
            (e, (e.get("client_scores") or {}).get(kind) or ()) for e in reading.rounds
        ]
        steps = [e for e, scores in scores_by_round if any(number(v) is not None for v in scores)]
        if steps:
            return kind, steps
    raise ConfigError(f"{reading.name}: no round has scores of single clients")


def over_rounds(reading: Reading) -> Sketch:
    """Each client's score in each scored round, sorted by last group and then by score."""
    kind, steps = scored_rounds(reading)
    columns = [[number(v) for v in e["client_scores"][kind]] for e in steps]
    count = max(map(len, columns))
    columns = [[*column, *[None] * (count - len(column))] for column in columns]
    groups = [*reading.groups[:count], *[None] * (count - len(reading.groups))]
    group_numbers = followed([groups])[0]
    last = [
        next((col[c] for col in reversed(columns) if col[c] is not None), None)
        for c in range(count)
    ]
    shown = [c for c in range(count) if last[c] is not None]
    order = sorted(
        shown,
        key=lambda c: (
            -1 if group_numbers[c] is None else group_numbers[c] or 0,
            -(last[c] or 0.0),
            c,
        ),
    )
    labels = ticks_of(reading.names[:count])
    by = reading.judged_by
    figure = figure_of(
        [
            heatmap(
                grid([clear([column[c] for column in columns], 4) for c in order]),
                f"{kind} {said(by).lower()}",
                "client %{y}, round %{x}: %{z" + (":.1%}" if by == "accuracy" else ":.3f}"),
                x=[e["round"] for e in steps],
                y=[labels[c] for c in order],
            )
        ]
    )
    if by == "accuracy":
        figure.data[0]["colorbar"]["tickformat"] = SHARE
    rounds = [e["round"] for e in steps]
    figure.x(title="round", showgrid=False, range=[rounds[0] - 0.5, rounds[-1] + 0.5])
    figure.y(client_axis(len(order)), title="client, by group, best first")
    return styled(figure, "Clients over rounds", client_height(len(order)))


def gains(reading: Reading) -> list[tuple[int, float]]:
    """Each client's gain over training alone, the least first; a ``ConfigError`` if unknown."""
    kind = reading.headline
    ours, alone = (dict(scores_of(reading, k)) for k in (kind, "alone"))
    gained = [(c, ours[c] - alone[c]) for c in ours if c in alone]
    if not gained:
        raise ConfigError(
            f"{reading.name}: no client trained alone, so there is no gain to show: run with "
            "--alone"
        )
    return sorted(gained, key=lambda p: (p[1], p[0]))


def gain(reading: Reading) -> Sketch:
    """Each client's gain over training alone, sorted."""
    gained = gains(reading)
    labels = ticks_of(reading.names)
    names = [labels[c] if c < len(labels) else str(c) for c, _ in gained]
    by = reading.judged_by
    parts = (
        ("worse than alone", RED, [v if v < 0 else None for _, v in gained]),
        ("better, or as good", GREEN, [v if v >= 0 else None for _, v in gained]),
    )
    figure = figure_of(
        [
            {
                "type": "bar",
                "x": names,
                "y": clear(values),
                "name": title,
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": "client %{x}: %{y}<extra></extra>",
            }
            for title, colour, values in parts
            if any(v is not None for v in values)
        ],
        barmode="overlay",
        bargap=0.15,
    )
    figure.x(
        title="client, the least gain first",
        automargin=True,
        type="category",
        categoryorder="array",
        categoryarray=names,
        nticks=min(len(names), 25),
        showgrid=False,
    )
    percent = {"tickformat": "+.0%", "hoverformat": "+.1%"} if by == "accuracy" else {}
    figure.y(percent, title="gain over alone", zeroline=True, zerolinecolor=INK)
    return styled(figure, "Gain over training alone", 360)


def worst(reading: Reading, kind: str) -> tuple[str, float] | None:
    """The name and the score of the client with the lowest score; None without scores."""
    scores = scores_of(reading, kind)
    if not scores:
        return None
    client, value = min(scores, key=lambda p: (p[1], p[0]))
    return _tick(reading, client), value
