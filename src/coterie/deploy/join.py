"""Joining a federation: runs a client's SuperNode and worker, and restarts them when they fail.

The SuperNode is connected to the server; the worker answers the server's messages, using the
client's own data. Either process may fail: it is started again and continues from what is on disk.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.channel.privacy.client import SESSIONS
from coterie.channel.privacy.record import Record
from coterie.deploy.data import MemberData
from coterie.deploy.member import Identity
from coterie.engines.flower.keys import ClientKeys, read_client
from coterie.engines.flower.processes import Child, environment, free_port, shared_secret, tail
from coterie.errors import ConfigError, RunDirError
from coterie.results.rundir import RunDir

_POLL = 0.2  # seconds between two checks of the processes
_PAUSE = 5.0  # seconds before a SuperNode that ended is started again
DONE = 70  # the worker's exit code when one run was enough and is over
_LONG = 300.0  # seconds; a worker that ran longer did not fail because of its settings
_LAST_ANSWER = 20.0  # seconds for the last answer to reach the server
_CONNECTED = ("SuperNode ID", "Connection successful", "Received successfully")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Joining:
    """The options of ``coterie join``."""

    server: str
    directory: Path
    source: MemberData
    keys: Path | None  # None: without keys, on loopback only
    client: int = 0  # the client's id, where there are no keys
    device: str = "cpu"
    once: bool = False
    secure: bool = False
    models: tuple[str, ...] = ()  # NAME=FUNCTION, for models of the client's own
    reveal: str = ""  # what the client may show of its own update although sums are secure
    methods: tuple[str, ...] = ()  # NAME=FUNCTION, for methods


def join(joining: Joining, tell: Tell) -> None:
    """Take part as a client until the user ends it or, with ``once``, until one run is over."""
    joining.source.check()
    keys = None if joining.keys is None else read_client(joining.keys)
    if keys is None and not _loopback(joining.server):
        raise ConfigError(
            f"--insecure is for loopback only, and {joining.server} is not: anyone could read and "
            "change what is sent. Ask the federation for your keys (--keys)"
        )
    directory = RunDir(joining.directory)
    joining.directory.mkdir(parents=True, exist_ok=True)
    directory.lock()  # a second client in the same folder would answer with the same state
    try:
        if keys is not None:
            _permit_run(joining, Identity.of(keys).record, tell)
        _Processes(joining, keys, tell).run()
    finally:
        directory.unlock()


def _permit_run(joining: Joining, record: Record, tell: Tell) -> None:
    """Allow this client one more run with secure sums, since its owner has called join again."""
    sessions = [*joining.directory.glob(f"runs/*/states/{SESSIONS}/*/*.session")]
    if sessions and not record.path.exists():
        raise ConfigError(
            f"the client in {joining.directory} has taken part in secure sums, but its record of "
            f"what it signed, {record.path}, is gone: without it no secure sum is safe. Put it "
            "back if it was only moved; otherwise ask for new keys, and join in another folder "
            "(--dir)"
        )
    try:
        record.permit()
    except RunDirError as why:
        if joining.secure:
            raise
        tell(f"this client cannot take part in a run with secure sums: {why}")


class _Processes:
    """The SuperNode and the worker of a client, and what the user is told about them."""

    def __init__(self, joining: Joining, keys: ClientKeys | None, tell: Tell) -> None:
        self.joining, self.keys, self._tell = joining, keys, tell
        self.folder = joining.directory / "flower"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.secret = self.folder / "secret"
        shared_secret(self.secret)
        self.port = free_port()
        self.node: Child | None = None
        self.worker: Child | None = None
        self._start_node_at = self._start_worker_at = 0.0
        self._hangs = False
        self._worker_start, self._failures = 0.0, 0  # repeated failures get longer pauses
        self._last_text, self._log = "", self.folder / "worker.log"
        self._worker_log, self._node_log = _Lines(self._log, skip=True), _Lines(Path())

    def run(self) -> None:
        """Keep both processes running."""
        who = "" if self.keys is None else f" as {self.keys.name} (client {self.keys.id})"
        self._tell(f"joining {self.joining.server}{who}; end with Ctrl-C")
        try:
            while True:
                self._check_node()
                if self.worker is None or not self.worker.alive:
                    if self.worker is not None and self._is_done(self.worker):
                        return
                    self._start_worker()
                self._show_worker_log()
                self._show_connection()
                time.sleep(_POLL)
        finally:
            self._show_worker_log()
            for child in (
                self.worker,
                self.node,
            ):  # the node last, because it logs out at the server
                if child is not None:
                    child.stop(10)

    def _check_node(self) -> None:
        """Start the SuperNode, or restart it if it has ended or hangs."""
        if self.node is not None and self.node.alive and not self._hangs:
            return
        if self.node is not None:
            code = self.node.stop()
            killed = f"the SuperNode was ended by signal {-code} and is restarted"
            by_others = code < 0 and not self._hangs
            self._tell_once(killed if by_others else _reason(tail(self.node.log, 40)))
            self._hangs = False
            self.node, self._start_node_at = None, time.monotonic() + _PAUSE
        if time.monotonic() < self._start_node_at:
            return
        trust = ["--insecure"]
        if self.keys is not None:
            trust = [
                *("--root-certificates", str(self.keys.ca)),
                *("--auth-supernode-private-key", str(self.keys.node_key)),
            ]
        command = [
            "flower-supernode",
            *trust,
            *("--superlink", self.joining.server),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(self.secret)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        log = self.folder / "supernode.log"
        with contextlib.suppress(FileNotFoundError):
            log.replace(log.with_suffix(".log.1"))
        self.node = Child(command, log, environment(self.folder / "home"))
        self._node_log = _Lines(log)

    def _start_worker(self) -> None:
        if self.worker is not None:
            if self._start_worker_at == 0:
                self.worker.stop()
                lived = time.monotonic() - self._worker_start
                self._failures = 0 if lived > _LONG else self._failures + 1
                self._tell(f"the worker ended (exit code {self.worker.ended}) and is restarted")
                self._start_worker_at = time.monotonic() + min(60, 2**self._failures)
            if time.monotonic() < self._start_worker_at:
                return
        self._start_worker_at, self._worker_start = 0.0, time.monotonic()
        settings = {
            **asdict(self.joining.source),
            "directory": self.joining.directory,
            "keys": self.joining.keys,
            "client": self.joining.client,
            "device": self.joining.device,
            "once": self.joining.once,
            "secure": self.joining.secure,
            "reveal": self.joining.reveal,
            "models": self.joining.models,
            "methods": self.joining.methods,
            "port": self.port,
            "secret": self.secret,
        }
        text = json.dumps(settings, default=str)
        command = [sys.executable, "-m", "coterie.deploy.worker", text]
        self.worker = Child(command, self._log, environment(self.folder / "home"))

    def _is_done(self, worker: Child) -> bool:
        """Whether the worker ended because its one run is over; waits for the last answer."""
        if worker.ended != DONE or self.node is None:
            return False
        until = time.monotonic() + _LAST_ANSWER
        while time.monotonic() < until and self.node.alive and not _sent(self.node.log):
            time.sleep(_POLL)
        return True

    def _tell_once(self, text: str) -> None:
        """Tell the user, unless this was the last thing told."""
        if text and text != self._last_text:
            self._last_text = text
            self._tell(text)

    def _show_worker_log(self) -> None:
        """Show the user the worker's new messages."""
        for line in self._worker_log.new():
            self._tell(line)

    def _show_connection(self) -> None:
        """Tell the user when the connection to the server is made or lost."""
        for line in self._node_log.new():
            if "Giving up reconnection" in line:  # the SuperNode keeps running but does nothing
                self._hangs = True
            elif "Connection attempt failed" in line:
                self._tell_once(_no_connection(self.joining.server, self.keys is None))
            elif any(sign in line for sign in _CONNECTED):
                self._tell_once(f"connected to {self.joining.server}")


