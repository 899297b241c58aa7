"""Several runs in numbers: scores beside seconds, and scores over a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coterie.core.events import is_number
from coterie.errors import ConfigError
from coterie.registry import METHODS
from coterie.report.figures.compared import (
    KindOfRun,
    alike,
    defining_tables,
    final,
    ranked,
    score_axis,
)
from coterie.report.figures.cost import TIMES, time_keys, time_parts
from coterie.report.figures.scores import curve
from coterie.report.figures.sketch import Sketch, panels, tiles
from coterie.report.figures.style import (
    band,
    clear,
    dash_of,
    level,
    line,
    plain,
    short,
    styled,
    symbol_of,
)
from coterie.report.palette import BLUE, INK, PURPLE, line_of
from coterie.report.reading import Reading, number
from coterie.results.findings import rested

WIDE = 50  # ratio of the largest to the smallest value from which the scale is logarithmic
_MISSING = object()


# --- seconds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedScores:
    """The scores of a set-up's seeds, and its mean seconds by part.

    ``parts`` are the seconds of the whole run, including the time before round 1, ``a_round`` those
    of a round. Where layers are skipped, ``full`` are the scores of the last round after which
    clients had received all layers: in other rounds they use their own layers, which may do better
    or worse.
    """

    kind: KindOfRun
    scores: Sequence[float]
    full: Sequence[float]
    parts: Mapping[str, float]
    a_round: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.parts.values())


def full_score(reading: Reading) -> float | None:
    """The score of the last round with all layers; None where no layer was ever skipped."""
    resting = rested(reading.rounds)
    full_rounds = [e for e, layers in zip(reading.rounds, resting, strict=True) if not layers]
    if len(full_rounds) == len(reading.rounds):
        return None
    points = curve(full_rounds, reading.headline, reading.judged_by)
    return points[-1][1] if points else None


def timed_scores(readings: Sequence[Reading]) -> tuple[str, list[TimedScores]]:
    """The time of each set-up's rounds: on the simulated clock if all have one, else real."""
    _, runs = alike(readings)
    clocked = all(any(isinstance(e.get("clock"), Mapping) for e in r.rounds) for r in runs)
    source = "clock" if clocked else "seconds"
    title, found = "", []
    for kind in ranked(runs):
        scores = [v for v in map(final, kind.runs) if v is not None]
        full = [v for v in map(full_score, kind.runs) if v is not None]
        try:
            times = [time_parts(r, source) for r in kind.runs]
        except ConfigError:
            continue
        if scores:
            title = times[0][0]
            rounds = [{k: _sum(v) for k, v in parts.items()} for _, parts in times]
            lengths = [max(len(points) for points in parts.values()) for _, parts in times]
            totals = [
                _with_begin(parts, r, source) for parts, r in zip(rounds, kind.runs, strict=True)
            ]
            each = [
                {k: v / n for k, v in parts.items()}
                for parts, n in zip(rounds, lengths, strict=True)
            ]
            found.append(TimedScores(kind, scores, full, _means(totals), _means(each)))
    if not found:
        raise ConfigError("no run has both a score and the time of its rounds")
    return title, found


def _sum(points: Sequence[tuple[float, float]]) -> float:
    return sum(v for _, v in points)


