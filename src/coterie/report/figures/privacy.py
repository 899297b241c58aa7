"""What the server saw of single clients, and how much of the privacy budget was spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import dots, figure_of, level, line, plain, short, styled
from coterie.report.palette import BLUE, GREEN, LINES, ORANGE, PURPLE, RED, SKY
from coterie.report.reading import Reading, number

_PROTECTED = {  # from the least protected, with the words for each
    "none": ("looked at one by one", RED),
    "none, a mean of one": ("a mean of one client", LINES[3]),
    "none, averaged on arrival": ("averaged on arrival", ORANGE),
    "revealed by consent": ("revealed by consent", PURPLE),
    "central noise": ("noised by the server", SKY),
    "local noise": ("noised by clients", BLUE),
}


def exposed(reading: Reading) -> tuple[int, list[tuple[str, str, int]]]:
    """The number of clients, and of how many clients each layer or array reached the server.

    A row has the array and layer, the protection, and the number of clients; the same layer may
    have been seen in several ways.
    """
    exposed_arrays = reading.result.get("exposure")
    if not isinstance(exposed_arrays, Mapping):
        raise ConfigError(f"{reading.name}: the run records what the server saw when it ends")
    rows = []
    for protection, entry in (exposed_arrays.get("single") or {}).items():
        for array, about in entry["arrays"].items():
            for layer in about.get("layers") or [""]:
                name = f"{array}/{layer}" if layer else str(array)
                rows.append((name, str(protection), int(about["clients"])))
    return int(exposed_arrays.get("clients") or 0), rows


def exposure(reading: Reading) -> Sketch:
    """The number of clients of which the server received each layer by itself, by protection."""
    members, rows = exposed(reading)
    if not rows:
        raise ConfigError(f"{reading.name}: the server received no vector of a single client")
    names = list(dict.fromkeys(name for name, *_ in rows))
    known = [*_PROTECTED, *(p for _, p, _ in rows)]
    traces: list[Any] = []
    for protection in dict.fromkeys(known):
        counts = {name: count for name, p, count in rows if p == protection}
        if not counts:
            continue
        title, colour = _PROTECTED.get(protection, (plain(protection), GREEN))
        traces.append(
            {
                "type": "bar",
                "y": [short(n, 22) for n in counts],
                "x": list(counts.values()),
                "orientation": "h",
                "name": title,
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": f"%{{y}} of %{{x}} clients: {title}<extra></extra>",
            }
        )
    figure = figure_of(traces, barmode="group", bargap=0.25, showlegend=True)
    end = max([members, *(n for *_, n in rows)])
    figure.x(title=f"clients, of {members}", range=[0, end * 1.02], nticks=6)
    order = [short(n, 22) for n in reversed(names)]
    figure.y(type="category", categoryorder="array", categoryarray=order)
    height = 150 + min(900, 16 * len(rows) + 14 * len(names))
    return styled(figure, "What reached the server of single clients", max(260, height))


def epsilon_by_round(reading: Reading) -> list[tuple[float, float]]:
    """ε by round; a ``ConfigError`` where there is no noise."""
    noise_by_round = [(float(e["round"]), dict(e.get("privacy") or {})) for e in reading.rounds]
    losses = [(r, number(noise.get("epsilon"))) for r, noise in noise_by_round]
    points = [(r, v) for r, v in losses if v is not None]
    if not points:
        raise ConfigError(f"{reading.name}: no noise was added, so there is no ε")
    return points


def budget(reading: Reading) -> float | None:
    """The budget for ε, if one was set."""
    promised, configured = reading.result.get("privacy"), reading.config.get("privacy")
    if isinstance(promised, Mapping):
        return number(promised.get("budget"))
    return number(configured.get("epsilon")) if isinstance(configured, Mapping) else None


def epsilon(reading: Reading) -> Sketch:
    """The privacy loss ε by round, and its budget."""
    points = epsilon_by_round(reading)
    traces = [line(points, "ε by Rényi divergences, an upper bound", BLUE)]
    promised = reading.result.get("privacy")
    final = number(promised.get("epsilon")) if isinstance(promised, Mapping) else None
    if final is not None and isinstance(promised, Mapping):
        name = f"at the end, by {plain(promised.get('accountant', 'its accountant'))}: {final:.3g}"
        traces.append(dots([(points[-1][0], final)], name, GREEN, "diamond"))
    most = budget(reading)
    if most is not None:
        traces.append(level(points, most, f"budget {most:g}"))
    figure = figure_of(traces)
    figure.x(title="round", nticks=8)
    figure.y(title="ε", rangemode="tozero")
    return styled(figure, "Privacy spent", 340)
