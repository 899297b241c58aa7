"""Flower's processes: their environment, how they start and end, and their logs."""

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
_POLL = 0.02  # seconds between two checks


def environment(home: Path) -> dict[str, str]:
    """The environment for Flower's processes: their files in ``home``, and no telemetry.

    Flower's own settings are not inherited, since some open further ports or name further services.
    Its commands are found next to this Python, and loopback is never reached through a proxy.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    path = [str(Path(sys.executable).parent), env.get("PATH", os.defpath)]
    env |= {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join(path),
    }
    direct = env.get("no_proxy") or env.get("NO_PROXY") or ""
    if direct != "*":
        hosts = [*filter(None, (host.strip() for host in direct.split(","))), *_LOOPBACK]
        direct = ",".join(dict.fromkeys(hosts))
    return env | {"no_proxy": direct, "NO_PROXY": direct}


class Child:
    """A child process in its own session, so that Ctrl-C does not reach it.

    On Linux it dies with the thread that created it, so create it in the main thread.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.command, self.log = tuple(command), log
        self._code: int | None = None
        # Without -I, a signal.py next to the script, say, would replace the standard module.
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
        """The process id."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs.

        The process is not reaped before ``stop``, so that until then no other process can get its
        id or its group's.
        """
        if self._code is None and self._process.returncode is None:
            if not hasattr(os, "waitid"):  # macOS before Python 3.13
                return self._process.poll()
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            status = os.waitid(os.P_PID, self.pid, flags)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                self._code = status.si_status if exited else -status.si_status
        return self._code if self._process.returncode is None else self._process.returncode

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.ended is None

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the process to end; return whether it has."""
        until = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL)
        return True

    def stop(self, grace: float = 5) -> int:
        """Terminate the process, then kill its whole group; return the exit code."""
        if self._process.returncode is None:
            if self.alive:
                self._process.send_signal(signal.SIGTERM)
                self.wait(grace)
            if self._process.returncode is None:  # not reaped, so the group's id is still its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode


def shared_secret(path: Path) -> bytes:
    """A secret that Coterie's processes share: made once, in a file that only its owner reads."""
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
    """A port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(host: str, port: int, child: Child, seconds: float) -> None:
    """Wait until this process listens there; an EngineError with the end of its log if not."""
    until = time.monotonic() + seconds
    while True:
        if not child.alive:
            problem = f"ended with exit code {child.ended} before it listened on {host}:{port}"
        elif _listens(host, port):
            return
        elif time.monotonic() >= until:
            problem = f"did not listen on {host}:{port} within {seconds:g} s"
        else:
            time.sleep(_POLL)
            continue
        raise EngineError(f"{Path(child.command[0]).name} {problem}. Its log:\n{tail(child.log)}")


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, without colours; the reason in brackets if there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 500 * lines))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    last = _COLOURS.sub("", text).rstrip().splitlines()[-lines:]
    return "\n".join(last) if last else f"({log} is empty)"
