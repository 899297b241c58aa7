"""A method is a value with two halves: what the server does, and what clients do.

Most methods are compositions, ``grouped(assign, train, shared)``: a grouping rule, a local
objective, the layers that are shared. A method with its own conversation writes its own ``round``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

from pydantic import Field
from torch import Tensor

from coterie.errors import ConfigError
from coterie.federation import (
    Array,
    ClientId,
    Federation,
    Mean,
    Slot,
)
from coterie.registry import METHODS, checked
from coterie.schema import Schedule
from coterie.tree import Tree
from coterie.weights import Weights

if TYPE_CHECKING:
    from coterie.client import Client, Task

P = ParamSpec("P")

# Ranges of parameters: a factory that says them has them checked, and shown to users.
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bound = Annotated[float, Field(ge=0)]  # it may be infinite
Share = Annotated[float, Field(ge=0, le=1)]
AboveZeroToOne = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class State:
    """All that the server remembers between rounds: models by slot, who is in which group, memory.

    ``memory`` is a tree of whatever else a method needs. It is saved and restored exactly.
    ``notes`` are what the last step has to show (plain JSON values): the run writes them to its
    events and forgets them. ``over`` says why the method wants no further round, if so.
    """

    models: Mapping[Slot, Weights] = field(default_factory=dict)
    groups: Mapping[ClientId, Slot] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    over: str = ""

    def moved(self, means: Mapping[Slot, Mean]) -> State:
        """Each model replaced by its slot's mean; a slot that nobody answered keeps its model.

        Layers that a mean does not have stay as they are.
        """
        models = dict(self.models)
        for slot, mean in means.items():
            model = mean.arrays.get("model")
            if isinstance(model, Weights):
                models[slot] = model.onto(models[slot])
        return replace(self, models=models)

    def joined(self, places: Mapping[ClientId, Slot], **memory: Tree) -> State:
        """With these clients in these groups, and these things remembered."""
        return replace(self, groups={**self.groups, **places}, memory={**self.memory, **memory})

    def to_tree(self) -> dict[str, Tree]:
        """As a tree of plain values."""
        return {
            "models": dict(self.models),
            "groups": dict(self.groups),
            "memory": dict(self.memory),
            "over": self.over,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> State:
        """From such a tree."""
        return State(tree["models"], tree["groups"], tree["memory"], over=tree["over"])


def matrix(values: Any, most: int = 200) -> list[list[float]] | None:
    """A matrix as a note, to six digits; none beyond ``most`` rows, where nobody could read it."""
    if len(values) > most:
        return None
    return [[float(f"{v:.6g}") for v in row] for row in values]


@dataclass(frozen=True)
class Public:
    """Unlabelled samples that the server holds, and a way to run models on them."""

    x: Tensor
    outputs: Callable[[Weights, Tensor], Tensor]


def no_public(name: str) -> ConfigError:
    """What there is to say where a method finds no public samples."""
    return ConfigError(
        f"method {name} needs public samples to run models on: set data.public (--set "
        "data.public=1000) or, on data of your own, give simulate or from_clients some without "
        "labels (public=x)"
    )


@dataclass(frozen=True)
class Spent:
    """What a run has cost: bytes both ways, and seconds of the clock, if it has one."""

    bytes: int = 0
    computation: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """Computing, communicating and waiting together."""
        return self.computation + self.communication + self.waiting


@dataclass(frozen=True)
class Budget:
    """What a run may cost; what is not given is not bounded."""

    bytes: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class Setup:
    """What a method starts from.

    ``start`` is θ⁰, ``fresh(i)`` the i-th further random initialisation, ``groups`` the true
    groups of the scenario if it has any, ``public`` the server's own samples if it has any,
    ``schedule`` how clients train, ``budget`` what the run may cost. ``names`` and ``metadata`` are
    those of all clients that are known, newcomers included: names by id, and columns such as
    "site" with a value for each client. ``smallest_group`` is how many clients a mean needs at
    least: more than one where sums are secure.
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
    """The present round: its number from 0, who takes part, and the server's own samples.

    ``spent`` is what the run has cost before this round, ``budget`` what it may cost. ``metadata``
    is what is said of a newcomer that the run did not begin with, by column and client.
    """

    number: int
    cohort: Sequence[ClientId]
    public: Public | None = None
    spent: Spent = field(default_factory=Spent)
    budget: Budget = field(default_factory=Budget)
    metadata: Mapping[str, Mapping[ClientId, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a method comes from, so that it can travel by name: a factory and JSON parameters."""

    module: str
    factory: str
    parameters: Mapping[str, Any]

    def make(self) -> Method:
        """The method again, from what is installed on this machine."""
        import importlib

        made: Method = getattr(importlib.import_module(self.module), self.factory)(
            **self.parameters
        )
        return made


@dataclass(frozen=True)
class Method:
    """A federated method, server half and client half.

    ``init(fed, setup)`` and ``round(fed, state, info)`` are the server's; ``tasks`` the client's,
    by name. ``sends(state, client)`` is what the server would hand a client now and
    ``assemble(client, arrays)``, on the client, lays it over what the client keeps: the model it
    uses, and the one that is scored. ``admit(fed, state, info)`` finds a place for newcomers, the
    cohort of ``info``; those who do not answer stay outside. ``sees`` is what the server learns of
    one client: "nothing", "means" (it is hidden in a sum) or "each" (its own vectors).
    ``adapt(client, model, epochs)`` is how a client adapts the model it uses, where that is not
    plain training. ``check(setup)`` refuses what does not fit, before anything is trained.
    ``pieces`` are what the method is put together from, if it can be taken apart (``compose``).
    ``needs_all_layers`` says why no layer may rest (``layerwise``), where that is so; ``no_step``
    and ``no_robust_mean`` why no server's optimiser, or no robust mean, can go around it;
    ``no_clipping`` why updates may not be shortened; ``needs_exact`` why no codec may lose digits;
    ``no_noise`` why no noise can hide what it asks for. ``mirrors`` names what in the server's
    memory is the mean of what clients keep, and so cannot go back to an earlier round. ``headline``
    is the score that it is judged by, "received" or "adapted". One that ``keeps_budget`` ends by
    itself before a budget is exceeded. One that ``needs_public`` runs models on the server's own
    samples.
    ``takes_as_public`` is what it was told about clients beforehand,
    which no noise hides, and how far that matters. ``chooses`` is the metric in which its clients
    name the slot that their model goes into, where they choose it themselves. ``sums`` is how many
    means (``reduce``) a client's uploads go into in one round, at most: under secure aggregation
    clients sign no more, and all of them must be of the same clients with the same weights.
    ``same_steps`` says what of a client's training goes into two sums, in another proportion for
    each number of steps: then all must make the same number.
    ``shows`` are the tasks that are asked of single clients (``gather``) although sums are secure,
    each with the metrics that it may answer with: a number that is not named there stays with the
    client, and so does every vector that was not revealed.
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


def method(factory: Callable[P, Method]) -> Callable[P, Method]:
    """Mark a function as a method's factory: arguments are checked, and the method can travel.

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
            given = signature.bind_partial(*args).arguments
        except TypeError as error:
            raise ConfigError(f"method {label}: {error}") from None
        for twice in given.keys() & kwargs.keys():
            raise ConfigError(f"method {label}: {twice} is given twice")
        given |= kwargs
        checked(f"method {label}", factory, given, hint="give it, as in --set method.{}=4")
        # In the signature's order, whatever the order of the call: it is a part of fingerprints.
        bound = signature.bind(*args, **kwargs).arguments
        source = Source(factory.__module__, factory.__qualname__, dict(bound))
        made = factory(*args, **kwargs)
        # A factory that called itself, as with the content of a file, has said where it comes from.
        inner = made.source
        if inner and (inner.module, inner.factory) == (source.module, source.factory):
            return made
        return replace(made, source=source)

    vars(make)["makes"] = Method
    # Ours are known by name. A user's own goes by its place, or by an installed package's entry
    # point: two cells of a notebook may define the same name.
    if factory.__module__.startswith("coterie.methods."):
        METHODS.register(label)(make)
    return make


def exclusive(*names: str) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Declare parameters of which only one may be given, below ``@method``.

    A call that gives two of them other values than their defaults is refused. Settings that are
    laid over others, such as a user's over a scenario's, replace one of them by another.

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
            usual = {name: signature.parameters[name].default for name in names}
            given = [name for name in names if values.get(name, usual[name]) != usual[name]]
            if len(given) > 1:
                label = factory.__name__.replace("_", "-")
                raise ConfigError(f"method {label}: give {' or '.join(given)}, not both")
            return factory(*args, **kwargs)

        vars(make)["exclusive"] = (*exclusive_sets(factory), names)
        return make

    return declare


def exclusive_sets(factory: Callable[..., Method]) -> tuple[tuple[str, ...], ...]:
    """The sets of parameters of which a factory takes only one each, as it declares them."""
    declared: tuple[tuple[str, ...], ...] = getattr(factory, "exclusive", ())
    return declared
