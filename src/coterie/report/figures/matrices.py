"""Matrices over clients, ordered by group: mixing weights, distances and similarities, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.report.figures.following import followed
from coterie.report.figures.groups import client_axis, client_height
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    THIN,
    Event,
    clear,
    figure_of,
    grid,
    having,
    heatmap,
    note_of,
    short,
    styled,
    ticks_of,
)
from coterie.report.palette import BLUE, SCALE, scale


def mixing_matrix(
    notes: Mapping[str, Any],
    groups: Sequence[Any],
    names: Sequence[str] = (),
    by: str = "group",
) -> Sketch:
    """The weights of other clients' models in each client's mixture; rows sum to 1.

    ``notes`` are user-centric's first notes. Clients are ordered by ``groups``, in client order,
    found or true, which ``by`` names in the title; ``names`` are the clients' names.
    """
    rows = note_of(notes, "mixing", "user-centric's first notes, of up to 200 clients")
    clients = notes.get("clients") or list(range(len(rows)))
    if len(groups) <= max(clients):
        raise ConfigError(f"{len(groups)} groups were given, but client {max(clients)} has a row")
    figure = _square(
        Pairs("weight", clients, rows, True),
        groups,
        names,
        "client %{y} takes %{z:.3f} of client %{x}",
    )
    figure.x(title="client j, whose model is mixed in")
    figure.y(title="client i, who receives the mixture")
    return styled(figure, f"Weights of the mixture, by {by}", 540)


def taken_matrix(
    events: Sequence[Event], groups: Sequence[Any], names: Sequence[str] = ()
) -> Sketch:
    """FedFomo: the weights of other clients' models over all rounds; rows sum to 1.

    Only models that helped count: one that made a client's validation loss worse has weight 0.
    """
    weights: dict[int, dict[int, float]] = {}
    for event in having(events, "weights"):
        for me, others in event["notes"]["weights"].items():
            row = weights.setdefault(int(me), {})
            for other, weight in others.items():
                row[int(other)] = row.get(int(other), 0.0) + max(0.0, float(weight))
    if not weights:
        raise ConfigError("no event has 'weights' in its notes: give the events of a FedFomo run")
    size = 1 + max([*weights, *(n for row in weights.values() for n in row)])
    if size > 200:
        raise ConfigError(f"a matrix of {size} clients is too large to read; the most is 200")
    shares = [[weights.get(i, {}).get(j, 0.0) for j in range(size)] for i in range(size)]
    rows = [[v / (sum(row) or 1.0) for v in row] for row in shares]
    hover = "client %{y} took %{z:.0%} of what helped from client %{x}"
    figure = _square(Pairs("weight", range(size), rows, True), groups, names, hover)
    figure.x(title="client j, whose model was taken")
    figure.y(title="client i, who took it")
    return styled(figure, "Whose models helped whom, by group", 540)


@dataclass(frozen=True)
class Pairs:
    """A number for each pair of clients, as a method noted it; if ``alike``, higher is closer."""

    what: str
    clients: Sequence[int]
    rows: Sequence[Sequence[float | None]]
    alike: bool
    round: int = 0


def pairs_of(events: Sequence[Event]) -> Pairs:
    """The last matrix of distances or similarities in the notes of these events.

    FedClust, PACFL, FL-HC and DC-PFL note distances, FedTSDP a divergence, CFL the similarities in
    the group that it divided, of which the largest is taken.
    """
    pairs: Pairs | None = None
    for event in events:
        notes, number = event.get("notes") or {}, event["round"]
        for key in ("distances", "divergence"):
            rows = notes.get(key)
            part = "evidence" in notes and pairs is not None and len(rows or ()) < len(pairs.rows)
            if rows and not part:  # evidence may be about the members of one group
                clients = notes.get("clients") or range(len(rows))
                pairs = Pairs(key.removesuffix("s"), list(clients), rows, False, number)
        for split in notes.get("splits") or ():
            rows = split.get("similarity") if isinstance(split, Mapping) else None
            if rows and (pairs is None or len(rows) > len(pairs.rows)):
                pairs = Pairs("similarity", list(split["clients"]), rows, True, number)
    if pairs is None:
        raise ConfigError("no event has a matrix of distances or similarities in its notes")
    return pairs


def similarity_matrix(
    events: Sequence[Event], groups: Sequence[Any], names: Sequence[str] = ()
) -> Sketch:
    """The distances or similarities of clients, as the method measures them.

    Clients are ordered by ``groups``; darker cells (brighter ones on a dark page) are closer pairs.
    """
    pairs = pairs_of(events)
    word = "similarity" if pairs.alike else pairs.what
    figure = _square(pairs, groups, names, f"client %{{y}} and client %{{x}}: {word} %{{z:.3g}}")
    figure.x(title="client")
    figure.y(title="client, by group")
    return styled(figure, f"{word.capitalize()} of clients, by group", 540)


def by_group(clients: Sequence[int], groups: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The positions of these clients ordered by group, and where in that order groups end."""
    client_groups = [groups[c] if c < len(groups) else None for c in clients]
    numbers = followed([client_groups])[0]
    order = sorted(
        range(len(client_groups)), key=lambda i: (-1 if numbers[i] is None else numbers[i], i)
    )
    ends = [k for k in range(1, len(order)) if numbers[order[k]] != numbers[order[k - 1]]]
    return order, ends if len(ends) < len(order) - 1 else []


