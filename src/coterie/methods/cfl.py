"""CFL: a group is split in two when its clients pull its model in different directions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.client import Client
from coterie.clustering import Halves, bipartition, cosine
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
from coterie.methods.by_evidence import Evidenced, Try, by_evidence

ROOT = "0"  # the group that all begin in; a part of a group adds a digit to its name
WHOLE = "compares whole updates in each round"
AT_REST = 2.0  # times the noise: a mean update below it no longer leads anywhere
NOT_AT_REST = (
    "clients still pull in one direction, so they were not asked for evidence: their mean update "
    "is {:.2f} times as long as noise alone would be, and a group is asked only below {:.0f} times"
)


@method
def cfl(
    eps1: Bound | Literal["auto"] = "auto",
    eps2: Bound = 0.6,
    relative: bool = True,
    gamma: NonNegative | None = None,
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups that split in two when their clients pull in different directions.

    Family: clustered.
    Rule: one group of all at first, FedAvg inside each group. A group is split when its mean
    update is small but some client's is not, ‖Σ(n_i/n)Δ_i‖ < ε1 and max‖Δ_i‖ > ε2: its model is
    nobody's optimum. The two parts are those whose largest cosine similarity α across the cut is
    the smallest (pairs are merged by descending similarity until two parts remain). Each part goes
    on from the group's model and the mean of its own members' updates of this round. When the
    cohort's updates pass the test, all other members of the group train too, and all fresh updates
    are tested again and divided: an update of an earlier round is never used. With "auto" the test
    is whether the mean update is no longer than twice what clients' updates would leave of it if
    they had nothing in common. Then the group's members train its model on two halves of their
    data, the groups of directions that best predict the other halves are the evidence, and a trial
    on validation data decides whether they pay. A group that stays together is asked again after
    twice as many rounds.
    Args:
        eps1: the mean update's norm below which a group is at rest, 0 or more; 0 is FedAvg to the
            bit. "auto" is evidence and trial.
        eps2: the largest client's norm above which somebody is not, 0 or more; with a given ε1
            only, like ``relative`` and ``gamma``.
        relative: ε1 is a share of the largest mean update, and ε2 of the largest client's update,
            that this run has seen so far in groups of two or more; otherwise both are norms.
        gamma: split only if √((1 − α)/2) is above this, 0 or more (1 is never); no such guard when
            not given.
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", the groups that
            the evidence finds.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each update, every round.
    Travels: 1 model down, 1 up; in a round in which a group may split, for all its members. With
    "auto" also a model down and two up for the evidence, and in a trial at most one more model up
    and those of all a client's groups down.
    Newcomers: walk down the splits. At each they train the model that was split, once, and send
    the result (with "auto" two, of two halves of their data); they go to the part whose mean
    direction is nearer. 1 model down and 1 (2) up a split.
    Departs: "auto" is ours: with fixed shares of the largest norms (0.1 and 0.6) nothing was ever
    split, because the noise of 20 clients alone keeps the mean update above a fifth of theirs.
    Relative thresholds are ours, as absolute ones depend on the learning rate, the steps
    and the size of the model (the paper's code has 0.4 and 1.6, FedClust's runs 0.4 and 0.6). The
    guard is the paper's; it needs a bound on the noise that few users know, so it is off. A member
    that does not answer when its group is split is admitted like a newcomer at its turn. Newcomers
    train on the plain loss whatever CFL is combined with.
    Reference: Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multitask
    Optimization Under Privacy Constraints, IEEE TNNLS 2021.
    """

    if eps1 == "auto":
        how = Evidenced(Probe("model"), trial, trial_rounds, first=0, later=0, again=False)
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
            """Those of these groups that have come to rest though some client has not."""
            nonlocal largest, calmest
            found = {s: updates(state, s, replies) for s in slots}
            found = {s: u for s, u in found.items() if len(u.clients) > 1}
            norms = {s: u.norms() for s, u in found.items()}
            for mean, most in norms.values():
                largest = max(largest[0], mean), max(largest[1], most)
            still, stir = (share * largest[0], eps2 * largest[1]) if relative else (share, eps2)
            scale = largest[0] if relative else 1.0
            calmest = min([calmest, *(mean / scale for mean, _ in norms.values() if scale)])
            notes["norms"] |= {s: list(pair) for s, pair in norms.items()}
            notes["limits"] = [still, stir]
            return {s: u for s, u in found.items() if norms[s][0] < still and norms[s][1] > stir}

        due, asked = unsettled(state.models), set(info.cohort)
        others = [c for c, slot in state.groups.items() if slot in due and c not in asked]
        if others:
            replies = replies + more(others)
        for slot, found in unsettled(due).items():
            similarity = 1 - cosine(found.rows.numpy())
            halves = bipartition(similarity)
            if gamma is not None and not math.sqrt((1 - halves.cross) / 2) > gamma:
                continue
            state = divided(state, slot, found, halves, info.number)
            parts = [[found.clients[i] for i in part] for part in halves.parts]
            seen = {"clients": found.clients, "similarity": matrix(similarity)}
            notes["splits"].append({"group": slot, "parts": parts, "cross": halves.cross} | seen)
        if share and math.isfinite(calmest):
            notes["warning_at_end"] = {"eps1": never_at_rest(share, calmest, relative)}
        return replace(state.joined({}, largest=largest, calmest=calmest), notes=notes), replies

    rule = Assign(start, admit, tasks={"walk": walk}, sees="each", sorts=sorts)
    return grouped("cfl", replace(rule, needs_all_layers=WHOLE))


