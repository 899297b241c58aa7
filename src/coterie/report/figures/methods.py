"""Pictures of what single methods noted: trials, tendencies, layers, silhouettes, steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.following import sizes
from coterie.report.figures.sketch import Sketch, panels
from coterie.report.figures.style import (
    SHARE,
    Event,
    clear,
    dash_of,
    dots,
    figure_of,
    grid,
    having,
    heatmap,
    level,
    line,
    note_of,
    plain,
    series,
    short,
    stairs,
    styled,
)
from coterie.report.palette import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, line_of
from coterie.results.rundir import rounds_of


def silhouette(notes: Mapping[str, Any], floor: float = 0.1, streams: int | None = None) -> Sketch:
    """The silhouette of each number of groups, with its threshold and the choice.

    ``streams`` is the run's number of streams, where it is not the one with the best score.
    """
    scores = note_of(notes, "silhouette", "FedClust's, or user-centric's of up to 100 clients")
    if not scores:
        raise ConfigError(
            "no number of groups has a silhouette: fewer than three clients are different"
        )
    points = sorted((int(k), float(v)) for k, v in scores.items())
    best = max(points, key=lambda p: p[1])
    figure = figure_of(
        [
            line(points, "silhouette", BLUE),
            dots([best], f"highest: {best[0]} groups, {best[1]:.3f}", RED, "diamond"),
            level(points, floor, f"least that counts: {floor:g}"),
        ]
    )
    if streams is not None and streams != best[0] and str(streams) in scores:
        at = (streams, float(scores[str(streams)]))
        figure.add(dots([at], f"this run: {streams} streams, {at[1]:.3f}", INK, "square"))
    subtitle = [plain(notes["why"])] if notes.get("why") else []
    if notes.get("contrast") is not None:
        subtitle.append(f"contrast of the gradients {notes['contrast']:.2f}: {_streams(notes)}")
    figure.x(title="number of groups", rangemode="tozero")
    figure.y(title="mean silhouette of the clients")
    return styled(figure, "Silhouette by number of groups", 400, *subtitle)


def loss_and_trials(events: Sequence[Event]) -> Sketch:
    """DC-PFL: the loss and its trials, γ̃ and the number of groups, the radius of curvature.

    Rapid decreases are shaded up to the round in which their end was found. The line of the radius
    has a gap where it is infinite; a radius that is always infinite has no panel.
    """
    losses = series(events, "loss", "DC-PFL")
    mixed, radii = mixed_rounds(events), radii_of(events)
    bent = any(v is not None for _, v in radii)
    figure = panels([0.48, 0.22, 0.3] if bent else [0.68, 0.32], second=2)
    full = [(r, v) for r, v in losses if r not in mixed]
    figure.add(line(full, "loss of the model received", BLUE), panel=1)
    if mixed:
        name = "with skipped layers, clients using their own"
        figure.add(dots([(r, v) for r, v in losses if r in mixed], name, FAINT, "circle"), panel=1)
    trials = trials_of(events)
    for key, symbol, colour in (("old", "circle-open", INK), ("new", "diamond", RED)):
        points = [(r, t[key]) for r, t in trials]
        name = f"trial: {key} groups, after training"
        verdicts = [_verdict(t) for _, t in trials]
        more = {"hovertext": verdicts, "hovertemplate": "round %{x}: %{hovertext}<extra></extra>"}
        figure.add(dots(points, name, colour, symbol, **more), panel=1)
    decreases = rapid_decreases(events)
    figure.layout["shapes"] = [_upright(r) for r, _ in trials] + [
        _shade(at.x, at.y, *ends)
        for at in (figure.panels[0], *figure.panels[2:])
        for ends in decreases
    ]
    # Narrow marks, so that many trials stay legible; the losses are in the hover text.
    marked = trials if len(trials) <= 8 else []
    figure.layout["annotations"] = [_mark(r, t) for r, t in marked]
    figure.add(stairs(series(events, "gamma", "DC-PFL"), "γ̃", GREEN), panel=2)
    counts = [(e["round"], len(sizes(e["groups"]))) for e in having(events, "phase")]
    number = stairs(counts, "number of groups", PURPLE, "dash")
    figure.add(number, panel=2, second=True)
    ends = [(r, v) for r, v in losses if r in rapid_ends(events)]
    figure.add(dots(ends, "rapid decrease has ended", INK, "triangle-down"), panel=1)
    if bent:
        _add_radii(figure, radii, rapid_ends(events))
    figure.y(title="loss", rangemode="tozero", panel=1)
    figure.y(title="γ̃", range=[0, 1.08], panel=2)
    figure.y(
        title="groups",
        range=[0, 1.08 * max([1, *(n for _, n in counts)])],
        tickmode="auto",
        nticks=5,
        showgrid=False,
        panel=2,
        second=True,
    )
    figure.x(title="round", panel=2 + bent)
    title = "DC-PFL: loss, trials and the end of rapid decreases"
    return styled(figure, title, 700 if bent else 520)


def _add_radii(
    figure: Sketch, radii: Sequence[tuple[int, float | None]], ended: Collection[int]
) -> None:
    """The radius of curvature in the third panel, with the ends of rapid decreases."""
    curve = {
        **line([], "radius of curvature", ORANGE, mode="lines+markers"),
        "x": [r for r, _ in radii],
        "y": clear([v for _, v in radii]),
    }
    figure.add(curve, panel=3)
    known = [(r, v) for r, v in radii if v is not None]
    ends = [(r, v) for r, v in known if r in ended]
    more = {"showlegend": False}
    figure.add(dots(ends, "radius where it has ended", INK, "triangle-down", **more), panel=3)
    low, high = min(v for _, v in known), max(v for _, v in known)
    # Ticks within a decade where there would be at most one otherwise.
    steps = (1, 2, 5) if high < 30 * low else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = math.ceil(len(powers) / 6) if len(steps) == 1 else 1
    ticks = [m * 10.0**k for k in list(powers)[::every] for m in steps]
    named = {"tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}
    figure.y(named, title="radius", type="log", panel=3)


def hopkins_and_layers(events: Sequence[Event], threshold: float = 0.65) -> Sketch:
    """FedTSDP: the Hopkins statistic and its threshold, the shared layers, the clusters.

    Rounds in which clients were clustered are marked, with the clusters after each stage; dotted
    lines are where a half layer less was shared. Below them, where rounds were scored, the accuracy
    of the models received.
    """
    tendency = series(events, "hopkins", "FedTSDP")
    scored = accuracies(events)
    figure = panels([0.34, 0.22, 0.22] + [0.22] * bool(scored))
    figure.add(line(tendency, "Hopkins statistic", BLUE), panel=1)
    clustered = clusterings(events, threshold)
    clustered_points = [(r, v) for r, v in tendency if r in clustered]
    figure.add(dots(clustered_points, "clustered anew", RED, "circle"), panel=1)
    figure.add(level(tendency, threshold, f"threshold {threshold:g}"), panel=1)
    layers = series(events, "shared_layers", "FedTSDP")
    figure.add(stairs(layers, "shared layers L", GREEN), panel=2)
    halves = [(r, math.floor(2 * v + 0.5) / 2) for r, v in layers]
    figure.add(stairs(halves, "as sent: half layers", INK, "dot"), panel=2)
    steps = [(e["round"], sizes(e["groups"])) for e in having(events, "hopkins")]
    counts = [(r, len(sizes)) for r, sizes in steps]
    figure.add(stairs(counts, "clusters", PURPLE), panel=3)
    lone = [(r, sizes.count(1)) for r, sizes in steps]
    figure.add(stairs(lone, "clusters of one client", ORANGE, "dash"), panel=3)
    for word, (name, symbol) in _STAGES.items():
        after = [(r, stages[word]) for r, stages in clustered.items() if word in stages]
        if after:
            figure.add(dots(after, name, INK, symbol), panel=3)
    figure.y(title="Hopkins H", panel=1)
    figure.y(title="layers", rangemode="tozero", panel=2)
    figure.y(title="clusters", rangemode="tozero", panel=3)
    if scored:
        figure.add(line(scored, "accuracy received", BLUE), panel=4)
        figure.y(title="accuracy", tickformat=SHARE, panel=4)
    fewer = [r for (_, before), (r, now) in pairwise(halves) if now < before]
    figure.layout["shapes"] = [_upright(r, at.x, at.y) for r in fewer for at in figure.panels]
    figure.x(title="round", panel=3 + bool(scored))
    height = 760 if scored else 620
    return styled(figure, "FedTSDP: tendency to cluster, shared layers, clusters", height)


_STAGES = {  # what FedTSDP's stages compare, and how their clusters are drawn
    "eps_outputs": ("after the first stage, by outputs", "circle-open"),
    "eps_weights": ("after the second stage, by weights", "cross-thin-open"),
}


def clusterings(events: Sequence[Event], threshold: float) -> dict[int, dict[str, int]]:
    """The rounds in which FedTSDP clustered, with the number of clusters after each stage.

    For runs that did not note their stages: the rounds with the statistic above the threshold.
    """
    steps = having(events, "hopkins")
    counts: dict[int, dict[str, int]] = {
        e["round"]: dict(e["notes"]["stages"]) for e in steps if "stages" in e["notes"]
    }
    return counts or {e["round"]: {} for e in steps if (e["notes"]["hopkins"] or 0) > threshold}


def layer_intervals(events: Sequence[Event], share: float | None = None) -> Sketch:
    """Layer-wise aggregation: which layers were skipped in which round, and how much each differs.

    Above, the share of clients that did not send a layer. Below, a layer's discrepancy over the
    mean of all layers (the mean over groups); the line is the ``share`` under which a layer is
    skipped, if there is one.
    """
    steps = having(events, "layers")
    measured = [
        (e["round"], _relative(e)) for e in steps if e["notes"]["layers"].get("discrepancy")
    ]
    if not measured:
        raise ConfigError(
            "no event has the discrepancy of layers: this picture is of layer-wise aggregation "
            "(dc-pfl, or coterie.layer_wise with alpha 2 or more) after its first rounds"
        )
    layers, rested = list(measured[0][1]), _resting(steps)
    figure = panels([0.4, 0.6])
    figure.add(
        heatmap(
            grid([[resting.get(layer, 0.0) for resting in rested] for layer in layers]),
            "clients that left it out",
            "round %{x}: %{y} was skipped by %{z:.0%} of clients",
            x=[e["round"] for e in steps],
            y=[short(layer) for layer in layers],
            zmin=0,
            zmax=1,
            ygap=3,
        ),
        panel=1,
    )
    for i, layer in enumerate(layers):
        colour, _ = line_of(i)
        gaps_by_round = [(r, gaps[layer]) for r, gaps in measured if layer in gaps]
        figure.add(line(gaps_by_round, short(layer), colour, dash_of(i)), panel=2)
    if share is not None:
        ends = [(e["round"], share) for e in steps]
        figure.add(level(ends, share, f"skipped below {share:g}"), panel=2)
    figure.y(title="skipped layer", autorange="reversed", panel=1)
    intervals = [v for _, gaps in measured for v in gaps.values() if v > 0]
    near = bool(intervals) and max(intervals) < 5 * min(intervals)
    steps_of_ten = (1, 1.2, 1.5, 2, 3, 5, 8) if near else (1, 2, 5)
    ticks = [m * 10**k for k in (-3, -2, -1, 0, 1) for m in steps_of_ten]
    figure.y(
        title="discrepancy / mean",
        type="log",
        tickvals=ticks,
        ticktext=[f"{t:g}" for t in ticks],
        panel=2,
    )
    figure.x(title="round", panel=2)
    subtitle = [] if any(rested) else ["no layer was skipped in any round"]
    return styled(figure, "Skipped layers, and how much clients differ in each", 560, *subtitle)


def accuracies(events: Sequence[Event]) -> list[tuple[int, float]]:
    """The mean accuracy of the models received, in the rounds that were scored."""
    scores = [(e["round"], (e.get("received") or {}).get("accuracy")) for e in rounds_of(events)]
    return [(r, v) for r, v in scores if v is not None]


def rapid_ends(events: Sequence[Event]) -> set[int]:
    """The rounds in which DC-PFL found the end of a rapid decrease, and prepared a trial."""
    phases = [(e["round"], e["notes"]) for e in having(events, "phase")]
    return {r for r, notes in phases if notes.get("ended") or notes["phase"] == "sync"}


def mixed_rounds(events: Sequence[Event]) -> set[int]:
    """The rounds in which clients used their own layers, which have lower losses."""
    return {e["round"] for e in having(events, "phase") if e["notes"].get("mixed")}


def radii_of(events: Sequence[Event]) -> list[tuple[int, float | None]]:
    """The radius of curvature by round, None where it is infinite.

    Rounds before the first radius are left out, and rounds whose loss does not count, which repeat
    the last radius.
    """
    mixed, radii = mixed_rounds(events), list[tuple[int, float | None]]()
    for event in having(events, "radius"):
        value = event["notes"]["radius"]
        value = value if value is not None and 0 < value < math.inf else None
        again = bool(radii) and event["round"] in mixed and value == radii[-1][1]
        if not again and (radii or value is not None):
            radii.append((event["round"], value))
    return radii


def was_bent(events: Sequence[Event], fewest: int, with_mixed: bool = False) -> bool:
    """Whether DC-PFL ever had a radius of curvature, even an infinite one (None in files).

    It needs ``fewest`` losses that count, since the start or the last trial.
    """
    skipped = set() if with_mixed else mixed_rounds(events)
    tried = {r for r, _ in trials_of(events)}
    losses, before = 0, ""
    for event in having(events, "phase"):
        notes, number = event["notes"], event["round"]
        losses += notes.get("loss") is not None and number not in skipped
        if losses >= fewest or notes.get("radius") is not None:
            return True
        if number in tried or (before, notes["phase"]) == ("rest", "watch"):
            losses = 0
        before = notes["phase"]
    return False


def rapid_decreases(events: Sequence[Event]) -> list[tuple[int, int]]:
    """The rounds in which the loss fell rapidly: from the last trial to an end that was found."""
    begins = [e["round"] for e in having(events, "phase")][:1]
    begins += [r for r, _ in trials_of(events)]
    ends = sorted(rapid_ends(events))
    return [(max(b for b in begins if b <= end), end) for end in ends]


def trials_of(events: Sequence[Event]) -> list[tuple[int, dict[str, Any]]]:
    """The trials by round: the loss of the old groups, that of new ones, whether they were adopted.

    In a trial of all cuts, the new groups are the adopted ones, or else the best of the others.
    """
    trials = []
    for event in having(events, "phase"):
        notes = event["notes"]
        verdict = notes.get("verdict", {})
        if "trial" in notes:
            trials.append((event["round"], dict(notes["trial"])))
        elif len(verdict.get("losses", ())) > 1:
            cuts, losses, chosen = verdict["cuts"], verdict["losses"], verdict["chosen"]
            pairs = list(zip(cuts, losses, strict=True))
            new = [loss for cut, loss in pairs if cut == chosen and chosen > 1]
            best = min(new or losses[1:])
            trials.append((event["round"], {"old": losses[0], "new": best, "adopted": chosen > 1}))
    return trials


def _shade(x: str, y: str, begin: int, end: int) -> dict[str, Any]:
    """A band over some rounds of one panel."""
    ends = {"x0": begin, "x1": end, "y0": 0, "y1": 1, "xref": f"x{x}", "yref": f"y{y} domain"}
    return {
        "type": "rect",
        **ends,
        "fillcolor": RED,
        "opacity": 0.1,
        "line": {"width": 0},
        "layer": "below",
    }


def _upright(round: float, x: str = "", y: str = "") -> dict[str, Any]:
    """A dotted line through a panel."""
    style = {"color": FAINT, "width": 1, "dash": "dot"}
    ends = {"x0": round, "x1": round, "y0": 0, "y1": 1}
    return {"type": "line", **ends, "xref": f"x{x}", "yref": f"y{y} domain", "line": style}


def _mark(round: int, trial: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a trial, as one character."""
    return {
        "x": round,
        "y": 1.0,
        "yref": "y domain",
        "text": "✓" if trial["adopted"] else "✗",
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "top",
        "font": {"size": 13, "color": INK},
    }


