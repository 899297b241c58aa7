"""Whether clients with different labels have different models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.data.heterogeneity import kl_matrix
from coterie.errors import ConfigError
from coterie.report.figures.matrices import by_group, pairs_of
from coterie.report.figures.sketch import Sketch, tiles
from coterie.report.figures.small_matrices import add_matrix, panel_title
from coterie.report.figures.style import Event, clear, grid, having, styled, ticks_of
from coterie.report.palette import BLUE, ORANGE

Matrix = np.ndarray[Any, Any]
MOST = 3000  # pairs that are drawn
KL = "labels (KL)"


@dataclass(frozen=True)
class Compared:
    """The clients' label divergences, and the distances of their models by each measure."""

    clients: Sequence[int]
    labels: Matrix
    models: Mapping[str, Matrix]

    def pairs(self, rows: Matrix) -> Matrix:
        """A number for each pair of clients."""
        lower: Matrix = rows[np.tril_indices(len(rows), -1)]
        return lower

    def together(self, groups: Sequence[Any]) -> Matrix:
        """The pairs of clients in the same group; none where there is only one group."""
        client_groups = [groups[c] if c < len(groups) else None for c in self.clients]
        return np.array(
            [[a == b and len(set(client_groups)) > 1 for b in client_groups] for a in client_groups]
        )

    def correlation(self, what: str) -> float:
        """Pearson's correlation over all pairs of clients; NaN where all pairs are equal."""
        x, y = self.pairs(self.labels), self.pairs(self.models[what])
        if len(x) < 2 or not (x.std() > 0 and y.std() > 0):
            return math.nan
        return float(np.corrcoef(x, y)[0, 1])


def compare(events: Sequence[Event], data: Mapping[str, Any]) -> Compared:
    """The distances of the clients' models that a run noted, with their label divergences.

    DC-PFL notes its discrepancy with and without the scaling of models to [0, 1].
    """
    labels = data.get("labels")
    if not labels:
        raise ConfigError(
            "this run does not know its clients' labels, or their targets are numbers: a "
            "divergence "
            "of labels needs classes"
        )
    noted = having(events, "unscaled_distances")
    if noted:
        notes = noted[-1]["notes"]
        clients = list(notes["clients"])
        models = {
            "scaled models": grid(notes["distances"], "f8"),
            "models as they are": grid(notes["unscaled_distances"], "f8"),
        }
    else:
        pairs = pairs_of(events)
        if pairs.alike:
            raise ConfigError("this run recorded similarities of clients, not distances")
        clients, models = list(pairs.clients), {pairs.what: grid(pairs.rows, "f8")}
    places = [i for i, c in enumerate(clients) if c < len(labels) and sum(labels[c])]
    if len(places) < 2:
        raise ConfigError("fewer than two clients have both labels and a distance")
    compared_clients = [clients[i] for i in places]
    kept = {what: rows[np.ix_(places, places)] for what, rows in models.items()}
    return Compared(
        compared_clients, kl_matrix(np.array([labels[c] for c in compared_clients], float)), kept
    )


def divergence(
    events: Sequence[Event],
    data: Mapping[str, Any],
    groups: Sequence[Any] = (),
    names: Sequence[str] = (),
) -> Sketch:
    """Label divergence and model distance of each pair of clients, as matrices and as points.

    ``data`` is a run's ``data.json``. Clients are ordered by ``groups``; each matrix has its own
    scale.
    """
    compared = compare(events, data)
    order, ends = by_group(compared.clients, groups)
    client_names = [names[c] if c < len(names) else f"client {c}" for c in compared.clients]
    ticks = ticks_of(client_names)
    labels = [ticks[i] for i in order]
    whats = list(compared.models)
    figure = tiles([2, 2] if len(whats) > 1 else [3], gap=0.12)
    shown = {KL: compared.labels, whats[0]: compared.models[whats[0]]}
    for panel, (what, rows) in enumerate(shown.items(), 1):
        values = rows[np.ix_(order, order)]
        add_matrix(figure, panel, values, labels, ends, _short(what), "distance of clients")
    for panel, what in enumerate(whats, len(shown) + 1):
        _add_points(figure, panel, compared, what, groups)
    return styled(figure, "Labels and models of clients", 720 if len(whats) > 1 else 430)


def _add_points(
    figure: Sketch, panel: int, compared: Compared, what: str, groups: Sequence[Any]
) -> None:
    """A point for each pair of clients, a diamond for pairs in the same group."""
    same = compared.pairs(compared.together(groups))
    x, y = compared.pairs(compared.labels), compared.pairs(compared.models[what])
    step = math.ceil(len(x) / MOST)
    for inside, name, colour, symbol in (
        (False, "pairs of clients", BLUE, "circle"),
        (True, "pairs in the same group", ORANGE, "diamond"),
    ):
        at = np.flatnonzero(same == inside)[::step]
        if not len(at):
            continue
        trace = {
            "type": "scatter",
            "x": clear(x[at], 4),
            "y": clear(y[at], 4),
            "mode": "markers",
            "marker": {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.6},
            "hovertemplate": "labels %{x:.3g}, models %{y:.3g}<extra></extra>",
            "name": name,
            "showlegend": False,
        }
        figure.add(trace, panel=panel)
    r = compared.correlation(what)
    correlation = f", r = {r:.3f}" if r == r else ""
    figure.layout["annotations"].append(
        panel_title(
            figure.panels[panel - 1], f"{_short(what.replace('models', '').strip())}{correlation}"
        )
    )
    figure.x(panel=panel, title=KL, rangemode="tozero", nticks=6)
    figure.y(panel=panel, rangemode="tozero", nticks=6)


def _short(what: str) -> str:
    """A title that fits a panel."""
    return what[0].upper() + what[1:]
