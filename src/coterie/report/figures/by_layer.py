"""How far apart clients are in each layer of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.report.figures.matrices import by_group
from coterie.report.figures.sketch import Sketch, tiles
from coterie.report.figures.style import THIN, heatmap, short, styled, ticks_of
from coterie.report.palette import INK, SCALE, scale

Matrix = np.ndarray[Any, Any]
MOST = 9  # layers that are drawn; of more, some in between are left out
COLUMNS = 3


def layers_of(notes: Mapping[str, Any]) -> tuple[list[int], dict[str, Matrix]]:
    """The clients, and their distances in each layer, in the order of the model."""
    told = notes.get("layer_distances")
    if not told:
        raise ConfigError(
            "these notes have no 'layer_distances': they are noted where clients sent the server "
            "whole models to compare, as with coterie groups --by model, and up to 100 clients"
        )
    found = {name: _whole(rows) for name, rows in told["layers"].items()}
    return [int(c) for c in told["clients"]], found


def _whole(rows: Sequence[Sequence[float]]) -> Matrix:
    """A symmetric matrix from what is below its diagonal.

    >>> _whole([[], [1.0], [2.0, 3.0]]).tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]
    """
    found = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        found[i, :i] = row
    whole: Matrix = found + found.T
    return whole


def shown(layers: Sequence[str]) -> list[str]:
    """The layers that there is room for: the first, the last, and some in between.

    >>> shown("abcdefghijklm")
    ['a', 'c', 'd', 'f', 'g', 'i', 'j', 'l', 'm']
    """
    count = min(MOST, len(layers))
    places = np.linspace(0, len(layers) - 1, count)
    return [layers[math.floor(p + 0.5)] for p in places]


def apart(clients: Sequence[int], rows: Matrix, groups: Sequence[Any]) -> tuple[float, float]:
    """The mean distance inside groups and that between them; NaN where there are no such pairs."""
    own = [groups[c] if c < len(groups) else None for c in clients]
    same = np.array([[a == b for b in own] for a in own])
    below = np.tri(len(own), k=-1, dtype=bool)
    inside, between = rows[below & same], rows[below & ~same]
    return tuple(float(v.mean()) if len(v) else math.nan for v in (inside, between))  # type: ignore[return-value]


def distances_by_layer(
    notes: Mapping[str, Any], groups: Sequence[Any], names: Sequence[str] = ()
) -> Sketch:
    """A matrix of clients' distances for each layer, the final one last, clients by group.

    ``notes`` are those with "layer_distances". Each matrix has a scale of its own, from its closest
    pair to its farthest; the darker (on a dark page the brighter), the closer.
    """
    clients, layers = layers_of(notes)
    drawn = shown(list(layers))
    order, ends = by_group(clients, groups)
    people = ticks_of([names[c] if c < len(names) else f"client {c}" for c in clients])
    labels = [people[i] for i in order]
    columns = min(COLUMNS, len(drawn))
    rows = [min(columns, len(drawn) - k) for k in range(0, len(drawn), columns)]
    figure = tiles(rows, gap=0.08 if len(rows) < 3 else 0.06)
    marks: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    for number, name in enumerate(drawn, 1):
        at = figure.panels[number - 1]
        values = layers[name][np.ix_(order, order)].astype("f4")
        np.fill_diagonal(values, np.nan)
        figure.add(_map(values, name, labels, first=number == 1), panel=number)
        titles.append(_title(at.x, short(name, 20), apart(clients, layers[name], groups)))
        marks += [line for k in ends for line in _borders(at.x, k, len(order))]
    figure.layout |= {"annotations": titles, "shapes": marks}
    few = len(order) <= 12
    ticks = {"type": "category", "showgrid": False, "showticklabels": few}
    ticks |= {"tickfont": {"size": 9}, "tickangle": 0, "constrain": "domain"}
    figure.x(ticks, range=[-0.5, len(order) - 0.5])
    figure.y(ticks, range=[len(order) - 0.5, -0.5])
    for at in figure.panels:
        figure.layout[f"yaxis{at.y}"] |= {"scaleanchor": f"x{at.x}", "constraintoward": "top"}
    return styled(figure, "Distances of clients in each layer", 90 + 285 * len(rows))


def _map(values: Matrix, name: str, labels: Sequence[str], first: bool) -> dict[str, Any]:
    """One layer's matrix; the first one's colour bar is that of all."""
    there = values[np.isfinite(values)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (0.0, 1.0)
    high = high if high > low else low + 1.0
    hover = f"{short(name, 24)}: client %{{y}} and client %{{x}} are %{{z:.3g}} apart"
    found = heatmap(
        values,
        "distance in a layer",
        hover,
        x=list(labels),
        y=list(labels),
        colorscale=scale(tuple(reversed(SCALE))),
        zmin=low,
        zmax=high,
    )
    found["colorbar"] |= {"tickvals": [low, high], "ticktext": ["closest", "farthest"]}
    return found if first else {**found, "showscale": False}


def _title(axis: str, name: str, means: tuple[float, float]) -> dict[str, Any]:
    """A layer's name above its matrix, with how much farther apart groups are."""
    inside, between = means
    ratio = f": {between / inside:.2f}" if inside > 0 and between == between else ""
    return {
        "text": f"{name}{ratio}",
        "xref": f"x{axis} domain",
        "yref": f"y{axis} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": INK},
    }


def _borders(axis: str, place: int, size: int) -> list[dict[str, Any]]:
    """Lines around a group in one panel."""
    at, ends = place - 0.5, (-0.5, size - 0.5)
    sides = (
        {"x0": at, "x1": at, "y0": ends[0], "y1": ends[1]},
        {"x0": ends[0], "x1": ends[1], "y0": at, "y1": at},
    )
    return [
        {"type": "line", **side, "xref": f"x{axis}", "yref": f"y{axis}", "line": THIN}
        for side in sides
    ]
