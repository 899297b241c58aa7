"""The runs that a comparison consists of, checked before any of them begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from coterie.core.schema import Config
from coterie.data import Population
from coterie.errors import ConfigError, CoterieError
from coterie.experiment.compare.sweep import (
    ALL,
    Asked,
    Assignments,
    Sweep,
    every_method,
    methods_of,
    settings_of,
)
from coterie.experiment.config import experiment_of, method_of, parse, population_of, with_public
from coterie.experiment.experiment import Experiment
from coterie.results.evaluation import headline
from coterie.results.titles import place_of, shown

_ROOM = 2**30  # bytes of clients' data that are kept for another run
_LONGEST = 120  # characters of a folder's name

Configure = Callable[[Asked, Assignments], Config]
Note = Callable[[str, str], None]


@dataclass(frozen=True)
class Entry:
    """A run to be: its method's title, configuration and folder below the comparison's.

    One that is ``optional`` may refuse, or fail. In a sweep ``seed`` and ``settings`` tell it from
    the others of its method; otherwise ``seed`` is None.
    """

    title: str
    config: Config
    optional: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    folder: str = ""

    @property
    def place(self) -> str:
        """Which row of means it belongs to: the title and the settings."""
        return place_of(self.title, self.settings)

    @property
    def name(self) -> str:
        """What it is called: a title, or in a sweep all that tells it from others."""
        return self.place if self.seed is None else f"{self.place}, seed {self.seed}"


class Populations:
    """Clients and their data, kept for other runs on the same ones as far as there is room."""

    def __init__(self, room: int = _ROOM) -> None:
        self._room = room
        self._kept: dict[str, Population] = {}

    @staticmethod
    def key(config: Config) -> str:
        """A name for all that decides who the clients are."""
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
        """No other run needs these."""
        self._kept.pop(self.key(config), None)


def _bytes(population: Population) -> int:
    tensors = [t for c in population.clients for s in (c.train, c.val, c.test) for t in (s.x, s.y)]
    return sum(t.numel() * t.element_size() for t in tensors)


# --- what is asked for, as runs ------------------------------------------------------------------


def entries_of(
    sweep: Sweep, configure: Configure, people: Populations, oracle_if_possible: bool = False
) -> list[Entry]:
    """All runs of a sweep, those on the same clients one after another.

    ``configure`` makes a configuration from a method and what else is set. The methods of "all"
    may refuse the set-up, others must not; ``oracle_if_possible`` leaves the oracle out where the
    true groups are not known.
    """
    asked = methods_of(sweep)
    for title, name, own in asked:
        if name == ALL and own:
            raise ConfigError(f"--methods {title.replace(' ', ':')}: 'all' takes no parameters")
    combined = list(settings_of(sweep))
    known: dict[str, str] = {}
    first = next((each for each in asked if each[1] != ALL), (ALL, "fedavg", dict[str, Any]()))
    public = any(name == ALL for _, name, _ in asked)
    for settings, assignments in combined:
        for each in asked:  # names and parameters, before data is read
            if each[1] != ALL:
                public |= method_of(configure(each, assignments)).needs_public
        same = configure(first, assignments).model_dump_json()
        title = place_of("", settings).removeprefix(", ")
        if known.setdefault(same, title) != title:  # 1 and 1.0 are one learning rate
            raise ConfigError(
                f"vary: {known[same]} and {title} are the same; one of them is enough"
            )

    def configured(method: Asked, assignments: Assignments) -> Config:
        """Public samples that one method needs are set aside for all: clients stay the same."""
        return with_public(configure(method, assignments), public)

    found: list[Entry] = []
    for settings, assignments in combined:
        for drawn in [[("run.seed", seed)] for seed in sweep.seeds] or [[]]:
            made = _on_the_same(asked, [*assignments, *drawn], configured, people)
            if oracle_if_possible and people.of(made[0].config).groups is None:
                made = [e for e in made if e.config.method.name != "oracle"]
            for entry in made:
                seed = None if sweep.plain else entry.config.run.seed
                found.append(replace(entry, settings=settings, seed=seed))
    return _placed(found)


def _on_the_same(
    asked: Sequence[Asked], assignments: Assignments, configure: Configure, people: Populations
) -> list[Entry]:
    """The runs of one setting and seed: a method each."""
    named = {each[0]: configure(each, assignments) for each in asked if each[1] != ALL}
    first = next(iter(named.values()), None) or configure((ALL, "fedavg", {}), assignments)
    found: list[Entry] = []
    for title, name, _ in asked:
        if name != ALL:
            found.append(Entry(title, named[title]))
            continue
        for each in every_method(people.of(first), first.run.holdout):
            if each[0] not in named:
                found.append(Entry(each[0], configure(each, assignments), optional=True))
    return found


def more_seeds(entries: Sequence[Entry], seeds: Iterable[int]) -> list[Entry]:
    """Runs like these with further seeds."""
    if any(entry.seed is None for entry in entries):
        raise ConfigError(
            "this comparison has one seed and no folders for others: begin a new one with --seeds"
        )
    known = {entry.seed for entry in entries}
    models = {entry.place: entry for entry in reversed(entries)}
    found = []
    for seed in seeds:
        for entry in [] if seed in known else [e for e in entries if models[e.place] is e]:
            tree = entry.config.model_dump()
            tree["run"]["seed"] = seed
            folder = PurePosixPath(entry.folder).parent / f"seed-{seed}"
            found.append(replace(entry, config=parse(tree), seed=seed, folder=str(folder)))
    return found


# --- folders -------------------------------------------------------------------------------------


def folder_of(title: str) -> str:
    """The name of the folder that a method's run is kept in.

    >>> folder_of("ifca k=4")
    'ifca-k=4'
    """
    name = re.sub(r'[\s/\\<>:"|?*\x00-\x1f]+', "-", title).strip(".") or "-"
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def _placed(entries: Sequence[Entry]) -> list[Entry]:
    """Each with a folder of its own, also where letters' case does not count."""
    taken: dict[str, str] = {}
    found = []
    for entry in entries:
        parts = [folder_of(entry.title)]
        if entry.settings:
            told = [
                shown(value) if key in ("partition", "shift") else f"{key}={shown(value)}"
                for key, value in entry.settings.items()
            ]
            parts.append(folder_of(",".join(told)))
        own, number = "/".join(parts), 2
        while taken.setdefault(own.casefold(), entry.place) != entry.place:
            own, number = f"{'/'.join(parts)}-{number}", number + 1
        folder = own if entry.seed is None else f"{own}/seed-{entry.seed}"
        found.append(replace(entry, folder=folder))
    return found


