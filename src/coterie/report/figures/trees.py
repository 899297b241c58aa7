"""The tree by which clients were merged into groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.following import followed, sizes
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    Event,
    clear,
    figure_of,
    level,
    note_of,
    plain,
    short,
    styled,
    symbol_of,
)
from coterie.report.palette import FAINT, INK, RED, colour_of

_GAP = (math.nan, math.nan)
_ABOVE = INK  # colour of branches that hold several groups, which are thin


def dendrogram(
    notes: Mapping[str, Any],
    groups: Sequence[Any] | None = None,
    levels: Mapping[float, str] | None = None,
    names: Sequence[str] = (),
    numbers: Sequence[int | None] | None = None,
) -> Sketch:
    """The tree by which clients were merged, with the height at which it was cut.

    ``notes`` are those with ``dendrogram``: FedClust's first notes, or DC-PFL's of the round that
    has a tree. Branches have the colours of ``groups``, by client; without them, of the cut.
    ``levels`` are further cuts as shares of the tree's height, with their titles; ``names`` are the
    clients' names. ``numbers`` give groups the colours that they have elsewhere (None is grey).
    """
    merges = note_of(notes, "dendrogram", "FedClust's first notes, or DC-PFL's of round `start`")
    if not merges:
        raise ConfigError("a tree of one client has no merges to draw")
    clients = notes.get("clients") or list(range(len(merges) + 1))
    top = merges[-1][2]
    cut = cut_height(notes, top)
    cut_groups = _by_cut(merges, math.inf if cut is None else cut)
    if groups is not None:
        cut_groups = followed([[groups[c] for c in clients]])[0]
    if numbers is not None:
        cut_groups = [numbers[c] if c < len(numbers) else None for c in clients]
    members, xs, ys = _branches(merges)
    traces = _lines(members, xs, ys, cut_groups)
    order = members[-1]
    labels = [names[c] if c < len(names) else f"client {c}" for c in clients]
    for number in dict.fromkeys(sorted(cut_groups, key=lambda g: -1 if g is None else g)):
        own_places = [x for x, leaf in enumerate(order) if cut_groups[leaf] == number]
        traces.append(_leaves(own_places, [labels[order[x]] for x in own_places], number))
    ends = [(-0.6, 0.0), (len(order) - 0.4, 0.0)]
    if cut is not None and cut <= 1.15 * top:
        traces.append(level(ends, cut, _cut_name(notes, cut), RED))
    for height, label in (levels or {}).items():
        traces.append(level(ends, height * top, plain(label), INK, "dot"))
    figure = figure_of(traces)
    numbered = not names or all(p == f"client {c}" for p, c in zip(labels, clients, strict=True))
    ticks = [str(clients[i]) if numbered else short(labels[i], 12) for i in order]
    _name_leaves(figure, ticks)
    figure.y(title="distance at which groups merge", rangemode="tozero")
    why = [plain(notes["why"])] if notes.get("why") else []
    return styled(figure, "Merge tree of the clients", 460, *why)


def _lines(
    members: Sequence[Sequence[int]],
    xs: Sequence[Sequence[float]],
    ys: Sequence[Sequence[float]],
    own: Sequence[int | None],
) -> list[Any]:
    """The branches, with one line with gaps for each colour."""
    colours = [_branch_colour({own[leaf] for leaf in inside}) for inside in members]
    traces: list[Any] = []
    for colour in dict.fromkeys(colours):
        chosen = [i for i, own_colour in enumerate(colours) if own_colour == colour]
        corners = [(x, y) for i in chosen for x, y in [*zip(xs[i], ys[i], strict=True), _GAP]]
        above = colour == _ABOVE
        traces.append(
            {
                "type": "scatter",
                "x": clear([x for x, _ in corners]),
                "y": clear([y for _, y in corners]),
                "mode": "lines",
                "line": {"color": colour, "width": 1 if above else 2},
                "hovertemplate": "merged at %{y:.4g}<extra></extra>",
                **({"name": "holds several groups"} if above else {"showlegend": False}),
            }
        )
    return traces


def _name_leaves(figure: Sketch, names: Sequence[str]) -> None:
    figure.x(
        title="client",
        tickvals=list(range(len(names))),
        ticktext=names,
        tickfont={"size": 8 if len(names) > 50 else 10},
        tickangle=-90 if len(names) > 12 else 0,
        range=[-0.7, len(names) - 0.3],
        ticks="outside",
        ticklen=7,
        tickcolor="rgba(0,0,0,0)",
        automargin=True,
        showgrid=False,
    )


@dataclass(frozen=True)
class AdoptedCut:
    """Groups that DC-PFL adopted: γ̃ as a share of the tree's height, the round, and their number.

    ``of_tree`` is whether they are a cut of the tree; groups from the evidence need not be.
    """

    gamma: float
    round: int
    groups: int
    of_tree: bool = True


def later_cuts(events: Sequence[Event]) -> list[AdoptedCut]:
    """The groups that DC-PFL adopted after the first ones."""
    noted_events = [(e, e.get("notes") or {}) for e in events]
    tree = next((notes for _, notes in noted_events if notes.get("dendrogram")), None)
    return [
        AdoptedCut(
            notes["gamma"],
            event["round"],
            len(sizes(event["groups"])),
            tree is None or is_cut(tree, event["groups"]),
        )
        for event, notes in noted_events
        if (notes.get("trial") or {}).get("adopted")
        or ("gamma" in notes and (notes.get("verdict") or {}).get("chosen", 1) > 1)
    ]


def split_levels(events: Sequence[Event]) -> dict[float, str]:
    """The cuts that DC-PFL adopted, by their share of the tree's height, with their titles."""
    return {
        cut.gamma: f"γ̃ = {cut.gamma:g}, round {cut.round}: {cut.groups} groups"
        for cut in later_cuts(events)
        if cut.of_tree
    }


