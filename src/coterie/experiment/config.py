"""Configuration: a TOML file, flags and ``--set section.key=value`` all become this one value."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from coterie import data as coterie_data
from coterie.channel.compression.coding import Coding
from coterie.channel.policy import cohort_size
from coterie.channel.privacy.settings import Privacy
from coterie.client.fit import Criterion, optimiser_class
from coterie.client.losses import FOR_CLASSES, LOSSES
from coterie.core.messages import ClientId
from coterie.core.method import Method
from coterie.core.schema import (
    Config,
    DataSection,
    Measured,
    MethodSection,
    Named,
    Schedule,
    part,
    sentence,
    shallow,
)
from coterie.data import Population
from coterie.data.metadata import columns_by_client, names_file, read_metadata
from coterie.errors import ConfigError, DataError, unknown
from coterie.experiment.experiment import Experiment, Settings, check_engine
from coterie.experiment.presets import expanded
from coterie.experiment.stopping import Stop
from coterie.methods import excluded_by
from coterie.methods import make as make_method
from coterie.methods.known_groups import with_groups_read
from coterie.models import check_init, make_model
from coterie.registry import MODELS


def parse(tree: Mapping[str, Any]) -> Config:
    """A configuration from nested tables; what is wrong is said in one sentence.

    >>> parse({"run": {"rounds": 5}}).run.rounds
    5
    >>> parse({"run": {"round": 5}})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown key 'run.round'; did you mean 'run.rounds'? ...
    """
    if "sweep" in tree:
        raise ConfigError("a table [sweep] makes this several runs: coterie compare FILE")
    try:
        return Config.model_validate(expanded(tree))
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. Another name in a named table drops the old one's parameters.

    >>> tree = {"method": {"name": "fedprox", "mu": 0.1}}
    >>> assign(tree, "method.name", "ifca"); assign(tree, "method.k", 3); tree
    {'method': {'name': 'ifca', 'k': 3}}
    """
    *tables, leaf = key.split(".")
    if not tables:
        raise ConfigError(f"'{key}' is not a key: write section.key=value, as in train.lr=0.01")
    place = tree
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise ConfigError(f"'{key}' is not a key: '{table}' is not a table")
    section = Config.model_fields[tables[0]].default if tables[0] in Config.model_fields else None
    if leaf == "name" and isinstance(section, Named) and len(tables) == 1:
        known = set(type(section).model_fields) - {"name"}
        if place.get("name", section.name) != value:
            for old in [k for k in place if k not in known]:
                del place[old]
    place[leaf] = value


def assign_texts(tree: dict[str, Any], texts: Sequence[str]) -> None:
    """Set each ``section.key=value``; names come first, for they drop another name's parameters.

    A parameter of the method displaces those that cannot be given beside it.

    >>> tree = {"method": {"name": "ifca", "k": 3}}
    >>> assign_texts(tree, ["method.mu=0.1", "method.name=fedprox"]); tree
    {'method': {'name': 'fedprox', 'mu': 0.1}}
    """
    keys = {text: text.partition("=")[0].strip() for text in texts}
    for text in [t for t in texts if keys[t].endswith(".name")]:
        assign_text(tree, text)
    displace(tree, [key.removeprefix("method.") for key in keys.values()])
    for text in [t for t in texts if not keys[t].endswith(".name")]:
        assign_text(tree, text)


def displace(tree: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Drop parameters of the method that exclude those that are about to be set over them.

    Two that exclude each other and are both set afterwards are refused by the method.

    >>> tree = {"method": {"name": "fedclust", "clusters": 4}}
    >>> displace(tree, ["threshold"]); tree
    {'method': {'name': 'fedclust'}}
    """
    table = tree.get("method")
    if not isinstance(table, dict):
        return
    name = str(table.get("name", MethodSection().name))
    for parameter in parameters:
        for other in excluded_by(name, parameter):
            table.pop(other, None)


def assign_text(tree: dict[str, Any], text: str) -> None:
    """Set ``section.key=value``, the value written as in TOML (or a bare word)."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write section.key=value, as in train.lr=0.01")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    assign(tree, key.strip(), parsed)


def with_public(config: Config, needed: bool) -> Config:
    """With public samples, where they are needed and nobody said how many."""
    if not needed or config.data.public is not None:
        return config
    data = replace(config.data, public="auto")
    return config.model_copy(update={"data": data})


def population_of(config: Config) -> Population:
    """The clients and their data."""
    section = config.data
    folder = Path(section.folder) if section.folder else None
    options = dict(section.options)
    building = {
        k: options.pop(k) for k in ("max_vocabulary", "length", "standardize") if k in options
    }
    file, columns = metadata_of(section)
    if columns and section.set in ("csv", "text"):  # these columns are no model inputs
        options["columns"] = list(dict.fromkeys([*options.get("columns", ()), *columns]))
    raw = coterie_data.load(section.set, folder, **options)
    shift = None if config.shift.name == "none" else config.shift.name
    population = coterie_data.build_population(
        raw,
        clients=section.clients,
        partition=config.partition.name,
        partition_params=config.partition.parameters,
        shift=shift,
        shift_params=config.shift.parameters,
        test_fraction=section.test_fraction,
        val_fraction=section.val_fraction,
        public=section.public,
        samples=section.samples,
        seed=config.run.seed,
        metadata=columns,
        **building,
    )
    if file is None:
        return population
    names = [client.name for client in population.clients]
    return replace(population, metadata=columns_by_client(read_metadata(file), names))


