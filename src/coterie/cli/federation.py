"""The commands for a federation over a network: keys, serve and join."""

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

from coterie.cli.dry_run import DryRun, tell_run
from coterie.cli.options import DiscardDamaged, Track, asking
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.results.result import Result

out = Console()
err = Console(stderr=True)
keys = typer.Typer(
    help="Create and check the keys of a federation, its server and its clients.",
    no_args_is_help=True,
)
PORT = 8443

KeysFolder = Annotated[Path, typer.Option("--dir", help="The folder of the federation's keys.")]
Hosts = Annotated[
    list[str],
    typer.Option("--host", help="A host name or address at which clients reach the server."),
]
ClientNames = Annotated[
    list[str] | None,
    typer.Option(
        "--client", help="The name of a client whose keys, including secret ones, are created here."
    ),
]
Requests = Annotated[
    list[Path] | None,
    typer.Option("--request", help="The request.json of a client that created its own keys."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS and keys; only for loopback (127.0.0.1).")
]
OwnMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="NAME=FILE.py:FUNCTION (or package.module:FUNCTION): the code of method.name = NAME.",
    ),
]
OwnModels = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="NAME=FILE.py:FUNCTION (or package.module:FUNCTION): the code of model.name = NAME.",
    ),
]


@keys.command("request")
def request_keys(
    name: Annotated[str, typer.Argument(help="The name of this client.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where this client keeps its keys.")] = Path(
        "keys"
    ),
) -> None:
    """On a client: create its keys, and write a request to enrol the public ones."""
    from coterie.engines.flower.keys import make_request
    from coterie.engines.flower.request import FILE

    request = make_request(folder, name)
    _say(f"send {folder / FILE}, which is public, to the person who makes the federation's keys.")
    _say(f"Nothing else in {folder} may leave this machine. When they call you, read out:")
    _say(f"  {request.fingerprint}")
    _say(f"and put the ca.pem and federation.json that they send back into {folder}")


@keys.command("make")
def make_keys(
    host: Hosts,
    client: ClientNames = None,
    request: Requests = None,
    folder: KeysFolder = Path("federation"),
    days: Annotated[int, typer.Option(help="Days for which certificates are valid.")] = 3650,
) -> None:
    """Create a federation: an authority, the server's certificate, and a folder for each client.

    Clients are numbered from 0: first each --client, then each --request, in the order given.
    """
    from coterie.engines.flower.keys import make_federation

    members = make_federation(folder, host, _newcomers(client, request), days)
    _handed_over(folder, members, drawn=client or [])
    _say(f"keep {folder / 'ca'} offline; {folder / 'server'} is for the server's machine")


@keys.command("add")
def add_keys(
    client: ClientNames = None,
    request: Requests = None,
    folder: KeysFolder = Path("federation"),
) -> None:
    """Enrol more clients; a running server accepts them without a restart.

    They get the next numbers: first each --client, then each --request, in the order given.
    """
    from coterie.engines.flower.keys import add_clients

    members = add_clients(folder, _newcomers(client, request))
    _handed_over(folder, members, drawn=client or [])
    _say(
        "clients that were enrolled before need nothing new, except for secure sums with the new "
        f"clients: then each needs its new federation.json from its folder in {folder / 'clients'} "
        "(a folder that was removed there is not written again)"
    )


@keys.command("check")
def check_keys(
    folder: Annotated[Path, typer.Option("--dir", help="Where this client keeps its keys.")] = Path(
        "keys"
    ),
) -> None:
    """On a client: check its keys, and show the fingerprints of all clients that it knows.

    The author of federation.json could have put their own keys in place of the other clients':
    compare each fingerprint with what `coterie keys request` printed on that client.
    """
    from coterie.engines.flower.keys import read_client

    keys = read_client(folder)
    for member in keys.members:
        mark = " (this client)" if member.id == keys.id else ""
        _say(f"client {member.id}: {member.fingerprint}  {member.name}{mark}")


@keys.command("renew")
def renew_keys(host: Hosts, folder: KeysFolder = Path("federation")) -> None:
    """Give the server a new certificate for these hosts."""
    from coterie.engines.flower.keys import renew_server

    until = renew_server(folder, host)
    out.print(f"the server's certificate is valid until {until:%Y-%m-%d}", highlight=False)


def _newcomers(clients: list[str] | None, requests: list[Path] | None) -> list[Any]:
    """The clients to enrol, in the order of their numbers."""
    from coterie.engines.flower.request import read_request

    return [*(clients or []), *(read_request(path) for path in requests or [])]


def _handed_over(folder: Path, members: Any, drawn: list[str]) -> None:
    for member in members:
        client_folder = folder / "clients" / member.name
        if member.name in drawn:
            _say(f"client {member.id}: send {client_folder} to {member.name} over a secure channel")
        else:
            _say(f"client {member.id}: the request of {member.name} has {member.fingerprint}")
            _say(
                f"  if {member.name} reads out the same, send back the files in {client_folder}: "
                "they are public, but must arrive unchanged"
            )
    if drawn:
        _say(
            f"the keys of {', '.join(drawn)} were created here: the person who runs this command "
            "knows these clients' secrets, and secure sums hide nothing of theirs from that "
            "person. With `coterie keys request` a client creates its own"
        )


def _say(text: str) -> None:
    out.print(escape(text), highlight=False, soft_wrap=True)


