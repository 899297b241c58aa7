"""Several runs in one picture: a line for each run, or one for all seeds of a set-up."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.clients import quarters, scores_of
from coterie.report.figures.scores import AXES, Place, curve, finish, said, x_axis
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    SHARE,
    Event,
    band,
    clear,
    dots,
    figure_of,
    line,
    short,
    styled,
    symbol_of,
)
from coterie.report.palette import FAINT, INK, line_of
from coterie.report.reading import Reading, number
from coterie.results.findings import rested
from coterie.results.titles import reference_of

_SEED = re.compile(r"[-_/, ]*\bseed[=_ -]?\d+", re.IGNORECASE)
_PARAMETERS = re.compile(r"[a-z_.]+=[^/]+")
CEILING, ALONE = "ceiling", "alone"
_SAME = {  # settings that do not change the set-up
    "run": (
        "seed",
        "engine",
        "workers",
        "address",
        "checkpoint_every",
        "device",
        "cpus_per_worker",
        "gpus_per_worker",
    ),
    "data": ("folder",),
}


@dataclass(frozen=True)
class KindOfRun:
    """Runs that differ only in their seed, and the title that they share.

    No two kinds have the same title. ``place`` is the kind's place among the usable ones, which
    chooses its colour in all pictures; reference lines have neutral colours.
    """

    title: str
    runs: Sequence[Reading]
    place: int = 0

    @property
    def reference(self) -> str:
        """What it is a reference line for: "ceiling", "alone", or "" for a usable method."""
        return reference_of(self.runs[0].method)

    @property
    def called(self) -> str:
        """The title, with what it is a reference line for."""
        return f"{self.title} ({self.reference})" if self.reference else self.title

    @property
    def style(self) -> tuple[str, str, str]:
        """The colour, the dashes and the symbol of this kind in all pictures."""
        if self.reference:
            return {CEILING: (INK, "dash", "circle-open"), ALONE: (FAINT, "dot", "diamond-open")}[
                self.reference
            ]
        return (*line_of(self.place), symbol_of(self.place + self.place // 8))


def kinds_of(readings: Sequence[Reading]) -> list[KindOfRun]:
    """Runs grouped by set-up, in their order.

    A run whose configuration does not say what was run is a kind of its own, and so is the second
    of two runs with the same seed.
    """
    found: dict[tuple[str, int], list[Reading]] = {}
    for place, reading in enumerate(readings):
        setup = _setup(reading)
        again = 0
        while setup and reading.seed in [r.seed for r in found.get((setup, again), ())]:
            again += 1
        found.setdefault((setup, again) if setup else ("", place), []).append(reading)
    titles = [_title(runs) for runs in found.values()]
    own = [
        runs[0].name if titles.count(title) > 1 else title
        for title, runs in zip(titles, found.values(), strict=True)
    ]
    kinds, place = [], 0
    for title, runs in zip(told_apart(own), found.values(), strict=True):
        kinds.append(KindOfRun(title, runs, place))
        place += not kinds[-1].reference
    return kinds


def ranked(readings: Sequence[Reading]) -> list[KindOfRun]:
    """The kinds of runs by their score, the highest first; those without a score come last."""
    kinds = kinds_of(readings)
    ends = {k.title: [v for v in map(final, k.runs) if v is not None] for k in kinds}
    mean = {title: sum(own) / len(own) for title, own in ends.items() if own}
    return sorted(kinds, key=lambda k: -mean.get(k.title, -math.inf))


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number after later ones where two are equal.

    >>> told_apart(["a", "b", "a", "a"])
    ['a', 'b', 'a (2)', 'a (3)']
    """
    unique: list[str] = []
    for name in names:
        number, unique_name = 1, name
        while unique_name in unique or (number > 1 and unique_name in names):
            number += 1
            unique_name = f"{name} ({number})"
        unique.append(unique_name)
    return unique


def _setup(reading: Reading) -> str:
    settings = defining_tables(reading)
    return json.dumps(settings, sort_keys=True, default=str) if settings else ""


def defining_tables(reading: Reading) -> dict[str, dict[str, Any]]:
    """The tables of a configuration that define a set-up; None if it says too little.

    A configuration with a method and a seed says what was run.
    """
    config = reading.config
    if not isinstance(config.get("method"), Mapping) or reading.seed is None:
        return {}
    return {
        name: {k: v for k, v in table.items() if k not in _SAME.get(name, ())}
        for name, table in config.items()
        if isinstance(table, Mapping)
    }


