"""Read a configuration from tables, flags and ``--set``, and build the experiment from it."""

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
    Evaluation,
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
    """Check nested tables and return the configuration; an error names the key.

    >>> parse({"run": {"rounds": 5}}).run.rounds
    5
    >>> parse({"run": {"round": 5}})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown key 'run.round'; did you mean 'run.rounds'? ...
    """
    if "sweep" in tree:
        raise ConfigError("a table [sweep] describes several runs: use coterie compare FILE")
    try:
        return Config.model_validate(expanded(tree))
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A new name in a named table drops the old name's parameters.

    >>> tree = {"method": {"name": "fedprox", "mu": 0.1}}
    >>> assign(tree, "method.name", "ifca"); assign(tree, "method.k", 3); tree
    {'method': {'name': 'ifca', 'k': 3}}
    """
    *tables, leaf = key.split(".")
    if not tables:
        raise ConfigError(f"'{key}' is not a key: write section.key=value, as in train.lr=0.01")
    node = tree
    for table in tables:
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            raise ConfigError(f"'{key}' is not a key: '{table}' is not a table")
    section = Config.model_fields[tables[0]].default if tables[0] in Config.model_fields else None
    if leaf == "name" and isinstance(section, Named) and len(tables) == 1:
        known = set(type(section).model_fields) - {"name"}
        if node.get("name", section.name) != value:
            for parameter in [k for k in node if k not in known]:
                del node[parameter]
    node[leaf] = value


def assign_texts(tree: dict[str, Any], texts: Sequence[str]) -> None:
    """Set each ``section.key=value``, names first, since they drop the old name's parameters.

    A parameter of the method replaces those that exclude it.

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
    """Drop parameters of the method that exclude those about to be set.

    If two parameters that exclude each other are both set afterwards, the method refuses them.

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
    """The configuration with public samples, if they are needed and their number is not set."""
    if not needed or config.data.public is not None:
        return config
    data = replace(config.data, public="auto")
    return config.model_copy(update={"data": data})


def population_of(config: Config) -> Population:
    """The clients and their data, as the configuration describes them."""
    section = config.data
    folder = Path(section.folder) if section.folder else None
    options = dict(section.options)
    building = {
        k: options.pop(k) for k in ("max_vocabulary", "length", "standardize") if k in options
    }
    file, columns = metadata_of(section)
    if columns and section.set in ("csv", "text"):  # these columns are not inputs of the model
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
    """The source of metadata: a file with a row for each client, or columns of the data."""
    if isinstance(section.metadata, str) and names_file(section.metadata):
        return Path(section.metadata), []
    columns = section.metadata
    return None, [columns] if isinstance(columns, str) else columns


def criterion_of(name: str | None, population: Population) -> Criterion:
    """The loss of this name, or the default for the kind of targets."""
    chosen = name or ("mse" if population.classes is None else "cross-entropy")
    if chosen not in LOSSES:
        raise ConfigError(unknown("loss", chosen, LOSSES))
    if (chosen in FOR_CLASSES) == (population.classes is None):
        kind = "numbers" if population.classes is None else "classes"
        raise ConfigError(f"train.loss = '{chosen}' does not fit targets that are {kind}")
    return LOSSES[chosen]


def read_start(path: str) -> dict[str, torch.Tensor]:
    """Read the weights to start from a safetensors file."""
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
    """Refuse an unknown model or initialisation."""
    MODELS.find(config.model.name)
    check_init(config.model.init)


def groups_inlined(config: Config) -> Config:
    """The configuration with the groups of the file that ``method.groups`` names."""
    section = config.method
    read = with_groups_read(section.name, section.parameters)
    return config.model_copy(update={"method": section.model_copy(update=read)})


def experiment_of(
    config: Config,
    population: Population | None = None,
    whole: bool = True,
    absent: Sequence[ClientId] = (),
) -> Experiment:
    """The experiment that a configuration describes; names are checked before data are read.

    A client of a real federation (``whole=False``) has only its own data and skips checks that need
    all clients. Clients that are ``absent`` join after the run has begun.
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
    if config.run.holdout < len(population.clients):  # otherwise the experiment refuses it
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
    experiment.plan(Path())  # refuse a mistake before anything is written
    return _settled(experiment)


def _settled(experiment: Experiment) -> Experiment:
    """The experiment with its calibrated noise in the configuration, so that a resume keeps it."""
    calibrated = experiment.privacy
    if not calibrated.noised:
        return experiment
    keys = experiment.config["privacy"]
    config = {**experiment.config, "privacy": {k: getattr(calibrated, k) for k in keys}}
    settings = replace(experiment.settings, privacy=calibrated)
    return replace(experiment, config=config, settings=settings)


def settings_of(config: Config) -> Settings:
    """The settings of a run that a configuration describes."""
    check_device(config.run.device)
    return Settings(
        **shallow(config.run),
        **shallow(part(Evaluation, config.evaluation)),
        evaluate_every=config.evaluation.every,
        evaluate_clients=config.evaluation.clients,
        wire=part(Coding, config.wire),
        clock=config.clock.model_dump(),
        availability=config.availability.model_dump(),
        stop=part(Stop, config.stop),
        privacy=part(Privacy, config.privacy),
    )


def change_run_settings(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set keys of ``[run]`` for a resumed run; an engine other than Ray drops Ray's keys.

    >>> tree = {"run": {"engine": "ray", "address": "auto"}}
    >>> change_run_settings(tree, {"engine": "loop", "workers": None}); tree
    {'run': {'engine': 'loop'}}
    """
    changed = {key: value for key, value in changes.items() if value is not None}
    table = tree.setdefault("run", {})
    if changed.get("engine", "ray") != "ray":
        for key in ("address", "cpus_per_worker", "gpus_per_worker"):
            table.pop(key, None)
    table |= changed


def _placed(tree: dict[str, Any]) -> dict[str, Any]:
    """The tables with absolute paths, so that a run can be resumed from any folder."""
    for table, key in (("data", "folder"), ("model", "start"), ("availability", "file")):
        if tree[table].get(key):
            tree[table][key] = str(Path(tree[table][key]).resolve())
    metadata = tree["data"]["metadata"]
    if isinstance(metadata, str) and names_file(metadata):
        tree["data"]["metadata"] = str(Path(metadata).resolve())
    return tree


def check_device(name: str) -> None:
    """Refuse a device that is not available."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"run.device = '{name}' is not available here: {reason}") from None
