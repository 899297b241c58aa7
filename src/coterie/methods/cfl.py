"""CFL: a group is split in two when its clients pull its model in different directions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.client import Client
from coterie.clustering import Bipartition, bipartition, cosine
from coterie.compose.assign import Assign, More
from coterie.compose.grouped import grouped
from coterie.compose.probing import Probe
from coterie.compose.sharing import Sharing
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Reply, Scalar, Slot, Upload
from coterie.core.method import (
    Bound,
    Count,
    Method,
    NonNegative,
    Round,
    Setup,
    State,
    matrix,
    method,
)
from coterie.core.weights import Weights
from coterie.methods.by_evidence import EvidenceRule, TrialMode, by_evidence

ROOT = "0"  # the group in which all clients begin; each part of a group adds a digit to its name
WHOLE = "compares whole updates in each round"
AT_REST = 2.0  # times the noise: clients no longer agree on the direction of a shorter mean update
NOT_AT_REST = (
    "clients still pull in one direction, so the evidence was not gathered: their mean update is "
    "{:.2f} times as long as noise alone would make it, and evidence is gathered only below {:.0f} "
    "times"
)
TOO_FEW_UPDATES = "fewer than two clients sent an update in the last round, so there was no test"
NO_CHANGE = "no client changed the model in the last round, so there was nothing to compare"


@method
def cfl(
    eps1: Bound | Literal["auto"] = "auto",
    eps2: Bound = 0.6,
    relative: bool = True,
    gamma: NonNegative | None = None,
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups that split in two when their clients pull in different directions.

    Family: clustered.
    Rule: all clients begin in one group; FedAvg inside each group. A group is split when its mean
    update is small but some client's update is not, ‖Σ(n_i/n)Δ_i‖ < ε1 and max‖Δ_i‖ > ε2: then its
    model is a compromise that suits none of its clients. The two parts are chosen so that the
    largest cosine similarity α between clients of different parts is as small as possible (pairs
    are merged by descending similarity until two parts remain). Each part continues from the
    group's model plus the mean of its members' updates of this round. When the cohort's updates
    pass the test, all other members of the group train too, and the test and the split use only
    these fresh updates, never one of an earlier round. With "auto", the test is whether the mean
    update is at most twice as long as it would be if the clients' updates had nothing in common.
    Then the group's members train its model on two halves of their data. The evidence is the
    grouping whose mean directions on one half best predict the directions on the other, and a trial
    on validation data decides whether the groups are used. A group that stays together is tested
    again after twice as many rounds.
    Args:
        eps1: ε1, the norm of the mean update below which a group may split, 0 or more; with 0, CFL
            is FedAvg to the bit. "auto" uses evidence and a trial instead.
        eps2: ε2, the norm that the largest client update must exceed, 0 or more; like ``relative``
            and ``gamma``, only with a given ε1.
        relative: whether ε1 is a share of the largest mean update, and ε2 of the largest client
            update, seen so far in this run in groups of two or more; otherwise both are norms.
        gamma: split only if √((1 − α)/2) is above this, 0 or more (1 never splits); no such
            condition when not given.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the groups of the evidence.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each update, every round.
    Travels: 1 model down, 1 up; in a round in which a group may split, for all its members. With
    "auto", also a model down and two up for the evidence, and in a trial at most one more model up
    and the models of all a client's candidate groups down.
    Newcomers: walk down the tree of splits. At each split they train the model that was split,
    once, and send the result (with "auto" two, from two halves of their data); they join the part
    whose mean direction is nearer. This takes 1 model down and 1 (2) up for each split.
    Departs: "auto" is not from the paper: with fixed shares of the largest norms (0.1 and 0.6) no
    group was ever split, because with 20 clients noise alone keeps the mean update longer than a
    fifth of a client's update. Unlike in the paper, thresholds are relative by default, because
    absolute ones depend on the learning rate, the steps and the size of the model (the paper's code
    has 0.4 and 1.6, FedClust's runs 0.4 and 0.6). The condition ``gamma`` is the paper's; it is off
    by default because it needs a bound on the noise, which few users know. A member that does not
    answer when its group is split is admitted like a newcomer the next time it is selected.
    Newcomers train on the plain loss, even if CFL is combined with another objective.
    Reference: Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multitask
    Optimization Under Privacy Constraints, IEEE TNNLS 2021.
    """

    if eps1 == "auto":
        how = EvidenceRule(Probe("model"), trial, trial_rounds, first=0, later=0, again=False)
        return grouped("cfl", replace(at_rest(how), needs_all_layers=WHOLE))
    share = eps1

    def start(_: Federation, setup: Setup) -> State:
        memory = {"largest": (0.0, 0.0), "splits": {}}
        return State({ROOT: setup.start}, dict.fromkeys(setup.clients, ROOT), memory)

    def sorts(
        state: State, info: Round, replies: list[Reply], more: More
    ) -> tuple[State, list[Reply]]:
        largest: tuple[float, float] = state.memory["largest"]
        calmest: float = state.memory.get("calmest", math.inf)
        notes: dict[str, Any] = {"norms": {}, "limits": [], "splits": []}

        def unsettled(slots: Collection[Slot]) -> dict[Slot, Updates]:
            """The groups whose mean update is small although some client's update is not."""
            nonlocal largest, calmest
            moves = {s: updates(state, s, replies) for s in slots}
            moves = {s: u for s, u in moves.items() if len(u.clients) > 1}
            norms = {s: u.norms() for s, u in moves.items()}
            for mean, most in norms.values():
                largest = max(largest[0], mean), max(largest[1], most)
            low, high = (share * largest[0], eps2 * largest[1]) if relative else (share, eps2)
            scale = largest[0] if relative else 1.0
            calmest = min([calmest, *(mean / scale for mean, _ in norms.values() if scale)])
            notes["norms"] |= {s: list(pair) for s, pair in norms.items()}
            notes["limits"] = [low, high]
            return {s: u for s, u in moves.items() if norms[s][0] < low and norms[s][1] > high}

        due, cohort = unsettled(state.models), set(info.cohort)
        others = [c for c, slot in state.groups.items() if slot in due and c not in cohort]
        if others:
            replies = replies + more(others)
        for slot, moves in unsettled(due).items():
            similarity = 1 - cosine(moves.rows.numpy())
            halves = bipartition(similarity)
            if gamma is not None and not math.sqrt((1 - halves.cross) / 2) > gamma:
                continue
            state = divided(state, slot, moves, halves, info.number)
            parts = [[moves.clients[i] for i in part] for part in halves.parts]
            basis = {"clients": moves.clients, "similarity": matrix(similarity)}
            notes["splits"].append({"group": slot, "parts": parts, "cross": halves.cross} | basis)
        if share and math.isfinite(calmest):
            notes["warning_at_end"] = {"eps1": never_at_rest(share, calmest, relative)}
        return replace(state.joined({}, largest=largest, calmest=calmest), notes=notes), replies

    rule = Assign(start, admit, tasks={"walk": walk}, sees="each", sorts=sorts)
    return grouped("cfl", replace(rule, needs_all_layers=WHOLE))


