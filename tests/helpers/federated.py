"""A real federation on loopback: a serving process and clients, each in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forked
from processes import COTERIE, PATIENCE

CONFIG = """
[data]
set = "digits"
clients = {clients}
samples = {samples}
[partition]
name = "dirichlet"
[model]
name = "mlp"
hidden = [16]
[evaluation]
adapt_epochs = 0
[run]
rounds = {rounds}
seed = 3
"""


def until(done: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """What this gives, once it gives something; a failure that says what was waited for."""
    ends = time.monotonic() + seconds
    while not (found := done()):
        if time.monotonic() > ends:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A command of ours, its output in a file."""

    def __init__(self, arguments: Sequence[Any], log: Path, python: Sequence[str] = ()) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as to:
            self.process = subprocess.Popen(
                [*(python or COTERIE), *map(str, arguments)],
                stdout=to,
                stderr=to,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str, seconds: float = PATIENCE) -> None:
        """Wait until it has said this; it must not end before."""

        def said() -> bool:
            if words in self.text:
                return True
            assert self.process.poll() is None, f"it ended before it said {words!r}:\n{self.text}"
            return False

        until(said, f"{words!r} in:\n{self.log}", seconds)

    def wait(self, seconds: float = PATIENCE) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.text}") from None

    def kill(self) -> None:
        """As a power cut would: itself and all that it started."""
        children = descendants(self.process.pid)
        for pid in (self.process.pid, *children):
            with_pid(pid, signal.SIGKILL)
        self.process.wait(20)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


def with_pid(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """All processes that come from this one, by what the system says."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (OSError, IndexError, ValueError):
                continue
    found, open_ = [], [pid]
    while open_:
        mother = open_.pop()
        children = [child for child, parent in parents.items() if parent == mother]
        found += children
        open_ += children
    return found


def named(pid: int, words: str) -> list[int]:
    """Those of its descendants whose command has these words in it."""
    found = []
    for child in descendants(pid):
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words in line:
            found.append(child)
    return found


class Federation:
    """Keys, a configuration, one server at a time, and clients that stay."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str] = ("a", "b", "c"),
        rounds: int = 2,
        samples: int = 300,
    ) -> None:
        self.root, self.names, self.port = root, list(names), free_port()
        self.config = root / "config.toml"
        text = CONFIG.format(clients=len(names), rounds=rounds, samples=samples)
        self.config.write_text(text)
        self.keys = root / "federation"
        clients = [part for name in names for part in ("--client", name)]
        command = ["keys", "make", "--host", "127.0.0.1", *clients, "--dir", self.keys]
        forked.run(*command)
        self.running: list[Process] = []

    def serve(self, name: str, *more: Any, python: Sequence[str] = ()) -> Process:
        command = ["serve", self.config, "--dir", self.root / name, "--keys", self.keys]
        where = ["--host", "127.0.0.1", "--port", self.port]
        process = Process([*command, *where, *more], self.root / f"{name}.log", python)
        self.running.append(process)
        return process

    def join(
        self,
        name: str,
        *more: Any,
        keys: Path | None = None,
        folder: str = "",
        port: int | None = None,
    ) -> Process:
        place = self.root / (folder or name)
        server = f"127.0.0.1:{port or self.port}"
        command = ["join", "--server", server, "--dir", place, "--simulated"]
        own = keys or self.keys / "clients" / name
        process = Process([*command, "--keys", own, *more], self.root / f"{place.name}.log")
        self.running.append(process)
        return process

    def loop(self, name: str, *more: Any) -> Path:
        """The same experiment in one process."""
        place = self.root / f"{name}-loop"
        alone = ["--engine", "loop", "--batch-clients", "1"]  # as each client trains
        command = ["run", self.config, *alone, "--dir", place, "--quiet", *more]
        forked.run(*command)
        return place

    def close(self) -> None:
        for process in self.running:
            process.end()


@contextmanager
def federation(root: Path, **settings: Any) -> Iterator[Federation]:
    made = Federation(root, **settings)
    try:
        yield made
    finally:
        made.close()


def events(place: Path) -> list[dict[str, Any]]:
    path = place / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rounds(place: Path) -> list[dict[str, Any]]:
    return [e for e in events(place) if "event" not in e]


def same_models(fed: Federation, loop: Path, names: Sequence[str] | None = None) -> None:
    """The clients' own models are those of the loop, to the bit."""
    import torch
    from safetensors.torch import load_file

    from coterie.experiment.export import reopen

    result = reopen(loop)
    for name in names or fed.names:
        wanted = result.weights(fed.names.index(name)).tensors()
        found = load_file(fed.root / name / "model.safetensors")
        assert wanted.keys() == found.keys()
        different = [key for key in wanted if not torch.equal(wanted[key], found[key])]
        assert not different, f"{name}: {different}"
