"""Readings of runs, which are given as directories, folders of them, or results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from coterie.errors import ConfigError, RunDirError
from coterie.report.figures.compared import told_apart
from coterie.report.reading import Reading, find_runs, read_run
from coterie.results.notebook import Notebook

if TYPE_CHECKING:
    from coterie.results.result import Result


Run = Union[Path, str, "Result", Reading]


def as_list(runs: Run | Sequence[Run]) -> list[Run]:
    """One run or several, as a list."""
    return [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else list(runs)


def readings_of(runs: Sequence[Run]) -> list[Reading]:
    """The readings of runs; a folder that is not a run stands for all runs below it."""
    by_path: dict[Path, Reading] = {}
    results: list[Reading] = []
    for each in runs:
        if not isinstance(each, str | Path):
            results.append(_reading(each))
            continue
        for name, path in _runs_in(Path(each)).items():
            by_path.setdefault(path.resolve(), read_run(path, name))
    names = _longer({path: reading.name for path, reading in by_path.items()})
    read = [replace(reading, name=names[path]) for path, reading in by_path.items()]
    readings = [*read, *results]
    apart = told_apart([reading.name for reading in readings])
    return [replace(reading, name=name) for reading, name in zip(readings, apart, strict=True)]


def _reading(run: Any) -> Reading:
    """The reading of a result, or of a run that was read before."""
    if not isinstance(run, Notebook):
        text = repr(run)
        text = text if len(text) <= 40 else f"{text[:39]}…"
        raise ConfigError(
            f"{text} ({type(run).__name__}) is not a run: pass run directories, folders of them, "
            "results of coterie.simulate, or what coterie.read_run returns"
        )
    return run._read()


def _longer(names: dict[Path, str]) -> dict[Path, str]:
    """Unique names of runs: equal names get the folders above them that differ."""
    taken = Counter(names.values())
    unique = dict(names)
    for name in [name for name, count in taken.items() if count > 1]:
        same = [path for path in names if names[path] == name]
        parts = name.count("/") + 1
        for levels in range(1, max(len(path.parts) for path in same)):
            longer = {path: "/".join(path.parts[-parts - levels :]) for path in same}
            if len(set(longer.values())) == len(same):
                unique |= longer
                break
    return unique


def _runs_in(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        raise RunDirError(f"there is no folder {path}: name a run directory, or a folder of runs")
    runs = find_runs(path)
    if not runs and (path / "events.jsonl").is_file():
        return {path.resolve().name: path}  # its configuration is missing
    if not runs:
        raise RunDirError(
            f"{path} is not a run directory and has none below it: neither it nor a folder "
            "in it has a config.toml"
        )
    return runs
