"""How results show themselves in a notebook; the report is imported only when it draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.lazy import named

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

    from coterie.report.reading import Reading


class Notebook(ABC):
    """A mixin for results and readings: a card, data frames and figures."""

    @abstractmethod
    def _read(self) -> Reading:
        """The run as the report reads it."""

    def to_dataframe(self, table: str = "rounds") -> pandas.DataFrame:
        """A table as a pandas data frame; missing values are NaN.

        ``"rounds"`` has a row for each round, ``"clients"`` for each client, ``"scores"`` for each
        client and scored round, and ``"bytes"`` for each round and kind of array (round 0 is before
        the first).
        """
        frame: pandas.DataFrame = named("coterie.report.notebook:dataframe")(self._read(), table)
        return frame

    def figure(self, name: str) -> Figure:
        """A figure by its name, as in ``figure("groups")``."""
        figure: Figure = named("coterie.report.catalogue:draw")(name, self._read())
        return figure

    def report(self, to: str | Path | None = None) -> Path:
        """Write the HTML report, by default ``report.html`` in the run directory; its path."""
        kept = self._read().path
        path: Path = named("coterie.report.html:write_report")(self if kept is None else kept, to)
        return path

    def __repr__(self) -> str:
        lines = named("coterie.report.object_cards:run_lines")(self._read())
        return "\n".join([f"<{type(self).__name__}", *(f"  {line}" for line in lines), ">"])

    def _repr_html_(self) -> str:
        return str(named("coterie.report.card:card")(self._read()))


def reading_of(result: Any) -> Reading:
    """The reading of a run in memory."""
    reading: Reading = named("coterie.report.reading:Reading").of(result)
    return reading


def the_pandas() -> Any:
    """Import pandas, which is an extra."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("a data frame needs the extra: pip install 'coterie[notebook]'") from None
    return pandas
