"""The distances between clients in each layer of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.report.figures.matrices import by_group
from coterie.report.figures.sketch import Sketch, tiles
from coterie.report.figures.small_matrices import add_matrix
from coterie.report.figures.style import short, styled, ticks_of

Matrix = np.ndarray[Any, Any]
MOST = 9  # layers that are drawn; of a larger model some in between are left out
COLUMNS = 3


def layers_of(notes: Mapping[str, Any]) -> tuple[list[int], dict[str, Matrix]]:
    """The clients, and their distances in each layer, in the order of the model."""
    noted_distances = notes.get("layer_distances")
    if not noted_distances:
        raise ConfigError(
            "these notes have no 'layer_distances': a run notes them where clients send the server "
            "whole models to compare, as with coterie groups --by model, and up to 100 clients"
        )
    matrices = {name: _whole(rows) for name, rows in noted_distances["layers"].items()}
    return [int(c) for c in noted_distances["clients"]], matrices


def _whole(rows: Sequence[Sequence[float]]) -> Matrix:
    """A symmetric matrix from the rows below its diagonal.

    >>> _whole([[], [1.0], [2.0, 3.0]]).tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]
    """
    lower = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        lower[i, :i] = row
    full: Matrix = lower + lower.T
    return full


def layers_that_fit(layers: Sequence[str]) -> list[str]:
    """The layers that fit into the picture: the first, the last, and some in between.

    >>> layers_that_fit("abcdefghijklm")
    ['a', 'c', 'd', 'f', 'g', 'i', 'j', 'l', 'm']
    """
    count = min(MOST, len(layers))
    places = np.linspace(0, len(layers) - 1, count)
    return [layers[math.floor(p + 0.5)] for p in places]


def apart(clients: Sequence[int], rows: Matrix, groups: Sequence[Any]) -> tuple[float, float]:
    """The mean distances inside groups and between them; NaN where there are no such pairs."""
    client_groups = [groups[c] if c < len(groups) else None for c in clients]
    same = np.array([[a == b for b in client_groups] for a in client_groups])
    below = np.tri(len(client_groups), k=-1, dtype=bool)
    inside, between = rows[below & same], rows[below & ~same]
    return tuple(float(v.mean()) if len(v) else math.nan for v in (inside, between))  # type: ignore[return-value]


def distances_by_layer(
    notes: Mapping[str, Any], groups: Sequence[Any], names: Sequence[str] = ()
) -> Sketch:
    """A matrix of clients' distances for each layer, the final one last, clients by group.

    ``notes`` are an event's, with "layer_distances". Each matrix has its own scale, from its
    closest pair to its farthest; darker cells (brighter ones on a dark page) are closer pairs.
    """
    clients, layers = layers_of(notes)
    drawn = layers_that_fit(list(layers))
    order, ends = by_group(clients, groups)
    ticks = ticks_of([names[c] if c < len(names) else f"client {c}" for c in clients])
    labels = [ticks[i] for i in order]
    columns = min(COLUMNS, len(drawn))
    rows = [min(columns, len(drawn) - k) for k in range(0, len(drawn), columns)]
    figure = tiles(rows, gap=0.08 if len(rows) < 3 else 0.06)
    for number, name in enumerate(drawn, 1):
        title = f"{short(name, 20)}{_ratio(apart(clients, layers[name], groups))}"
        values = layers[name][np.ix_(order, order)]
        add_matrix(figure, number, values, labels, ends, title, "distance in a layer")
    return styled(figure, "Distances of clients in each layer", 90 + 285 * len(rows))


def _ratio(means: tuple[float, float]) -> str:
    """The ratio of the distance between groups to that inside them, for a title."""
    inside, between = means
    return f": {between / inside:.2f}" if inside > 0 and between == between else ""
