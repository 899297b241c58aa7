"""Following run directories, and reading only the runs that have changed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.errors import RunDirError
from coterie.report.figures.scores import curve
from coterie.report.reading import (
    FINISHED,
    RUNNING,
    STOPPED,
    Reading,
    find_runs,
    has_config,
    number,
    read_run,
)
from coterie.results.rundir import ENGINE, RunDir

WAITING, STOPPING, STARTING, UNREADABLE = "waiting", "stopping", "starting", "unreadable"
ASKED = "asked"  # stopped, as somebody had asked for on this page
PLAN = "comparison.toml"  # the file that makes a folder that of a comparison
# The files of a reading: when one of them changes, the run is read again.
_FILES = (
    *("events.jsonl", "result.json", "config.toml", "sessions.jsonl", "data.json"),
    *("clients.csv", "exposure.csv", "scenario.json"),
)
_FIND = 3.0  # seconds between two searches for runs
_SHARE = 4  # the pause after reading a run, as a multiple of the time that it took
_KEPT = 4  # readings that are kept although no page shows them

Stamp = tuple[Any, ...]


@dataclass(frozen=True)
class Glance:
    """A run as the list shows it; ``problem`` says why parts are missing.

    ``status`` is that of a reading, or "waiting" (a federation, for its clients), "stopping" (after
    the present round), "starting" (resumed from here a moment ago), "asked" (stopped from here),
    "unreadable". ``comparison`` is the name of the comparison's folder to which it belongs,
    ``curve`` its score by round, and ``left`` the seconds that its other rounds would take.
    """

    name: str
    path: Path
    status: str
    method: str = ""
    round: int = 0
    planned: int = 0
    score: float | None = None
    judged_by: str = "accuracy"
    headline: str = "received"
    groups: int = 0
    bytes: int | None = None
    begun: str = ""  # when, in an order of letters
    changed: float = 0.0
    problem: str = ""
    data: str = ""
    comparison: str = ""
    curve: tuple[float, ...] = ()
    left: float | None = None


@dataclass
class _Seen:
    """A run as of the last look."""

    path: Path
    stamp: Stamp = ()
    glance: Glance | None = None
    basis: str = ""  # the status of its reading
    changes: int = 0  # how many times its files were found changed
    again: float = 0.0  # when it may be read again
    looked: float = 0.0
    reading: Reading | None = field(default=None, repr=False)


class Following:
    """The runs of a folder. ``doing`` says whether a process is starting or ending at a run's path.

    Thread-safe; one thread looks at a time.
    """

    def __init__(self, folder: Path, doing: Callable[[Path], str] = lambda path: "") -> None:
        self.folder, self._doing = folder, doing
        self._seen: dict[str, _Seen] = {}
        self._found_at = float("-inf")
        self._lock = threading.Lock()

    def look(self, search: bool = False) -> dict[str, Glance]:
        """All runs as they are now, by name, in the order of names.

        New ones are found every few seconds, or at once if that is asked for.
        """
        with self._lock:
            now = time.monotonic()
            search = search or now > self._found_at + _FIND
            if search:
                self._find()
                self._found_at = now
            for name, seen in self._seen.items():
                if search or seen.basis != FINISHED:  # finished runs hardly ever change
                    self._look_at(name, seen)
            self._forget()
            return self.glances()

    def glances(self) -> dict[str, Glance]:
        """All runs as of the last look."""
        found = ((name, self._seen[name].glance) for name in sorted(self._seen))
        return {name: glance for name, glance in found if glance is not None}

    def look_again(self, name: str) -> None:
        """Look at one run at once, which was just stopped or resumed."""
        with self._lock:
            if name in self._seen:
                self._look_at(name, self._seen[name])

    def glance(self, name: str) -> Glance | None:
        """A run as of the last look; None if there is none of this name."""
        seen = self._seen.get(name)
        return None if seen is None else seen.glance

    def changes(self, name: str) -> int:
        """A number that grows whenever a run's files change; −1 if it is gone."""
        seen = self._seen.get(name)
        return -1 if seen is None else seen.changes

    def reading(self, name: str) -> Reading | None:
        """A run's reading as of the last look; None if it is gone or cannot be read."""
        with self._lock:
            seen = self._seen.get(name)
            if seen is None:
                return None
            seen.looked = time.monotonic()
            if seen.reading is None:
                try:
                    self._read(name, seen, _stamp(seen.path))
                except (OSError, RunDirError):
                    return None
                except Exception:  # the next look reports it; what could be read can be drawn
                    return seen.reading
            return seen.reading

    def _find(self) -> None:
        """Look for new runs, and for runs that are gone."""
        runs = find_runs(self.folder, lambda path: has_config(path) or _waits(path))
        found = {name_as_text(name): path for name, path in runs.items()}
        for name, path in found.items():
            if name not in self._seen:
                self._seen[name] = _Seen(path)
        for name in [n for n in self._seen if n not in found]:
            if not _forbidden(self._seen[name].path):
                del self._seen[name]

    def _look_at(self, name: str, seen: _Seen) -> None:
        try:
            stamp, now = _stamp(seen.path), time.monotonic()
            # The files may have been read while the process was still at work.
            ended = seen.basis == RUNNING and not RunDir(seen.path).at_work()
            if ended or (stamp != seen.stamp and now >= seen.again):
                self._read(name, seen, stamp)
                seen.again = now + _SHARE * (time.monotonic() - now)
        except FileNotFoundError:  # not begun, or gone: the next search will find out
            if _waits(seen.path):
                seen.glance = Glance(name, seen.path, _asked(seen.path, WAITING))
            return
        except Exception as error:  # other runs are shown whatever these files contain
            why = error.strerror if isinstance(error, OSError) else str(error)
            seen.glance = Glance(name, seen.path, UNREADABLE, problem=f"It cannot be read: {why}.")
            seen.changes += seen.stamp != ()
            seen.stamp, seen.reading = (), None
            return
        assert seen.glance is not None
        if seen.basis != FINISHED:
            basis, status = self._going_on(seen.path)
            seen.glance = replace(seen.glance, status=status)
            if basis != seen.basis:  # it is read again, with its new status
                seen.basis, seen.reading = basis, None
                seen.changes += 1

    def _read(self, name: str, seen: _Seen, stamp: Stamp) -> None:
        """Read a run; its row in the list is then from the same moment."""
        seen.reading = reading = read_run(seen.path, name)
        found = _glance_at(reading, seen.path, name, stamp)
        found = replace(found, comparison=self._comparison_of(seen.path))
        if seen.glance is not None and seen.stamp and reading.status == seen.basis:
            found = replace(found, status=seen.glance.status)  # what is known here in addition
        seen.changes += (stamp, reading.status) != (seen.stamp, seen.basis)
        seen.glance, seen.stamp, seen.basis = found, stamp, reading.status

    def _comparison_of(self, path: Path) -> str:
        """The folder of the comparison above a run, below the folder that is watched."""
        above = [p for p in path.parents if p == self.folder or self.folder in p.parents]
        found = next((p for p in above if os.path.isfile(p / PLAN)), None)
        if found is None:
            return ""
        return name_as_text(
            found.name if found == self.folder else str(found.relative_to(self.folder))
        )

    def _going_on(self, path: Path) -> tuple[str, str]:
        """The row of a run in the list, from its reading and what is known here in addition."""
        if RunDir(path).at_work():
            return RUNNING, _asked(path, RUNNING)
        if _waits(path):
            return STOPPED, _asked(path, WAITING)
        return STOPPED, self._doing(path) or STOPPED

    def _forget(self) -> None:
        """Keep full readings only of the runs that were requested last."""
        by_age = sorted(self._seen.values(), key=lambda seen: seen.looked, reverse=True)
        for seen in by_age[_KEPT:]:
            seen.reading = None


