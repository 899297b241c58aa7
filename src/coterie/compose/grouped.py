"""Composing methods of a grouping rule, a way of local training and a choice of shared layers.

Most methods are a single call of ``grouped(name, assign, train, shared)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coterie.client import Client, erm
from coterie.compose import trial
from coterie.compose.assign import Assign, Sorts, everyone
from coterie.compose.local import Local, minimise
from coterie.compose.sharing import Shared, Sharing, all_layers, no_layer
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Order, Reply, Scalar, Slot, Upload, chosen
from coterie.core.method import Method, Round, Setup, State
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Pieces:
    """The pieces of a method; ``None`` is the piece of FedAvg.

    ``around`` wraps the finished method, for example in a server optimizer or a robust mean.
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
    """Build a method from a grouping rule, local training and the choice of shared layers.

    Pieces default to those of FedAvg: one group of all clients, training on the data's loss, and
    sharing all layers. A client of the cohort without a group, because its first reply was lost, is
    admitted before it trains.
    """
    pieces = Pieces(assign, train, shared)
    assign, train = assign or everyone(), train or minimise(erm())
    sharing = Sharing(shared or all_layers)

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        known = client in state.groups
        return sharing.offer(state.models, [state.groups[client]] if known else list(state.models))

    best = partial(sharing.received, most=assign.most)

    def task(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        slot, start = sharing.received(client, arrays, assign.most if assign.picks else 1)
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

    def orders(state: State, slots: Mapping[ClientId, Slot]) -> list[Order]:
        offers = {c: sharing.offer(state.models, [s]) for c, s in slots.items()}
        config = assign.tells(state)
        return [Order(c, "train", o, config, unmetered=not o) for c, o in offers.items()]

    def admitted(fed: Federation, state: State, info: Round) -> State:
        """Admit the clients of the cohort that have no group yet and answer."""
        newcomers = [c for c in info.cohort if c not in state.groups]
        return admit(fed, state, replace(info, cohort=newcomers)) if newcomers else state

    def round(fed: Federation, state: State, info: Round) -> State:
        if assign.picks:
            offer = sharing.offer(state.models, list(state.models))
            orders_to_all = [Order(c, "train", offer, unmetered=not offer) for c in info.cohort]
            means = fed.reduce(orders_to_all, chosen("slot"))
            return state.moved(means).joined({c: s for s, m in means.items() for c in m.clients})
        if any(c not in state.groups for c in info.cohort):
            state = admitted(fed, state, info)
        if assign.probes is not None:
            present = [c for c in info.cohort if c in state.groups]
            state = assign.probes(fed, state, replace(info, cohort=present))
            state = admitted(fed, state, info)  # new groups contain only the clients that answered
        cohort = [c for c in info.cohort if c in state.groups]
        if "trial" in state.memory and trial.due(state, info):
            after = trial.run(fed, state, replace(info, cohort=cohort), orders, sharing.offer)
            return assign.regrouped(state, after)
        if assign.sorts is not None and assign.looks(state, info):
            return sorted_groups(fed, state, replace(info, cohort=cohort), assign.sorts)
        rows = {
            c: assign.mixes(state, c) if assign.mixes else {state.groups[c]: 1.0} for c in cohort
        }
        present_slots = {state.groups[c] for c in cohort}  # only their models are updated
        means = {}
        for slot in [s for s in state.models if s in present_slots] if assign.parallel else [None]:
            slots = {c: state.groups[c] if slot is None else slot for c in cohort}
            into = {
                c: {s: w for s, w in row.items() if s in present_slots and slot in (None, s)}
                for c, row in rows.items()
            }
            means |= fed.reduce(orders(state, slots), into, by_examples=assign.mixes is None)
        answered = {s: {state.groups[c] for c in m.clients} for s, m in means.items()}
        # A mean without clients is noise that hides that none took part, so it is used as well.
        return state.moved({s: m for s, m in means.items() if s in answered[s] or not m.clients})

    def sorted_groups(fed: Federation, state: State, info: Round, sorts: Sorts) -> State:
        def train_more(clients: Collection[ClientId]) -> list[Reply]:
            return fed.gather(orders(state, {c: state.groups[c] for c in clients}))

        state, replies = sorts(state, info, train_more(info.cohort), train_more)
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
        no_robust_mean="mixes models with weights" if assign.mixes else "",
        headline=train.headline,
        takes_as_public=assign.takes_as_public,
        needs_public=assign.needs_public,
        chooses="slot" if assign.picks else "",
        sums=assign.sums,
        same_steps=assign.same_steps,
        shows={**dict.fromkeys(picks, ("slot",)), **assign.shows},
    )


def combined(name: str, parts: Mapping[str, Method]) -> Method:
    """Combine methods into one: each contributes the pieces that the others leave open."""
    pieces: dict[str, tuple[str, Any]] = {}
    indivisible = [part for part, method in parts.items() if method.pieces is None]
    for part, method in parts.items():
        for piece, words in _PIECES.items():
            value = getattr(method.pieces, piece, None)
            if value is None or (piece in pieces and getattr(value, "gives_way", False)):
                continue
            if piece in pieces and not getattr(pieces[piece][1], "gives_way", False):
                raise ConfigError(
                    f"method {name}: {pieces[piece][0]} and {part} both say {words}; choose one"
                )
            pieces[piece] = part, value
    inner = {piece: value for piece, (_, value) in pieces.items() if piece != "around"}
    if indivisible and (len(indivisible) > 1 or inner):
        raise ConfigError(
            f"method {name}: {indivisible[0]} has an exchange of its own; it can only be "
            "combined with a server optimizer or a robust mean"
        )
    method = replace(parts[indivisible[0]], name=name) if indivisible else grouped(name, **inner)
    return pieces["around"][1](method) if "around" in pieces else method


_PIECES = {
    "assign": "who learns together",
    "train": "how a client trains",
    "shared": "which layers are shared",
    "around": "what wraps the method: how the server averages, or how many steps clients make",
}
