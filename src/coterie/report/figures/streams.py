"""Groups over rounds as streams of clients that split and merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coterie.report.figures.following import (
    GroupCodes,
    codes_of,
    followed,
    names_of_groups,
    steps_of_groups,
)
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import Event, clear, figure_of, hover_names, plain, short, styled
from coterie.report.palette import ALONE, FAINT, GRID, INK, PAPER, colour_of

MOST_COLUMNS = 12
_LONE, _NONE = (
    -1,
    -2,
)  # blocks that are not groups: clients that are alone, and clients without a group
_WIDTH = 0.07  # half the width of a block, where columns are 1 apart


@dataclass(frozen=True)
class Band:
    """A group in a column, from ``low`` to ``high`` in clients, including gaps."""

    column: int
    group: int
    low: float
    high: float
    members: tuple[int, ...]


@dataclass(frozen=True)
class Ribbon:
    """The clients that move from one block to another, as a band as wide as their number."""

    column: int
    start: int
    end: int
    low: float  # of its lower edge at the start
    to: float  # of its lower edge at the end
    members: tuple[int, ...]


@dataclass(frozen=True)
class AlluvialLayout:
    """The picture in numbers: ``rounds`` are its columns, ``changes`` the number of all changes."""

    rounds: list[int]
    changes: int
    blocks: list[Band]
    ribbons: list[Ribbon]


def alluvial(events: Sequence[Event], names: Sequence[str] = ()) -> Sketch:
    """Groups over rounds: a column for each change, with streams as wide as their clients.

    ``events`` are the lines of ``events.jsonl``, ``names`` the clients' names. A group keeps its
    colour as long as most of it stays together; clients alone in their groups are one grey block.
    With more than twelve changes, those that moved most clients are shown.
    """
    steps = steps_of_groups(events)
    names_by_round = names_of_groups(steps)
    kept = followed(names_by_round)
    hues = {group: colour_of(i) for i, group in enumerate(codes_of(kept)[1])}
    flow = streams([e["round"] for e in steps], kept)
    called = _names_of_blocks(steps, names_by_round, kept)
    labels = [names[c] if c < len(names) else f"client {c}" for c in range(len(names_by_round[0]))]
    last = len(flow.rounds) - 1
    most = max(Counter(b.column for b in flow.blocks).values())
    height = min(760, 300 + 5 * len(labels) + 6 * most) if flow.changes else 230 + 16 * most
    figure = figure_of(
        [_hover_of_ribbons(flow, called, labels), _hover_of_blocks(flow, called, labels)],
        shapes=_shapes(flow, hues),
        hoverdistance=50,
        showlegend=False,
    )
    figure.x(
        title="after round" if last else "",
        tickvals=list(range(last + 1)),
        ticktext=["start" if r == 0 else str(r) for r in flow.rounds],
        range=[-0.2, last + 0.1] if last else [-0.5, 0.5],
        showgrid=False,
        fixedrange=True,
    )
    tall = max(b.high for b in flow.blocks)
    figure.y(
        _labels(flow, called, last, height),
        range=[tall + 0.5, -0.5],
        side="right",
        showgrid=False,
        fixedrange=True,
    )
    return styled(figure, "Groups over rounds", height)


def streams(rounds: Sequence[int], kept: Sequence[GroupCodes]) -> AlluvialLayout:
    """The layout of blocks and bands; ``kept`` are the groups' lasting numbers, a list a round.

    >>> found = streams([1, 2, 3], [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
    >>> found.rounds, [(r.start, r.end, len(r.members)) for r in found.ribbons][:2]
    ([1, 2, 3], [(0, 0, 2), (0, 1, 2)])
    """
    columns = [_homes(column) for column in kept]
    moved = [0] + [
        sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairwise(columns)
    ]
    changed = [i for i, n in enumerate(moved) if n]
    most = sorted(changed, key=lambda i: (-moved[i], i))[: MOST_COLUMNS - 2]
    chosen = sorted({0, *most, len(kept) - 1})
    shown = [columns[i] for i in chosen]
    orders = _orders(shown)
    gap = max(0.35, 0.018 * len(shown[0]))
    tall = max(len(shown[0]) + gap * (len(order) - 1) for order in orders)
    blocks: list[Band] = []
    for place, (column, order) in enumerate(zip(shown, orders, strict=True)):
        at = (tall - len(column) - gap * (len(order) - 1)) / 2
        for group in order:
            members = tuple(c for c, g in enumerate(column) if g == group)
            low = round(at, 4) + 0.0  # paths allow neither powers of ten nor minus zero
            blocks.append(Band(place, group, low, low + len(members), members))
            at += len(members) + gap
    return AlluvialLayout(
        [rounds[i] for i in chosen], len(changed), blocks, _ribbons(shown, blocks)
    )


# --- where things lie -----------------------------------------------------------------------------


def _homes(column: GroupCodes) -> list[int]:
    """The block of each client: its group, or one of the two that are not groups."""
    size = Counter(column)
    return [_NONE if g is None else g if size[g] > 1 else _LONE for g in column]


def _orders(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The blocks of each column from top to bottom, so that few streams cross.

    Each column is sorted by its members' positions in its neighbour, forwards and backwards; the
    order with the fewest crossings is kept.
    """
    orders = [sorted(set(column), key=_rank) for column in columns]
    flows = [Counter(zip(a, b, strict=True)) for a, b in pairwise(columns)]
    best, fewest = orders, _crossings(orders, flows)
    for sweep in range(6):
        orders = [list(order) for order in orders]
        there = range(1, len(columns)) if sweep % 2 == 0 else range(len(columns) - 2, -1, -1)
        for i in there:
            j = i - 1 if sweep % 2 == 0 else i + 1
            flow = flows[min(i, j)]
            place = {g: p for p, g in enumerate(orders[j])}
            orders[i].sort(key=lambda g: (_rank(g)[0], _middle(g, flow, place, i > j), _rank(g)))
        crossed = _crossings(orders, flows)
        if crossed < fewest:
            best, fewest = orders, crossed
    return best


def _rank(group: int) -> tuple[int, int]:
    """Groups first, clients that are alone below them, clients without a group last."""
    return (max(0, -group), group)


def _middle(
    group: int, flow: Mapping[tuple[int, int], int], place: Mapping[int, int], second: bool
) -> float:
    """The mean position of a block's members in the neighbouring column."""
    neighbours = [(place[p[not second]], n) for p, n in flow.items() if p[second] == group]
    return sum(at * n for at, n in neighbours) / max(1, sum(n for _, n in neighbours))


def _crossings(
    orders: Sequence[Sequence[int]], flows: Sequence[Mapping[tuple[int, int], int]]
) -> int:
    """The number of pairs of clients whose paths cross."""
    count = 0
    for (one, other), flow in zip(pairwise(orders), flows, strict=True):
        a, b = ({g: p for p, g in enumerate(order)} for order in (one, other))
        ways = [(a[s], b[e], n) for (s, e), n in flow.items()]
        count += sum(
            n * m
            for i, (s, e, n) in enumerate(ways)
            for t, f, m in ways[i + 1 :]
            if (s - t) * (e - f) < 0
        )
    return count


def _ribbons(columns: Sequence[Sequence[int]], blocks: Sequence[Band]) -> list[Ribbon]:
    """The streams between neighbouring columns, without crossings at their blocks."""
    where = {(b.column, b.group): b for b in blocks}
    ribbons = []
    for i, (one, other) in enumerate(pairwise(columns)):
        members: dict[tuple[int, int], list[int]] = {}
        for client, way in enumerate(zip(one, other, strict=True)):
            members.setdefault(way, []).append(client)

        def low(column: int, group: int) -> float:
            return where[column, group].low

        leaving = {g: low(i, g) for g in set(one)}
        starts = {}
        for s, e in sorted(members, key=lambda w: (low(i, w[0]), low(i + 1, w[1]))):
            starts[s, e] = leaving[s]
            leaving[s] += len(members[s, e])
        coming = {g: low(i + 1, g) for g in set(other)}
        for s, e in sorted(members, key=lambda w: (low(i + 1, w[1]), low(i, w[0]))):
            ribbons.append(Ribbon(i, s, e, starts[s, e], coming[e], tuple(members[s, e])))
            coming[e] += len(members[s, e])
    return sorted(ribbons, key=lambda r: (r.column, r.low))


# --- how they are drawn ---------------------------------------------------------------------------


def _colour(group: int, hues: Mapping[int, str]) -> str:
    return GRID if group == _NONE else ALONE if group == _LONE else hues[group]


def _shapes(flow: AlluvialLayout, hues: Mapping[int, str]) -> list[dict[str, Any]]:
    """Bands and blocks, with one shape for each colour: hundreds of shapes would be slow."""
    bands: dict[int, list[str]] = {}
    for ribbon in flow.ribbons:
        bands.setdefault(ribbon.end, []).append(path_of(ribbon))
    blocks: dict[int, list[str]] = {}
    for b in flow.blocks:
        low, high = clear([b.low, b.high], 6)
        left, right = f"{b.column - _WIDTH:g}", f"{b.column + _WIDTH:g}"
        blocks.setdefault(b.group, []).append(f"M{left},{low}H{right}V{high}H{left}Z")
    common = {"type": "path", "layer": "below", "fillrule": "nonzero"}
    streams = [
        {
            **common,
            "path": "".join(paths),
            "fillcolor": _colour(group, hues),
            "opacity": 0.75 if group < 0 else 0.5,
            "line": {"width": 0},
        }
        for group, paths in bands.items()
    ]
    return streams + [
        {
            **common,
            "path": "".join(paths),
            "fillcolor": _colour(group, hues),
            "line": {"width": 1, "color": FAINT if group < 0 else PAPER},
        }
        for group, paths in blocks.items()
    ]


def path_of(ribbon: Ribbon) -> str:
    """A band with smooth edges; all bands have the same orientation, so that they may overlap."""
    a, b = ribbon.column + _WIDTH, ribbon.column + 1 - _WIDTH
    m, wide = ribbon.column + 0.5, len(ribbon.members)
    y, z, v, w = clear([ribbon.low, ribbon.to, ribbon.to + wide, ribbon.low + wide], 6)
    return f"M{a:g},{y}C{m:g},{y} {m:g},{z} {b:g},{z}L{b:g},{v}C{m:g},{v} {m:g},{w} {a:g},{w}Z"


def _names_of_blocks(
    steps: Sequence[Event], names_by_round: Sequence[Sequence[Any]], kept: Sequence[GroupCodes]
) -> dict[tuple[int, int], str]:
    """The method's name of a group, by round and lasting number."""
    return {
        (event["round"], number): str(name)
        for event, names, numbers in zip(steps, names_by_round, kept, strict=True)
        for name, number in zip(names, numbers, strict=True)
        if number is not None
    }


def _called(block: Band, flow: AlluvialLayout, called: Mapping[tuple[int, int], str]) -> str:
    if block.group < 0:
        return "alone" if block.group == _LONE else "no group"
    return called[flow.rounds[block.column], block.group]


def _labels(
    flow: AlluvialLayout, called: Mapping[tuple[int, int], str], last: int, height: float
) -> dict[str, Any]:
    """Names and sizes beside the blocks of the last column, as ticks, which get a margin."""
    tall = max(b.high for b in flow.blocks)
    line = 14 * tall / (height - 120)  # of text, in clients
    places: list[float] = []
    texts: list[str] = []
    for block in flow.blocks:
        middle = (block.low + block.high) / 2
        # A name that would cover the one above is left out; it is in the hover text.
        if block.column == last and (not places or middle - places[-1] > line):
            places.append(middle)
            texts.append(f"{short(_called(block, flow, called), 12)}: {len(block.members)}")
    return {"tickvals": clear(places), "ticktext": texts}


def _points(xs: Sequence[float], ys: Sequence[float], texts: Sequence[str]) -> Any:
    """Invisible points with hover text."""
    return {
        "type": "scatter",
        "x": clear(xs),
        "y": clear(ys),
        "mode": "markers",
        "marker": {"size": 12, "opacity": 0},
        "hovertext": list(texts),
        "hoverinfo": "text",
        "hoverlabel": {"bgcolor": PAPER, "font": {"color": INK}},
        "showlegend": False,
    }


def _hover_of_ribbons(
    flow: AlluvialLayout, called: Mapping[tuple[int, int], str], labels: Sequence[str]
) -> Any:
    where = {(b.column, b.group): b for b in flow.blocks}
    xs, ys, texts = [], [], []
    for r in flow.ribbons:
        xs.append(r.column + 0.5)
        ys.append((r.low + r.to + len(r.members)) / 2)
        start, end = where[r.column, r.start], where[r.column + 1, r.end]
        way = f"{plain(_called(start, flow, called))} → {plain(_called(end, flow, called))}"
        texts.append(f"{_of(way, r.members)}<br>{_client_list(r.members, labels)}")
    return _points(xs, ys, texts)


def _hover_of_blocks(
    flow: AlluvialLayout, called: Mapping[tuple[int, int], str], labels: Sequence[str]
) -> Any:
    xs, ys, texts = [], [], []
    for b in flow.blocks:
        xs.append(b.column)
        ys.append((b.low + b.high) / 2)
        name = plain(_called(b, flow, called))
        title = _of(name if b.group < 0 else f"group {name}", b.members)
        texts.append(f"round {flow.rounds[b.column]}, {title}<br>{_client_list(b.members, labels)}")
    return _points(xs, ys, texts)


def _of(way: str, members: Sequence[int]) -> str:
    return f"{way}: {len(members)} client{'s' * (len(members) != 1)}"


def _client_list(members: Sequence[int], labels: Sequence[str]) -> str:
    """Names in lines short enough for a phone."""
    parts = hover_names([labels[c] for c in members]).split(", ")
    lines = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    return ",<br>".join(lines)