def _title(runs: Sequence[Reading]) -> str:
    name, method = runs[0].name, runs[0].method
    if len(runs) > 1:
        names = {_SEED.sub("", r.name).strip("/-_ ") for r in runs}
        name = names.pop() if len(names) == 1 else ""
    return _spaced(name or method, method)


def _spaced(name: str, method: str) -> str:
    """The title of a method whose folder was named after it.

    >>> _spaced("ifca-k=4", "ifca"), _spaced("user-centric", "user-centric")
    ('ifca k=4', 'user-centric')
    """
    parameters = name.removeprefix(f"{method}-")
    if parameters == name or not _PARAMETERS.fullmatch(parameters):
        return name
    return " ".join([method, *re.split(r"-(?=[a-z_.]+=)", parameters)])


def alike(readings: Sequence[Reading]) -> tuple[str, list[Reading]]:
    """The score that the first run is judged by, and all runs that are judged by it."""
    by = readings[0].judged_by if readings else "accuracy"
    return by, [r for r in readings if r.judged_by == by]


def final(reading: Reading) -> float | None:
    """The headline score at the end, or the latest so far."""
    scores = reading.result.get(reading.headline)
    score = number(scores.get(reading.judged_by)) if isinstance(scores, Mapping) else None
    if score is not None:
        return score
    points = curve(reading.rounds, reading.headline, reading.judged_by)
    return points[-1][1] if points else None


def amount_spent(reading: Reading, place: Place) -> float | None:
    """Bytes or seconds at the end, or so far."""
    amounts = (place(e) for e in reversed(reading.rounds))
    return next((v for v in amounts if v is not None), None)


def lines(readings: Sequence[Reading], against: str = "rounds") -> Sketch:
    """The headline score of each run against "rounds", "bytes" or "seconds".

    Runs that differ only in their seed are drawn as their mean, with a band from the lowest to the
    highest. A run that was scored at its end only is one point. Where layers rest, the line joins
    the rounds in which all were due; the other rounds are open circles.
    """
    by, runs = alike(readings)
    place, title, kind = AXES[against]
    kinds = ranked(runs)
    resting = [resting_rounds(each, by) for each in kinds]
    curves = [
        [
            curve(_in(r, rest, False), r.headline, by, place) or finish(r, r.headline, place)
            for r in each.runs
        ]
        for each, rest in zip(kinds, resting, strict=True)
    ]
    traces = kind_lines(kinds, curves, _hover(against))
    aside = [
        _together([curve(_in(r, rest, True), r.headline, by, place) for r in each.runs])[0]
        for each, rest in zip(kinds, resting, strict=True)
    ]
    traces += _aside(kinds, aside)
    if not traces:
        raise ConfigError(f"no run has scores against {against}")
    if against == "bytes" and not any(x for trace in traces for x in trace["x"]):
        raise ConfigError("no run sent anything")
    figure = figure_of(traces, hovermode="x unified" if against == "rounds" else "closest")
    x_axis(figure, title, kind)
    score_axis(figure.y, by)
    _name_ends(figure, kinds, curves)
    return styled(figure, f"{said(by)} against {against}", 460)


MOST_NAMED = 8  # lines with their names at their ends


def _name_ends(
    figure: Sketch,
    kinds: Sequence[KindOfRun],
    curves: Sequence[Sequence[Sequence[tuple[float, float]]]],
) -> None:
    """The name of each line at its end, in its colour, unless there are too many."""
    means = [_together(own)[0] for own in curves]
    ends = [(mean[-1], kind) for mean, kind in zip(means, kinds, strict=True) if mean]
    if not 1 < len(ends) <= MOST_NAMED or any(len(mean) == 1 for mean in means):
        return
    points = [point for mean in means for point in mean]
    least, most = min(y for _, y in points), max(y for _, y in points)
    apart = 0.05 * ((most - least) or 1.0)
    notes, longest, below = list[dict[str, Any]](), 0, math.inf
    for (_, y), kind in sorted(ends, key=lambda end: -end[0][1]):
        below = min(y, below - apart)
        font = {"size": 11, "color": kind.style[0]}
        at = {"xref": "paper", "x": 1, "y": below, "xanchor": "left", "xshift": 4}
        text = short(kind.called, 24)
        longest = max(longest, len(text))
        notes.append({**at, "text": text, "font": font, "showarrow": False})
    figure.layout["annotations"] = notes
    figure.layout["meta"] = {"ends": 14 + 6 * longest}  # their width; narrow pages have a legend


