"""The runs of a comparison on own clients, with own methods, models, losses and metrics."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import nn

from coterie.core.method import Method
from coterie.core.schema import Config
from coterie.data import Population
from coterie.errors import ConfigError
from coterie.experiment.api import experiment_on, population_from, settings_tree
from coterie.experiment.compare.entries import PlannedRun, placed
from coterie.experiment.compare.sweep import (
    ALL,
    USUAL,
    NamedMethod,
    Sweep,
    every_method,
    method_list,
    methods_of,
    settings_of_sweep,
)
from coterie.experiment.config import method_of, parse
from coterie.experiment.experiment import Experiment
from coterie.methods import short
from coterie.registry import METHODS, is_place

Model = str | nn.Module | Callable[[], nn.Module]
SetUp = Callable[[Mapping[str, Any], NamedMethod, list[tuple[str, Any]]], dict[str, Any]]
# What simulate takes about the clients and about an experiment; everything else are settings.
_OF_CLIENTS = ("test_fraction", "val_fraction", "metadata", "public")
_OF_EXPERIMENT = (*("model_parameters", "init", "loss", "metrics", "start", "freeze", "bn"),)


def named_methods(
    methods: Sequence[str | Method] | str | Method | None,
) -> tuple[list[NamedMethod], dict[str, Method]]:
    """The methods with their titles; those given as objects also by title."""
    given = [methods] if isinstance(methods, str | Method) else list(methods or [USUAL])
    named: list[NamedMethod] = []
    objects: dict[str, Method] = {}
    for each in given:
        if isinstance(each, Method):
            title, number = _title(each), 2
            while title in [t for t, _, _ in named]:
                title, number = f"{_title(each)} ({number})", number + 1
            named.append((title, each.name, {}))
            objects[title] = each
        elif isinstance(each, str):
            named += method_list(each)
        else:
            raise ConfigError(
                f"methods: {_shown(each)} is neither a name nor a method: give names, as in "
                '"ifca:k=4", or methods returned by their factories, as in coterie.ifca(k=4)'
            )
    titles = [title for title, _, _ in named]
    for title in titles:
        if titles.count(title) > 1:
            raise ConfigError(f"methods: {title} is given twice; once is enough")
    return named, objects


def _title(method: Method) -> str:
    parameters = method.source.parameters if method.source else {}
    if method.source is not None and method.source.factory == "join":
        parameters = parameters.get("parameters", {})
    settings = [
        f"{key}={value if isinstance(value, str | int | float) else reprlib.repr(value)}"
        for key, value in parameters.items()
    ]
    return " ".join([method.name, *settings])


def _shown(thing: object) -> str:
    return getattr(thing, "__name__", None) or reprlib.repr(thing)


def in_words(method: Method) -> NamedMethod | None:
    """The name and parameters of a method that a configuration can describe; None for others."""
    source = method.source
    if source is None:
        return None
    if source.factory == "join" and source.module == "coterie.methods":
        parameters = dict(source.parameters["parameters"])
        return _title(method), str(source.parameters["name"]), parameters
    place = f"{source.module}:{source.factory}"
    built_in = METHODS.index.get(method.name, {}).get("module") == source.module
    name = method.name if built_in else place
    known = built_in or (is_place(place) and source.module not in ("__main__", "builtins"))
    return (_title(method), name, dict(source.parameters)) if known else None


def labelled(models: Mapping[str, Model] | Sequence[Model] | Model | None) -> dict[str, Model]:
    """The models by label: names, classes of modules or names of functions."""
    if models is None:
        return {}
    if isinstance(models, Mapping):
        return {str(label): model for label, model in models.items()}
    given = [models] if isinstance(models, str | nn.Module) or callable(models) else list(models)
    by_label: dict[str, Model] = {}
    for model in given:
        label = _label(model)
        if label in by_label:
            raise ConfigError(
                f"models: two are called {label}: name them, as in "
                f"models={{'small': …, 'large': …}}"
            )
        by_label[label] = model
    return by_label


def _label(model: Model) -> str:
    if isinstance(model, str):
        return short(model)
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", type(model).__name__)


def own_runs(
    clients: Sequence[Any] | Population,
    named: Sequence[NamedMethod],
    objects: Mapping[str, Method],
    usual: bool,
    sweep: Sweep,
    models: Mapping[str, Model],
    settings: Mapping[str, Any],
    set_up: SetUp,
) -> list[PlannedRun]:
    """The runs of all methods, settings, models and seeds; nothing is run yet.

    With ``usual`` methods, the oracle is left out where the true groups are unknown.
    """
    if sweep.partitions or sweep.shifts:
        raise ConfigError(
            "partitions and shifts divide one data set among clients, and yours are divided "
            "already: leave them out, or use coterie.data.build_population"
        )
    fixed = [key for key in sweep.vary if key.split(".")[0] in ("data", "model", "partition")]
    if fixed:
        raise ConfigError(f"vary {fixed[0]}: the clients are your own; give models in models=")
    settings = dict(settings)
    about_clients = {k: settings.pop(k) for k in _OF_CLIENTS if k in settings}
    about_runs = {k: settings.pop(k) for k in _OF_EXPERIMENT if k in settings}
    given = settings.pop("model", "mlp")
    if models and "model" in about_runs:
        raise ConfigError("give model or models, not both")
    tree = settings_tree({"rounds": 20, **settings})

    @cache
    def population(seed: int) -> Population:
        return population_from(clients, seed, **about_clients)

    def build(title: str, model: Model, config: Config) -> Experiment:
        method = objects.get(title) or method_of(config)
        return experiment_on(population(config.run.seed), model, method, config, **about_runs)

    plain = sweep.plain and len(models) <= 1
    entries: list[PlannedRun] = []
    for label, model in (models or {"": given}).items():
        for varied, assignments in settings_of_sweep(sweep):
            axes = {"model": label} if len(models) > 1 else {}
            for seed in sweep.seeds or [None]:
                seeding = [] if seed is None else [("run.seed", seed)]
                first = parse(set_up(tree, ("", "fedavg", {}), [*assignments, *seeding]))
                people = population(first.run.seed)
                for title, name, own, optional in _every(named, people, first.run.holdout):
                    if usual and name == "oracle" and people.groups is None:
                        continue
                    changes = [*assignments, *seeding]
                    config = parse(set_up(tree, (title, name, own), changes))
                    entry = PlannedRun(title, config, optional, {**axes, **varied})
                    number = None if plain else config.run.seed
                    make = partial(build, title, model)
                    entries.append(replace(entry, seed=number, build=make, in_python=True))
    return placed(entries)


def _every(
    named: Sequence[NamedMethod], people: Population, holdout: int
) -> list[tuple[str, str, dict[str, Any], bool]]:
    """The methods, with "all" replaced by every method that may be left out."""
    methods: list[tuple[str, str, dict[str, Any], bool]] = []
    for title, name, own in named:
        if name != ALL:
            methods.append((title, name, own, False))
            continue
        taken = {t for t, _, _ in named}
        methods += [(*m, True) for m in every_method(people, holdout) if m[0] not in taken]
    return methods


def varied_methods(
    named: Sequence[NamedMethod], objects: Mapping[str, Method], sweep: Sweep
) -> list[NamedMethod]:
    """The methods, those by name repeated for the varied values of their parameters."""
    if not any(key.startswith("method.") for key in sweep.vary):
        return list(named)
    return methods_of(sweep, [m for m in named if m[0] not in objects]) + [
        m for m in named if m[0] in objects
    ]
