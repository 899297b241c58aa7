"""A method is a value with two halves: what the server does, and what clients do.

Most methods are compositions, ``grouped(assign, train, shared)``: a grouping rule, a local
objective, the layers that are shared. A method with its own conversation writes its own ``round``.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, get_type_hints

from pydantic import TypeAdapter, ValidationError

from coterie.client import Client, Fit, Objective, Task
from coterie.errors import ConfigError, unknown
from coterie.federation import (
    Array,
    ClientId,
    Federation,
    Mean,
    Order,
    Scalar,
    Slot,
    Upload,
    chosen,
)
from coterie.tree import Tree
from coterie.weights import Layout, Weights

P = ParamSpec("P")


@dataclass(frozen=True)
class State:
    """All that the server remembers between rounds: models by slot, who is in which group, memory.

    ``memory`` is a tree of whatever else a method needs. It is saved and restored exactly.
    """

    models: Mapping[Slot, Weights] = field(default_factory=dict)
    groups: Mapping[ClientId, Slot] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)

    def moved(self, means: Mapping[Slot, Mean]) -> State:
        """Each model replaced by its slot's mean; those that contributed are its group.

        A slot that nobody answered keeps its model.
        """
        models, groups = dict(self.models), dict(self.groups)
        for slot, mean in means.items():
            groups.update(dict.fromkeys(mean.clients, slot))
            model = mean.arrays.get("model")
            if isinstance(model, Weights):
                models[slot] = model.onto(models[slot])
        return replace(self, models=models, groups=groups)

    def to_tree(self) -> dict[str, Tree]:
        """As a tree of plain values."""
        return {
            "models": dict(self.models),
            "groups": dict(self.groups),
            "memory": dict(self.memory),
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> State:
        """From such a tree."""
        return State(tree["models"], tree["groups"], tree["memory"])


@dataclass(frozen=True)
class Setup:
    """What a method starts from.

    ``start`` is θ⁰, ``fresh(i)`` the i-th further random initialisation, ``groups`` the true
    groups of the scenario if it has any.
    """

    start: Weights
    clients: Sequence[ClientId]
    seed: int
    fresh: Callable[[int], Weights]
    groups: Mapping[ClientId, int] | None = None


@dataclass(frozen=True)
class Round:
    """The present round: its number from 0 and who takes part."""

    number: int
    cohort: Sequence[ClientId]


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
    uses, and the one that is scored. ``sees`` is what the server learns of one client: "nothing",
    "means" (it is hidden in a sum) or "each" (its own vectors).
    """

    name: str
    init: Callable[[Federation, Setup], State]
    round: Callable[[Federation, State, Round], State]
    sends: Callable[[State, ClientId], Mapping[str, Array]]
    tasks: Mapping[str, Task]
    assemble: Callable[[Client, Mapping[str, Array]], Weights]
    sees: str = "means"
    source: Source | None = None


def method(factory: Callable[P, Method]) -> Callable[P, Method]:
    """Mark a function as a method's factory: arguments are checked, and the method can travel.

    >>> @method
    ... def mine(strength: float = 1.0) -> Method: ...
    >>> mine(strenth=2.0)
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown parameter of mine 'strenth'; did you mean 'strength'? ...
    """
    signature = inspect.signature(factory)
    label = factory.__name__.replace("_", "-")

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Method:
        for name in kwargs:
            if name not in signature.parameters:
                known = signature.parameters or ["(it takes none)"]
                raise ConfigError(unknown(f"parameter of {label}", name, known))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"method {label}: {error}") from None
        hints = get_type_hints(factory)
        for name, value in bound.arguments.items():
            try:
                # As JSON, in which a method travels: a list is then as good as a tuple.
                TypeAdapter(hints.get(name, Any)).validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].lower()
                raise ConfigError(f"method {label}: {name} = {value!r}: {reason}") from None
        return replace(
            factory(*args, **kwargs),
            source=Source(factory.__module__, factory.__qualname__, dict(bound.arguments)),
        )

    return make


# --- composition ------------------------------------------------------------------------------

Shared = Callable[[Layout], Collection[str]]


@dataclass(frozen=True)
class Assign:
    """A grouping rule: the models and groups to begin with.

    With ``picks`` every client is offered every model and takes the one that fits its training
    data best; otherwise it gets the model of its group.
    """

    start: Callable[[Federation, Setup], State]
    picks: bool = False


@dataclass(frozen=True)
class Local:
    """How a client trains the model it received, and which model it then uses."""

    train: Callable[[Client, Weights], Fit]
    uses: Callable[[Client, Weights], Weights]


def minimise(objective: Objective) -> Local:
    """Train what was received on an objective, and use what is received."""
    return Local(lambda client, start: client.fit(start, objective), lambda _, received: received)