def never_at_rest(eps1: float, calmest: float, relative: bool) -> str:
    """A warning that no mean update was ever below ε1; "" if one was.

    >>> never_at_rest(0.1, 0.34, relative=True)
    'eps1 = 0.1 never bound: the smallest mean update was 0.34 of the largest, so nothing was split'
    """
    if calmest < eps1:
        return ""
    smallest = f"{calmest:.3g} of the largest" if relative else f"{calmest:.3g}"
    return (
        f"eps1 = {eps1:g} never bound: the smallest mean update was {smallest}, so nothing was "
        "split"
    )


def at_rest(how: Evidenced) -> Assign:
    """Groups that are probed when their mean update is little more than noise would leave of it."""

    def probes(fed: Federation, state: State, info: Round) -> State:
        if "trial" in state.memory or not state.memory.get("resting"):
            return state
        slot = state.memory["resting"][0]
        after = how.begun_in(fed, state, slot, info)
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
            if len(state.models) > 1:  # a group that was just found is left alone for a while
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
        return replace(state.joined({}, resting=resting, asks=asks), notes=notes), replies

    return replace(by_evidence(how, probes), sorts=sorts)


@dataclass(frozen=True)
class Updates:
    """What clients changed of the parameters of what they received, a row each."""

    before: Weights
    clients: list[ClientId]
    examples: list[int]
    rows: Tensor

    def norms(self) -> tuple[float, float]:
        """The norm of the mean by n_i, and the largest of all."""
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
        """The mean of these rows, each of length 1."""
        return torch.nn.functional.normalize(self.rows[list(members)].double()).mean(0).float()


def updates(state: State, slot: Slot, replies: Sequence[Reply]) -> Updates:
    """What those members of a group who answered changed of its model."""
    sent = [r for r in replies if state.groups.get(r.client) == slot and "model" in r.arrays]
    sent.sort(key=lambda r: r.client)
    models: list[Weights] = [r.arrays["model"] for r in sent]  # type: ignore[misc]
    before = state.models[slot]
    if models:
        before = before.part(models[0].layout)
    rows = [m.parameters - before.parameters for m in models]
    people = [r.client for r in sent], [r.examples for r in sent]
    return Updates(before, *people, torch.stack(rows) if rows else torch.empty(0, 0))


def divided(state: State, slot: Slot, found: Updates, halves: Halves, round: int) -> State:
    """The group in two, each half with its model; members who did not answer have no group.

    What newcomers need to find their way is remembered: the model before, the round, and in which
    direction each half went.
    """
    halved = [[found.clients[i] for i in part] for part in halves.parts]
    names = [f"{slot}{number}" for number in range(2)]
    models = {s: m for s, m in state.models.items() if s != slot}
    groups = {c: s for c, s in state.groups.items() if s != slot}
    for name, members in zip(names, halved, strict=True):
        models[name] = state.models[slot]
        groups |= dict.fromkeys(members, name)
    directions = torch.stack([found.direction(part) for part in halves.parts])
    here = {"round": round, "model": found.before, "directions": directions}
    splits = {**state.memory["splits"], slot: here}
    return State(models, groups, {**state.memory, "splits": splits}, state.notes)


def walk(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the model of a split as its members did in its round; nothing is kept."""
    client.round = int(config["round"])  # the same learning rate and batches whenever asked
    trained = client.fit(Sharing().received(client, arrays)[1], stream="walk").weights
    return Upload({"model": trained.part(arrays["model"].layout)}, delta_of={"model": "model"})


def admit(fed: Federation, state: State, info: Round) -> State:
    """From the first group down, at each split to the part that a newcomer's update resembles."""
    splits = state.memory["splits"]
    places: dict[ClientId, Slot] = dict.fromkeys(info.cohort, ROOT)
    while going := {c: s for c, s in places.items() if s in splits}:
        orders = [
            Order(c, "walk", {"model": splits[s]["model"]}, {"round": splits[s]["round"]})
            for c, s in going.items()
        ]
        replies = fed.gather(orders)
        places = {c: s for c, s in places.items() if s not in splits}  # the silent stay outside
        for reply in replies:
            slot = going[reply.client]
            row = reply.arrays["model"].parameters - splits[slot]["model"].parameters  # type: ignore[union-attr]
            nearer = cosine(row[None].numpy(), splits[slot]["directions"].numpy()).argmin()
            places[reply.client] = f"{slot}{nearer}"
    return state.joined(places)
