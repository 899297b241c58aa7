"""Run several methods on the same clients, in one directory that can be resumed."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coterie.core.method import Method
from coterie.core.schema import Config
from coterie.core.tree import write_atomic
from coterie.data import Population
from coterie.errors import ConfigError, CoterieError, Interrupted, RunDirError, TrainingError
from coterie.experiment.compare.entries import (
    Note,
    PlannedRun,
    Populations,
    checked_runs,
    entries_of,
    folder_of,
    made_in_python,
    more_seeds,
)
from coterie.experiment.compare.jobs import Job, Ready, at_once, carry_out
from coterie.experiment.compare.own import (
    Model,
    in_words,
    labelled,
    named_methods,
    own_runs,
    varied_methods,
)
from coterie.experiment.compare.plan import (
    ABOUTS,
    PLAN,
    Abouts,
    asks_engine,
    read_abouts,
    read_plan,
    read_tune,
    write_json,
    write_plan,
)
from coterie.experiment.compare.sweep import (
    USUAL,
    Assignments,
    NamedMethod,
    Sweep,
    every_method,
    method_list,
    methods_of,
    of_table,
)
from coterie.experiment.compare.tuning import Tuning, check_tuned, check_validates
from coterie.experiment.config import assign, change_run_settings, displace, parse
from coterie.experiment.experiment import Watch, execute, with_settings
from coterie.experiment.user_code import admitted, digests_of
from coterie.results.comparison import Comparison
from coterie.results.evaluation import main_score
from coterie.results.rows import agreement, read_kept, row_of
from coterie.results.rundir import RunDir, to_csv
from coterie.results.toml import read_toml
from coterie.results.watchers import Look

__all__ = [
    "PLAN",
    "Comparison",
    "agreement",
    "compare",
    "every_method",
    "folder_of",
    "go_on",
    "method_list",
    "read_abouts",
    "run_all",
]

ROWS, TABLE, MEANS = "comparison.json", "comparison.csv", "comparison-means.csv"


def _say_nothing(name: str, reason: str) -> None:
    """Ignore methods that are left out."""


# --- from Python ---------------------------------------------------------------------------------


def compare(
    clients: Config | Mapping[str, Any] | str | Path | Sequence[Any] | Population,
    methods: Sequence[str | Method] | str | Method | None = None,
    seeds: int | Sequence[int] | None = None,
    partitions: Sequence[str] | str | None = None,
    shifts: Sequence[str] | str | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    directory: str | Path | None = None,
    jobs: int | None = None,
    track: Sequence[str] | str = (),
    *,
    models: Mapping[str, Model] | Sequence[Model] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    resume: bool = False,
    **settings: Any,
) -> Comparison:
    """Run several methods on the same clients, with several seeds and settings.

    ``clients`` are your own, as for ``simulate``, or a configuration: a TOML file, nested dicts, or
    a ``Config``, which may have a table ``[sweep]`` that the arguments override. ``methods`` are
    names, with parameters as in "ifca:k=4", or methods such as ``coterie.ifca(k=4)``. On own
    clients, ``models`` are one or several, by label or in a list, and ``settings`` are all others
    that ``simulate`` takes (``rounds``, ``lr``, ``loss``, ``metrics``, …).

    ``tune``, as in ``{"lr": [0.01, 0.05, 0.1]}``, runs every method with all of these values and
    the first seed, and uses for each the value with the highest score on validation data; the table
    says what was chosen and what it cost.

    The runs are kept in ``directory``, if it is given, and ``resume`` continues what was stopped
    there. A run that fails is listed in ``failed`` of the result, and does not stop the others.
    ``track`` names trackers, "tensorboard", "mlflow" or "wandb", for every run.

    >>> quick = {"data": {"clients": 4, "samples": 200}, "run": {"rounds": 1, "engine": "loop"}}
    >>> comparison = compare(quick, methods=["local", "fedavg"], seeds=2)
    >>> [(row["method"], row["seed"]) for row in comparison.rows]
    [('local', 0), ('fedavg', 0), ('local', 1), ('fedavg', 1)]
    """
    trackers = _tracker_names(track, directory)
    if resume and directory is None:
        raise ConfigError("resume needs the directory of the comparison, as in directory='runs/a'")
    named, objects = named_methods(methods)
    arguments: dict[str, Any] = {"seeds": seeds, "partitions": partitions, "shifts": shifts}
    arguments |= {"vary": vary, "jobs": jobs, "tune": tune}
    sweep = of_table({k: v for k, v in arguments.items() if v is not None})
    populations = Populations()
    if isinstance(clients, Config | Mapping | str | Path):
        if settings:
            raise ConfigError(
                f"{next(iter(settings))}: with a configuration, settings are keys of it; as "
                "arguments they go with your own clients"
            )
        named = [in_words(objects[m[0]]) or _unnamed(m[0]) if m[0] in objects else m for m in named]
        tree, sweep = _configured(clients, sweep, models)
        named = named if methods is not None else method_list(sweep.methods or USUAL)
        usual = methods is None and not sweep.methods

        def configure(method: NamedMethod, assignments: Assignments) -> Config:
            return parse(set_up(tree, method, assignments))

        methods_now = methods_of(sweep, named)
        entries = entries_of(sweep, configure, populations, usual, methods_now)
        # A Config does not tell defaults from choices.
        defaults = Config().run if isinstance(clients, Config) else None
        engine_asked = asks_engine(tree, defaults)
    else:
        named = varied_methods(named, objects, sweep)
        by_label = labelled(models)
        entries = own_runs(
            clients, named, objects, methods is None, sweep, by_label, settings, set_up
        )
        engine_asked = asks_engine({"run": settings})
    check_tuned(sweep, named)
    # Runs that are not kept live as long as the comparison, which can draw them.
    scratch = tempfile.TemporaryDirectory(prefix="coterie-") if directory is None else None
    run_dir = Path(directory if scratch is None else scratch.name)  # type: ignore[arg-type]
    comparison = run_all(
        entries,
        populations,
        run_dir,
        Look(),
        sweep.jobs,
        engine_asked=engine_asked,
        track=trackers,
        resume=resume,
        tune=sweep.tune,
    )
    return comparison if scratch is None else replace(comparison, directory=None, scratch=scratch)


def _configured(
    config: Config | Mapping[str, Any] | str | Path, sweep: Sweep, models: Any
) -> tuple[dict[str, Any], Sweep]:
    """The tables of a configuration, and the sweep of its table and the arguments."""
    if isinstance(config, str | Path):
        config = read_toml(Path(config))
    tree = config.model_dump() if isinstance(config, Config) else copy.deepcopy(dict(config))
    if models is not None:
        names = [models] if isinstance(models, str) else list(models)
        if isinstance(models, Mapping) or not all(isinstance(name, str) for name in names):
            raise ConfigError("models: with a configuration, give names, as in ['mlp', 'logistic']")
        sweep = replace(sweep, vary={"model.name": tuple(names), **sweep.vary})
    return tree, sweep.over(of_table(tree.pop("sweep", {})))


def _unnamed(title: str) -> NamedMethod:
    raise ConfigError(
        f"method {title} was defined in this program and cannot be described in a configuration: "
        "give its location, as in 'mine.py:my_method', or compare on your own clients"
    )


def _tracker_names(track: Any, directory: object) -> list[str]:
    from coterie.tracking import check

    names = [track] if isinstance(track, str) else list(track)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"track = {name!r}: a comparison takes names, as in ['tensorboard'], since every "
                "run has its own trackers"
            )
    check(names)
    if names and directory is None:
        raise ConfigError("track needs a directory for the runs, as in directory='runs/first'")
    return names


def set_up(
    base: Mapping[str, Any], method: NamedMethod, assignments: Assignments
) -> dict[str, Any]:
    """The tables of a configuration for one of the methods, with some keys set.

    The table ``[method]`` applies to the method that it names, but its ``layer_*`` keys to all. A
    method may have its own training settings: ``scaffold:train.lr=0.01``.
    """
    tree = copy.deepcopy(dict(base))
    title, name, with_method = method
    training = {k: v for k, v in with_method.items() if k.startswith("train.")}
    parameters = {k: v for k, v in with_method.items() if k not in training}
    in_config = tree.get("method", {})
    same_method = in_config.get("name", Config().method.name) == name
    inherited = {k: v for k, v in in_config.items() if same_method or k.startswith("layer_")}
    tree["method"] = {**inherited, "name": name}
    varied = [key.removeprefix("method.") for key, _ in assignments]
    displace(tree, [*parameters, *varied])
    tree["method"] |= parameters
    for key, value in assignments:
        if key in training:
            raise ConfigError(f"vary {key}: {title} sets it already; leave out one of the two")
        assign(tree, key, value)
    for key, value in training.items():
        assign(tree, key, value)
    return admitted(tree)


# --- running it ----------------------------------------------------------------------------------


def run_all(
    entries: Sequence[PlannedRun],
    clients: Populations,
    directory: Path,
    display: Look,
    jobs: int | None = None,
    note: Note = _say_nothing,
    abouts: Abouts | None = None,
    engine_asked: bool = True,
    track: Sequence[str] = (),
    resume: bool = False,
    tune: Mapping[str, Sequence[Any]] | None = None,
) -> Comparison:
    """Run all entries in a new directory, or with ``resume`` in one that has some of them.

    ``note`` receives every method that is left out, and why. ``abouts`` describe a scenario, by the
    name of a run; they are kept for a resume. If no engine was chosen, several runs at the same
    time each use the loop engine, with the same bits. ``track`` names the trackers of each run.
    """
    if (directory / PLAN).exists() and not resume:
        again = f"coterie compare --resume {directory}"
        if made_in_python(entries):
            again = f"compare(..., directory={str(directory)!r}, resume=True)"
        raise RunDirError(
            f"{directory} already holds a comparison. Continue it with: {again}, or choose another "
            "directory with --dir (directory= in Python)"
        )
    kept, left_out = checked_runs(entries, clients, note, check_validates if tune else None)
    at_once(jobs, len(kept), engine_asked, kept[0].config.run)  # refuse before creating files
    if not (resume and directory.exists()):
        RunDir.create(directory)
    codes = [digests_of(entry.config.model_dump()) for entry in kept]
    RunDir(directory).write_code({name: digest for code in codes for name, digest in code.items()})
    if abouts:
        write_json(directory / ABOUTS, {e.name: abouts[e.name] for e in kept})
    with _locked(directory):
        write_plan(directory, kept, left_out, engine_asked, tune)
        return _run(directory, kept, clients, left_out, display, note, jobs, engine_asked, track)


def go_on(
    directory: Path,
    display: Look,
    jobs: int | None = None,
    note: Note = _say_nothing,
    seeds: Sequence[int] = (),
    track: Sequence[str] = (),
    **changes: Any,
) -> Comparison:
    """Resume a comparison: read the finished runs, and continue the others.

    ``seeds`` are additional seeds of a sweep; ``changes`` are settings of ``[run]`` that do not
    change results.
    """
    entries, left_out, engine_asked = read_plan(directory)
    for entry in entries:
        if not entry.in_python:
            admitted(entry.config.model_dump(), RunDir(directory).read_code())
    clients = Populations()
    with _locked(directory):
        if seeds and (further := more_seeds(entries, seeds)):
            added, refused = checked_runs(further, clients, note)
            entries, left_out = [*entries, *added], {**left_out, **refused}
            if abouts := read_abouts(directory):
                about_of_row = {e.row: abouts[e.name] for e in entries if e.name in abouts}
                write_json(directory / ABOUTS, {e.name: about_of_row[e.row] for e in entries})
            write_plan(directory, entries, left_out, engine_asked, read_tune(directory))
        if any(value is not None for value in changes.values()):
            entries, engine_asked = [_changed(entry, changes) for entry in entries], True
        return _run(directory, entries, clients, left_out, display, note, jobs, engine_asked, track)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory against other processes."""
    run_dir = RunDir(directory)
    run_dir.lock()
    try:
        yield
    finally:
        run_dir.unlock()


