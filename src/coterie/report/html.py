"""The report: one self-contained HTML file about one run or several."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from coterie.core.tree import write_atomic
from coterie.engines.workers import available_cores
from coterie.errors import RunDirError
from coterie.report.collect import Run, as_list, readings_of
from coterie.report.numbers import bytes_so_far, score_with_unit, scored
from coterie.report.page import (
    GENERATOR,
    QUESTIONS,
    Block,
    Link,
    compared_blocks,
    document,
    heading,
    run_blocks,
)
from coterie.report.reading import FINISHED, Reading
from coterie.report.rendering import render
from coterie.report.tables import size
from coterie.report.what_was_run import what_was_run
from coterie.results.differences import MARGIN

NAME = "report.html"
_LISTED = 12  # up to this many runs, the contents list each of them
_OPEN = 3  # up to this many runs, a page shows all of them unfolded


def write_report(
    runs: Run | Sequence[Run],
    to: Path | str | None = None,
    title: str = "",
    margin: float = MARGIN,
) -> Path:
    """Write one HTML file about run directories, folders of them, results or readings.

    Returns its path. Without ``to`` that is ``report.html`` in the run directory or folder if there
    is only one, else in the working directory. Scores that differ by no more than ``margin`` count
    as equal.

    >>> import coterie, tempfile, torch
    >>> people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
    >>> result = coterie.simulate(people, method="fedavg", rounds=2)
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_report(result, folder / "mine.html").name
    'mine.html'
    """
    sources = as_list(runs)
    path = Path(to) if to is not None else default_place(sources)
    page = report(readings_of(sources), title, margin)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode(), durable=False)
    except OSError as error:
        raise RunDirError(
            f"cannot write {path}: {error.strerror}. Choose another file with --to"
        ) from error
    return path


def default_place(runs: Sequence[Run]) -> Path:
    """The default path of a report: in the only folder, or in the working directory."""
    if len(runs) == 1 and isinstance(runs[0], str | Path):
        return Path(runs[0]) / NAME
    return Path(NAME)


def is_ours(path: Path) -> bool:
    """Whether a file is a report, which may be overwritten."""
    try:
        with path.open("rb") as file:
            return f'content="{GENERATOR} '.encode() in file.read(4096)
    except OSError:
        return False


def report(readings: Sequence[Reading], title: str = "", margin: float = MARGIN) -> str:
    """The page about these runs, as HTML."""
    if len(readings) == 1:
        only = readings[0]
        return document(title or _title(only), run_blocks(only), about=what_was_run(readings))
    blocks = compared_blocks(readings, margin=margin)
    navigation = [Link(b.id, b.title) for b in blocks if b.title]
    here = {b.id for b in blocks}
    navigation += [Link(id, title, 2) for id, title in QUESTIONS.items() if id in here]
    wholes = _each(readings)
    for place, (reading, inside) in enumerate(zip(readings, wholes, strict=True), 1):
        blocks += _whole(reading, f"run-{place}", inside, folded=len(readings) > _OPEN)
        if len(readings) <= _LISTED:  # the table of runs has the links to more
            navigation.append(Link(f"run-{place}", reading.name, 2))
    about = what_was_run(readings)
    return document(title or _several(readings), blocks, navigation=navigation, about=about)


def _several(readings: Sequence[Reading]) -> str:
    names = [reading.name for reading in readings]
    methods = list(dict.fromkeys(reading.method for reading in readings))
    if len(names) > _OPEN:
        return f"{len(methods)} methods" if len(methods) > 1 else f"{len(names)} runs"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _title(reading: Reading) -> str:
    named = reading.method in reading.name
    return reading.name if named else f"{reading.name} ({reading.method})"


def _whole(reading: Reading, id: str, inside: Sequence[Block], folded: bool) -> list[Block]:
    """One run among several, in full; the figures of a folded one are drawn when it is opened."""
    if not folded:
        return [heading(id, reading.name, 2), *inside]
    html = render("run/folded.html", id=id, name=reading.name, about=_about(reading), blocks=inside)
    return [Block(id, html)]


def _about(reading: Reading) -> str:
    scores, by = scored(reading, reading.headline), reading.judged_by
    total = bytes_so_far(reading)
    parts = [
        "" if reading.method in reading.name else reading.method,
        f"{score_with_unit(scores.get(by), by)} {reading.headline}" if scores else "",
        f"worst client {score_with_unit(scores['worst'], by)}"
        if scores.get("worst") is not None
        else "",
        size(total.get("down", 0) + total.get("up", 0)) if total else "",
        "" if reading.status == FINISHED else reading.status,
    ]
    return ", ".join(filter(None, parts))


# --- many runs on all cores ---------------------------------------------------------------------

_taken: Sequence[Reading] = ()  # in a child process: the runs that its parent has read


def _each(readings: Sequence[Reading]) -> list[list[Block]]:
    """The blocks of each run; where it is safe, many runs are shared among child processes."""
    jobs = min(available_cores(), len(readings))
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    can = alone and "fork" in multiprocessing.get_all_start_methods()
    if jobs < 2 or len(readings) <= _OPEN or not can:
        return [_of_run(reading, place) for place, reading in enumerate(readings)]
    # A forked child has readings and libraries already: sending and loading them takes longer.
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(jobs, context, _take, (readings,)) as pool:
            return list(pool.map(_of_taken, range(len(readings))))
    except BrokenProcessPool:  # a child was killed: drawing in this process takes longer
        return [_of_run(reading, place) for place, reading in enumerate(readings)]


def _take(readings: Sequence[Reading]) -> None:
    global _taken
    _taken = readings


def _of_taken(place: int) -> list[Block]:
    return _of_run(_taken[place], place)


def _of_run(reading: Reading, place: int) -> list[Block]:
    return run_blocks(reading, f"run-{place + 1}-", level=3)
