"""Several methods on the same clients, kept in one folder; what was stopped can be continued."""

from __future__ import annotations

import csv
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data import Population
from coterie.door.exposure import server_sees
from coterie.errors import ConfigError, RunDirError, TrainingError
from coterie.methods import METHODS
from coterie.run.config import (
    Config,
    experiment_of,
    method_of,
    parse,
    population_of,
    run_anew,
)
from coterie.run.evaluation import headline
from coterie.run.experiment import Experiment, Watch, execute
from coterie.run.rundir import RunDir, finite, to_csv
from coterie.run.stopping import Stop
from coterie.run.toml import read_toml, to_toml
from coterie.tree import write_atomic

ALL = "all"
PLAN, ROWS, TABLE, ABOUTS = (
    *("comparison.toml", "comparison.json", "comparison.csv"),
    "scenarios.json",
)
_FORMAT = 1
_USUAL_GROUPS = 4  # what a method gets that must be told how many there are, and nobody knows

Asked = tuple[str, str, dict[str, Any]]  # a title, a method's name, its parameters
Configure = Callable[[str, str, dict[str, Any]], Config]
Show = Callable[[str, int, str], AbstractContextManager[Watch]]
Note = Callable[[str, str], None]
Abouts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A row to be: its title and configuration; one that is ``optional`` may refuse, or fail."""

    title: str
    config: Config
    optional: bool = False


@dataclass(frozen=True)
class Comparison:
    """Rows for the table, as numbers; methods that were left out, and why."""

    rows: Sequence[Mapping[str, Any]]
    judged_by: str
    left_out: Mapping[str, str]


# --- what is compared ----------------------------------------------------------------------------


def method_list(text: str) -> list[Asked]:
    """Titles, names and parameters from ``local,ifca:k=4``.

    >>> method_list("local,ifca:k=4")
    [('local', 'local', {}), ('ifca k=4', 'ifca', {'k': 4})]
    """
    found: list[Asked] = []
    for item in re.split(r",(?![^\[]*\])", text):  # a comma inside [1, 2] does not separate
        name, *settings = item.strip().split(":")
        parameters = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"--methods {item}: write name:parameter=value, as in ifca:k=4")
            try:
                parameters[key] = tomllib.loads(f"v = {value}")["v"]
            except tomllib.TOMLDecodeError:
                parameters[key] = value
        title = " ".join([name, *settings])
        if title in [t for t, _, _ in found]:
            raise ConfigError(f"--methods names '{item.strip()}' twice: once is enough")
        found.append((title, name, parameters))
    return found


def every_method(population: Population, holdout: int = 0) -> list[Asked]:
    """All methods with their defaults; one that needs ``k`` gets the number of true groups.

    Where nobody knows that it gets four, or as many as there are clients that train.
    """
    known, members = population.groups, len(population.clients) - holdout
    k = min(_USUAL_GROUPS if known is None else len(set(known)), members)
    found: list[Asked] = []
    for name, factory in METHODS.items():
        parameters = inspect.signature(factory).parameters
        needs_k = "k" in parameters and parameters["k"].default is inspect.Parameter.empty
        found.append((f"{name} k={k}", name, {"k": k}) if needs_k else (name, name, {}))
    return found


def prepare(
    text: str, configure: Configure, oracle_if_possible: bool = False
) -> tuple[list[Entry], Population]:
    """What ``--methods`` asks for and the clients that all of it runs on.

    ``configure`` makes a configuration from a title, a name and parameters. The methods of "all"
    may refuse the set-up, others must not; ``oracle_if_possible`` leaves the oracle out where the
    true groups are not known.
    """
    asked = method_list(text)
    named = {title: configure(title, name, own) for title, name, own in asked if name != ALL}
    for config in named.values():
        method_of(config)  # names and parameters, before data is read
    first = next(iter(named.values()), None) or configure(ALL, "fedavg", {})
    population = population_of(first)
    entries = []
    for title, name, own in asked:
        if name != ALL:
            entries.append(Entry(title, named[title]))
        elif own:
            raise ConfigError(f"--methods {title.replace(' ', ':')}: 'all' takes no parameters")
        else:
            every = every_method(population, first.run.holdout)
            more = [each for each in every if each[0] not in named]
            entries += [Entry(t, configure(t, n, p), optional=True) for t, n, p in more]
    if oracle_if_possible and population.groups is None:
        entries = [e for e in entries if e.config.method.name != "oracle"]
    return entries, population


# --- running it ----------------------------------------------------------------------------------


def compare(
    entries: Sequence[Entry],
    population: Population,
    directory: Path,
    show: Show,
    note: Note = lambda title, reason: None,
    abouts: Abouts | None = None,
) -> Comparison:
    """Run each entry on one population, in a new folder.

    ``note`` is told of every method that is left out, and why. ``abouts`` tell of a scenario, by
    title; they are kept for whoever continues.
    """
    experiments, left_out = dict[str, Experiment](), dict[str, str]()
    for entry in entries:  # check them all first
        try:
            experiments[entry.title] = _experiment(entry.config, population)
        except ConfigError as error:
            if not entry.optional:
                raise
            left_out[entry.title] = str(error)
    if not experiments:
        raise ConfigError(next(iter(left_out.values())))
    for title, reason in left_out.items():
        note(title, reason)
    RunDir.create(directory)
    kept = [entry for entry in entries if entry.title in experiments]
    if abouts:
        _write_json(directory / ABOUTS, {e.title: abouts[e.title] for e in kept})
    configs = {title: experiment.config for title, experiment in experiments.items()}
    _write_plan(directory, kept, configs, left_out)
    return _run(directory, kept, experiments.__getitem__, left_out, show, note)


def go_on(
    directory: Path,
    show: Show,
    note: Note = lambda title, reason: None,
    **changes: Any,
) -> Comparison:
    """Continue the comparison of a folder: what is finished is read, what was stopped resumed.

    ``changes`` are settings of the table ``[run]`` that leave results as they are.
    """
    entries, left_out = read_plan(directory)
    people: list[Population] = []

    def experiment(title: str) -> Experiment:
        tree = next(e.config for e in entries if e.title == title).model_dump()
        run_anew(tree, changes)
        config = parse(tree)
        if not people:  # read once, and only if anything is left to do
            people.append(population_of(entries[0].config))
        return _experiment(config, people[0])

    return _run(directory, entries, experiment, left_out, show, note)


def _experiment(config: Config, population: Population) -> Experiment:
    if config.method.name == "oracle" and population.groups is None:
        raise ConfigError(
            "method oracle needs a scenario with known groups: give the data a shift (--shift "
            "rotation), or leave oracle out of --methods"
        )
    return experiment_of(config, population)


def _run(
    directory: Path,
    entries: Sequence[Entry],
    experiment_for: Callable[[str], Experiment],
    left_out: Mapping[str, str],
    show: Show,
    note: Note,
) -> Comparison:
    """Do what is left to do in a folder whose plan is written, then write the table."""
    place, refused = RunDir(directory), dict(left_out)
    place.lock()
    try:
        for entry in entries:
            run = RunDir(directory / folder_of(entry.title))
            if run.result.exists():
                continue
            if not run.config.exists():
                run.discard()  # stopped before anything was saved there, if it was begun at all
            try:
                experiment = experiment_for(entry.title)
                by = headline(experiment.population.classes is None)
                with show(entry.title, experiment.settings.rounds, by) as watch:
                    execute(experiment, run.path, resume=run.config.exists(), watch=watch)
            except (ConfigError, TrainingError) as error:
                if not entry.optional or Stop.asked:  # a run can also fail because it is stopped
                    raise
                refused[entry.title] = str(error)
                note(entry.title, str(error))
        done = [entry.title for entry in entries if entry.title not in refused]
        if not done:
            raise ConfigError(next(iter(refused.values())))
        return _table(directory, done, refused)
    finally:
        place.unlock()


def _table(directory: Path, titles: Sequence[str], left_out: Mapping[str, str]) -> Comparison:
    """The rows of what is finished, from the files that the runs left; they are written, too."""
    found = {title: _read_run(directory / folder_of(title)) for title in titles}
    alone = found["local"][1] if "local" in found else None
    rows = [_row(title, *each, alone) for title, each in found.items()]
    judged_by = str(found[titles[0]][0]["judged_by"])
    kept = {"judged_by": judged_by, "rows": rows, "left_out": left_out}
    _write_json(directory / ROWS, kept)
    write_atomic(directory / TABLE, to_csv(rows).encode(), durable=False)
    return Comparison(rows, judged_by, left_out)


def folder_of(title: str) -> str:
    """The name of the folder that a method's run is kept in.

    >>> folder_of("ifca k=4")
    'ifca-k=4'
    """
    return re.sub(r"[\s/]+", "-", title)


# --- what the folder remembers -------------------------------------------------------------------


def _write_plan(
    directory: Path,
    entries: Sequence[Entry],
    configs: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, str],
) -> None:
    """All that it takes to continue: tables that all methods share, and each method's own."""
    trees = [configs[entry.title] for entry in entries]
    shared = {t: own for t, own in trees[0].items() if all(tree[t] == own for tree in trees)}
    own = {
        entry.title: {"optional": entry.optional}
        | {t: values for t, values in configs[entry.title].items() if t not in shared}
        for entry in entries
    }
    plan = {"format": _FORMAT, "left_out": dict(left_out), "shared": shared, "methods": own}
    write_atomic(directory / PLAN, to_toml(plan).encode(), durable=True)


