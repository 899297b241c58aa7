"""The groups of clients over rounds, with a row for each client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from coterie.report.figures.following import (
    GroupCodes,
    codes_of,
    followed,
    in_order,
    names_of_groups,
    steps_of_groups,
)
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    Event,
    figure_of,
    grid,
    heatmap,
    plain,
    steps_of,
    styled,
    swatch,
    ticks_of,
)
from coterie.report.palette import ALONE, PAPER, colour_of

_MOST_NAMED = (
    3000  # cells with the group in their hover text: with more the file would be too large
)


def groups_over_rounds(events: Sequence[Event], names: Sequence[str] = ()) -> Sketch:
    """Each client's group in each round: a row for each client, a column for each round.

    ``events`` are the lines of ``events.jsonl``, or ``[result.begun, *result.history]``; ``names``
    are the clients' names. Clients are sorted by their last group. A group keeps its colour as long
    as most of it stays together, whatever its name; a client alone in its group is grey, and lines
    separate different groups.
    """
    steps = steps_of_groups(events)
    names_by_round = names_of_groups(steps)
    kept = followed(names_by_round)
    order = in_order(kept)
    codes, lasting = codes_of(kept)
    rounds = [e["round"] for e in steps]
    labels = ticks_of([names[c] if c < len(names) else f"client {c}" for c in range(len(order))])
    few = len(order) * len(rounds) <= _MOST_NAMED
    cells = [
        ["–" if col[c] is None else plain(col[c]) for col in names_by_round] for c in order if few
    ]
    more = {"customdata": cells} if few else {}
    complete = all(g is not None for column in kept for g in column)
    figure = figure_of(
        [
            heatmap(
                grid([[column[c] for column in codes] for c in order], "i2" if complete else "f4"),
                "",
                "round %{x}, client %{y}" + "<br>group %{customdata}" * few,
                x=rounds,
                y=[labels[c] for c in order],
                colorscale=steps_of([ALONE, *(colour_of(i) for i in range(len(lasting)))]),
                zmin=-0.5,
                zmax=len(lasting) + 0.5,
                showscale=False,
                **more,
            ),
            *(swatch(text, colour) for text, colour in _legend(kept, names_by_round, lasting)),
        ],
        shapes=_borders([[column[c] for column in kept] for c in order], rounds),
    )
    # Without a range, the empty squares of the legend would widen the axis.
    figure.x(title="round", range=[rounds[0] - 0.5, rounds[-1] + 0.5], showgrid=False)
    figure.y(client_axis(len(order)), title="client, sorted by its last group")
    return styled(figure, "Groups over rounds", client_height(len(order)))


def client_axis(rows: int) -> dict[str, Any]:
    """An axis of clients from top to bottom, with as many names as fit."""
    return {
        "type": "category",
        "range": [rows - 0.5, -0.5],
        "nticks": min(rows, 50),
        "tickfont": {"size": 11 if rows <= 30 else 9},
        "showgrid": False,
    }


def client_height(rows: int) -> float:
    """The height of a picture with a row for each client."""
    return 160 + min(16 * rows + 60, 720)


def _legend(
    kept: Sequence[GroupCodes], names: Sequence[Sequence[Any]], lasting: Sequence[int]
) -> list[tuple[str, str]]:
    """The legend's entries: the groups of the last round, and clients alone if there were any."""
    last = Counter(g for g in kept[-1] if g is not None)
    name = dict(zip(kept[-1], names[-1], strict=True))
    entries = [
        (f"group {plain(name[g])}: {last[g]} clients", colour_of(i))
        for i, g in enumerate(lasting)
        if last[g] > 1
    ]
    lone = sum(1 for n in last.values() if n == 1)
    ever = any(n == 1 for column in kept for g, n in Counter(column).items() if g is not None)
    alone = [(f"alone in a group: {lone} clients at the end", ALONE)] if ever else []
    return [*entries[:12], *alone]


def _borders(rows: Sequence[GroupCodes], rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Lines between neighbouring cells of different groups, as one path."""
    edges = [(a + b) / 2 for a, b in pairwise(rounds)]
    edges = [rounds[0] - 0.5, *edges, rounds[-1] + 0.5]
    path = []
    for y, (above, below) in enumerate(pairwise(rows)):
        start: float | None = None
        for x, (a, b) in enumerate(zip(above, below, strict=True)):
            if a != b and start is None:
                start = edges[x]
            if start is not None and (a == b or x == len(above) - 1):
                end = edges[x + 1] if a != b else edges[x]
                path.append(f"M{start:g},{y + 0.5}H{end:g}")
                start = None
    for y, row in enumerate(rows):
        for x, (a, b) in enumerate(pairwise(row)):
            if a != b:
                path.append(f"M{edges[x + 1]:g},{y - 0.5}V{y + 0.5}")
    line = {"color": PAPER, "width": 1.2}
    return [{"type": "path", "path": "".join(path), "line": line}] if path else []
