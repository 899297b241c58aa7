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
_GRACE = 2  # seconds to finish answers when the server stops


def watch(
    directory: Annotated[
        Path,
        typer.Argument(help="A run directory, or a folder with runs, which may still be empty."),
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="The address to serve the page on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")
    ] = PORT,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on a live page, where you can stop and resume them."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError("the live page needs the extra: pip install 'coterie[live]'")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a folder: name a run directory or a folder with runs"
        )
    from coterie.report.live.guarding import is_everywhere, is_loopback, new_token

    listener = _listen(host, port)
    address_bound, port_bound = listener.getsockname()[:2]
    token = new_token()
    name_shown = socket.gethostname() if is_everywhere(address_bound) else host
    name_shown = f"[{name_shown}]" if ":" in name_shown else name_shown
    address = f"http://{name_shown}:{port_bound}/#token={token}"
    if not is_loopback(address_bound):
        _note(
            f"the page is served on {host}, beyond this machine, without encryption: anyone who "
            "listens on the network can read the runs and the token"
        )
    if not directory.exists():
        _note(f"there is no folder {directory} yet: runs appear on the page once it exists")
    out.print(escape(f"watching {directory} at {address}"), highlight=False, soft_wrap=True)
    if open_page:
        webbrowser.open(address)
    try:
        _serve(directory, listener, token, {host, address_bound})
    except KeyboardInterrupt:
        out.print("stopped watching; the runs continue", highlight=False)


def _note(text: str) -> None:
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _serve(directory: Path, listener: socket.socket, token: str, hosts: set[str]) -> None:
    """Serve the page until the user stops it."""
    import uvicorn

    from coterie.report.live.app import live_app
    from coterie.report.live.watching import Watching

    watching = Watching(directory)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            await watching.close()  # open streams would keep the server running
            await super().shutdown(sockets)

    app = live_app(watching, token, hosts, listener.getsockname()[1])
    settings = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE,
    )
    Server(settings).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Open the socket that the page is served on."""
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(socket_address)
        listener.listen()  # a browser opened from now on waits for the server
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot use port {port} of {host} ({error.strerror}): choose another, as in --port "
            f"{port + 1 if 0 < port < 65535 else PORT}, or --port 0 for any free port"
        ) from None
    return listener