def _square(pairs: Pairs, groups: Sequence[Any], names: Sequence[str], hover: str) -> Sketch:
    order, ends = by_group(pairs.clients, groups)
    unordered = ticks_of([names[c] if c < len(names) else f"client {c}" for c in pairs.clients])
    labels = [unordered[i] for i in order]
    values = grid([[pairs.rows[i][j] for j in order] for i in order])
    # A client's distance to itself says nothing, and would have the strongest colour.
    if not pairs.alike:
        np.fill_diagonal(values, np.nan)
    colours = SCALE if pairs.alike else tuple(reversed(SCALE))
    limits: dict[str, Any] = {"zmin": 0} if pairs.what == "weight" else {}
    size = len(order)
    figure = figure_of(
        [
            heatmap(
                values, pairs.what, hover, x=labels, y=labels, colorscale=scale(colours), **limits
            )
        ],
        shapes=[
            {"type": "line", **ends_of, "line": THIN}
            for k in ends
            for ends_of in (
                {"x0": k - 0.5, "x1": k - 0.5, "y0": -0.5, "y1": size - 0.5},
                {"x0": -0.5, "x1": size - 0.5, "y0": k - 0.5, "y1": k - 0.5},
            )
        ],
    )
    ticks = {
        "type": "category",
        "nticks": min(size, 25),
        "tickfont": {"size": 11 if size <= 30 else 9},
        "showgrid": False,
    }
    angle = -90 if size > 12 or max(map(len, labels)) > 4 else 0
    figure.x(ticks, range=[-0.5, size - 0.5], tickangle=angle, automargin=True)
    figure.y(ticks, range=[size - 0.5, -0.5])
    return figure


# --- what clients hold ----------------------------------------------------------------------------


def label_shares(
    data: Mapping[str, Any], groups: Sequence[Any] = (), names: Sequence[str] = ()
) -> Sketch:
    """The share of each class in each client's samples, clients ordered by group.

    ``data`` is a run's ``data.json``; for a regression, boxes of the targets are drawn.
    """
    by_client = data.get("labels")
    if by_client is None and data.get("quartiles"):
        return _target_spread(data, groups, names)
    if not by_client:
        raise ConfigError("this run does not know its clients' labels")
    order, ticks, ends = _sorted_clients(data, groups, names, len(by_client))
    counts = np.array([by_client[c] for c in order], float)
    totals = counts.sum(1)
    shares = np.round(counts / np.maximum(totals[:, None], 1), 4).astype("f4")
    classes = data.get("classes") or range(counts.shape[1])
    rows, columns = counts.shape
    true = data.get("groups")
    known = true is not None and len(true) >= rows
    true_groups = (
        np.array([true[c] for c in order], "i4") if known and true else np.zeros(rows, "i4")
    )
    more = {"customdata": np.repeat(true_groups[:, None], columns, 1)} if known else {}
    figure = figure_of(
        [
            heatmap(
                shares,
                "share of samples",
                "client %{y}, class %{x}: %{z:.0%}" + "<br>true group %{customdata}" * known,
                x=_unique([short(name, 16) for name in classes]),
                y=ticks,
                zmin=0,
                zmax=max(0.05, float(shares.max(initial=0))),
                **more,
            ),
        ],
        shapes=[
            {
                "type": "line",
                "x0": -0.5,
                "x1": columns - 0.5,
                "y0": k - 0.5,
                "y1": k - 0.5,
                "line": THIN,
            }
            for k in ends
        ],
    )
    figure.data[0]["colorbar"]["tickformat"] = ".0%"
    figure.x(
        title="class",
        automargin=True,
        type="category",
        nticks=min(columns, 25),
        showgrid=False,
        range=[-0.5, columns - 0.5],
    )
    figure.y(client_axis(rows), title=f"client{_sorted_by(data, groups)}")
    return styled(figure, "Labels of each client's training data", client_height(rows))


def _target_spread(data: Mapping[str, Any], groups: Sequence[Any], names: Sequence[str]) -> Sketch:
    """A box for each client's targets, from their quartiles."""
    spread = data["quartiles"]
    order, ticks, _ = _sorted_clients(data, groups, names, len(spread))
    quartiles = [(p, spread[c]) for p, c in zip(ticks, order, strict=True) if spread[c]]
    if not quartiles:
        raise ConfigError("no client has targets")
    columns = [clear(column) for column in zip(*(five for _, five in quartiles), strict=True)]
    figure = figure_of(
        [
            {
                "type": "box",
                **dict(zip(_FIVE, columns, strict=True)),
                "y": [p for p, _ in quartiles],
                "orientation": "h",
                "line": {"color": BLUE, "width": 1.5},
                "whiskerwidth": 0.4,
                "showlegend": False,
            }
        ]
    )
    figure.x(title="target in the training data")
    figure.y(client_axis(len(quartiles)), title=f"client{_sorted_by(data, groups)}")
    return styled(figure, "Targets of each client's training data", client_height(len(quartiles)))


_FIVE = ("lowerfence", "q1", "median", "q3", "upperfence")


_BY_TRUE = ", by true group"


def _sorted_by(data: Mapping[str, Any], groups: Sequence[Any]) -> str:
    """The words for an axis about how clients are sorted; "" with a single group."""
    if len({g for g in groups if g is not None}) < 2 and data.get("groups"):
        return _BY_TRUE
    return ", by group" if groups else ""


def _sorted_clients(
    data: Mapping[str, Any], groups: Sequence[Any], names: Sequence[str], count: int
) -> tuple[list[int], list[str], list[int]]:
    """Clients by group, else by true group: their order, their names, and where groups end."""
    true = _sorted_by(data, groups) == _BY_TRUE
    by = data["groups"] if true else groups
    order, ends = by_group(range(count), by)
    labels = ticks_of([names[c] if c < len(names) else f"client {c}" for c in range(count)])
    return order, [labels[c] for c in order], ends


def _unique(names: Sequence[str]) -> list[str]:
    """Names without duplicates: plotly merges categories of the same name."""
    return [f"{n} ({i})" if n in names[:i] else n for i, n in enumerate(names)]