def metadata_of(section: DataSection) -> tuple[Path | None, list[str]]:
    """Where metadata comes from: a file with a row for each client, or columns of the data."""
    if isinstance(section.metadata, str) and names_file(section.metadata):
        return Path(section.metadata), []
    given = section.metadata
    return None, [given] if isinstance(given, str) else given


def criterion_of(name: str | None, population: Population) -> Criterion:
    """The loss: by name, or what suits the data."""
    chosen = name or ("mse" if population.classes is None else "cross-entropy")
    if chosen not in LOSSES:
        raise ConfigError(unknown("loss", chosen, LOSSES))
    if (chosen in FOR_CLASSES) == (population.classes is None):
        kind = "numbers" if population.classes is None else "classes"
        raise ConfigError(f"train.loss = '{chosen}' does not fit targets that are {kind}")
    return LOSSES[chosen]


def read_start(path: str) -> dict[str, torch.Tensor]:
    """Given weights, from a safetensors file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"model.start: there is no file {path}") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"model.start: {path} is not a safetensors file ({error})") from None


def method_of(config: Config) -> Method:
    """The method, with the parameters of its table."""
    section = config.method
    return make_method(
        section.name, section.parameters, section.layer_interval, section.layer_share
    )


def check_model(config: Config) -> None:
    """Refuse a model and an initialisation that there are not."""
    MODELS.find(config.model.name)
    check_init(config.model.init)


def groups_inlined(config: Config) -> Config:
    """With the groups of the file that ``method.groups`` names: the run needs it no more."""
    section = config.method
    read = with_groups_read(section.name, section.parameters)
    return config.model_copy(update={"method": section.model_copy(update=read)})


def experiment_of(
    config: Config,
    population: Population | None = None,
    whole: bool = True,
    absent: Sequence[ClientId] = (),
) -> Experiment:
    """The experiment that a configuration describes; names are checked before data is read.

    A single client of a real federation does not see the ``whole`` of it, and checks nothing; some
    may be ``absent`` when it begins.
    """
    config = groups_inlined(config)
    method = method_of(config)
    check_model(config)
    check_engine(settings_of(config))
    optimiser_class(config.train.optimizer)
    start = read_start(config.model.start) if config.model.start else None
    if population is None:
        config = with_public(config, method.needs_public)
        population = population_of(config)
    if config.run.holdout < len(population.clients):  # otherwise the experiment says so itself
        cohort_size(config.run.cohort, len(population.clients) - config.run.holdout)
    parameters = config.model.parameters
    if config.model.name == "text" and population.vocabulary is not None:
        parameters.setdefault("vocabulary", len(population.vocabulary))
    shape, targets = population.shape, population.targets

    def model() -> torch.nn.Module:
        return make_model(config.model.name, shape, targets, **parameters)

    experiment = Experiment(
        population=population,
        model=model,
        method=method,
        criterion=criterion_of(config.train.loss, population),
        schedule=part(Schedule, config.train),
        settings=settings_of(config),
        start=start,
        freeze=tuple(config.model.freeze),
        bn=config.model.bn,
        init=config.model.init,
        config=_placed(config.model_dump()),
        absent=tuple(absent),
    )
    if not whole:
        return experiment
    experiment.plan(Path())  # what does not fit is said before anything is written
    return _settled(experiment)


def _settled(experiment: Experiment) -> Experiment:
    """With the noise that a budget asks for in its configuration: more rounds do not change it."""
    found = experiment.privacy
    if not found.noised:
        return experiment
    own = experiment.config["privacy"]
    config = {**experiment.config, "privacy": {k: getattr(found, k) for k in own}}
    settings = replace(experiment.settings, privacy=found)
    return replace(experiment, config=config, settings=settings)


def settings_of(config: Config) -> Settings:
    """How the run goes."""
    check_device(config.run.device)
    return Settings(
        **shallow(config.run),
        **shallow(part(Measured, config.evaluation)),
        evaluate_every=config.evaluation.every,
        wire=part(Coding, config.wire),
        clock=config.clock.model_dump(),
        availability=config.availability.model_dump(),
        stop=part(Stop, config.stop),
        privacy=part(Privacy, config.privacy),
    )


def run_anew(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set keys of ``[run]`` for a run that is continued; another engine drops what is Ray's.

    >>> tree = {"run": {"engine": "ray", "address": "auto"}}
    >>> run_anew(tree, {"engine": "loop", "workers": None}); tree
    {'run': {'engine': 'loop'}}
    """
    given = {key: value for key, value in changes.items() if value is not None}
    table = tree.setdefault("run", {})
    if given.get("engine", "ray") != "ray":
        for key in ("address", "cpus_per_worker", "gpus_per_worker"):
            table.pop(key, None)
    table |= given


def _placed(tree: dict[str, Any]) -> dict[str, Any]:
    """With absolute paths, so that a run can be resumed from any folder."""
    for table, key in (("data", "folder"), ("model", "start"), ("availability", "file")):
        if tree[table].get(key):
            tree[table][key] = str(Path(tree[table][key]).resolve())
    metadata = tree["data"]["metadata"]
    if isinstance(metadata, str) and names_file(metadata):
        tree["data"]["metadata"] = str(Path(metadata).resolve())
    return tree


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"run.device = '{name}' is not available here: {reason}") from None
