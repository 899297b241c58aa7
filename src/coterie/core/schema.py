"""The configuration schema: the only declaration of every key of a configuration.

A key is declared with its name, type, default, meaning and bounds. The options of the command line,
``--help``, the tables of docs/reference/config.md, the arguments of ``simulate`` and the
configuration in a run directory are all made from these declarations. A key with a ``flag`` is also
an option of the commands; every key can be set by ``--set table.key=value``.

This module does not import torch, so that the command line shows its options without delay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as validated
from pydantic.fields import FieldInfo

from coterie.errors import ConfigError, reasons, unknown

T = TypeVar("T")
Outliers = Literal["reject", "clip", "off"]
Randomness = Literal["simulated", "system"]
# A type in an error's location.
_KIND = re.compile(r"(int|float|str|bool|literal\[.*\]|constrained-.*|.*\[.*\])$")


def key(
    default: Any, meaning: str, *, flag: str = "", shown: str = "", env: str = "", **bounds: Any
) -> Any:
    """Declare a key by its default, meaning and bounds.

    The meaning is in Markdown, and its first sentence is the help text. ``flag`` makes the key an
    option of the command line, which the environment variable ``env`` can set as well. ``shown`` is
    the default in the documentation, if the actual one is computed.
    """
    extra: dict[str, Any] = {"flag": flag, "shown": shown, "env": env}
    if isinstance(default, list | dict):
        return Field(
            default_factory=type(default), description=meaning, json_schema_extra=extra, **bounds
        )
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(table: str) -> Any:
    """Make a class a table of the configuration: a frozen dataclass with validated values.

    >>> TrainSection(lr=0)
    Traceback (most recent call last):
    coterie.errors.ConfigError: train.lr = 0: must be greater than 0
    """

    def decorate(cls: type[T]) -> type[T]:
        table_class: Any = validated(frozen=True, config=ConfigDict(extra="forbid"))(cls)
        validate: Any = table_class.__init__

        @wraps(validate)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            try:
                validate(self, *args, **kwargs)
            except ValidationError as error:
                raise ConfigError(sentence(error, table, table_class)) from None

        table_class.__init__ = init
        return table_class  # type: ignore[no-any-return]

    return decorate


def shallow(table: Any) -> dict[str, Any]:
    """The keys of a table with their values."""
    return {f.name: getattr(table, f.name) for f in fields(table)}


def part(kind: type[T], table: object) -> T:
    """The keys of a table that class ``kind`` has too, such as the ``Schedule`` of ``[train]``."""
    return kind(**{f.name: getattr(table, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def fields_of(table: Any) -> Mapping[str, FieldInfo]:
    """The declarations of a table's keys."""
    declared: Mapping[str, FieldInfo] = table.__pydantic_fields__
    return declared


def as_in(table: type, name: str) -> Any:
    """A key with the default and bounds of an existing one, for use under another name."""
    return fields_of(table)[name]


