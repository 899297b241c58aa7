"""A newcomer joins a run that is over: it is placed, adapts what it receives, and has a model.

The run itself stays as it is. What the newcomer keeps lives in a folder of its own meanwhile.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.channel.channel import Channel
from coterie.channel.exchange import Terms
from coterie.channel.ledger import Bytes
from coterie.channel.privacy.settings import Privacy
from coterie.channel.state import ChannelState
from coterie.channel.wire import Wire
from coterie.client import Client
from coterie.client.plan import Plan
from coterie.core.messages import Array, ClientId, Slot
from coterie.core.method import Method, Round
from coterie.core.schema import Config
from coterie.core.weights import Weights
from coterie.data.metadata import constant_columns
from coterie.data.population import ClientData, Population, Split
from coterie.data.samples import labelled_like
from coterie.data.splits import split_client
from coterie.data.tables import read_sheet
from coterie.engines.base import one_thread
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, DataError, TrainingError
from coterie.experiment.config import metadata_of, parse
from coterie.experiment.experiment import public_of
from coterie.experiment.export import check_target, reopen, write_model
from coterie.results.result import Result
from coterie.results.rundir import RunDir


@dataclass(frozen=True)
class Admitted:
    """A newcomer in its place.

    ``received`` and ``adapted`` are its scores on its own test data, as it came and after
    ``epochs`` of training on its own training data; both empty if it has no test data. ``weights``
    are those of the adapted model.
    """

    client: ClientId
    group: Slot
    epochs: int
    samples: Mapping[str, int]
    received: Mapping[str, float]
    adapted: Mapping[str, float]
    bytes: Bytes
    weights: Weights

    def to_dict(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        return {**values, "bytes": asdict(self.bytes)}


def admit_client(
    run: Result | Path,
    data: ClientData,
    epochs: int = 5,
    metadata: Mapping[str, str] | None = None,
) -> Admitted:
    """Let one more client into a run, finished or stopped, and adapt the model it receives.

    ``data`` is encoded as the run's own (``newcomer_data`` reads it from a file). The method's
    ``admit`` finds the place; scores and training are those of newcomers held out by a run.
    ``metadata`` is what is known of the newcomer, as in ``{"site": "north"}``.
    """
    result = run if isinstance(run, Result) else reopen(run)
    admit = result.plan.method.admit
    if admit is None:
        raise ConfigError(f"method {result.plan.method.name} has no way to admit newcomers")
    if epochs < 0:
        raise ConfigError(f"epochs = {epochs}: give 0 or more")
    id = len(result.plan.population.clients)
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        plan = _with_newcomer(result.plan, data, _states_of(result.plan.folder, stack))
        channel = _channel(
            plan, result.rounds, "admit", ChannelState(versions=dict(result.versions))
        )
        public = public_of(plan.population, copy.deepcopy(plan.module), plan.bn, "cpu")
        known = {column: {id: value} for column, value in (metadata or {}).items()}
        info = Round(result.rounds, [id], public, metadata=known)
        state = admit(channel, result.state, info)
        if id not in state.groups:
            raise TrainingError("the newcomer has found no place: it did not answer the method")
        moved, sends = channel.state.ledger.total, plan.method.sends(state, id)
        received = channel.score({id: sends}, {})[id]
        # A method whose clients use what they adapted: what is scored is what is handed over.
        after = replace(plan, method=_adapting(plan.method, epochs), privacy=Privacy())
        after_all = ChannelState(
            versions=dict(channel.state.versions), held=dict(channel.state.held)
        )
        adapted = _channel(after, result.rounds, "adapt", after_all)
        return Admitted(
            client=id,
            group=state.groups[id],
            epochs=epochs,
            samples={part: len(getattr(data, part)) for part in ("train", "val", "test")},
            received=_on_test(received),
            adapted=_on_test(adapted.score({id: sends}, {})[id]),
            bytes=moved,
            weights=adapted.fetch(id, sends),
        )


def _with_newcomer(plan: Plan, data: ClientData, folder: Path) -> Plan:
    """The run's plan with one client more, whose true group nobody knows."""
    own, run = data.train.x, plan.population.clients[0].train.x
    if own.shape[1:] != run.shape[1:] or own.dtype != run.dtype:
        raise DataError(
            f"the newcomer's samples are {own.dtype} of shape {tuple(own.shape[1:])}, the run's "
            f"{run.dtype} of shape {tuple(run.shape[1:])}: encode them alike"
        )
    clients = (*plan.population.clients, data)
    population = replace(plan.population, clients=clients, groups=None)
    return replace(plan, population=population, folder=folder, device="cpu")


def _states_of(folder: Path, stack: ExitStack) -> Path:
    """A passing folder of client states that shows the run's own, and keeps what is written."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-admit-")))
    if folder.is_dir():
        shutil.copytree(folder.resolve(), place, copy_function=os.symlink, dirs_exist_ok=True)
    return place


def _channel(plan: Plan, rounds: int, stage: str, known: ChannelState) -> Channel:
    wire = Wire(plan.start.layout, plan.coding.downwards.plain)
    terms = Terms(plan.coding, start=plan.start, seed=plan.seed)
    channel = Channel(Loop(plan), wire, terms=terms, state=known)
    channel.begin(max(rounds - 1, 0), stage=stage)
    return channel


def _adapting(method: Method, epochs: int) -> Method:
    """The same method for clients who train what they receive before they use it, as scores do."""

    def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
        model = method.assemble(client, arrays)
        return (method.adapt or Client.adapt)(client, model, epochs)

    return replace(method, assemble=assemble) if epochs else method


def _on_test(scores: Mapping[str, float]) -> dict[str, float]:
    if not scores.get("test_count"):
        return {}
    return {k.removeprefix("test_"): v for k, v in scores.items() if k.startswith("test_")}


def newcomer_data(path: Path, run: Path, population: Population) -> ClientData:
    """A newcomer's labelled data from a file, encoded and divided as the run's own clients' are."""
    config = parse(RunDir.open(run).read_config())
    samples = labelled_like(path, population, **_columns(config))
    fractions = config.data.test_fraction, config.data.val_fraction
    id = len(population.clients)  # a client of its own has a random stream of its own
    parts = split_client(samples.y.numpy(), *fractions, config.run.seed, id)
    train, val, test = (Split(samples.x[p], samples.y[p]) for p in parts)
    return ClientData(train, val, test, name=path.stem)


def newcomer_metadata(path: Path, run: Path) -> dict[str, str]:
    """A newcomer's metadata, from those of the run's columns that its CSV file has too."""
    config = parse(RunDir.open(run).read_config())
    if path.suffix.lower() != ".csv":
        return {}
    sheet = read_sheet(path, _columns(config).get("delimiter", ","))
    columns = {c: np.array(v) for c, v in sheet.columns.items() if c in metadata_of(config.data)[1]}
    known = constant_columns(columns, list(columns), [np.arange(len(sheet.lines))], [path.stem])
    return {column: values[0] for column, values in known.items()}


def _columns(config: Config) -> dict[str, str]:
    """How the run reads CSV files, if it reads any."""
    options = config.data.options if config.data.set in ("csv", "text") else {}
    return {k: str(options[k]) for k in ("label", "text", "delimiter") if k in options}


def export_admitted(admitted: Admitted, result: Result, target: Path) -> None:
    """The newcomer's adapted model as a safetensors file, described as ``export_model`` does."""
    check_target(target)
    more = {"group": admitted.group, "epochs": admitted.epochs, "admitted": "true"}
    write_model(result, admitted.client, admitted.weights, target, **more)
