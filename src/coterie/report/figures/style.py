"""What all pictures share: fonts, margins, kinds of lines, and the escaping of names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.core.events import Event as Event
from coterie.errors import ConfigError
from coterie.report.figures.sketch import TEMPLATE, Sketch, Trace
from coterie.report.palette import DASHES, INK, RED, SYMBOLS, scale

Points = Sequence[tuple[float, float]]

THIN = {"color": INK, "width": 1}
SHARE = ".2~%"  # format of an axis of accuracies: 68%, or 68.5% where ticks are that close
_AXIS = re.compile(r"[xy]axis\d*$")
MOST_NAMES = 12  # names of clients in one hover text


def plain(text: object) -> str:
    """A user's text, escaped so that plotly does not take it for markup.

    >>> plain("<b>clinic & co</b>")
    '&lt;b&gt;clinic &amp; co&lt;/b&gt;'
    """
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(text: object, most: int = 18) -> str:
    """The same, cut to fit a tick or a legend.

    >>> short("a clinic with a very long name"), short("<i>")
    ('a clinic with a v…', '&lt;i&gt;')
    """
    cut = str(text)
    return plain(cut if len(cut) <= most else cut[: most - 1] + "…")


def ticks_of(names: Sequence[str]) -> list[str]:
    """Unique names for an axis: only the numbers where all clients are numbered.

    >>> ticks_of(["client 0", "client 1"]), ticks_of(["a", "b", "a"])
    (['0', '1'], ['a', 'b', 'a (2)'])
    """
    numbered = all(n.startswith("client ") and n[7:].isdecimal() for n in names)
    cut = [n[7:] if numbered else short(n) for n in names]
    twice = Counter(cut)
    return [f"{n} ({c})" if twice[n] > 1 and n in cut[:c] else n for c, n in enumerate(cut)]


def hover_names(names: Iterable[object], most: int = MOST_NAMES) -> str:
    """Names for a hover text, only the first ones of many.

    >>> hover_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = [short(n, 24) for n in names]
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")


def clear(values: Sequence[Any] | np.ndarray, digits: int = 5) -> list[Any]:
    """Numbers rounded to the digits that are visible; None for anything that is not a number.

    >>> clear([1 / 3, 123456789, None, float("nan")])
    [0.33333, 123460000, None, None]
    """
    return [_clear(v, digits) for v in values]


def _clear(value: Any, digits: int) -> Any:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def grid(rows: Sequence[Sequence[Any]], dtype: str = "f4") -> np.ndarray:
    """A compact matrix for a heat map; None becomes a gap."""
    return np.array([[math.nan if v is None else v for v in row] for row in rows], dtype)


# --- lines ----------------------------------------------------------------------------------------


def line(points: Points, name: str, colour: str, dash: str = "solid", **more: Any) -> Trace:
    """A line, with a dot for each point unless there are too many."""
    return {
        "type": "scatter",
        "x": clear([x for x, _ in points], 8),
        "y": clear([y for _, y in points]),
        "mode": "lines+markers" if len(points) < 60 else "lines",
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 5},
        "name": name,
        **more,
    }


def thin(points: Points, name: str, colour: str, dash: str = "solid") -> Trace:
    """A thin line without dots."""
    style = {"color": colour, "width": 1, "dash": dash}
    return line(points, name, colour, mode="lines", line=style)


def stairs(points: Points, name: str, colour: str, dash: str = "solid") -> Trace:
    """A line that keeps its height until the next point."""
    style = {"color": colour, "width": 2, "dash": dash, "shape": "hv"}
    return line(points, name, colour, mode="lines", line=style)


def dots(points: Points, name: str, colour: str, symbol: str, **more: Any) -> Trace:
    """Points without a line."""
    marker = {"color": colour, "size": 9, "symbol": symbol}
    return line(points, name, colour, mode="markers", marker=marker, cliponaxis=False, **more)


def level(points: Points, height: float, text: str, colour: str = RED, dash: str = "dash") -> Trace:
    """A horizontal dashed line over the range of these points."""
    ends = [min(x for x, _ in points), max(x for x, _ in points)]
    style = {"color": colour, "width": 1.5, "dash": dash}
    return line([(x, height) for x in ends], text, colour, mode="lines", line=style)


def band(low: Points, high: Points, name: str, colour: str, **more: Any) -> Trace:
    """The area between two lines."""
    around = [*low, *reversed(high)]
    return {
        "type": "scatter",
        "x": clear([x for x, _ in around], 8),
        "y": clear([y for _, y in around]),
        "fill": "toself",
        "fillcolor": colour,
        "mode": "lines",
        "line": {"width": 0, "color": colour},
        "opacity": 0.18,
        "name": name,
        "hoverinfo": "skip",
        **more,
    }


def swatch(text: str, colour: str, symbol: str = "square") -> Trace:
    """An entry of the legend for something that is not a line."""
    marker = {"color": colour, "size": 12, "symbol": symbol, "line": THIN}
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "mode": "markers",
        "marker": marker,
        "name": text,
    }


def heatmap(z: Any, title: str, hover: str, **more: Any) -> Trace:
    """A heat map in the colour scale of all pictures, with its colour bar above."""
    bar = {
        # Beside the bar: plotly.js 4.1 draws a title above it over the bar where names are long.
        "title": {"text": title, "side": "right", "font": {"size": 12}},
        "tickfont": {"size": 10},
        "orientation": "h",
        "thickness": 8,
        "len": 0.8,
        "x": 1,
        "xanchor": "right",
        # From the top of the figure, since plotly.js 4.1 moves the x title otherwise.
        "yref": "container",
        "y": 1,
        "yanchor": "top",
        "ypad": 4,
        "nticks": 5,
        "tickangle": 0,
        "ticklabelposition": "outside bottom",
    }
    defaults = {"colorscale": scale(), "colorbar": bar, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "heatmap", "z": z, **defaults, **more}