def name_as_text(name: str) -> str:
    """A file's name as text, even if it is not valid text."""
    return name.encode("utf-8", "replace").decode()


def _stamp(path: Path) -> Stamp:
    """A value that changes with a run's files; a replaced file has another inode."""
    stamps: list[Any] = []
    for name in _FILES:
        try:
            known = os.stat(path / name)
            stamps.append((known.st_ino, known.st_size, known.st_mtime_ns))
        except FileNotFoundError:
            stamps.append(None)
    if not any(stamps):
        raise FileNotFoundError(path)
    return tuple(stamps)


def _waits(path: Path) -> bool:
    """Whether a federation without a running round is being served: it waits for its clients."""
    return RunDir(path / ENGINE).at_work()


def _asked(path: Path, status: str) -> str:
    """The status of a running process, or that it was asked to stop."""
    return STOPPING if RunDir(path).stop_pending() else status


def _forbidden(path: Path) -> bool:
    """Whether a run still exists but cannot be accessed."""
    try:
        os.stat(path / "config.toml")
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _glance_at(reading: Reading, path: Path, name: str, stamp: Stamp) -> Glance:
    last = reading.rounds[-1] if reading.rounds else {}
    moved = _table(last.get("total_bytes")) or _table(reading.begun.get("bytes"))
    return Glance(
        name=name,
        path=path,
        status=reading.status,
        method=reading.method,
        round=last_round(reading),
        planned=reading.planned,
        score=_score(reading),
        judged_by=reading.judged_by,
        headline=reading.headline,
        groups=len({g for g in reading.groups if g is not None}),
        bytes=int(sum(number(v) or 0 for v in moved.values())) if moved else None,
        begun=str(reading.sessions[0].get("at", "")) if reading.sessions else "",
        changed=max((s[2] for s in stamp if s), default=0) / 1e9,
        problem=" ".join(f"{p}." for p in reading.problems),
        data=str(reading.settings("data").get("set") or ""),
        curve=_curve(reading),
        left=_left(reading),
    )


_POINTS = 24  # of the small curve in a row
_RECENT = 5  # rounds by which the time left is estimated


def _curve(reading: Reading) -> tuple[float, ...]:
    """The score by round, at a few rounds."""
    points = [y for _, y in curve(reading.rounds, reading.headline, reading.judged_by)]
    step = max(1, -(-len(points) // _POINTS))
    return tuple(round(y, 4) for y in [*points[:-1:step], *points[-1:]])


def _left(reading: Reading) -> float | None:
    """The seconds that the rounds to come would take, by the last ones; None if none is to come."""
    recent = [_table(e.get("seconds")) for e in reading.rounds[-_RECENT:]]
    rounds = reading.planned - last_round(reading)
    if not recent or rounds <= 0 or reading.status != RUNNING:
        return None
    return rounds * sum(number(v) or 0.0 for each in recent for v in each.values()) / len(recent)


def last_round(reading: Reading) -> int:
    """The last completed round; 0 before the first."""
    return int(reading.rounds[-1]["round"]) if reading.rounds else 0


def _score(reading: Reading) -> float | None:
    """The last known score that a run is judged by."""
    for event in (reading.result, *reversed(reading.rounds)):
        score = _table(event.get(reading.headline)).get(reading.judged_by)
        if score is not None:
            return number(score)
    return None


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
