"""The cost of a run: bytes by kind and by client, seconds, and lost replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.events import Event
from coterie.errors import ConfigError
from coterie.report.figures.scores import x_axis
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import clear, figure_of, plain, styled, ticks_of
from coterie.report.numbers import by_purpose
from coterie.report.palette import ALONE, BLUE, FAINT, GREEN, LINES, ORANGE, RED, SKY, TINTS
from coterie.report.reading import Reading, number

WAYS = ("down", "up")
MOST_KINDS = 3  # of bytes, in each direction; the rest are one,
_SMALL = 0.01  # and so is what is less than this share
_NONE = (0.0, 0.0)  # bytes down and up
_DOWN = (BLUE, SKY, TINTS[0], TINTS[4], LINES[6], TINTS[7])
_UP = (ORANGE, RED, TINTS[1], TINTS[5], LINES[4], TINTS[7])


def by_kind(reading: Reading) -> dict[str, list[tuple[float, float]]]:
    """Cumulative bytes by round, of "down" and "up" and each kind of array: "down, model/head".

    Bytes sent before the first round have no kinds and are "before round 1". Wasted bytes are
    separate: "wasted".
    """
    steps = [e for e in reading.rounds if isinstance(e.get("bytes"), Mapping)]
    if not steps:
        raise ConfigError(f"{reading.name}: no round has a number of bytes")
    before = dict(reading.begun.get("bytes") or {})
    moved_by = [by_purpose(e.get("kinds") or {}) for e in steps]
    kinds = list(dict.fromkeys(k for own in moved_by for k in own))
    totals: dict[str, float] = {}
    series: dict[str, list[tuple[float, float]]] = {}
    for way, name in ((0, "down"), (1, "up")):
        sent = {k: sum(own.get(k, _NONE)[way] for own in moved_by) for k in kinds}
        most = sorted((k for k in kinds if sent[k]), key=lambda k: -sent[k])
        least = _SMALL * sum(sent.values())
        shown = [k for k in most if sent[k] >= least][:MOST_KINDS]
        first = number(before.get(name)) or 0.0
        if first:
            series[f"{name}, before round 1"] = [(e["round"], first) for e in steps]
        for event, own in zip(steps, moved_by, strict=True):
            total = number(event["bytes"].get(name)) or 0.0
            parts = {k: own.get(k, _NONE)[way] for k in shown}
            parts["other"] = total - sum(parts.values())
            for kind, moved in parts.items():
                key = f"{name}, {kind}" if shown else name
                totals[key] = totals.get(key, 0.0) + moved
                series.setdefault(key, []).append((event["round"], totals[key]))
    lost: list[tuple[float, float]] = [(e["round"], _wasted(e)) for e in steps]
    if any(v for _, v in lost):
        series["wasted"] = lost
    series = {key: points for key, points in series.items() if points[-1][1]}
    if not series:
        raise ConfigError(f"{reading.name}: nothing was sent")
    return series


def _wasted(event: Event) -> float:
    return sum(number(v) or 0.0 for v in (event.get("total_wasted") or {}).values())


def bytes_by_round(reading: Reading) -> Sketch:
    """Cumulative bytes over rounds, with the kinds stacked; wasted bytes are a separate line."""
    places = {"down": 0, "up": 0}
    traces = []
    for key, points in by_kind(reading).items():
        way = key.split(",")[0]
        xs, ys = clear([x for x, _ in points]), clear([y for _, y in points], 6)
        common = {"x": xs, "y": ys, "name": plain(key), "mode": "lines"}
        hover = f"{plain(key)}: %{{y:.4s}}B by round %{{x}}<extra></extra>"
        if way == "wasted":
            style: dict[str, Any] = {"line": {"color": FAINT, "width": 2, "dash": "dash"}}
        else:
            first = key.endswith(", before round 1")
            colour = (_DOWN if way == "down" else _UP)[places[way] % len(_DOWN)]
            colour = (FAINT if way == "down" else ALONE) if first else colour
            places[way] += not first
            style = {
                "stackgroup": "sent",
                "fillcolor": colour,
                "line": {"color": colour, "width": 0.5},
            }
        traces.append({"type": "scatter", **common, **style, "hovertemplate": hover})
    figure = figure_of(traces, showlegend=True)
    x_axis(figure, "round")
    bytes_axis(figure, "bytes since the start")
    return styled(figure, "Bytes by kind", 420)


def bytes_axis(figure: Sketch, title: str) -> None:
    """An axis of bytes, with k, M and G."""
    figure.y(title=title, tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=6)


def of_clients(reading: Reading) -> list[tuple[int, float, float]]:
    """The bytes down to and up from each client, the most first."""
    moved: dict[int, list[float]] = {}
    if any(c.get("bytes_down") for c in reading.clients):
        for c, row in enumerate(reading.clients):
            moved[c] = [number(row.get(f"bytes_{way}")) or 0.0 for way in WAYS]
    else:
        for event in reading.rounds:
            for client, pair in (event.get("client_bytes") or {}).items():
                sums = moved.setdefault(int(client), [0.0, 0.0])
                sums[0], sums[1] = sums[0] + float(pair[0]), sums[1] + float(pair[1])
    if not any(sum(pair) for pair in moved.values()):
        raise ConfigError(f"{reading.name}: no bytes are known of single clients")
    amounts = [(c, pair[0], pair[1]) for c, pair in moved.items()]
    return sorted(amounts, key=lambda p: (-p[1] - p[2], p[0]))


def bytes_by_client(reading: Reading) -> Sketch:
    """The bytes down to and up from each client, the most first."""
    amounts = of_clients(reading)
    labels = ticks_of(reading.names)
    names = [labels[c] if c < len(labels) else str(c) for c, *_ in amounts]
    parts = (("down", BLUE, [d for _, d, _ in amounts]), ("up", ORANGE, [u for *_, u in amounts]))
    figure = figure_of(
        [
            _bars(names, values, title, colour, "client %{x}: %{y:.4s}B ")
            for title, colour, values in parts
        ],
        barmode="stack",
        bargap=0.15,
    )
    figure.x(
        title="client, the most first", type="category", showgrid=False, nticks=min(len(names), 25)
    )
    bytes_axis(figure, "bytes since the start")
    return styled(figure, "Bytes by client", 360)


def _bars(xs: Sequence[Any], ys: Sequence[float | None], name: str, colour: str, hover: str) -> Any:
    return {
        "type": "bar",
        "x": list(xs),
        "y": clear(ys, 6),
        "name": name,
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": f"{hover}{name}<extra></extra>",
    }


# Where a round's seconds are written, what they are called, and their parts.
_SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "clock": ("simulated", ("computation", "communication", "waiting")),
    "seconds": ("real", ("train", "score")),
}


def time_keys(source: str) -> tuple[str, ...]:
    """The parts of the seconds in "clock" or "seconds"."""
    return _SOURCES[source][1]


def time_parts(
    reading: Reading, source: str = ""
) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Seconds of each round by part: of the simulated clock if there is one, else real seconds.

    ``source`` is "clock" or "seconds" to allow only one of them.
    """
    for name in (source,) if source else tuple(_SOURCES):
        title, keys = _SOURCES[name]
        tables = [(float(e["round"]), e.get(name)) for e in reading.rounds]
        timed = [(r, table) for r, table in tables if isinstance(table, Mapping)]
        if not timed:
            continue
        parts = {key: [(r, number(table.get(key)) or 0.0) for r, table in timed] for key in keys}
        parts = {key: points for key, points in parts.items() if any(v for _, v in points)}
        if parts:
            return title, parts
        break
    raise ConfigError(f"{reading.name}: no round has its time")


