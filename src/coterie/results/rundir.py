"""A run directory: the resolved config, a line a round, checkpoints, client state, the table."""

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

from coterie.core.events import ADMISSION, Data, Event, Session, check_event, check_summary
from coterie.core.events import SCORES as SCORES
from coterie.core.tree import sync, write_atomic
from coterie.errors import RunDirError
from coterie.results.checksums import (
    EVENTS,
    JSON_LINES,
    LEDGER_ROWS,
    Line,
    LineFile,
    Lines,
    Mark,
    check_note,
    read_json,
    to_json,
    with_note,
)
from coterie.results.toml import read_toml, to_toml

ENGINE = "flower"  # what a federation's own processes keep, if it is a real one
_BEFORE = (ENGINE, ".lock", ".stop")  # what may be there before a run begins
_TRIES = 5  # to get the lock
CODE = "code.json"  # digests of the user's own files that names stand for
CHECKSUMS = "checksums"  # in result.json: of the tables that are written with it


class RunDir:
    """The folder of one run.

    ==================  ====================================================================
    ``config.toml``     the configuration as resolved
    ``events.jsonl``    a line a round: metrics, bytes, seconds, groups
    ``ledger.csv``      bytes by round, client and kind
    ``clients.csv``     a row a client, written at the end
    ``result.json``     the summary, written at the end
    ``data.json``       what clients hold, as far as the server may know: labels, true groups
    ``sessions.jsonl``  a line for each process that worked here: when, what it was told, versions
    ``checkpoints/``    the last two checkpoints
    ``clients/``        client state, by client and version
    ``flower/``         of a federation that is served: what its processes keep
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
        """A new run directory; refused if one is there already."""
        if path.exists() and (
            not path.is_dir() or any(p.name not in _BEFORE for p in path.iterdir())
        ):
            raise RunDirError(
                f"{path} already holds something. Continue a run with --resume {path}, or choose "
                "another folder with --dir"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirError(
                f"cannot write to {path}: {error.strerror}. Choose another folder with --dir"
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
        """Make sure that no other process is at work here."""
        try:
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            for left in reversed(range(_TRIES)):
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # perhaps only somebody who looks, as ``at_work`` does
                    if not left:
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
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def ask_to_stop(self) -> None:
        """Ask whoever works here to end after the present round."""
        self._stop.touch()

    def stop_pending(self) -> bool:
        """Whether somebody asked, and nobody has heeded it yet."""
        return self._stop.exists()

    def stop_asked(self) -> bool:
        """Whether somebody asked since this was asked last; the request is then gone."""
        try:
            self._stop.unlink()
        except OSError:
            return False
        return True

    def at_work(self) -> bool:
        """Whether a process is at work here now."""
        try:
            found = open_plain(self.path / ".lock", os.O_RDONLY)  # also of another user's run
        except OSError:
            return False
        try:
            fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(found)
        return False

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """The configuration as resolved."""
        write_atomic(self.config, with_note(to_toml(tree)).encode(), durable=True)

    def write_code(self, digests: Mapping[str, str]) -> None:
        """The digests of the user's own files that the configuration names functions of."""
        if digests:
            write_atomic(self.path / CODE, to_json(digests, indent=1).encode(), durable=True)

    def read_code(self) -> dict[str, str]:
        """Those digests again; none where everything came with Coterie or installed packages."""
        path = self.path / CODE
        return read_json(path, "put back a copy of it") if path.exists() else {}

    def read_config(self) -> dict[str, Any]:
        """The configuration again; a RunDirError if it is not as it was written."""
        try:
            check_note(self.config.read_bytes())
        except OSError as error:
            raise RunDirError(f"cannot read {self.config}: {error.strerror}") from error
        except ValueError as error:
            raise RunDirError(
                f"{self.config} is damaged or was changed by hand ({error}): put back a copy of "
                "it. If it is as you want it, remove the line that begins with '# crc'"
            ) from error
        tree = read_toml(self.config)
        if not tree:
            raise RunDirError(f"{self.config} is damaged (it is empty): put back a copy of it")
        return tree

    def discard(self) -> None:
        """Remove a directory that this process has just created."""
        shutil.rmtree(self.path, ignore_errors=True)

    def append(self, event: Mapping[str, Any]) -> None:
        """Add a line to the events."""
        text = json.dumps(finite(event), allow_nan=False)
        check_event(text)
        self._append(self._event_lines, [text])

    def append_session(self, session: Session) -> None:
        """Add a line to the sessions."""
        self._append(LineFile(self.sessions, JSON_LINES), [json.dumps(session)])

    def _append(self, file: LineFile, texts: Iterable[str]) -> None:
        try:
            file.append(texts)
        except OSError as error:
            raise RunDirError(
                f"cannot write {file.path}: {error.strerror}. Free some space; continue with "
                f"--resume {self.path}"
            ) from error

    def append_ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a round's rows to the ledger."""
        if rows:
            self._append(self._ledger_lines, to_csv(rows).splitlines()[1:])

    def sync(self) -> None:
        """Wait until events and ledger are on disk."""
        for path in (self.events, self.ledger):
            if path.exists():
                sync(path)

    def read_events(self) -> list[Event]:
        """The lines so far that are as they were written."""
        return events_in(self._event_lines.read())

    def marks(self) -> dict[str, Mark]:
        """How far events and ledger have come: what a checkpoint of now can count on."""
        return {file.path.name: file.mark for file in self._files}

    @property
    def _files(self) -> tuple[LineFile, LineFile]:
        return self._event_lines, self._ledger_lines

    def missing(self, rounds: int, marks: Mapping[str, Mark]) -> str:
        """What of events and ledger up to this round is not there any more, in words, if anything.

        ``marks`` are those of the round's checkpoint.
        """
        for file in self._files:
            lines = file.read()
            if lines.reach(marks[file.path.name]):
                continue
            if not file.path.exists():
                how = "is missing"
            elif lines.damaged:
                how = f"is damaged at line {lines.damaged[0]}"
            else:
                how = f"is damaged: it ends too early, after {len(lines.every)} lines"
            what = "a part of the bytes by round"
            if file is self._event_lines:
                kept = {e["round"] for e in rounds_of(events_in(lines))}
                gone = [n for n in range(1, rounds + 1) if n not in kept]
                what = "the history of " + (numbered(gone) if gone else "what is between rounds")
            return f"{file.path} {how}, and {what} cannot be read any more"
        return ""

    def rewind(self, rounds: int, marks: Mapping[str, Mark] | None = None) -> list[Event]:
        """Keep only the events and the ledger up to this round: what came later is done again.

        An admission comes after the last round, and is done again too; so are scores of this
        round that came after it. ``marks`` are those of the round's checkpoint. Of a file in which
        lines up to it are damaged or missing, a copy is kept.
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
        """A name for a damaged file that no other has."""
        names = (f"{file.path.name}.damaged{(n and f'-{n}') or ''}" for n in itertools.count())
        return next(p for p in map(self.path.joinpath, names) if not p.exists())

    def write_data(self, found: Data) -> None:
        """What is known of the clients' data."""
        write_atomic(self.data, to_json(found).encode(), durable=False)

    def write_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The per-client table, as CSV."""
        write_atomic(self.table, to_csv(rows).encode(), durable=False)

    def write_exposure(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Which vectors of single clients the server saw, as CSV."""
        write_atomic(self.exposure, to_csv(rows).encode(), durable=False)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """The summary at the end, after the tables: it has their checksums."""
        tables = [path for path in (self.table, self.exposure) if path.is_file()]
        checksums = {path.name: crc32(path.read_bytes()) for path in tables}
        tree = finite(result)
        check_summary(json.dumps(tree, allow_nan=False))
        tree = {**tree, CHECKSUMS: checksums}
        write_atomic(self.result, to_json(tree, indent=1).encode(), durable=False)

    def read_result(self, advice: str = "") -> dict[str, Any]:
        """The summary again; a RunDirError, with advice, if it or a table is damaged."""
        advice = advice or f"write it again with: coterie run --resume {self.path}"
        found = read_json(self.result, advice)
        for path in wrong_tables(self, found.pop(CHECKSUMS, None)):
            raise RunDirError(f"{path} is damaged (its checksum is wrong); {advice}")
        return found


