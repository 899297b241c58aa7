"""A run directory: the resolved config, a line a round, checkpoints, client state, the table."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import RunDirError
from coterie.run.toml import to_toml
from coterie.tree import sync, write_atomic

ENGINE = "flower"  # what a federation's own processes keep, if it is a real one
_BEFORE = (ENGINE, ".lock", ".stop")  # what may be there before a run begins
_TRIES = 5  # to get the lock
SCORES = "scores"  # the event of scores that came after their round was written


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
        self.result = path / "result.json"
        self.data = path / "data.json"
        self.sessions = path / "sessions.jsonl"
        self._stop = path / ".stop"
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
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
        write_atomic(self.config, to_toml(tree).encode(), durable=True)

    def discard(self) -> None:
        """Remove a directory that this process has just created."""
        shutil.rmtree(self.path, ignore_errors=True)

    def append(self, event: Mapping[str, Any]) -> None:
        """Add a line to the events."""
        self._append(self.events, json.dumps(finite(event), allow_nan=False) + "\n")

    def append_session(self, session: Mapping[str, Any]) -> None:
        """Add a line to the sessions."""
        self._append(self.sessions, json.dumps(session) + "\n")

    def _append(self, path: Path, text: str) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RunDirError(
                f"cannot write {path}: {error.strerror}. Free some space; continue with "
                f"--resume {self.path}"
            ) from error

    def append_ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a round's rows to the ledger."""
        if not rows:
            return
        text = to_csv(rows)
        if self.ledger.exists():
            text = text.partition("\n")[2]
        self._append(self.ledger, text)

    def sync(self) -> None:
        """Wait until events and ledger are on disk."""
        for path in (self.events, self.ledger):
            if path.exists():
                sync(path)

    def read_events(self) -> list[dict[str, Any]]:
        """The lines so far; a last line that a crash cut short is left out."""
        events = []
        if self.events.exists():
            for line in self.events.read_text().splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    break
        return events

    def rewind(self, rounds: int) -> list[dict[str, Any]]:
        """Keep only the events up to this round: what came later will be done again.

        An admission comes after the last round, and is done again too; so are scores of this
        round that came after it.
        """
        events = [
            e
            for e in self.read_events()
            if e["round"] < rounds + (e.get("event") != SCORES) and e.get("event") != "admission"
        ]
        write_atomic(
            self.events, "".join(json.dumps(e) + "\n" for e in events).encode(), durable=True
        )
        if self.ledger.exists():
            title, *rows = self.ledger.read_text().splitlines(keepends=True) or [""]
            kept = [r for r in rows if r.endswith("\n") and int(r.partition(",")[0]) <= rounds]
            write_atomic(self.ledger, "".join([title, *kept]).encode(), durable=True)
        return events

    def write_data(self, found: Mapping[str, Any]) -> None:
        """What is known of the clients' data."""
        write_atomic(self.data, json.dumps(found).encode(), durable=False)

    def write_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The per-client table, as CSV."""
        write_atomic(self.table, to_csv(rows).encode(), durable=False)

    def write_exposure(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Which vectors of single clients the server saw, as CSV."""
        write_atomic(self.path / "exposure.csv", to_csv(rows).encode(), durable=False)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """The summary at the end."""
        write_atomic(
            self.result,
            json.dumps(finite(result), indent=1, allow_nan=False).encode(),
            durable=False,
        )


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


def rounds_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events that are rounds; the beginning and admissions are marked as such.

    Scores that came later are laid into their round, the last ones if they came twice.

    >>> rounds_of([{"round": 0, "event": "init"}, {"round": 1, "lost": 2},
    ...            {"round": 1, "event": "scores", "received": {"loss": 0.5}}])
    [{'round': 1, 'lost': 2, 'received': {'loss': 0.5}}]
    """
    found: list[dict[str, Any]] = []
    for event in events:
        if "event" not in event:
            found.append(dict(event))
        elif event["event"] == SCORES:
            own = {k: v for k, v in event.items() if k not in ("round", "event")}
            for scored in [e for e in found if e["round"] == event["round"]]:
                scored |= own
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
