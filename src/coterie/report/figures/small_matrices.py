"""Small matrices of clients' distances side by side, in panels of one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.report.figures.sketch import Panel, Sketch
from coterie.report.figures.style import THIN, heatmap
from coterie.report.palette import INK, SCALE, scale

Matrix = np.ndarray[Any, Any]
FEW = 12  # clients, up to which their names fit


def add_matrix(
    figure: Sketch,
    panel: int,
    values: Matrix,
    labels: Sequence[str],
    ends: Sequence[int],
    title: str,
    what: str,
) -> None:
    """A matrix of distances in one panel, on its own scale, with a title above it.

    Darker cells (brighter ones on a dark page) are closer pairs. ``ends`` are where groups end;
    ``what`` is the title of the colour bar, which the first panel has for all.
    """
    at = figure.panels[panel - 1]
    figure.add(_map(values, title, labels, what, first=panel == 1), panel=panel)
    layout = figure.layout
    layout["annotations"] = [*layout.get("annotations", ()), panel_title(at, title)]
    borders = [line for k in ends for line in _borders(at, k, len(labels))]
    layout["shapes"] = [*layout.get("shapes", ()), *borders]
    ticks = {"type": "category", "showgrid": False, "showticklabels": len(labels) <= FEW}
    ticks |= {"tickfont": {"size": 9}, "tickangle": 0, "constrain": "domain"}
    size = len(labels)
    figure.x(ticks, panel=panel, range=[-0.5, size - 0.5])
    square = {"scaleanchor": f"x{at.x}", "constraintoward": "top"}
    figure.y({**ticks, **square}, panel=panel, range=[size - 0.5, -0.5])


def panel_title(at: Panel, text: str) -> dict[str, Any]:
    """A line of text above a panel."""
    return {
        "text": text,
        "xref": f"x{at.x} domain",
        "yref": f"y{at.y} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": INK},
    }


def _map(
    values: Matrix, name: str, labels: Sequence[str], what: str, first: bool
) -> dict[str, Any]:
    values = values.astype("f4")
    np.fill_diagonal(values, np.nan)  # a client's distance to itself says nothing
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    high = high if high > low else low + 1.0
    trace = heatmap(
        values,
        what,
        f"{name}<br>client %{{y}} and client %{{x}} are %{{z:.3g}} apart",
        x=list(labels),
        y=list(labels),
        colorscale=scale(tuple(reversed(SCALE))),
        zmin=low,
        zmax=high,
    )
    # Not at the very ends, where plotly.js 4.1 omits a label that does not fit.
    ticks = [low + share * (high - low) for share in (0.1, 0.9)]
    # The bar and its title have the right half, since the figure's title has the left.
    trace["colorbar"] |= {"tickvals": ticks, "ticktext": ["close", "far"], "len": 0.5}
    return trace if first else {**trace, "showscale": False}


def _borders(at: Panel, place: int, size: int) -> list[dict[str, Any]]:
    """Lines where a group ends."""
    edge, ends = place - 0.5, (-0.5, size - 0.5)
    sides = (
        {"x0": edge, "x1": edge, "y0": ends[0], "y1": ends[1]},
        {"x0": ends[0], "x1": ends[1], "y0": edge, "y1": edge},
    )
    return [
        {"type": "line", **side, "xref": f"x{at.x}", "yref": f"y{at.y}", "line": THIN}
        for side in sides
    ]
