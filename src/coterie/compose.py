"""Methods from pieces: who learns together, how each client trains, which layers are shared.

``grouped(name, assign, train, shared)`` puts a grouping rule, a local objective and a choice of
layers together; most methods are one such line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from coterie import trial
from coterie.client import Client, Fit, Objective, Task, erm
from coterie.errors import ConfigError, TrainingError
from coterie.federation import (
    Array,
    ClientId,
    Federation,
    Order,
    Reply,
    Scalar,
    Slot,
    Upload,
    chosen,
)
from coterie.method import Method, Round, Setup, State
from coterie.weights import Layout, Weights

Shared = Callable[[Layout], Collection[str]]
Admit = Callable[[Federation, State, Round], State]
Check = Callable[[Setup], None]

# --- which layers are shared --------------------------------------------------------------------


def all_layers(layout: Layout) -> Collection[str]:
    """Share the whole model."""
    return layout.names


def no_layer(_: Layout) -> Collection[str]:
    """Share nothing."""
    return ()


def _last(layout: Layout, k: int, word: str) -> set[str]:
    """The last ``k`` layers; refused if there are not so many, or if all of them are frozen."""
    if k > len(layout.layers):
        raise ConfigError(
            f"{k} {word} layers asked for, but the model has {len(layout.layers)}: "
            f"{', '.join(layout.layers)}"
        )
    layers = set(layout.layers[len(layout.layers) - k :])
    if k and all(e.kind == "frozen" for e in layout.entries if e.layer in layers):
        raise ConfigError(
            f"the {word} layers ({', '.join(sorted(layers))}) are frozen: nothing would be "
            f"{word}. Freeze others, or let more layers be {word}"
        )
    return layers


def only_last(k: int) -> Shared:
    """Share the last ``k`` layers only."""

    def shared(layout: Layout) -> Collection[str]:
        wanted = _last(layout, k, "shared")
        return [e.name for e in layout.entries if e.layer in wanted]

    return shared


def all_but_last(k: int) -> Shared:
    """Share all layers except the last ``k``."""

    def shared(layout: Layout) -> Collection[str]:
        kept = _last(layout, k, "personal")
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
        """The model that was sent, by the name of its slot, laid over what the client keeps.

        Clients of methods that do not have them choose take one model: with several, which one they
        train would say something about their data.
        """
        offers = self._offers(client, arrays)
        if len(offers) > 1:
            raise TrainingError(
                f"client {client.id} was sent {len(offers)} models, and takes one: this method "
                "does not have clients choose"
            )
        return next(iter(offers.items()))

    def best(
        self, client: Client, arrays: Mapping[str, Array], most: int = 0
    ) -> tuple[str, Weights]:
        """The offer that fits the client's training data best, laid over what it keeps.

        Of more than ``most``, if that is not 0, a client chooses none: its choice would say more.
        """
        offers = self._offers(client, arrays)
        if 0 < most < len(offers):
            raise TrainingError(
                f"client {client.id} was offered {len(offers)} models, and chooses among {most} at "
                "most"
            )
        if len(offers) == 1:
            return next(iter(offers.items()))
        losses = {s: client.loss(w) for s, w in offers.items()}
        best = min(losses, key=lambda s: losses[s])
        return best, offers[best]

    def _offers(self, client: Client, arrays: Mapping[str, Array]) -> dict[str, Weights]:
        """The models that were sent, each whole; what the client has itself if there is none."""
        own = client.kept("own")
        base = client.base if own is None else own.onto(client.base)
        offers = {s: w.onto(base) for s, w in arrays.items() if isinstance(w, Weights)}
        return offers or {"": base}

    def keep(self, client: Client, weights: Weights) -> Weights:
        """Keep what stays; give back what travels."""
        own = self.staying(weights.layout)
        if own.size:
            client.state["own"] = weights.part(own)
        return weights.part(self.travelling(weights.layout))


# --- how a client trains ------------------------------------------------------------------------


Adapt = Callable[[Client, Weights, int], Weights]


@dataclass(frozen=True)
class Local:
    """How a client trains the model it received, and which model it then uses.

    ``adapt(client, model, epochs)`` is how it adapts the model that it uses, where that is not
    plain training; ``check`` refuses what does not fit. One that ``gives_way`` is left out where
    it is combined with another. ``headline`` is the score that counts, "received" or "adapted".
    """

    train: Callable[[Client, Weights], Fit]
    uses: Callable[[Client, Weights], Weights] = lambda _, received: received
    adapt: Adapt | None = None
    check: Check | None = None
    gives_way: bool = False
    headline: str = "received"


def minimise(objective: Objective) -> Local:
    """Train what was received on an objective, and use what is received."""
    return Local(lambda client, start: client.fit(start, objective))


def keeping(name: str, train: Callable[[Client, Weights], Fit]) -> Local:
    """A client uses the model that ``train`` leaves in its state under this name.

    It is scored as it stands, adapted to the client already. A client that has not trained yet
    uses, and adapts, what it receives.
    """

    def uses(client: Client, received: Weights) -> Weights:
        return client.kept(name) or received

    def adapt(client: Client, model: Weights, epochs: int) -> Weights:
        return client.adapt(model, epochs) if client.kept(name) is None else model

    return Local(train, uses, adapt)


# --- who learns together ------------------------------------------------------------------------


More = Callable[[Collection[ClientId]], list[Reply]]
Sorts = Callable[[State, Round, list[Reply], More], tuple[State, list[Reply]]]


@dataclass(frozen=True)
class Assign:
    """A grouping rule: the models and groups to begin with, and where newcomers go.

    A client gets the model of its group and trains it; or, if it ``picks``, it is offered every
    model and takes the one that fits its training data best; or, if ``parallel``, it trains every
    model. What it sends goes into its group's mean, or where ``mixes(state, client)`` says, in
    those shares. Without ``admit`` a newcomer picks. ``tasks`` are what the rule asks of clients,
    ``tells(state)`` what it has to say to those who train; ``check`` refuses what does not fit,
    ``takes_as_public``, ``needs_public``, ``same_steps`` and ``shows`` are as in ``Method``.

    A rule that ``sorts`` looks at single replies, in the rounds in which ``looks(state, info)``:
    from the state, what the cohort sent, and a way to have ``more`` clients train as well, come the
    state with the new groups, and the replies that go into their means.

    A rule that ``probes`` may ask clients something before a round. One that remembers a ``trial``
    (``coterie.trial``) has it carried out when it is due;
    ``regrouped(before, after)`` then brings what else the rule remembers up to date.
    """

    start: Callable[[Federation, Setup], State]
    admit: Admit | None = None
    picks: bool = False
    most: int = 0  # models that a client chooses among; 0: any number
    parallel: bool = False
    mixes: Callable[[State, ClientId], Mapping[Slot, float]] | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    sees: str = "means"
    tells: Callable[[State], Mapping[str, Scalar]] = lambda _: {}
    check: Check | None = None
    sorts: Sorts | None = None
    looks: Callable[[State, Round], bool] = lambda *_: True
    probes: Callable[[Federation, State, Round], State] | None = None
    regrouped: Callable[[State, State], State] = lambda _, after: after
    needs_all_layers: str = ""
    takes_as_public: str = ""
    needs_public: bool = False
    no_noise: str = ""
    sums: int = 1
    same_steps: str = ""
    shows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


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

    def check(setup: Setup) -> None:
        if k > len(setup.clients):
            raise ConfigError(f"k = {k} models for {len(setup.clients)} clients: take fewer")

    return Assign(start, picks=True, most=k, check=check)


# --- the whole ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """What a method is made of; ``None`` is as in FedAvg.

    ``around`` wraps the finished method: a server's optimiser, a robust mean.
    """

    assign: Assign | None = None
    train: Local | None = None
    shared: Shared | None = None
    around: Callable[[Method], Method] | None = None


def grouped(
    name: str,
    assign: Assign | None = None,
    train: Local | None = None,
    shared: Shared | None = None,
) -> Method:
    """A method from three pieces: who learns together, how each trains, which layers are shared.

    A piece that is not given is FedAvg's: everyone, the loss of the data, all layers. A client of
    the cohort that has no group yet, because its first reply was lost, is admitted before it
    trains.
    """
    pieces = Pieces(assign, train, shared)
    assign, train = assign or everyone(), train or minimise(erm())
    sharing = Sharing(shared or all_layers)

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        known = client in state.groups
        return sharing.offer(state.models, [state.groups[client]] if known else list(state.models))

    best = partial(sharing.best, most=assign.most)

    def task(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        slot, start = (best if assign.picks else sharing.received)(client, arrays)
        tries = "score-cuts" in trials
        copies = trial.longer_trained(client, config, start, train.train) if tries else {}
        result = train.train(client, start)
        sent = {"model": sharing.keep(client, result.weights)}
        sent |= {name: w.part(sharing.travelling(w.layout)) for name, w in copies.items()}
        metrics = {"loss": result.loss} | ({"slot": float(slot or 0)} if assign.picks else {})
        return Upload(sent, metrics, dict.fromkeys(sent, slot)) if slot else Upload({}, metrics)

    def pick(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        choice = best(client, arrays)[0]
        return Upload(metrics={"slot": float(list(arrays).index(choice) if choice else 0)})

    def score_cuts(
        client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]
    ) -> Upload:
        return trial.score_cuts(client, arrays, config, sharing)

    trials = {"score-cuts": score_cuts} if assign.sums > 1 else {}
    picks = {} if assign.admit else {"pick": pick}

    def admit(fed: Federation, state: State, info: Round) -> State:
        if assign.admit is not None:
            return assign.admit(fed, state, info)
        slots = list(state.models)
        offer = sharing.offer(state.models, slots)
        replies = fed.gather([Order(c, "pick", offer) for c in info.cohort])
        return state.joined({r.client: slots[int(r.metrics["slot"])] for r in replies})

    def orders(state: State, trains: Mapping[ClientId, Slot]) -> list[Order]:
        offers = {c: sharing.offer(state.models, [s]) for c, s in trains.items()}
        told = assign.tells(state)
        return [Order(c, "train", o, told, apart=not o) for c, o in offers.items()]

    def placed(fed: Federation, state: State, info: Round) -> State:
        """With a group for everybody in the cohort who has none and answers."""
        strangers = [c for c in info.cohort if c not in state.groups]
        return admit(fed, state, replace(info, cohort=strangers)) if strangers else state

    def round(fed: Federation, state: State, info: Round) -> State:
        if assign.picks:
            offer = sharing.offer(state.models, list(state.models))
            asked = [Order(c, "train", offer, apart=not offer) for c in info.cohort]
            means = fed.reduce(asked, chosen("slot"))
            return state.moved(means).joined({c: s for s, m in means.items() for c in m.clients})
        state = placed(fed, state, info)
        if assign.probes is not None:
            here = [c for c in info.cohort if c in state.groups]
            state = assign.probes(fed, state, replace(info, cohort=here))
            state = placed(fed, state, info)  # new groups are of those who answered
        cohort = [c for c in info.cohort if c in state.groups]
        if trial.due(state, info):
            after = trial.run(fed, state, replace(info, cohort=cohort), orders, sharing.offer)
            return assign.regrouped(state, after)
        if assign.sorts is not None and assign.looks(state, info):
            return sorted_anew(fed, state, replace(info, cohort=cohort), assign.sorts)
        rows = {
            c: assign.mixes(state, c) if assign.mixes else {state.groups[c]: 1.0} for c in cohort
        }
        home = {state.groups[c] for c in cohort}  # a model moves only together with its group
        means = {}
        for slot in [s for s in state.models if s in home] if assign.parallel else [None]:
            trains = {c: state.groups[c] if slot is None else slot for c in cohort}
            into = {
                c: {s: w for s, w in row.items() if s in home and slot in (None, s)}
                for c, row in rows.items()
            }
            means |= fed.reduce(orders(state, trains), into, by_examples=assign.mixes is None)
        answered = {s: {state.groups[c] for c in m.clients} for s, m in means.items()}
        # A mean of nobody is noise that hides that nobody came.
        return state.moved({s: m for s, m in means.items() if s in answered[s] or not m.clients})

    def sorted_anew(fed: Federation, state: State, info: Round, sorts: Sorts) -> State:
        def more(clients: Collection[ClientId]) -> list[Reply]:
            return fed.gather(orders(state, {c: state.groups[c] for c in clients}))

        state, replies = sorts(state, info, more(info.cohort), more)
        return state.moved(fed.average(replies, {c: {s: 1.0} for c, s in state.groups.items()}))

    def check(setup: Setup) -> None:
        sharing.travelling(setup.start.layout)
        for piece in (assign, train):
            if piece.check is not None:
                piece.check(setup)

    return Method(
        name=name,
        init=assign.start,
        round=round,
        sends=sends,
        tasks={"train": task, **picks, **trials, **assign.tasks},
        assemble=lambda client, arrays: train.uses(client, best(client, arrays)[1]),
        admit=admit,
        sees="nothing" if shared is no_layer else assign.sees,
        adapt=train.adapt,
        check=check,
        pieces=pieces,
        needs_all_layers=assign.needs_all_layers,
        no_noise=assign.no_noise,
        no_robust_mean="mixes models in shares" if assign.mixes else "",
        headline=train.headline,
        takes_as_public=assign.takes_as_public,
        needs_public=assign.needs_public,
        chooses="slot" if assign.picks else "",
        sums=assign.sums,
        same_steps=assign.same_steps,
        shows={**dict.fromkeys(picks, ("slot",)), **assign.shows},
    )


def combined(name: str, parts: Mapping[str, Method]) -> Method:
    """One method from the pieces of several, each of which brings what the others leave open."""
    found: dict[str, tuple[str, Any]] = {}
    whole = [part for part, made in parts.items() if made.pieces is None]
    for part, made in parts.items():
        for piece, words in _PIECES.items():
            own = getattr(made.pieces, piece, None)
            if own is None or (piece in found and getattr(own, "gives_way", False)):
                continue
            if piece in found and not getattr(found[piece][1], "gives_way", False):
                raise ConfigError(
                    f"method {name}: {found[piece][0]} and {part} both say {words}: take one"
                )
            found[piece] = part, own
    inner = {piece: own for piece, (_, own) in found.items() if piece != "around"}
    if whole and (len(whole) > 1 or inner):
        raise ConfigError(
            f"method {name}: {whole[0]} has a conversation of its own; it can be combined with a "
            "server's optimiser or a robust mean only"
        )
    made = replace(parts[whole[0]], name=name) if whole else grouped(name, **inner)
    return found["around"][1](made) if "around" in found else made


_PIECES = {
    "assign": "who learns together",
    "train": "how a client trains",
    "shared": "which layers are shared",
    "around": "what goes around it: how the server takes the mean, or how many steps clients make",
}