# --- checks --------------------------------------------------------------------------------------


def checked(
    entries: Sequence[Entry], people: Populations, note: Note
) -> tuple[list[Entry], dict[str, str]]:
    """Those that fit, with all that their configuration says settled; who was left out, and why.

    ``note`` is told of every method that is left out.
    """
    found: dict[str, Entry] = {}
    left_out: dict[str, str] = {}
    judged: dict[str, str] = {}
    for entry in entries:
        if entry.place in left_out:
            continue
        try:
            population = people.of(entry.config)
        except CoterieError as error:
            raise type(error)(_whose(error, entry, entries, people)) from None
        try:
            experiment = experiment_for(entry.config, population)
        except CoterieError as error:
            if not (entry.optional and isinstance(error, ConfigError)):
                raise type(error)(_where(entry, error)) from None
            left_out[entry.place] = str(error)
            continue
        judged.setdefault(headline(population.classes is None), entry.name)
        found[entry.name] = replace(entry, config=parse(experiment.config))
    kept = [entry for entry in found.values() if entry.place not in left_out]
    if not kept:
        raise ConfigError(next(iter(left_out.values())))
    if len(judged) > 1:
        one, other = judged.values()
        raise ConfigError(
            f"{one} and {other} are judged by different scores: compare classes and numbers apart"
        )
    for place, reason in left_out.items():
        note(place, reason)
    return kept, left_out


def _whose(error: CoterieError, entry: Entry, entries: Sequence[Entry], people: Populations) -> str:
    """What is wrong with its clients, and in which setting, unless it is so in all of them."""
    told = place_of("", entry.settings).removeprefix(", ")
    for other in {repr(dict(e.settings)): e for e in entries}.values():
        try:
            people.of(other.config)
        except CoterieError as its:
            if str(its) == str(error):
                continue
        return f"{told}: {error}" if told else str(error)
    return str(error)


def _where(entry: Entry, error: CoterieError) -> str:
    return str(error) if entry.seed is None else f"{entry.name}: {error}"


def experiment_for(config: Config, population: Population) -> Experiment:
    """The experiment of a configuration on these clients; refused if it does not fit them."""
    if config.method.name == "oracle" and population.groups is None:
        raise ConfigError(
            "method oracle needs a scenario with known groups: give the data a shift (--shift "
            "rotation), or leave oracle out of --methods"
        )
    return experiment_of(config, population)
