"""Methods from pieces: who learns together, how each client trains, which layers are shared.

``grouped(name, assign, train, shared)`` puts a grouping rule, a local objective and a choice of
layers together; most methods are one such line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.client import Client, Fit, Objective, Task
from coterie.errors import ConfigError
from coterie.federation import Array, ClientId, Federation, Order, Scalar, Slot, Upload, chosen
from coterie.method import Method, Round, Setup, State
from coterie.weights import Layout, Weights

Shared = Callable[[Layout], Collection[str]]
Admit = Callable[[Federation, State, Round], State]

# --- which layers are shared --------------------------------------------------------------------


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


@dataclass(frozen=True)
class Sharing:
    """What travels, and what stays with a client, in its state under ``own``.

    What is frozen is everybody's from the start; it neither travels nor is kept.
    """

    shared: Shared = all_layers

    def travelling(self, layout: Layout) -> Layout:
        """The part of a model that goes to and fro."""
        wanted = set(self.shared(layout))
        return layout.only([n for n in layout.shareable if n in wanted])

    def staying(self, layout: Layout) -> Layout:
        """The part that each client keeps for itself."""
        gone = set(self.travelling(layout).names)
        return layout.only(
            [e.name for e in layout.entries if e.name not in gone and e.kind != "frozen"]
        )

    def offer(self, models: Mapping[Slot, Weights], slots: Collection[Slot]) -> dict[str, Array]:
        """What of these models is sent, by the name of its slot."""
        parts = {
            str(s): models[s].part(self.travelling(models[s].layout)) for s in slots if s in models
        }
        return {s: p for s, p in parts.items() if p.layout.size}

    def received(self, client: Client, arrays: Mapping[str, Array]) -> tuple[str, Weights]:
        """The offer that fits the client's training data best, laid over what it keeps."""
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

    def keep(self, client: Client, weights: Weights) -> Weights:
        """Keep what stays; give back what travels."""
        own = self.staying(weights.layout)
        if own.size:
            client.state["own"] = weights.part(own)
        return weights.part(self.travelling(weights.layout))


# --- how a client trains ------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """How a client trains the model it received, and which model it then uses."""

    train: Callable[[Client, Weights], Fit]
    uses: Callable[[Client, Weights], Weights]


def minimise(objective: Objective) -> Local:
    """Train what was received on an objective, and use what is received."""
    return Local(lambda client, start: client.fit(start, objective), lambda _, received: received)


# --- who learns together ------------------------------------------------------------------------


@dataclass(frozen=True)
class Assign:
    """A grouping rule: the models and groups to begin with, and where newcomers go.

    A client gets the model of its group and trains it; or, if it ``picks``, it is offered every
    model and takes the one that fits its training data best; or, if ``parallel``, it trains every
    model. What it sends goes into its group's mean, or where ``mixes(state, client)`` says, in
    those shares. Without ``admit`` a newcomer picks. ``tasks`` are what the rule asks of clients.
    """

    start: Callable[[Federation, Setup], State]
    admit: Admit | None = None
    picks: bool = False
    parallel: bool = False
    mixes: Callable[[State, ClientId], Mapping[Slot, float]] | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    sees: str = "means"


def everyone() -> Assign:
    """One group of all."""
    return Assign(
        lambda _, setup: State({0: setup.start}, dict.fromkeys(setup.clients, 0)),
        lambda _, state, info: state.joined(dict.fromkeys(info.cohort, 0)),
    )


def alone() -> Assign:
    """Each client by itself, the server without a model."""
    return Assign(
        lambda _, setup: State({}, {c: c for c in setup.clients}),
        lambda _, state, info: state.joined({c: c for c in info.cohort}),
    )


