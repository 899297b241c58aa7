"""Stopping and resuming runs from the live page."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from coterie.errors import RunDirError
from coterie.report.live.following import STARTING, STOPPING, WAITING, Glance
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading
from coterie.run.rundir import ENGINE, RunDir

LOG = "resumed.log"  # what a process says that was started from here
_UP = 3  # how many folders above a run may be at work on it: those of comparisons
_ENDED_WELL = (0, 130)  # finished, or stopped by somebody
_LONGEST = 400  # characters of an error that are shown
_STOPS, _RESUMES = (RUNNING, WAITING), (STOPPED,)


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    sessions: int  # how long the list of sessions was before it


class Controls:
    """What was started from here, and what came of it. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._started: dict[Path, _Started] = {}
        self._failed: dict[Path, str] = {}
        self._lock = threading.Lock()

    def stop(self, run: Glance) -> None:
        """Ask a run to end after its present round."""
        with self._lock:
            if run.status not in _STOPS:
                raise RunDirError(_no_stop(run))
            try:
                RunDir(run.path).ask_to_stop()
            except OSError as error:
                raise RunDirError(f"{run.name} cannot be stopped: {error.strerror}") from None

    def resume(self, run: Glance, reading: Reading) -> None:
        """Start a process that goes on with a run; it outlives this one."""
        with self._lock:
            self._reap()
            if run.status not in _RESUMES or run.path in self._started:
                raise RunDirError(_no_resume(run))
            _check_free(run)
            words, folder = command(reading)
            self._failed.pop(run.path, None)
            before = _size(RunDir(run.path).sessions)
            try:
                process = _start(words, folder, run.path / LOG)
            except OSError as error:
                raise RunDirError(f"{run.name} cannot be resumed: {error.strerror}") from None
            self._started[run.path] = _Started(process, before)

    def doing(self, path: Path) -> str:
        """What the process that was started here does for a run if it is not at work on it.

        "starting" before it was, "stopping" after that, "" if there is no such process.
        """
        started = self._started.get(path)
        if started is None or started.process.poll() is not None:
            return ""
        return STARTING if _size(RunDir(path).sessions) == started.sessions else STOPPING

    def failure(self, path: Path) -> str:
        """Why a run that was resumed from here ended, in words; "" if it did not fail."""
        return self._failed.get(path, "")

    def reap(self) -> None:
        """Take note of processes that have ended."""
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        for path, started in list(self._started.items()):
            code = started.process.poll()
            if code is not None:
                del self._started[path]
                if code not in _ENDED_WELL:
                    self._failed[path] = _last_words(path / LOG, code)


def command(reading: Reading) -> tuple[list[str], Path]:
    """What to tell Coterie to go on with a run, and in which folder.

    Of what a run's files say, only the words after ``coterie serve`` are used, and only if they
    lead to this very run.
    """
    assert reading.path is not None
    path = reading.path.resolve()
    if "python" in reading.config:
        raise RunDirError(
            f"{reading.name} was made in Python: continue it there, with simulate(..., "
            "directory=..., resume=True)"
        )
    last = reading.sessions[-1] if reading.sessions else {}
    words = last.get("argv")
    told = words if isinstance(words, list) and all(isinstance(w, str) for w in words) else []
    if told[:1] != ["serve"]:
        if (path / ENGINE).is_dir():
            raise RunDirError(
                f"{reading.name} is a federation, and how it was served is not known: give its "
                "coterie serve command again"
            )
        return ["run", "--resume", str(path)], path.parent
    folder = Path(str(last.get("folder")))
    if not folder.is_absolute() or not folder.is_dir() or not _leads_to(told, folder, path):
        raise RunDirError(
            f"{reading.name} was served from a folder that is not there any more, or for another "
            "--dir: give its coterie serve command again"
        )
    return told, folder


def _leads_to(words: Sequence[str], folder: Path, run: Path) -> bool:
    """Whether a command's --dir is this run."""
    given = [
        after if word == "--dir" else word.removeprefix("--dir=")
        for word, after in pairwise([*words, ""])
        if word == "--dir" or word.startswith("--dir=")
    ]
    return bool(given) and (folder / given[-1]).resolve() == run


def _start(words: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """A process of its own session; Python takes no modules from the folder that it begins in."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    target = os.open(log, flags, 0o644)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=target,
            start_new_session=True,
        )
    finally:
        os.close(target)


def _check_free(run: Glance) -> None:
    """Refuse a run whose comparison is at work: it will come to it by itself."""
    for above in run.path.resolve().parents[:_UP]:
        if RunDir(above).at_work():
            raise RunDirError(
                f"a process is at work in {above.name}, which {run.name} belongs to: wait for it, "
                "or stop it first"
            )


def _no_stop(run: Glance) -> str:
    if run.status == STOPPING:
        return f"{run.name} has been asked already: it stops after this round"
    if run.status == STARTING:
        return f"{run.name} is only just starting: try again in a moment"
    return f"{run.name} is not running"


def _no_resume(run: Glance) -> str:
    if run.status == FINISHED:
        return f"{run.name} is finished: there is nothing left to do"
    if run.status in (RUNNING, STOPPING, WAITING):
        return f"{run.name} is running"
    if run.status == STOPPED or run.status == STARTING:
        return f"{run.name} is being resumed already"
    return f"{run.name} cannot be read"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_words(log: Path, code: int) -> str:
    """Why a process ended: the last line that it said, unless somebody killed it."""
    if code < 0:
        return f"its process, started from here, was ended by signal {-code}"
    try:
        with log.open("rb") as file:
            file.seek(max(0, _size(log) - 10 * _LONGEST))
            said = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        said = []
    words = "".join(c for c in (said[-1] if said else "") if c.isprintable())[:_LONGEST]
    return f"its process, started from here, failed ({words or f'code {code}'}); more in {LOG}"
