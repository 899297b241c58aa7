"""The two ways to run from Python: from a configuration, or with your own clients and model."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from coterie.client.fit import Criterion
from coterie.client.plan import Metric
from coterie.core.keys import keys
from coterie.core.method import Method
from coterie.core.schema import Config, Schedule, part
from coterie.data import Population, from_clients
from coterie.data.clients import public_samples
from coterie.data.metadata import Values, columns_by_client
from coterie.errors import ConfigError, unknown
from coterie.experiment.config import (
    assign,
    criterion_of,
    experiment_of,
    parse,
    read_start,
    settings_of,
)
from coterie.experiment.experiment import Experiment, Watch, execute, reinitialised
from coterie.experiment.presets import PRESETS
from coterie.experiment.privacy import left_public
from coterie.experiment.user_code import admitted
from coterie.methods import make as make_method
from coterie.models import make_model
from coterie.results.result import Result
from coterie.results.toml import read_toml

if TYPE_CHECKING:
    from coterie.tracking import Tracker

    Track = Iterable[str | Tracker] | str | Tracker


def run(
    config: Config | Mapping[str, Any] | str | Path,
    directory: str | Path | None = None,
    watch: Watch | None = None,
    track: Track | None = None,
) -> Result:
    """Run an experiment from a configuration: a TOML file, nested dicts, or a ``Config``.

    ``watch`` is called with the event of each round. ``track`` names trackers, "tensorboard",
    "mlflow" or "wandb", or holds your own (see ``coterie.Tracker``).

    >>> result = run({"data": {"clients": 4}, "run": {"rounds": 2, "engine": "loop"}})
    >>> len(result.history), len(result.clients)
    (2, 4)
    """
    if isinstance(config, str | Path):
        config = read_toml(Path(config))
    if not isinstance(config, Config):
        config = parse(admitted(config))
    run_dir = Path(directory) if directory else None
    trackers = _tracking(track, run_dir)
    experiment = experiment_of(config)
    return _executed(experiment, run_dir, watch=watch, track=trackers)


def simulate(
    clients: Sequence[Any] | Population,
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    method: str | Method = "fedavg",
    rounds: int = 20,
    *,
    model_parameters: Mapping[str, Any] | None = None,
    init: str = "torch",
    loss: str | Criterion | None = None,
    metrics: Mapping[str, Metric] | None = None,
    start: Mapping[str, torch.Tensor] | str | Path | None = None,
    freeze: Sequence[str] = (),
    bn: str = "shared",
    test_fraction: float = 0.2,
    val_fraction: float = 0.1,
    metadata: Mapping[str, Values] | None = None,
    public: torch.Tensor | np.ndarray[Any, Any] | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    discard_damaged: bool = False,
    watch: Watch | None = None,
    track: Track | None = None,
    **settings: Any,
) -> Result:
    """Run on your own data: a list of ``(x, y)`` with one entry per client, or a ``Population``.

    ``model`` is a name from ``coterie.models``, a module (training starts from its weights), or a
    function that returns one. ``init`` says how weights are initialised: "torch" leaves that to
    PyTorch and the model, while "he", "glorot" and "authors" draw the weights of convolutions and
    dense layers. ``start`` are weights to start from instead, by name or in a safetensors file.
    ``freeze`` names layers that are neither trained nor sent. ``metrics`` are additional scores,
    functions of outputs and targets. ``metadata`` are columns with a value for each client, as in
    ``{"site": {0: "north", 1: "south"}}``. ``public`` are unlabelled samples on which the server
    runs models, for methods that need them, instead of those of a population. ``resume`` continues
    the run in ``directory``, and ``discard_damaged`` does so even if a damaged file loses part of
    its history. ``track`` are trackers, as for ``run``. ``settings`` are those of the training
    schedule (``epochs``, ``batch_size``, ``lr``, …) and of the run (``cohort``, ``seed``,
    ``engine``, ``workers``, ``evaluate_every``, …), and the tables ``wire``, ``clock``,
    ``availability``, ``stop`` and ``privacy`` as dicts, as in ``wire={"up": "qsgd"}``.

    >>> import torch
    >>> people = [(torch.randn(40, 3), torch.randint(0, 2, (40,))) for _ in range(4)]
    >>> result = simulate(people, model="logistic", method="fedavg", rounds=2, engine="loop")
    >>> sorted(result.groups)
    [0, 1, 2, 3]
    """
    run_dir = Path(directory) if directory else None
    trackers = _tracking(track, run_dir)
    preset = method if isinstance(method, str) and method in PRESETS else None
    config = parse(settings_tree({"rounds": rounds, **settings}, preset))
    population = population_from(
        clients, config.run.seed, test_fraction, val_fraction, metadata, public
    )
    experiment = experiment_on(
        population,
        model,
        own_method(method if preset is None else config.method.name),
        config,
        model_parameters=model_parameters,
        init=init,
        loss=loss,
        metrics=metrics,
        start=start,
        freeze=freeze,
        bn=bn,
    )
    return _executed(
        experiment,
        run_dir,
        resume=resume,
        watch=watch,
        track=trackers,
        discard_damaged=discard_damaged,
    )


def population_from(
    clients: Sequence[Any] | Population,
    seed: int,
    test_fraction: float = 0.2,
    val_fraction: float = 0.1,
    metadata: Mapping[str, Values] | None = None,
    public: torch.Tensor | np.ndarray[Any, Any] | None = None,
) -> Population:
    """The population of own clients; the seed decides which samples are for testing."""
    population = (
        clients
        if isinstance(clients, Population)
        else from_clients(
            list(clients), test_fraction=test_fraction, val_fraction=val_fraction, seed=seed
        )
    )
    if public is not None:
        example = population.clients[0].train.x.numpy()
        population = replace(population, public=public_samples(public, population.kind, example))
    if metadata is not None:
        names = [client.name for client in population.clients]
        columns = columns_by_client(metadata, names)
        population = replace(population, metadata={**population.metadata, **columns})
    return population


def own_method(method: str | Method) -> Method:
    """A method, or the one of this name, which may have parameters as in ``ifca:k=4``."""
    if isinstance(method, str):
        tree = admitted({"method": {"name": method}})
        if "train" in tree:
            raise ConfigError(f"method = {method!r}: give training settings by name, as in lr=0.1")
        parameters = dict(tree["method"])
        return make_method(parameters.pop("name"), parameters)
    if not isinstance(method, Method):
        raise ConfigError(
            f"method = {method!r}: give a name, or a method returned by its factory, as in "
            "coterie.ifca(k=3)"
        )
    return method


def experiment_on(
    population: Population,
    model: str | nn.Module | Callable[[], nn.Module],
    method: Method,
    config: Config,
    *,
    model_parameters: Mapping[str, Any] | None = None,
    init: str = "torch",
    loss: str | Criterion | None = None,
    metrics: Mapping[str, Metric] | None = None,
    start: Mapping[str, torch.Tensor] | str | Path | None = None,
    freeze: Sequence[str] = (),
    bn: str = "shared",
) -> Experiment:
    """An experiment on own clients; ``config`` has its settings, the rest is as in ``simulate``."""
    if isinstance(start, str | Path):
        start = read_start(str(start))
    return Experiment(
        population=population,
        model=_factory(model, population, dict(model_parameters or {}), init),
        method=method,
        criterion=_aligned(loss, population) if callable(loss) else criterion_of(loss, population),
        schedule=part(Schedule, config.train),
        settings=settings_of(config),
        # Training starts from a module's own weights unless others are requested.
        start=model.state_dict()
        if start is None and isinstance(model, nn.Module) and init == "torch"
        else start,
        freeze=tuple(freeze),
        bn=bn,
        init=init,
        metrics={name: _aligned(f, population) for name, f in (metrics or {}).items()},
        config={
            "python": {
                "made_by": "coterie.simulate",
                "method": method.name,
                "init": init,
                **_recorded(config),
            }
        },
    )


def _executed(experiment: Experiment, run_dir: Path | None, **options: Any) -> Result:
    """Execute an experiment, with its warnings as Python's."""
    _warn_of_public(experiment)
    tell = _Telling()
    result = execute(experiment, run_dir, say=tell, **options)
    tell.at_the_end(result)
    return result


