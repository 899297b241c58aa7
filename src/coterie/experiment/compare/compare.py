"""Several methods on the same clients, kept in one folder; what was stopped can be continued."""

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

from coterie.core.schema import Config
from coterie.core.tree import write_atomic
from coterie.errors import ConfigError, CoterieError, Interrupted, RunDirError, TrainingError
from coterie.experiment.compare.entries import (
    Entry,
    Note,
    Populations,
    checked,
    entries_of,
    experiment_for,
    folder_of,
    more_seeds,
)
from coterie.experiment.compare.jobs import Job, Ready, at_once, carry_out
from coterie.experiment.compare.plan import (
    ABOUTS,
    PLAN,
    Abouts,
    asks_engine,
    read_abouts,
    read_plan,
    write_json,
    write_plan,
)
from coterie.experiment.compare.sweep import Asked, Assignments, every_method, method_list, of_table
from coterie.experiment.config import assign, change_run_settings, displace, parse
from coterie.experiment.experiment import Watch, execute, with_settings
from coterie.experiment.user_code import admitted, digests_of
from coterie.results.comparison import Comparison
from coterie.results.evaluation import headline
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
    """Nobody is told of what is left out."""


# --- from Python ---------------------------------------------------------------------------------


def compare(
    config: Config | Mapping[str, Any] | str | Path,
    methods: Sequence[str] | str | None = None,
    seeds: int | Sequence[int] | None = None,
    partitions: Sequence[str] | str | None = None,
    shifts: Sequence[str] | str | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    directory: str | Path | None = None,
    jobs: int | None = None,
    track: Sequence[str] | str = (),
) -> Comparison:
    """Run several methods on the same clients, with several seeds and settings.

    ``config`` is a TOML file, nested dicts, or a ``Config``; it may have a table ``[sweep]``, and
    what is given here wins over that. The runs are kept in ``directory``, if there is one. A run
    that fails is in ``failed`` of what comes back, and the others are done. ``track`` are names of
    trackers, "tensorboard" or "mlflow", for every run.

    >>> quick = {"data": {"clients": 4, "samples": 200}, "run": {"rounds": 1, "engine": "loop"}}
    >>> made = compare(quick, methods=["local", "fedavg"], seeds=2)
    >>> [(row["method"], row["seed"]) for row in made.rows]
    [('local', 0), ('fedavg', 0), ('local', 1), ('fedavg', 1)]
    """
    tracked = _tracker_names(track, directory)
    whole = isinstance(config, Config)
    if isinstance(config, str | Path):
        config = read_toml(Path(config))
    tree = config.model_dump() if isinstance(config, Config) else copy.deepcopy(dict(config))
    below = of_table(tree.pop("sweep", {}))
    asked: dict[str, Any] = {"methods": methods, "seeds": seeds, "partitions": partitions}
    asked |= {"shifts": shifts, "vary": vary, "jobs": jobs}
    sweep = of_table({k: v for k, v in asked.items() if v is not None}).over(below)

    def configure(method: Asked, assignments: Assignments) -> Config:
        return parse(set_up(tree, method, assignments))

    people = Populations()
    entries = entries_of(sweep, configure, people, oracle_if_possible=not sweep.methods)
    usual = Config().run if whole else None  # a whole configuration does not say what was asked
    with tempfile.TemporaryDirectory(prefix="coterie-") as scratch:
        place = Path(scratch, "comparison") if directory is None else Path(directory)
        made = run_all(
            entries,
            people,
            place,
            Look(),
            sweep.jobs,
            engine_asked=asks_engine(tree, usual),
            track=tracked,
        )
    return made if directory is not None else replace(made, directory=None)


def _tracker_names(track: Any, directory: object) -> list[str]:
    from coterie.tracking import check

    names = [track] if isinstance(track, str) else list(track)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"track = {name!r}: a comparison takes names, as in ['tensorboard'], for every run "
                "gets trackers of its own"
            )
    check(names)
    if names and directory is None:
        raise ConfigError("track needs a place for the runs, as in directory='runs/first'")
    return names