def _verdict(trial: Mapping[str, Any]) -> str:
    """The outcome of a trial, with the losses of the old and the new groups."""
    verdict = "adopted" if trial["adopted"] else "rejected"
    return f"{verdict}, {trial['old']:.3g} → {trial['new']:.3g}"


def _streams(notes: Mapping[str, Any]) -> str:
    count = notes.get("streams")
    return f"{count} stream{'s' * (count != 1)} chosen"


def _relative(event: Event) -> dict[str, float]:
    """Each layer's discrepancy over the mean of the layers, averaged over the present groups."""
    now = {str(g) for g in event["groups"]}
    discrepancy = event["notes"]["layers"]["discrepancy"]
    groups = [gaps for slot, gaps in discrepancy.items() if slot in now] or list(
        discrepancy.values()
    )
    means = [sum(gaps.values()) / len(gaps) for gaps in groups]
    return {
        layer: sum(g[layer] / m for g, m in zip(groups, means, strict=True) if m) / len(groups)
        for layer in groups[0]
    }


def _resting(steps: Sequence[Event]) -> list[dict[str, float]]:
    """For each round, the share of clients that did not send each layer.

    The round before decides which layers are skipped; none is where all layers are due, nor in
    DC-PFL's synchronisation and trial. Clients on their own send nothing and do not count.
    """
    totals: list[dict[str, float]] = [{}]
    for before, event in pairwise(steps):
        notes, known = event["notes"], before["notes"]
        busy = notes["layers"]["all_due"] or known.get("phase") in ("sync", "trial", "ask")
        sent = [
            before["groups"][c]
            for c in event.get("cohort", range(len(before["groups"])))
            if c not in known.get("alone", ())
        ]
        quiet = {} if busy else known["layers"]["quiet"]
        resting = Counter(layer for slot in sent for layer in quiet.get(str(slot), ()))
        totals.append({layer: n / len(sent) for layer, n in resting.items()})
    return totals


def steps_by_round(events: Sequence[Event]) -> Sketch:
    """Adaptive τ: the number of local steps in each round."""
    points = series(events, "tau", "method with adaptive local steps")
    figure = figure_of([stairs(points, "local steps τ", BLUE)], showlegend=False)
    figure.x(title="round")
    figure.y(title="local steps τ", rangemode="tozero")
    return styled(figure, "Local steps by round", 360)
