"""Flower's processes: their environment, their start and end, and what they last said."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie.engines import child_processes
from coterie.errors import EngineError

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GLANCE = 0.02  # seconds between two looks


def environment(home: Path) -> dict[str, str]:
    """The environment for Flower's processes: its files in ``home``, and nothing phones home.

    No setting of Flower's is inherited, since some open further ports or name further services. Its
    commands are found beside this Python, and loopback is never reached through a proxy.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    path = [str(Path(sys.executable).parent), found.get("PATH", os.defpath)]
    found |= {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join(path),
    }
    direct = found.get("no_proxy") or found.get("NO_PROXY") or ""
    if direct != "*":
        hosts = [*filter(None, (host.strip() for host in direct.split(","))), *_LOOPBACK]
        direct = ",".join(dict.fromkeys(hosts))
    return found | {"no_proxy": direct, "NO_PROXY": direct}


class Child:
    """A process in a session of its own, so that Ctrl-C does not reach it.

    On Linux it dies with the thread that made it: make it in one that lives as long as it should,
    the main one.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.command, self.log = tuple(command), log
        self._code: int | None = None
        # Without -I a folder of ours that holds, say, a signal.py would be imported from.
        launch = [sys.executable, "-I", "-S", child_processes.__file__, str(os.getpid()), *command]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as to:
                self._process = subprocess.Popen(
                    launch,
                    stdin=subprocess.DEVNULL,
                    stdout=to,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"cannot start {command[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """Its exit code, minus the signal if one ended it; None while it runs.

        It is looked at, not reaped: until ``stop`` nobody else can get its number, or its group's.
        """
        if self._code is None and self._process.returncode is None:
            if not hasattr(os, "waitid"):  # macOS before Python 3.13
                return self._process.poll()
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self.pid, look)
            if found is not None:
                exited = found.si_code == os.CLD_EXITED
                self._code = found.si_status if exited else -found.si_status
        return self._code if self._process.returncode is None else self._process.returncode

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.ended is None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, waiting at most so long for it."""
        until = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() >= until:
                return False
            time.sleep(_GLANCE)
        return True

    def stop(self, grace: float = 5) -> int:
        """End it and what it left in its group: first asked to, then made to; its exit code."""
        if self._process.returncode is None:
            if self.alive:
                self._process.send_signal(signal.SIGTERM)
                self.wait(grace)
            if self._process.returncode is None:  # not reaped: the group's number is still its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode


def shared_secret(path: Path) -> bytes:
    """What two of our processes know and others do not: made once, in a file of its owner's."""
    if path.exists() and path.stat().st_size:
        return path.read_bytes()
    path.unlink(missing_ok=True)  # a crash may have left it empty
    secret = secrets.token_bytes(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    return secret


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(host: str, port: int, child: Child, seconds: float) -> None:
    """Wait until this process listens there; an error with its last words if it does not."""
    until = time.monotonic() + seconds
    while True:
        if not child.alive:
            trouble = f"ended with exit code {child.ended} before it listened on {host}:{port}"
        elif _listens(host, port):
            return
        elif time.monotonic() >= until:
            trouble = f"did not listen on {host}:{port} within {seconds:g} s"
        else:
            time.sleep(_GLANCE)
            continue
        raise EngineError(f"{Path(child.command[0]).name} {trouble}. Its log:\n{tail(child.log)}")


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, without colours; a sentence if there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 500 * lines))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    last = _COLOURS.sub("", text).rstrip().splitlines()[-lines:]
    return "\n".join(last) if last else f"({log} is empty)"
