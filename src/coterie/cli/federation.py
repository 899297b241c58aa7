"""The commands of a real federation: keys, serve and join."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coterie.cli.options import DiscardDamaged, Track, asking
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.results.result import Result

out = Console()
err = Console(stderr=True)
keys = typer.Typer(
    help="Make the keys of a federation: its authority, the server's certificate, each client's.",
    no_args_is_help=True,
)
PORT = 8443

KeysFolder = Annotated[Path, typer.Option("--dir", help="Where the federation's keys are kept.")]
Hosts = Annotated[
    list[str], typer.Option("--host", help="A name or address that clients reach the server by.")
]
ClientNames = Annotated[
    list[str] | None,
    typer.Option("--client", help="A client's name; its keys, secret ones too, are drawn here."),
]
Requests = Annotated[
    list[Path] | None,
    typer.Option("--request", help="The request.json of a client that drew its own keys."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS and no keys: for loopback (127.0.0.1) only.")
]
OwnMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="NAME=FILE.py:FUNCTION (or package.module:FUNCTION): what method.name = NAME is here.",
    ),
]
OwnModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="NAME=FILE.py:FUNCTION (or package.module:FUNCTION): what model.name = NAME is here.",
    ),
]


@keys.command("request")
def request_keys(
    name: Annotated[str, typer.Argument(help="What this client is to be called.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where this client keeps its keys.")] = Path(
        "keys"
    ),
) -> None:
    """At a client: draw its own keys, and write the request to enrol their public halves."""
    from coterie.engines.flower.keys import make_request
    from coterie.engines.flower.request import FILE

    made = make_request(folder, name)
    _say(f"send {folder / FILE} to whoever makes the federation's keys: it is public. Nothing")
    _say(f"else of {folder} may leave this machine. Read out, when they ask by telephone:")
    _say(f"  {made.fingerprint}")
    _say(f"put the ca.pem and federation.json that come back into {folder}")


@keys.command("make")
def make_keys(
    host: Hosts,
    client: ClientNames = None,
    request: Requests = None,
    folder: KeysFolder = Path("federation"),
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 3650,
) -> None:
    """Make a federation: an authority, the server's certificate, and a folder for each client.

    Clients are numbered from 0: first each --client, then each --request, in the order given.
    """
    from coterie.engines.flower.keys import make_federation

    made = make_federation(folder, host, _newcomers(client, request), days)
    _handed_over(folder, made, drawn=client or [])
    _say(f"keep {folder / 'ca'} offline; {folder / 'server'} is for the server's machine")


@keys.command("add")
def add_keys(
    client: ClientNames = None,
    request: Requests = None,
    folder: KeysFolder = Path("federation"),
) -> None:
    """Enrol more clients; a server that runs lets them in by itself.

    They get the next numbers: first each --client, then each --request, in the order given.
    """
    from coterie.engines.flower.keys import add_clients

    made = add_clients(folder, _newcomers(client, request))
    _handed_over(folder, made, drawn=client or [])
    _say(
        "clients enrolled before can stay as they are. Only for secure sums with the newcomers "
        f"each needs its new federation.json, from its folder in {folder / 'clients'} (one that "
        "was removed there is not written again)"
    )


@keys.command("check")
def check_keys(
    folder: Annotated[Path, typer.Option("--dir", help="Where this client keeps its keys.")] = Path(
        "keys"
    ),
) -> None:
    """At a client: check its keys, and show the fingerprints of all clients that it knows of.

    Whoever wrote federation.json may have put keys of their own in the others' places: compare the
    fingerprints with the other clients, each with what `coterie keys request` printed there.
    """
    from coterie.engines.flower.keys import read_client

    known = read_client(folder)
    for member in known.members:
        own = " (this client)" if member.id == known.id else ""
        _say(f"client {member.id}: {member.fingerprint}  {member.name}{own}")


@keys.command("renew")
def renew_keys(host: Hosts, folder: KeysFolder = Path("federation")) -> None:
    """Give the server a new certificate, for these hosts."""
    from coterie.engines.flower.keys import renew_server

    until = renew_server(folder, host)
    out.print(f"the server's certificate is valid until {until:%Y-%m-%d}", highlight=False)


def _newcomers(clients: list[str] | None, requests: list[Path] | None) -> list[Any]:
    """Who is to be enrolled, in the order of their numbers."""
    from coterie.engines.flower.request import read_request

    return [*(clients or []), *(read_request(path) for path in requests or [])]


def _handed_over(folder: Path, members: Any, drawn: list[str]) -> None:
    for member in members:
        place = folder / "clients" / member.name
        if member.name in drawn:
            _say(f"client {member.id}: hand {place} to {member.name}, over a way you trust")
        else:
            _say(f"client {member.id}: {member.name} asked with {member.fingerprint}")
            _say(
                f"  is that what {member.name} reads out? Then send back what is in {place}: it is "
                "public, but has to arrive unchanged"
            )
    if drawn:
        _say(
            f"the keys of {', '.join(drawn)} were drawn here: whoever runs this command knows "
            "these clients' secrets, and secure sums hide nothing of theirs from that person. With "
            "`coterie keys request` a client draws its own"
        )


def _say(text: str) -> None:
    out.print(escape(text), highlight=False, soft_wrap=True)


def serve(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `coterie run`.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the run is kept; given again, it goes on there.")
    ],
    keys: Annotated[
        Path, typer.Option(help="The federation's keys, or the server's folder of them.")
    ] = Path("federation"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any.")] = PORT,
    expect: Annotated[
        int | None,
        typer.Option(min=1, help="Clients to wait for before it begins (default: all)."),
    ] = None,
    superlink: Annotated[
        str, typer.Option(help="HOST:PORT of a SuperLink that runs with --isolation process.")
    ] = "",
    superlink_secret: Annotated[
        Path | None, typer.Option(help="The file of that SuperLink's --superexec-auth-secret-file.")
    ] = None,
    insecure: Insecure = False,
    method: OwnMethods = None,
    model: OwnModels = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, as in method.mu=0.01.")
    ] = None,
    discard_damaged: DiscardDamaged = False,
    track: Track = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve a federation: wait for its clients, train with them, leave each its model."""
    _require()
    os.umask(0o077)  # what is written here is nobody else's business
    from coterie.cli.app import rounds_done
    from coterie.cli.options import resolve
    from coterie.deploy.allowed_names import map_names
    from coterie.deploy.serve import Serving, serve
    from coterie.experiment.config import parse
    from coterie.experiment.signals import heeding, stopped_with
    from coterie.experiment.user_code import by_name
    from coterie.report.progress import Watch, progress
    from coterie.report.tables import print_summary
    from coterie.results.rundir import finite
    from coterie.tracking import tracking

    places = [text for text in method or [] if "=" not in text]
    map_names([text for text in method or [] if text not in places], model or [])
    for text in places[1:]:
        raise ConfigError(f"--method {text}: a federation has one method, and this is another")
    tree = by_name(resolve(config, sets, method=next(iter(places), None)), _told)
    asked = parse(tree)
    listen = host or ("127.0.0.1" if insecure else "0.0.0.0")
    if insecure:
        _warn()
    if superlink:
        err.print(
            "[yellow]note:[/] a SuperLink of your own has no gate before it: whoever reaches its "
            "port can register keys and start runs. Let only clients reach /v1/fleet/",
            highlight=False,
            soft_wrap=True,
        )
    serving = Serving(
        tree,
        directory,
        None if insecure else keys,
        listen,
        port,
        expect,
        superlink,
        superlink_secret,
    )

    @contextmanager
    def shown(judged_by: str) -> Iterator[Watch]:
        name, done = asked.method.name, rounds_done(directory)
        may_end = asked.stop != type(asked.stop)()
        shown = progress(err, name, asked.run.rounds, judged_by, quiet, done=done, may_end=may_end)
        with shown as watch:
            yield heeding(watch)

    command = f"coterie serve {config} --dir {directory}"

    def go(discard: bool) -> Result:
        told = replace(serving, discard_damaged=discard)
        with stopped_with(lambda: f"stopped. Go on with the same command: {command} …"):
            return serve(told, shown, _told, tracking(track, directory, _told))

    result = asking(go, discard_damaged)
    if as_json:
        typer.echo(json.dumps(finite({**result.summary, "directory": str(directory)})))
    else:
        print_summary(out, result.summary, directory)