def read_plan(directory: Path) -> tuple[list[Entry], dict[str, str]]:
    """The entries of a comparison that was begun, and what was left out of it."""
    path = directory / PLAN
    if not path.is_file():
        single = (directory / "config.toml").is_file()
        hint = f"; it is a run: coterie run --resume {directory}" if single else ""
        raise RunDirError(f"{directory} is not a comparison: it has no {PLAN}{hint}")
    try:
        plan = read_toml(path)
        if plan["format"] != _FORMAT:
            raise RunDirError(f"{path} is of another version of Coterie")
        entries = []
        for title, own in plan["methods"].items():
            optional = own.pop("optional")
            entries.append(Entry(title, parse({**plan["shared"], **own}), optional))
        return entries, plan.get("left_out", {})
    except (ConfigError, KeyError, AttributeError, TypeError) as error:
        raise RunDirError(
            f"{path} is damaged ({error}): start the comparison again in a new folder"
        ) from error


def read_abouts(directory: Path) -> Abouts:
    """What a comparison was told of a scenario, by title."""
    path = directory / ABOUTS
    found: Abouts = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write_json(path: Path, tree: Any) -> None:
    text = json.dumps(finite(tree), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(path, (text + "\n").encode(), durable=False)


def _read_run(place: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The summary and the clients' table of a finished run."""
    run = RunDir(place)
    try:
        summary = json.loads(run.result.read_text())
        with run.table.open(newline="") as file:
            return summary, list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise RunDirError(
            f"{place} is damaged ({error}); write it again with: coterie run --resume {place}"
        ) from error


# --- rows ----------------------------------------------------------------------------------------


def _row(
    title: str,
    summary: Mapping[str, Any],
    clients: Sequence[Mapping[str, str]],
    alone: Sequence[Mapping[str, str]] | None,
) -> dict[str, Any]:
    by, score = summary["judged_by"], summary.get("headline", "received")
    gains = [] if alone is None or title == "local" else _gains(clients, alone, by, score)
    return {
        "method": title,
        "received": summary["received"].get(by),
        "adapted": summary["adapted"].get(by),
        "newcomers": summary.get("newcomers", {}).get("adapted", {}).get(by),
        "worst": summary[score].get("worst"),
        "gain": sum(gains) / len(gains) if gains else None,
        "better": sum(g > 0 for g in gains) if gains else None,
        "compared": len(gains) if gains else None,
        "groups": summary["groups"],
        "agreement": agreement(clients),
        "bytes": summary["bytes"]["down"] + summary["bytes"]["up"],
        "wasted": sum(summary["bytes"]["wasted"].values()),
        "rounds": summary["rounds"],
        "stopped": summary["stopped"],
        **_clocked(summary),
        **_to_target(summary),
        **_private(summary),
        "seconds": summary["seconds"],
        "sees": server_sees(summary),
        "headline": score,
    }


def _clocked(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The seconds of the clock, if there was one."""
    clock = summary.get("clock")
    return {} if clock is None else {f"clock_{k}": v for k, v in clock.items()}


def _private(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What noise cost, if there was any."""
    found = summary.get("privacy", {})
    return {key: found[key] for key in ("epsilon", "delta") if key in found}


def _to_target(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What it took to reach the target, if one was set; None if it never was reached."""
    if "to_target" not in summary:
        return {}
    found = summary["to_target"] or {}
    bytes = sum(found["bytes"].values()) if found else None
    times = {"target_seconds": found.get("seconds")} if "clock" in summary else {}
    return {"target_round": found.get("round"), "target_bytes": bytes, **times}


def _gains(
    clients: Sequence[Mapping[str, str]],
    alone: Sequence[Mapping[str, str]],
    judged_by: str,
    score: str,
) -> list[float]:
    """By how much each client scores higher than alone; newcomers are not meant by scores."""
    pairs = [
        (ours.get(f"{score}_{judged_by}", ""), theirs.get(f"received_{judged_by}", ""))
        for ours, theirs in zip(clients, alone, strict=True)
        if ours.get("newcomer", "0") == "0"
    ]
    return [float(ours) - float(theirs) for ours, theirs in pairs if ours and theirs]


def agreement(clients: Sequence[Mapping[str, str]]) -> float | None:
    """The adjusted Rand index between the groups found and the true ones, if there are any."""
    known = [(c["true_group"], c["group"]) for c in clients if c["group"] != ""]
    truth, found = [t for t, _ in known], [g for _, g in known]
    if "" in truth or len(set(found)) < 2:
        return None
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth, found))
