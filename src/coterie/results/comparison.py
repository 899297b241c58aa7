"""The result of a comparison: rows of numbers, means over seeds, and tables."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, CoterieError
from coterie.lazy import named
from coterie.results.notebook import the_pandas
from coterie.results.seeds import means_of

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure


@dataclass(frozen=True, repr=False)
class Comparison:
    """The results of several runs, with a row for each, and those that failed or were stopped.

    ``swept`` is true if there can be several seeds and settings; ``axes`` are then the keys of a
    row that distinguish settings, and ``means`` has a row for each method and setting. ``papers``
    are a scenario's figures, by method and setting. ``tuning`` has the ``values`` that were tried
    and, by row, those ``chosen`` on validation data; ``learning_rate`` is the one that all methods
    ran at, if they did without tuning. ``warnings`` are those of the runs of a row. ``left_out``,
    ``failed`` and ``stopped`` have the reason by the name of the run.

    >>> rows = [{"method": "fedavg", "seed": s, "received": 0.5 + s / 4} for s in (0, 1)]
    >>> Comparison(rows, "accuracy", swept=True).means[0]["received"]
    0.625
    """

    rows: Sequence[Mapping[str, Any]]
    judged_by: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, CoterieError] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    swept: bool = False
    axes: Sequence[str] = ()
    papers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    directory: Path | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scratch: tempfile.TemporaryDirectory[str] | None = None  # of runs that are not kept

    @cached_property
    def means(self) -> list[dict[str, Any]]:
        """A row for each method and setting: means over seeds, ``_std`` and ``_mark`` of scores."""
        return means_of([{"seed": 0, **row} for row in self.rows], self.axes)

    @property
    def seeds(self) -> list[int]:
        """The seeds with results."""
        return sorted({int(row["seed"]) for row in self.rows if "seed" in row})

    def to_dict(self) -> dict[str, Any]:
        """Everything, as ``comparison.json`` has it."""
        return {
            "judged_by": self.judged_by,
            **({"axes": list(self.axes)} if self.swept else {}),
            "rows": list(self.rows),
            **({"means": self.means} if self.swept else {}),
            **({"tuning": dict(self.tuning)} if self.tuning else {}),
            "left_out": dict(self.left_out),
            "failed": {name: str(error) for name, error in self.failed.items()},
            "stopped": dict(self.stopped),
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """The rows as a pandas data frame, one for each run."""
        frame: pandas.DataFrame = the_pandas().DataFrame([dict(row) for row in self.rows])
        return frame

    def markdown(self) -> str:
        """The table as Markdown."""
        return self._as("markdown")

    def latex(self) -> str:
        """The table as LaTeX, for the package booktabs."""
        return self._as("latex")

    def figure(self, name: str = "compare-accuracy") -> Figure:
        """A figure of all runs by its name, as in ``figure("compare-cost")``.

        The names are those of ``coterie.report.catalogue.COMPARED``; "cost" is "compare-cost".
        """
        catalogue = named("coterie.report.catalogue:COMPARED")
        whole = (
            name if name in catalogue or f"compare-{name}" not in catalogue else f"compare-{name}"
        )
        catalogue.find(whole)  # a wrong name is told before runs are read
        figure: Figure = named("coterie.report.catalogue:draw_compared")(whole, self._runs())
        return figure

    def report(self, to: str | Path | None = None) -> Path:
        """Write the HTML report of all runs, by default ``report.html`` in their directory."""
        if to is None and self.directory is None:
            raise ConfigError("the runs are not kept: name a file, as in report('all.html')")
        path: Path = named("coterie.report.html:write_report")(self._runs(), to)
        return path

    def _runs(self) -> Path:
        """The folder of the runs."""
        if self.directory is not None:
            return Path(self.directory)
        if self.scratch is None:
            raise ConfigError("this comparison was made without runs, and has nothing to draw")
        return Path(self.scratch.name)

    def __repr__(self) -> str:
        lines = named("coterie.report.object_cards:comparison_lines")(self)
        return "\n".join(["<Comparison", *(f"  {line}" for line in lines), ">"])

    def _repr_html_(self) -> str:
        picture = named("coterie.report.object_cards:comparison_picture")(self)
        return f"{self._as('html')}{picture}"

    def _as(self, form: str) -> str:
        sheet = named("coterie.report.comparison_tables:sheet_of")(self)
        return str(named(f"coterie.report.table_formats:as_{form}")(sheet))
