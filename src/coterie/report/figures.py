"""Pictures of what a method did, from events as they are written to ``events.jsonl``.

Plain dicts and lists go in, plotly figures come out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.report.palette import (
    ALONE,
    BLUE,
    FAINT,
    GREEN,
    INK,
    LOW,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    colour_of,
)
from coterie.run.rundir import rounds_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Event = Mapping[str, Any]
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_FONT = {"family": "Arial, Helvetica, sans-serif", "size": 13, "color": INK}


def groups_over_rounds(events: Sequence[Event]) -> Figure:
    """Who is in which group in which round: a row a client, a column a round.

    ``events`` are the lines of ``events.jsonl``, or ``[result.begun, *result.history]``. Clients
    are sorted by their last group. A group keeps its colour as long as most of it stays together,
    whatever it is called; a client alone in its group is grey, and lines divide what differs.
    """
    import plotly.graph_objects as go

    steps = [e for e in events if e.get("event") not in ("admission", "arrival")]
    steps = [e for e in steps if any(g is not None for g in e.get("groups") or ())]
    if not steps:
        raise ConfigError(
            "no event says who is in which group: give the lines of a run's events.jsonl"
        )
    names = [list(e["groups"]) for e in steps]
    kept = followed(names)
    order = _rows(kept)
    codes, lasting = _codes(kept)
    rounds = [e["round"] for e in steps]
    figure = go.Figure(
        go.Heatmap(
            z=[[column[c] for column in codes] for c in order],
            x=rounds,
            y=list(range(len(order))),
            customdata=[[column[c] for column in names] for c in order],
            text=[[f"client {c}"] * len(rounds) for c in order],
            hovertemplate="round %{x}, %{text}<br>group %{customdata}<extra></extra>",
            colorscale=_steps_of([ALONE, *(colour_of(i) for i in range(len(lasting)))]),
            zmin=-0.5,
            zmax=len(lasting) + 0.5,
            showscale=False,
        )
    )
    figure.add_trace(_borders([[column[c] for column in kept] for c in order], rounds))
    for text, colour in _group_legend(kept, names, lasting):
        figure.add_trace(_swatch(text, colour))
    small = len(order) > 30
    figure.update_xaxes(title="round", range=[rounds[0] - 0.5, rounds[-1] + 0.5], showgrid=False)
    figure.update_yaxes(
        title="client, sorted by its last group",
        tickvals=list(range(len(order))),
        ticktext=[str(c) for c in order],
        tickfont={"size": 8 if small else 11},
        range=[len(order) - 0.5, -0.5],
        showgrid=False,
    )
    return _styled(figure, "Groups over rounds", 160 + (10 if small else 18) * len(order))


def followed(names: Sequence[Sequence[Any]]) -> list[list[int | None]]:
    """Each round's groups under numbers that last: most of a group's members take it along.

    >>> followed([["a", "a", "a", "b"], ["x", "x", "y", "z"]])
    [[0, 0, 0, 1], [0, 0, 2, 1]]
    """
    found: list[list[int | None]] = []
    fresh = 0
    for column in names:
        groups = [g for g in dict.fromkeys(column) if g is not None]
        before = found[-1] if found else [None] * len(column)
        shared = Counter(
            (g, old)
            for g, old in zip(column, before, strict=True)
            if g is not None and old is not None
        )
        number: dict[Any, int] = {}
        for (g, old), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0][1])):
            if g not in number and old not in number.values():
                number[g] = old
        for g in groups:
            if g not in number:
                number[g], fresh = fresh, fresh + 1
        found.append([None if g is None else number[g] for g in column])
    return found


def dendrogram(
    notes: Mapping[str, Any],
    groups: Sequence[Any] | None = None,
    levels: Mapping[float, str] | None = None,
) -> Figure:
    """The tree by which clients were merged, with the height at which it was cut.

    ``notes`` are those with ``dendrogram``: FedClust's of the beginning, DC-PFL's of the round that
    ends its start. ``groups``, in client order, colour the branches; without them the cut does.
    ``levels`` are further cuts as shares of the tree's height, with what to call them.
    """
    import plotly.graph_objects as go

    merges = _noted(notes, "dendrogram", "FedClust's first notes, or DC-PFL's of round `start`")
    if not merges:
        raise ConfigError("a tree of one client has no merges to draw")
    clients = notes.get("clients") or list(range(len(merges) + 1))
    top = merges[-1][2]
    cut = _cut_height(notes, top)
    own = _by_cut(merges, math.inf if cut is None else cut)
    if groups is not None:
        own = followed([[groups[c] for c in clients]])[0]
    figure = go.Figure()
    members, xs, ys = _branches(merges)
    colours = [_branch_colour({own[leaf] for leaf in inside}, own) for inside in members]
    for colour in dict.fromkeys(colours):
        chosen = [i for i, own_colour in enumerate(colours) if own_colour == colour]
        figure.add_trace(
            go.Scatter(
                x=[x for i in chosen for x in (*xs[i], None)],
                y=[y for i in chosen for y in (*ys[i], None)],
                mode="lines",
                line={"color": colour, "width": 2},
                hovertemplate="merged at %{y:.4g}<extra></extra>",
                showlegend=False,
            )
        )
    order = members[-1]
    for number in dict.fromkeys(sorted(own, key=lambda g: -1 if g is None else g)):
        figure.add_trace(
            _leaves([x for x, leaf in enumerate(order) if own[leaf] == number], number)
        )
    if cut is not None and cut <= 1.15 * top:
        _cut_line(figure, cut, _cut_name(notes, cut), RED, "dash")
    for height, label in (levels or {}).items():
        _cut_line(figure, height * top, label, INK, "dot")
    figure.update_xaxes(
        title="client",
        ticks="outside",
        ticklen=6,
        tickcolor="rgba(0,0,0,0)",
        tickvals=list(range(len(order))),
        ticktext=[str(clients[leaf]) for leaf in order],
        tickfont={"size": 8 if len(order) > 50 else 11},
        tickangle=-90 if len(order) > 30 else 0,
        range=[-0.7, len(order) - 0.3],
        showgrid=False,
    )
    figure.update_yaxes(title="distance at which groups merge", rangemode="tozero")
    why = [str(notes["why"])] if notes.get("why") else []
    figure = _styled(figure, "Merge tree of the clients", 460, *why)
    longest = max([len(a.text) for a in figure.layout.annotations], default=0)
    return figure.update_layout(margin_r=30 + 7 * longest, showlegend=False)


def split_levels(events: Sequence[Event]) -> dict[float, str]:
    """DC-PFL's cuts that came to hold, by their share of the tree's height, with their rounds."""
    found: dict[float, str] = {}
    for event in events:
        notes = event.get("notes") or {}
        if (notes.get("trial") or {}).get("adopted"):
            count = len(_sizes(event["groups"]))
            found[notes["gamma"]] = (
                f"γ̃ = {notes['gamma']:g}, round {event['round']}: {count} groups"
            )
    return found


def mixing_matrix(notes: Mapping[str, Any], groups: Sequence[Any]) -> Figure:
    """How much of whose model each client's mean has: rows sum to 1, clients ordered by group.

    ``notes`` are user-centric's of the beginning; ``groups``, in client order, are those found, or
    the true ones.
    """
    import plotly.graph_objects as go

    rows = _noted(notes, "mixing", "user-centric's first notes, of up to 200 clients")
    clients = notes.get("clients") or list(range(len(rows)))
    if len(groups) <= max(clients):
        raise ConfigError(f"{len(groups)} groups were given, but client {max(clients)} has a row")
    numbers = followed([[groups[c] for c in clients]])[0]
    order = sorted(range(len(rows)), key=lambda i: (-1 if numbers[i] is None else numbers[i], i))
    labels = [str(clients[i]) for i in order]
    figure = go.Figure(
        go.Heatmap(
            z=[[rows[i][j] for j in order] for i in order],
            colorscale="Blues",
            zmin=0,
            colorbar={"title": {"text": "weight"}, "thickness": 14},
            customdata=[[labels[j] for j in range(len(order))] for _ in order],
            text=[[label] * len(order) for label in labels],
            hovertemplate="client %{text} takes %{z:.3f} of client %{customdata}<extra></extra>",
        )
    )
    changes = [k for k in range(1, len(order)) if numbers[order[k]] != numbers[order[k - 1]]]
    for k in changes if len(changes) < len(order) - 1 else []:
        low, at, high = -0.5, k - 0.5, len(order) - 0.5
        figure.add_shape(type="line", x0=at, x1=at, y0=low, y1=high, line=_THIN)
        figure.add_shape(type="line", x0=low, x1=high, y0=at, y1=at, line=_THIN)
    ticks = {
        "tickvals": list(range(len(order))),
        "ticktext": labels,
        "tickfont": {"size": 8 if len(order) > 30 else 11},
        "showgrid": False,
    }
    figure.update_xaxes(title="client j, whose model is mixed in", constrain="domain", **ticks)
    figure.update_yaxes(
        title="client i, who receives the mixture",
        autorange="reversed",
        scaleanchor="x",
        constrain="domain",
        **ticks,
    )
    return _styled(figure, "Weights of the mixture, by group", 620)


def silhouette(notes: Mapping[str, Any], floor: float = 0.1) -> Figure:
    """The silhouette of each number of groups, with the least that counts and what was chosen."""
    import plotly.graph_objects as go

    scores = _noted(notes, "silhouette", "FedClust's, or user-centric's with streams=auto")
    if not scores:
        raise ConfigError("no number of groups has a silhouette: fewer than three clients differ")
    points = sorted((int(k), float(v)) for k, v in scores.items())
    best = max(points, key=lambda p: p[1])
    figure = go.Figure(
        go.Scatter(
            x=[k for k, _ in points],
            y=[v for _, v in points],
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
            marker={"size": 7},
            name="silhouette",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=[best[0]],
            y=[best[1]],
            mode="markers",
            marker={"color": RED, "size": 13, "symbol": "diamond"},
            name=f"highest: {best[0]} groups, {best[1]:.3f}",
        )
    )
    figure.add_trace(_level(points, floor, f"least that counts: {floor:g}"))
    said = [str(notes["why"])] if notes.get("why") else []
    if notes.get("contrast") is not None:
        said.append(f"contrast of the gradients {notes['contrast']:.2f}: {_streams(notes)}")
    figure.update_xaxes(title="number of groups", rangemode="tozero")
    figure.update_yaxes(title="mean silhouette of the clients")
    return _styled(figure, "Silhouette by number of groups", 400, *said)


def loss_and_trials(events: Sequence[Event]) -> Figure:
    """DC-PFL: the loss and its trials, γ̃ and the number of groups, the radius of curvature."""

    losses = _series(events, "loss", "DC-PFL")
    figure = _panels([0.48, 0.22, 0.3], second=2)
    figure.add_trace(_line(losses, "loss of the model received", BLUE), row=1, col=1)
    trials = _with(events, "trial")
    for key, symbol, colour in (("old", "circle-open", INK), ("new", "diamond", RED)):
        points = [(e["round"], e["notes"]["trial"][key]) for e in trials]
        name = f"trial: {key} groups, after training"
        figure.add_trace(_dots(points, name, colour, symbol), row=1, col=1)
    for e in trials:
        figure.add_vline(x=e["round"], line={"color": FAINT, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=e["round"],
            y=1.0,
            yref="y domain",
            text=_verdict(e["notes"]["trial"]),
            align="left",
            showarrow=False,
            xanchor="left",
            font={"size": 11},
        )
    figure.add_trace(_stairs(_series(events, "gamma", "DC-PFL"), "γ̃", GREEN), row=2, col=1)
    counts = [(e["round"], len(_sizes(e["groups"]))) for e in _with(events, "phase")]
    stairs = _stairs(counts, "number of groups", PURPLE, "dash")
    figure.add_trace(stairs, row=2, col=1, secondary_y=True)
    radii = _series(events, "radius", "DC-PFL")
    figure.add_trace(_line(radii, "radius of curvature", ORANGE), row=3, col=1)
    found = [(r, v) for r, v in radii if r in _detected(events)]
    name = "rapid decrease has ended"
    figure.add_trace(_dots(found, name, INK, "triangle-down"), row=3, col=1)
    figure.update_yaxes(title_text="training loss", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="γ̃", range=[0, 1.08], row=2, col=1, secondary_y=False)
    figure.update_yaxes(
        title_text="groups",
        range=[0, 1.08 * max(n for _, n in counts)],
        tickmode="auto",
        nticks=5,
        showgrid=False,
        row=2,
        col=1,
        secondary_y=True,
    )
    figure.update_yaxes(title_text="radius", type="log", dtick=1, row=3, col=1)
    figure.update_xaxes(title_text="round", row=3, col=1)
    return _styled(figure, "DC-PFL: loss, trials and the end of rapid decreases", 700)


def hopkins_and_layers(events: Sequence[Event], threshold: float = 0.65) -> Figure:
    """FedTSDP: the Hopkins statistic and its threshold, the shared layers, the clusters.

    Below them, where rounds were scored, the accuracy of the models received.
    """
    tendency = _series(events, "hopkins", "FedTSDP")
    scored = _accuracies(events)
    figure = _panels([0.34, 0.22, 0.22] + [0.22] * bool(scored))
    figure.add_trace(_line(tendency, "Hopkins statistic", BLUE), row=1, col=1)
    clustered = [(r, v) for r, v in tendency if v > threshold]
    figure.add_trace(_dots(clustered, "clustered anew", RED, "circle"), row=1, col=1)
    figure.add_trace(_level(tendency, threshold, f"threshold {threshold:g}"), row=1, col=1)
    layers = _series(events, "shared_layers", "FedTSDP")
    figure.add_trace(_stairs(layers, "shared layers L", GREEN), row=2, col=1)
    halves = [(r, math.floor(2 * v + 0.5) / 2) for r, v in layers]
    figure.add_trace(_stairs(halves, "as sent: half layers", INK, "dot"), row=2, col=1)
    steps = [(e["round"], _sizes(e["groups"])) for e in _with(events, "hopkins")]
    counts = [(r, len(sizes)) for r, sizes in steps]
    figure.add_trace(_stairs(counts, "clusters", PURPLE), row=3, col=1)
    lone = [(r, sizes.count(1)) for r, sizes in steps]
    figure.add_trace(_stairs(lone, "clusters of one client", ORANGE, "dash"), row=3, col=1)
    figure.update_yaxes(title_text="Hopkins H", row=1, col=1)
    figure.update_yaxes(title_text="layers", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="clusters", rangemode="tozero", row=3, col=1)
    if scored:
        figure.add_trace(_line(scored, "accuracy received", BLUE), row=4, col=1)
        figure.update_yaxes(title_text="accuracy", tickformat=".0%", row=4, col=1)
    figure.update_xaxes(title_text="round", row=3 + bool(scored), col=1)
    height = 740 if scored else 600
    return _styled(figure, "FedTSDP: tendency to cluster, shared layers, clusters", height)


def layer_intervals(events: Sequence[Event], share: float = 0.1) -> Figure:
    """Layer-wise aggregation: which layers rested in which round, and how much each differs.

    Above, the share of clients that did not send a layer. Below, a layer's discrepancy over the
    mean of all layers (the mean over groups); the line is the ``share`` under which a layer rests.
    """
    import plotly.graph_objects as go

    steps = _with(events, "layers")
    measured = [
        (e["round"], _relative(e)) for e in steps if e["notes"]["layers"].get("discrepancy")
    ]
    if not measured:
        raise ConfigError(
            "no event has the discrepancy of layers: this picture is of layer-wise aggregation "
            "(dc-pfl, or coterie.layer_wise with alpha 2 or more) after its first rounds"
        )
    layers, rested = list(measured[0][1]), _resting(steps)
    figure = _panels([0.4, 0.6])
    figure.add_trace(
        go.Heatmap(
            z=[[resting.get(layer, 0.0) for resting in rested] for layer in layers],
            x=[e["round"] for e in steps],
            y=layers,
            zmin=0,
            zmax=1,
            colorscale=[(0, LOW), (1, BLUE)],
            ygap=3,
            colorbar={
                "title": {"text": "clients"},
                "tickformat": ".0%",
                "len": 0.4,
                "y": 0.8,
                "thickness": 14,
            },
            hovertemplate="round %{x}: %{y} rested with %{z:.0%} of clients<extra></extra>",
        ),
        row=1,
        col=1,
    )
    for i, layer in enumerate(layers):
        line = _line([(r, gaps[layer]) for r, gaps in measured], layer, colour_of(i))
        line.line.dash = ("solid", "dash", "dot", "dashdot")[i % 4]
        figure.add_trace(line, row=2, col=1)
    ends = [(e["round"], share) for e in steps]
    figure.add_trace(_level(ends, share, f"rests below {share:g}"), row=2, col=1)
    figure.update_yaxes(title_text="layer at rest", autorange="reversed", row=1, col=1)
    ticks = [m * 10**k for k in (-3, -2, -1, 0, 1) for m in (1, 2, 5)]
    figure.update_yaxes(
        title_text="discrepancy / mean",
        type="log",
        tickvals=ticks,
        ticktext=[f"{t:g}" for t in ticks],
        row=2,
        col=1,
    )
    figure.update_xaxes(title_text="round", row=2, col=1)
    said = [] if any(rested) else ["no layer rested in any round"]
    return _styled(figure, "Layers at rest, and how much clients differ in each", 560, *said)


# --- pieces of these pictures -------------------------------------------------------------------

_THIN = {"color": INK, "width": 1}


def _noted(notes: Mapping[str, Any], key: str, where: str) -> Any:
    """A note, or a sentence that says which notes have it."""
    if notes.get(key) is None:
        raise ConfigError(f"these notes have no '{key}': give {where}")
    return notes[key]


def _with(events: Sequence[Event], key: str) -> list[Event]:
    """The rounds whose notes have this key."""
    return [e for e in events if "event" not in e and key in (e.get("notes") or {})]


def _series(events: Sequence[Event], key: str, method: str) -> list[tuple[int, float]]:
    """A note by round; rounds without a value are left out."""
    found = [(e["round"], e["notes"][key]) for e in _with(events, key)]
    found = [(r, v) for r, v in found if v is not None and math.isfinite(v)]
    if not found:
        raise ConfigError(f"no event has '{key}' in its notes: give the events of a {method} run")
    return found


def _accuracies(events: Sequence[Event]) -> list[tuple[int, float]]:
    """The mean accuracy of the models received, in the rounds that were scored."""
    found = [(e["round"], (e.get("received") or {}).get("accuracy")) for e in rounds_of(events)]
    return [(r, v) for r, v in found if v is not None]


def _sizes(groups: Sequence[Any]) -> list[int]:
    return list(Counter(g for g in groups if g is not None).values())


def _detected(events: Sequence[Event]) -> set[int]:
    """The rounds in which DC-PFL found a rapid decrease at its end: a trial is then prepared."""
    return {e["round"] for e in _with(events, "phase") if e["notes"]["phase"] == "sync"}


def _verdict(trial: Mapping[str, Any]) -> str:
    """How a trial went, with the loss of the old groups and that of the new."""
    verdict = "adopted" if trial["adopted"] else "rejected"
    return f"{verdict}<br>{trial['old']:.3g}<br>→ {trial['new']:.3g}"


def _streams(notes: Mapping[str, Any]) -> str:
    count = notes.get("streams")
    return f"{count} stream{'s' * (count != 1)} chosen"


def _relative(event: Event) -> dict[str, float]:
    """Each layer's discrepancy over the mean of the layers, averaged over the present groups."""
    now = {str(g) for g in event["groups"]}
    found = event["notes"]["layers"]["discrepancy"]
    groups = [gaps for slot, gaps in found.items() if slot in now] or list(found.values())
    means = [sum(gaps.values()) / len(gaps) for gaps in groups]
    return {
        layer: sum(g[layer] / m for g, m in zip(groups, means, strict=True) if m) / len(groups)
        for layer in groups[0]
    }