def _with_begin(parts: Mapping[str, float], run: Reading, source: str) -> dict[str, float]:
    """Seconds of all rounds, and of the time before the first."""
    first = run.begun.get(source)
    begin = first if isinstance(first, Mapping) else {}
    added = {k: number(begin.get(k)) or 0.0 for k in time_keys(source)}
    return {k: parts.get(k, 0.0) + v for k, v in added.items() if k in parts or v}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over seeds of each part."""
    keys = dict.fromkeys(k for row in rows for k in row)
    return {k: sum(row.get(k, 0.0) for row in rows) / len(rows) for k in keys}


def seconds(readings: Sequence[Reading]) -> Sketch:
    """Score at the end and seconds of the whole run by part, with a row for each set-up.

    With several seeds, dots and bars are means, and lines go from the lowest to the highest.
    """
    by = alike(readings)[0]
    title, rows = timed_scores(readings)
    names = [short(row.kind.called, 24) for row in rows]
    high = 200 + 2 * min(450, 34 * len(rows))
    figure = tiles([1, 1], gap=75 / high)
    ends = [(i, row.scores) for i, row in enumerate(rows)]
    figure.add(_ranges(ends, "score at the end", PURPLE, "circle"), panel=1)
    full = [(i + 0.25, row.full) for i, row in enumerate(rows) if row.full]
    if full:
        figure.add(_ranges(full, "last round with all layers", INK, "diamond-open"), panel=1)
    for part in dict.fromkeys(p for row in rows for p in row.parts):
        bar = {
            "type": "bar",
            "orientation": "h",
            "y": list(range(len(rows))),
            "x": clear([row.parts.get(part, 0.0) for row in rows], 4),
            "name": part,
            "marker": {"color": TIMES[part], "line": {"width": 0}},
            "customdata": clear([row.a_round.get(part, 0.0) for row in rows], 4),
            "hovertemplate": f"%{{x:.4~s}}s {part}, %{{customdata:.3~s}}s a round<extra></extra>",
        }
        figure.add(bar, panel=2)
    for place, trace in enumerate(figure.data):
        trace["legendrank"] = -place  # plotly.js reverses the legend of stacked bars
    figure.layout |= {"barmode": "stack", "bargap": 0.35, "showlegend": True}
    places = {"tickvals": list(range(len(rows))), "range": [len(rows) - 0.45, -0.55]}
    figure.y(places, ticktext=names, showgrid=False)
    few: dict[str, Any] = {"nticks": 5, "tickangle": 0}
    score_axis(lambda **more: figure.x(more, panel=1, **few), by)
    figure.x(few, title="seconds in total", rangemode="tozero", panel=2)
    figure.layout["xaxis"]["title"]["standoff"] = 4  # above the other panel
    return styled(figure, f"Score and total {title} seconds", high)


def _ranges(
    rows: Sequence[tuple[float, Sequence[float]]], name: str, colour: str, symbol: str
) -> dict[str, Any]:
    """A dot for the mean of each row, with a line from the lowest to the highest."""
    means = [sum(v) / len(v) for _, v in rows]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": clear([max(v) - m for (_, v), m in zip(rows, means, strict=True)]),
        "arrayminus": clear([m - min(v) for (_, v), m in zip(rows, means, strict=True)]),
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }
    return {
        "type": "scatter",
        "x": clear(means),
        "y": [i for i, _ in rows],
        "mode": "markers",
        "marker": {"size": 10, "color": colour, "symbol": symbol},
        "name": name,
        "hovertemplate": f"{name}: %{{x}}<extra></extra>",
        "cliponaxis": False,
        **({"error_x": bars} if any(len(v) > 1 for _, v in rows) else {}),
    }


# --- a parameter ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Varied:
    """Runs of one method that differ in one parameter: scores and numbers of groups by its value.

    ``named`` are those of values that are not numbers, such as "auto".
    """

    method: str
    key: str
    by: str
    values: Mapping[float, tuple[list[float], list[int]]]
    named: Mapping[str, tuple[list[float], list[int]]]


def varied(readings: Sequence[Reading]) -> Varied:
    """The parameter in which these runs differ; a ``ConfigError`` if it is not exactly one."""
    by, runs = alike(readings)
    tables = [_flat(r) for r in runs]
    if len(runs) < 2 or not all(tables):
        raise ConfigError(
            "this picture needs two or more runs whose configuration says what was run"
        )
    keys = dict.fromkeys(k for table in tables for k in table)
    differ = [k for k in keys if len({str(t.get(k, _MISSING)) for t in tables}) > 1]
    if "method.name" in differ:  # another method has other parameters
        differ = [k for k in differ if k == "method.name" or not k.startswith("method.")]
    key = differ[0] if differ else ""
    if len(differ) != 1 or not key.startswith("method.") or key == "method.name":
        what = ", ".join(differ[:5]) + (" and more" if len(differ) > 5 else "")
        raise ConfigError(
            "this picture needs runs of one method that differ in exactly one of its parameters, "
            f"besides the seed; these differ in {what or 'nothing'}"
        )
    values: dict[float, tuple[list[float], list[int]]] = {}
    named: dict[str, tuple[list[float], list[int]]] = {}
    for run, table in zip(runs, tables, strict=True):
        score, own = final(run), table.get(key)
        if score is None:
            continue
        if own is not None and is_number(own):
            scores, groups = values.setdefault(float(own), ([], []))
        else:
            scores, groups = named.setdefault(str(own), ([], []))
        scores.append(score)
        groups.append(len({g for g in run.groups if g is not None}))
    if len(values) < 2:
        raise ConfigError(
            f"this picture needs runs with two or more numbers for {key}; there "
            f"{'is one' if values else 'are none'}"
        )
    ordered = {v: values[v] for v in sorted(values)}
    return Varied(runs[0].method, key.removeprefix("method."), by, ordered, named)


def _flat(reading: Reading) -> dict[str, Any]:
    """All settings by table and key, including the method's defaults."""
    tables = defining_tables(reading)
    factory = METHODS.get(str((tables.get("method") or {}).get("name")))
    known = inspect.signature(factory).parameters if factory else {}
    defaults = {k: p.default for k, p in known.items() if p.default is not p.empty}
    own = {"method": {**defaults, **tables["method"]}} if tables else {}
    return {f"{t}.{k}": v for t, table in {**tables, **own}.items() for k, v in table.items()}


