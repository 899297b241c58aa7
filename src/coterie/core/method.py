"""Federated methods: values with two halves, functions for the server and tasks for clients.

Most methods are compositions, ``grouped(assign, train, shared)``, of a grouping rule, a local
objective and the choice of shared layers. Other methods define their own ``round``.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

from pydantic import Field
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Mean, Slot
from coterie.core.schema import Schedule
from coterie.core.tree import Tree
from coterie.core.weights import Weights
from coterie.errors import ConfigError
from coterie.lazy import named
from coterie.registry import METHODS, checked

if TYPE_CHECKING:
    from coterie.client import Client, Task

P = ParamSpec("P")

# Ranges of parameters: annotations of a factory that are checked and shown to users.
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bound = Annotated[float, Field(ge=0)]  # may be infinite
Share = Annotated[float, Field(ge=0, le=1)]
AboveZeroToOne = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class State:
    """The server's state between rounds: models by slot, the group of each client, and memory.

    ``memory`` is a tree with anything else that the method needs; it is saved and restored exactly.
    ``notes`` are plain JSON values about the last round, which the run writes to its events and
    then drops. ``over`` is the reason for ending the run, if the method wants no further round.
    """

    models: Mapping[Slot, Weights] = field(default_factory=dict)
    groups: Mapping[ClientId, Slot] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    over: str = ""

    def moved(self, means: Mapping[Slot, Mean]) -> State:
        """Replace each model by the mean of its slot.

        Models without a mean, and layers that a mean does not have, are kept as they are.
        """
        models = dict(self.models)
        for slot, mean in means.items():
            model = mean.arrays.get("model")
            if isinstance(model, Weights):
                models[slot] = model.onto(models[slot])
        return replace(self, models=models)

    def joined(self, slots: Mapping[ClientId, Slot], **memory: Tree) -> State:
        """Assign clients to groups, and add to the memory."""
        return replace(self, groups={**self.groups, **slots}, memory={**self.memory, **memory})

    def to_tree(self) -> dict[str, Tree]:
        """The state as a tree, without notes."""
        return {
            "models": dict(self.models),
            "groups": dict(self.groups),
            "memory": dict(self.memory),
            "over": self.over,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> State:
        """Restore a state from such a tree."""
        return State(tree["models"], tree["groups"], tree["memory"], over=tree["over"])


def matrix(values: Any, most: int = 200) -> list[list[float]] | None:
    """A matrix as a note, with six digits; None if it has too many rows to be readable."""
    if len(values) > most:
        return None
    return [[float(f"{v:.6g}") for v in row] for row in values]


@dataclass(frozen=True)
class Public:
    """Unlabelled samples on the server, and a function that runs models on them."""

    x: Tensor
    outputs: Callable[[Weights, Tensor], Tensor]


def no_public(name: str) -> ConfigError:
    """The error of a method that needs public samples and finds none."""
    return ConfigError(
        f"method {name} needs public samples to run models on: set data.public (--set "
        "data.public=1000) or, for data of your own, pass unlabelled samples to simulate or "
        "from_clients (public=x)"
    )


@dataclass(frozen=True)
class Spent:
    """The cost of a run: bytes in both directions, and seconds of the clock, if there is one."""

    bytes: int = 0
    computation: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of computation, communication and waiting."""
        return self.computation + self.communication + self.waiting


@dataclass(frozen=True)
class Budget:
    """The limits on the cost of a run; infinite by default."""

    bytes: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class Setup:
    """What a method knows at the start of a run.

    ``start`` is the initial model θ⁰, ``fresh(i)`` the i-th additional random initialisation,
    ``groups`` the true groups of the scenario and ``public`` the server's own samples, if there are
    any, ``schedule`` the clients' training settings and ``budget`` the limits of the run. ``names``
    and ``metadata`` cover all known clients, including newcomers: names by id, and columns such as
    "site" with a value for each client. ``smallest_group`` is the minimum number of clients in a
    mean, which is more than one under secure sums.
    """

    start: Weights
    clients: Sequence[ClientId]
    seed: int
    fresh: Callable[[int], Weights]
    groups: Mapping[ClientId, int] | None = None
    public: Public | None = None
    schedule: Schedule = field(default_factory=Schedule)
    budget: Budget = field(default_factory=Budget)
    names: Mapping[ClientId, str] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[ClientId, str]] = field(default_factory=dict)
    smallest_group: int = 1


