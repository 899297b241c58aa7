"""Training settings chosen for each method on validation data, with the same budget for all.

With the first seed, every method runs with every combination of the values, for all rounds. The one
with the highest score on clients' validation data, at the end of the run, is used for all seeds; no
test sample is looked at. The run that was chosen counts as the run of the first seed.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, CoterieError, Interrupted, RunDirError
from coterie.experiment.compare.entries import PlannedRun, folder_of
from coterie.experiment.compare.plan import write_json
from coterie.experiment.compare.sweep import NamedMethod, Sweep
from coterie.experiment.config import assign, parse
from coterie.experiment.experiment import Experiment
from coterie.results.checksums import read_json
from coterie.results.rundir import RunDir
from coterie.results.titles import value_in_title

TUNED, FOLDER = "tuning.json", "tuning"
Grid = Mapping[str, Sequence[Any]]
Do = Callable[[Sequence[PlannedRun]], Mapping[str, CoterieError]]


def check_tuned(sweep: Sweep, methods: Sequence[NamedMethod]) -> None:
    """Refuse settings that are tuned and set, or varied, at the same time."""
    for key in sweep.tune:
        if key in sweep.vary:
            raise ConfigError(f"tune {key}: it is varied, too; leave out one of the two")
        for title, _, own in methods:
            if key in own:
                raise ConfigError(f"tune {key}: {title} sets it already; leave out one of the two")


def check_validates(experiment: Experiment) -> None:
    """Refuse to tune without validation data."""
    if not any(len(c.val) for c in experiment.population.clients):
        raise ConfigError(
            "tuning chooses by the score on validation data, and no client has any: set "
            "data.val_fraction (val_fraction in Python) above 0"
        )


@dataclass
class Tuning:
    """What was tried in a comparison's directory, by row, and what remains to be tried."""

    directory: Path
    grid: Grid
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, grid: Grid) -> Tuning:
        """What was tried before, if anything."""
        path = directory / TUNED
        rows = read_json(path, "remove it to tune again")["rows"] if path.exists() else {}
        return cls(directory, grid, rows)

    def candidates(self, entries: Sequence[PlannedRun]) -> dict[str, list[PlannedRun]]:
        """The runs to be tried, by row: those of its first seed with each combination."""
        first: dict[str, PlannedRun] = {}
        for entry in entries:
            first.setdefault(entry.row, entry)
        if not self.grid:
            return {}
        return {
            r: list(map(self._tried(e), self._all()))
            for r, e in first.items()
            if r not in self.rows
        }

    def _all(self) -> list[dict[str, Any]]:
        return [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]

    def _tried(self, entry: PlannedRun) -> Callable[[dict[str, Any]], PlannedRun]:
        def candidate(changes: dict[str, Any]) -> PlannedRun:
            name = ",".join(f"{key}={value_in_title(value)}" for key, value in changes.items())
            return replace(
                changed(entry, changes),
                settings={**entry.settings, **changes},
                folder=f"{FOLDER}/{entry.folder}/{folder_of(name)}",
            )

        return candidate

    def choose(
        self,
        tried: Mapping[str, Sequence[PlannedRun]],
        entries: Sequence[PlannedRun],
        errors: Mapping[str, CoterieError],
    ) -> dict[str, CoterieError]:
        """Choose for every row that was tried; returns the errors of rows without a choice."""
        hopeless: dict[str, CoterieError] = {}
        first = {entry.row: entry for entry in reversed(entries)}
        for row, runs in tried.items():
            of_row = [errors[run.name] for run in runs if run.name in errors]
            if stopped := [e for e in of_row if isinstance(e, Interrupted)]:
                hopeless[row] = stopped[0]
                continue
            results = [self._result(run, errors) for run in runs]
            scores = [r["val"] for r in results]
            if all(score is None for score in scores):
                hopeless[row] = (
                    of_row[0] if of_row else ConfigError("no run has a validation score")
                )
                continue
            best = max(
                range(len(runs)), key=lambda i: (scores[i] is not None, scores[i] or 0.0, -i)
            )
            chosen = {key: results[best][key] for key in self.grid}
            self.rows[row] = {"chosen": chosen, "tried": results}
            target = self.directory / first[row].folder
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                (self.directory / runs[best].folder).rename(target)
        write_json(self.directory / TUNED, self.record)
        if not hopeless:
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)
        return hopeless

    def _result(self, run: PlannedRun, errors: Mapping[str, CoterieError]) -> dict[str, Any]:
        changes: dict[str, Any] = {key: run.settings[key] for key in self.grid}
        if run.name in errors:
            return {**changes, "val": None, "error": str(errors[run.name])}
        try:
            summary = RunDir(self.directory / run.folder).read_result()
        except RunDirError as error:
            return {**changes, "val": None, "error": str(error)}
        score = summary.get(summary.get("headline", "received")) or {}
        moved = summary["bytes"]["down"] + summary["bytes"]["up"]
        return {
            **changes,
            "val": score.get("val"),
            "bytes": moved,
            "seconds": summary["seconds"],
            "rounds": summary["rounds"],
        }

    def chosen(self, entry: PlannedRun) -> PlannedRun:
        """The run with what was chosen for its row, if anything was."""
        row = self.rows.get(entry.row)
        return changed(entry, row["chosen"]) if row else entry

    @property
    def record(self) -> dict[str, Any]:
        """What was tried and chosen, as ``tuning.json`` has it."""
        return {"values": {k: list(v) for k, v in self.grid.items()}, "rows": self.rows}


def changed(entry: PlannedRun, changes: Mapping[str, Any]) -> PlannedRun:
    """A run with other settings."""
    tree = entry.config.model_dump()
    for key, value in changes.items():
        assign(tree, key, value)
    return replace(entry, config=parse(tree))