def parameter(readings: Sequence[Reading]) -> Sketch:
    """Score at the end and number of groups over the parameter in which the runs differ.

    With several seeds, lines are means and bands go from the lowest to the highest. Values that are
    not numbers, such as "auto", are dashed lines.
    """
    sweep = varied(readings)
    figure = panels([0.62, 0.38])
    _add_means(figure, 1, {v: s for v, (s, _) in sweep.values.items()}, "score at the end", BLUE)
    _add_means(figure, 2, {v: g for v, (_, g) in sweep.values.items()}, "groups", PURPLE)
    ends = [(v, 0.0) for v in sweep.values]
    for i, (name, (scores, groups)) in enumerate(sweep.named.items()):
        hover = f"{sweep.key} = {plain(name)}"
        for panel, own in ((1, scores), (2, groups)):
            height = sum(own) / len(own)
            mark = level(ends, height, hover, line_of(i + 1)[0], dash_of(i + 1))
            figure.add({**mark, "showlegend": panel == 1}, panel=panel)
    score_axis(lambda **more: figure.y(more, panel=1), sweep.by)
    figure.y(title="groups", rangemode="tozero", nticks=6, panel=2)
    low, high = min(sweep.values), max(sweep.values)
    wide = low > 0 and high >= WIDE * low
    few = list(sweep.values) if len(sweep.values) <= 12 else None
    ticks: dict[str, Any] = {"tickvals": few, "ticktext": [f"{v:g}" for v in few]} if few else {}
    ticks = ticks if wide or _roomy(sweep.values) else {}
    figure.x({**ticks, "type": "log"} if wide else ticks)
    figure.x(title=f"{sweep.key} of {plain(sweep.method)}", panel=2)
    return styled(figure, f"Score and groups by {sweep.key}", 520)


def _roomy(values: Mapping[float, Any]) -> bool:
    """Whether all values can be written under a linear axis."""
    ordered = sorted(values)
    room = (ordered[-1] - ordered[0]) / 18
    return len(ordered) <= 12 and all(b - a > room for a, b in pairwise(ordered))


def _add_means(
    figure: Sketch, panel: int, values: Mapping[float, Sequence[float]], name: str, colour: str
) -> None:
    """A line of means, with a band from the lowest to the highest where there are several."""
    if any(len(own) > 1 for own in values.values()):
        low, high = ([(v, f(own)) for v, own in values.items()] for f in (min, max))
        figure.add(band(low, high, name, colour, showlegend=False), panel=panel)
    means = [(v, sum(own) / len(own)) for v, own in values.items()]
    marker = {"size": 8, "symbol": symbol_of(panel - 1), "color": colour}
    figure.add(line(means, name, colour, marker=marker, mode="lines+markers"), panel=panel)
