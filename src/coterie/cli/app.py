"""The command line: the app, and the commands that only list names or need one run."""

from __future__ import annotations

import csv
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
import typer.main
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from coterie import __version__
from coterie.cli.dry_run import DryRun, tell_run
from coterie.cli.options import (
    FLAGS,
    ConfigFile,
    DiscardDamaged,
    Folder,
    Quiet,
    ScenarioName,
    Sets,
    StandIn,
    Track,
    asking,
    chosen_of,
    err,
    flagged,
    new_directory,
    out,
    refuse_with_resume,
    resolve,
    show,
    tell,
    warn,
)
from coterie.errors import ConfigError, CoterieError, Interrupted
from coterie.experiment.signals import heeding, stoppable, stopped_with
from coterie.registry import (
    AVAILABILITIES,
    CLOCKS,
    CODECS,
    METHODS,
    MODELS,
    PARTITIONS,
    SETS,
    SHIFTS,
    read_index,
)
from coterie.report.listings import listing, method_listing, plain_listing, rows_of

if TYPE_CHECKING:
    from coterie.results.result import Result

# Commands whose modules need PyTorch: each is imported when it is called.
LATER = {
    "serve": "coterie.cli.federation:serve",
    "join": "coterie.cli.federation:join",
    "compare": "coterie.cli.compare:compare",
    "groups": "coterie.cli.groups:groups",
    "probe": "coterie.cli.groups:probe",
    "watch": "coterie.cli.watch:watch",
    "report": "coterie.cli.report:report",
    "keys": "coterie.cli.federation:keys",
}
HIDDEN = ("probe",)  # deprecated


def load(name: str) -> Any:
    """Import a command of ``LATER``."""
    module, _, function = LATER[name].partition(":")
    command = getattr(importlib.import_module(module), function)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, hidden=name in HIDDEN, deprecated=name in HIDDEN)(command)
    return typer.main.get_command(single)