def resting_rounds(kind: KindOfRun, by: str) -> frozenset[int]:
    """The rounds in which layers rested in a run of this kind.

    There are none if the runs were never scored in a round in which all layers were due.
    """
    found: set[int] = set()
    for reading in kind.runs:
        pairs = zip(reading.rounds, rested(reading.rounds), strict=True)
        found |= {e["round"] for e, rests in pairs if rests}
    everywhere = (curve(_in(r, found, False), r.headline, by) for r in kind.runs)
    return frozenset(found) if all(everywhere) else frozenset()


def _in(reading: Reading, numbers: Collection[int], inside: bool) -> list[Event]:
    """The rounds with these numbers, or all the others."""
    return [e for e in reading.rounds if (e["round"] in numbers) == inside]


def _aside(
    kinds: Sequence[KindOfRun], points: Sequence[Sequence[tuple[float, float]]]
) -> list[Any]:
    """The scores of rounds in which layers rested, in the colour of each kind's line."""
    traces: list[Any] = []
    for kind, points_of_kind in zip(kinds, points, strict=True):
        if points_of_kind:
            marks = dots(points_of_kind, "layers at rest", kind.style[0], "circle-open")
            marks["marker"] |= {"size": 6}
            traces.append(marks | {"showlegend": not traces, "hoverinfo": "skip"})
    return traces


def kind_lines(
    kinds: Sequence[KindOfRun],
    curves: Sequence[Sequence[Sequence[tuple[float, float]]]],
    hover: str,
) -> list[Any]:
    """A line for each kind of run: the mean of its runs' curves, with a band around it."""
    traces: list[Any] = []
    for each, curves_of_kind in zip(kinds, curves, strict=True):
        colour, dash, symbol = each.style
        mean, low, high = _together(curves_of_kind)
        if not mean:
            continue
        several = len(curves_of_kind) > 1
        name = short(each.called, 32) + (f", mean of {len(curves_of_kind)}" if several else "")
        if several and len(mean) > 1:
            more = {"showlegend": False, "legendgroup": name, "opacity": 0.13}
            traces.append(band(low, high, name, colour, **more))
        hover_text = f"{name}<br>{hover}<br>%{{y}}<extra></extra>"
        drawn = line(mean, name, colour, dash, hovertemplate=hover_text, legendgroup=name)
        size = 6 if len(mean) > 1 else 10
        traces.append(drawn | {"marker": {"size": size, "symbol": symbol}})
    return traces


def _hover(against: str) -> str:
    return {"rounds": "round %{x}", "bytes": "%{x:.4s}B", "seconds": "%{x:.4~s}s"}[against]


def _together(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[tuple[float, float]]]:
    """The mean, the lowest and the highest of curves at each point that all of them have."""
    curves = [c for c in curves if c]
    mean, low, high = [], [], []
    for points in zip(*curves, strict=False):
        x = sum(p[0] for p in points) / len(points)
        ys = [p[1] for p in points]
        mean.append((x, sum(ys) / len(ys)))
        low.append((x, min(ys)))
        high.append((x, max(ys)))
    return mean, low, high


def score_axis(update: Any, by: str) -> None:
    """The title and the ticks of an axis of scores; ``update`` sets them."""
    percent = {"tickformat": SHARE, "hoverformat": ".1%"} if by == "accuracy" else {}
    update(title=said(by), **percent)


# --- clients side by side -------------------------------------------------------------------------


def clients(readings: Sequence[Reading]) -> Sketch:
    """Each client's headline score at the end: a row for each kind of run, the best first.

    Runs that differ only in their seed share a row, with a dot for each client of each seed.
    """
    by, runs = alike(readings)
    rows = []
    for kind in ranked(runs):
        own = [(r, scores_of(r, r.headline)) for r in kind.runs]
        if any(scores for _, scores in own):
            rows.append((kind, [(r, c, v) for r, scores in own for c, v in scores]))
    if not rows:
        raise ConfigError("no run has scores of single clients")
    figure = _swarms(rows)
    score_axis(figure.x, by)
    figure.x(nticks=7)
    return styled(figure, "Scores of clients at the end", _height_of(figure, rows))