def _resting(steps: Sequence[Event]) -> list[dict[str, float]]:
    """For each round, the share of clients that did not send each layer.

    What rests is decided by the round before; nothing rests where all layers are due, nor in
    DC-PFL's synchronisation and trial. Clients on their own send nothing and do not count.
    """
    found: list[dict[str, float]] = [{}]
    for before, event in pairwise(steps):
        notes, known = event["notes"], before["notes"]
        busy = notes["layers"]["all_due"] or known.get("phase") in ("sync", "trial")
        sent = [
            before["groups"][c]
            for c in event.get("cohort", range(len(before["groups"])))
            if c not in known.get("alone", ())
        ]
        quiet = {} if busy else known["layers"]["quiet"]
        resting = Counter(layer for slot in sent for layer in quiet.get(str(slot), ()))
        found.append({layer: n / len(sent) for layer, n in resting.items()})
    return found


def _steps_of(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale that has each of these colours for one whole number."""
    n = len(colours)
    return [(k / n, colours[i]) for i in range(n) for k in (i, i + 1)]


def _rows(kept: Sequence[Sequence[int | None]]) -> list[int]:
    """The order of the clients: last groups together, and where groups only split, all of them."""
    past = [[-1 if g is None else g for g in history] for history in zip(*kept, strict=True)]
    nested = all(
        len(set(zip(a, b, strict=True))) == len(set(b)) for a, b in pairwise(map(tuple, kept))
    )
    return sorted(range(len(past)), key=lambda c: (past[c] if nested else past[c][::-1], c))


def _codes(kept: Sequence[Sequence[int | None]]) -> tuple[list[list[int | None]], list[int]]:
    """Each cell's colour, 0 for a client alone; and the groups that ever had two members."""
    sizes = [Counter(column) for column in kept]
    several = [
        g
        for column, n in zip(kept, sizes, strict=True)
        for g in column
        if g is not None and n[g] > 1
    ]
    lasting = list(dict.fromkeys(several))
    place = {g: i + 1 for i, g in enumerate(lasting)}
    codes = [
        [None if g is None else place[g] if n[g] > 1 else 0 for g in column]
        for column, n in zip(kept, sizes, strict=True)
    ]
    return codes, lasting


def _group_legend(
    kept: Sequence[Sequence[int | None]], names: Sequence[Sequence[Any]], lasting: Sequence[int]
) -> list[tuple[str, str]]:
    """What to say of each colour: the groups of the last round, or that there are none any more."""
    last = Counter(g for g in kept[-1] if g is not None)
    name = dict(zip(kept[-1], names[-1], strict=True))
    found = [
        (f"group {name[g]}: {last[g]} clients", colour_of(i))
        for i, g in enumerate(lasting)
        if last[g] > 1
    ]
    lone = sum(1 for n in last.values() if n == 1)
    ever = any(n == 1 for column in kept for g, n in Counter(column).items() if g is not None)
    alone = [(f"alone in a group: {lone} clients at the end", ALONE)] if ever else []
    return [*found[:12], *alone]


def _swatch(text: str, colour: str) -> Any:
    import plotly.graph_objects as go

    marker = {"color": colour, "size": 12, "symbol": "square", "line": _THIN}
    return go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=text)