def never_at_rest(eps1: float, calmest: float, relative: bool) -> str:
    """A warning that no mean update was ever below ε1; "" if one was.

    >>> never_at_rest(0.1, 0.34, relative=True)
    'eps1 = 0.1 had no effect: the smallest mean update was 0.34 of the largest, so no group split'
    """
    if calmest < eps1:
        return ""
    smallest = f"{calmest:.3g} of the largest" if relative else f"{calmest:.3g}"
    return (
        f"eps1 = {eps1:g} had no effect: the smallest mean update was {smallest}, so no group split"
    )


def at_rest(how: EvidenceRule) -> Assign:
    """The rule by which a group is probed once its mean update is hardly longer than noise."""

    def probes(fed: Federation, state: State, info: Round) -> State:
        if "trial" in state.memory or not state.memory.get("resting"):
            return state
        slot = state.memory["resting"][0]
        after = how.probed_in(fed, state, slot, info)
        if after is None:
            return state
        later = {**after.memory.get("asks", {}), slot: 2 * info.number + 2}
        return after.joined({}, resting=[], asks=later)

    def sorts(
        state: State, info: Round, replies: list[Reply], more: More
    ) -> tuple[State, list[Reply]]:
        asks: dict[Slot, int] = dict(state.memory.get("asks", {}))
        norms, resting, calmest = {}, [], math.inf
        for slot in state.models:
            if len(state.models) > 1:  # a new group is not probed for a while
                asks.setdefault(slot, 2 * info.number + 2)
            sent = updates(state, slot, replies)
            if len(sent.clients) < 2:
                continue
            mean, most = sent.norms()
            noise = sent.noise()
            norms[str(slot)] = [mean, most, noise]
            calmest = min(calmest, mean / noise if noise else math.inf)
            if mean < AT_REST * noise and info.number >= asks.get(slot, 0):
                resting.append(slot)
        notes = {**state.notes, "norms": norms}
        if not asks and AT_REST <= calmest < math.inf:
            notes["why"] = NOT_AT_REST.format(calmest, AT_REST)
        elif not asks and math.isinf(calmest):
            notes["why"] = NO_CHANGE if norms else TOO_FEW_UPDATES
        return replace(state.joined({}, resting=resting, asks=asks), notes=notes), replies

    return replace(by_evidence(how, probes), sorts=sorts)


