"""The runs of a comparison, all checked before the first one begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from coterie.core.schema import Config
from coterie.data import Population
from coterie.errors import ConfigError, CoterieError
from coterie.experiment.compare.sweep import (
    ALL,
    Assignments,
    NamedMethod,
    Sweep,
    every_method,
    methods_of,
    settings_of_sweep,
)
from coterie.experiment.config import experiment_of, method_of, parse, population_of, with_public
from coterie.experiment.experiment import Experiment
from coterie.results.evaluation import main_score
from coterie.results.titles import place_of, value_in_title

_ROOM = 2**30  # bytes of client data kept for other runs
_LONGEST = 120  # characters of a directory's name

Configure = Callable[[NamedMethod, Assignments], Config]
Note = Callable[[str, str], None]


@dataclass(frozen=True)
class PlannedRun:
    """A planned run: its method's title, configuration, and folder in the comparison's directory.

    An ``optional`` run may fail, or refuse its configuration. In a sweep ``seed`` and ``settings``
    distinguish the runs of a method; otherwise ``seed`` is None. ``in_python`` are runs on
    clients, or with a model or method, that no configuration describes: ``build`` makes them.
    """

    title: str
    config: Config
    optional: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    folder: str = ""
    build: Callable[[Config], Experiment] | None = field(default=None, compare=False, repr=False)
    in_python: bool = False

    def experiment(self, clients: Populations) -> Experiment:
        """The experiment of the run; an error if it does not fit its clients."""
        if self.build is None:
            return experiment_for(self.config, clients.of(self.config))
        experiment = self.build(self.config)
        check_groups(self.config, experiment.population)
        experiment.plan(Path())  # refuse a mistake before anything is written
        return experiment

    @property
    def row(self) -> str:
        """The row of means that the run belongs to: the title and the settings."""
        return place_of(self.title, self.settings)

    @property
    def name(self) -> str:
        """The name of the run: the title, in a sweep with settings and seed."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"


class Populations:
    """Clients and their data, kept for other runs on the same clients while there is room."""

    def __init__(self, room: int = _ROOM) -> None:
        self._room = room
        self._kept: dict[str, Population] = {}

    @staticmethod
    def key(config: Config) -> str:
        """A key of everything that determines the clients."""
        tables = config.model_dump(include={"data", "partition", "shift"})
        return json.dumps([*tables.values(), config.run.seed], default=str)

    def of(self, config: Config) -> Population:
        """The clients of a configuration."""
        key = self.key(config)
        if key not in self._kept:
            self._kept[key] = population_of(config)
            while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > self._room:
                del self._kept[next(k for k in self._kept if k != key)]
        return self._kept[key]

    def forget(self, config: Config) -> None:
        """Free the clients of a configuration: no other run needs them."""
        self._kept.pop(self.key(config), None)


def _bytes(population: Population) -> int:
    tensors = [t for c in population.clients for s in (c.train, c.val, c.test) for t in (s.x, s.y)]
    return sum(t.numel() * t.element_size() for t in tensors)


# --- the runs of a sweep -------------------------------------------------------------------------


def entries_of(
    sweep: Sweep,
    configure: Configure,
    clients: Populations,
    oracle_if_possible: bool = False,
    methods: Sequence[NamedMethod] = (),
) -> list[PlannedRun]:
    """All runs of a sweep, with runs on the same clients next to each other.

    ``configure`` returns the configuration of a method with some keys set. The methods of "all" may
    refuse their configuration, others must not; ``oracle_if_possible`` leaves out the oracle if the
    true groups are unknown. ``methods`` are those of the sweep, if they are not given.
    """
    methods = methods or methods_of(sweep)
    for title, name, parameters in methods:
        if name == ALL and parameters:
            raise ConfigError(f"--methods {title.replace(' ', ':')}: 'all' takes no parameters")
    combinations = list(settings_of_sweep(sweep))
    titles: dict[str, str] = {}
    first = next((m for m in methods if m[1] != ALL), (ALL, "fedavg", dict[str, Any]()))
    public = any(name == ALL for _, name, _ in methods)
    for settings, assignments in combinations:
        for method in methods:  # check names and parameters before data are read
            if method[1] != ALL:
                public |= method_of(configure(method, assignments)).needs_public
        text = configure(first, assignments).model_dump_json()
        title = place_of("", settings).removeprefix(", ")
        if titles.setdefault(text, title) != title:  # 1 and 1.0 are the same learning rate
            raise ConfigError(
                f"vary: {titles[text]} and {title} are the same; one of them is enough"
            )

    def configured(method: NamedMethod, assignments: Assignments) -> Config:
        """Set public samples aside for all methods if one needs them, so that clients are equal."""
        return with_public(configure(method, assignments), public)

    entries: list[PlannedRun] = []
    for settings, assignments in combinations:
        for seeding in [[("run.seed", seed)] for seed in sweep.seeds] or [[]]:
            block = _on_the_same(methods, [*assignments, *seeding], configured, clients)
            if oracle_if_possible and clients.of(block[0].config).groups is None:
                block = [e for e in block if e.config.method.name != "oracle"]
            for entry in block:
                seed = None if sweep.plain else entry.config.run.seed
                entries.append(replace(entry, settings=settings, seed=seed))
    return placed(entries)


