"""Pictures in plotly.js's own format, without plotly's checks."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from coterie.report.palette import FAINT, GRID, INK, PAPER, line_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Trace = dict[str, Any]
_P = ParamSpec("_P")

FONT = {"family": "system-ui, Arial, Helvetica, sans-serif", "size": 13, "color": INK}
_AXIS = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": GRID,
    "zeroline": False,
    "ticks": "",
    "title": {"font": {"size": 13}},
}
# A white page with faint lines: much shorter in JSON than plotly's own.
TEMPLATE = {
    "layout": {
        "font": FONT,
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "xaxis": _AXIS,
        "yaxis": _AXIS,
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
}


@dataclass(frozen=True)
class Panel:
    """The axes of one panel by number, "" being the first; ``second`` is a scale on its right."""

    x: str = ""
    y: str = ""
    second: str | None = None


@dataclass
class Sketch:
    """Traces and a layout as plain dicts.

    A plotly ``Figure`` checks each of its values, which would take most of the time of a report of
    many runs: pages use the ``tree``, and ``figure()`` is for further work with plotly.
    """

    data: list[Trace]
    layout: dict[str, Any]
    panels: Sequence[Panel] = field(default=(Panel(),))

    def add(self, trace: Trace, panel: int = 1, second: bool = False) -> None:
        """Add a trace to a panel, counted from the top."""
        at = self.panels[panel - 1]
        self.data.append(
            {**trace, "xaxis": f"x{at.x}", "yaxis": f"y{at.second if second else at.y}"}
        )

    def x(self, settings: Mapping[str, Any] | None = None, panel: int = 0, **more: Any) -> None:
        """Change settings of the x axis of one panel, or of all."""
        for at in self.panels if panel == 0 else [self.panels[panel - 1]]:
            self._set(f"xaxis{at.x}", {**(settings or {}), **more})

    def y(
        self,
        settings: Mapping[str, Any] | None = None,
        panel: int = 0,
        second: bool = False,
        **more: Any,
    ) -> None:
        """Change settings of the y axis of one panel, or of all; ``second`` is its right scale."""
        for at in self.panels if panel == 0 else [self.panels[panel - 1]]:
            sides = [at.second if second else at.y] if panel else [at.y, at.second]
            for side in sides:
                if side is not None:
                    self._set(f"yaxis{side}", {**(settings or {}), **more})

    def _set(self, axis: str, settings: Mapping[str, Any]) -> None:
        axis_settings = self.layout.setdefault(axis, {})
        axis_settings.update(settings)
        if isinstance(axis_settings.get("title"), str):
            axis_settings["title"] = {"text": axis_settings["title"]}

    @property
    def tree(self) -> dict[str, Any]:
        """Data and layout ready for JSON: matrices are packed."""
        return {"data": [_packed(trace) for trace in self.data], "layout": self.layout}

    def figure(self) -> Figure:
        """The same as plotly's figure, every value checked."""
        import plotly.graph_objects as go

        return go.Figure(self.data, self.layout)


def _packed(trace: Trace) -> Trace:
    """Matrices in plotly.js's compact form."""
    return {k: _bytes_of(v) if isinstance(v, np.ndarray) else v for k, v in trace.items()}


def _bytes_of(values: np.ndarray) -> dict[str, str]:
    """
    >>> _bytes_of(np.array([[1, 2]], "i2"))
    {'dtype': 'i2', 'bdata': 'AQACAA==', 'shape': '1, 2'}
    """
    little = values.astype(values.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode()
    return {
        "dtype": f"{values.dtype.kind}{values.dtype.itemsize}",
        "bdata": data,
        "shape": ", ".join(map(str, values.shape)),
    }


def in_plotly(draw: Callable[_P, Sketch]) -> Callable[_P, Figure]:
    """The same picture as plotly's figure."""

    @wraps(draw)
    def drawn(*args: _P.args, **more: _P.kwargs) -> Figure:
        return draw(*args, **more).figure()

    drawn.__annotations__["return"] = "Figure"
    return drawn


def panels(heights: Sequence[float], second: int = 0) -> Sketch:
    """Panels below one another that share their rounds; the ``second`` one has two scales.

    >>> found = panels([3, 1])
    >>> found.layout["yaxis"]["domain"], found.layout["yaxis2"]["domain"]
    ([0.295, 1.0], [0.0, 0.235])
    """
    gap, rows = 0.06, len(heights)
    room = (1 - gap * (rows - 1)) / sum(heights)
    wide = [0.0, 0.94 if second else 1.0]
    layout: dict[str, Any] = {"template": TEMPLATE}
    found: list[Panel] = []
    top, y = 1.0, 0
    for row, height in enumerate(heights, 1):
        bottom = top - room * height
        y += 1
        at = Panel(_number(row), _number(y), _number(y + 1) if row == second else None)
        layout[f"xaxis{at.x}"] = {"anchor": f"y{at.y}", "domain": wide}
        if row < rows:
            layout[f"xaxis{at.x}"] |= {"matches": f"x{rows}", "showticklabels": False}
        # Rounded, so that the lowest one ends at 0.
        domain = [abs(round(bottom, 6)), round(top, 6)]
        layout[f"yaxis{at.y}"] = {"anchor": f"x{at.x}", "domain": domain}
        if at.second is not None:
            own = {"anchor": f"x{at.x}", "overlaying": f"y{at.y}", "side": "right"}
            layout[f"yaxis{at.second}"] = own
            y += 1
        found.append(at)
        top = bottom - gap
    return Sketch([], layout, found)


def tiles(rows: Sequence[int], gap: float = 0.1) -> Sketch:
    """Panels in rows, each with its own axes; the numbers are the panels in each row.

    >>> found = tiles([2, 1], gap=0.2)
    >>> found.layout["xaxis2"]["domain"], found.layout["yaxis3"]["domain"]
    ([0.6, 1.0], [0.0, 0.4])
    """
    layout: dict[str, Any] = {"template": TEMPLATE}
    found: list[Panel] = []
    columns = max(rows)
    wide, high = (1 - gap * (columns - 1)) / columns, (1 - gap * (len(rows) - 1)) / len(rows)
    for row, count in enumerate(rows):
        top = 1 - row * (high + gap)
        for column in range(count):
            left = column * (wide + gap)
            at = Panel(*[_number(len(found) + 1)] * 2)
            across, upwards = ([left, left + wide], [max(0.0, top - high), top])
            layout[f"xaxis{at.x}"] = {"anchor": f"y{at.y}", "domain": [round(v, 6) for v in across]}
            layout[f"yaxis{at.y}"] = {
                "anchor": f"x{at.x}",
                "domain": [round(v, 6) for v in upwards],
            }
            found.append(at)
    return Sketch([], layout, found)


def _number(place: int) -> str:
    """The number in an axis's name: the first one has none."""
    return "" if place == 1 else str(place)
