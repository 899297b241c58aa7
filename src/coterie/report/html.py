"""The report: one self-contained HTML file about one run or several."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.engines.dealing import available_cores
from coterie.errors import RunDirError
from coterie.report.figures.compared import told_apart
from coterie.report.markup import tag
from coterie.report.numbers import moved, scored, shown
from coterie.report.page import (
    GENERATOR,
    Block,
    Link,
    compared_blocks,
    document,
    heading,
    render,
    run_blocks,
)
from coterie.report.reading import FINISHED, Reading, find_runs, read_run
from coterie.report.tables import size
from coterie.tree import write_atomic

if TYPE_CHECKING:
    from coterie.run.result import Result

NAME = "report.html"
_OPEN = 3  # up to so many runs on a page are shown at once, not folded


def write_report(
    runs: Path | str | Result | Sequence[Path | str | Result],
    to: Path | str | None = None,
    title: str = "",
) -> Path:
    """One HTML file about run directories, folders of them, or results; where it is.

    Without ``to`` it is ``report.html`` in the run or the folder, if there is one, else here.

    >>> import coterie, tempfile, torch
    >>> people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
    >>> result = coterie.simulate(people, method="fedavg", rounds=2)
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_report(result, folder / "mine.html").name
    'mine.html'
    """
    given = [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else list(runs)
    place = Path(to) if to is not None else default_place(given)
    page = report(readings_of(given), title)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, page.encode(), durable=False)
    except OSError as error:
        raise RunDirError(
            f"cannot write {place}: {error.strerror}. Choose another file with --to"
        ) from error
    return place


def readings_of(runs: Sequence[Path | str | Result]) -> list[Reading]:
    """Runs as they can be read; a folder that is no run stands for all runs below it."""
    found: dict[Path, Reading] = {}
    results: list[Reading] = []
    for each in runs:
        if not isinstance(each, str | Path):
            results.append(Reading.of(each))
            continue
        for name, path in _runs_in(Path(each)).items():
            found.setdefault(path.resolve(), read_run(path, name))
    names = _longer({path: reading.name for path, reading in found.items()})
    read = [replace(reading, name=names[path]) for path, reading in found.items()]
    every = [*read, *results]
    apart = told_apart([reading.name for reading in every])
    return [replace(reading, name=own) for reading, own in zip(every, apart, strict=True)]


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


def default_place(runs: Sequence[Path | str | Result]) -> Path:
    """Where a report goes if nobody says: into the one folder that was named, or here."""
    if len(runs) == 1 and isinstance(runs[0], str | Path):
        return Path(runs[0]) / NAME
    return Path(NAME)


def is_ours(place: Path) -> bool:
    """Whether a file is a report, which may be written anew."""
    try:
        with place.open("rb") as file:
            return f'content="{GENERATOR} '.encode() in file.read(4096)
    except OSError:
        return False


def report(readings: Sequence[Reading], title: str = "") -> str:
    """The page about runs."""
    if len(readings) == 1:
        only = readings[0]
        return document(title or _title(only), run_blocks(only))
    blocks = compared_blocks(readings)
    navigation = [Link(b.id, b.title) for b in blocks if b.title]
    wholes = _each(readings)
    for place, (reading, inside) in enumerate(zip(readings, wholes, strict=True), 1):
        blocks += _whole(reading, f"run-{place}", inside, folded=len(readings) > _OPEN)
        navigation.append(Link(f"run-{place}", reading.name, 2))
    return document(title or _several(readings), blocks, navigation=navigation)


def _several(readings: Sequence[Reading]) -> str:
    names = [reading.name for reading in readings]
    if len(names) > _OPEN:
        return f"{len(names)} runs"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _title(reading: Reading) -> str:
    named = reading.method in reading.name
    return reading.name if named else f"{reading.name} ({reading.method})"


def _whole(reading: Reading, id: str, inside: Sequence[Block], folded: bool) -> list[Block]:
    """One run among several, in full; folded, its figures are drawn when it is opened."""
    if not folded:
        return [heading(id, reading.name, 2), *inside]
    summary = tag("summary", tag("h2", reading.name), tag("span", _about(reading), class_="detail"))
    whole = tag("div", render(inside), class_="blocks")
    return [Block(id, tag("details", summary, whole, id=id, class_="run"))]


def _about(reading: Reading) -> str:
    found, by = scored(reading, reading.headline), reading.judged_by
    total = moved(reading)
    told = [
        "" if reading.method in reading.name else reading.method,
        f"{shown(found.get(by), by)} {reading.headline}" if found else "",
        f"worst client {shown(found['worst'], by)}" if found.get("worst") is not None else "",
        size(total.get("down", 0) + total.get("up", 0)) if total else "",
        "" if reading.status == FINISHED else reading.status,
    ]
    return ", ".join(filter(None, told))


# --- many runs on all cores ---------------------------------------------------------------------

_taken: Sequence[Reading] = ()  # in a child: the runs that its parent has read


def _each(readings: Sequence[Reading]) -> list[list[Block]]:
    """The blocks of each run; where it is safe, many are shared out among children."""
    jobs = min(available_cores(), len(readings))
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    can = alone and "fork" in multiprocessing.get_all_start_methods()
    if jobs < 2 or len(readings) <= _OPEN or not can:
        return [_of_run(reading, place) for place, reading in enumerate(readings)]
    # Forked, a child has readings and libraries at once: to send and load them takes longer.
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(jobs, context, _take, (readings,)) as pool:
            return list(pool.map(_of_taken, range(len(readings))))
    except BrokenProcessPool:  # a child was killed: here, it takes longer
        return [_of_run(reading, place) for place, reading in enumerate(readings)]


def _take(readings: Sequence[Reading]) -> None:
    global _taken
    _taken = readings


def _of_taken(place: int) -> list[Block]:
    return _of_run(_taken[place], place)


def _of_run(reading: Reading, place: int) -> list[Block]:
    return run_blocks(reading, f"run-{place + 1}-", level=3)