def _changed(entry: PlannedRun, changes: Mapping[str, Any]) -> PlannedRun:
    tree = entry.config.model_dump()
    change_run_settings(tree, changes)
    return replace(entry, config=parse(tree))


def _run(
    directory: Path,
    entries: Sequence[PlannedRun],
    clients: Populations,
    left_out: Mapping[str, str],
    display: Look,
    note: Note,
    jobs: int | None,
    engine_asked: bool,
    track: Sequence[str],
) -> Comparison:
    """Do the unfinished runs of a directory whose plan is written, then write its tables."""
    tuning = Tuning.of(directory, read_tune(directory))
    tried = tuning.candidates(entries)
    unfinished = [e for e in entries if not _is_done(directory / e.folder)]
    if unfinished and made_in_python(entries) and unfinished[0].build is None:
        raise ConfigError(
            f"{directory} was created by coterie.compare on clients in Python: continue it from "
            "Python with compare(..., directory=..., resume=True)"
        )
    abouts = read_abouts(directory)
    _remember(directory, entries, abouts)
    candidates = [run for runs in tried.values() for run in runs]
    run_now = [e for e in candidates if not _is_done(directory / e.folder)]
    runs = len(run_now) + len(unfinished) - len(tried)  # a chosen run is the first seed's
    count = at_once(jobs, runs, engine_asked, entries[0].config.run)
    display.expect(runs, count, entries[0].seed is not None)

    def do(these: Sequence[PlannedRun], later: Sequence[PlannedRun]) -> dict[str, CoterieError]:
        """Do runs, before others that may have the same clients."""
        in_loop = not engine_asked and count > 1
        last = {clients.key(e.config): e.name for e in [*these, *later]}  # on the same clients
        begun = [
            Job(
                e.name,
                _begin(e, directory, clients, e.name in last.values(), abouts, in_loop, track),
            )
            for e in these
        ]
        return carry_out(begun, count, display)

    hopeless: dict[str, CoterieError] = {}
    if tried:
        hopeless = tuning.choose(tried, entries, do(run_now, unfinished))
        entries = [tuning.chosen(entry) for entry in entries]
        write_plan(directory, entries, left_out, engine_asked, tuning.grid)
        _remember(directory, entries, abouts)
    unfinished = [e for e in entries if not _is_done(directory / e.folder)]
    failed = do([e for e in unfinished if e.row not in hopeless], ())
    failed |= {e.name: hopeless[e.row] for e in unfinished if e.row in hopeless}
    refused, stopped = dict(left_out), dict[str, str]()
    for entry in entries:
        error = failed.get(entry.name)
        if isinstance(error, Interrupted):
            stopped[entry.name] = str(failed.pop(entry.name))
        elif entry.optional and isinstance(error, ConfigError | TrainingError):
            refused[entry.name] = str(failed.pop(entry.name))
            note(entry.name, str(error))
    missing = {*refused, *failed, *stopped}
    done = [entry for entry in entries if entry.name not in missing]
    if not done:
        raise _nothing(failed, stopped, refused)
    papers: dict[str, Mapping[str, Any]] = {}
    for entry in done:
        if entry.name in abouts:
            papers.setdefault(entry.row, abouts[entry.name])
    unfilled = Comparison((), "", refused, failed, stopped, papers=papers)
    if tuning.rows:
        unfilled = replace(unfilled, tuning=tuning.record)
    elif len({e.title for e in done}) > 1 and "train.lr" not in entries[0].settings:
        rates = {e.config.train.lr for e in done}
        unfilled = replace(unfilled, learning_rate=rates.pop() if len(rates) == 1 else None)
    return _table(directory, done, unfilled)