TIMES = {
    "computation": BLUE,
    "communication": ORANGE,
    "waiting": FAINT,
    "train": BLUE,
    "score": GREEN,
}


def time_by_round(reading: Reading) -> Sketch:
    """The seconds of each round by part."""
    kind, parts = time_parts(reading)
    figure = figure_of(
        [
            _bars(
                [r for r, _ in points],
                [v for _, v in points],
                key,
                TIMES[key],
                "round %{x}: %{y:.3~s}s ",
            )
            for key, points in parts.items()
        ],
        barmode="stack",
        bargap=0.1 if len(next(iter(parts.values()))) < 60 else 0,
        showlegend=True,
    )
    figure.x(title="round", nticks=8)
    figure.y(title=f"{kind} seconds", rangemode="tozero")
    return styled(figure, "Seconds of each round", 360)


def mishaps(reading: Reading) -> dict[str, list[tuple[float, float]]]:
    """Lost and late replies and abandoned rounds, by round; a ``ConfigError`` if there are none."""
    counts = {
        key: [(float(e["round"]), number(e.get(key)) or 0.0) for e in reading.rounds]
        for key in ("lost", "late")
    }
    counts["abandoned"] = [
        (float(e["round"]), float(bool(e.get("abandoned")))) for e in reading.rounds
    ]
    counts = {key: points for key, points in counts.items() if any(v for _, v in points)}
    if not counts:
        raise ConfigError(f"{reading.name}: no reply was lost or late, and no round was abandoned")
    return counts


_LOST = {"lost": RED, "late": ORANGE, "abandoned": FAINT}
_SAID = {"lost": "replies lost", "late": "replies late", "abandoned": "round abandoned"}


def lost_by_round(reading: Reading) -> Sketch:
    """Replies that were lost or late, and rounds that were abandoned."""
    figure = figure_of(
        [
            _bars(
                [r for r, _ in points],
                [v for _, v in points],
                _SAID[key],
                _LOST[key],
                "round %{x}: %{y} ",
            )
            for key, points in mishaps(reading).items()
        ],
        barmode="stack",
        bargap=0.1,
        showlegend=True,
    )
    figure.x(title="round", nticks=8)
    figure.y(title="how many", rangemode="tozero", nticks=6)
    return styled(figure, "Lost and late replies", 320)
