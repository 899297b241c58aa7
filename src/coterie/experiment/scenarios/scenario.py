"""A paper's experiment, and the same with the user's settings on top."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic.dataclasses import dataclass as checked

from coterie.core.schema import Config
from coterie.core.tree import write_atomic
from coterie.data.files import Where
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.compare.compare import method_list
from coterie.experiment.config import assign, displace, parse
from coterie.experiment.scenarios import available
from coterie.experiment.scenarios.available import Tree, fitted
from coterie.registry import METHODS, SETS
from coterie.results.checksums import to_json
from coterie.results.rundir import RunDir

Score = Literal["received", "adapted", "clustering", "unknown"]
SCORES: tuple[Score, ...] = get_args(Score)
NOTE = "scenario.json"
# Settings that do not change the experiment.
_FREE = (
    "data.set",
    "data.folder",
    "run.engine",
    "run.workers",
    "run.address",
    "run.cpus_per_worker",
    "run.gpus_per_worker",
    "run.device",
    "run.seed",
    "run.checkpoint_every",
)
_OF_TARGETS = ("evaluation.target", "evaluation.every")  # not free where rounds are counted


@checked(frozen=True, config={"extra": "forbid"})
class Scenario:
    """The settings of one experiment of a paper, and the paper's results.

    ``config`` are the tables of a configuration. ``figures`` are published accuracies (0 to 1) by
    method, with parameters as in "user-centric streams=4"; ``spread`` are their standard deviations
    and ``worst`` the accuracies of the worst client, where the paper has them. ``score`` is the
    score of ours to compare the figures with ("clustering": none, since they concern clustered
    samples), and ``scores`` lists the methods with another one. ``per_method`` are tables that
    replace settings for single methods. ``missing`` says what to do about data that cannot be
    downloaded.

    ``rounds_to_target`` and ``megabits_to_target`` are what the paper's methods needed to reach the
    accuracy ``target``: None is a method that never reached it; methods that are not in the paper's
    table are left out. Megabits are downloads and uploads, averaged over all clients. If the paper
    gives rounds but no target, ``target`` is None, and the rounds are those of the whole run.
    """

    name: str
    description: str
    paper: str
    table: str
    config: Mapping[str, Any]
    figures: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    worst: Mapping[str, float] = field(default_factory=dict)
    score: Score = "unknown"
    scores: Mapping[str, Score] = field(default_factory=dict)
    rounds_to_target: Mapping[str, float | None] = field(default_factory=dict)
    megabits_to_target: Mapping[str, float | None] = field(default_factory=dict)
    per_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The paper's own method."""
        return str(self.config["method"]["name"])

    @property
    def data(self) -> str:
        """The paper's data set."""
        return str(self.config["data"]["set"])

    @property
    def target(self) -> float | None:
        """The accuracy that rounds and megabits are counted to."""
        target: float | None = self.config.get("evaluation", {}).get("target")
        return target

    @property
    def newcomers(self) -> bool:
        """Whether the figures are about clients that join after the last round."""
        return bool(self.config.get("run", {}).get("holdout"))

    def tree(self, method: str | None = None, data: str | None = None) -> Tree:
        """The tables of a configuration for one of the methods, and for another data set."""
        tree: Tree = copy.deepcopy(dict(self.config))
        if method is not None and method != self.method:
            tree["method"] = {"name": method}
        overlay(tree, self.per_method.get(method or self.method, {}))
        return fitted(tree, data or self.data)

    def methods(self) -> list[str]:
        """The methods of the paper's table that Coterie has, written as for ``--methods``."""
        known = [key for key in self.figures if key.split()[0] in METHODS]
        return [key.replace(" ", ":") for key in known]

    def score_of(self, method: str) -> str:
        """The score of ours to compare a method's figure with."""
        return self.scores.get(method, self.score)

    def key(self, method: Mapping[str, Any]) -> str | None:
        """The key of a method's figure, if there is one; ``method`` has a name and parameters.

        The paper's own method must have the parameters of the scenario; a baseline only the name,
        since papers seldom state its parameters, or report the best of several.
        """
        name = str(method["name"])
        keys = [key for key in self.figures if key.split()[0] == name]
        if name != self.method:
            return keys[0] if keys else None
        return next((k for k in keys if _completed(self.table_of(k)) == _completed(method)), None)

    def table_of(self, key: str) -> Tree:
        """The table ``[method]`` that a figure belongs to."""
        tree = self.tree(key.split()[0])
        _, name, parameters = method_list(key.replace(" ", ":"))[0]
        overlay(tree, {"method": {"name": name, **parameters}})
        table: Tree = tree["method"]
        return table

    def costs_of(self, key: str | None) -> Tree | None:
        """What the paper's method needed to reach the target; None without such a table."""
        tables = {"rounds": self.rounds_to_target, "megabits": self.megabits_to_target}
        if not any(tables.values()):
            return None
        costs = {name: table[key] for name, table in tables.items() if key and key in table}
        return {"target": self.target, **costs}


def _completed(method: Mapping[str, Any]) -> Tree:
    """A method's table completed with its defaults."""
    section = parse({"method": method}).method
    return {**_defaults(METHODS.get(section.name)), **section.model_dump(exclude={"name"})}


def _defaults(function: Callable[..., Any] | None) -> Tree:
    """The parameters of a method or a data set that have defaults."""
    parameters = {} if function is None else inspect.signature(function).parameters
    return {k: p.default for k, p in parameters.items() if p.default is not p.empty}


