"""What all pictures have in common: fonts, margins, kinds of lines, and names made harmless."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.report.palette import DASHES, FAINT, GRID, INK, PAPER, RED, SYMBOLS, line_of, scale

Event = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
Trace = dict[str, Any]  # as plotly.js has it: figures are checked as a whole, once

FONT = {"family": "system-ui, Arial, Helvetica, sans-serif", "size": 13, "color": INK}
THIN = {"color": INK, "width": 1}
SHARE = ".0%"  # how an axis of accuracies is written
MOST_NAMES = 12  # of clients in one hover


def plain(text: object) -> str:
    """Text of a user, so that plotly shows it as it is instead of taking it for markup.

    >>> plain("<b>clinic & co</b>")
    '&lt;b&gt;clinic &amp; co&lt;/b&gt;'
    """
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(text: object, most: int = 18) -> str:
    """The same, cut where a tick or a legend has no more room.

    >>> short("a clinic with a very long name"), short("<i>")
    ('a clinic with a v…', '&lt;i&gt;')
    """
    told = str(text)
    return plain(told if len(told) <= most else told[: most - 1] + "…")


def ticks_of(names: Sequence[str]) -> list[str]:
    """Names for an axis: numbers where all are numbered, and no two alike.

    >>> ticks_of(["client 0", "client 1"]), ticks_of(["a", "b", "a"])
    (['0', '1'], ['a', 'b', 'a (2)'])
    """
    numbered = all(n.startswith("client ") and n[7:].isdecimal() for n in names)
    cut = [n[7:] if numbered else short(n) for n in names]
    twice = Counter(cut)
    return [f"{n} ({c})" if twice[n] > 1 and n in cut[:c] else n for c, n in enumerate(cut)]


def listed(names: Iterable[object], most: int = MOST_NAMES) -> str:
    """Names for a hover, the first of many.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    told = [short(n, 24) for n in names]
    rest = len(told) - most
    return ", ".join(told[:most]) + (f" and {rest} more" if rest > 0 else "")


def clear(values: Sequence[Any] | np.ndarray, digits: int = 5) -> list[Any]:
    """Numbers with as many digits as can be seen; what is no number is None.

    >>> clear([1 / 3, 123456789, None, float("nan")])
    [0.33333, 123460000, None, None]
    """
    return [_clear(v, digits) for v in values]


def _clear(value: Any, digits: int) -> Any:
    if value is None or not math.isfinite(value):
        return None
    found = float(f"{value:.{digits}g}")
    return int(found) if found == int(found) and abs(found) < 1e15 else found


def grid(rows: Sequence[Sequence[Any]], dtype: str = "f4") -> np.ndarray:
    """A matrix for a heat map in few bytes; None becomes a hole."""
    return np.array([[math.nan if v is None else v for v in row] for row in rows], dtype)


# --- lines ----------------------------------------------------------------------------------------


def line(points: Points, name: str, colour: str, dash: str = "solid", **more: Any) -> Trace:
    """A line with a dot for each point, if they are not too many."""
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
    """Points alone."""
    marker = {"color": colour, "size": 9, "symbol": symbol}
    return line(points, name, colour, mode="markers", marker=marker, cliponaxis=False, **more)


def level(points: Points, height: float, text: str, colour: str = RED, dash: str = "dash") -> Trace:
    """A dashed line as long as these points, at one height."""
    ends = [min(x for x, _ in points), max(x for x, _ in points)]
    style = {"color": colour, "width": 1.5, "dash": dash}
    return line([(x, height) for x in ends], text, colour, mode="lines", line=style)


def band(low: Points, high: Points, name: str, colour: str, **more: Any) -> Trace:
    """What lies between two lines."""
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
    """An entry of the legend for what is not a line."""
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
    """A map of values in the scale of all pictures, its colour bar lying above."""
    bar = {
        "title": {"text": title, "side": "top", "font": {"size": 12}},
        "tickfont": {"size": 10},
        "orientation": "h",
        "thickness": 8,
        "len": 0.5,
        "x": 1,
        "xanchor": "right",
        # From the top of the figure: otherwise plotly.js 4.1 moves the x title as well.
        "yref": "container",
        "y": 1,
        "yanchor": "top",
        "ypad": 4,
        "nticks": 6,
        "tickangle": 0,
        "ticklabelposition": "outside bottom",
    }
    given = {"colorscale": scale(), "colorbar": bar, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "heatmap", "z": z, **given, **more}


