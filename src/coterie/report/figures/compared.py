"""Several runs in one picture: a line for each run, or one for all seeds of a set-up."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.clients import jitter, quarters, scores_of
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

MOST_PAIRED = 3000  # clients times runs: with more lines the picture is a cloud
_SEED = re.compile(r"[-_/, ]*\bseed[=_ -]?\d+", re.IGNORECASE)
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

    No two kinds have the same title.
    """

    title: str
    runs: Sequence[Reading]


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
    return [KindOfRun(*pair) for pair in zip(told_apart(own), found.values(), strict=True)]


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
    if len(runs) == 1:
        return runs[0].name
    return _SEED.sub("", runs[0].name).strip("/-_ ") or runs[0].method


def alike(readings: Sequence[Reading]) -> tuple[str, list[Reading]]:
    """The score that the first run is judged by, and all runs that are judged by it."""
    by = readings[0].judged_by if readings else "accuracy"
    return by, [r for r in readings if r.judged_by == by]


def final(reading: Reading) -> float | None:
    """The headline score at the end, or the latest so far."""
    scores = reading.result.get(reading.headline)
    score = number(scores.get(reading.judged_by)) if isinstance(scores, Mapping) else None
    points = curve(reading.rounds, reading.headline, reading.judged_by)
    return score if score is not None else points[-1][1] if points else None


def amount_spent(reading: Reading, place: Place) -> float | None:
    """Bytes or seconds at the end, or so far."""
    amounts = [place(e) for e in reading.rounds]
    return next((v for v in reversed(amounts) if v is not None), None)


def lines(readings: Sequence[Reading], against: str = "rounds") -> Sketch:
    """The headline score of each run against "rounds", "bytes" or "seconds".

    Runs that differ only in their seed are drawn as their mean, with a band from the lowest to the
    highest. A run that was scored at its end only is one point. Where layers rest, the line joins
    the rounds in which all were due; the other rounds are open circles.
    """
    by, runs = alike(readings)
    place, title, kind = AXES[against]
    kinds = kinds_of(runs)
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
    traces += _aside(aside)
    if not traces:
        raise ConfigError(f"no run has scores against {against}")
    if against == "bytes" and not any(x for trace in traces for x in trace["x"]):
        raise ConfigError("no run sent anything")
    figure = figure_of(traces)
    x_axis(figure, title, kind)
    score_axis(figure.y, by)
    return styled(figure, f"{said(by)} against {against}", 460)


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


def _aside(points: Sequence[Sequence[tuple[float, float]]]) -> list[Any]:
    """The scores of rounds in which layers rested, in the colour of each kind's line."""
    traces: list[Any] = []
    for i, points_of_kind in enumerate(points):
        if points_of_kind:
            marks = dots(points_of_kind, "layers at rest", line_of(i)[0], "circle-open")
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
    for i, (each, curves_of_kind) in enumerate(zip(kinds, curves, strict=True)):
        colour, dash = line_of(i)
        mean, low, high = _together(curves_of_kind)
        if not mean:
            continue
        several = len(curves_of_kind) > 1
        name = short(each.title, 32) + (f", mean of {len(curves_of_kind)}" if several else "")
        if several and len(mean) > 1:
            more = {"showlegend": False, "legendgroup": name, "opacity": 0.13}
            traces.append(band(low, high, name, colour, **more))
        hover_text = f"{name}<br>{hover}<br>%{{y}}<extra></extra>"
        drawn = line(mean, name, colour, dash, hovertemplate=hover_text, legendgroup=name)
        size = 6 if len(mean) > 1 else 10
        traces.append(drawn | {"marker": {"size": size, "symbol": symbol_of(i + i // 8)}})
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
    """Each client's headline score at the end: a row for each run, lines joining the same clients.

    Runs that differ only in their seed share a row.
    """
    by, runs = alike(readings)
    rows = []
    for kind in kinds_of(runs):
        own = [_by_client(r) for r in kind.runs]
        if any(v is not None for scores in own for v in scores):
            rows.append((kind, own))
    if not rows:
        raise ConfigError("no run has scores of single clients")
    traces: list[Any] = []
    pairs = _pairs(rows)
    if pairs:
        traces.append(pairs)
    for i, (kind, own) in enumerate(rows):
        traces += _row(i, kind, own)
    figure = figure_of(traces, showlegend=False)
    figure.y(
        tickvals=list(range(len(rows))),
        ticktext=[short(kind.title, 20) for kind, _ in rows],
        range=[len(rows) - 0.45, -0.55],
        showgrid=False,
    )
    score_axis(figure.x, by)
    figure.x(nticks=7)
    return styled(figure, "Scores of clients at the end", 150 + min(900, 52 * len(rows)))


def _by_client(reading: Reading) -> list[float | None]:
    scores = dict(scores_of(reading, reading.headline))
    return [scores.get(c) for c in range(max(scores, default=-1) + 1)]


def _pairs(rows: Sequence[tuple[KindOfRun, Sequence[Sequence[float | None]]]]) -> Any:
    """Lines from a client's score in one run to the same client's score in the next."""
    firsts = [kind.runs[0] for kind, _ in rows]
    same = all(len(kind.runs) == 1 for kind, _ in rows) and all(
        r.names == firsts[0].names and r.seed == firsts[0].seed for r in firsts
    )
    columns = [own[0] for _, own in rows]
    if not same or len(rows) < 2 or len({len(c) for c in columns}) > 1:
        return None
    if len(columns) * len(columns[0]) > MOST_PAIRED:
        return None
    xs: list[float | None] = []
    ys: list[float | None] = []
    places = jitter(len(columns[0]))
    for client, values in enumerate(zip(*columns, strict=True)):
        xs += [*clear(values), None]
        ys += [*clear([i + places[client] for i in range(len(values))], 4), None]
    style = {"color": FAINT, "width": 0.7}
    return {
        "type": "scatter",
        "x": xs,
        "y": ys,
        "mode": "lines",
        "line": style,
        "opacity": 0.35,
        "hoverinfo": "skip",
    }


def _row(place: int, kind: KindOfRun, scores_by_run: Sequence[Sequence[float | None]]) -> list[Any]:
    colour, _ = line_of(place)
    xs, ys, hovers = [], [], []
    for run, scores in zip(kind.runs, scores_by_run, strict=True):
        names = run.names
        for c, (value, at) in enumerate(zip(scores, jitter(len(scores)), strict=True)):
            if value is not None:
                xs.append(value)
                ys.append(place + at)
                hovers.append(short(names[c], 24) if c < len(names) else f"client {c}")
    marker = {"color": colour, "symbol": symbol_of(place + place // 8), "size": 6, "opacity": 0.7}
    title = short(kind.title, 32)
    low, middle, high = quarters(xs)
    top, bottom = place - 0.28, place + 0.28
    return [
        {
            "type": "scatter",
            "x": clear(xs),
            "y": clear(ys, 4),
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
            "line": {"color": INK, "width": 1.5},
            "opacity": 0.8,
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
    for i, kind in enumerate(kinds_of(runs)):
        pairs = [(amount_spent(r, place), final(r)) for r in kind.runs]
        points = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not points:
            continue
        colour, _ = line_of(i)
        name = short(kind.title, 32)
        marker = {
            "color": colour,
            "symbol": symbol_of(i + i // 8),
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
        labels.append((middle[0], middle[1], short(kind.title, 16)))
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