def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="Where this client keeps its state and its model.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="This client's data: .npz, .csv, or a folder of arrays or images."),
    ] = None,
    data_loader: Annotated[
        str,
        typer.Option(
            help="package.module:function or FILE.py:function that loads the data; it gets --data."
        ),
    ] = "",
    form: Annotated[
        str, typer.Option(help="What --data is: npz, npy, csv or image-folder (default: guessed).")
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the form, as in label=diagnosis for a csv."),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Take this client's part of the experiment's own data."),
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(help="The folder of keys that this client was given (default: DIR/keys)."),
    ] = None,
    client: Annotated[
        int | None, typer.Option(min=0, help="With --insecure: which client this is.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train, as in cuda.")] = "cpu",
    secure: Annotated[
        bool, typer.Option("--secure", help="Take part only in runs whose server sees sums alone.")
    ] = False,
    reveal: Annotated[
        str,
        typer.Option(help="With --secure: also show the server this client's final-layer, once."),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="End when a run is over and the model is there.")
    ] = False,
    method: OwnMethods = None,
    model: OwnModels = None,
    insecure: Insecure = False,
) -> None:
    """Join a federation as a client, and stay until you end it."""
    _require()
    os.umask(0o077)  # what is written here is nobody else's business
    from coterie.deploy.allowed_names import map_names, mapped
    from coterie.deploy.data import Source
    from coterie.deploy.join import Joining, join
    from coterie.experiment.config import check_device

    check_device(device)
    map_names(method or [], model or [])  # what is wrong with one is said at once
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--server {server}: write HOST:PORT, as in {host or server}:{PORT}")
    if insecure == (client is None):
        raise ConfigError(
            "--client says who this is where no keys do: give it with --insecure, and only then"
        )
    if reveal and (reveal != "final-layer" or not secure):
        raise ConfigError(f"--reveal {reveal}: it can be final-layer, with --secure")
    if insecure:
        _warn()
    options = dict(_option(text) for text in option or [])
    source = Source(data and data.resolve(), data_loader, form, options, simulated)
    held = None if insecure else (keys or directory / "keys")
    try:
        models, methods = mapped(model or []), mapped(method or [])
        who = (held, client or 0, device, once, secure, models, reveal, methods)
        join(Joining(server, directory, source, *who), _told)
    except KeyboardInterrupt:
        err.print("left the federation; join again with the same command", highlight=False)


def _option(text: str) -> tuple[str, Any]:
    from coterie.experiment.config import assign_text

    key, equals, _ = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write key=value")
    tree: dict[str, Any] = {}
    assign_text(tree, f"options.{text}")
    return key.strip(), tree["options"][key.strip()]


def _require() -> None:
    """Refuse a Flower that is not there, or not the one that Coterie knows."""
    if find_spec("flwr") is None:
        raise ConfigError("a real federation needs the extra: pip install 'coterie[flower]'")
    try:
        import coterie.engines.flower.runtime  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"this version of Flower cannot be used ({error}): pip install 'coterie[flower]'"
        ) from None


def _warn() -> None:
    err.print(
        "[yellow]note:[/] --insecure: nothing is encrypted and nobody has to prove who they are. "
        "For trying things on one machine only",
        highlight=False,
        soft_wrap=True,
    )


def _told(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)