def _begin(
    entry: PlannedRun,
    directory: Path,
    clients: Populations,
    last: bool,
    abouts: Abouts,
    in_loop: bool,
    track: Sequence[str],
) -> Callable[[], Ready]:
    """A function that reads the clients of a run; the last run on them frees the memory."""

    def ready() -> Ready:
        experiment = entry.experiment(clients)
        if last and entry.build is None:
            clients.forget(entry.config)

        def work(watch: Watch) -> None:
            from coterie.experiment.scenarios import remember
            from coterie.tracking import tracking

            run = RunDir(directory / entry.folder)
            if not run.config.exists():
                run.discard()  # nothing was saved before it was stopped
            settings = {"engine": "loop", "workers": None} if in_loop else {}
            # Create trackers in the process of the run: they have threads and open files.
            trackers = tracking(track, run.path, partial(_tell, entry.name), within=directory)
            with remember(run.path, abouts.get(entry.name)):
                execute(
                    with_settings(experiment, **settings),
                    run.path,
                    run.config.exists(),
                    watch,
                    track=trackers,
                )

        judged_by = main_score(experiment.population.classes is None)
        return Ready(entry.config.run.rounds, judged_by, work)

    return ready


def _tell(name: str, text: str) -> None:
    print(f"note: {name}: {text}", file=sys.stderr)