def _on_the_same(
    methods: Sequence[NamedMethod],
    assignments: Assignments,
    configure: Configure,
    clients: Populations,
) -> list[PlannedRun]:
    """The runs of one setting and seed, one for each method."""
    configs = {method[0]: configure(method, assignments) for method in methods if method[1] != ALL}
    first = next(iter(configs.values()), None) or configure((ALL, "fedavg", {}), assignments)
    entries: list[PlannedRun] = []
    for title, name, _ in methods:
        if name != ALL:
            entries.append(PlannedRun(title, configs[title]))
            continue
        for method in every_method(clients.of(first), first.run.holdout):
            if method[0] not in configs:
                entries.append(PlannedRun(method[0], configure(method, assignments), optional=True))
    return entries


def made_in_python(entries: Sequence[PlannedRun]) -> bool:
    """Whether runs are on clients, or with models, that no configuration describes."""
    return any(entry.in_python for entry in entries)


def more_seeds(entries: Sequence[PlannedRun], seeds: Iterable[int]) -> list[PlannedRun]:
    """The same runs with additional seeds."""
    if made_in_python(entries):
        raise ConfigError(
            "this comparison was created by coterie.compare on clients in Python: continue it from "
            "Python with more seeds, compare(..., seeds=..., directory=..., resume=True)"
        )
    if any(entry.seed is None for entry in entries):
        raise ConfigError("this comparison has a single seed: start a new one with --seeds")
    old_seeds = {entry.seed for entry in entries}
    templates = {entry.row: entry for entry in reversed(entries)}
    entries_added = []
    for seed in seeds:
        for entry in [] if seed in old_seeds else [e for e in entries if templates[e.row] is e]:
            tree = entry.config.model_dump()
            tree["run"]["seed"] = seed
            folder = PurePosixPath(entry.folder).parent / f"seed-{seed}"
            entries_added.append(replace(entry, config=parse(tree), seed=seed, folder=str(folder)))
    return entries_added


# --- folders -------------------------------------------------------------------------------------


def folder_of(title: str) -> str:
    """The name of the folder for a method's run.

    >>> folder_of("ifca k=4")
    'ifca-k=4'
    """
    name = re.sub(r'[\s/\\<>:"|?*\x00-\x1f]+', "-", title).strip(".") or "-"
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def placed(entries: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Entries with distinct folders, also on file systems that ignore case."""
    taken: dict[str, str] = {}
    in_folders = []
    for entry in entries:
        parts = [folder_of(entry.title)]
        if entry.settings:
            parts_of_name = [
                value_in_title(value)
                if key in ("partition", "shift")
                else f"{key}={value_in_title(value)}"
                for key, value in entry.settings.items()
            ]
            parts.append(folder_of(",".join(parts_of_name)))
        path, number = "/".join(parts), 2
        while taken.setdefault(path.casefold(), entry.row) != entry.row:
            path, number = f"{'/'.join(parts)}-{number}", number + 1
        folder = path if entry.seed is None else f"{path}/seed-{entry.seed}"
        in_folders.append(replace(entry, folder=folder))
    return in_folders


# --- checks --------------------------------------------------------------------------------------


def checked_runs(
    entries: Sequence[PlannedRun],
    clients: Populations,
    note: Note,
    check: Callable[[Experiment], None] | None = None,
) -> tuple[list[PlannedRun], dict[str, str]]:
    """The entries that fit their clients, with settled configurations, and those left out with why.

    ``note`` receives every method that is left out. ``check`` refuses an experiment.
    """
    fitting: dict[str, PlannedRun] = {}
    left_out: dict[str, str] = {}
    judged_by: dict[str, str] = {}
    for entry in entries:
        if entry.row in left_out:
            continue
        try:
            if entry.build is None:
                clients.of(entry.config)
        except CoterieError as error:
            raise type(error)(_whose(error, entry, entries, clients)) from None
        try:
            experiment = entry.experiment(clients)
        except CoterieError as error:
            if not (entry.optional and isinstance(error, ConfigError)):
                raise type(error)(_where(entry, error)) from None
            left_out[entry.row] = str(error)
            continue
        if check is not None:
            check(experiment)
        judged_by.setdefault(main_score(experiment.population.classes is None), entry.name)
        settled = entry.config if entry.build else parse(experiment.config)
        fitting[entry.name] = replace(entry, config=settled)
    kept = [entry for entry in fitting.values() if entry.row not in left_out]
    if not kept:
        raise ConfigError(next(iter(left_out.values())))
    if len(judged_by) > 1:
        first, second = judged_by.values()
        raise ConfigError(
            f"{first} and {second} are judged by different scores: compare classification and "
            "regression separately"
        )
    for row, reason in left_out.items():
        note(row, reason)
    return kept, left_out


def _whose(
    error: CoterieError, entry: PlannedRun, entries: Sequence[PlannedRun], clients: Populations
) -> str:
    """An error in reading clients, with its setting unless all settings have the same error."""
    setting = place_of("", entry.settings).removeprefix(", ")
    for other in {repr(dict(e.settings)): e for e in entries}.values():
        try:
            clients.of(other.config)
        except CoterieError as others_error:
            if str(others_error) == str(error):
                continue
        return f"{setting}: {error}" if setting else str(error)
    return str(error)


def _where(entry: PlannedRun, error: CoterieError) -> str:
    return str(error) if entry.seed is None else f"{entry.name}: {error}"


def experiment_for(config: Config, population: Population) -> Experiment:
    """The experiment of a configuration on these clients; an error if it does not fit them."""
    check_groups(config, population)
    return experiment_of(config, population)


def check_groups(config: Config, population: Population) -> None:
    """Refuse the oracle where the true groups are unknown."""
    if config.method.name == "oracle" and population.groups is None:
        raise ConfigError(
            "method oracle needs clients with known groups: add a shift (--shift rotation), or "
            "leave oracle out of --methods"
        )
