"""The command line."""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from coterie import __version__
from coterie.deploy import commands as federation
from coterie.errors import ConfigError, CoterieError, Interrupted
from coterie.options import (
    FLAGS,
    Address,
    AdmitEpochs,
    BatchSize,
    Clients,
    ClockName,
    CodecName,
    Cohort,
    ConfigFile,
    DataSet,
    DiscardDamaged,
    EngineName,
    Epochs,
    EpsilonBudget,
    Folder,
    Holdout,
    MethodName,
    ModelName,
    Momentum,
    Outliers,
    PartitionName,
    Quiet,
    Rate,
    Reveal,
    Rounds,
    ScenarioName,
    SecureFlag,
    Seed,
    Sets,
    ShiftName,
    StandIn,
    Target,
    Track,
    Workers,
    asking,
    chosen_of,
    err,
    new_directory,
    out,
    refuse_with_resume,
    resolve,
    show,
    tell,
    warn,
)
from coterie.report import commands as seeing
from coterie.report.live import commands as live
from coterie.run import commands as comparing
from coterie.run import groups_commands as grouping
from coterie.run.stopping import heeding, stoppable, stopped_with

if TYPE_CHECKING:
    from coterie.run.result import Result

app = typer.Typer(
    help="Federated learning among clients whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 2 configuration, 3 data, 4 run directory, 5 training, 6 engine, "
    "130 stopped by the user.",
)


