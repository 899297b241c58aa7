"""The keys of a configuration: each is declared here, once, and nowhere else.

A key is one line: its name, type, default, what it means, and its bounds. Flags of the command
line, ``--help``, the tables of docs/reference/config.md, the arguments of ``simulate`` and what a
run directory keeps are all made from these lines. A key with a ``flag`` is an option of the
commands, too; every key can be given as ``--set table.key=value``.

Nothing here needs torch, so that the command line can show its options at once.
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
_KIND = re.compile(r"(int|float|str|bool|literal\[.*\]|constrained-.*|.*\[.*\])$")  # of a choice


def key(
    default: Any, meaning: str, *, flag: str = "", shown: str = "", env: str = "", **bounds: Any
) -> Any:
    """Declare a key: its default, what it means (Markdown; the first sentence is its help), bounds.

    ``flag`` makes it an option of the command line, whose value ``env``, a variable of the
    environment, may give, too. ``shown`` is how the documentation writes a default that is worked
    out.
    """
    more: dict[str, Any] = {"flag": flag, "shown": shown, "env": env}
    if isinstance(default, list | dict):
        return Field(
            default_factory=type(default), description=meaning, json_schema_extra=more, **bounds
        )
    return Field(default, description=meaning, json_schema_extra=more, **bounds)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(table: str) -> Any:
    """Make a class a table of the configuration: a frozen dataclass that checks what it is given.

    >>> TrainSection(lr=0)
    Traceback (most recent call last):
    coterie.errors.ConfigError: train.lr = 0: must be greater than 0
    """

    def made(cls: type[T]) -> type[T]:
        found: Any = validated(frozen=True, config=ConfigDict(extra="forbid"))(cls)
        checked: Any = found.__init__

        @wraps(checked)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            try:
                checked(self, *args, **kwargs)
            except ValidationError as error:
                raise ConfigError(sentence(error, table, found)) from None

        found.__init__ = init
        return found  # type: ignore[no-any-return]

    return made


def shallow(table: Any) -> dict[str, Any]:
    """The keys of a table and their values."""
    return {f.name: getattr(table, f.name) for f in fields(table)}


def part(kind: type[T], whole: object) -> T:
    """The part of a table that another class has too, such as the ``Schedule`` of ``[train]``."""
    return kind(**{f.name: getattr(whole, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def fields_of(table: Any) -> Mapping[str, FieldInfo]:
    """The keys of a table as they were declared."""
    found: Mapping[str, FieldInfo] = table.__pydantic_fields__
    return found


def as_in(table: type, name: str) -> Any:
    """A key of a table under another name, with the same default and bounds."""
    return fields_of(table)[name]


class Named(BaseModel):
    """A table with a name; the other keys are parameters of what it names."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the known keys."""
        return dict(self.model_extra or {})


# --- the tables, and their keys -----------------------------------------------------------------