def everyone() -> Assign:
    """One group of all."""
    return Assign(lambda _, setup: State({0: setup.start}, dict.fromkeys(setup.clients, 0)))


def alone() -> Assign:
    """Each client by itself, the server without a model."""
    return Assign(lambda _, setup: State({}, {c: c for c in setup.clients}))


def true_groups() -> Assign:
    """The scenario's own groups."""

    def start(_: Federation, setup: Setup) -> State:
        if setup.groups is None:
            raise ConfigError(
                "method oracle needs a scenario with known groups: give the data a shift by group "
                "(such as --shift rotation) or a partition with groups"
            )
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(setup.groups.values())), setup.start)
        return State(models, setup.groups)

    return Assign(start)


def by_loss(k: int) -> Assign:
    """Groups by the lowest training loss among k models; the first model is θ⁰."""

    def start(_: Federation, setup: Setup) -> State:
        models: dict[Slot, Weights] = {0: setup.start}
        return State(models | {i: setup.fresh(i) for i in range(1, k)})

    return Assign(start, picks=True)


def all_layers(layout: Layout) -> Collection[str]:
    """Share the whole model."""
    return layout.names


def no_layer(_: Layout) -> Collection[str]:
    """Share nothing."""
    return ()


def all_but_last(k: int) -> Shared:
    """Share all layers except the last ``k``."""

    def shared(layout: Layout) -> Collection[str]:
        if k > len(layout.layers):
            raise ConfigError(
                f"{k} personal layers asked for, but the model has {len(layout.layers)}: "
                f"{', '.join(layout.layers)}"
            )
        kept = set(layout.layers[len(layout.layers) - k :])
        if k and all(e.kind == "frozen" for e in layout.entries if e.layer in kept):
            raise ConfigError(
                f"the personal layers ({', '.join(sorted(kept))}) are frozen: nothing would be "
                "personal. Freeze others, or keep more layers personal"
            )
        return [e.name for e in layout.entries if e.layer not in kept]

    return shared


def grouped(name: str, assign: Assign, train: Local, shared: Shared = all_layers) -> Method:
    """A method from three pieces: who learns together, how each trains, which layers are shared.

    What is not shared (personal layers, local statistics) stays in the client's state under
    ``own``; what is frozen is everybody's from the start and never travels.
    """

    def travelling(layout: Layout) -> Layout:
        wanted = set(shared(layout))
        return layout.only([n for n in layout.shareable if n in wanted])

    def staying(layout: Layout) -> Layout:
        gone = set(travelling(layout).names)
        return layout.only(
            [e.name for e in layout.entries if e.name not in gone and e.kind != "frozen"]
        )

    def offer(state: State, slots: Collection[Slot]) -> dict[str, Array]:
        models = {str(s): state.models[s] for s in slots if s in state.models}
        parts = {s: m.part(travelling(m.layout)) for s, m in models.items()}
        return {s: p for s, p in parts.items() if p.layout.size}

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        known = client in state.groups
        return offer(state, [state.groups[client]] if known else list(state.models))

    def received(client: Client, arrays: Mapping[str, Array]) -> tuple[str, Weights]:
        """The model that training starts from: the offer that fits best, over what is kept."""
        own = client.kept("own")
        base = client.base if own is None else own.onto(client.base)
        offers = {s: w.onto(base) for s, w in arrays.items() if isinstance(w, Weights)}
        if not offers:
            return "", base
        if len(offers) == 1:
            return next(iter(offers.items()))
        losses = {s: client.loss(w) for s, w in offers.items()}
        best = min(losses, key=lambda s: losses[s])
        return best, offers[best]

    def task(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        slot, start = received(client, arrays)
        result = train.train(client, start)
        layout = result.weights.layout
        own = staying(layout)
        if own.size:
            client.state["own"] = result.weights.part(own)
        metrics = {"loss": result.loss}
        if assign.picks:
            metrics["slot"] = float(slot or 0)
        if not slot:
            return Upload({}, metrics)
        return Upload(
            {"model": result.weights.part(travelling(layout))}, metrics, since={"model": slot}
        )

    def round(fed: Federation, state: State, info: Round) -> State:
        orders = []
        for c in info.cohort:
            arrays = offer(state, list(state.models) if assign.picks else [state.groups[c]])
            orders.append(Order(c, "train", arrays, apart=not arrays))
        into = chosen("slot") if assign.picks else {c: {state.groups[c]: 1.0} for c in info.cohort}
        return state.moved(fed.reduce(orders, into))

    return Method(
        name=name,
        init=assign.start,
        round=round,
        sends=sends,
        tasks={"train": task},
        assemble=lambda client, arrays: train.uses(client, received(client, arrays)[1]),
        sees="nothing" if shared is no_layer else "means",
    )
