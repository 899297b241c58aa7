"""The two ways to run from Python: a configuration, or one's own clients and model."""

from __future__ import annotations

import copy
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
    """Run what a configuration describes: a TOML file, nested dicts, or a ``Config``.

    ``watch`` is called with each round's event. ``track`` are trackers: "tensorboard", "mlflow", or
    one of your own (see ``coterie.Tracker``).

    >>> result = run({"data": {"clients": 4}, "run": {"rounds": 2, "engine": "loop"}})
    >>> len(result.history), len(result.clients)
    (2, 4)
    """
    if isinstance(config, str | Path):
        config = read_toml(Path(config))
    if not isinstance(config, Config):
        config = parse(admitted(config))
    place = Path(directory) if directory else None
    tracked = _tracking(track, place)
    experiment = experiment_of(config)
    _warn_of_public(experiment)
    return execute(experiment, place, watch=watch, track=tracked)


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
    """Run on one's own data: a list of ``(x, y)`` per client, or a ``Population``.

    ``model`` is a name of ``coterie.models``, a module (training starts from its weights), or a
    function that makes one; ``init`` is how weights are first drawn: "torch" leaves that to PyTorch
    and the model itself, "he", "glorot" and "authors" draw those of convolutions and dense layers
    anew; ``start`` are other weights to start from, by name or in a safetensors file; ``freeze``
    are layers that are neither trained nor sent; ``metrics`` are further scores, functions of
    outputs and targets; ``metadata`` are columns with a value for each client, as in
    ``{"site": {0: "north", 1: "south"}}``; ``public`` are samples without labels that the server
    runs models on, where a method needs any; ``resume`` goes on with the run in ``directory``, and
    ``discard_damaged`` does so even if a damaged file there costs a part of its history;
    ``track`` are trackers, as for ``run``. ``settings`` are those of a schedule (``epochs``,
    ``batch_size``, ``lr``, …) and of a run (``cohort``, ``seed``, ``engine``, ``workers``,
    ``evaluate_every``, …), and the tables ``wire``, ``clock``, ``availability``, ``stop`` and
    ``privacy`` as dicts, as in ``wire={"up": "qsgd"}``.

    >>> import torch
    >>> people = [(torch.randn(40, 3), torch.randint(0, 2, (40,))) for _ in range(4)]
    >>> result = simulate(people, model="logistic", method="fedavg", rounds=2, engine="loop")
    >>> sorted(result.groups)
    [0, 1, 2, 3]
    """
    place = Path(directory) if directory else None
    tracked = _tracking(track, place)
    preset = method if isinstance(method, str) and method in PRESETS else None
    config = _checked({"rounds": rounds, **settings}, preset)
    method = method if preset is None else config.method.name
    if isinstance(method, str):
        method = admitted({"method": {"name": method}})["method"]["name"]
    chosen = settings_of(config)
    population = (
        clients
        if isinstance(clients, Population)
        else from_clients(
            list(clients),
            test_fraction=test_fraction,
            val_fraction=val_fraction,
            seed=chosen.seed,
        )
    )
    if public is not None:
        alike = population.clients[0].train.x.numpy()
        population = replace(population, public=public_samples(public, population.kind, alike))
    if metadata is not None:
        names = [client.name for client in population.clients]
        columns = columns_by_client(metadata, names)
        population = replace(population, metadata={**population.metadata, **columns})
    made = make_method(method) if isinstance(method, str) else method
    if not isinstance(made, Method):
        raise ConfigError(
            f"method = {method!r}: give a name, or a method made by its factory, as in "
            "coterie.ifca(k=3)"
        )
    if isinstance(start, str | Path):
        start = read_start(str(start))
    experiment = Experiment(
        population=population,
        model=_factory(model, population, dict(model_parameters or {}), init),
        method=made,
        criterion=_aligned(loss, population) if callable(loss) else criterion_of(loss, population),
        schedule=part(Schedule, config.train),
        settings=chosen,
        # A module comes with weights, and these are what its owner wants to start from, unless
        # other ones are asked for.
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
                "method": made.name,
                "init": init,
                **_told(config),
            }
        },
    )
    _warn_of_public(experiment)
    return execute(experiment, place, resume, watch, track=tracked, discard_damaged=discard_damaged)


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
        # Another initialisation draws some layers itself; the rest keeps the module's weights.
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


def _checked(settings: Mapping[str, Any], preset: str | None = None) -> Config:
    """Settings by their plain names, as a configuration: its bounds hold here too."""
    places = {"evaluate_every": "evaluation.every"}
    given = ("train", "run", "evaluation")
    places |= {key.name: key.path for key in keys() if key.table in given}
    for name in ("loss", "every"):
        del places[name]
    tree: dict[str, Any] = {}
    tables = _TABLES
    for name, value in settings.items():
        if name in tables and isinstance(value, Mapping):
            tree[name] = dict(value)
        elif name in tables:
            raise ConfigError(f"{name} must be a dict, as in {_TABLES[name]}, not {value!r}")
        elif name not in places:
            raise ConfigError(unknown("setting", name, [*places, *tables]))
        else:
            assign(tree, places[name], value)
    return parse(admitted(tree | ({} if preset is None else {"method": {"name": preset}})))


def _told(config: Config) -> dict[str, Any]:
    """The settings of a run, for whoever reads of it; data, model and method came as objects."""
    tree = config.model_dump()
    found = {key: tree[key] for key in ("train", "run", "evaluation", *_TABLES)}
    del found["train"]["loss"]
    return found


def _aligned(function: Callable[..., Any], population: Population) -> Callable[..., Any]:
    """A user's loss or metric; in a regression it gets outputs in the shape of the targets."""
    return function if population.classes is not None else partial(_in_shape, function)


def _in_shape(function: Callable[..., Any], outputs: torch.Tensor, y: torch.Tensor) -> Any:
    return function(outputs.reshape(y.shape), y)