@dataclass(frozen=True)
class Round:
    """The current round: its number from 0, the participating clients, and the public samples.

    ``spent`` is the cost of the run before this round, and ``budget`` its limits. ``metadata``
    describes newcomers that were unknown at the start of the run, by column and client.
    """

    number: int
    cohort: Sequence[ClientId]
    public: Public | None = None
    spent: Spent = field(default_factory=Spent)
    budget: Budget = field(default_factory=Budget)
    metadata: Mapping[str, Mapping[ClientId, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """The origin of a method, so that it can be sent by name: a factory and JSON parameters."""

    module: str
    factory: str
    parameters: Mapping[str, Any]

    def make(self) -> Method:
        """Build the method again from the code installed on this machine."""
        import importlib

        method: Method = getattr(importlib.import_module(self.module), self.factory)(
            **self.parameters
        )
        return method


@dataclass(frozen=True, repr=False)
class Method:
    """A federated method, with a server half and a client half.

    ``init(fed, setup)`` and ``round(fed, state, info)`` run on the server, ``tasks``, by name, on
    clients. ``sends(state, client)`` are the arrays that the server currently has for a client, and
    ``assemble(client, arrays)``, on the client, combines them with the client's own layers into the
    model that it uses, and that is scored. ``admit(fed, state, info)`` assigns newcomers, the
    cohort of ``info``, to groups; those that do not answer stay outside. ``adapt(client, model,
    epochs)`` adapts the model that a client uses, by default by plain training. ``check(setup)``
    raises an error for setups that do not fit, before any training. ``pieces`` are the parts that
    the method is composed of, if it can be taken apart (``compose``).

    ``sees`` is what the server learns about a single client: "nothing", "means" (the client is
    hidden in a sum) or "each" (its own vectors). ``headline`` is the score by which the method is
    judged, "received" or "adapted".

    Some fields are the reason, in words, why the method does not support something:
    ``needs_all_layers`` layers that are averaged less often (``layerwise``), ``no_step`` a server
    optimizer, ``no_robust_mean`` robust means, ``no_clipping`` clipped updates, ``needs_exact``
    lossy codecs, and ``no_noise`` noise.

    ``mirrors`` names the parts of the server's memory that are means of client state, and therefore
    cannot be reset to an earlier round. A method that ``keeps_budget`` ends by itself before a
    budget is exceeded, and one that ``needs_public`` runs models on public samples.
    ``takes_as_public`` is information about clients that the method was given in advance, which no
    noise hides, and how much that matters. ``chooses`` is the metric in which clients name the slot
    for their model, if they choose it themselves. ``sums`` is the maximum number of means
    (``reduce``) that a client contributes to in one round: under secure aggregation, clients sign
    no more, and all of them must have the same clients with the same weights. ``same_steps`` says
    which part of a client's training goes into two sums, in proportions that depend on its number
    of steps: secure sums then need the same number of steps for all. ``shows`` are the tasks for
    single clients (``gather``) that are allowed under secure sums, each with the metrics that it
    may return: clients do not send any other number, nor any vector that was not revealed.
    """

    name: str
    init: Callable[[Federation, Setup], State]
    round: Callable[[Federation, State, Round], State]
    sends: Callable[[State, ClientId], Mapping[str, Array]]
    tasks: Mapping[str, Task]
    assemble: Callable[[Client, Mapping[str, Array]], Weights]
    admit: Callable[[Federation, State, Round], State] | None = None
    sees: str = "means"
    source: Source | None = None
    adapt: Callable[[Client, Weights, int], Weights] | None = None
    check: Callable[[Setup], None] | None = None
    pieces: Any = None
    needs_all_layers: str = ""
    no_step: str = ""
    no_robust_mean: str = ""
    no_clipping: str = ""
    needs_exact: str = ""
    no_noise: str = ""
    mirrors: tuple[str, ...] = ()
    headline: str = "received"
    keeps_budget: bool = False
    takes_as_public: str = ""
    needs_public: bool = False
    chooses: str = ""
    sums: int = 1
    same_steps: str = ""
    shows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        given = self.source.parameters if self.source else {}
        parameters = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in given.items())
        about = f"the server sees {self.sees}, judged by the {self.headline} score"
        return f"<Method {self.name}({parameters}): {about}>"

    def _repr_html_(self) -> str:
        return str(named("coterie.report.object_cards:method_card")(self))


def method(factory: Callable[P, Method]) -> Callable[P, Method]:
    """Mark a function as the factory of a method: check its arguments, and let it be sent by name.

    >>> @method
    ... def mine(strength: float = 1.0) -> Method: ...
    >>> mine(strenth=2.0)
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown parameter of method mine 'strenth'; did you mean ...
    """
    signature = inspect.signature(factory)
    label = factory.__name__.replace("_", "-")

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Method:
        try:
            arguments = signature.bind_partial(*args).arguments
        except TypeError as error:
            raise ConfigError(f"method {label}: {error}") from None
        for name in arguments.keys() & kwargs.keys():
            raise ConfigError(f"method {label}: {name} is given twice")
        arguments |= kwargs
        checked(f"method {label}", factory, arguments, hint="set it, as in --set method.{}=4")
        # Arguments are a part of fingerprints, so use the order of the signature.
        in_order = signature.bind(*args, **kwargs).arguments
        source = Source(factory.__module__, factory.__qualname__, dict(in_order))
        built = factory(*args, **kwargs)
        # A factory that calls itself, for example with the content of a file, has set the source.
        inner = built.source
        if inner and (inner.module, inner.factory) == (source.module, source.factory):
            return built
        return replace(built, source=source)

    vars(make)["makes"] = Method
    # Only Coterie's own methods are registered by name. Others are identified by their module or by
    # an installed package's entry point, as two cells of a notebook may define the same name.
    if factory.__module__.startswith("coterie.methods."):
        METHODS.register(label)(make)
    return make


def exclusive(*names: str) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Declare mutually exclusive parameters of a method, below ``@method``.

    A call that sets two of them to other values than their defaults is an error. When settings are
    merged, such as a user's with a scenario's, the new parameter replaces the old one.

    >>> @method
    ... @exclusive("height", "count")
    ... def mine(height: float = 1.0, count: int | None = None) -> Method: ...
    >>> mine(height=2.0, count=3)
    Traceback (most recent call last):
    coterie.errors.ConfigError: method mine: give height or count, not both
    """

    def declare(factory: Callable[P, Method]) -> Callable[P, Method]:
        signature = inspect.signature(factory)

        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> Method:
            values = signature.bind(*args, **kwargs).arguments
            defaults = {name: signature.parameters[name].default for name in names}
            changed = [name for name in names if values.get(name, defaults[name]) != defaults[name]]
            if len(changed) > 1:
                label = factory.__name__.replace("_", "-")
                raise ConfigError(f"method {label}: give {' or '.join(changed)}, not both")
            return factory(*args, **kwargs)

        vars(make)["exclusive"] = (*exclusive_sets(factory), names)
        return make

    return declare


def exclusive_sets(factory: Callable[..., Method]) -> tuple[tuple[str, ...], ...]:
    """The sets of mutually exclusive parameters that a factory declares."""
    declared: tuple[tuple[str, ...], ...] = getattr(factory, "exclusive", ())
    return declared