class _Lines:
    """The complete lines added to a log since the last call; ``skip`` leaves out older ones."""

    def __init__(self, log: Path, skip: bool = False) -> None:
        self._log = log
        self._position = log.stat().st_size if skip and log.is_file() else 0

    def new(self) -> list[str]:
        if not self._log.is_file():
            return []
        with self._log.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self._position += len(lines)
        return lines.decode(errors="replace").splitlines()


def _sent(log: Path) -> bool:
    text = log.read_text(errors="replace")
    return text.rfind("Sent successfully") > text.rfind("Sending:")


# What Flower and OpenSSL log when the server refuses a SuperNode, and what it means. The first
# pattern that matches counts.
_REASONS = (
    (
        r"(Hostname|IP address) mismatch",
        "the server's certificate is not for the name in --server: use a name it was made for, or "
        "make a new certificate with `coterie keys renew`",
    ),
    (
        r"certificate has expired|certificate is not yet valid",
        "the server's certificate is not valid today: its operators must make a new one with "
        "`coterie keys renew`, or a clock is wrong",
    ),
    (
        r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure|UNKNOWN_PROTOCOL",
        "the process at this address does not use TLS: it is not this federation's server, or it "
        "was started with --insecure",
    ),
    (r"UNEXPECTED_EOF|EOF occurred", "the connection to the server was cut"),
    (
        r"certificate|SSL|ssl",
        "this is not the server of this federation: its certificate does not match ca.pem",
    ),
    (
        r"code: (40[13]|412)\b|[Uu]nauthor|[Ii]nvalid .*auth|public key",
        "the server does not accept this client: its key is not registered there",
    ),
    (
        r"code: 2004\b",
        "the server does not accept this client yet: it has not noticed that the client was gone "
        "(which takes about a minute), or the client's key is not registered at this SuperLink",
    ),
)


def _no_connection(server: str, insecure: bool) -> str:
    """The message when a server cannot be reached."""
    host, _, port = server.rpartition(":")
    if insecure:  # the server may be waiting for a TLS handshake
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection((host.strip("[]"), int(port)), timeout=2) as connection,
            context.wrap_socket(connection),
        ):
            return f"{server} requires TLS and keys: leave out --insecure, and ask for your keys"
    return f"{server} does not answer; trying again"


def _reason(log: str) -> str:
    """Explain from its log why a SuperNode ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "INFO" not in line]
    log = "\n".join(lines)
    for pattern, meaning in _REASONS:
        if re.search(pattern, log):
            return f"{meaning}; trying again"
    generic = ("For more information", "The SuperNode could not", "EXPERIMENTAL")
    specific = [line for line in lines if not line.startswith(generic)] or ["no reason given"]
    return f"the connection to the server ended ({specific[-1]}); trying again"


def _loopback(server: str) -> bool:
    return server.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")
