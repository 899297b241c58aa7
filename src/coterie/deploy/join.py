"""Joining a federation: a SuperNode and a worker, kept running for as long as the user likes.

The SuperNode holds the line to the server; the worker answers its messages from the client's own
data. Either may fall: it is started again, and goes on from what is on disk.
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
from coterie.deploy.data import Source
from coterie.deploy.member import Identity
from coterie.engines.flower.keys import ClientKeys, read_client
from coterie.engines.flower.processes import Child, environment, free_port, shared_secret, tail
from coterie.errors import ConfigError, RunDirError
from coterie.results.rundir import RunDir

_LOOK = 0.2
_PAUSE = 5.0  # seconds before a SuperNode that ended is started again
DONE = 70  # the worker's exit code when a run is over and one was enough
_LONG = 300.0  # seconds after which a worker's end is not for want of something at its start
_LAST = 20.0  # seconds for the last answer to reach the server
_CONNECTED = ("SuperNode ID", "Connection successful", "Received successfully")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Joining:
    """What ``coterie join`` was told."""

    server: str
    directory: Path
    source: Source
    keys: Path | None  # None: without any, on loopback only
    client: int = 0  # who it is, where no keys say so
    device: str = "cpu"
    once: bool = False
    secure: bool = False
    models: tuple[str, ...] = ()  # names of models, each with this client's own function
    reveal: str = ""  # what of its own may leave it although sums are secure
    methods: tuple[str, ...] = ()  # and names of methods


def join(joining: Joining, tell: Tell) -> None:
    """Be a client until the user ends it or, if one run is enough, until that is over."""
    joining.source.check()
    keys = None if joining.keys is None else read_client(joining.keys)
    if keys is None and not _loopback(joining.server):
        raise ConfigError(
            f"--insecure is for loopback only, and {joining.server} is not: anybody could read and "
            "change what is sent. Ask the federation for your keys (--keys)"
        )
    place = RunDir(joining.directory)
    joining.directory.mkdir(parents=True, exist_ok=True)
    place.lock()  # a second client in the same folder would answer with the same state
    try:
        if keys is not None:
            _permit_run(joining, Identity.of(keys).record, tell)
        _Household(joining, keys, tell).live()
    finally:
        place.unlock()


def _permit_run(joining: Joining, record: Record, tell: Tell) -> None:
    """Let this client take part in one more run with secure sums, as its owner asks by joining."""
    before = [*joining.directory.glob(f"runs/*/states/{SESSIONS}/*/*.session")]
    if before and not record.path.exists():
        raise ConfigError(
            f"{joining.directory} has taken part in secure sums, and {record.path}, which says "
            "what was signed, is gone: no secure sum is safe without it. Put it back if it was "
            "only moved; otherwise ask for new keys, and join in another folder (--dir)"
        )
    try:
        record.permit()
    except RunDirError as why:
        if joining.secure:
            raise
        tell(f"no run with secure sums is possible: {why}")


class _Household:
    """The two processes of a client, and the log that the user sees."""

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
        self._worker_since, self._ends = 0.0, 0  # one that ends at once gets longer pauses
        self._said, self._log = "", self.folder / "worker.log"
        self._worker_says, self._node_says = _Lines(self._log, last=True), _Lines(Path())

    def live(self) -> None:
        """Keep both running."""
        who = "" if self.keys is None else f" as {self.keys.name} (client {self.keys.id})"
        self._tell(f"joining {self.joining.server}{who}; end with Ctrl-C")
        try:
            while True:
                self._see_to_node()
                if self.worker is None or not self.worker.alive:
                    if self.worker is not None and self._over(self.worker):
                        return
                    self._start_worker()
                self._pass_on()
                self._tell_of_line()
                time.sleep(_LOOK)
        finally:
            self._pass_on()
            for child in (self.worker, self.node):  # the node last: it takes its leave
                if child is not None:
                    child.stop(10)

    def _see_to_node(self) -> None:
        if self.node is not None and self.node.alive and not self._hangs:
            return
        if self.node is not None:
            code = self.node.stop()
            killed = f"the SuperNode was ended by signal {-code}: it is started again"
            by_others = code < 0 and not self._hangs
            self._say(killed if by_others else _reason(tail(self.node.log, 40)))
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
        self._node_says = _Lines(log)

    def _start_worker(self) -> None:
        if self.worker is not None:
            if self._start_worker_at == 0:
                self.worker.stop()
                lived = time.monotonic() - self._worker_since
                self._ends = 0 if lived > _LONG else self._ends + 1
                self._tell(f"the worker ended (exit code {self.worker.ended}): it is started again")
                self._start_worker_at = time.monotonic() + min(60, 2**self._ends)
            if time.monotonic() < self._start_worker_at:
                return
        self._start_worker_at, self._worker_since = 0.0, time.monotonic()
        told = {
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
        text = json.dumps(told, default=str)
        command = [sys.executable, "-m", "coterie.deploy.worker", text]
        self.worker = Child(command, self._log, environment(self.folder / "home"))

    def _over(self, worker: Child) -> bool:
        """Whether the worker ended because all is done; then the last answer is seen off."""
        if worker.ended != DONE or self.node is None:
            return False
        ends = time.monotonic() + _LAST
        while time.monotonic() < ends and self.node.alive and not _sent(self.node.log):
            time.sleep(_LOOK)
        return True

    def _say(self, text: str) -> None:
        if text and text != self._said:
            self._said = text
            self._tell(text)

    def _pass_on(self) -> None:
        """Let the user see what the worker has to say."""
        for line in self._worker_says.new():
            self._tell(line)

    def _tell_of_line(self) -> None:
        """Say when there is a line to the server, and when there is none; each once."""
        for line in self._node_says.new():
            if "Giving up reconnection" in line:  # it runs on all the same, and does nothing
                self._hangs = True
            elif "Connection attempt failed" in line:
                self._say(_silence(self.joining.server, self.keys is None))
            elif any(sign in line for sign in _CONNECTED):
                self._say(f"connected to {self.joining.server}")


class _Lines:
    """The whole lines that a log got since one last looked; ``last``: not those of before."""

    def __init__(self, log: Path, last: bool = False) -> None:
        self._log = log
        self._heard = log.stat().st_size if last and log.is_file() else 0

    def new(self) -> list[str]:
        if not self._log.is_file():
            return []
        with self._log.open("rb") as file:
            file.seek(self._heard)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._heard += len(whole)
        return whole.decode(errors="replace").splitlines()


def _sent(log: Path) -> bool:
    text = log.read_text(errors="replace")
    return text.rfind("Sent successfully") > text.rfind("Sending:")


# What Flower and OpenSSL say when a SuperNode is not let in, and what it means; first come, first.
_REASONS = (
    (
        r"(Hostname|IP address) mismatch",
        "the server's certificate is not for the name that this client reaches it by: give "
        "--server a name that it is for (`coterie keys renew` makes one for others)",
    ),
    (
        r"certificate has expired|certificate is not yet valid",
        "the server's certificate is not valid today: the server's people make a new one with "
        "`coterie keys renew`, or a clock is wrong",
    ),
    (
        r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure|UNKNOWN_PROTOCOL",
        "what listens there speaks no TLS: it is not this federation's server, or was started "
        "with --insecure",
    ),
    (r"UNEXPECTED_EOF|EOF occurred", "the line to the server was cut"),
    (
        r"certificate|SSL|ssl",
        "the server is not the one of this federation: its certificate does not fit ca.pem",
    ),
    (
        r"code: (40[13]|412)\b|[Uu]nauthor|[Ii]nvalid .*auth|public key",
        "the server does not let this client in: its key is not registered there",
    ),
    (
        r"code: 2004\b",
        "the server does not let this client in yet: it has not noticed that it was away (that "
        "takes about a minute), or it is a SuperLink of its own where this key is not registered",
    ),
)


def _silence(server: str, insecure: bool) -> str:
    """What to say of a server that there is no line to."""
    host, _, port = server.rpartition(":")
    if insecure:  # it would not understand us if it wanted TLS
        asks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asks.check_hostname, asks.verify_mode = False, ssl.CERT_NONE
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection((host.strip("[]"), int(port)), timeout=2) as line,
            asks.wrap_socket(line),
        ):
            return f"{server} wants TLS and keys: leave out --insecure, and ask for your keys"
    return f"{server} does not answer; trying again"


def _reason(log: str) -> str:
    """Why a SuperNode ended, in words."""
    said = [line.strip() for line in log.splitlines() if line.strip() and "INFO" not in line]
    log = "\n".join(said)
    for signs, meaning in _REASONS:
        if re.search(signs, log):
            return f"{meaning}; trying again"
    dull = ("For more information", "The SuperNode could not", "EXPERIMENTAL")
    told = [line for line in said if not line.startswith(dull)] or ["no reason given"]
    return f"the line to the server ended ({told[-1]}); trying again"


def _loopback(server: str) -> bool:
    return server.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")