@dataclass(frozen=True)
class Updates:
    """How clients changed the parameters of the model that they received: one row per client."""

    before: Weights
    clients: list[ClientId]
    examples: list[int]
    rows: Tensor

    def norms(self) -> tuple[float, float]:
        """The norm of the mean (weighted by n_i), and the largest norm of a single update."""
        mean = torch.zeros(self.rows.shape[1], dtype=torch.float64)
        for count, row in zip(self.examples, self.rows, strict=True):
            mean.add_(row.double(), alpha=count / sum(self.examples))
        each = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        return float(torch.linalg.vector_norm(mean)), float(each.max())

    def noise(self) -> float:
        """The norm that the mean would have if the updates had nothing in common."""
        shares = torch.tensor(self.examples, dtype=torch.float64) / sum(self.examples)
        each = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        return float((shares * each).square().sum().sqrt())

    def direction(self, members: Sequence[int]) -> Tensor:
        """The mean of these updates, each scaled to length 1."""
        return torch.nn.functional.normalize(self.rows[list(members)].double()).mean(0).float()


def updates(state: State, slot: Slot, replies: Sequence[Reply]) -> Updates:
    """How the members of a group that answered changed its model."""
    sent = [r for r in replies if state.groups.get(r.client) == slot and "model" in r.arrays]
    sent.sort(key=lambda r: r.client)
    models: list[Weights] = [r.arrays["model"] for r in sent]  # type: ignore[misc]
    before = state.models[slot]
    if models:
        before = before.part(models[0].layout)
    rows = [m.parameters - before.parameters for m in models]
    clients, examples = [r.client for r in sent], [r.examples for r in sent]
    return Updates(before, clients, examples, torch.stack(rows) if rows else torch.empty(0, 0))


def divided(state: State, slot: Slot, moves: Updates, halves: Bipartition, round: int) -> State:
    """The state with the group in two parts; members that did not answer have no group.

    The memory keeps what newcomers need to be placed: the model before the split, the round, and
    the direction of each part.
    """
    parts = [[moves.clients[i] for i in part] for part in halves.parts]
    names = [f"{slot}{number}" for number in range(2)]
    models = {s: m for s, m in state.models.items() if s != slot}
    groups = {c: s for c, s in state.groups.items() if s != slot}
    for name, members in zip(names, parts, strict=True):
        models[name] = state.models[slot]
        groups |= dict.fromkeys(members, name)
    directions = torch.stack([moves.direction(part) for part in halves.parts])
    split = {"round": round, "model": moves.before, "directions": directions}
    splits = {**state.memory["splits"], slot: split}
    return State(models, groups, {**state.memory, "splits": splits}, state.notes)


def walk(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the model of a split as its members did in that round; the result is not kept."""
    client.round = int(config["round"])  # the same learning rate and batches in any round
    trained = client.fit(Sharing().received(client, arrays)[1], stream="walk").weights
    return Upload({"model": trained.part(arrays["model"].layout)}, delta_of={"model": "model"})


def admit(fed: Federation, state: State, info: Round) -> State:
    """Place newcomers: at each split, in the part that their update resembles most."""
    splits = state.memory["splits"]
    places: dict[ClientId, Slot] = dict.fromkeys(info.cohort, ROOT)
    while descending := {c: s for c, s in places.items() if s in splits}:
        orders = [
            Order(c, "walk", {"model": splits[s]["model"]}, {"round": splits[s]["round"]})
            for c, s in descending.items()
        ]
        replies = fed.gather(orders)
        places = {c: s for c, s in places.items() if s not in splits}  # without a reply, outside
        for reply in replies:
            slot = descending[reply.client]
            change = reply.arrays["model"].parameters - splits[slot]["model"].parameters  # type: ignore[union-attr]
            nearer = cosine(change[None].numpy(), splits[slot]["directions"].numpy()).argmin()
            places[reply.client] = f"{slot}{nearer}"
    return state.joined(places)
