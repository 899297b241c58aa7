"""A scenario, and a scenario as a run uses it: with the user's own settings laid over it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.methods import METHODS
from coterie.run.compare import method_list
from coterie.run.config import Config, assign, parse
from coterie.run.rundir import RunDir
from coterie.run.scenarios.hand import Tree, fitted, stand_in
from coterie.tree import write_atomic

SCORES = ("received", "adapted", "unknown")
NOTE = "scenario.json"
# Settings that do not make an experiment another one.
_FREE = (
    "run.engine",
    "run.workers",
    "run.address",
    "run.cpus_per_worker",
    "run.gpus_per_worker",
    "run.device",
    "run.seed",
    "run.checkpoint_every",
)
_FREE_TABLES = ("evaluation", "method")


@dataclass(frozen=True)
class Scenario:
    """All settings of one experiment of a paper, and what the paper measured there.

    ``config`` are the tables of a configuration. ``figures`` are published accuracies (0 to 1) by
    method, with parameters as in "user-centric streams=4"; ``spread`` their standard deviations
    and ``worst`` the accuracies of the worst client, where the paper has them. ``score`` is the
    score of ours that the figures are comparable with. ``per_method`` are tables that a method
    has instead. ``substitute`` says what happens when the paper's data cannot be had at all.
    """

    name: str
    description: str
    paper: str
    table: str
    config: Mapping[str, Any]
    figures: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    worst: Mapping[str, float] = field(default_factory=dict)
    score: str = "unknown"
    per_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    substitute: str | None = None
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
    def newcomers(self) -> bool:
        """Whether the figures are those of clients that join after the last round."""
        return bool(self.config.get("run", {}).get("holdout"))

    def tree(self, method: str | None = None, data: str | None = None) -> Tree:
        """A new tree of tables, for one of the methods and for a data set in place of its own."""
        tree: Tree = copy.deepcopy(dict(self.config))
        if method is not None and method != self.method:
            tree["method"] = {"name": method}
        overlay(tree, self.per_method.get(method or self.method, {}))
        return fitted(tree, data or self.data)

    def methods(self) -> list[str]:
        """The methods of the paper's table that Coterie has, as ``--methods`` takes them."""
        known = [key for key in self.figures if key.split()[0] in METHODS]
        return [key.replace(" ", ":") for key in known]

    def key(self, method: Mapping[str, Any]) -> str | None:
        """Under which key the figure of a method is: a table of a name and parameters.

        The paper's own method must have the parameters that it has here; a baseline counts by
        its name, for papers seldom tell its parameters, or report the best of several.
        """
        name = str(method["name"])
        keys = [key for key in self.figures if key.split()[0] == name]
        if name != self.method:
            return keys[0] if keys else None
        asked = {**self.config["method"], **method}
        return next((k for k in keys if {**self.config["method"], **_table(k)} == asked), None)


def _table(key: str) -> Tree:
    """The method table that a key of the figures means."""
    _, name, parameters = method_list(key.replace(" ", ":"))[0]
    return {"name": name, **parameters}


def overlay(tree: Tree, over: Mapping[str, Any]) -> None:
    """Lay some tables over others, key by key; another name drops the old one's parameters."""
    for table, values in over.items():
        if not isinstance(values, Mapping):
            tree[table] = values  # not a table: parsing says so
            continue
        for key in sorted(values, key=lambda k: k != "name"):
            assign(tree, f"{table}.{key}", values[key])


@dataclass(frozen=True)
class Chosen:
    """A scenario with the data set that is used and everything that the user set himself."""

    scenario: Scenario
    data: str
    asked: bool
    tree: Tree

    @property
    def warning(self) -> str | None:
        """The sentence for a set that is not at hand; none if the user chose the set."""
        missing = self.scenario.data
        if self.asked or self.data == missing:
            return None
        if self.scenario.substitute:
            return f"scenario {self.scenario.name}: {self.scenario.substitute}"
        return (
            f"scenario {self.scenario.name}: {missing} is not at hand, so {self.data} is used "
            f"instead; --data {missing} downloads it, --folder says where it is"
        )

    @property
    def instead(self) -> str | None:
        """What the paper's data were exchanged for, in a few words."""
        missing = self.scenario.data
        return None if self.data == missing else f"on {self.data} instead of {missing}"

    @property
    def changed(self) -> list[str]:
        """The settings that are not the scenario's, but for the data set and the method."""
        name = self.tree["method"]["name"]
        before, now = _flat(parse(self.scenario.tree(name))), _flat(parse(self.tree))
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        told = [k for k in keys if k not in _FREE and k.split(".")[0] not in _FREE_TABLES]
        told = [k for k in told if k not in ("data.set", "data.folder", "data.options")]
        return [f"{k} {_value(now.get(k))} instead of {_value(before.get(k))}" for k in told]

    def about(self) -> Tree:
        """What a run should remember of this: the paper's figure, and what differs from it."""
        method = self.tree["method"]
        key = self.scenario.key(method)
        return {
            "name": self.scenario.name,
            "paper": self.scenario.paper,
            "table": self.scenario.table,
            "method": method["name"],
            "figure": None if key is None else self.scenario.figures[key],
            "spread": None if key is None else self.scenario.spread.get(key),
            "score": self.scenario.score,
            "newcomers": self.scenario.newcomers,
            "instead": self.instead,
            "changed": self.changed,
        }


def _flat(config: Config) -> dict[str, Any]:
    tables = config.model_dump()
    return {f"{t}.{k}": v for t, table in tables.items() for k, v in table.items()}


def _value(value: Any) -> str:
    return "unset" if value is None else str(value)


def choose(scenario: Scenario, given: Mapping[str, Any]) -> Chosen:
    """The scenario's tables with the user's laid over them.

    The data set is the user's if he names one; else the scenario's, or what stands in for it.
    """
    parse(given)  # what is wrong with it is said here
    own = given.get("data", {})
    asked = "set" in own
    options = {**scenario.config["data"].get("options", {}), **own.get("options", {})}
    data = own["set"] if asked else stand_in(scenario.data, own.get("folder"), options)
    tree = scenario.tree(given.get("method", {}).get("name"), data)
    overlay(tree, given)
    return Chosen(scenario, data, asked, tree)


@contextmanager
def remember(place: Path, about: Mapping[str, Any] | None) -> Iterator[None]:
    """Whatever becomes of the run inside, its directory tells of which scenario it is."""
    try:
        yield
    finally:
        run = RunDir(place)
        if about is not None and run.config.is_file():
            write_atomic(place / NOTE, json.dumps(about, indent=1).encode(), durable=False)
            if run.result.is_file():
                summary = json.loads(run.result.read_text())
                run.write_result({**summary, "scenario": dict(about)})