class Commands(TyperGroup):
    """The group of commands. To list those of ``LATER`` it reads the index instead of importing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in the order in which they are shown."""
        first, *others = super().list_commands(ctx)
        return [first, *(n for n in LATER if n != "keys"), *others, "keys"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """A command for the list: one of ``LATER`` has its help text only."""
        if name not in LATER:
            return super().get_command(ctx, name)
        about = read_index()["commands"][name]["about"]
        return click.Command(name, help=about, hidden=name in HIDDEN)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command to call, imported if it is one of ``LATER``."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in LATER else command, rest


def all_commands() -> click.Group:
    """The command line with every command imported, for documentation and tests."""
    group: Any = typer.main.get_command(app)
    names = group.list_commands(click.Context(group))
    return click.Group(
        commands={name: load(name) if name in LATER else group.commands[name] for name in names}
    )


app = typer.Typer(
    cls=Commands,
    help="Federated learning among clients whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 2 configuration, 3 data, 4 run directory, 5 training, 6 engine, "
    "130 stopped by the user (Ctrl-C).",
)


@app.command()
@flagged(after="config")
def run(
    config: ConfigFile = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="The run directory (default: a new one below runs/)."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    discard_damaged: DiscardDamaged = False,
    track: Track = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    **flags: Any,
) -> None:
    """Run one method and keep the run in a directory."""
    from coterie.experiment.config import experiment_of, parse
    from coterie.experiment.experiment import execute
    from coterie.experiment.privacy import left_public
    from coterie.experiment.scenarios import recall, remember
    from coterie.experiment.stopping import Stop
    from coterie.report.progress import progress, saying
    from coterie.report.scenario_tables import print_paper
    from coterie.report.tables import print_summary
    from coterie.results.evaluation import main_score
    from coterie.results.rundir import without_nan
    from coterie.tracking import check, tracking

    check(track or ())
    if resume is not None:
        tree = _resumed(resume, config or scenario or stand_in, directory, sets, flags)
        about = recall(resume, tree)
    else:
        if discard_damaged:
            raise ConfigError(
                "--discard-damaged needs --resume: it concerns a run that is continued"
            )
        tree = resolve(config, sets, scenario=scenario, **flags)
        chosen = chosen_of(scenario, tree, stand_in)
        tree = tree if chosen is None else chosen.tree
        tell(chosen)
        about = None if chosen is None else chosen.about()
    experiment = experiment_of(parse(tree))
    if notice := left_public(experiment.settings.privacy, experiment.method):
        warn(notice)
    if dry_run:
        if resume is not None:
            raise ConfigError("--dry-run is for a run that has not begun: leave out --resume")
        tell_run(experiment, as_json)
        return
    run_dir = resume or directory or new_directory(experiment.method.name)
    judged_by = main_score(experiment.population.classes is None)
    name, total = experiment.method.name, experiment.settings.rounds
    rounds = flags["rounds"]
    flags_to_repeat = f" --rounds {rounds}" if resume is not None and rounds is not None else ""
    flags_to_repeat += "".join(f" --track {tracker}" for tracker in track or ())

    def execute_run(discard: bool) -> Result:
        display = progress(
            err,
            name,
            total,
            judged_by,
            quiet,
            done=0 if resume is None else rounds_done(resume),
            may_end=experiment.settings.stop != Stop(),
        )
        stop_message = stopped_with(lambda: _how_to_go_on(run_dir, flags_to_repeat))
        with stop_message, remember(run_dir, about), display as watch:
            return execute(
                experiment,
                run_dir,
                resume is not None,
                heeding(watch),
                track=tracking(track, run_dir, warn),
                say=saying(err, name, quiet),
                discard_damaged=discard,
            )

    result = asking(execute_run, discard_damaged)
    if as_json:
        extra = {} if about is None else {"scenario": about}
        typer.echo(json.dumps(without_nan({**result.summary, **extra, "directory": str(run_dir)})))
    else:
        print_summary(out, result.summary, run_dir)
        if about is not None:
            print_paper(out, about, result.summary)


def _resumed(
    resume: Path, config: object, directory: Path | None, sets: Any, flags: dict[str, Any]
) -> dict[str, Any]:
    """The configuration of the run to resume, with the few keys that may change."""
    from coterie.experiment.config import assign, assign_texts, change_run_settings, parse
    from coterie.experiment.user_code import admitted
    from coterie.results.rundir import RunDir

    changeable = ("rounds", "engine", "workers", "address", "alone")
    stop_rules = [text for text in sets or [] if text.strip().startswith("stop.")]
    unchangeable = config or directory or len(stop_rules) < len(sets or [])
    refuse_with_resume("run", bool(unchangeable), flags, *changeable, and_also=" and --set stop.…")
    run = RunDir.open(resume)
    tree = run.read_config()
    if "python" in tree:
        raise ConfigError(
            f"{resume} was created by coterie.simulate: continue it from Python with "
            "simulate(..., directory=..., resume=True)"
        )
    tree = admitted(tree, run.read_code())
    change_run_settings(tree, {key: flags[key] for key in changeable if key != "alone"})
    if flags["alone"]:
        assign(tree, FLAGS["alone"], True)
    assign_texts(tree, stop_rules)
    wanted, done = parse(tree).run.rounds, rounds_done(resume)
    if wanted < done:
        if flags["rounds"] is not None:
            raise ConfigError(
                f"--rounds {wanted}: the run in {resume} already has {done} rounds; ask for more, "
                "or leave out --rounds"
            )
        assign(tree, "run.rounds", done)  # an earlier resume raised the number of rounds
    return tree


def rounds_done(directory: Path) -> int:
    """How many rounds the run in this directory has saved."""
    from coterie.results.rundir import RunDir

    return RunDir(directory).saved()


def _how_to_go_on(directory: Path, flags: str) -> str:
    command = f"coterie run --resume {shlex.quote(str(directory))}{flags}"
    if any((directory / "checkpoints").glob("*.json")):
        return f"stopped. Finished rounds are saved; continue with: {command}"
    if (directory / "config.toml").exists():
        return f"stopped before the first round was saved; start it again with: {command}"
    return f"stopped before anything was saved in {directory}; start again in another directory"


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to explain, or a combination as in ifca+ditto.")
    ] = None,
) -> None:
    """List the methods, or explain one method or each part of a combination."""
    from coterie.experiment.presets import PRESETS, explained

    if name is None:
        show(method_listing(rows_of(METHODS)))
        about = {name: preset.about for name, preset in PRESETS.items()}
        show(plain_listing("Presets: methods with certain settings, used by name", about))
        return
    if name in PRESETS:
        for line in explained(name):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    from coterie.methods import find, make, short
    from coterie.report import method_help

    wide = out.is_terminal or "COLUMNS" in os.environ
    page = Console(width=min(out.width, 100) if wide else 100, file=out.file)
    names = [METHODS.admit(part, "coterie methods") for part in name.split("+")]
    if len(names) == 1:
        method_help.print_explanation(page, method_help.explain(short(names[0]), find(names[0])))
        return
    parts = method_help.combination({short(part): find(part) for part in names})
    method = make(
        "+".join(names), {p.name: 1 for part in parts for p in part.parameters if p.default is None}
    )
    method_help.print_combination(page, name, parts, method_help.secure_words(method))


