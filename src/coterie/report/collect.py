"""Runs as they are given, in folders or as results, and the readings of them."""

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


def listed(runs: Run | Sequence[Run]) -> list[Run]:
    """One run or several, as a list."""
    return [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else list(runs)


def readings_of(runs: Sequence[Run]) -> list[Reading]:
    """Runs as they can be read; a folder that is no run stands for all runs below it."""
    found: dict[Path, Reading] = {}
    results: list[Reading] = []
    for each in runs:
        if not isinstance(each, str | Path):
            results.append(_reading(each))
            continue
        for name, path in _runs_in(Path(each)).items():
            found.setdefault(path.resolve(), read_run(path, name))
    names = _longer({path: reading.name for path, reading in found.items()})
    read = [replace(reading, name=names[path]) for path, reading in found.items()]
    every = [*read, *results]
    apart = told_apart([reading.name for reading in every])
    return [replace(reading, name=own) for reading, own in zip(every, apart, strict=True)]


def _reading(given: Any) -> Reading:
    """A result, or a run that was read before."""
    if not isinstance(given, Notebook):
        text = repr(given)
        text = text if len(text) <= 40 else f"{text[:39]}…"
        raise ConfigError(
            f"{text} ({type(given).__name__}) is no run: give run directories, folders of them, "
            "results of coterie.simulate, or what coterie.read_run gives"
        )
    return given._read()


def _longer(names: dict[Path, str]) -> dict[Path, str]:
    """Names of runs; those that several have begin with as many folders as tell them apart."""
    taken = Counter(names.values())
    found = dict(names)
    for name in [name for name, count in taken.items() if count > 1]:
        same = [path for path in names if names[path] == name]
        parts = name.count("/") + 1
        for more in range(1, max(len(path.parts) for path in same)):
            longer = {path: "/".join(path.parts[-parts - more :]) for path in same}
            if len(set(longer.values())) == len(same):
                found |= longer
                break
    return found


def _runs_in(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        raise RunDirError(f"there is no folder {path}: name a run directory, or a folder of runs")
    found = find_runs(path)
    if not found and (path / "events.jsonl").is_file():
        return {path.resolve().name: path}  # it lost its configuration
    if not found:
        raise RunDirError(
            f"{path} is not a run directory, and there is none in it: neither it nor a folder "
            "below it has a config.toml"
        )
    return found
