"""DC-PFL: one group that splits while training, layers averaged at their own pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from coterie.client import Client
from coterie.compose import Sharing, no_layer
from coterie.federation import (
    Array,
    ClientId,
    Federation,
    Mean,
    Order,
    Reply,
    Scalar,
    Slot,
    Upload,
)
from coterie.grouping import Dendrogram, agglomerate, scaled_l1
from coterie.layerwise import WHOLE, layer_wise
from coterie.method import (
    AboveZeroToOne,
    Count,
    Method,
    Natural,
    Round,
    Setup,
    Share,
    State,
    matrix,
    method,
)
from coterie.methods.decrease import Bend, has_ended, radii
from coterie.weights import Weights

_SHARING = Sharing()
_ALONE = Sharing(no_layer)


@method
def dc_pfl(
    alpha: Count = 3,
    dynamic: bool = True,
    gamma: Share = 1.0,
    share: Share = 0.1,
    step: AboveZeroToOne = 0.2,
    bend: Bend = "slope",
    smooth: Count = 5,
    observe: Count = 3,
    sleep: Natural = 6,
    start: Count = 5,
) -> Method:
    """One group that splits, when its loss stops falling fast, along a tree of model distances.

    Rule: over the first ``start`` rounds the server averages the distances of clients' models, D_ij
    = ‖S(w_i) − S(w_j)‖₁/d with S scaling a model to [0, 1], and builds a tree by average linkage.
    The groups are its cut at γ̃ times its height, γ̃ = ``gamma`` at first. Clients report the loss
    of the model they receive. When its mean clearly falls slower than before (``bend``), the rapid
    decrease has ended: γ̃ goes down by ``step`` until the groups differ. After one round with all
    layers, clients train both their old and their new group's model; if the mean training loss of
    the new ones is lower the groups change, else monitoring rests for ``sleep`` rounds. Groups only
    ever split. A client alone in its group trains by itself and reports its loss only. Layers that
    hardly differ in a group are averaged every ``alpha`` rounds.
    Args:
        alpha: rounds between means of quiet layers, 1 or more; 1 averages all layers always (NoLA).
        dynamic: whether groups split; with False they are the cut at ``gamma`` for good (NoDC).
        gamma: γ̃ to begin with, 0 to 1; 1 is one group.
        share: a layer is quiet below this share of the mean discrepancy over layers, 0 to 1.
        step: by how much γ̃ goes down, above 0 to 1.
        bend: what ends a rapid decrease. "slope": over the last 7 rounds the loss falls less than
            0.6 times as fast as over up to 18 rounds before, by four standard errors; the noise is
            estimated from the second differences of the losses. "convex": the radius of curvature r
            = (1+l'²)^1.5/l'' of the smoothed loss was smaller than in the ``observe`` rounds after
            it, where the loss bends upwards. "absolute": the same with |l''| and from the first
            round on, the paper's rule to the letter.
        smooth: rounds that the loss is averaged over for a radius, 1 or more.
        observe: rounds that must confirm the smallest radius, 1 or more.
        sleep: rounds without monitoring after a trial that failed, 0 or more.
        start: rounds before the tree is built and before layers rest, 1 or more.
    Server sees: each client's model in the first ``start`` rounds; then means, among them the
    model of a client that is about to be alone.
    Travels: 1 model down, 1 up; less when layers rest, 2 down in a trial, none for a client
    alone in its group.
    Newcomers: train each group's model for a round and join the one that this moves least, by the
    same S. Groups of one are left out unless there are no others, for the server has only the
    model from which they went on alone. When its group splits, a newcomer goes with most of it.
    Departs: "slope" is ours. The paper's rule fired in the rounds 11, 22, 33 and 44 of every run,
    whatever the loss did: the first losses leave the smoothing window then. A pair of clients that
    never took part together counts as average apart. A client with no reply in a trial stays with
    the majority's decision. With partial participation only those who take part in a trial are
    asked.
    Reference: Liu et al., Dynamic Clustering for Personalized Federated Learning on Heterogeneous
    Edge Devices (DC-PFL).
    """

    def groups_at(state: State, level: int) -> dict[ClientId, Slot]:
        return cut(state, level, max(0.0, gamma - step * level))

    def finer(state: State) -> dict[str, Any]:
        """The next level down at which the groups differ; none when there is no such level."""
        now = len(set(state.groups.values()))
        for level in range(state.memory["level"] + 1, math.ceil(gamma / step) + 1):
            if len(set(groups_at(state, level).values())) > now:
                return {"phase": "sync", "next": level}
        return {"phase": "done"}

    def watches(memory: Mapping[str, Any]) -> bool:
        return dynamic and "merges" in memory

    def round(fed: Federation, state: State, info: Round) -> State:
        phase = state.memory["phase"]
        if phase == "trial":
            return trial(fed, state, info)
        orders = [order(state, c, whole=phase == "sync") for c in info.cohort]
        if info.number < start:
            replies = fed.gather(orders)
            state = compared(state, replies)
            if info.number == start - 1:
                state = with_tree(state)
                state = regrouped(state, groups_at(state, 0), 0, state.memory)
            means = fed.average(replies, {c: {s: 1.0} for c, s in state.groups.items()})
        else:
            more = [groups_at(state, state.memory["next"])] if phase == "sync" else []
            into = {c: {g[c]: 1.0 for g in (state.groups, *more)} for c in info.cohort}
            # A newcomer may have joined a client that has gone on alone, which sends no model.
            means = fed.reduce(orders, into | {c: {"alone": 1.0} for c in state.memory["alone"]})
        state = moved(state, orders, means)
        losses = [*state.memory["losses"], *mean_loss(state.groups, means)]
        bends = radii(losses, smooth, bend != "absolute")
        memory = {**state.memory, "losses": losses}
        if phase == "sync":
            memory["phase"] = "trial"
        elif phase == "rest" and info.number + 1 >= memory["until"]:
            memory |= {"phase": "watch", "losses": []}
        elif phase == "watch" and watches(memory) and has_ended(losses, bend, smooth, observe):
            memory |= finer(replace(state, memory=memory))
        curve = {**state.notes, "loss": losses[-1:], "radius": bends[-1:]}
        return replace(state, memory=memory, notes=shown(memory, gamma, step, curve))

    def trial(fed: Federation, state: State, info: Round) -> State:
        level = state.memory["next"]
        new = groups_at(state, level)
        tries = [two_models(state, new, c) for c in info.cohort]
        tried = fed.reduce(tries, {c: {"all": 1.0} for c in info.cohort}).get("all")
        if tried is None:
            return state
        better = tried.metrics["new"] < tried.metrics["old"]
        memory = {**state.memory, "losses": [], "until": info.number + 1 + sleep}
        memory["phase"] = "rest" if sleep else "watch"
        state = regrouped(state, new, level, memory) if better else replace(state, memory=memory)
        asked = [c for c in tried.clients if c not in state.memory["alone"]]
        orders = [verdict(state, c, "new" if better else "old") for c in asked]
        means = fed.reduce(orders, {c: {state.groups[c]: 1.0} for c in asked})
        state = moved(state, orders, means)
        used = {s: m for s, m in state.models.items() if s in set(state.groups.values())}
        outcome = {"trial": {**tried.metrics, "adopted": better}}
        return replace(state, models=used, notes=shown(state.memory, gamma, step, outcome))

    tasks = {"train": train, "try": try_both, "settle": settle, "measure": measure}
    inner = Method("dc-pfl", init, round, sends, tasks, assemble, admit, sees="each")
    paced = layer_wise(inner, alpha, share, start)
    return replace(paced, needs_all_layers="lets layers rest by itself (method.alpha)")


# --- the server's smaller steps -----------------------------------------------------------------


def init(fed: Federation, setup: Setup) -> State:
    """One group of all, nothing known of anybody."""
    pairs = torch.zeros(2, len(setup.clients), len(setup.clients), dtype=torch.float64)
    memory = {"clients": list(setup.clients), "pairs": pairs, "alone": [], "losses": []}
    memory |= {"level": 0, "phase": "watch"}
    return State({"0/0": setup.start}, dict.fromkeys(setup.clients, "0/0"), memory)


def admit(fed: Federation, state: State, info: Round) -> State:
    """A newcomer joins the group whose model a round of training moves least."""
    lone = {state.groups[c] for c in state.memory["alone"]}
    slots = [s for s in state.models if s not in lone] or list(state.models)
    offer = _SHARING.offer(state.models, slots)
    replies = fed.gather([Order(c, "measure", offer) for c in info.cohort])
    return state.joined({r.client: min(offer, key=r.metrics.__getitem__) for r in replies})


def regrouped(
    state: State, new: Mapping[ClientId, Slot], level: int, memory: Mapping[str, Any]
) -> State:
    """The finer groups in place of the old; one whose model is not known has its parent's."""
    models = {s: state.models.get(s, state.models[state.groups[c]]) for c, s in new.items()}
    memory = {**memory, "level": level, "phase": "watch"}
    return replace(state, models={**state.models, **models}, groups=new, memory=memory)


def cut(state: State, level: int, gamma: float) -> dict[ClientId, Slot]:
    """The groups at a normalised height; newcomers go with most of their group."""
    tree = Dendrogram(len(state.memory["clients"]), state.memory["merges"].numpy())
    names = [f"{level}/{g}" for g in tree.cut_normalised(gamma)]
    found: dict[ClientId, Slot] = dict(zip(state.memory["clients"], names, strict=True))
    for c in sorted(state.groups.keys() - found.keys()):
        counts = Counter(
            found[o] for o in state.memory["clients"] if state.groups[o] == state.groups[c]
        )
        found[c] = min(counts, key=lambda s: (-counts[s], str(s)))
    return found


def order(state: State, client: ClientId, whole: bool = False) -> Order:
    """Train the group's model; a client alone in its group keeps what it trained and sends none."""
    config: dict[str, Scalar] = {WHOLE: True} if whole else {}
    if list(state.groups.values()).count(state.groups[client]) == 1:
        config["alone"] = True
    return Order(client, "train", sends(state, client), config)


def verdict(state: State, client: ClientId, take: str) -> Order:
    """Send the model of the trial that was decided for."""
    known = order(state, client, whole=True)
    return replace(known, task="settle", arrays={}, config={**known.config, "take": take})


def sends(state: State, client: ClientId) -> Mapping[str, Array]:
    """The group's model, unless the client has gone on alone from it already."""
    if client not in state.groups or client in state.memory["alone"]:
        return {}
    return _SHARING.offer(state.models, [state.groups[client]])


def two_models(state: State, new: Mapping[ClientId, Slot], client: ClientId) -> Order:
    """Train the old group's model and the new one's; one only where the group stays the same."""
    old, arrays = state.groups[client], dict[str, Array]()
    members = [{c for c in g if g[c] == g[client]} for g in (state.groups, new)]
    if client not in state.memory["alone"]:
        arrays["old"] = _SHARING.offer(state.models, [old])[str(old)]
        if members[0] != members[1] and new[client] in state.models:
            arrays["new"] = _SHARING.offer(state.models, [new[client]])[str(new[client])]
    return Order(client, "try", arrays)


def moved(state: State, orders: Sequence[Order], means: Mapping[Slot, Mean]) -> State:
    """With the means as models, also of slots that are new; who went on alone is noted."""
    models = dict(state.models)
    base = next(iter(models.values()))
    for slot, mean in means.items():
        model = mean.arrays.get("model")
        if isinstance(model, Weights):
            models[slot] = model.onto(models.get(slot, base))
    answered = {c for mean in means.values() for c in mean.clients}
    lone = {o.client for o in orders if o.config.get("alone")} & answered
    alone = sorted({*state.memory["alone"], *lone})
    return replace(state, models=models, memory={**state.memory, "alone": alone})


def compared(state: State, replies: Sequence[Reply]) -> State:
    """With the distances of these models: their sums, and how many each is a sum of."""
    sent = [r for r in replies if isinstance(r.arrays.get("model"), Weights)]
    if len(sent) < 2:
        return state
    rows = np.stack([r.arrays["model"].parameters.numpy() for r in sent])  # type: ignore[union-attr]
    at = np.ix_(*[[state.memory["clients"].index(r.client) for r in sent]] * 2)
    pairs = state.memory["pairs"].numpy().copy()
    pairs[0][at] += scaled_l1(rows)
    pairs[1][at] += 1
    return replace(state, memory={**state.memory, "pairs": torch.from_numpy(pairs)})


def with_tree(state: State) -> State:
    """With the hierarchy by mean distances; a pair that never met counts as average apart."""
    sums, counts = state.memory["pairs"].numpy()
    met = (counts > 0) & ~np.eye(len(counts), dtype=bool)
    mean = sums / np.maximum(counts, 1)
    mean[~met] = mean[met].mean() if met.any() else 0.0
    np.fill_diagonal(mean, 0.0)
    tree = agglomerate(mean)
    memory = {**state.memory, "merges": torch.from_numpy(tree.merges)}
    notes = {"clients": memory["clients"], "distances": matrix(mean), "dendrogram": tree.to_list()}
    return replace(state, memory=memory, notes=notes)


def mean_loss(groups: Mapping[ClientId, Slot], means: Mapping[Slot, Mean]) -> list[float]:
    """The mean over clients of the loss of the model received; nothing if nobody answered."""
    slots = {*groups.values(), "alone"}
    found = [(m.metrics["loss"], len(m.clients)) for s, m in means.items() if s in slots]
    count = sum(n for _, n in found)
    return [sum(loss * n for loss, n in found) / count] if count else []


def shown(
    memory: Mapping[str, Any], gamma: float, step: float, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What a round has to show; loss and radius come as lists of one, or none."""
    height = max(0.0, gamma - step * memory["level"])
    found = {"phase": memory["phase"], "gamma": round(height, 9), "alone": memory["alone"]}
    curve = {k: more[k][0] if more[k] else None for k in ("loss", "radius") if k in more}
    return {**more, **found, **curve}


# --- the client's half --------------------------------------------------------------------------


def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
    """The group's model; that of a client on its own is its own."""
    return _SHARING.received(client, arrays)[1]


def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Score the model received, then train it."""
    slot, begin = _SHARING.received(client, arrays)
    loss, fit = client.loss(begin), client.fit(begin)
    alone = bool(config.get("alone")) or not arrays
    return sent(client, fit.weights, alone, {"loss": loss}, {"model": slot})


def sent(
    client: Client,
    weights: Weights,
    alone: bool,
    metrics: Mapping[str, float],
    since: Mapping[str, str] | None = None,
) -> Upload:
    """What a group's member sends; one that is alone keeps it instead."""
    if alone:
        _ALONE.keep(client, weights)
        return Upload(metrics=metrics)
    return Upload({"model": _SHARING.keep(client, weights)}, metrics, since or {})


def try_both(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the old and the new group's model on the same batches; report both losses."""
    losses = {}
    forget(client)  # a verdict that was lost has left the last trial's models behind
    for name, offer in (arrays or {"old": None}).items():
        _, begin = _SHARING.received(client, {} if offer is None else {name: offer})
        weights = client.fit(begin).weights
        client.state[f"trial.{name}"], losses[name] = weights, client.loss(weights)
    if not arrays:
        _ALONE.keep(client, weights)
    return Upload(metrics={"new": losses["old"], **losses})


def settle(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Send the model of the trial that was decided for."""
    weights = client.kept(f"trial.{config['take']}") or client.kept("trial.old")
    assert weights is not None
    forget(client)
    return sent(client, weights, bool(config.get("alone")), {})


def forget(client: Client) -> None:
    """Keep no model of a trial."""
    for name in [n for n in client.state if n.startswith("trial.")]:
        del client.state[name]


def measure(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """How far a round of training moves each group's model."""
    found = {}
    for slot, offer in arrays.items():
        begin = offer.onto(client.base)
        pair = [begin, client.fit(begin, stream="measure").weights]
        found[slot] = float(scaled_l1(np.stack([w.parameters.numpy() for w in pair]))[0, 1])
    return Upload(metrics=found)