@app.command()
def scenarios(
    name: Annotated[str | None, typer.Argument(help="A scenario to show in full.")] = None,
    folder: Folder = None,
) -> None:
    """List the papers' experiments that can be run by name, or show one in full."""
    from coterie.experiment.scenarios import SCENARIOS, absent, stand_in
    from coterie.experiment.scenarios import scenario as find
    from coterie.report.scenario_tables import print_scenario, scenario_listing

    if name is None:
        available = {s.data: stand_in(s.data, folder) for s in SCENARIOS.values()}
        show(scenario_listing(list(SCENARIOS.values()), available))
        return
    chosen = find(name)
    instead = stand_in(chosen.data, folder)
    print_scenario(out, chosen, "" if instead == chosen.data else absent(chosen, instead, folder))


@app.command()
def wire() -> None:
    """List the codecs, clocks and availability models."""
    for title, registry in (
        ("Codecs: --codec, wire.up, wire.down", CODECS),
        ("Clocks: --clock, clock.name", CLOCKS),
        ("Availability: availability.name", AVAILABILITIES),
    ):
        show(plain_listing(title, {name: row["about"] for name, row in rows_of(registry).items()}))


@app.command("data")
def data_sets() -> None:
    """List the data sets."""
    show(listing("Data sets", rows_of(SETS)))


@app.command()
def partitions() -> None:
    """List the partitions and shifts."""
    show(listing("Partitions", rows_of(PARTITIONS)))
    show(listing("Shifts between groups of clients", rows_of(SHIFTS)))


@app.command()
def models() -> None:
    """List the models."""
    show(listing("Models", rows_of(MODELS)))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    client: Annotated[int, typer.Option(help="The client whose model to write.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The file to write (default: client-ID.safetensors)."),
    ] = None,
) -> None:
    """Write one client's model to a safetensors file."""
    from coterie.experiment.export import export_model, reopen

    target = to or Path(f"client-{client}.safetensors")
    export_model(reopen(run), client, target)
    out.print(f"client {client}'s model is in {escape(str(target))}", soft_wrap=True)


@app.command()
def admit(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    client: Annotated[
        Path,
        typer.Option(
            help="The new client's labelled data: .npz (x and y), .csv, or a folder with x.npy and "
            "y.npy."
        ),
    ],
    epochs: Annotated[int, typer.Option(help="Epochs of training on its data.")] = 5,
    to: Annotated[
        Path | None, typer.Option("--to", help="The file to write (default: DATA.safetensors).")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="Metadata of the new client, column=value as in site=north."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let a new client join a run, adapt a model to its data, and write it to a file."""
    from coterie.experiment.admit import (
        admit_client,
        export_admitted,
        newcomer_data,
        newcomer_metadata,
    )
    from coterie.experiment.export import check_target, reopen
    from coterie.report.tables import print_admitted
    from coterie.results.evaluation import main_score
    from coterie.results.rundir import without_nan

    target = to or Path(f"{client.resolve().stem}.safetensors")
    check_target(target)
    result = reopen(run)
    population = result.plan.population
    columns = {**newcomer_metadata(client, run), **dict(map(_column, metadata or ()))}
    data = newcomer_data(client, run, population)
    admitted = admit_client(result, data, epochs, columns)
    export_admitted(admitted, result, target)
    summary = admitted.to_dict()
    if as_json:
        typer.echo(json.dumps(without_nan({**summary, "model": str(target)})))
    else:
        print_admitted(out, summary, main_score(population.classes is None), target)


def _column(text: str) -> tuple[str, str]:
    column, value = (part.strip() for part in text.partition("=")[::2])
    if not column or not value:
        raise ConfigError(f"--metadata {text}: write column=value, as in site=north")
    return column, value


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    data: Annotated[Path, typer.Argument(help="Samples: .npy, .npz (array x) or .csv.")],
    client: Annotated[int, typer.Option(help="The client whose model to use.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The CSV file to write (default: standard output).")
    ] = None,
) -> None:
    """Predict with one client's model."""
    from coterie.experiment.export import predictions, reopen

    rows = predictions(reopen(run), client, data)
    try:
        target = to.open("w", newline="") if to else sys.stdout
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror}") from None
    try:
        writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    finally:
        if to:
            target.close()


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options that come before a command."""


def main() -> None:
    """Run the command line; an error the user can fix becomes a sentence and an exit code."""
    try:
        with stoppable():
            app()
    except CoterieError as error:
        _complain(error)
    except KeyboardInterrupt:
        _complain(Interrupted("stopped"))
    except SystemExit as end:  # how typer ends, also after Ctrl-C
        if end.code == Interrupted.exit_code:
            _complain(Interrupted("stopped"))
        raise


def _complain(error: CoterieError) -> NoReturn:
    text = f"[bold red]error:[/] {escape(str(error))}"
    err.print(
        text, highlight=False, soft_wrap=True, emoji=False
    )  # else rich reads mine.py:x: as an emoji
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
