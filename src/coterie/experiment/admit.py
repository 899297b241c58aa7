"""Admit a new client to a run that has ended: assign its group and adapt a model to its data.

The run itself does not change. The new client's state is kept in a temporary folder.
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
    """A newcomer that was admitted: its group, scores and model.

    ``received`` and ``adapted`` are the scores on its own test data of the model as received and
    after ``epochs`` of training on its own training data; both are empty if it has no test data.
    ``weights`` are those of the adapted model.
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
        """Everything but the weights, as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        return {**values, "bytes": asdict(self.bytes)}


def admit_client(
    run: Result | Path,
    data: ClientData,
    epochs: int = 5,
    metadata: Mapping[str, str] | None = None,
) -> Admitted:
    """Admit one more client to a finished or stopped run, and adapt the model it receives.

    ``data`` must be encoded as the run's (``newcomer_data`` reads it from a file). The method's
    ``admit`` assigns the group; the client is scored and trained as those that a run holds out.
    ``metadata`` are columns that describe the newcomer, as in ``{"site": "north"}``.
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
        columns = {column: {id: value} for column, value in (metadata or {}).items()}
        round_info = Round(result.rounds, [id], public, metadata=columns)
        state = admit(channel, result.state, round_info)
        if id not in state.groups:
            raise TrainingError(
                "the newcomer was not assigned to a group: it did not answer the method"
            )
        bytes_moved, sends = channel.state.ledger.total, plan.method.sends(state, id)
        received = channel.score({id: sends}, {})[id]
        # The model that is scored must be the one that is exported.
        training_plan = replace(plan, method=_adapting(plan.method, epochs), privacy=Privacy())
        training_state = ChannelState(
            versions=dict(channel.state.versions), held=dict(channel.state.held)
        )
        adapted = _channel(training_plan, result.rounds, "adapt", training_state)
        return Admitted(
            client=id,
            group=state.groups[id],
            epochs=epochs,
            samples={part: len(getattr(data, part)) for part in ("train", "val", "test")},
            received=_on_test(received),
            adapted=_on_test(adapted.score({id: sends}, {})[id]),
            bytes=bytes_moved,
            weights=adapted.fetch(id, sends),
        )


def _with_newcomer(plan: Plan, data: ClientData, folder: Path) -> Plan:
    """The run's plan with one more client, whose true group is unknown."""
    new_samples, run_samples = data.train.x, plan.population.clients[0].train.x
    if new_samples.shape[1:] != run_samples.shape[1:] or new_samples.dtype != run_samples.dtype:
        raise DataError(
            f"the newcomer's samples are {new_samples.dtype} of shape "
            f"{tuple(new_samples.shape[1:])}, the run's {run_samples.dtype} of shape "
            f"{tuple(run_samples.shape[1:])}: encode them alike"
        )
    clients = (*plan.population.clients, data)
    population = replace(plan.population, clients=clients, groups=None)
    return replace(plan, population=population, folder=folder, device="cpu")


def _states_of(folder: Path, stack: ExitStack) -> Path:
    """A temporary folder of client states: links to the run's, and room for new files."""
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-admit-")))
    if folder.is_dir():
        shutil.copytree(folder.resolve(), copy, copy_function=os.symlink, dirs_exist_ok=True)
    return copy


def _channel(plan: Plan, rounds: int, stage: str, state: ChannelState) -> Channel:
    wire = Wire(plan.start.layout, plan.coding.downwards.plain)
    terms = Terms(plan.coding, start=plan.start, seed=plan.seed)
    channel = Channel(Loop(plan), wire, terms=terms, state=state)
    channel.begin(max(rounds - 1, 0), stage=stage)
    return channel


def _adapting(method: Method, epochs: int) -> Method:
    """The same method, whose clients adapt the model they receive before they use it."""

    def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
        model = method.assemble(client, arrays)
        return (method.adapt or Client.adapt)(client, model, epochs)

    return replace(method, assemble=assemble) if epochs else method


def _on_test(scores: Mapping[str, float]) -> dict[str, float]:
    if not scores.get("test_count"):
        return {}
    return {k.removeprefix("test_"): v for k, v in scores.items() if k.startswith("test_")}


def newcomer_data(path: Path, run: Path, population: Population) -> ClientData:
    """Read a newcomer's labelled data, and encode and split it as the run does."""
    config = parse(RunDir.open(run).read_config())
    samples = labelled_like(path, population, **_columns(config))
    fractions = config.data.test_fraction, config.data.val_fraction
    id = len(population.clients)  # each client has its own random stream
    parts = split_client(samples.y.numpy(), *fractions, config.run.seed, id)
    train, val, test = (Split(samples.x[p], samples.y[p]) for p in parts)
    return ClientData(train, val, test, name=path.stem)


def newcomer_metadata(path: Path, run: Path) -> dict[str, str]:
    """A newcomer's metadata, from the run's metadata columns in its CSV file."""
    config = parse(RunDir.open(run).read_config())
    if path.suffix.lower() != ".csv":
        return {}
    sheet = read_sheet(path, _columns(config).get("delimiter", ","))
    columns = {c: np.array(v) for c, v in sheet.columns.items() if c in metadata_of(config.data)[1]}
    constant = constant_columns(columns, list(columns), [np.arange(len(sheet.lines))], [path.stem])
    return {column: values[0] for column, values in constant.items()}


def _columns(config: Config) -> dict[str, str]:
    """The options with which the run reads CSV files, if it does."""
    options = config.data.options if config.data.set in ("csv", "text") else {}
    return {k: str(options[k]) for k in ("label", "text", "delimiter") if k in options}


def export_admitted(admitted: Admitted, result: Result, target: Path) -> None:
    """Write the newcomer's adapted model to a safetensors file, as ``export_model`` does."""
    check_target(target)
    description = {"group": admitted.group, "epochs": admitted.epochs, "admitted": "true"}
    write_model(result, admitted.client, admitted.weights, target, **description)