def steps_of(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale with one of these colours for each whole number."""
    n = len(colours)
    return [(k / n, colours[i]) for i in range(n) for k in (i, i + 1)]


# --- the whole picture ----------------------------------------------------------------------------


def figure_of(traces: Sequence[Trace], **layout: Any) -> Sketch:
    """A picture of these traces."""
    return Sketch(list(traces), {"template": TEMPLATE, **layout})


def styled(figure: Sketch, title: str, height: float, *subtitle: str) -> Sketch:
    """Add a title and a font, and place the colour bar and the legend below the title."""
    layout, bars = figure.layout, _colour_bars(figure)
    named = [t["name"] for t in figure.data if t.get("showlegend") is not False and "name" in t]
    entry = 10 + 6.5 * max(map(len, named), default=0)
    below_title = 42 + 26 * bool(subtitle)
    for bar in bars:
        bar["y"] = 1 - below_title / height
    top = (
        10
        + below_title
        + _BAR * bool(bars)
        + 21 * math.ceil(len(named) / max(1, 700 // (entry + 45)))
    )
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 1 - (top - 8) / height}
    layout["title"] = {
        "text": title,
        "x": 0.01,
        "yref": "container",
        "y": 1 - 14 / height,
        "yanchor": "top",
        "font": {"size": 17},
        "subtitle": {"text": "; ".join(subtitle), "font": {"size": 13, "color": INK}},
    }
    layout["height"] = round(height)
    layout["margin"] = {"l": 60, "r": layout.get("meta", {}).get("ends", 24), "t": top, "b": 50}
    layout["legend"] = {**legend, "yanchor": "bottom", "entrywidth": entry}
    axes = [layout.get(f"xaxis{at.x}", {}) for at in figure.panels]
    if "round" in [axis.get("title", {}).get("text") for axis in axes]:
        rounds = [x for t in figure.data for x in t.get("x", ()) if x is not None]
        if max(rounds, default=0) - min(rounds, default=0) < 8:
            figure.x(dtick=1)  # rounds are whole numbers
    # Set here and not in the template, since a page may have its own template.
    figure.y(automargin=True)
    _clear_of_names(layout)
    return figure


_BAR = 34  # height in pixels, including the numbers below it


def _colour_bars(figure: Sketch) -> list[dict[str, Any]]:
    """The visible colour bars."""
    maps = [t for t in figure.data if t["type"] == "heatmap" and t.get("showscale") is not False]
    return [t["colorbar"] for t in maps]


def _clear_of_names(layout: dict[str, Any]) -> None:
    """Move titles of axes away from the names of their ticks."""
    for key, axis in layout.items():
        named = axis.get("type") == "category" or "ticktext" in axis if _AXIS.match(key) else False
        if named and axis.get("automargin") and "title" in axis:
            axis["title"] = {**axis["title"], "standoff": 8}


def untitled(figure: Sketch) -> Sketch:
    """Remove the title, for pages that have their own; the legend then fits at any width."""
    layout, bars = figure.layout, _colour_bars(figure)
    spared = max(0, layout["margin"]["t"] - _BAR * bool(bars) - 40)
    layout.pop("title", None)
    layout["legend"] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    for bar in bars:
        layout["title"] = _bar_title(bar)
    right = layout.get("meta", {}).get("ends", 12)  # the room for names at the ends of lines
    layout["margin"] = {"l": 48, "r": right, "t": 62 if bars else 16, "b": 52}
    layout["height"] = round(layout["height"] - spared / 2)
    return figure


def _bar_title(bar: dict[str, Any]) -> dict[str, Any]:
    """The title of a colour bar as the title of a figure without one, just above the bar.

    The bar's own title would leave no room for the bar in a narrow picture, or cover it.
    """
    text = bar.pop("title")["text"]
    bar |= {"y": 1, "ypad": 20, "len": 0.5}
    at = {"x": 1, "xanchor": "right", "yref": "container", "y": 1, "yanchor": "top"}
    return {"text": text, **at, "pad": {"t": 2, "r": 14}, "font": {"size": 12, "color": INK}}


# --- what is in the events ------------------------------------------------------------------------


def note_of(notes: Mapping[str, Any], key: str, where: str) -> Any:
    """A note; a ``ConfigError`` that says which notes have it if it is missing."""
    if notes.get(key) is None:
        raise ConfigError(f"these notes have no '{key}': give {where}")
    return notes[key]


def having(events: Sequence[Event], key: str) -> list[Event]:
    """The rounds whose notes have this key."""
    return [e for e in events if "event" not in e and key in (e.get("notes") or {})]


def series(events: Sequence[Event], key: str, method: str) -> list[tuple[float, float]]:
    """A note by round; rounds without a value are left out."""
    noted_values = [(e["round"], e["notes"][key]) for e in having(events, key)]
    points: list[tuple[float, float]] = [
        (r, v) for r, v in noted_values if v is not None and math.isfinite(v)
    ]
    if not points:
        raise ConfigError(f"no event has '{key}' in its notes: give the events of a {method} run")
    return points


def symbol_of(number: int) -> str:
    """A kind of marker by number, so that things never differ by colour alone."""
    return SYMBOLS[number % len(SYMBOLS)]


def dash_of(number: int) -> str:
    """A kind of line by number."""
    return DASHES[number % len(DASHES)]