class _Telling:
    """Passes a run's warnings on as Python's, each once."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, text: str) -> None:
        first, _, rest = text.partition(": ")
        if first == "warning":
            self._warn(rest)

    def at_the_end(self, result: Result) -> None:
        """Warn of what only the end of the run has shown."""
        for text in result.summary.get("warnings") or ():
            if text not in self.told:
                self._warn(text)

    def _warn(self, text: str) -> None:
        self.told.append(text)
        warnings.warn(text, stacklevel=_depth())


def _depth() -> int:
    """How far away the caller of Coterie is, so that a warning names its line."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("coterie."):
        frame, depth = frame.f_back, depth + 1
    return depth


def _warn_of_public(experiment: Experiment) -> None:
    if text := left_public(experiment.settings.privacy, experiment.method):
        warnings.warn(text, stacklevel=3)


def _tracking(track: Track | None, directory: Path | None) -> Any:
    from coterie.tracking import tracking

    return tracking(track, directory)


def _factory(
    model: str | nn.Module | Callable[[], nn.Module],
    population: Population,
    parameters: Any,
    init: str,
) -> Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        module = model
        # Other initialisations draw some layers; the rest keep the module's weights.
        return lambda: reinitialised(module) if init == "torch" else copy.deepcopy(module)
    if callable(model):
        return model
    name: str = admitted({"model": {"name": model}})["model"]["name"]
    if name == "text" and population.vocabulary is not None:
        parameters.setdefault("vocabulary", len(population.vocabulary))
    return lambda: make_model(name, population.shape, population.targets, **parameters)


