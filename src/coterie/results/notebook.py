"""What a notebook shows of a run; the report does the drawing, and is not loaded before."""

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
    """A card, data frames and pictures; mixed into results and readings."""

    @abstractmethod
    def _read(self) -> Reading:
        """The run, as far as it is known."""

    def to_dataframe(self, table: str = "rounds") -> pandas.DataFrame:
        """A table as a data frame of pandas; what is missing is NaN.

        ``"rounds"`` has a row a round, ``"clients"`` a row a client, ``"scores"`` one for each
        client and scored round, ``"bytes"`` one for each round and kind of array (round 0: before
        the first).
        """
        made: pandas.DataFrame = named("coterie.report.notebook:dataframe")(self._read(), table)
        return made

    def figure(self, name: str) -> Figure:
        """A picture by its name, as in ``figure("groups")``; a notebook shows it by itself."""
        drawn: Figure = named("coterie.report.catalogue:draw")(name, self._read())
        return drawn

    def report(self, to: str | Path | None = None) -> Path:
        """Write the HTML report; gives its place (default: ``report.html`` in the run's folder)."""
        kept = self._read().path
        place: Path = named("coterie.report.html:write_report")(self if kept is None else kept, to)
        return place

    def _repr_html_(self) -> str:
        return str(named("coterie.report.card:card")(self._read()))


def reading_of(result: Any) -> Reading:
    """A run in memory, as the report reads it."""
    read: Reading = named("coterie.report.reading:Reading").of(result)
    return read


def the_pandas() -> Any:
    """The library, which is an extra."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("a data frame needs the extra: pip install 'coterie[notebook]'") from None
    return pandas