@app.command()
def run(
    config: ConfigFile = None,
    data: DataSet = None,
    folder: Folder = None,
    clients: Clients = None,
    partition: PartitionName = None,
    shift: ShiftName = None,
    model: ModelName = None,
    method: MethodName = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    momentum: Momentum = None,
    seed: Seed = None,
    engine: EngineName = None,
    workers: Workers = None,
    address: Address = None,
    holdout: Holdout = None,
    admit_epochs: AdmitEpochs = None,
    codec: CodecName = None,
    clock: ClockName = None,
    target: Target = None,
    secure: SecureFlag = False,
    epsilon: EpsilonBudget = None,
    reveal: Reveal = None,
    outliers: Outliers = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also train each client alone, for its gain.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the run (default: runs/…).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    discard_damaged: DiscardDamaged = False,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run one method and keep the run in a directory."""
    from coterie.report.progress import progress, saying
    from coterie.report.scenario_tables import print_paper
    from coterie.report.tables import print_summary
    from coterie.report.tracking import check, tracking
    from coterie.run.config import experiment_of, parse
    from coterie.run.ending import Stop
    from coterie.run.evaluation import headline
    from coterie.run.experiment import execute
    from coterie.run.privacy import left_public
    from coterie.run.rundir import finite
    from coterie.run.scenarios import recall, remember

    flags = {k: v for k, v in locals().items() if k in FLAGS}
    check(track or ())
    if resume is not None:
        tree = _resumed(resume, config or scenario or stand_in, directory, sets, flags)
        about = recall(resume, tree)
    else:
        if discard_damaged:
            raise ConfigError("--discard-damaged is about a run that is continued: give --resume")
        tree = resolve(config, sets, scenario=scenario, **flags)
        chosen = chosen_of(scenario, tree, stand_in)
        tree = tree if chosen is None else chosen.tree
        tell(chosen)
        about = None if chosen is None else chosen.about()
    experiment = experiment_of(parse(tree))
    if public := left_public(experiment.settings.privacy, experiment.method):
        warn(public)
    place = resume or directory or new_directory(experiment.method.name)
    judged_by = headline(experiment.population.classes is None)
    name, total = experiment.method.name, experiment.settings.rounds
    more = f" --rounds {rounds}" if resume is not None and rounds is not None else ""
    more += "".join(f" --track {each}" for each in track or ())

    def go(discard: bool) -> Result:
        shown = progress(
            err,
            name,
            total,
            judged_by,
            quiet,
            done=0 if resume is None else rounds_done(resume),
            may_end=experiment.settings.stop != Stop(),
        )
        stopped = stopped_with(lambda: _how_to_go_on(place, more))
        with stopped, remember(place, about), shown as watch:
            return execute(
                experiment,
                place,
                resume is not None,
                heeding(watch),
                track=tracking(track, place, warn),
                say=saying(err, name, quiet),
                discard_damaged=discard,
            )

    result = asking(go, discard_damaged)
    if as_json:
        known = {} if about is None else {"scenario": about}
        typer.echo(json.dumps(finite({**result.summary, **known, "directory": str(place)})))
    else:
        print_summary(out, result.summary, place)
        if about is not None:
            print_paper(out, about, result.summary)


def _resumed(
    resume: Path, config: object, directory: Path | None, sets: Any, flags: dict[str, Any]
) -> dict[str, Any]:
    """The run's own configuration; only what cannot change its course may be given anew."""
    from coterie.run.config import assign, assign_texts, parse, run_anew
    from coterie.run.rundir import RunDir

    free = ("rounds", "engine", "workers", "address", "alone")
    ends = [text for text in sets or [] if text.strip().startswith("stop.")]
    more = config or directory or len(ends) < len(sets or [])
    refuse_with_resume("run", bool(more), flags, *free, and_also=" and --set stop.…")
    tree = RunDir.open(resume).read_config()
    if "python" in tree:
        raise ConfigError(
            f"{resume} was made by coterie.simulate: continue it from Python with "
            "simulate(..., directory=..., resume=True)"
        )
    run_anew(tree, {key: flags[key] for key in free if key != "alone"})
    if flags["alone"]:
        assign(tree, FLAGS["alone"], True)
    assign_texts(tree, ends)
    asked, done = parse(tree).run.rounds, rounds_done(resume)
    if asked < done:
        if flags["rounds"] is not None:
            raise ConfigError(
                f"--rounds {asked}: the run in {resume} has {done} rounds already; ask for more, "
                "or leave --rounds out"
            )
        assign(tree, "run.rounds", done)  # it was continued beyond its configuration before
    return tree


def rounds_done(place: Path) -> int:
    """How many rounds the run in this folder has saved."""
    from coterie.run.rundir import RunDir

    return RunDir(place).saved()


def _how_to_go_on(place: Path, more: str) -> str:
    how = f"coterie run --resume {shlex.quote(str(place))}{more}"
    if any((place / "checkpoints").glob("*.json")):
        return f"stopped. Finished rounds are saved; continue with: {how}"
    if (place / "config.toml").exists():
        return f"stopped before the first round was saved; begin it again with: {how}"
    return f"stopped before anything was saved in {place}; start again in another folder"


app.add_typer(federation.keys, name="keys")
app.command()(federation.serve)
app.command()(federation.join)
app.command()(comparing.compare)
app.command()(grouping.groups)
app.command(hidden=True, deprecated=True)(grouping.probe)
app.command()(live.watch)
app.command()(seeing.report)


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, in full, or a combination as in ifca+ditto.")
    ] = None,
) -> None:
    """List the methods, or explain one, or what each part of a combination brings."""
    from coterie.methods import METHODS, find, make
    from coterie.report import explain
    from coterie.report.tables import plain_listing
    from coterie.run.presets import PRESETS, described

    if name is None:
        show(explain.method_listing([explain.explain(n, f) for n, f in METHODS.items()]))
        about = {name: preset.about for name, preset in PRESETS.items()}
        show(plain_listing("Presets: a method with certain settings, used by name", about))
        return
    if name in PRESETS:
        for line in described(name):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    wide = out.is_terminal or "COLUMNS" in os.environ
    page = Console(width=min(out.width, 100) if wide else 100, file=out.file)
    names = name.split("+")
    if len(names) == 1:
        explain.print_explanation(page, explain.explain(name, find(name)))
        return
    parts = explain.combination({part: find(part) for part in names})
    made = make(name, {p.name: 1 for part in parts for p in part.parameters if p.default is None})
    explain.print_combination(page, name, parts, explain.secure_words(made))


@app.command()
def scenarios(
    name: Annotated[str | None, typer.Argument(help="One scenario, in full.")] = None,
    folder: Folder = None,
) -> None:
    """List the set-ups of papers' experiments, or show one with all its figures."""
    from coterie.report.scenario_tables import print_scenario, scenario_listing
    from coterie.run.scenarios import SCENARIOS, absent, stand_in
    from coterie.run.scenarios import scenario as find

    if name is None:
        used = {s.data: stand_in(s.data, folder) for s in SCENARIOS.values()}
        show(scenario_listing(list(SCENARIOS.values()), used))
        return
    chosen = find(name)
    other = stand_in(chosen.data, folder)
    print_scenario(out, chosen, "" if other == chosen.data else absent(chosen, other, folder))