Dots = Sequence[tuple[Reading, int, float]]  # the run, the client and its value


def gains_of(
    readings: Sequence[Reading],
) -> list[tuple[KindOfRun, list[tuple[Reading, int, float]]]]:
    """Each client's difference to training alone by kind of run, the best first.

    Clients trained alone in the run of ``local`` on the same clients, or else in the run itself.
    """
    _, runs = alike(readings)
    alone: dict[tuple[str, int | None], dict[int, float]] = {
        (_clients_of(r), r.seed): dict(scores_of(r, "received"))
        for r in reversed(runs)
        if reference_of(r.method) == ALONE
    }
    rows = []
    for kind in ranked(runs):
        gained: list[tuple[Reading, int, float]] = []
        for r in kind.runs if kind.reference != ALONE else ():
            lone = alone.get((_clients_of(r), r.seed)) or dict(scores_of(r, "alone"))
            gained += [(r, c, v - lone[c]) for c, v in scores_of(r, r.headline) if c in lone]
        if gained:
            rows.append((kind, gained))
    return rows


def _clients_of(reading: Reading) -> str:
    """What makes the clients of a run: two runs with the same have the same clients."""
    tables = {name: reading.settings(name) for name in ("data", "partition", "shift")}
    return json.dumps(tables, sort_keys=True, default=str)


def gains(readings: Sequence[Reading]) -> Sketch:
    """Each client's difference to training alone: a row for each kind of run, the best first."""
    by = alike(readings)[0]
    rows = gains_of(readings)
    if not rows:
        raise ConfigError("no client trained alone: add local to the methods, or run with --alone")
    figure = _swarms(rows)
    percent = {"tickformat": "+.0%", "hoverformat": "+.1%"} if by == "accuracy" else {}
    figure.x(percent, title="difference to training alone", nticks=9)
    edge = {"color": INK, "width": 1.5}
    ends = [len(rows) - 0.45, -0.55]
    figure.layout["shapes"] = [
        {"type": "line", "x0": 0, "x1": 0, "y0": ends[0], "y1": ends[1], "line": edge}
    ]
    values = [value for _, own in rows for *_, value in own]
    for sign, text, anchor in ((-1, "worse than alone", "right"), (1, "better", "left")):
        if any(sign * value > 0 for value in values):
            at = {"x": 0, "y": 1, "yref": "paper", "xanchor": anchor, "yanchor": "bottom"}
            note = {**at, "text": text, "xshift": 6 * sign, "showarrow": False}
            figure.layout.setdefault("annotations", []).append(note)
    return styled(figure, "Who gains, who loses", _height_of(figure, rows))


def _height_of(figure: Sketch, rows: Sequence[Any]) -> float:
    """The height of rows of dots: as much as the longest column of dots needs."""
    columns = Counter((t["x"][i], t["name"]) for t in figure.data[::2] for i in range(len(t["x"])))
    row = min(80, max(36, 12 + 5.5 * max(columns.values())))
    return 150 + min(1000, row * len(rows))


def _swarms(rows: Sequence[tuple[KindOfRun, Dots]]) -> Sketch:
    """Rows of dots, one row for each kind of run; dots of about the same value are stacked."""
    values = [value for _, own in rows for *_, value in own]
    wide = ((max(values) - min(values)) or 1.0) / 70
    traces: list[Any] = []
    for place, (kind, own) in enumerate(rows):
        traces += _swarm(place, kind, own, wide)
    figure = figure_of(traces, showlegend=False)
    figure.y(
        tickvals=list(range(len(rows))),
        ticktext=[short(kind.called, 24) for kind, _ in rows],
        range=[len(rows) - 0.45, -0.55],
        showgrid=False,
    )
    return figure