def serve(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `coterie run`.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="The run directory; given again, the run continues.")
    ],
    keys: Annotated[
        Path, typer.Option(help="The folder of the federation's keys, or of the server's.")
    ] = Path("federation"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any.")] = PORT,
    expect: Annotated[
        int | None,
        typer.Option(min=1, help="Clients to wait for before the run begins (default: all)."),
    ] = None,
    superlink: Annotated[
        str, typer.Option(help="HOST:PORT of your own SuperLink, started with --isolation process.")
    ] = "",
    superlink_secret: Annotated[
        Path | None, typer.Option(help="The --superexec-auth-secret-file of that SuperLink.")
    ] = None,
    insecure: Insecure = False,
    method: OwnMethods = None,
    model: OwnModels = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set any key: section.key=value, as in method.mu=0.01."),
    ] = None,
    discard_damaged: DiscardDamaged = False,
    track: Track = None,
    dry_run: DryRun = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve a federation: wait for its clients, train, and leave each client its model."""
    _require()
    os.umask(0o077)  # keys, models and state are private
    from coterie.cli.app import rounds_done
    from coterie.cli.options import resolve
    from coterie.deploy.allowed_names import map_names
    from coterie.deploy.serve import Serving, serve
    from coterie.experiment.config import experiment_of, parse
    from coterie.experiment.signals import heeding, stopped_with
    from coterie.experiment.user_code import by_name
    from coterie.report.progress import Watch, progress
    from coterie.report.tables import print_summary
    from coterie.results.rundir import without_nan
    from coterie.tracking import tracking

    files = [text for text in method or [] if "=" not in text]
    map_names([text for text in method or [] if text not in files], model or [])
    for text in files[1:]:
        raise ConfigError(f"--method {text}: a federation has one method, and it was given already")
    tree = by_name(resolve(config, sets, method=next(iter(files), None)), _report)
    settings = parse(tree)
    if dry_run:  # the clients' data are elsewhere: those of the configuration stand in for them
        _report("a forecast on the data of the configuration, divided as it says, on this machine")
        tell_run(experiment_of(settings), as_json)
        return
    listen = host or ("127.0.0.1" if insecure else "0.0.0.0")
    if insecure:
        _warn()
    if superlink:
        err.print(
            "[yellow]note:[/] your own SuperLink is not protected by Coterie's gate: anyone who "
            "reaches its port can register keys and start runs. Let clients reach /v1/fleet/ only",
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
    def progress_shown(judged_by: str) -> Iterator[Watch]:
        name, done = settings.method.name, rounds_done(directory)
        may_end = settings.stop != type(settings.stop)()
        rounds = settings.run.rounds
        with progress(err, name, rounds, judged_by, quiet, done=done, may_end=may_end) as watch:
            yield heeding(watch)

    command = f"coterie serve {config} --dir {directory}"

    def serve_run(discard: bool) -> Result:
        accepting = replace(serving, discard_damaged=discard)
        with stopped_with(lambda: f"stopped. Continue with the same command: {command} …"):
            return serve(accepting, progress_shown, _report, tracking(track, directory, _report))

    result = asking(serve_run, discard_damaged)
    if as_json:
        typer.echo(json.dumps(without_nan({**result.summary, "directory": str(directory)})))
    else:
        print_summary(out, result.summary, directory)


def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="The folder for this client's state and model.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="This client's data: .npz, .csv, or a folder of arrays or images."),
    ] = None,
    data_loader: Annotated[
        str,
        typer.Option(
            help="package.module:function or FILE.py:function that loads the data, given --data."
        ),
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            help="The format of --data: npz, npy, csv or image-folder (default: guessed)."
        ),
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the format, as in label=diagnosis for csv."),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Use this client's part of the experiment's data set instead of --data.",
        ),
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(help="The folder of this client's keys (default: DIR/keys)."),
    ] = None,
    client: Annotated[
        int | None, typer.Option(min=0, help="With --insecure: the number of this client.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device to train on, as in cuda.")] = "cpu",
    secure: Annotated[
        bool, typer.Option("--secure", help="Take part only in runs with secure aggregation.")
    ] = False,
    reveal: Annotated[
        str,
        typer.Option(help="With --secure: final-layer also lets the server see that layer, once."),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Exit after one run, once the model has arrived.")
    ] = False,
    method: OwnMethods = None,
    model: OwnModels = None,
    insecure: Insecure = False,
) -> None:
    """Join a federation as a client, and stay until stopped."""
    _require()
    os.umask(0o077)  # keys, models and state are private
    from coterie.deploy.allowed_names import map_names, mapped
    from coterie.deploy.data import MemberData
    from coterie.deploy.join import Joining, join
    from coterie.experiment.config import check_device

    check_device(device)
    map_names(method or [], model or [])  # check the names before connecting
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--server {server}: write HOST:PORT, as in {host or server}:{PORT}")
    if insecure == (client is None):
        raise ConfigError(
            "--client is the client's number where there are no keys: give it with --insecure, "
            "and only then"
        )
    if reveal and (reveal != "final-layer" or not secure):
        raise ConfigError(
            f"--reveal {reveal}: only final-layer is possible, and only with --secure"
        )
    if insecure:
        _warn()
    options = dict(_option(text) for text in option or [])
    source = MemberData(data and data.resolve(), data_loader, form, options, simulated)
    keys_folder = None if insecure else (keys or directory / "keys")
    try:
        models, methods = mapped(model or []), mapped(method or [])
        identity = (keys_folder, client or 0, device, once, secure, models, reveal, methods)
        join(Joining(server, directory, source, *identity), _report)
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
    """Check that a supported version of Flower is installed."""
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
        "[yellow]note:[/] --insecure: no encryption and no authentication. Use it only to try "
        "things on one machine",
        highlight=False,
        soft_wrap=True,
    )


def _report(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)