def is_cut(notes: Mapping[str, Any], groups: Sequence[Any]) -> bool:
    """Whether some cut of a noted tree gives these groups, by client.

    >>> tree = {"dendrogram": [[0, 1, 1.0, 2], [2, 3, 5.0, 3]]}
    >>> is_cut(tree, ["a", "a", "b"]), is_cut(tree, ["a", "b", "b"])
    (True, False)
    """
    merges = notes["dendrogram"]
    clients = notes.get("clients") or range(len(merges) + 1)
    client_groups = [groups[c] if c < len(groups) else None for c in clients]
    cut = _undone(merges, len(set(client_groups)) - 1)
    return len(set(zip(client_groups, cut, strict=True))) == len(set(client_groups))


def _branches(
    merges: Sequence[Sequence[float]],
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """For each merge, the leaves below it, left to right, and the corners of its bracket."""
    n = len(merges) + 1
    members: list[list[int]] = [[leaf] for leaf in range(n)]
    for left, right, *_ in merges:
        members.append([*members[int(left)], *members[int(right)]])
    middle = [0.0] * len(members)
    for place, leaf in enumerate(members[-1]):
        middle[leaf] = float(place)
    heights = [0.0] * n + [float(m[2]) for m in merges]
    xs, ys = [], []
    for i, (left, right, height, *_) in enumerate(merges):
        a, b = int(left), int(right)
        middle[n + i] = (middle[a] + middle[b]) / 2
        xs.append([middle[a], middle[a], middle[b], middle[b]])
        ys.append([heights[a], float(height), float(height), heights[b]])
    return members[n:], xs, ys


def _by_cut(merges: Sequence[Sequence[float]], height: float) -> list[int | None]:
    """Each leaf's group if the merges above a height are undone."""
    return followed([_undone(merges, sum(m[2] > height for m in merges))])[0]


def _undone(merges: Sequence[Sequence[float]], last: int) -> list[int]:
    """Each leaf's branch if this many of the last merges are undone."""
    n = len(merges) + 1
    root = list(range(n + len(merges)))
    for i in reversed(range(len(merges) - last)):
        left, right = map(int, merges[i][:2])
        root[left] = root[right] = root[n + i]
    return root[:n]


def _branch_colour(inside: set[int | None]) -> str:
    """A group's colour where a branch holds only that group; grey for clients that are alone."""
    (number, *others) = inside
    return _ABOVE if others or number is None else colour_of(number)


def cut_height(notes: Mapping[str, Any], top: float) -> float | None:
    """The height of the cut: FedClust's threshold, or DC-PFL's γ̃ times the tree's height."""
    if notes.get("threshold") is not None and math.isfinite(notes["threshold"]):
        return float(notes["threshold"])
    return float(notes["gamma"]) * top if notes.get("gamma") is not None else None


def _cut_name(notes: Mapping[str, Any], cut: float) -> str:
    if notes.get("threshold") is None:
        return f"γ̃ = {notes['gamma']:g}, at first"
    return f"cut at {cut:.3g}"


def _leaves(xs: Sequence[int], labels: Sequence[str], number: int | None) -> Any:
    colour = FAINT if number is None else colour_of(number)
    return {
        "type": "scatter",
        "x": list(xs),
        "y": [0] * len(xs),
        "mode": "markers",
        "marker": {"color": colour, "size": 9, "symbol": symbol_of(number or 0)},
        "hovertext": [plain(p) for p in labels],
        "hoverinfo": "text",
        "cliponaxis": False,
        **({"name": "alone"} if number is None else {"showlegend": False}),
    }