def set_up(base: Mapping[str, Any], method: Asked, assignments: Assignments) -> dict[str, Any]:
    """The tables of a configuration for one of the methods, with some keys set.

    What the table ``[method]`` says counts for the method that it names; ``layer_*`` for all. A
    method may have its own training: ``scaffold:train.lr=0.01``.
    """
    tree = copy.deepcopy(dict(base))
    title, name, given_with_it = method
    training = {k: v for k, v in given_with_it.items() if k.startswith("train.")}
    parameters = {k: v for k, v in given_with_it.items() if k not in training}
    given = tree.get("method", {})
    its_own = given.get("name", Config().method.name) == name
    kept = {k: v for k, v in given.items() if its_own or k.startswith("layer_")}
    tree["method"] = {**kept, "name": name}
    set_later = [key.removeprefix("method.") for key, _ in assignments]
    displace(tree, [*parameters, *set_later])
    tree["method"] |= parameters
    for key, value in assignments:
        if key in training:
            raise ConfigError(f"vary {key}: {title} says it itself; leave one of the two out")
        assign(tree, key, value)
    for key, value in training.items():
        assign(tree, key, value)
    return admitted(tree)


# --- running it ----------------------------------------------------------------------------------


def run_all(
    entries: Sequence[Entry],
    people: Populations,
    directory: Path,
    look: Look,
    jobs: int | None = None,
    note: Note = _say_nothing,
    abouts: Abouts | None = None,
    engine_asked: bool = True,
    track: Sequence[str] = (),
) -> Comparison:
    """Run all entries, in a new folder.

    ``note`` is told of every method that is left out, and why. ``abouts`` tell of a scenario, by
    name; they are kept for whoever continues. If no engine was asked for, several runs at a time
    are each done by the loop: the bits are the same. ``track`` are names of trackers, of which each
    run gets its own.
    """
    if (directory / PLAN).exists():
        raise RunDirError(
            f"{directory} already holds a comparison. Continue it with: coterie compare --resume "
            f"{directory}, or choose another folder with --dir"
        )
    kept, left_out = checked(entries, people, note)
    at_once(jobs, len(kept), engine_asked, kept[0].config.run)  # refused before there is a folder
    RunDir.create(directory)
    codes = [digests_of(entry.config.model_dump()) for entry in kept]
    RunDir(directory).write_code({what: own for code in codes for what, own in code.items()})
    if abouts:
        write_json(directory / ABOUTS, {e.name: abouts[e.name] for e in kept})
    with _locked(directory):
        write_plan(directory, kept, left_out, engine_asked)
        return _run(directory, kept, people, left_out, look, note, jobs, engine_asked, track)


