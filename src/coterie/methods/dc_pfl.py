"""DC-PFL: one group that splits during training; some layers are averaged less often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from coterie.client import Client
from coterie.clustering import agglomerate, manhattan, scaled_l1, with_most
from coterie.compose import probing
from coterie.compose import trial as trials
from coterie.compose.layerwise import WHOLE, LayerRecord, layer_wise
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Mean, Order, Reply, Scalar, Slot, Upload
from coterie.core.method import (
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
from coterie.core.weights import Weights
from coterie.methods import dc_pfl_two_models
from coterie.methods.by_evidence import NO_NOISE
from coterie.methods.dc_pfl_decrease import Bend, has_ended, radii
from coterie.methods.dc_pfl_splits import (
    Levels,
    Splitting,
    ask_for_trial,
    mean_distances,
    mean_of_pairs,
    ready,
    tree_of,
    with_answers,
)
from coterie.methods.dc_pfl_two_models import SHARING, sent

EARLY = 2  # rounds before a trial of groups for which the evidence is decisive
MOST_UNSCALED = 200  # clients, up to which distances of unscaled models are noted as well


@method
def dc_pfl(
    alpha: Count = 3,
    dynamic: bool = True,
    gamma: Share = 1.0,
    share: Literal["auto"] | Share = "auto",
    levels: Literal["tree"] | AboveZeroToOne = "tree",
    trial: Literal["cuts", "two-models"] = "cuts",
    trial_on: Literal["validation", "training"] = "validation",
    early: bool = True,
    bend: Bend = "slope",
    smooth: Count = 5,
    observe: Count = 3,
    sleep: Natural = 6,
    start: Count = 5,
) -> Method:
    """One group that splits along a tree of model distances, when its loss stops falling fast.

    Family: clustered.
    Rule: over the first ``start`` rounds, the server averages the distances between clients'
    models, D_ij = ‖S(w_i) − S(w_j)‖₁/d, where S scales a model to [0, 1], and builds a tree from
    them by average linkage. Clients report the loss of the model that they receive. When the mean
    loss clearly falls more slowly than before (``bend``), its rapid decrease has ended and finer
    groups are tried (already after two rounds if the evidence is decisive). First, all clients
    train θ⁰ once on each of two halves of their data: a group is tried only if dividing it lets one
    half predict the other better. The group's members train its model once more, the server
    averages the same uploads for every cut of their tree, and each member scores the models of its
    nested groups on validation data. The coarsest cut whose loss is within one standard error of
    the lowest is adopted, and its groups continue from the models just averaged. If no group
    splits, monitoring pauses for ``sleep`` rounds. Groups split but never merge. A client alone in
    its group trains by itself and reports only its loss. Layers that hardly differ within a group
    (quiet layers) are averaged only every ``alpha`` rounds.
    Args:
        alpha: rounds between two averages of quiet layers, 1 or more; 1 always averages all layers
            (the paper's NoLA).
        dynamic: whether groups split; with False, they are the cut at ``gamma`` for the whole run
            (the paper's NoDC).
        gamma: the initial γ̃, 0 to 1. Groups are the cut at γ̃ times the height of the tree; 1 is
            one group.
        share: which layers are quiet. "auto": all but the layer that differs most, and in any case
            a layer that holds more than half of the bytes; decided once for each group. A number
            from 0 to 1: the layers whose discrepancy is below this share of the mean over layers,
            which is the paper's rule (with 0.1).
        levels: which cuts of the tree are tried: "tree", those at every merge and the groups of the
            evidence, or only those at γ̃ in steps of this number, above 0 to 1 (the paper's 0.2).
        trial: "cuts" tries the groups that the evidence divides, with every cut of the tree in a
            single round; "two-models" is the paper's trial, which uses no evidence: γ̃ is lowered
            by one level, there is one round with all layers, then clients train the models of both
            their old and their new group, and the groups change if the mean loss of the new ones is
            lower.
        trial_on: the data on which a trial measures the loss: "validation", where finer groups must
            be better by more than one standard error, or "training", as in the paper's text, where
            finer groups nearly always win.
        early: whether a group is already tried after two rounds if the evidence for splitting it is
            decisive (fewer groups and more both predict clearly worse), and not only after the
            rapid decrease, since the loss of one model for clients that contradict each other may
            never decrease rapidly. The tree is then built from these two rounds; if some clients
            have not taken part together by then, the method waits for the tree of the first
            ``start`` rounds.
        bend: what ends a rapid decrease. "slope": over the last 7 rounds, the loss falls less than
            0.6 times as fast as over up to 18 rounds before them, by more than four standard
            errors; the noise is estimated from the second differences of the losses. "convex": the
            radius of curvature r = (1+l'²)^1.5/l'' of the smoothed loss was smaller than in the
            ``observe`` rounds after it, where the loss bends upwards. "absolute": the same with
            |l''| and from the first round on, which is the paper's rule to the letter.
        smooth: rounds over which the loss is averaged to compute a radius, 1 or more.
        observe: rounds that must confirm the smallest radius, 1 or more.
        sleep: rounds without monitoring after a trial that changed nothing, 0 or more.
        start: rounds before the tree is built and before quiet layers are skipped, 1 or more.
    Server sees: each client's model in the first ``start`` rounds, or in two where the evidence is
    decisive, and once two models that each client trained from θ⁰ on halves of its data; then
    means; the last model that a client sends before it trains alone is such a mean, of one client.
    Travels: 1 model down, 1 up; less when layers are skipped, and none for a client that is alone
    in its group. For the evidence, once, 1 model down and 2 up. In a trial, 1 more model up, and
    the models of all groups that a client could be in down, at half precision.
    Newcomers: train each group's model for a round and join the group whose model changes least,
    measured with the same S. Groups of one client are left out unless there are no others, because
    the server has only the model from which that client continued alone. When the group of a
    newcomer splits, the newcomer joins the part to which most members go.
    Departs: the defaults of ``share``, ``levels``, ``trial``, ``trial_on`` and ``bend`` are not
    from the paper. With the paper's, splits came in rounds 11, 22, 33 and 44 of every run, whatever
    the loss did, clients with identical data were split, and no layer was ever quiet. Two clients
    that never took part in the same round get the average distance. A client that does not answer
    the probe is asked up to three times and then joins the part of its group to which most members
    go. Above 16 groups, not every cut is tried: each has a quarter more groups than the one before.
    If no client has validation data, the groups of the evidence are used without a trial. In a
    trial of two models, a client without a reply follows the majority's decision; with partial
    participation, only the clients that take part in the trial are asked.
    Reference: Liu et al., Dynamic Clustering for Personalized Federated Learning on Heterogeneous
    Edge Devices (DC-PFL).
    """
    on = {"validation": "val", "training": "train"}[trial_on]
    tree_levels = Levels(gamma, levels)
    splitting = Splitting(tree_levels, on, sleep)
    server = DcPflServer(
        tree_levels, splitting, trial, on, dynamic, early, bend, smooth, observe, sleep, start
    )
    tasks = {
        "train": train,
        "try": dc_pfl_two_models.train_both,
        "settle": dc_pfl_two_models.settle,
        "measure": measure,
        "score-cuts": score_cuts,
        **probing.TASKS,
    }
    inner = Method("dc-pfl", init, server.take_round, sends, tasks, assemble, admit, sees="each")
    if dynamic and trial == "cuts":
        inner = replace(inner, no_noise=NO_NOISE)
    layered = layer_wise(inner, alpha, share, start)
    return replace(layered, needs_all_layers="skips layers by itself (method.alpha)")


@dataclass(frozen=True)
class DcPflServer:
    """DC-PFL's part on the server: rounds of training, and trials when the loss calls for them."""

    levels: Levels
    splitting: Splitting
    trial: str
    on: str
    dynamic: bool
    early: bool
    bend: Bend
    smooth: int
    observe: int
    sleep: int
    start: int

    def ended(self, losses: Sequence[float], rounds: Sequence[int]) -> bool:
        """Whether the rapid decrease of these losses has just ended."""
        return has_ended(losses, self.bend, self.smooth, self.observe, rounds)

    def groups_at(self, state: State, level: int) -> dict[ClientId, Slot]:
        """The groups at a level of the tree; a newcomer joins the part with most of its group."""
        labels = self.levels.labels(tree_of(state.memory), level)
        names = {c: f"{level}/{g}" for c, g in zip(state.memory["clients"], labels, strict=True)}
        return with_most(state.groups, names)

    def finer(self, state: State) -> dict[str, Any]:
        """The changes of the memory at the end of a rapid decrease: finer groups are tried next."""
        if self.trial == "cuts":
            return ask_for_trial(early=False)
        now = len(set(state.groups.values()))
        deepest = self.levels.deepest(tree_of(state.memory))
        for level in range(state.memory["level"] + 1, deepest + 1):
            if len(set(self.groups_at(state, level).values())) > now:
                return {"phase": "sync", "next": level}
        return {"phase": "done"}

    def take_round(self, fed: Federation, state: State, info: Round) -> State:
        """Carry out one round, of training or with a trial."""
        if state.memory["phase"] == "trial":
            return self.tried_two(fed, state, info)
        if self.tries_early and info.number == EARLY and ready(state.memory):
            state = self.with_early_trial(fed, state)
        if state.memory["phase"] == "ask" and "trial" not in state.memory:
            state = self.splitting.proposed(fed, state, info)
        if not trials.due(state, info):
            mixed = rests(state, info.cohort)
            return self.watched(*self.trained(fed, state, info), mixed, info)

        def others(now: State, cohort: Sequence[ClientId]) -> State:
            return self.trained(fed, now, replace(info, cohort=cohort))[0]

        state = self.splitting.tried(fed, state, info, others, partial(order, whole=True))
        return replace(state, notes=self.shown(state, state.notes))

    @property
    def tries_early(self) -> bool:
        """Whether groups with decisive evidence are tried before the decrease has ended."""
        return self.early and self.dynamic and self.trial == "cuts"

    def with_early_trial(self, fed: Federation, state: State) -> State:
        """If the evidence is decisive, build the tree from the rounds so far and plan trials."""
        state, complete = with_answers(fed, state)
        if not (complete and self.splitting.divided(state, early=True)):
            return state
        return self.with_tree(state).joined({}, **ask_for_trial(early=True))

    def with_tree(self, state: State) -> State:
        """The state with the tree, and the groups of its first level."""
        state = with_hierarchy(state)
        return regrouped(state, self.groups_at(state, 0), 0, state.memory)

    def trained(self, fed: Federation, state: State, info: Round) -> tuple[State, list[float]]:
        """Train for a round; also returns the mean loss of the received models, if reported."""
        full = state.memory["phase"] == "sync"
        orders = [order(state, c, whole=full) for c in info.cohort]
        if "merges" not in state.memory:
            replies = fed.gather(orders) if orders else []
            state = compared(state, replies)
            if info.number >= self.start - 1:
                state = self.with_tree(state)
            means = fed.average(replies, {c: {s: 1.0} for c, s in state.groups.items()})
        elif not orders:
            return state, []
        else:
            finer = [self.groups_at(state, state.memory["next"])] if full else []
            into: dict[ClientId, Mapping[Slot, float]]
            into = {c: {g[c]: 1.0 for g in (state.groups, *finer)} for c in info.cohort}
            # A newcomer may have joined a client that trains alone and sends no model.
            into |= {c: {"alone": 1.0} for c in state.memory["alone"]}
            means = fed.reduce(orders, into)
        return moved(state, orders, means), mean_loss(state.groups, means)

    def watched(self, state: State, loss: Sequence[float], mixed: bool, info: Round) -> State:
        """The state with this round's loss, and with the phase that follows from it.

        If clients use layers of their own, the loss is lower and does not count, except with
        ``bend`` "absolute". A radius is noted only if the losses behind it are from
        consecutive rounds.
        """
        memory = {**state.memory}
        if loss and not (mixed and self.bend != "absolute"):
            memory["losses"] = [*memory["losses"], *loss]
            memory["rounds"] = [*memory["rounds"], info.number]
        losses, rounds = memory["losses"], memory["rounds"]
        window = rounds[-(self.smooth + 2) :]
        consecutive = not window or window[-1] - window[0] == len(window) - 1
        shows_radius = consecutive and (not mixed or self.bend == "absolute")
        bends = radii(losses, self.smooth, self.bend != "absolute") if shows_radius else []
        notes = {**state.notes, "loss": loss, "radius": bends[-1:], "mixed": mixed}
        phase, splits = memory["phase"], self.dynamic and "merges" in memory
        if phase == "sync":
            memory["phase"] = "trial"
        elif phase == "rest" and info.number + 1 >= memory["until"]:
            memory |= {"phase": "watch", "losses": [], "rounds": []}
        elif phase == "watch" and splits and self.ended(losses, rounds):
            memory |= self.finer(replace(state, memory=memory))
            notes["ended"] = True
        elif phase == "watch" and splits and self.tries_early and "early" not in memory:
            memory |= ask_for_trial(early=True)  # the tree has just been built
        state = replace(state, memory=memory)
        return replace(state, notes=self.shown(state, notes))

    def tried_two(self, fed: Federation, state: State, info: Round) -> State:
        """The paper's trial: the models of old and new groups side by side."""
        level = state.memory["next"]
        new = self.groups_at(state, level)
        tries = [dc_pfl_two_models.tries(state, new, c, self.on) for c in info.cohort]
        tried = fed.reduce(tries, {c: {"all": 1.0} for c in info.cohort}).get("all")
        if tried is None:
            return state
        better = dc_pfl_two_models.is_better(tried, self.on)
        memory = {**state.memory, "losses": [], "rounds": [], "until": info.number + 1 + self.sleep}
        memory["phase"] = "rest" if self.sleep else "watch"
        state = regrouped(state, new, level, memory) if better else replace(state, memory=memory)
        clients = [c for c in tried.clients if c not in state.memory["alone"]]
        orders = [verdict(state, c, "new" if better else "old") for c in clients]
        means = fed.reduce(orders, {c: {state.groups[c]: 1.0} for c in clients})
        state = moved(state, orders, means)
        used = {s: m for s, m in state.models.items() if s in set(state.groups.values())}
        counted = tried.metrics.get("counted", 1.0) or 1.0
        losses = {k: tried.metrics[k] / counted for k in ("old", "new")}
        outcome = {"trial": {**losses, "adopted": better}}
        return replace(state, models=used, notes=self.shown(state, outcome))

    def shown(self, state: State, notes: Mapping[str, Any]) -> dict[str, Any]:
        """The notes of a round; loss and radius are lists with one value, or empty."""
        memory = state.memory
        height = self.levels.gamma_at(memory["level"])
        if self.trial == "cuts" and self.dynamic and "merges" in memory:
            height = tree_of(memory).reach_normalised([state.groups[c] for c in memory["clients"]])
        progress = {"phase": memory["phase"], "gamma": round(height, 9), "alone": memory["alone"]}
        curve = {k: notes[k][0] if notes[k] else None for k in ("loss", "radius") if k in notes}
        return {**notes, **progress, **curve}


# --- the server's smaller steps -----------------------------------------------------------------


def init(fed: Federation, setup: Setup) -> State:
    """The initial state: one group of all clients, without distances."""
    pairs = torch.zeros(2, len(setup.clients), len(setup.clients), dtype=torch.float64)
    memory = {"clients": list(setup.clients), "pairs": pairs, "alone": []}
    memory |= {"losses": [], "rounds": [], "level": 0, "phase": "watch", "start": setup.start}
    if len(setup.clients) <= MOST_UNSCALED:
        memory["unscaled"] = torch.zeros_like(pairs[0])
    return State({"0/0": setup.start}, dict.fromkeys(setup.clients, "0/0"), memory)


def admit(fed: Federation, state: State, info: Round) -> State:
    """Assign newcomers to the group whose model changes least when they train it for a round."""
    lone = {state.groups[c] for c in state.memory["alone"]}
    slots = [s for s in state.models if s not in lone] or list(state.models)
    offer = SHARING.offer(state.models, slots)
    replies = fed.gather([Order(c, "measure", offer) for c in info.cohort])
    return state.joined({r.client: min(offer, key=r.metrics.__getitem__) for r in replies})


def regrouped(
    state: State, new: Mapping[ClientId, Slot], level: int, memory: Mapping[str, Any]
) -> State:
    """The state with finer groups; the model of a new group starts from its parent's."""
    models = {s: state.models.get(s, state.models[state.groups[c]]) for c, s in new.items()}
    memory = {**memory, "level": level, "phase": "watch"}
    return replace(state, models={**state.models, **models}, groups=new, memory=memory)


def order(state: State, client: ClientId, whole: bool = False) -> Order:
    """The order to train the group's model; a client alone in its group sends no model back."""
    config: dict[str, Scalar] = {WHOLE: True} if whole else {}
    if list(state.groups.values()).count(state.groups[client]) == 1:
        config["alone"] = True
    return Order(client, "train", sends(state, client), config)


def verdict(state: State, client: ClientId, take: str) -> Order:
    """The order to send the model that the trial decided for."""
    training = order(state, client, whole=True)
    return replace(training, task="settle", arrays={}, config={**training.config, "take": take})


def sends(state: State, client: ClientId) -> Mapping[str, Array]:
    """The group's model, unless the client is already alone."""
    if client not in state.groups or client in state.memory["alone"]:
        return {}
    return SHARING.offer(state.models, [state.groups[client]])


def moved(state: State, orders: Sequence[Order], means: Mapping[Slot, Mean]) -> State:
    """The state with the means as models, and with the clients that train alone from now on."""
    models = dict(state.models)
    base = next(iter(models.values()))
    for slot, mean in means.items():
        model = mean.arrays.get("model")
        if isinstance(model, Weights):
            models[slot] = model.onto(models.get(slot, base))
    replied = {c for mean in means.values() for c in mean.clients}
    newly_alone = {o.client for o in orders if o.config.get("alone")} & replied
    alone = sorted({*state.memory["alone"], *newly_alone})
    return replace(state, models=models, memory={**state.memory, "alone": alone})


def compared(state: State, replies: Sequence[Reply]) -> State:
    """The state with the distances of these models added: their sums, and how many each sum has.

    The distances of the unscaled models are summed as well, where there are few enough to note.
    """
    in_tree = set(state.memory["clients"])  # newcomers are not
    models = [r for r in replies if isinstance(r.arrays.get("model"), Weights)]
    sent = [r for r in models if r.client in in_tree]
    if len(sent) < 2:
        return state
    rows = np.stack([r.arrays["model"].parameters.numpy() for r in sent])  # type: ignore[union-attr]
    at = np.ix_(*[[state.memory["clients"].index(r.client) for r in sent]] * 2)
    pairs = state.memory["pairs"].numpy().copy()
    pairs[0][at] += scaled_l1(rows)
    pairs[1][at] += 1
    memory = {**state.memory, "pairs": torch.from_numpy(pairs)}
    if "unscaled" in memory:
        sums = memory["unscaled"].numpy().copy()
        sums[at] += manhattan(rows) / rows.shape[1]
        memory["unscaled"] = torch.from_numpy(sums)
    return replace(state, memory=memory)


def with_hierarchy(state: State) -> State:
    """The state with the tree of mean distances."""
    distances = mean_distances(state.memory)
    tree = agglomerate(distances)
    memory = {**state.memory, "merges": torch.from_numpy(tree.merges)}
    notes = {"distances": matrix(distances), "dendrogram": tree.to_list()}
    if "unscaled" in memory:
        sums = memory.pop("unscaled").numpy()
        notes["unscaled_distances"] = matrix(mean_of_pairs(sums, memory["pairs"][1].numpy()))
    notes = {**state.notes, "clients": memory["clients"], **notes}
    return replace(state, memory=memory, notes=notes)


def rests(state: State, cohort: Sequence[ClientId]) -> bool:
    """Whether one of these clients is about to use layers of its own in its group's model."""
    record, alone = LayerRecord.remembered(state), set(state.memory["alone"])
    places = ((c, state.groups[c]) for c in cohort if c not in alone)
    return any(record.rests(c, s, state.models[s].layout) for c, s in places)


def mean_loss(groups: Mapping[ClientId, Slot], means: Mapping[Slot, Mean]) -> list[float]:
    """The mean over clients of the loss of the received model; empty if no client answered."""
    slots = {*groups.values(), "alone"}
    losses = [(m.metrics["loss"], len(m.clients)) for s, m in means.items() if s in slots]
    count = sum(n for _, n in losses)
    return [sum(loss * n for loss, n in losses) / count] if count else []


# --- the client's half --------------------------------------------------------------------------


def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
    """The group's model; for a client that is alone, its own."""
    return SHARING.received(client, arrays)[1]


def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Score the model received, then train it."""
    slot, begin = SHARING.received(client, arrays)
    loss = client.loss(begin)
    copies = trials.longer_trained(client, config, begin, lambda c, weights: c.fit(weights))
    models = {"model": client.fit(begin).weights, **copies}
    alone = bool(config.get("alone")) or not arrays
    return sent(client, models, alone, {"loss": loss}, slot)


def score_cuts(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Score the model of each cut."""
    return trials.score_cuts(client, arrays, config, SHARING)


def measure(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """How far a round of training moves each group's model."""
    movements = {}
    for slot, offer in arrays.items():
        begin = offer.onto(client.base)
        pair = [begin, client.fit(begin, stream="measure").weights]
        movements[slot] = float(scaled_l1(np.stack([w.parameters.numpy() for w in pair]))[0, 1])
    return Upload(metrics=movements)
