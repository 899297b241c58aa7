"""The server's side of the network: a SuperLink on loopback, and the gate in front of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import Grid

from coterie.engines.flower.gate import Gate, signed_by
from coterie.engines.flower.keys import ServerKeys
from coterie.engines.flower.processes import (
    Child,
    environment,
    free_port,
    shared_secret,
    wait_for_port,
)
from coterie.engines.flower.runtime import UNREACHABLE, SuperLink, silence_flower
from coterie.errors import EngineError

_START = 180.0  # seconds that a SuperLink may take to start
_PAUSE = 2.0
_HANGS = 10  # attempts after which a SuperLink that runs and does not answer is restarted


class Hub:
    """Starts a SuperLink and a gate, or uses a running SuperLink; restarts it when it fails.

    The SuperLink keeps its registered clients in ``folder``. Its other interfaces, which Flower
    leaves open, are reachable on loopback only; the gate forwards nothing but clients' requests.
    ``superlink`` is the address of a running SuperLink, ``secret`` the file with its secret.
    """

    def __init__(
        self,
        folder: Path,
        keys: ServerKeys | None,
        address: tuple[str, int],
        tell: Callable[[str], None],
        superlink: str = "",
        secret: Path | None = None,
    ) -> None:
        self.folder, self.keys, self._tell = folder, keys, tell
        self._superlink, self._secret_file = superlink, secret or folder / "secret"
        self._address, self._port = address, 0
        self._child: Child | None = None
        self._gate: Gate | None = None
        self._link: SuperLink | None = None
        self._grid: Grid | None = None

    @property
    def grid(self) -> Grid:
        """The grid of the current Flower run."""
        assert self._grid is not None
        return self._grid

    @property
    def link(self) -> SuperLink:
        """The connection to the SuperLink."""
        assert self._link is not None
        return self._link

    @property
    def address(self) -> str:
        """The address at which clients reach the server."""
        if self._gate is None:
            return self._superlink
        host, port = self._gate.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def pid(self) -> int:
        """The process id of the SuperLink; 0 if it was not started here."""
        return 0 if self._child is None else self._child.pid

    def open(self) -> None:
        """Start the SuperLink and the gate, or connect to the running SuperLink."""
        silence_flower()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._superlink:
            shared_secret(self._secret_file)
            self._port = free_port()
            host, port = self._address
            self._gate = Gate(host, port, self._port, self.keys, insecure=self.keys is None)
            self._start()
        self._connect()
        if self._gate is not None:
            if self.keys is not None:  # before the gate opens: a refused client waits a while
                self.admit(self.keys)
            self._gate.start()

    def admit(self, keys: ServerKeys) -> dict[int, int]:
        """Register these clients; return their nodes. Each may answer in its own name only."""
        nodes = self.link.register({m.id: m.node for m in keys.clients})
        if self._gate is not None:
            self._gate.admits = signed_by(keys.clients, nodes)
        return nodes

    def reconnect(self) -> None:
        """Restore the connection to a SuperLink that does not answer; restart it if need be."""
        self._tell("the SuperLink does not answer")
        attempts = 0
        while True:
            attempts += 1
            hangs = attempts > _HANGS
            if self._child is not None and (hangs or not self._child.alive):
                attempts = 0
                self._child.stop()
                self._start()
                self._tell("the SuperLink was restarted")
            try:
                self._connect()
            except UNREACHABLE:
                time.sleep(_PAUSE)
            else:
                self._tell("the SuperLink answers again")
                return

    def _connect(self) -> None:
        address = self._superlink or f"127.0.0.1:{self._port}"
        ca = None if self.keys is None else self.keys.ca
        secret = self._secret_file.read_bytes() if self._secret_file.exists() else None
        if self._link is not None:
            self._link.abandon()
        try:
            self._link = SuperLink(address, ca, secret, self.folder / "runs")
            self._grid = self._link.open()
        except UNREACHABLE as error:
            if self._grid is None:
                raise EngineError(
                    f"the SuperLink at {address} cannot be used: {error}. See "
                    f"{self.folder / 'superlink.log'}"
                ) from error
            raise

    def _start(self) -> None:
        tls = ["--insecure"]
        if self.keys is not None:
            tls = [
                *("--ssl-ca-certfile", str(self.keys.ca)),
                *("--ssl-certfile", str(self.keys.certificate)),
                *("--ssl-keyfile", str(self.keys.key)),
                "--enable-supernode-auth",
            ]
        command = [
            "flower-superlink",
            *tls,
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(self._secret_file)),
            *("--database", str((self.folder / "link.db").resolve())),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            "--disable-runtime-dependency-installation",
        ]
        log = self.folder / "superlink.log"
        self._child = Child(command, log, environment(self.folder / "home"))
        wait_for_port("127.0.0.1", self._port, self._child, _START)

    def close(self) -> None:
        """Stop the SuperLink and the gate if they were started here."""
        if self._link is not None:
            self._link.close()
        if self._gate is not None:
            self._gate.close()
        if self._child is not None:
            self._child.stop()