def _borders(rows: Sequence[Sequence[int | None]], rounds: Sequence[int]) -> Any:
    """Lines between neighbours of different groups, up and down as well as in time."""
    import plotly.graph_objects as go

    xs: list[float | None] = []
    ys: list[float | None] = []
    for y, (above, below) in enumerate(pairwise(rows)):
        for x, a, b in zip(rounds, above, below, strict=True):
            if a != b:
                xs += [x - 0.5, x + 0.5, None]
                ys += [y + 0.5, y + 0.5, None]
    for y, row in enumerate(rows):
        for x, (a, b) in zip(rounds[1:], pairwise(row), strict=True):
            if a != b:
                xs += [x - 0.5, x - 0.5, None]
                ys += [y - 0.5, y + 0.5, None]
    line = {"color": PAPER, "width": 1.2}
    return go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False)


def _branches(
    merges: Sequence[Sequence[float]],
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """Of each merge: the leaves below it, left to right, and the corners of its bracket."""
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
    n = len(merges) + 1
    root = list(range(n + len(merges)))
    for i, (left, right, at, *_) in reversed(list(enumerate(merges))):
        if at <= height:
            root[int(left)] = root[int(right)] = root[n + i]
    return followed([root[:n]])[0]


def _branch_colour(inside: set[int | None], own: Sequence[int | None]) -> str:
    """A group's colour where a branch holds that group only; grey above groups."""
    (number, *others) = inside
    return FAINT if others or number is None else colour_of(number)


def _cut_height(notes: Mapping[str, Any], top: float) -> float | None:
    """Where the tree was cut: FedClust's threshold, or DC-PFL's γ̃ of the tree's height."""
    if notes.get("threshold") is not None and math.isfinite(notes["threshold"]):
        return float(notes["threshold"])
    return float(notes["gamma"]) * top if notes.get("gamma") is not None else None


def _cut_name(notes: Mapping[str, Any], cut: float) -> str:
    if notes.get("threshold") is None:
        return f"γ̃ = {notes['gamma']:g}, at first"
    return f"cut at {cut:.3g}"


def _cut_line(figure: Any, height: float, text: str, colour: str, dash: str) -> None:
    """A line across the tree, its name in the margin."""
    line = {"color": colour, "width": 1.5, "dash": dash}
    font = {"color": colour, "size": 12}
    figure.add_hline(y=height, line=line)
    figure.add_annotation(
        x=1.01, xref="paper", xanchor="left", y=height, text=text, showarrow=False, font=font
    )


def _leaves(xs: Sequence[int], number: int | None) -> Any:
    import plotly.graph_objects as go

    colour = FAINT if number is None else colour_of(number)
    marker = {"color": colour, "size": 9, "symbol": _SYMBOLS[(number or 0) % len(_SYMBOLS)]}
    return go.Scatter(
        x=list(xs),
        y=[0] * len(xs),
        mode="markers",
        marker=marker,
        hoverinfo="skip",
        cliponaxis=False,
    )


def _level(points: Sequence[tuple[int, float]], height: float, text: str) -> Any:
    """A dashed line as long as these points, at one height."""
    ends = [min(x for x, _ in points), max(x for x, _ in points)]
    found = _line([(x, height) for x in ends], text, RED)
    found.update(mode="lines")
    found.line.update(width=1.5, dash="dash")
    return found


def _panels(heights: Sequence[float], second: int = 0) -> Any:
    """Panels under one another with the rounds in common; the ``second`` one has two scales."""
    from plotly.subplots import make_subplots

    specs = [[{"secondary_y": row + 1 == second}] for row in range(len(heights))]
    return make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=list(heights),
        vertical_spacing=0.06,
        specs=specs,
    )