def _is_done(directory: Path) -> bool:
    """Whether a run is finished and the files for its row are readable."""
    if not RunDir(directory).result.exists():
        return False
    try:
        read_kept(directory)
    except RunDirError:  # resumed from its last checkpoint, it writes its files again
        return False
    return True


def _remember(directory: Path, entries: Sequence[PlannedRun], abouts: Abouts) -> None:
    """Write the scenario to the directories of finished runs that lack it."""
    from coterie.experiment.scenarios import remember
    from coterie.experiment.scenarios.scenario import NOTE

    for entry in entries:
        if entry.name in abouts and not (directory / entry.folder / NOTE).exists():
            with remember(directory / entry.folder, abouts[entry.name]):
                pass


def _nothing(
    failed: Mapping[str, CoterieError], stopped: Mapping[str, str], refused: Mapping[str, str]
) -> CoterieError:
    """The error of a comparison without a single finished run."""
    for name, error in failed.items():
        return type(error)(f"{name}: {error}" if len(failed) > 1 else str(error))
    if stopped:
        return Interrupted(next(iter(stopped.values())))
    return ConfigError(next(iter(refused.values())))


# --- tables of the directory ---------------------------------------------------------------------


def _table(directory: Path, entries: Sequence[PlannedRun], unfilled: Comparison) -> Comparison:
    """Fill the rows of the comparison from the files of finished runs, and write its tables."""
    kept = {e.name: read_kept(directory / e.folder) for e in entries}
    alone = {  # of several, the first: their parameters do not matter
        (repr(dict(e.settings)), e.seed): kept[e.name][1] for e in reversed(entries) if _is_local(e)
    }
    rows: list[dict[str, Any]] = []
    for e in entries:
        local = None if _is_local(e) else alone.get((repr(dict(e.settings)), e.seed))
        row = row_of(e.title, *kept[e.name], local)
        key = {} if e.seed is None else {"seed": e.seed, **e.settings}
        rows.append({"method": e.title, **key, **row})
    warnings: dict[str, list[str]] = {}
    for e in entries:
        known = warnings.setdefault(e.row, [])
        known += [t for t in kept[e.name][0].get("warnings") or () if t not in known]
    comparison = replace(
        unfilled,
        rows=rows,
        warnings={row: texts for row, texts in warnings.items() if texts},
        judged_by=str(kept[entries[0].name][0]["judged_by"]),
        swept=entries[0].seed is not None,
        axes=list(entries[0].settings),
        directory=directory,
    )
    write_json(directory / ROWS, comparison.to_dict())
    texts = {TABLE: to_csv(_even(rows)), "comparison.md": comparison.markdown()}
    texts["comparison.tex"] = comparison.latex()
    if comparison.swept:
        texts[MEANS] = to_csv(_even(comparison.means))
    for name, text in texts.items():
        write_atomic(directory / name, text.encode(), durable=False)
    return comparison


def _is_local(entry: PlannedRun) -> bool:
    return entry.config.method.name == "local"


def _even(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that all have the same keys: not every setting has a clock or noise."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key) for key in keys} for row in rows]
