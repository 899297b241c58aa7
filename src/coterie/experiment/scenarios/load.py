"""Read a paper's scenarios from its TOML file.

A file has ``[defaults]`` for all its scenarios and one ``[[tables]]`` for each published table,
with one ``[[tables.scenarios]]`` for each of its columns. A scenario is what the defaults say, then
its table, then the scenario itself: settings (``config``) override each other as layers of a
configuration do, notes are added, and any other key is replaced. Published numbers are written as
printed, in one row for each method with one cell for each scenario: accuracies in per cent, ``"-"``
for an empty cell, ``"never"`` for a target that the method did not reach.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from coterie.core.schema import Config
from coterie.errors import ConfigError
from coterie.experiment.config import parse
from coterie.experiment.scenarios.scenario import Scenario, overlay
from coterie.results.toml import read_toml

Layer = dict[str, Any]
Accuracy = Annotated[float, AfterValidator(lambda cell: round(cell / 100, 6))] | Literal["-"]
Cost = float | Annotated[Literal["never"], AfterValidator(lambda _: None)]


class _Table(BaseModel, extra="allow"):
    """A published table. The keys that are not declared here are those of its scenarios."""

    scenarios: list[Layer]
    figures: dict[str, list[Accuracy]] = {}
    spread: dict[str, list[Accuracy]] = {}
    worst: dict[str, list[Accuracy]] = {}
    rounds_to_target: dict[str, list[Cost]] = {}
    megabits_to_target: dict[str, list[Cost]] = {}

    @property
    def grids(self) -> dict[str, dict[str, list[Any]]]:
        """The published numbers: rows of cells by method."""
        return self.model_dump(exclude={"scenarios", *(self.model_extra or {})})

    @model_validator(mode="after")
    def _one_cell_a_scenario(self) -> _Table:
        for grid, rows in self.grids.items():
            for method, row in rows.items():
                if len(row) != len(self.scenarios):
                    raise ValueError(
                        f"{grid}.{method} has {len(row)} cells for {len(self.scenarios)} scenarios"
                    )
        return self

    def column(self, number: int) -> Layer:
        """The published numbers of one scenario."""
        return {
            grid: {method: row[number] for method, row in rows.items() if row[number] != "-"}
            for grid, rows in self.grids.items()
        }


class _Paper(BaseModel, extra="forbid"):
    """The file of a paper."""

    defaults: Layer = {}
    tables: list[_Table]


def read_scenarios(path: Path) -> Iterator[Scenario]:
    """The scenarios of a paper's file; an error names the file and the key.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "paper.toml")
    ...     _ = path.write_text("[[tables]]\\nscenarios = []\\n[default]")
    ...     list(read_scenarios(path))
    Traceback (most recent call last):
    coterie.errors.ConfigError: .../paper.toml: default: Extra inputs are not permitted
    """
    try:
        paper = _Paper.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_what_is_wrong(error)}") from None
    for table in paper.tables:
        for number, column in enumerate(table.scenarios):
            layers = (paper.defaults, table.model_extra or {}, column, table.column(number))
            try:
                yield _scenario(layers)
            except ValidationError as error:
                reasons = _what_is_wrong(error)
                raise ConfigError(f"{path}: {column.get('name')}: {reasons}") from None
            except ConfigError as error:
                raise ConfigError(f"{path}: {column.get('name')}: {error}") from None


def _what_is_wrong(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _scenario(layers: tuple[Layer, ...]) -> Scenario:
    """A scenario from layers of its keys, the most general first."""
    config: Layer = {}
    for layer in layers:
        overlay(config, copy.deepcopy(layer.get("config", {})))
    parse(config)
    fields = {key: value for layer in layers for key, value in layer.items()}
    fields["config"] = {table: config[table] for table in Config.model_fields if table in config}
    fields["notes"] = [note for layer in layers for note in layer.get("notes", [])]
    return Scenario(**fields)