_TABLES = {
    "wire": '{"up": "qsgd"}',
    "clock": '{"name": "links"}',
    "availability": '{"name": "diurnal"}',
    "stop": '{"patience": 20}',
    "privacy": '{"secure": True}',
}


# What other libraries call these settings.
_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "eta", "client_lr"), "lr"),
    **dict.fromkeys(("local_epochs", "num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("num_rounds", "n_rounds", "global_rounds", "global_epochs"), "rounds"),
    **dict.fromkeys(("fraction", "fraction_fit", "join_ratio", "participation"), "cohort"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("num_workers", "n_jobs"), "workers"),
    **dict.fromkeys(("optim", "optimiser"), "optimizer"),
}


def settings_tree(settings: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """The tables of a configuration that plain settings such as ``lr=0.1`` stand for."""
    paths = {"evaluate_every": "evaluation.every", "evaluate_clients": "evaluation.clients"}
    top_level = ("train", "run", "evaluation")
    paths |= {key.name: key.path for key in keys() if key.table in top_level}
    for name in ("loss", "every", "clients"):
        del paths[name]
    tree: dict[str, Any] = {}
    tables = _TABLES
    for name, value in settings.items():
        if name in tables and isinstance(value, Mapping):
            tree[name] = dict(value)
        elif name in tables:
            raise ConfigError(f"{name} must be a dict, as in {_TABLES[name]}, not {value!r}")
        elif name in _ELSEWHERE:
            raise ConfigError(f"unknown setting '{name}': it is called {_ELSEWHERE[name]} here")
        elif name not in paths:
            raise ConfigError(unknown("setting", name, [*paths, *tables]))
        else:
            assign(tree, paths[name], value)
    return admitted(tree | ({} if preset is None else {"method": {"name": preset}}))


def _recorded(config: Config) -> dict[str, Any]:
    """The settings to record in the run directory; data, model and method are objects."""
    tree = config.model_dump()
    recorded = {key: tree[key] for key in ("train", "run", "evaluation", *_TABLES)}
    del recorded["train"]["loss"]
    return recorded


def _aligned(function: Callable[..., Any], population: Population) -> Callable[..., Any]:
    """A user's loss or metric; in a regression its outputs have the shape of the targets."""
    return function if population.classes is not None else partial(_in_shape, function)


def _in_shape(function: Callable[..., Any], outputs: torch.Tensor, y: torch.Tensor) -> Any:
    return function(outputs.reshape(y.shape), y)
