"""Which groups DC-PFL tries to split: those with evidence, by a trial of every cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from coterie.clustering import Dendrogram, Evidence, agglomerate, canonical, with_most
from coterie.clustering.arrays import Array, Labels
from coterie.compose import probing, trial
from coterie.compose.probing import NobodyAnswered, Probe
from coterie.compose.sharing import Sharing
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Slot
from coterie.core.method import Round, State

Trains = Callable[[State, Sequence[ClientId]], State]
Orders = Callable[[State, ClientId], Order]
SHARING = Sharing()
TIMES = 3  # how often a client is asked if its answer is lost


@dataclass(frozen=True)
class Levels:
    """The cuts of a tree, numbered downwards from γ̃ = ``gamma``: merge by merge, or in steps."""

    gamma: float
    step: float | Literal["tree"]

    def gamma_at(self, level: int) -> float:
        """γ̃ of a level; with merges, always the initial one."""
        return self.gamma if self.step == "tree" else max(0.0, self.gamma - self.step * level)

    def labels(self, tree: Dendrogram, level: int) -> Labels:
        """The groups at a level."""
        if self.step != "tree":
            return tree.cut_normalised(self.gamma_at(level))
        first = int(tree.cut_normalised(self.gamma).max()) + 1
        return tree.cut_count(min(first + level, tree.clients))

    def deepest(self, tree: Dendrogram) -> int:
        """The number of the last level."""
        return tree.clients - 1 if self.step == "tree" else math.ceil(self.gamma / self.step)

    def restricted(self, tree: Dendrogram, members: Sequence[int]) -> list[Labels]:
        """The distinct cuts in steps, for some of the clients; empty with merge-by-merge cuts."""
        if self.step == "tree":
            return []
        cuts = [np.zeros(len(members), np.int64)]
        for level in range(self.deepest(tree) + 1):
            cut = canonical(self.labels(tree, level)[list(members)])
            if cut.max() > cuts[-1].max():
                cuts.append(cut)
        return cuts


@dataclass(frozen=True)
class Splitting:
    """How groups split: one probe of all clients, then trials in the groups that it divides.

    In the server's memory, ``answers`` has the clients' answers to the probe, and ``queue`` the
    groups to be tried, one in each round. With ``early``, only groups with decisive evidence are
    tried.
    """

    levels: Levels
    on: str
    sleep: int

    def divided(self, state: State, early: bool) -> list[Slot]:
        """The groups in which the evidence, or only decisive evidence, finds subgroups."""
        slots = sorted(set(state.groups.values()), key=str)
        evidence_of = {slot: self.evidence(state, slot)[1] for slot in slots}
        return [s for s, e in evidence_of.items() if e.groups > 1 and (e.decisive or not early)]

    def evidence(self, state: State, slot: Slot) -> tuple[list[ClientId], Evidence]:
        """The members of a group that answered the probe, and the evidence for dividing them."""
        answers = state.memory["answers"]
        members = [i for i, c in enumerate(answers["clients"]) if state.groups.get(c) == slot]
        evidence = probing.evidence_among(answers["halves"], answers["counts"], members)
        return [answers["clients"][i] for i in members], evidence

    def proposed(self, fed: Federation, state: State, info: Round) -> State:
        """Plan a trial of the next group in this round, or conclude if there is none left."""
        if state.memory.get("queue") is None:
            state, complete = with_answers(fed, state)
            if not complete:
                return state
            state = state.joined({}, queue=self.divided(state, state.memory["early"]))
        if not state.memory["queue"]:
            return self.concluded(state, info)
        slot, *queue = state.memory["queue"]
        state = state.joined({}, queue=queue, tried=True)
        if self.on == "val" and not state.memory["answers"]["validated"]:
            return self.split_at_once(state, info, slot)
        return state.joined({}, trial=self.plan(fed, state, info, slot))

    def plan(self, fed: Federation, state: State, info: Round, slot: Slot) -> dict[str, Any]:
        """A trial of all cuts of one group in this round."""
        clients, evidence = self.evidence(state, slot)
        positions = [state.memory["clients"].index(c) for c in clients]
        distances = mean_distances(state.memory)[np.ix_(positions, positions)]
        evidence = replace(evidence, tree=agglomerate(distances))
        return trial.proposed(
            clients,
            evidence,
            torch.empty(0),
            slot,
            info.number,
            fed.min_group,
            again=False,
            steps=state.memory["answers"]["probe"]["steps"],
            cuts=self.levels.restricted(tree_of(state.memory), positions)
            or without_rivals(trial.candidates(evidence, fed.min_group), evidence),
            on=self.on,
        )

    def split_at_once(self, state: State, info: Round, slot: Slot) -> State:
        """Use the groups of the evidence: no client has validation data for a trial."""
        clients, evidence = self.evidence(state, slot)
        names = [f"{info.number}/{g}" for g in evidence.labels]
        models = {s: m for s, m in state.models.items() if s != slot}
        models |= dict.fromkeys(names, state.models[slot])
        groups = {c: s for c, s in state.groups.items() if s != slot}
        groups |= dict(zip(clients, names, strict=True))
        notes = {**state.notes, "verdict": {"why": trial.NOBODY}}
        after = replace(state, models=models, groups=groups, notes=notes)
        return self.concluded(after, info, state)

    def tried(
        self, fed: Federation, state: State, info: Round, trains: Trains, orders: Orders
    ) -> State:
        """A trial in one group, while all other clients train as usual."""
        slot = state.memory["trial"]["slot"]
        inside = [c for c in info.cohort if state.groups[c] == slot]
        state = trains(state, [c for c in info.cohort if state.groups[c] != slot])

        def trained_once_more(now: State, slots: Mapping[ClientId, Slot]) -> list[Order]:
            return [orders(now, c) for c in slots]

        inner = replace(info, cohort=inside)
        after = trial.run(fed, state, inner, trained_once_more, SHARING.offer)
        return after if "trial" in after.memory else self.concluded(after, info, state)

    def concluded(self, state: State, info: Round, before: State | None = None) -> State:
        """Continue with the next trial, or end the trials if none is left."""
        memory = dict(state.memory)
        if before is not None:
            changed = set(state.groups.values()) != set(before.groups.values())
            memory["changed"] = memory.get("changed", False) or changed
            state = replace(state, groups=with_most(before.groups, state.groups))
        if memory["queue"]:
            return replace(state, memory=memory)
        memory["queue"] = None
        changed, tried = memory.pop("changed", False), memory.pop("tried", False)
        memory["phase"] = "watch"
        if not self.divided(replace(state, memory=memory), early=False):
            memory["phase"] = "done"
        elif tried and not changed and self.sleep:
            memory |= {"phase": "rest", "until": info.number + 1 + self.sleep}
        if tried:
            memory |= {"losses": [], "rounds": []}
        return replace(state, memory=memory)


def without_rivals(cuts: Sequence[Labels], evidence: Evidence) -> list[Labels]:
    """Leave out cuts of the tree with as many groups as the evidence finds, but different ones.

    The tree compares models after a few rounds. If it disagrees with the evidence about who belongs
    together, the evidence is preferred, because it was confirmed on other data.
    """
    labels = evidence.labels
    return [c for c in cuts if (c == labels).all() or c.max() != labels.max()]


def ask_for_trial(early: bool) -> dict[str, Any]:
    """The changes of the memory that make the next rounds try finer groups."""
    return {"phase": "ask", "early": early, "queue": None}


def with_answers(fed: Federation, state: State) -> tuple[State, bool]:
    """The state with the clients' answers to the probe, and whether they are complete.

    Clients whose answer is lost are asked again in the next rounds, ``TIMES`` times in all: without
    an answer, a client can only follow the others of its group.
    """
    start, earlier = state.memory["start"], state.memory.get("answers")
    heard = earlier["heard"] if earlier else []
    missing = [c for c in state.memory["clients"] if c in fed.clients and c not in heard]
    try:
        if earlier is None:
            answer = probing.ask(fed, Probe("model"), start, missing)
        elif missing and earlier["times"] < TIMES:
            answer = probing.ask_again(fed, {**earlier["probe"], "start": start}, missing)
        else:
            return state, True
    except NobodyAnswered:
        if earlier is None:
            return state, False  # all are asked again in the next round
        answers = {**earlier, "times": earlier["times"] + 1}
        return state.joined({}, answers=answers), answers["times"] >= TIMES
    answers = {
        "clients": answer.clients,
        "halves": answer.halves,
        "counts": answer.examples,
        "heard": [*answer.clients, *answer.notes.get("too_small", [])],
        "validated": answer.validated,
        "probe": {k: v for k, v in answer.memory.items() if k != "start"},
        "times": 1,
    }
    notes = dict(state.notes)
    if earlier is None:
        notes |= {"evidence": answer.notes, "why": answer.evidence.why, **answer.layer_notes}
    else:
        answers = _merged(earlier, answers)
    state = replace(state.joined({}, answers=answers), notes=notes)
    return state, len(answers["heard"]) == len(heard) + len(missing) or answers["times"] >= TIMES


def _merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the answers of two exchanges, in the order of clients."""
    clients = [*earlier["clients"], *later["clients"]]
    order = sorted(range(len(clients)), key=clients.__getitem__)
    counts = [*earlier["counts"], *later["counts"]]
    halves = [side for side in (earlier["halves"], later["halves"]) if side.numel()]
    return {
        "clients": [clients[i] for i in order],
        "halves": torch.cat(halves, 1)[:, order] if halves else earlier["halves"],
        "counts": [counts[i] for i in order],
        "heard": [*earlier["heard"], *later["heard"]],
        "validated": earlier["validated"] or later["validated"],
        "probe": earlier["probe"],
        "times": earlier["times"] + 1,
    }


def ready(memory: Mapping[str, Any]) -> bool:
    """Whether there is no tree yet, but every pair of clients has been compared."""
    compared = memory["pairs"][1].numpy() > 0
    all_compared = bool((compared | np.eye(len(compared), dtype=bool)).all())
    return "merges" not in memory and len(compared) > 1 and all_compared


def mean_distances(memory: Mapping[str, Any]) -> Array:
    """The mean distances between clients; a pair that was never compared gets the average."""
    return mean_of_pairs(*memory["pairs"].numpy())


def mean_of_pairs(sums: Array, counts: Array) -> Array:
    """Means from sums and counts; pairs that were never compared get the mean of all others."""
    met = (counts > 0) & ~np.eye(len(counts), dtype=bool)
    mean: Array = sums / np.maximum(counts, 1)
    mean[~met] = mean[met].mean() if met.any() else 0.0
    np.fill_diagonal(mean, 0.0)
    return mean


def tree_of(memory: Mapping[str, Any]) -> Dendrogram:
    """The tree of the clients that took part when it was built."""
    return Dendrogram(len(memory["clients"]), memory["merges"].numpy())
