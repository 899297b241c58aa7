"""The command line."""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie import __version__
from coterie.deploy import commands as federation
from coterie.errors import ConfigError, CoterieError, Interrupted
from coterie.run.experiment import Watch
from coterie.run.stopping import heeding, stoppable, stopped_with

if TYPE_CHECKING:
    from coterie.run.scenarios import Chosen

app = typer.Typer(
    help="Federated learning among clients whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 2 configuration, 3 data, 4 run directory, 5 training, 6 engine, "
    "130 stopped by the user.",
)
out = Console()
err = Console(stderr=True)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A TOML file; flags and --set override it.")
]
DataSet = Annotated[str | None, typer.Option("--data", help="Data set (see `coterie data`).")]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", envvar="COTERIE_DATA", help="Where the data set's files are."),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
PartitionName = Annotated[str | None, typer.Option("--partition", help="See `coterie partitions`.")]
ShiftName = Annotated[str | None, typer.Option("--shift", help="See `coterie partitions`.")]
ModelName = Annotated[str | None, typer.Option("--model", help="See `coterie models`.")]
MethodName = Annotated[str | None, typer.Option("--method", help="See `coterie methods`.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Cohort = Annotated[str | None, typer.Option(help="Clients a round: a number, or a fraction.")]
Epochs = Annotated[int | None, typer.Option(help="Local epochs in a round.")]
BatchSize = Annotated[int | None, typer.Option(help="Local batch size.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum of local SGD.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="loop, pool or ray.")]
Workers = Annotated[int | None, typer.Option(help="Worker processes of the pool, or of Ray.")]
Address = Annotated[
    str | None,
    typer.Option(help="A Ray cluster: auto, or HOST:PORT (default: a Ray of its own, here)."),
]
Holdout = Annotated[
    int | None, typer.Option(help="Clients that stay outside and join after the last round.")
]
AdmitEpochs = Annotated[int | None, typer.Option(help="Epochs that those who join then adapt for.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, as in method.mu=0.01.")
]
CodecName = Annotated[
    str | None,
    typer.Option("--codec", help="How replies are encoded, as in qsgd (see `coterie wire`)."),
]
ClockName = Annotated[
    str | None, typer.Option("--clock", help="links or wireless: count simulated seconds.")
]
Target = Annotated[
    float | None, typer.Option(help="A score, as in 0.8: report what it took to reach it.")
]
SecureFlag = Annotated[
    bool, typer.Option("--secure", help="The server learns sums only: secure aggregation.")
]
EpsilonBudget = Annotated[
    float | None,
    typer.Option("--epsilon", help="A privacy budget, as in 8: noise is chosen to keep it."),
]
Reveal = Annotated[
    str | None,
    typer.Option("--reveal", help="What --secure lets through: final-layer (FedClust)."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
ScenarioName = Annotated[
    str | None,
    typer.Option("--scenario", help="A paper's set-up (see `coterie scenarios`); all else wins."),
]

_COMPARED = "local,fedavg,fedprox,fedper,ifca:k=4,oracle"
_FLAGS = {
    "data": "data.set",
    "folder": "data.folder",
    "clients": "data.clients",
    "partition": "partition.name",
    "shift": "shift.name",
    "model": "model.name",
    "method": "method.name",
    "rounds": "run.rounds",
    "cohort": "run.cohort",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.lr",
    "momentum": "train.momentum",
    "seed": "run.seed",
    "engine": "run.engine",
    "workers": "run.workers",
    "address": "run.address",
    "holdout": "run.holdout",
    "admit_epochs": "run.admit_epochs",
    "alone": "evaluation.alone",
    "codec": "wire.up",
    "clock": "clock.name",
    "target": "evaluation.target",
    "secure": "privacy.secure",
    "epsilon": "privacy.epsilon",
    "reveal": "privacy.reveal",
}


def resolve(config: Path | None, sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """A file, then flags, then --set: one tree of tables."""
    from coterie.run.config import assign, assign_text, assign_texts
    from coterie.run.toml import read_toml

    tree = read_toml(config) if config else {}
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        if flag == "folder" and "folder" in tree.get("data", {}) and _from_environment(value):
            continue  # the environment is only a default
        if flag == "cohort":
            assign_text(tree, f"run.cohort={value}")
        else:
            assign(tree, _FLAGS[flag], str(value) if isinstance(value, Path) else value)
    assign_texts(tree, sets or [])
    return tree


def _chosen(scenario: str | None, given: dict[str, Any]) -> Chosen | None:
    """The scenario with the user's own tables laid over it, if one was named."""
    if scenario is None:
        return None
    from coterie.run.scenarios import choose
    from coterie.run.scenarios import scenario as find

    return choose(find(scenario), given)


def _tell(chosen: Chosen | None) -> None:
    """Say that another data set is used than the scenario's."""
    if chosen is not None and chosen.warning:
        err.print(f"[yellow]note:[/] {escape(chosen.warning)}", highlight=False, soft_wrap=True)


def _from_environment(folder: Path) -> bool:
    given = any(a == "--folder" or a.startswith("--folder=") for a in sys.argv)
    return os.environ.get("COTERIE_DATA") == str(folder) and not given


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
    sets: Sets = None,
    scenario: ScenarioName = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also train each client alone, for its gain.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the run (default: runs/…).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run one method and keep the run in a directory."""
    from coterie.report.progress import progress
    from coterie.report.tables import print_paper, print_summary
    from coterie.run.config import experiment_of, parse
    from coterie.run.evaluation import headline
    from coterie.run.experiment import execute
    from coterie.run.scenarios import recall, remember

    flags = {k: v for k, v in locals().items() if k in _FLAGS}
    if resume is not None:
        tree = _resumed(resume, config or scenario, directory, sets, flags)
        about = recall(resume, tree)
    else:
        tree = resolve(config, sets, **flags)
        chosen = _chosen(scenario, tree)
        tree = tree if chosen is None else chosen.tree
        _tell(chosen)
        about = None if chosen is None else chosen.about()
    experiment = experiment_of(parse(tree))
    place = resume or directory or _new_directory(experiment.method.name)
    judged_by = headline(experiment.population.classes is None)
    name, total = experiment.method.name, experiment.settings.rounds
    more = f" --rounds {rounds}" if resume is not None and rounds is not None else ""
    shown = progress(err, name, total, judged_by, quiet)
    stopped = stopped_with(lambda: _how_to_go_on(place, more))
    with stopped, remember(place, about), shown as watch:
        result = execute(experiment, place, resume is not None, heeding(watch))
    if as_json:
        known = {} if about is None else {"scenario": about}
        typer.echo(json.dumps({**result.summary, **known, "directory": str(place)}))
    else:
        print_summary(out, result.summary, place)
        if about is not None:
            print_paper(out, about)


def _resumed(
    resume: Path, config: object, directory: Path | None, sets: Any, flags: dict[str, Any]
) -> dict[str, Any]:
    """The run's own configuration; only what cannot change its course may be given anew."""
    from coterie.run.config import assign, assign_texts, parse, run_anew
    from coterie.run.rundir import RunDir
    from coterie.run.toml import read_toml

    free = ("rounds", "engine", "workers", "address", "alone")
    ends = [text for text in sets or [] if text.strip().startswith("stop.")]
    more = config or directory or len(ends) < len(sets or [])
    _refuse_with_resume("run", bool(more), flags, *free, and_also=" and --set stop.…")
    tree = read_toml(RunDir.open(resume).config)
    if "python" in tree:
        raise ConfigError(
            f"{resume} was made by coterie.simulate: continue it from Python with "
            "simulate(..., directory=..., resume=True)"
        )
    run_anew(tree, {key: flags[key] for key in free if key != "alone"})
    if flags["alone"]:
        assign(tree, _FLAGS["alone"], True)
    assign_texts(tree, ends)
    asked, done = parse(tree).run.rounds, _rounds_done(resume)
    if asked < done:
        if flags["rounds"] is not None:
            raise ConfigError(
                f"--rounds {asked}: the run in {resume} has {done} rounds already; ask for more, "
                "or leave --rounds out"
            )
        assign(tree, "run.rounds", done)  # it was continued beyond its configuration before
    return tree


def _refuse_with_resume(
    what: str, more: bool, flags: dict[str, Any], *free: str, and_also: str = ""
) -> None:
    """With --resume nothing may be given that would change the course of what was begun."""
    given = [k for k, v in flags.items() if v is not None and v is not False and k not in free]
    given = [k for k in given if not (k == "folder" and _from_environment(flags[k]))]
    if more or given:
        *names, last = (f"--{name}" for name in free)
        raise ConfigError(
            f"--resume takes the configuration of the {what}; only {', '.join(names)} and "
            f"{last}{and_also} can be given with it"
        )


def _rounds_done(place: Path) -> int:
    names = [p.stem.rpartition("-")[2] for p in (place / "checkpoints").glob("round-*.json")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _new_directory(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = Path("runs") / f"{stamp}-{name}", 2
    while path.exists():
        path, number = Path("runs") / f"{stamp}-{name}-{number}", number + 1
    return path


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


@app.command()
def compare(
    config: ConfigFile = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with parameters as in ifca:k=4, separated by commas; all for every one. "
            f"(default: {_COMPARED}; oracle where the true groups are known; those of a "
            "scenario's table)"
        ),
    ] = None,
    data: DataSet = None,
    folder: Folder = None,
    clients: Clients = None,
    partition: PartitionName = None,
    shift: ShiftName = None,
    model: ModelName = None,
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
    sets: Sets = None,
    scenario: ScenarioName = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the runs (default: runs/…).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the comparison in this directory.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same clients and print them side by side."""
    from coterie.report.progress import progress
    from coterie.report.tables import comparison, left_out, paper_notes
    from coterie.run.compare import compare as compare_methods
    from coterie.run.compare import folder_of, go_on, prepare, read_abouts
    from coterie.run.config import Config, parse
    from coterie.run.scenarios import remember

    flags = {k: v for k, v in locals().items() if k in _FLAGS}
    abouts: dict[str, Any] = {}
    place = resume or directory or _new_directory("compare")

    def configure(title: str, name: str, parameters: dict[str, Any]) -> Config:
        tree = resolve(config, sets, **flags)
        pace = {k: v for k, v in tree.get("method", {}).items() if k.startswith("layer_")}
        tree["method"] = {"name": name, **pace, **parameters}
        scene = _chosen(scenario, tree)
        if scene is None:
            return parse(tree)
        if not abouts:
            _tell(scene)
        abouts[title] = scene.about()
        return parse(scene.tree)

    @contextmanager
    def watching(title: str, total: int, by: str) -> Iterator[Watch]:
        shown = progress(err, f"{title:12}", total, by, quiet)
        with remember(place / folder_of(title), abouts.get(title)), shown as watch:
            yield heeding(watch)

    how = f"coterie compare --resume {shlex.quote(str(place))}"
    with stopped_with(lambda: _how_to_compare_on(place, how)):
        if resume is not None:
            more = any((config, methods, sets, scenario, directory))
            _refuse_with_resume("comparison", more, flags, "engine", "workers", "address")
            abouts |= read_abouts(place)
            for title, about in abouts.items():  # also of what was finished and not yet marked
                with remember(place / folder_of(title), about):
                    pass
            made = go_on(place, watching, _note, engine=engine, workers=workers, address=address)
        else:
            text = methods or _of_the_table(scenario) or _COMPARED
            entries, population = prepare(text, configure, oracle_if_possible=methods is None)
            made = compare_methods(entries, population, place, watching, _note, abouts)
    told = {row["method"]: abouts[row["method"]] for row in made.rows if row["method"] in abouts}
    show(comparison(made.rows, made.judged_by, told))
    for line in (*left_out(made.left_out), *paper_notes(list(told.values()))):
        out.print(escape(line), highlight=False, soft_wrap=True)
    out.print(f"kept in {escape(str(place))}", soft_wrap=True)


def _note(title: str, reason: str) -> None:
    """Say at once which method is left out."""
    text = f"{title} is left out: {reason}"
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _how_to_compare_on(place: Path, how: str) -> str:
    from coterie.run.compare import PLAN

    if (place / PLAN).exists():
        return f"stopped. Finished methods are kept in {place}; continue with: {how}"
    return f"stopped before anything was saved in {place}"


def _of_the_table(scenario: str | None) -> str:
    """The methods of a scenario's table that there are, as --methods takes them."""
    if scenario is None:
        return ""
    from coterie.run.scenarios import scenario as find

    return ",".join(find(scenario).methods())


def show(table: Table) -> None:
    """A table on the terminal; elsewhere, where nobody's window is too narrow, in full width."""
    wide = out.is_terminal or "COLUMNS" in os.environ
    (out if wide else Console(width=1000, file=out.file)).print(table)


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
    from coterie.report.tables import print_scenario, scenario_listing
    from coterie.run.scenarios import SCENARIOS, stand_in
    from coterie.run.scenarios import scenario as find

    if name is None:
        used = {s.data: stand_in(s.data, folder) for s in SCENARIOS.values()}
        show(scenario_listing(list(SCENARIOS.values()), used))
        return
    chosen = find(name)
    print_scenario(out, chosen, stand_in(chosen.data, folder))


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
def probe(
    config: ConfigFile = None,
    data: DataSet = None,
    folder: Folder = None,
    clients: Clients = None,
    partition: PartitionName = None,
    shift: ShiftName = None,
    seed: Seed = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also write the picture to this HTML file.")
    ] = None,
) -> None:
    """Describe how much clients' data differ, with a picture."""
    from coterie.data import describe, label_table
    from coterie.report.data_figures import label_heatmap, target_boxes
    from coterie.report.tables import label_picture, target_picture
    from coterie.run.config import parse, population_of

    flags = {k: v for k, v in locals().items() if k in _FLAGS}
    tree = resolve(config, sets, **flags)
    chosen = _chosen(scenario, tree)
    _tell(chosen)
    population = population_of(parse(tree if chosen is None else chosen.tree))
    if population.classes is not None:
        counts = label_table(population)
        show(label_picture(counts, population.classes, population.groups))
        if picture is not None:
            label_heatmap(counts, population.classes, population.groups, picture)
    else:
        targets = [c.train.y.numpy() for c in population.clients]
        show(target_picture(targets, population.groups))
        if picture is not None:
            target_boxes(targets, population.groups, picture)
    if picture is not None:
        out.print(f"picture in {escape(str(picture))}", soft_wrap=True)
    for key, value in describe(population).items():
        if value is not None:
            out.print(f"[bold]{key.replace('_', ' ')}[/]: {_shown(value)}", soft_wrap=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
) -> None:
    """Let a new client join a run, adapt the model to its data, and write that to a file."""
    from coterie.report.tables import print_admitted
    from coterie.run.admit import admit_client, export_admitted, newcomer_data
    from coterie.run.evaluation import headline
    from coterie.run.export import check_target, reopen
    from coterie.run.rundir import finite

    target = to or Path(f"{client.resolve().stem}.safetensors")
    check_target(target)
    result = reopen(run)
    population = result.plan.population
    admitted = admit_client(result, newcomer_data(client, run, population), epochs)
    export_admitted(admitted, result, target)
    found = admitted.to_dict()
    if as_json:
        typer.echo(json.dumps(finite({**found, "model": str(target)})))
    else:
        print_admitted(out, found, headline(population.classes is None), target)


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