def beeswarm(values: Sequence[float], wide: float, room: float = 0.4) -> list[float]:
    """Offsets of dots from their row, so that dots within a width do not cover each other.

    >>> beeswarm([0.5, 0.5, 0.5, 0.9], 0.1, room=0.2)
    [0.0, -0.1, 0.1, 0.0]
    """
    columns: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        columns.setdefault(round(value / wide), []).append(i)
    most = max(map(len, columns.values()), default=1)
    step = min(0.1, 2 * room / max(1, most - 1))
    offsets = [0.0] * len(values)
    for members in columns.values():
        for rank, i in enumerate(members):
            offsets[i] = step * ((rank + 1) // 2) * (1 if rank % 2 == 0 else -1) if rank else 0.0
    return [round(each, 4) for each in offsets]


def _swarm(place: int, kind: KindOfRun, own: Dots, wide: float) -> list[Any]:
    colour, _, symbol = kind.style
    several = len(kind.runs) > 1
    hovers = []
    for run, client, _ in own:
        name = short(run.names[client], 24) if client < len(run.names) else f"client {client}"
        hovers.append(f"{name}, seed {run.seed}" if several else name)
    xs = [value for *_, value in own]
    marker = {"color": colour, "symbol": symbol, "size": 5, "opacity": 0.8}
    title = short(kind.called, 32)
    low, middle, high = quarters(xs)
    top, bottom = place - 0.44, place + 0.44
    return [
        {
            "type": "scatter",
            "x": clear(xs),
            "y": clear([place + at for at in beeswarm(xs, wide)], 4),
            "mode": "markers",
            "marker": marker,
            "hovertext": hovers,
            "hovertemplate": f"{title}<br>%{{hovertext}}: %{{x}}<extra></extra>",
            "name": title,
        },
        {
            "type": "scatter",
            "x": clear([middle, middle, None, low, high, high, low, low]),
            "y": [top, bottom, None, top, top, bottom, bottom, top],
            "mode": "lines",
            "line": {"color": INK, "width": 1.2},
            "opacity": 0.7,
            "hovertemplate": f"{title}: median and quarters of clients, %{{x}}<extra></extra>",
            "name": f"{title}: median and quarters",
        },
    ]


# --- what it cost ---------------------------------------------------------------------------------


def cost(readings: Sequence[Reading]) -> Sketch:
    """The headline score at the end against all bytes: up and to the left is better."""
    by, runs = alike(readings)
    place, title, _ = AXES["bytes"]
    traces: list[Any] = []
    labels: list[tuple[float, float, str]] = []
    for kind in ranked(runs):
        pairs = [(amount_spent(r, place), final(r)) for r in kind.runs]
        points = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not points:
            continue
        colour, _, symbol = kind.style
        name = short(kind.called, 32)
        marker = {
            "color": colour,
            "symbol": symbol,
            "size": 11 if len(points) == 1 else 8,
        }
        traces.append(
            {
                "type": "scatter",
                "x": clear([x for x, _ in points], 6),
                "y": clear([y for _, y in points]),
                "mode": "markers",
                "marker": {**marker, "opacity": 0.85},
                "hovertemplate": f"{name}<br>%{{x:.4s}}B<br>%{{y}}<extra></extra>",
                "name": name,
            }
        )
        middle = [sum(v) / len(points) for v in zip(*points, strict=True)]
        labels.append((middle[0], middle[1], short(kind.called, 20)))
    if not traces:
        raise ConfigError("no run has both a score and bytes")
    if not any(x for x, *_ in labels):
        raise ConfigError("no run sent anything")
    few = len(labels) <= 10
    figure = figure_of(traces, annotations=_labels(labels) if few else [], showlegend=not few)
    x_axis(figure, title.replace(" so far", ""), "bytes")
    score_axis(figure.y, by)
    highest = max(x for x, *_ in labels)
    figure.x(range=[-0.04 * highest, 1.22 * highest or 1])
    return styled(figure, f"{said(by)} against cost", 440)


def _labels(places: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Names beside points, one above the other where two points are close."""
    wide = max((x for x, *_ in places), default=1) or 1
    heights = [y for _, y, _ in places]
    tall = (max(heights) - min(heights)) or 1
    found: list[dict[str, Any]] = []
    taken: list[tuple[float, float]] = []
    for x, y, text in sorted(places, key=lambda p: (-p[1], p[0])):
        at = y
        for other_x, other_y in taken:
            if abs(other_x - x) < 0.25 * wide and abs(other_y - at) < 0.055 * tall:
                at = other_y - 0.055 * tall
        taken.append((x, at))
        font = {"size": 11, "color": INK}
        found.append(
            {
                "x": x,
                "y": at,
                "text": text,
                "xanchor": "left",
                "xshift": 9,
                "showarrow": False,
                "font": font,
            }
        )
    return found
