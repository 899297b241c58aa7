"""Pictures of clients' data, as self-contained HTML files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import RunDirError
from coterie.report.figures import plain


def label_heatmap(
    counts: np.ndarray, classes: Sequence[str], groups: Sequence[int] | None, path: Path
) -> None:
    """Each client's label shares as a heat map, clients ordered by true group, in one HTML file."""
    import plotly.graph_objects as go

    order = np.arange(len(counts)) if groups is None else np.argsort(groups, kind="stable")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = [f"client {i}" + ("" if groups is None else f" (group {groups[i]})") for i in order]
    figure = go.Figure(
        go.Heatmap(
            z=shares[order],
            x=[plain(name) for name in classes],
            y=names,
            customdata=counts[order],
            hovertemplate="%{y}<br>%{x}: %{customdata} samples (%{z:.0%})<extra></extra>",
            colorscale="Viridis",
            colorbar={"title": "share", "tickformat": ".0%"},
        )
    )
    figure.update_layout(
        title="Labels of each client's training data",
        height=max(420, 14 * len(counts) + 160),
        yaxis={"autorange": "reversed", "automargin": True},
        template="plotly_white",
    )
    _write(figure, path)


def target_boxes(targets: Sequence[np.ndarray], groups: Sequence[int] | None, path: Path) -> None:
    """Each client's regression targets as a box, clients ordered by true group."""
    import plotly.graph_objects as go

    order = np.arange(len(targets)) if groups is None else np.argsort(groups, kind="stable")
    names = [f"client {i}" + ("" if groups is None else f" (group {groups[i]})") for i in order]
    figure = go.Figure(
        [
            go.Box(x=targets[i].reshape(-1), name=name, orientation="h", boxpoints=False)
            for i, name in zip(order, names, strict=True)
        ]
    )
    figure.update_layout(
        title="Targets of each client's training data",
        height=max(420, 24 * len(targets) + 160),
        yaxis={"autorange": "reversed", "automargin": True},
        showlegend=False,
        template="plotly_white",
    )
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    try:
        figure.write_html(path, include_plotlyjs=True, full_html=True)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}") from error