def overlay(tree: Tree, upper: Mapping[str, Any]) -> None:
    """Override the keys of some tables by others, also in nested tables such as ``data.options``.

    A new name drops the old name's parameters, and a parameter of the method those that exclude
    it.
    """
    for table, values in upper.items():
        if not isinstance(values, Mapping):
            tree[table] = values  # not a table: parsing refuses it
            continue
        if "name" in values:
            assign(tree, f"{table}.name", values["name"])
        if table == "method":
            displace(tree, values)
        for key in [k for k in values if k != "name"]:
            value, below = values[key], tree.get(table, {}).get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = {**below, **value}
            assign(tree, f"{table}.{key}", value)


@dataclass(frozen=True)
class ChosenScenario:
    """A scenario with the data set in use and the user's settings."""

    scenario: Scenario
    data: str
    asked: bool
    tree: Tree

    @property
    def warning(self) -> str | None:
        """The note that another data set is used, unless the user chose it."""
        missing = self.scenario.data
        if self.asked or self.data == missing:
            return None
        return (
            f"scenario {self.scenario.name}: {missing} is not available, so {self.data} is used "
            "instead (--stand-in)"
        )

    @property
    def instead(self) -> str | None:
        """Which data set replaces the paper's, in a few words; None if it is the paper's."""
        missing = self.scenario.data
        return None if self.data == missing else f"on {self.data} instead of {missing}"

    @property
    def key(self) -> str | None:
        """The key of the paper's figure for this run, if there is one."""
        return self.scenario.key(self.tree["method"])

    @property
    def changed(self) -> list[str]:
        """The settings that differ from the scenario's, except the data set and the method's name.

        A method's parameters are compared with those of its figure; options of the data only if the
        data set is the scenario's.
        """
        name = self.tree["method"]["name"]
        original, used = self.scenario.tree(name), self.tree
        method = original["method"] if self.key is None else self.scenario.table_of(self.key)
        before = {**_flat(parse(original)), **_keyed("method", _completed(method))}
        now = {**_flat(parse(used)), **_keyed("method", _completed(used["method"]))}
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        sentences = [f"{k} {_value(now.get(k))} instead of {_value(before.get(k))}" for k in keys]
        return [words for key, words in zip(keys, sentences, strict=True) if self._matters(key)]

    def _matters(self, key: str) -> bool:
        """Whether a setting changes the paper's experiment."""
        if self.scenario.target is not None and key in _OF_TARGETS:
            return True
        if key.startswith("data.options."):
            return self.data == self.scenario.data and key != "data.options.cache"
        return key not in _FREE and key.split(".")[0] != "evaluation"

    @property
    def costs(self) -> Tree | None:
        """What the paper's method needed to reach the target, if the target is the same here."""
        target = parse(self.tree).evaluation.target
        return self.scenario.costs_of(self.key) if target == self.scenario.target else None

    def about(self) -> Tree:
        """What a run records of its scenario: the paper's figure, and the settings that differ."""
        name, key = self.tree["method"]["name"], self.key
        return {
            "name": self.scenario.name,
            "paper": self.scenario.paper,
            "table": self.scenario.table,
            "method": name,
            "figure": None if key is None else self.scenario.figures[key],
            "spread": None if key is None else self.scenario.spread.get(key),
            "score": self.scenario.score_of(name),
            "to_target": self.costs,
            "newcomers": self.scenario.newcomers,
            "instead": self.instead,
            "changed": self.changed,
        }


def _flat(config: Config) -> dict[str, Any]:
    """All settings but the method's by dotted keys, with each option of the data."""
    tables = config.model_dump(exclude={"method": True, "data": {"options"}})
    flat = {k: v for name, table in tables.items() for k, v in _keyed(name, table).items()}
    options = {**_defaults(SETS.get(config.data.set)), **config.data.options}
    return {**flat, **_keyed("data.options", options)}


def _keyed(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{table}.{k}": v for k, v in values.items()}


def _value(value: Any) -> str:
    return "unset" if value is None else str(value)


def choose(
    scenario: Scenario, settings: Mapping[str, Any], stand_in: bool = False
) -> ChosenScenario:
    """The scenario with the user's settings on top.

    The data set is the user's choice, or else the scenario's. If the scenario's is not available,
    it is refused, or with ``stand_in`` replaced by another.
    """
    parse(settings)  # refuse mistakes in them
    own = settings.get("data", {})
    asked = "set" in own
    options = {**scenario.config["data"].get("options", {}), **own.get("options", {})}
    data = own["set"] if asked else available.stand_in(scenario.data, own.get("folder"), options)
    if not (asked or stand_in) and data != scenario.data:
        raise ConfigError(absent(scenario, data, own.get("folder"), options))
    tree = scenario.tree(settings.get("method", {}).get("name"), data)
    overlay(tree, settings)
    return ChosenScenario(scenario, data, asked, tree)


def absent(
    scenario: Scenario,
    instead: str,
    folder: Where = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The message about data that are not available, and what to do."""
    if scenario.missing is not None:
        need = scenario.missing
    else:
        searched = " and ".join(str(p) for p in available.searched(scenario.data, folder, options))
        need = (
            f"the data set {scenario.data}, which is not available (looked for in {searched}): "
            "give the folder of its files with --folder DIR, download it with --data "
            f"{scenario.data}"
        )
    return f"scenario {scenario.name} needs {need}, or use {instead} in its place with --stand-in"


@contextmanager
def remember(directory: Path, about: Mapping[str, Any] | None) -> Iterator[None]:
    """Record the scenario in the run directory, however the run inside ends."""
    try:
        yield
    finally:
        run = RunDir(directory)
        if about is not None and run.config.is_file():
            write_atomic(directory / NOTE, to_json(about, indent=1).encode(), durable=False)
            with suppress(RunDirError):  # missing or damaged: a resume writes it
                run.write_result({**run.read_result(), "scenario": dict(about)})
