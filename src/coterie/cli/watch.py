"""The command ``coterie watch``."""

from __future__ import annotations

import socket
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coterie.errors import ConfigError

out = Console()
err = Console(stderr=True)
PORT = 8050
_GRACE = 2  # seconds for answers that are under way when it ends


def watch(
    directory: Annotated[
        Path, typer.Argument(help="A run, or a folder of runs; it may be empty still.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="The address to serve the page at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any.")] = PORT,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Show runs on a live page while they go on; stop and resume them there."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError("the live page needs the extra: pip install 'coterie[live]'")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is no folder: name a run, or a folder of runs")
    from coterie.report.live.guarding import is_everywhere, is_loopback, new_token

    listening = _listen(host, port)
    given, number = listening.getsockname()[:2]
    token = new_token()
    shown = socket.gethostname() if is_everywhere(given) else host
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{number}/#token={token}"
    if not is_loopback(given):
        _note(
            f"the page is served at {host}, not to this machine only, and is not encrypted: "
            "whoever listens on the way sees the runs and the token"
        )
    if not directory.exists():
        _note(f"there is no folder {directory} yet: runs are shown as soon as they are there")
    out.print(escape(f"watching {directory} at {address}"), highlight=False, soft_wrap=True)
    if open_page:
        webbrowser.open(address)
    try:
        _serve(directory, listening, token, {host, given})
    except KeyboardInterrupt:
        out.print("stopped watching; runs go on", highlight=False)


def _note(text: str) -> None:
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _serve(directory: Path, listening: socket.socket, token: str, hosts: set[str]) -> None:
    """Until somebody ends it."""
    import uvicorn

    from coterie.report.live.app import live_app
    from coterie.report.live.watching import Watching

    watching = Watching(directory)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            await watching.close()  # streams would never end by themselves
            await super().shutdown(sockets)

    app = live_app(watching, token, hosts, listening.getsockname()[1])
    settings = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE,
    )
    Server(settings).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; a sentence if that cannot be."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(where)
        listening.listen()  # a browser that is opened now waits until it is answered
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"port {port} of {host} cannot be had ({error.strerror}): choose another, as in --port "
            f"{port + 1 if 0 < port < 65535 else PORT}, or --port 0 for any that is free"
        ) from None
    return listening