def go_on(
    directory: Path,
    look: Look,
    jobs: int | None = None,
    note: Note = _say_nothing,
    seeds: Sequence[int] = (),
    track: Sequence[str] = (),
    **changes: Any,
) -> Comparison:
    """Continue the comparison of a folder: what is finished is read, what was stopped resumed.

    ``seeds`` are further ones for a sweep; ``changes`` settings of the table ``[run]`` that leave
    results as they are.
    """
    entries, left_out, engine_asked = read_plan(directory)
    for entry in entries:
        admitted(entry.config.model_dump(), RunDir(directory).read_code())
    people = Populations()
    with _locked(directory):
        if seeds and (more := more_seeds(entries, seeds)):
            added, refused = checked(more, people, note)
            entries, left_out = [*entries, *added], {**left_out, **refused}
            if abouts := read_abouts(directory):
                known = {e.place: abouts[e.name] for e in entries if e.name in abouts}
                write_json(directory / ABOUTS, {e.name: known[e.place] for e in entries})
            write_plan(directory, entries, left_out, engine_asked)
        if any(value is not None for value in changes.values()):
            entries, engine_asked = [_changed(entry, changes) for entry in entries], True
        return _run(directory, entries, people, left_out, look, note, jobs, engine_asked, track)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Nobody else is at work in this folder meanwhile."""
    place = RunDir(directory)
    place.lock()
    try:
        yield
    finally:
        place.unlock()


def _changed(entry: Entry, changes: Mapping[str, Any]) -> Entry:
    tree = entry.config.model_dump()
    change_run_settings(tree, changes)
    return replace(entry, config=parse(tree))


def _run(
    directory: Path,
    entries: Sequence[Entry],
    people: Populations,
    left_out: Mapping[str, str],
    look: Look,
    note: Note,
    jobs: int | None,
    engine_asked: bool,
    track: Sequence[str],
) -> Comparison:
    """Do what is left to do in a folder whose plan is written, then write the table."""
    left = [e for e in entries if not _is_done(directory / e.folder)]
    count = at_once(jobs, len(left), engine_asked, entries[0].config.run)
    abouts = read_abouts(directory)
    _remember(directory, entries, abouts)
    in_loop = not engine_asked and count > 1
    last = {people.key(e.config): e.name for e in left}  # who is the last to need these clients
    todo = [
        Job(e.name, _begin(e, directory, people, e.name in last.values(), abouts, in_loop, track))
        for e in left
    ]
    look.expect(len(left), count, entries[0].seed is not None)
    failed = carry_out(todo, count, look)
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
            papers.setdefault(entry.place, abouts[entry.name])
    return _table(directory, done, Comparison((), "", refused, failed, stopped, papers=papers))


def _begin(
    entry: Entry,
    directory: Path,
    people: Populations,
    last: bool,
    abouts: Abouts,
    in_loop: bool,
    track: Sequence[str],
) -> Callable[[], Ready]:
    """What makes a run ready: its clients are read, and forgotten after the last that has them."""

    def ready() -> Ready:
        population = people.of(entry.config)
        if last:
            people.forget(entry.config)

        def work(watch: Watch) -> None:
            from coterie.experiment.scenarios import remember
            from coterie.tracking import tracking

            run = RunDir(directory / entry.folder)
            if not run.config.exists():
                run.discard()  # stopped before anything was saved there, if it was begun at all
            experiment = experiment_for(entry.config, population)
            if in_loop:
                experiment = with_settings(experiment, engine="loop", workers=None)
            # Made here, in the process that runs: trackers have threads and files of their own.
            tracked = tracking(track, run.path, partial(_tell, entry.name), within=directory)
            with remember(run.path, abouts.get(entry.name)):
                execute(experiment, run.path, run.config.exists(), watch, track=tracked)

        return Ready(entry.config.run.rounds, headline(population.classes is None), work)

    return ready


def _tell(name: str, text: str) -> None:
    print(f"note: {name}: {text}", file=sys.stderr)


def _is_done(place: Path) -> bool:
    """Whether a run is finished, and all that its row needs can be read."""
    if not RunDir(place).result.exists():
        return False
    try:
        read_kept(place)
    except RunDirError:  # it goes on from its last checkpoint, and writes its files again
        return False
    return True


def _remember(directory: Path, entries: Sequence[Entry], abouts: Abouts) -> None:
    """Runs that were finished and not yet told of which scenario they are get to know it."""
    from coterie.experiment.scenarios import remember
    from coterie.experiment.scenarios.scenario import NOTE

    for entry in entries:
        if entry.name in abouts and not (directory / entry.folder / NOTE).exists():
            with remember(directory / entry.folder, abouts[entry.name]):
                pass


def _nothing(
    failed: Mapping[str, CoterieError], stopped: Mapping[str, str], refused: Mapping[str, str]
) -> CoterieError:
    """Why there is no table at all."""
    for name, error in failed.items():
        return type(error)(f"{name}: {error}" if len(failed) > 1 else str(error))
    if stopped:
        return Interrupted(next(iter(stopped.values())))
    return ConfigError(next(iter(refused.values())))


# --- what the folder remembers -------------------------------------------------------------------


def _table(directory: Path, entries: Sequence[Entry], found: Comparison) -> Comparison:
    """The rows of what is finished, from the files that the runs left; they are written, too."""
    kept = {e.name: read_kept(directory / e.folder) for e in entries}
    alone = {  # the first of several: their parameters are of no consequence
        (repr(dict(e.settings)), e.seed): kept[e.name][1] for e in reversed(entries) if _is_local(e)
    }
    rows: list[dict[str, Any]] = []
    for e in entries:
        others = None if _is_local(e) else alone.get((repr(dict(e.settings)), e.seed))
        row = row_of(e.title, *kept[e.name], others)
        told = {} if e.seed is None else {"seed": e.seed, **e.settings}
        rows.append({"method": e.title, **told, **row})
    made = replace(
        found,
        rows=rows,
        judged_by=str(kept[entries[0].name][0]["judged_by"]),
        swept=entries[0].seed is not None,
        axes=list(entries[0].settings),
        directory=directory,
    )
    write_json(directory / ROWS, made.to_dict())
    texts = {TABLE: to_csv(_even(rows)), "comparison.md": made.markdown()}
    texts["comparison.tex"] = made.latex()
    if made.swept:
        texts[MEANS] = to_csv(_even(made.means))
    for name, text in texts.items():
        write_atomic(directory / name, text.encode(), durable=False)
    return made


def _is_local(entry: Entry) -> bool:
    return entry.config.method.name == "local"


def _even(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with all keys in all rows: not every setting has a clock, or noise."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key) for key in keys} for row in rows]