@section("data")
class DataSection:
    """Which data, and how each client divides its own."""

    set: str = key("digits", "The data set (`coterie data`).", flag="--data")
    folder: str | None = key(
        None,
        "Where the data set's files are. The environment variable `COTERIE_DATA` is the default on "
        "the command line.",
        flag="--folder",
        env="COTERIE_DATA",
    )
    clients: int | None = key(
        None,
        "Number of clients. With the partition `column` there are as many as it has values: give "
        "it only to check that number.",
        shown="`20`",
        flag="--clients",
        ge=1,
    )
    samples: int | None = key(None, "Use a random subset of this many samples.", shown="all", ge=1)
    test_fraction: float = key(0.2, "Share of a client's data that is its test split.", ge=0, lt=1)
    val_fraction: float = key(0.1, "Share of the rest that is its validation split.", ge=0, lt=1)
    public: Literal["auto"] | Annotated[int, Field(ge=1)] | None = key(
        None,
        'Set this many unlabelled samples aside, for the server. `"auto"` is a tenth of the '
        "official test part or, without one, of all samples, and the default where a method needs "
        "them.",
    )
    metadata: str | list[str] = key(
        [],
        'Columns that describe clients, such as `["site"]`, or a file with a row for each client '
        "([metadata](../howto/own-data.md#metadata-site-country-device)).",
    )
    options: dict[str, Any] = key(
        {},
        "Parameters of the data set. For tables also `standardize` (`true`), for texts "
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
    """Which model, from which weights, with which layers frozen."""

    name: str = key("mlp", "The model (`coterie models`).", flag="--model")
    init: str = key(
        "torch",
        'How weights are first drawn: as PyTorch does. `"he"`, `"glorot"` or `"authors"`: '
        "convolutions and dense layers by [another rule](../howto/own-model.md#first-weights).",
    )
    start: str | None = key(None, "A safetensors file of weights to start from.")
    freeze: list[str] = key([], "Layers or tensors that are not trained, and not sent.")
    bn: str = key(
        "shared",
        'What of batch normalisation travels: all; `"stats-local"`, all but the statistics; '
        '`"local"`, nothing.',
    )


class MethodSection(Named):
    """Which method; its parameters are the other keys."""

    name: str = key("fedavg", "The method (`coterie methods`).", flag="--method")
    layer_interval: int = key(
        1,
        "Rounds between means of layers in which clients hardly differ. 1 averages every layer "
        "always.",
        ge=1,
    )
    layer_share: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = key(
        "auto",
        "A layer is quiet if clients differ in it by less than this share of the mean over layers. "
        '`"auto"`: all but the one in which clients differ most, and one that holds more than half '
        "of the bytes in any case.",
    )


@section("train")
class Schedule:
    """How a client trains in one round: the keys of ``[train]``, but for the loss."""

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
    weight_decay: float = key(0.0, "L2 decay of parameters.", ge=0)
    lr_decay: float = key(1.0, "The learning rate is multiplied by this every round.", gt=0)
    clip: float | None = key(None, "Bound on the norm of each gradient.", gt=0)
    steps: int | None = key(
        None,
        "Local batches in a round, exactly so many. `epochs` does not count then, unless it is 0.",
        ge=1,
    )
    optimizer: str = key(
        "sgd", "`sgd`, or a class of `torch.optim` in any case (not LBFGS, SparseAdam, Muon)."
    )
    options: dict[str, Any] = key({}, "The optimizer's other arguments.")


@section("train")
class TrainSection(Schedule):
    """How a client trains in a round."""

    loss: str | None = key(
        None,
        '`"cross-entropy"` (default) or `"hinge"`, a linear SVM\'s, squared, for classes; `"mse"` '
        '(default), `"l1"`, `"huber"` for numbers.',
        shown="by data",
    )


@section("run")
class Policy:
    """How rounds are held: who is asked, whose report counts, when a round is given up."""

    cohort: int | float = key(
        1.0, "Clients in a round: a whole number, or a fraction up to 1.0.", flag="--cohort", gt=0
    )
    sampling: Literal["auto", "fixed", "poisson"] = key(
        "auto",
        '`"fixed"`: so many in each round; `"poisson"`: each client by a coin of its own, so many '
        'on average, at times none (not with `over_selection` or `weighted`); `"auto"`: '
        '`"poisson"` with central noise (`[privacy]`), else `"fixed"`.',
    )
    over_selection: float = key(
        1.0,
        "Orders go to this many times the cohort, rounded up. The first `cohort` reports count. "
        "Needs a clock.",
        ge=1,
        allow_inf_nan=False,
    )
    deadline: float | None = key(
        None,
        "Seconds of the clock that a round may last. Later reports do not count. Under `--secure` "
        "it is for the work, and each later step of the protocol has it anew. It does not run "
        "while clients are asked for evidence about groups or try groups out.",
        gt=0,
    )
    real_deadline: float | None = key(
        None,
        "The same in seconds of the wall clock. Results then depend on the machine. In a real "
        "federation evidence and trials have this time anew, an hour if it is not set.",
        gt=0,
    )
    min_reports: int | float = key(
        1,
        "With fewer the round is abandoned. A float up to `1.0` is a share of the cohort.",
        gt=0,
    )
    weighted: bool = key(
        False, "Draw the cohort in proportion to the share of time that clients are on."
    )
    selection: float = key(
        0.0,
        "Seconds of the clock that selecting a cohort takes. They are hidden behind the round "
        "before, during which it happens.",
        ge=0,
        allow_inf_nan=False,
    )
    abandoned: int = key(10, "So many abandoned rounds in a row end the run with an error.", ge=1)


@section("run")
class RunSection(Policy):
    """How long, with whom, and on what."""

    rounds: int = key(20, "Number of rounds.", flag="--rounds", ge=1)
    seed: int = key(0, "Seed of everything random.", flag="--seed")
    engine: str = key(
        "pool",
        "What carries out the clients' work: loop, pool or ray. Ray is for "
        "[more than one machine](../howto/cluster.md).",
        flag="--engine",
    )
    workers: int | None = key(
        None,
        "Worker processes of the pool, or of Ray: there, as many as fit.",
        shown="cores",
        flag="--workers",
        ge=1,
    )
    address: str | None = key(
        None,
        "A Ray cluster: auto, or HOST:PORT; without it, a Ray of its own on this machine.",
        flag="--address",
    )
    cpus_per_worker: float = key(1.0, "CPUs that Ray sets aside for a worker, fractions too.", gt=0)
    gpus_per_worker: float = key(0.0, 'The same for GPUs, with `device = "cuda"`.', ge=0)
    device: str = key("cpu", "Any torch device.")
    batch_clients: Literal["auto"] | Annotated[int, Field(ge=1)] = key(
        1,
        "Clients that a worker trains at once, as one stacked model: a number, or auto. Several "
        "times faster for small models of linear layers (logistic regression, `mlp`); others "
        "train one by one. Models then agree with those of `1` to rounding, and are the same on "
        "any engine and any number of workers. [More](../howto/many-clients.md).",
        flag="--batch-clients",
    )
    checkpoint_every: int = key(
        1, "Rounds between checkpoints. The last round always has one.", ge=1
    )
    holdout: int = key(
        0,
        "Clients that stay outside and join after the last round. They must be fewer than there "
        "are. `cohort` is one of the others.",
        flag="--holdout",
        ge=0,
    )
    admit_epochs: int = key(
        5,
        "Epochs that those who join at the end adapt what they receive for, before their adapted "
        "score.",
        flag="--admit-epochs",
        ge=0,
    )
    outliers: Outliers = key(
        "reject",
        'Updates unlike the others: reject, clip or off. `"reject"`: what is not finite, or far '
        "longer than the others (of N clients, 5·N times the median change, at least 50 times; "
        "more for a client with more samples), is left out like a lost reply, and named; nothing "
        'is rescaled. `"clip"`: changes are shortened to twice the median; not with SCAFFOLD, '
        'FedDyn, `adaptive-tau`, noise or `--secure`. `"off"`: lengths are not looked at, and an '
        "update that is not finite ends a simulation. With noise only what is not finite is left "
        "out; under `--secure` only what clients themselves find not to be finite. "
        "[What it protects from](../threat-model.md#malicious-clients).",
        flag="--outliers",
    )


@section("evaluation")
class Measured:
    """What is measured: the keys of ``[evaluation]``, but for how often."""

    adapt_epochs: int | None = key(
        None, "Epochs of training before the adapted score.", shown="`train.epochs`", ge=0
    )
    adapt_every: int = key(0, "Rounds between adapted scores; `0`: at the end only.", ge=0)
    alone: bool = key(False, "Also train each client alone, for its gain.", flag="--alone")
    target: float | None = key(
        None,
        "A score on test data, as in 0.8: report what it took to reach it. The summary says in "
        "which round, after how many bytes (wasted ones not counted) and seconds it was first "
        "reached.",
        flag="--target",
    )


@section("evaluation")
class EvaluationSection(Measured):
    """What is measured, and how often."""

    every: int = key(1, "Rounds between scores of the received model; `0`: at the end only.", ge=0)


@section("wire")
class WireSection:
    """The codecs, up and down, and those of single layers."""

    up: str = key(
        "raw",
        "The codec of replies, as in qsgd (`coterie wire`). See [codecs](wire.md#codecs).",
        flag="--codec",
    )
    down: str = key("raw", "The codec of orders.")
    layers: dict[str, str] = key({}, 'Other codecs up for single layers, as in `{head = "raw"}`.')
    down_layers: dict[str, str] = key({}, "The same down.")


class ClockSection(Named):
    """What simulated seconds are counted by."""

    name: str = key("none", "Count simulated seconds: links or wireless.", flag="--clock")


class AvailabilitySection(Named):
    """When clients can be reached."""

    name: str = key("always", "`trace` or `diurnal`; both need a clock.")


@section("stop")
class StopSection:
    """What ends a run before its last round."""

    target: float | None = key(None, "End when the score on validation data reaches this.")
    patience: int | None = key(
        None,
        "End after so many rounds in which that score rose by no more than `gain` over its best.",
        ge=1,
    )
    gain: float = key(0.001, "See there.", ge=0)
    bytes: float | None = key(None, "Budget of bytes, both ways, wasted ones too.", gt=0)
    seconds: float | None = key(None, "Budget of seconds of the clock.", gt=0)


@section("privacy")
class PrivacySection:
    """What the server must not learn: secure sums, and noise."""

    secure: bool = key(False, "Secure aggregation: the server learns sums only.", flag="--secure")
    min_group: int = key(
        3,
        "Fewer clients are never summed. Also the bound below which differences of sums are noted "
        "as [near](run-directory.md#resultjson).",
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
        "With how many others each client shares masks: an even number, or `0` for all.",
        ge=0,
        multiple_of=2,
    )
    bits: int = key(
        24,
        "The grid of sums and noise has steps of 2^-bits. Numbers that could overflow 64 bits in "
        "sum are refused.",
        ge=8,
        le=40,
    )
    weights: Literal["samples", "equal"] = key(
        "samples",
        'How clients count in a secure sum: `"samples"`, each by its training samples, which the '
        'server knows; or `"equal"`, so that a sum says how many sent what, but not who. '
        '`"samples"` needs `train.optimizer = "sgd"`. With noise all count equally in any case.',
    )
    reveal: Literal["", "final-layer"] = key(
        "",
        "What --secure lets through: with final-layer each client may show its final layer, once "
        "(FedClust). Not with noise.",
        flag="--reveal",
    )
    small_groups: Literal["refuse", "skip"] = key(
        "refuse",
        "A group assigned by the server with fewer than `min_group` clients, everybody taking "
        'part: `"refuse"` is an error, `"skip"` leaves its model as it is. A group of which only a '
        "drawn part takes part, or that clients choose themselves, is passed over in rounds in "
        "which it is too small.",
    )
    same_orders: bool = key(
        True,
        "Clients unmask a sum only if all in it were sent the same order. `false` for methods that "
        "send members of a group different layers, or lossy codecs down with partial "
        "participation.",
    )
    mechanism: Literal["central", "local", "nbafl"] = key(
        "central",
        'Who adds noise, if `epsilon` or `noise` is given: `"central"`, the server to each sum '
        '(with `secure` the clients, in shares); `"local"`, each client to its upload; `"nbafl"`, '
        "clients and server by NbAFL's rule.",
    )
    epsilon: float | None = key(
        None,
        "A privacy budget, as in 8: noise is chosen to keep it. It is chosen for `run.rounds` "
        'rounds, and the run ends before the budget is exceeded. For `"nbafl"` its ε, below 1.',
        flag="--epsilon",
        gt=0,
        allow_inf_nan=False,
    )
    delta: float | None = key(None, "δ; N clients.", shown="N^-1.1", gt=0, lt=1)
    noise: float | None = key(
        None,
        'Standard deviation of the noise on a sum (`"local"`: on an upload), in units of the '
        "clipping bound. With both, `epsilon` only ends the run.",
        shown="by `epsilon`",
        gt=0,
        allow_inf_nan=False,
    )
    clip: float = key(
        1.0,
        'Bound on the norm of a client\'s change, over all its arrays; for `"nbafl"` of its model.',
        gt=0,
        allow_inf_nan=False,
    )
    clipping: Literal["fixed", "median", "quantile"] = key(
        "fixed",
        'With `"median"` or `"quantile"` (central noise only), `clip` is where the bound begins, '
        "and noised counts of clients within it let it follow.",
    )
    quantile: float = key(0.5, 'Of clients\' norms, that `"quantile"` follows.', gt=0, lt=1)
    clip_rate: float = key(0.2, "How fast.", gt=0, allow_inf_nan=False)
    exposures: int | None = key(
        None,
        "NbAFL's L: how many uploads of a client others see.",
        shown="`aggregations`",
        ge=1,
    )
    aggregations: int | None = key(
        None,
        "NbAFL's T: how many rounds its noise is for; the run ends after so many.",
        shown="`run.rounds`",
        ge=1,
    )
    randomness: Randomness = key(
        "simulated",
        'Where keys and noise come from: the seed, or `"system"`, the operating system\'s '
        "generator; such a run cannot be repeated.",
    )


class Config(BaseModel):
    """A whole experiment, as written in a TOML file."""

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
        """The number of clients if it is not given; a column brings its own."""
        if not isinstance(tree, Mapping):
            return tree
        data, partition = tree.get("data", {}), tree.get("partition", {})
        if not isinstance(data, Mapping) or not isinstance(partition, Mapping):
            return tree
        count = {} if partition.get("name") == "column" else {"clients": 20}
        return {**tree, "data": {**count, **data}}


# --- what is wrong, in a sentence ---------------------------------------------------------------


def sentence(error: ValidationError, table: str = "", kind: Any = Config) -> str:
    """What is wrong with a configuration, or with one ``table`` of it, of this ``kind``."""
    first = error.errors()[0]
    given = (table, *first["loc"]) if table else first["loc"]
    path = [str(p) for p in given if not _KIND.match(str(p))]
    name = ".".join(path)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = fields_of(kind)
        if not table and len(path) > 1:
            known = fields_of(known[path[0]].annotation)
        before = "".join(f"{part}." for part in path[:-1])
        return unknown("key", name, (f"{before}{leaf}" for leaf in known))
    if first["type"] == "literal_error" and len(error.errors()) == 1:
        words = re.findall("'([^']*)'", first["ctx"]["expected"])
        return unknown(name, first["input"], filter(None, words))
    return f"{name} = {first['input']!r}: {reasons(error)}"