def true_groups() -> Assign:
    """The scenario's own groups."""

    def start(_: Federation, setup: Setup) -> State:
        if setup.groups is None:
            raise ConfigError(
                "method oracle needs a scenario with known groups: give the data a shift by group "
                "(such as --shift rotation) or a partition with groups"
            )
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(setup.groups.values())), setup.start)
        groups = {c: setup.groups[c] for c in setup.clients}
        return State(models, groups, {"truth": dict(setup.groups)})

    def admit(_: Federation, state: State, info: Round) -> State:
        truth = state.memory["truth"]
        for client in info.cohort:
            if client not in truth:
                raise ConfigError(
                    f"method oracle cannot admit client {client}: nobody told it the true group"
                )
        return state.joined({c: truth[c] for c in info.cohort})

    return Assign(start, admit)


def by_loss(k: int) -> Assign:
    """Groups by the lowest training loss among k models; the first model is θ⁰."""

    def start(_: Federation, setup: Setup) -> State:
        models: dict[Slot, Weights] = {0: setup.start}
        return State(models | {i: setup.fresh(i) for i in range(1, k)})

    return Assign(start, picks=True)


# --- the whole ----------------------------------------------------------------------------------


def grouped(name: str, assign: Assign, train: Local, shared: Shared = all_layers) -> Method:
    """A method from three pieces: who learns together, how each trains, which layers are shared.

    A client of the cohort that has no group yet, because its first reply was lost, is admitted
    before it trains.
    """
    sharing = Sharing(shared)

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        known = client in state.groups
        return sharing.offer(state.models, [state.groups[client]] if known else list(state.models))

    def task(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        slot, start = sharing.received(client, arrays)
        result = train.train(client, start)
        travels = sharing.keep(client, result.weights)
        metrics = {"loss": result.loss} | ({"slot": float(slot or 0)} if assign.picks else {})
        return Upload({"model": travels}, metrics, {"model": slot}) if slot else Upload({}, metrics)

    def pick(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        return Upload(metrics={"slot": float(sharing.received(client, arrays)[0] or 0)})

    def admit(fed: Federation, state: State, info: Round) -> State:
        if assign.admit is not None:
            return assign.admit(fed, state, info)
        offer = sharing.offer(state.models, list(state.models))
        replies = fed.gather([Order(c, "pick", offer) for c in info.cohort])
        return state.joined({r.client: int(r.metrics["slot"]) for r in replies})

    def round(fed: Federation, state: State, info: Round) -> State:
        strangers = [c for c in info.cohort if c not in state.groups]
        if assign.picks:
            offer = sharing.offer(state.models, list(state.models))
            orders = [Order(c, "train", offer, apart=not offer) for c in info.cohort]
            means = fed.reduce(orders, chosen("slot"))
            return state.moved(means).joined({c: s for s, m in means.items() for c in m.clients})
        if strangers:
            state = admit(fed, state, replace(info, cohort=strangers))
        cohort = [c for c in info.cohort if c in state.groups]
        rows = {
            c: assign.mixes(state, c) if assign.mixes else {state.groups[c]: 1.0} for c in cohort
        }
        home = {state.groups[c] for c in cohort}  # a model moves only together with its group
        means = {}
        for slot in [s for s in state.models if s in home] if assign.parallel else [None]:
            trains = {c: state.groups[c] if slot is None else slot for c in cohort}
            offers = {c: sharing.offer(state.models, [s]) for c, s in trains.items()}
            orders = [Order(c, "train", offers[c], apart=not offers[c]) for c in cohort]
            into = {
                c: {s: w for s, w in row.items() if s in home and slot in (None, s)}
                for c, row in rows.items()
            }
            means |= fed.reduce(orders, into, by_examples=assign.mixes is None)
        answered = {s: {state.groups[c] for c in m.clients} for s, m in means.items()}
        return state.moved({s: m for s, m in means.items() if s in answered[s]})

    return Method(
        name=name,
        init=assign.start,
        round=round,
        sends=sends,
        tasks={"train": task, "pick": pick, **assign.tasks},
        assemble=lambda client, arrays: train.uses(client, sharing.received(client, arrays)[1]),
        admit=admit,
        sees="nothing" if shared is no_layer else assign.sees,
    )