@app.command()
def wire() -> None:
    """List the codecs, the clocks and the models of availability."""
    from coterie.door.availability import AVAILABILITIES
    from coterie.door.clock import CLOCKS
    from coterie.door.codec import CODECS
    from coterie.report.tables import plain_listing

    show(plain_listing("Codecs: --codec, wire.up, wire.down", CODECS))
    show(plain_listing("Clocks: --clock, clock.name", CLOCKS))
    show(plain_listing("Availability: availability.name", AVAILABILITIES))


@app.command("data")
def data_sets() -> None:
    """List the data sets."""
    from coterie.data import SETS
    from coterie.report.tables import listing

    show(listing("Data sets", SETS, skip=("folder",)))


@app.command()
def partitions() -> None:
    """List the partitions and shifts."""
    from coterie.data import PARTITIONS, SHIFTS
    from coterie.report.tables import listing

    hidden = ("labels", "clients", "seed", "x", "y", "group", "scene")
    show(listing("Partitions", PARTITIONS, skip=hidden))
    show(listing("Shifts between groups of clients", SHIFTS, skip=hidden))


@app.command()
def models() -> None:
    """List the models."""
    from coterie.models import MODELS
    from coterie.report.tables import listing

    show(listing("Models", MODELS, skip=("shape", "outputs")))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    client: Annotated[int, typer.Option(help="Whose model.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The file (default: client-ID.safetensors).")
    ] = None,
) -> None:
    """Write one client's model to a safetensors file."""
    from coterie.run.export import export_model, reopen

    target = to or Path(f"client-{client}.safetensors")
    export_model(reopen(run), client, target)
    out.print(f"client {client}'s model is in {escape(str(target))}", soft_wrap=True)


@app.command()
def admit(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    client: Annotated[
        Path,
        typer.Option(
            help="The newcomer's labelled data: .npz (x and y), .csv, or a folder with x.npy and "
            "y.npy."
        ),
    ],
    epochs: Annotated[int, typer.Option(help="Epochs that it adapts the model for.")] = 5,
    to: Annotated[
        Path | None, typer.Option("--to", help="The model's file (default: DATA.safetensors).")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="What is known of the newcomer: column=value, as in site=north."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
) -> None:
    """Let a new client join a run, adapt the model to its data, and write that to a file."""
    from coterie.report.tables import print_admitted
    from coterie.run.admit import (
        admit_client,
        export_admitted,
        newcomer_data,
        newcomer_metadata,
    )
    from coterie.run.evaluation import headline
    from coterie.run.export import check_target, reopen
    from coterie.run.rundir import finite

    target = to or Path(f"{client.resolve().stem}.safetensors")
    check_target(target)
    result = reopen(run)
    population = result.plan.population
    known = {**newcomer_metadata(client, run), **dict(map(_column, metadata or ()))}
    data = newcomer_data(client, run, population)
    admitted = admit_client(result, data, epochs, known)
    export_admitted(admitted, result, target)
    found = admitted.to_dict()
    if as_json:
        typer.echo(json.dumps(finite({**found, "model": str(target)})))
    else:
        print_admitted(out, found, headline(population.classes is None), target)


def _column(text: str) -> tuple[str, str]:
    column, value = (part.strip() for part in text.partition("=")[::2])
    if not column or not value:
        raise ConfigError(f"--metadata {text}: write column=value, as in site=north")
    return column, value


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    data: Annotated[Path, typer.Argument(help="Samples: .npy, .npz (array x) or .csv.")],
    client: Annotated[int, typer.Option(help="Whose model.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="A CSV file (default: the terminal).")
    ] = None,
) -> None:
    """Predict with one client's model."""
    from coterie.run.export import predictions, reopen

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
    """Options before any command."""


def main() -> None:
    """Run the command line; a mistake of the user is a sentence and an exit code."""
    try:
        with stoppable():
            app()
    except CoterieError as error:
        _complain(error)
    except KeyboardInterrupt:
        _complain(Interrupted("stopped"))
    except SystemExit as end:  # typer's own way to end, also upon Ctrl-C
        if end.code == Interrupted.exit_code:
            _complain(Interrupted("stopped"))
        raise


def _complain(error: CoterieError) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