def _line(points: Sequence[tuple[int, float]], name: str, colour: str) -> Any:
    import plotly.graph_objects as go

    xs, ys = [r for r, _ in points], [v for _, v in points]
    line, marker = {"color": colour, "width": 2}, {"size": 4}
    return go.Scatter(x=xs, y=ys, mode="lines+markers", line=line, marker=marker, name=name)


def _stairs(
    points: Sequence[tuple[int, float]], name: str, colour: str, dash: str = "solid"
) -> Any:
    found = _line(points, name, colour)
    found.update(mode="lines")
    found.line.update(shape="hv", dash=dash)
    return found


def _dots(points: Sequence[tuple[int, float]], name: str, colour: str, symbol: str) -> Any:
    found = _line(points, name, colour)
    marker = {"color": colour, "size": 9, "symbol": symbol}
    found.update(mode="markers", marker=marker, cliponaxis=False)
    return found


def _styled(figure: Any, title: str, height: int, *subtitle: str) -> Any:
    """With a title, a font, and the legend between title and picture."""
    named = [t.name for t in figure.data if t.showlegend is not False and t.name is not None]
    entry = 10 + 6.5 * max(map(len, named), default=0)
    top = 52 + 26 * bool(subtitle) + 21 * math.ceil(len(named) / max(1, 700 // (entry + 45)))
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 1 - (top - 8) / height}
    figure.update_layout(
        title={
            "text": title,
            "x": 0.01,
            "yref": "container",
            "y": 1 - 14 / height,
            "yanchor": "top",
            "font": {"size": 17},
            "subtitle": {"text": "; ".join(subtitle), "font": {"size": 13, "color": INK}},
        },
        template="plotly_white",
        font=_FONT,
        height=height,
        margin={"l": 70, "r": 30, "t": top, "b": 60},
        legend={**legend, "yanchor": "bottom", "entrywidth": entry, "font": {"size": 12}},
    )
    figure.update_xaxes(title_font_size=14, title_standoff=8)
    figure.update_yaxes(title_font_size=14, title_standoff=8)
    return figure
