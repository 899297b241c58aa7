"""The evidence for groups: held-out errors, and a map of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.report.figures.sketch import Sketch, panels
from coterie.report.figures.style import (
    clear,
    figure_of,
    level,
    line,
    note_of,
    plain,
    styled,
    symbol_of,
)
from coterie.report.palette import BLUE, FAINT, GREEN, INK, RED, colour_of

Notes = Mapping[str, Any]
_TICKS = 16  # up to this many numbers of groups, the axis has a tick for each


def evidence(notes: Notes) -> Sketch:
    """Held-out error and reproducibility for each number of groups, with the chosen one marked.

    ``notes`` are an event's, with "evidence". Errors are relative to the error of one mean; bars
    are standard errors of the difference from the lowest.
    """
    evidence_notes = note_of(notes, "evidence", "those of a method that groups by evidence")
    errors = {int(k): float(v) for k, v in evidence_notes["errors"].items()}
    if not errors or not errors.get(1):
        raise ConfigError("the run recorded no errors: there was too little to compare")
    deviations = {int(k): float(v) for k, v in evidence_notes["deviations"].items()}
    kappa = {int(k): float(v) for k, v in evidence_notes["kappa"].items()}
    chosen, error_of_one = int(evidence_notes["groups"]), errors[1]
    figure = panels([0.6, 0.4])
    points = [(k, v / error_of_one) for k, v in sorted(errors.items())]
    bars = _bars([deviations.get(k, 0.0) / error_of_one for k, _ in points], BLUE)
    hover = "%{x} groups: %{y:.3f} of one mean's error ± %{error_y.array:.3f}<extra></extra>"
    curve = line(points, "held-out error", BLUE, error_y=bars, hovertemplate=hover)
    figure.add(curve, panel=1)
    figure.add(level(points, 1.0, "one mean for all", FAINT), panel=1)
    figure.add(
        _chosen((chosen, errors[chosen] / error_of_one), f"chosen: {_groups(chosen)}"), panel=1
    )
    if kappa:
        agreement = sorted(kappa.items())
        hover = "%{x} groups: κ %{y:.2f}<extra></extra>"
        shown = line(agreement, "reproducibility κ", GREEN, "dash", hovertemplate=hover)
        figure.add(shown, panel=2)
        if chosen in kappa:
            figure.add(_chosen((chosen, kappa[chosen]), ""), panel=2)
    figure.y(title="error / one mean's", rangemode="tozero", panel=1)
    figure.y(title="κ", range=[min(-0.08, *kappa.values(), 0) - 0.02, 1.08], panel=2)
    figure.x(title="number of groups", panel=2)
    ticks = {"dtick": 1} if len(errors) <= _TICKS else {"nticks": 12}
    figure.x(ticks, range=[0.5, max(errors) + 0.5])
    title = "Do groups predict clients' other halves?"
    return styled(figure, title, 520, plain(evidence_notes.get("why") or ""))


@dataclass(frozen=True)
class Map:
    """Clients in a plane: coordinates, groups, certainties, and the share of differences shown."""

    clients: Sequence[int]
    places: np.ndarray
    groups: Sequence[int]
    certainty: Sequence[float]
    share: float


def map_of(notes: Notes) -> Map:
    """Clients in a plane, at distances as close to the noted ones as possible.

    This is classical multidimensional scaling. The noted distances are 1 − cos of the angle between
    two directions; twice that is the squared distance of two vectors of length 1.
    """
    evidence_notes = note_of(notes, "evidence", "those of a method that groups by evidence")
    rows = note_of(notes, "distances", "notes of up to 200 clients")
    squares = 2 * np.clip(np.array(rows, float), 0, None)
    size = len(squares)
    middle = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-middle @ squares @ middle / 2)
    values, vectors = np.clip(values[::-1], 0, None), vectors[:, ::-1]
    places = np.zeros((size, 2))
    kept = vectors[:, :2] * np.sqrt(values[:2])
    # An axis may point either way: the client farthest out along it is put on the right.
    kept *= np.where(kept[np.abs(kept).argmax(0), np.arange(kept.shape[1])] < 0, -1, 1)
    places[:, : kept.shape[1]] = kept
    total = float(values.sum())
    return Map(
        list(notes["clients"]),
        places,
        list(evidence_notes.get("labels") or [0] * size),
        list(evidence_notes["certainty"]),
        float(values[:2].sum()) / total if total else 0.0,
    )


def client_map(notes: Notes, names: Sequence[str] = ()) -> Sketch:
    """Clients in a plane, similar ones close together; small and pale if their group is uncertain.

    ``notes`` are an event's, with "evidence" and "distances"; ``names`` are the clients' names.
    """
    plane = map_of(notes)
    labels = [plain(names[c] if c < len(names) else f"client {c}") for c in plane.clients]
    sizes = Counter(plane.groups)
    traces: list[dict[str, Any]] = []
    for group in sorted(sizes):
        members = [i for i, g in enumerate(plane.groups) if g == group]
        sure = np.clip([plane.certainty[i] for i in members], 0, 1)
        marker: dict[str, Any] = {
            "color": colour_of(group),
            "symbol": symbol_of(group),
            "size": clear(9 + 8 * sure, 3),
            "opacity": clear(0.35 + 0.65 * sure, 3),
            "line": {"color": INK, "width": 0.5},
        }
        hover = [
            f"{labels[i]}<br>group {group}<br>certainty {plane.certainty[i]:.2f}" for i in members
        ]
        traces.append(
            _points(plane, members, marker, hover, f"group {group} ({_clients(sizes[group])})")
        )
    between = [i for i, c in enumerate(plane.certainty) if c < 0]
    if between:
        ring = {**_ring(), "size": 18}
        hover = [f"{labels[i]}: between two groups" for i in between]
        traces.append(_points(plane, between, ring, hover, "between two groups"))
    figure = figure_of(traces)
    blank = {"zeroline": False, "showticklabels": False}
    figure.x(blank, title="first axis of the clients' differences")
    figure.y(blank, title="second axis", scaleanchor="x", scaleratio=1)
    share = f"the plane shows {plane.share:.0%} of the clients' differences"
    return styled(figure, "Map of clients", 520, share)


def _points(
    plane: Map, members: Sequence[int], marker: Mapping[str, Any], hover: Sequence[str], name: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": clear(plane.places[members, 0]),
        "y": clear(plane.places[members, 1]),
        "mode": "markers",
        "marker": dict(marker),
        "hovertext": list(hover),
        "hoverinfo": "text",
        "name": name,
    }


def _bars(errors: Sequence[float], colour: str) -> dict[str, Any]:
    return {"type": "data", "array": clear(errors), "color": colour, "thickness": 1, "width": 3}


def _ring() -> dict[str, Any]:
    return {"symbol": "circle-open", "size": 15, "color": RED, "line": {"width": 2, "color": RED}}


def _chosen(point: tuple[float, float], name: str) -> dict[str, Any]:
    """A ring around the chosen number of groups."""
    return {
        "type": "scatter",
        "x": [point[0]],
        "y": clear([point[1]]),
        "mode": "markers",
        "marker": _ring(),
        "hoverinfo": "skip",
        "cliponaxis": False,
        **({"name": name} if name else {"showlegend": False}),
    }


def _groups(count: int) -> str:
    return "one group" if count == 1 else f"{count} groups"


def _clients(count: int) -> str:
    return f"{count} client{'s' * (count != 1)}"