class Named(BaseModel):
    """A table with a name and the parameters of the named thing as further keys."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """All keys that are not declared."""
        return dict(self.model_extra or {})


# --- the tables, and their keys -----------------------------------------------------------------


@section("data")
class DataSection:
    """The data, and how each client splits its own."""

    set: str = key("digits", "The data set (`coterie data`).", flag="--data")
    folder: str | None = key(
        None,
        "The folder of the data set's files. On the command line, it defaults to the environment "
        "variable `COTERIE_DATA`.",
        flag="--folder",
        env="COTERIE_DATA",
    )
    clients: int | None = key(
        None,
        "Number of clients. With the partition `column`, it is the number of the column's values; "
        "set it only to check that number.",
        shown="`20`",
        flag="--clients",
        ge=1,
    )
    samples: int | None = key(None, "Use a random subset of this many samples.", shown="all", ge=1)
    test_fraction: float = key(0.2, "Share of each client's data in its test split.", ge=0, lt=1)
    val_fraction: float = key(
        0.1, "Share of the remaining data in the validation split.", ge=0, lt=1
    )
    public: Literal["auto"] | Annotated[int, Field(ge=1)] | None = key(
        None,
        'Reserve this many unlabelled samples for the server. `"auto"` is a tenth of the official '
        "test part or, without one, of all samples; it is the default if the method needs public "
        "samples.",
    )
    metadata: str | list[str] = key(
        [],
        'Columns that describe clients, such as `["site"]`, or a file with a row for each client '
        "([metadata](../howto/own-data.md#metadata-site-country-device)).",
    )
    options: dict[str, Any] = key(
        {},
        "Parameters of the data set; for tables also `standardize` (`true`), for texts "
        "`max_vocabulary` (`10000`) and `length` (`64`).",
    )


class PartitionSection(Named):
    """How the data is divided among clients."""

    name: str = key(
        "iid", "How the data is divided among clients (`coterie partitions`).", flag="--partition"
    )


class ShiftSection(Named):
    """How groups of clients differ."""

    name: str = key("none", "How groups of clients differ (`coterie partitions`).", flag="--shift")


class ModelSection(Named):
    """The model, its initial weights, and its frozen layers."""

    name: str = key("mlp", "The model (`coterie models`).", flag="--model")
    init: str = key(
        "torch",
        'Initialisation of the weights: by PyTorch. `"he"`, `"glorot"` or `"authors"`: '
        "convolutions and dense layers by [another rule](../howto/own-model.md#first-weights).",
    )
    start: str | None = key(None, "A safetensors file of weights to start from.")
    freeze: list[str] = key([], "Layers or tensors that are neither trained nor sent.")
    bn: str = key(
        "shared",
        'What to share of batch normalisation: everything; `"stats-local"`, everything but the '
        'statistics; `"local"`, nothing.',
    )


class MethodSection(Named):
    """The method, with its parameters as further keys."""

    name: str = key("fedavg", "The method (`coterie methods`).", flag="--method")
    layer_interval: int = key(
        1,
        "Number of rounds between two means of layers in which clients hardly differ. 1 averages "
        "all layers in every round.",
        ge=1,
    )
    layer_share: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = key(
        "auto",
        "A layer is quiet if clients differ in it by less than this share of the mean over layers. "
        '`"auto"`: all layers but the one in which clients differ most; a layer with more than '
        "half of the bytes is always quiet.",
    )


@section("train")
class Schedule:
    """How a client trains in one round: the keys of ``[train]`` except the loss."""

    epochs: int = key(1, "Local epochs in a round.", flag="--epochs", ge=0)
    batch_size: int = key(
        32,
        "Local batch size. The last batch of an epoch may be smaller.",
        flag="--batch-size",
        ge=1,
    )
    lr: float = key(0.05, "Learning rate.", flag="--lr", gt=0)
    momentum: float = key(
        0.0,
        "Momentum of local SGD. Its buffer starts at zero in each round.",
        flag="--momentum",
        ge=0,
        lt=1,
    )
    weight_decay: float = key(0.0, "Weight decay (L2) of the parameters.", ge=0)
    lr_decay: float = key(1.0, "Factor of the learning rate from one round to the next.", gt=0)
    clip: float | None = key(None, "Maximum norm of each gradient; longer ones are clipped.", gt=0)
    steps: int | None = key(
        None,
        "Exact number of local batches in a round. It replaces `epochs`, unless that is 0.",
        ge=1,
    )
    optimizer: str = key(
        "sgd",
        "`sgd`, or a class of `torch.optim` in upper or lower case (not LBFGS, SparseAdam, Muon).",
    )
    options: dict[str, Any] = key({}, "Further arguments of the optimizer.")
    precision: Literal["float32", "bf16"] = key(
        "float32",
        '`"bf16"` computes with bfloat16 where torch.autocast does so, for hardware that gains by '
        "it; weights and scores stay float32. [More](../howto/gpu.md).",
    )


@section("train")
class TrainSection(Schedule):
    """How a client trains in a round."""

    loss: str | None = key(
        None,
        'For classes `"cross-entropy"` (default) or `"hinge"`, the squared hinge loss of a linear '
        'SVM; for numbers `"mse"` (default), `"l1"` or `"huber"`.',
        shown="by data",
    )


@section("run")
class Policy:
    """How rounds proceed: which clients take part, which replies count, when to abandon a round."""

    cohort: int | float = key(
        1.0, "Clients in a round: a whole number, or a fraction up to 1.0.", flag="--cohort", gt=0
    )
    sampling: Literal["auto", "fixed", "poisson"] = key(
        "auto",
        '`"fixed"`: the same number in each round; `"poisson"`: each client independently, with '
        "that number on average and at times none (not with `over_selection` or `weighted`); "
        '`"auto"`: `"poisson"` with central noise (`[privacy]`), else `"fixed"`.',
    )
    over_selection: float = key(
        1.0,
        "Send orders to this many times the cohort, rounded up. The first `cohort` replies count. "
        "Needs a clock.",
        ge=1,
        allow_inf_nan=False,
    )
    deadline: float | None = key(
        None,
        "Maximum duration of a round in seconds of the clock. Later replies do not count. Under "
        "`--secure`, it applies to the training, and again to each later step of the protocol. It "
        "does not apply to the evidence for groups and to trials.",
        gt=0,
    )
    real_deadline: float | None = key(
        None,
        "The same in seconds of the wall clock. Results then depend on the machine. In a real "
        "federation, evidence and trials have this time to themselves, one hour if it is not set.",
        gt=0,
    )
    min_reports: int | float = key(
        1,
        "Abandon the round if fewer clients reply. A float up to `1.0` is a share of the cohort.",
        gt=0,
    )
    weighted: bool = key(
        False, "Draw clients in proportion to the share of time for which they are available."
    )
    selection: float = key(
        0.0,
        "Seconds of the clock that the selection of a cohort takes. It happens during the previous "
        "round.",
        ge=0,
        allow_inf_nan=False,
    )
    abandoned: int = key(
        10, "End the run with an error after this many abandoned rounds in a row.", ge=1
    )


@section("run")
class RunSection(Policy):
    """Rounds, cohorts, engine and checkpoints of a run."""

    rounds: int = key(20, "Number of rounds.", flag="--rounds", ge=1)
    seed: int = key(0, "Random seed of the run.", flag="--seed")
    engine: str = key(
        "pool",
        "The engine that runs the clients: loop, pool or ray. Ray is for "
        "[more than one machine](../howto/cluster.md).",
        flag="--engine",
    )
    workers: int | None = key(
        None,
        "Worker processes of the pool or of Ray (there, as many as fit).",
        shown="cores",
        flag="--workers",
        ge=1,
    )
    address: str | None = key(
        None,
        "Address of a Ray cluster: auto or HOST:PORT; by default, Ray is started on this machine.",
        flag="--address",
    )
    cpus_per_worker: float = key(
        1.0, "CPUs that Ray reserves for a worker; may be fractional.", gt=0
    )
    gpus_per_worker: float = key(0.0, 'The same for GPUs, with `device = "cuda"`.', ge=0)
    device: str = key("cpu", "The torch device for training, such as cuda.", flag="--device")
    batch_clients: Literal["auto"] | Annotated[int, Field(ge=1)] = key(
        "auto",
        "Clients that a worker trains at once, as one stacked model: a number, or `auto`, which "
        "chooses by the model's size, the batch size and the cohort. Several times faster for "
        "small models on many clients. Results are those of `1` up to rounding, and the same to "
        "the bit on any engine and any number of workers; a real federation has `1`. "
        "[More](../howto/many-clients.md).",
        flag="--batch-clients",
    )
    checkpoint_every: int = key(
        1,
        "Number of rounds from one checkpoint to the next. There is always one after the last "
        "round.",
        ge=1,
    )
    holdout: int = key(
        0,
        "Number of clients that are held out and join after the last round. At least one client "
        "must remain, and `cohort` refers to those that remain.",
        flag="--holdout",
        ge=0,
    )
    admit_epochs: int = key(
        5,
        "Epochs for which clients that join at the end adapt the received model, for their adapted "
        "score.",
        flag="--admit-epochs",
        ge=0,
    )
    outliers: Outliers = key(
        "reject",
        'What to do with outlying updates: reject, clip or off. `"reject"`: updates that are not '
        "finite, or far longer than the others (with N clients, 5·N times the median change, at "
        "least 50 times; more for a client with more samples), are left out like lost replies, and "
        'reported; nothing is rescaled. `"clip"`: changes are shortened to twice the median; not '
        'with SCAFFOLD, FedDyn, `adaptive-tau`, noise or `--secure`. `"off"`: lengths are not '
        "checked, and an update that is not finite ends a simulation. With noise, only updates "
        "that are not finite are left out; under `--secure`, only those that clients themselves "
        "find not to be finite. [What it protects from](../threat-model.md#malicious-clients).",
        flag="--outliers",
    )


@section("evaluation")
class Evaluation:
    """What is measured: the keys of ``[evaluation]`` except ``every``."""

    adapt_epochs: int | None = key(
        None, "Epochs of local training before the adapted score.", shown="`train.epochs`", ge=0
    )
    adapt_every: int = key(
        0, "Number of rounds between adapted scores; `0`: only at the end.", ge=0
    )
    alone: bool = key(False, "Also train each client alone, to compare scores.", flag="--alone")
    target: float | None = key(
        None,
        "A score on test data, such as 0.8, for which to report the cost. The summary gives the "
        "round, the bytes (without wasted ones) and the seconds after which it was first reached.",
        flag="--target",
    )


@section("evaluation")
class EvaluationSection(Evaluation):
    """What is measured, and how often."""

    every: int = key(
        1, "Number of rounds between scores of the received model; `0`: only at the end.", ge=0
    )
    clients: int | float = key(
        1.0,
        "Clients that are scored after a round: a whole number, or a fraction up to 1.0. They are "
        "drawn anew for each round. At the end of the run all clients are scored.",
        gt=0,
    )


@section("wire")
class WireSection:
    """The codecs of uploads and downloads, and of single layers."""

    up: str = key(
        "raw",
        "The codec of uploads, such as qsgd (`coterie wire`). See [codecs](wire.md#codecs).",
        flag="--codec",
    )
    down: str = key("raw", "The codec of downloads.")
    layers: dict[str, str] = key(
        {}, 'Other codecs for uploads of single layers, as in `{head = "raw"}`.'
    )
    down_layers: dict[str, str] = key({}, "The same for downloads.")


class ClockSection(Named):
    """The clock that counts simulated seconds."""

    name: str = key("none", "Count simulated seconds: links or wireless.", flag="--clock")


class AvailabilitySection(Named):
    """When clients are available."""

    name: str = key("always", "`trace` or `diurnal`; both need a clock.")


@section("stop")
class StopSection:
    """Conditions that end a run before its last round."""

    target: float | None = key(None, "End when the score on validation data reaches this.")
    patience: int | None = key(
        None,
        "End after this many rounds in which that score exceeded its best by no more than `gain`.",
        ge=1,
    )
    gain: float = key(0.001, "The improvement that counts for `patience`.", ge=0)
    bytes: float | None = key(
        None, "Budget of bytes in both directions, including wasted ones.", gt=0
    )
    seconds: float | None = key(None, "Budget of seconds of the clock.", gt=0)


@section("privacy")
class PrivacySection:
    """Privacy of clients from the server: secure sums and noise."""

    secure: bool = key(False, "Secure aggregation: the server learns only sums.", flag="--secure")
    min_group: int = key(
        3,
        "The minimum number of clients in a sum. Differences of sums over fewer clients are "
        "reported as [near](run-directory.md#resultjson).",
        ge=2,
    )
    threshold: float = key(
        2 / 3,
        "The share of a group that must stay to the end; always more than half, and `min_group`.",
        shown="`2/3`",
        gt=0.5,
        le=1,
    )
    neighbours: int = key(
        0,
        "The number of clients that each client shares masks with: an even number, or `0` for all.",
        ge=0,
        multiple_of=2,
    )
    bits: int = key(
        24,
        "Sums and noise are on a grid with steps of 2^-bits. Numbers whose sum could overflow 64 "
        "bits are refused.",
        ge=8,
        le=40,
    )
    weights: Literal["samples", "equal"] = key(
        "samples",
        'The weights of clients in a secure sum: `"samples"`, by training samples, which the '
        'server knows; or `"equal"`, so that a sum tells how many clients sent what, but not '
        'which. `"samples"` needs `train.optimizer = "sgd"`. With noise all count equally in any '
        "case.",
    )
    reveal: Literal["", "final-layer"] = key(
        "",
        "Exception to --secure: with final-layer, each client may reveal its final layer once "
        "(FedClust). Not with noise.",
        flag="--reveal",
    )
    small_groups: Literal["refuse", "skip"] = key(
        "refuse",
        "What to do if the server assigns fewer than `min_group` clients to a group and all of "
        'them take part: `"refuse"` is an error, `"skip"` leaves the model as it is. Groups that '
        "are too small only because a part of them was drawn, or because clients chose them, are "
        "skipped in that round.",
    )
    same_orders: bool = key(
        True,
        "Clients unmask a sum only if all of its members received the same order. Set it to "
        "`false` for methods that send different layers to members of a group, and for lossy "
        "codecs of downloads with partial participation.",
    )
    mechanism: Literal["central", "local", "nbafl"] = key(
        "central",
        'Who adds noise, if `epsilon` or `noise` is set: `"central"`, the server to each sum (with '
        '`secure`, the clients in shares); `"local"`, each client to its upload; `"nbafl"`, '
        "clients and server by the rule of NbAFL.",
    )
    epsilon: float | None = key(
        None,
        "The privacy budget, such as 8, by which noise is chosen. The noise is for `run.rounds` "
        'rounds, and the run ends before the budget is exceeded. For `"nbafl"`, its ε, below 1.',
        flag="--epsilon",
        gt=0,
        allow_inf_nan=False,
    )
    delta: float | None = key(None, "δ; N clients.", shown="N^-1.1", gt=0, lt=1)
    noise: float | None = key(
        None,
        'Standard deviation of the noise on a sum (`"local"`: on an upload), in units of the '
        "clipping bound. If both are set, `epsilon` only ends the run.",
        shown="by `epsilon`",
        gt=0,
        allow_inf_nan=False,
    )
    clip: float = key(
        1.0,
        'Maximum norm of a client\'s update over all arrays; for `"nbafl"`, of its model.',
        gt=0,
        allow_inf_nan=False,
    )
    clipping: Literal["fixed", "median", "quantile"] = key(
        "fixed",
        'With `"median"` or `"quantile"` (central noise only), `clip` is only the first bound, '
        "which is then adapted by noisy counts of the clients within it.",
    )
    quantile: float = key(0.5, 'The quantile of clients\' norms for `"quantile"`.', gt=0, lt=1)
    clip_rate: float = key(
        0.2, "The rate at which the bound is adapted.", gt=0, allow_inf_nan=False
    )
    exposures: int | None = key(
        None,
        "NbAFL's L: the number of uploads of a client that others see.",
        shown="`aggregations`",
        ge=1,
    )
    aggregations: int | None = key(
        None,
        "NbAFL's T: the number of rounds that its noise is for, after which the run ends.",
        shown="`run.rounds`",
        ge=1,
    )
    randomness: Randomness = key(
        "simulated",
        'The source of keys and noise: the seed or, with `"system"`, the generator of the '
        "operating system; such a run cannot be repeated.",
    )


class Config(BaseModel):
    """The configuration of an experiment, as written in a TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    shift: ShiftSection = ShiftSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    train: TrainSection = TrainSection()
    run: RunSection = RunSection()
    evaluation: EvaluationSection = EvaluationSection()
    wire: WireSection = WireSection()
    clock: ClockSection = ClockSection()
    availability: AvailabilitySection = AvailabilitySection()
    stop: StopSection = StopSection()
    privacy: PrivacySection = PrivacySection()

    @model_validator(mode="before")
    @classmethod
    def _twenty_clients(cls, tree: Any) -> Any:
        """Set the default number of clients, unless the partition is by column."""
        if not isinstance(tree, Mapping):
            return tree
        data, partition = tree.get("data", {}), tree.get("partition", {})
        if not isinstance(data, Mapping) or not isinstance(partition, Mapping):
            return tree
        count = {} if partition.get("name") == "column" else {"clients": 20}
        return {**tree, "data": {**count, **data}}


# --- error messages -----------------------------------------------------------------------------


def sentence(error: ValidationError, table: str = "", kind: Any = Config) -> str:
    """An error message for a configuration, or for one ``table`` of it, of class ``kind``."""
    first = error.errors()[0]
    location = (table, *first["loc"]) if table else first["loc"]
    path = [str(p) for p in location if not _KIND.match(str(p))]
    name = ".".join(path)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = fields_of(kind)
        if not table and len(path) > 1:
            known = fields_of(known[path[0]].annotation)
        prefix = "".join(f"{part}." for part in path[:-1])
        return unknown("key", name, (f"{prefix}{leaf}" for leaf in known))
    if first["type"] == "literal_error" and len(error.errors()) == 1:
        choices = re.findall("'([^']*)'", first["ctx"]["expected"])
        return unknown(name, first["input"], filter(None, choices))
    return f"{name} = {first['input']!r}: {reasons(error)}"
