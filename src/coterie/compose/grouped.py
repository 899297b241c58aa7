"""Methods from pieces: who learns together, how each client trains, which layers are shared.

``grouped(name, assign, train, shared)`` puts a grouping rule, a local objective and a choice of
layers together; most methods are one such line.
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
        return [Order(c, "train", o, told, unmetered=not o) for c, o in offers.items()]

    def placed(fed: Federation, state: State, info: Round) -> State:
        """With a group for everybody in the cohort who has none and answers."""
        strangers = [c for c in info.cohort if c not in state.groups]
        return admit(fed, state, replace(info, cohort=strangers)) if strangers else state

    def round(fed: Federation, state: State, info: Round) -> State:
        if assign.picks:
            offer = sharing.offer(state.models, list(state.models))
            asked = [Order(c, "train", offer, unmetered=not offer) for c in info.cohort]
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
