"""A run directory: the configuration, events, checkpoints, client states and results of a run."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import itertools
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from coterie.core.events import ADMISSION, Data, Event, SessionLine, check_event, check_summary
from coterie.core.events import SCORES as SCORES
from coterie.core.tree import sync, write_atomic
from coterie.errors import RunDirError
from coterie.results.checksums import (
    EVENTS,
    JSON_LINES,
    LEDGER_ROWS,
    IntactLines,
    Line,
    LineFile,
    Mark,
    check_note,
    read_json,
    read_lines,
    to_json,
    with_note,
)
from coterie.results.toml import read_toml, to_toml

ENGINE = "flower"  # the files of the processes of a real federation
_BEFORE = (ENGINE, ".lock", ".stop")  # what may exist before a run begins
_TRIES = 5  # attempts to get the lock
CODE = "code.json"  # digests of the user's files with functions
CHECKSUMS = "checksums"  # in result.json: checksums of the tables


class RunDir:
    """The folder of one run.

    ==================  ====================================================================
    ``config.toml``     the configuration as resolved
    ``events.jsonl``    a line for each round: metrics, bytes, seconds, groups
    ``ledger.csv``      bytes by round, client and kind
    ``clients.csv``     a row for each client, written at the end
    ``result.json``     the summary, written at the end
    ``data.json``       the clients' data as far as the server may know: labels, true groups
    ``sessions.jsonl``  a line for each process that worked here: time, arguments, versions
    ``checkpoints/``    the last two checkpoints
    ``clients/``        client state, by client and version
    ``flower/``         in a real federation: the files of its processes
    ==================  ====================================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.events = path / "events.jsonl"
        self.ledger = path / "ledger.csv"
        self.table = path / "clients.csv"
        self.exposure = path / "exposure.csv"
        self.result = path / "result.json"
        self.data = path / "data.json"
        self.sessions = path / "sessions.jsonl"
        self._stop = path / ".stop"
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
        self._event_lines = LineFile(self.events, EVENTS)
        self._ledger_lines = LineFile(self.ledger, LEDGER_ROWS)
        self._lock: int | None = None

    @staticmethod
    def create(path: Path) -> RunDir:
        """Create a run directory; an error if the directory is not empty."""
        if path.exists() and (
            not path.is_dir() or any(p.name not in _BEFORE for p in path.iterdir())
        ):
            raise RunDirError(
                f"{path} is not empty. Continue a run with --resume {path}, or choose "
                "another directory with --dir"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirError(
                f"cannot write to {path}: {error.strerror}. Choose another directory with --dir"
            ) from error
        return RunDir(path)

    @staticmethod
    def open(path: Path) -> RunDir:
        """An existing run directory."""
        run = RunDir(path)
        if not run.config.is_file():
            raise RunDirError(f"{path} is not a run directory: it has no config.toml")
        return run

    def saved(self) -> int:
        """The round of the newest checkpoint, by its name; 0 if there is none."""
        names = [path.stem.rpartition("-")[2] for path in self.checkpoints.glob("round-*.json")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def lock(self) -> None:
        """Lock the directory; an error if another process works here."""
        try:
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            for attempts_left in reversed(range(_TRIES)):
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # perhaps only ``at_work`` in another process
                    if not attempts_left:
                        raise
                    time.sleep(0.05)
        except BlockingIOError as error:
            self.unlock()
            raise RunDirError(
                f"another process is running in {self.path}. Wait for it or stop it first"
            ) from error
        except OSError as error:
            raise RunDirError(f"cannot lock {self.path}: {error.strerror}") from error

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def ask_to_stop(self) -> None:
        """Ask the process that works here to stop after the current round."""
        self._stop.touch()

    def stop_pending(self) -> bool:
        """Whether there is a request to stop."""
        return self._stop.exists()

    def stop_asked(self) -> bool:
        """Whether there is a request to stop; removes it."""
        try:
            self._stop.unlink()
        except OSError:
            return False
        return True

    def at_work(self) -> bool:
        """Whether a process works here now."""
        try:
            descriptor = open_plain(self.path / ".lock", os.O_RDONLY)  # also of another user's run
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """Write the resolved configuration."""
        write_atomic(self.config, with_note(to_toml(tree)).encode(), durable=True)

    def write_code(self, digests: Mapping[str, str]) -> None:
        """Write the digests of the user's files whose functions the configuration names."""
        if digests:
            write_atomic(self.path / CODE, to_json(digests, indent=1).encode(), durable=True)

    def read_code(self) -> dict[str, str]:
        """Read those digests; empty if all functions are from Coterie or installed packages."""
        path = self.path / CODE
        return read_json(path, "restore it from a copy") if path.exists() else {}

    def read_config(self) -> dict[str, Any]:
        """Read the configuration; a RunDirError if it is damaged or was edited."""
        try:
            check_note(self.config.read_bytes())
        except OSError as error:
            raise RunDirError(f"cannot read {self.config}: {error.strerror}") from error
        except ValueError as error:
            raise RunDirError(
                f"{self.config} is damaged or was edited ({error}): restore it from a copy. If "
                "you want to keep it as it is, remove the line that begins with '# crc'"
            ) from error
        tree = read_toml(self.config)
        if not tree:
            raise RunDirError(f"{self.config} is damaged (it is empty): restore it from a copy")
        return tree

    def discard(self) -> None:
        """Remove the directory, which this process has just created."""
        shutil.rmtree(self.path, ignore_errors=True)

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event."""
        text = json.dumps(without_nan(event), allow_nan=False)
        check_event(text)
        self._append(self._event_lines, [text])

    def append_session(self, session: SessionLine) -> None:
        """Append a session."""
        self._append(LineFile(self.sessions, JSON_LINES), [json.dumps(session)])

    def recorded(self, key: str) -> Any:
        """What the last session that can be read has recorded under a key; None if nothing."""
        data = self.sessions.read_bytes() if self.sessions.exists() else b""
        sessions = [line.value for line in read_lines(data, JSON_LINES).every]
        return next((s[key] for s in reversed(sessions) if key in s), None)

    def _append(self, file: LineFile, texts: Iterable[str]) -> None:
        try:
            file.append(texts)
        except OSError as error:
            raise RunDirError(
                f"cannot write {file.path}: {error.strerror}. Free some space; continue with "
                f"--resume {self.path}"
            ) from error

    def append_ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows of a round to the ledger."""
        if rows:
            self._append(self._ledger_lines, to_csv(rows).splitlines()[1:])

    def sync(self) -> None:
        """Wait until events and ledger are on disk."""
        for path in (self.events, self.ledger):
            if path.exists():
                sync(path)

    def read_events(self) -> list[Event]:
        """Read the events on intact lines."""
        return events_in(self._event_lines.read())

    def marks(self) -> dict[str, Mark]:
        """The marks of the ends of events and ledger, for a checkpoint."""
        return {file.path.name: file.mark for file in self._files}

    @property
    def _files(self) -> tuple[LineFile, LineFile]:
        return self._event_lines, self._ledger_lines

    def missing(self, rounds: int, marks: Mapping[str, Mark]) -> str:
        """What is lost of events and ledger up to this round, in words; empty if nothing is.

        ``marks`` are those of the round's checkpoint.
        """
        for file in self._files:
            lines = file.read()
            if lines.reach(marks[file.path.name]):
                continue
            if not file.path.exists():
                damage = "is missing"
            elif lines.damaged:
                damage = f"is damaged at line {lines.damaged[0]}"
            else:
                damage = f"is damaged: it ends too early, after {len(lines.every)} lines"
            lost = "a part of the bytes by round"
            if file is self._event_lines:
                kept = {e["round"] for e in rounds_of(events_in(lines))}
                gone = [n for n in range(1, rounds + 1) if n not in kept]
                lost = "the history of " + (numbered(gone) if gone else "what is between rounds")
            return f"{file.path} {damage}, and {lost} cannot be read any more"
        return ""

    def rewind(self, rounds: int, marks: Mapping[str, Mark] | None = None) -> list[Event]:
        """Keep only the events and the ledger up to this round, since later rounds are repeated.

        An admission after the last round is repeated, too, and so are scores of this round that
        came after it. ``marks`` are those of the round's checkpoint. A copy is kept of a file in
        which lines before the mark are damaged or missing.
        """
        marks = marks or {}
        for file in self._files:
            if not file.path.exists():
                continue
            lines, mark = file.read(), marks.get(file.path.name)
            if mark is not None and lines.reach(mark):
                kept = list(lines.whole[: mark[0]])
            else:
                kept = _until(lines, rounds)
                if mark is not None:
                    write_atomic(self._beside(file), file.path.read_bytes(), durable=True)
            file.write(line.text for line in kept)
        return self.read_events()

    def _beside(self, file: LineFile) -> Path:
        """An unused name for a copy of a damaged file."""
        names = (f"{file.path.name}.damaged{(n and f'-{n}') or ''}" for n in itertools.count())
        return next(p for p in map(self.path.joinpath, names) if not p.exists())

    def write_data(self, data: Data) -> None:
        """Write what is known of the clients' data."""
        write_atomic(self.data, to_json(data).encode(), durable=False)

    def write_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table of clients as CSV."""
        write_atomic(self.table, to_csv(rows).encode(), durable=False)

    def write_exposure(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write which vectors of single clients the server saw, as CSV."""
        write_atomic(self.exposure, to_csv(rows).encode(), durable=False)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the summary, after the tables, since it has their checksums."""
        tables = [path for path in (self.table, self.exposure) if path.is_file()]
        checksums = {path.name: crc32(path.read_bytes()) for path in tables}
        tree = without_nan(result)
        check_summary(json.dumps(tree, allow_nan=False))
        tree = {**tree, CHECKSUMS: checksums}
        write_atomic(self.result, to_json(tree, indent=1).encode(), durable=False)

    def read_result(self, advice: str = "") -> dict[str, Any]:
        """Read the summary; a RunDirError with this advice if it or a table is damaged."""
        advice = advice or f"write it again with: coterie run --resume {self.path}"
        result = read_json(self.result, advice)
        for path in wrong_tables(self, result.pop(CHECKSUMS, None)):
            raise RunDirError(f"{path} is damaged (its checksum is wrong); {advice}")
        return result


def _until(lines: IntactLines, rounds: int) -> list[Line]:
    """The lines up to the end of this round, by the rounds they state."""
    return [
        line
        for line in lines.every
        if line.value["round"] < rounds + (line.value.get("event") != SCORES)
        and line.value.get("event") != ADMISSION
    ]


def events_in(lines: IntactLines) -> list[Event]:
    """The events on the intact lines of a file."""
    return cast(list[Event], [line.value for line in lines.every])


def numbered(rounds: Sequence[int]) -> str:
    """Rounds in words.

    >>> numbered([3]), numbered([3, 4, 5]), numbered([1, 3])
    ('round 3', 'rounds 3 to 5', 'rounds 1, 3')
    """
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if len(rounds) > 2 and rounds[-1] - rounds[0] == len(rounds) - 1:
        return f"rounds {rounds[0]} to {rounds[-1]}"
    return f"rounds {', '.join(map(str, rounds))}"


def wrong_tables(run: RunDir, checksums: Any) -> list[Path]:
    """The tables of a run that do not match the checksums in its ``result.json``."""
    expected = checksums if isinstance(checksums, Mapping) else {}
    wrong = []
    for path in (run.table, run.exposure):
        if path.name in expected:
            try:
                checksum = crc32(path.read_bytes())
            except OSError:
                checksum = None
            if checksum != expected[path.name]:
                wrong.append(path)
    return wrong


def open_plain(path: str | Path, flags: int) -> int:
    """``os.open`` for plain files only: a pipe would wait for its other end, perhaps for good.

    >>> open_plain("/", os.O_RDONLY)
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is not a regular file: '/'
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def rounds_of(events: Iterable[Event]) -> list[Event]:
    """The events of rounds, without the start of the run and admissions.

    Scores that came later are merged into their round, the last ones if they came twice.

    >>> rounds_of([{"round": 0, "event": "init"}, {"round": 1, "lost": 2},
    ...            {"round": 1, "event": "scores", "received": {"loss": 0.5}}])
    [{'round': 1, 'lost': 2, 'received': {'loss': 0.5}}]
    """
    rounds: list[Event] = []
    for event in events:
        if "event" not in event:
            rounds.append(event.copy())
        elif event["event"] == SCORES:
            scores = event.copy()
            del scores["event"]
            for round in [e for e in rounds if e["round"] == event["round"]]:
                round.update(scores)
    return rounds


def without_nan(tree: Any) -> Any:
    """A copy with None for NaN and infinity, which JSON does not have.

    >>> without_nan({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(tree, Mapping):
        return {k: without_nan(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_nan(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows with equal keys as CSV text."""
    text = io.StringIO()
    rows = list(rows)
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
