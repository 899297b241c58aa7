"""Pictures of scores against rounds, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import (
    SHARE,
    Event,
    band,
    dots,
    figure_of,
    level,
    line,
    plain,
    styled,
    thin,
)
from coterie.report.palette import BLUE, INK, ORANGE, RED
from coterie.report.reading import Reading, number
from coterie.results.findings import rested

Place = Callable[[Event], float | None]  # a round's position on the x axis


def at_round(event: Event) -> float | None:
    """A round's position by its number."""
    return number(event.get("round"))


def at_bytes(event: Event) -> float | None:
    """A round's position by the bytes sent until its end, down and up."""
    total = event.get("total_bytes")
    if not isinstance(total, Mapping):
        return None
    moved = [number(total.get(way)) for way in ("down", "up")]
    return None if None in moved else sum(m for m in moved if m is not None)


def at_seconds(event: Event) -> float | None:
    """A round's position by the simulated clock at its end."""
    return number((event.get("clock") or {}).get("total"))


AXES: dict[str, tuple[Place, str, str]] = {  # position, title of the axis, and its format
    "rounds": (at_round, "round", ""),
    "bytes": (at_bytes, "bytes so far, down and up", "bytes"),
    "seconds": (at_seconds, "simulated seconds so far", ""),
}
_ENDS = {
    "received": "circle",
    "adapted": "diamond",
}  # marks of scores that are known at the end only
_NOTHING = {
    "rounds": "no round was scored",
    "bytes": "no scored round has a number of bytes",
    "seconds": "there is no clock: run with --clock",
}


def curve(
    rounds: Sequence[Event], title: str, key: str, place: Place = at_round
) -> list[tuple[float, float]]:
    """A score ("received" or "adapted") by round, bytes or seconds, where there is one."""
    scores_by_place = [(place(e), dict[str, Any](e).get(title) or {}) for e in rounds]
    points = [(x, number(scores.get(key))) for x, scores in scores_by_place]
    return [(x, y) for x, y in points if x is not None and y is not None]


def finish(reading: Reading, title: str, place: Place = at_round) -> list[tuple[float, float]]:
    """The score at the end as one point, for runs without this score in any round."""
    scores = reading.result.get(title)
    score = number(scores.get(reading.judged_by)) if isinstance(scores, Mapping) else None
    at = next((x for e in reversed(reading.rounds) if (x := place(e)) is not None), None)
    return [] if score is None or at is None else [(at, score)]


def accuracy(reading: Reading, against: str = "rounds") -> Sketch:
    """The mean score over clients, with a band of the middle 80 % and a line for the worst.

    ``against`` is "rounds", "bytes" or "seconds". The headline score is in front; the round that
    was best on validation data is marked, and so are the target, if there is one, and rounds in
    which layers rested. A score that is known at the end only is one point there.
    """
    place, title, kind = AXES[against]
    by = reading.judged_by
    both = {t: curve(reading.rounds, t, by, place) for t in ("received", "adapted")}
    ends = {t: finish(reading, t, place) for t, points in both.items() if not points}
    shown = [p for points in (*both.values(), *ends.values()) for p in points]
    if not shown:
        raise ConfigError(f"{reading.name}: {_NOTHING[against]}")
    if against == "bytes" and not any(x for x, _ in shown):
        raise ConfigError(f"{reading.name}: nothing was sent")
    first = reading.headline if both.get(reading.headline) else "received"
    if not both[first]:
        first = "adapted"
    low, high, worst = (curve(reading.rounds, first, k, place) for k in ("p10", "p90", "worst"))
    traces: list[Any] = []
    if len(low) > 1 and len(low) == len(high):
        traces.append(band(low, high, "10th to 90th percentile of clients", BLUE))
    if worst:
        traces.append(thin(worst, "worst client", INK, "dot"))
    for kept, colour, dash in (("adapted", ORANGE, "dash"), ("received", BLUE, "solid")):
        if both[kept]:
            traces.append(line(both[kept], f"{kept}, mean of clients", colour, dash))
        elif ends[kept]:
            traces.append(dots(ends[kept], f"{kept} at the end", colour, _ENDS[kept]))
    traces += _at_rest(reading, first, place, by)
    traces += _best(reading, place, by)
    target = number(_table(reading, "evaluation").get("target"))
    if target is not None:
        traces.append(level(shown, target, f"target {_shown(target, by)}"))
    figure = figure_of(traces)
    x_axis(figure, title, kind)
    y_axis(figure, by)
    return styled(figure, f"{said(by)} against {against}", 420)


def _at_rest(reading: Reading, title: str, place: Place, by: str) -> list[Any]:
    """Marks of the rounds in which layers rested, so that clients had layers of their own."""
    pairs = zip(reading.rounds, rested(reading.rounds), strict=True)
    points = curve([e for e, rests in pairs if rests], title, by, place)
    colour = BLUE if title == "received" else ORANGE
    return [dots(points, "layers at rest", colour, "circle-open")] if points else []


def _best(reading: Reading, place: Place, by: str) -> list[Any]:
    """The mark of the round that was best on validation data."""
    best = reading.result.get("best_on_validation")
    if not isinstance(best, Mapping):
        return []
    at = [e for e in reading.rounds if e["round"] == best.get("round")]
    points = curve(at, "received", by, place)
    name = f"best on validation data: round {plain(best.get('round'))}"
    return [dots(points, name, RED, "star")] if points else []


def loss(reading: Reading) -> Sketch:
    """The mean test loss over clients."""
    both = {t: curve(reading.rounds, t, "loss") for t in ("received", "adapted")}
    if not any(both.values()):
        raise ConfigError(f"{reading.name}: {_NOTHING['rounds']}")
    styles = (("adapted", ORANGE, "dash"), ("received", BLUE, "solid"))
    figure = figure_of(
        [line(both[t], f"{t}, mean of clients", c, dash) for t, c, dash in styles if both[t]]
    )
    figure.x(title="round")
    figure.y(title="loss on test data", rangemode="tozero")
    return styled(figure, "Loss against rounds", 360)


# --- axes -----------------------------------------------------------------------------------------


def said(by: str) -> str:
    """The headline score for an axis or a title."""
    return "Accuracy" if by == "accuracy" else "R²" if by == "r2" else plain(by)


def x_axis(figure: Sketch, title: str, kind: str = "") -> None:
    """An axis of rounds, seconds or bytes, which starts at 0."""
    more = {"tickformat": "~s", "ticksuffix": "B"} if kind == "bytes" else {}
    figure.x(more, title=title, rangemode="tozero", nticks=6, tickangle=0)


def y_axis(figure: Sketch, by: str) -> None:
    """The headline score."""
    percent = {"tickformat": SHARE, "hoverformat": ".1%"} if by == "accuracy" else {}
    figure.y(percent, title=said(by))


def _shown(value: float, by: str) -> str:
    return f"{value:.1%}" if by == "accuracy" else f"{value:.3f}"


def _table(reading: Reading, name: str) -> Mapping[str, Any]:
    table = reading.config.get(name)
    return table if isinstance(table, Mapping) else {}
