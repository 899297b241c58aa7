"""Stopping and resuming runs from the live page."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import RunDirError
from coterie.registry import TRACKERS
from coterie.report.live.folders import ASKED, STARTING, STOPPING, WAITING, Glance
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading
from coterie.report.repeating import command, given_for
from coterie.results.rundir import RunDir, open_plain

LOG = "resumed.log"  # the output of a process that was started from here
_UP = 3  # levels above a run at which a comparison may be at work on it
_ENDED_WELL = (0, 130)  # finished, or stopped by a user
_LONGEST = 400  # characters of an error that are shown
_STOPS, _RESUMES = (RUNNING, WAITING), (STOPPED, ASKED)


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    sessions: int  # the number of sessions before it


class Controls:
    """The processes started from here, and how they ended. Thread-safe."""

    def __init__(self) -> None:
        self._started: dict[Path, _Started] = {}
        self._failed: dict[Path, str] = {}
        self._asked: set[Path] = set()  # runs that were asked to stop from here
        self._lock = threading.Lock()

    def stop(self, run: Glance) -> None:
        """Ask a run to end after its present round."""
        with self._lock:
            if run.status not in _STOPS:
                raise RunDirError(_no_stop(run))
            try:
                RunDir(run.path).ask_to_stop()
                self._asked.add(run.path)
            except OSError as error:
                raise RunDirError(f"{run.name} cannot be stopped: {error.strerror}") from None

    def resume(self, run: Glance, reading: Reading) -> None:
        """Start a process that resumes a run, and that survives this one."""
        self._check_resumable(run)
        _check_free(run)
        words, folder = command(reading)
        log = _open_log(run)
        try:
            with self._lock:
                self._check_resumable(run)  # another user may have been faster
                self._failed.pop(run.path, None)
                self._asked.discard(run.path)
                before = _size(RunDir(run.path).sessions)
                process = _start([*words, *_tracking(words, reading)], folder, log)
                self._started[run.path] = _Started(process, before)
        except OSError as error:
            raise RunDirError(f"{run.name} cannot be resumed: {error.strerror}") from None
        finally:
            os.close(log)

    def _check_resumable(self, run: Glance) -> None:
        started = self._started.get(run.path)
        going = started is not None and started.process.poll() is None
        if run.status not in _RESUMES or going:
            raise RunDirError(_no_resume(run))

    def doing(self, path: Path) -> str:
        """What a process that was started here does before and after it works on its run.

        "starting" before, "stopping" afterwards; without such a process "asked" if it was asked to
        stop from here, else "".
        """
        started = self._started.get(path)
        if started is None or started.process.poll() is not None:
            return ASKED if path in self._asked else ""
        return STARTING if _size(RunDir(path).sessions) == started.sessions else STOPPING

    def failure(self, path: Path) -> str:
        """Why a run that was resumed from here failed, in words; "" if it did not."""
        return self._failed.get(path, "")

    def reap(self) -> None:
        """Collect the processes that have ended."""
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        for path, started in list(self._started.items()):
            code = started.process.poll()
            if code is not None:
                del self._started[path]
                if code not in _ENDED_WELL:
                    self._failed[path] = _last_words(path / LOG, code)


def _tracking(words: Sequence[str], reading: Reading) -> list[str]:
    """The trackers of a run's last session; unknown names in its files are ignored."""
    arguments = reading.sessions[-1].get("argv") if reading.sessions else None
    if words[:1] != ["run"] or not isinstance(arguments, list) or arguments[:1] != ["run"]:
        return []
    trackers = given_for("--track", [str(word) for word in arguments])
    return [word for name in TRACKERS if name in trackers for word in ("--track", name)]


def _open_log(run: Glance) -> int:
    """Open the log for a process's output, a plain file in the run's own folder."""
    try:
        return open_plain(run.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
        raise RunDirError(
            f"{run.name} cannot be resumed: its {LOG} cannot be written ({error.strerror})"
        ) from None


def _start(words: Sequence[str], folder: Path, log: int) -> subprocess.Popen[bytes]:
    """Start a process in its own session; Python imports no modules from its working directory."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "coterie", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _check_free(run: Glance) -> None:
    """Refuse to resume a run if a process works on its comparison, which will resume it."""
    for above in run.path.resolve().parents[:_UP]:
        if RunDir(above).at_work():
            raise RunDirError(
                f"a process is working in {above.name}, to which {run.name} belongs: wait for it, "
                "or stop it first"
            )


def _no_stop(run: Glance) -> str:
    if run.status == STOPPING:
        return f"{run.name} was already asked to stop: it stops after this round"
    if run.status == STARTING:
        return f"{run.name} is just starting: try again in a moment"
    return f"{run.name} is not running"


def _no_resume(run: Glance) -> str:
    if run.status == FINISHED:
        return f"{run.name} is finished: there is nothing to resume"
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
    """Why a process ended: its last line of output, unless it was killed."""
    if code < 0:
        return f"its process, started from here, was ended by signal {-code}"
    try:
        with open(log, "rb", opener=open_plain) as file:
            file.seek(max(0, _size(log) - 10 * _LONGEST))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    words = "".join(c for c in (lines[-1] if lines else "") if c.isprintable())[:_LONGEST]
    return f"its process, started from here, failed ({words or f'code {code}'}); more in {LOG}"