def steps_of(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale that has each of these colours for one whole number."""
    n = len(colours)
    return [(k / n, colours[i]) for i in range(n) for k in (i, i + 1)]


def panels(heights: Sequence[float], second: int = 0) -> Any:
    """Panels under one another with the rounds in common; the ``second`` one has two scales."""
    from plotly.subplots import make_subplots

    specs = [[{"secondary_y": row + 1 == second}] for row in range(len(heights))]
    found = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=list(heights),
        vertical_spacing=0.06,
        specs=specs,
    )
    return found.update_layout(template=_template())


# --- the whole picture ----------------------------------------------------------------------------


@lru_cache
def _template() -> Any:
    """A white page with faint lines: much shorter in JSON than plotly's own."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zerolinecolor": GRID,
        "zeroline": False,
        "ticks": "",
        "title": {"font": {"size": 13}},
    }
    return go.layout.Template(
        layout={
            "font": FONT,
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "align": "left",
                "bgcolor": PAPER,
                "bordercolor": FAINT,
                "font": {"color": INK},
            },
            "legend": {
                "orientation": "h",
                "x": 0,
                "font": {"size": 12},
                "bgcolor": "rgba(0,0,0,0)",
            },
            "annotationdefaults": {"showarrow": False, "font": {"size": 11, "color": INK}},
            "colorway": [line_of(i)[0] for i in range(8)],
        }
    )


def figure_of(traces: Sequence[Trace], **layout: Any) -> Any:
    """A figure of these traces, in one go: adding them one by one is slow."""
    import plotly.graph_objects as go

    return go.Figure(list(traces), {"template": _template(), **layout})


def styled(figure: Any, title: str, height: float, *subtitle: str) -> Any:
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
        height=round(height),
        margin={"l": 60, "r": 24, "t": top, "b": 50},
        legend={**legend, "yanchor": "bottom", "entrywidth": entry},
    )
    if "round" in [axis.title.text for axis in figure.select_xaxes()]:
        found = [x for t in figure.data if t.x is not None for x in t.x if x is not None]
        if max(found, default=0) - min(found, default=0) < 8:
            figure.update_xaxes(dtick=1)  # there are no halves of rounds
    # Said here and not in the template, for a page may have a template of its own.
    figure.update_yaxes(automargin=True)
    return figure


def untitled(figure: Any) -> Any:
    """Without its title, for a page that has its own; the legend then finds room at any width."""
    layout = figure.layout
    spared = max(0, (layout.margin.t or 0) - 40)
    layout.title = None
    layout.legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    barred = any(t.type == "heatmap" and t.showscale is not False for t in figure.data)
    layout.margin = {"l": 48, "r": 12, "t": 62 if barred else 16, "b": 52}
    if layout.height:
        layout.height = round(layout.height - spared / 2)
    return figure


# --- what is in the events ------------------------------------------------------------------------


def noted(notes: Mapping[str, Any], key: str, where: str) -> Any:
    """A note, or a sentence that says which notes have it."""
    if notes.get(key) is None:
        raise ConfigError(f"these notes have no '{key}': give {where}")
    return notes[key]


def having(events: Sequence[Event], key: str) -> list[Event]:
    """The rounds whose notes have this key."""
    return [e for e in events if "event" not in e and key in (e.get("notes") or {})]


def series(events: Sequence[Event], key: str, method: str) -> list[tuple[float, float]]:
    """A note by round; rounds without a value are left out."""
    found = [(e["round"], e["notes"][key]) for e in having(events, key)]
    found = [(r, v) for r, v in found if v is not None and math.isfinite(v)]
    if not found:
        raise ConfigError(f"no event has '{key}' in its notes: give the events of a {method} run")
    return found


def symbol_of(number: int) -> str:
    """A kind of marker by number, so that colour is never alone in telling things apart."""
    return SYMBOLS[number % len(SYMBOLS)]


def dash_of(number: int) -> str:
    """A kind of line by number."""
    return DASHES[number % len(DASHES)]