def _until(lines: Lines, rounds: int) -> list[Line]:
    """The lines that were there when this round was over, by what they say themselves."""
    return [
        line
        for line in lines.every
        if line.value["round"] < rounds + (line.value.get("event") != SCORES)
        and line.value.get("event") != ADMISSION
    ]


def events_in(lines: Lines) -> list[Event]:
    """The events of a file's lines, as they were checked when they were written."""
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
    """The tables of a run that are not as these checksums, of its result.json, say."""
    known = checksums if isinstance(checksums, Mapping) else {}
    wrong = []
    for path in (run.table, run.exposure):
        if path.name in known:
            try:
                found = crc32(path.read_bytes())
            except OSError:
                found = None
            if found != known[path.name]:
                wrong.append(path)
    return wrong


def open_plain(path: str | Path, flags: int) -> int:
    """``os.open`` for plain files only: a pipe would wait for its other end, perhaps for good.

    >>> open_plain("/", os.O_RDONLY)
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is no plain file: '/'
    """
    found = os.open(path, flags | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return found


def rounds_of(events: Iterable[Event]) -> list[Event]:
    """The events that are rounds; the beginning and admissions are marked as such.

    Scores that came later are laid into their round, the last ones if they came twice.

    >>> rounds_of([{"round": 0, "event": "init"}, {"round": 1, "lost": 2},
    ...            {"round": 1, "event": "scores", "received": {"loss": 0.5}}])
    [{'round': 1, 'lost': 2, 'received': {'loss': 0.5}}]
    """
    found: list[Event] = []
    for event in events:
        if "event" not in event:
            found.append(event.copy())
        elif event["event"] == SCORES:
            own = event.copy()
            del own["event"]
            for scored in [e for e in found if e["round"] == event["round"]]:
                scored.update(own)
    return found


def finite(tree: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(tree, Mapping):
        return {k: finite(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of equal keys as CSV text."""
    text = io.StringIO()
    rows = list(rows)
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
