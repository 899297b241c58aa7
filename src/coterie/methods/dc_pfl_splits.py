"""Which groups of DC-PFL are tried apart, and when: evidence first, then a trial of every cut."""

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
TIMES = 3  # that a client is asked whose answer is lost


@dataclass(frozen=True)
class Levels:
    """The cuts of a tree, numbered from that at γ̃ = ``gamma`` down: merge by merge, or in steps."""

    gamma: float
    step: float | Literal["tree"]

    def gamma_at(self, level: int) -> float:
        """γ̃ of a level; of merges, that of the first."""
        return self.gamma if self.step == "tree" else max(0.0, self.gamma - self.step * level)

    def labels(self, tree: Dendrogram, level: int) -> Labels:
        """The groups at a level."""
        if self.step != "tree":
            return tree.cut_normalised(self.gamma_at(level))
        first = int(tree.cut_normalised(self.gamma).max()) + 1
        return tree.cut_count(min(first + level, tree.clients))

    def deepest(self, tree: Dendrogram) -> int:
        """The last level."""
        return tree.clients - 1 if self.step == "tree" else math.ceil(self.gamma / self.step)

    def restricted(self, tree: Dendrogram, members: Sequence[int]) -> list[Labels]:
        """The different cuts in steps of some of the clients; none for merges, which are theirs."""
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
    """How groups split: a probe of everybody once, then trials in the groups that it divides.

    In the server's memory, ``answers`` are what clients answered to the probe, ``queue`` the groups
    that are to be tried, one in a round, and ``early`` says that only those are tried about which
    the evidence is decided.
    """

    levels: Levels
    on: str
    sleep: int

    def divided(self, state: State, early: bool) -> list[Slot]:
        """The groups in which one half of the clients' data predicts the other by groups."""
        slots = sorted(set(state.groups.values()), key=str)
        found = {slot: self.evidence(state, slot)[1] for slot in slots}
        return [s for s, e in found.items() if e.groups > 1 and (e.decisive or not early)]

    def evidence(self, state: State, slot: Slot) -> tuple[list[ClientId], Evidence]:
        """The members of a group who answered the probe, and the evidence about groups of them."""
        known = state.memory["answers"]
        members = [i for i, c in enumerate(known["clients"]) if state.groups.get(c) == slot]
        evidence = probing.evidence_among(known["halves"], known["counts"], members)
        return [known["clients"][i] for i in members], evidence

    def proposed(self, fed: Federation, state: State, info: Round) -> State:
        """With a trial of the next group in this round, or, if there is none, what comes then."""
        if state.memory.get("queue") is None:
            state, complete = answered(fed, state)
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
        people, evidence = self.evidence(state, slot)
        at = [state.memory["clients"].index(c) for c in people]
        distances = mean_distances(state.memory)[np.ix_(at, at)]
        evidence = replace(evidence, tree=agglomerate(distances))
        return trial.proposed(
            people,
            evidence,
            torch.empty(0),
            slot,
            info.number,
            fed.min_group,
            again=False,
            steps=state.memory["answers"]["probe"]["steps"],
            cuts=self.levels.restricted(tree_of(state.memory), at)
            or without_rivals(trial.candidates(evidence, fed.min_group), evidence),
            on=self.on,
        )

    def split_at_once(self, state: State, info: Round, slot: Slot) -> State:
        """With the groups of the evidence: no client has validation data to try them on."""
        people, evidence = self.evidence(state, slot)
        names = [f"{info.number}/{g}" for g in evidence.labels]
        models = {s: m for s, m in state.models.items() if s != slot}
        models |= dict.fromkeys(names, state.models[slot])
        groups = {c: s for c, s in state.groups.items() if s != slot}
        groups |= dict(zip(people, names, strict=True))
        notes = {**state.notes, "verdict": {"why": trial.NOBODY}}
        after = replace(state, models=models, groups=groups, notes=notes)
        return self.concluded(after, info, state)

    def tried(
        self, fed: Federation, state: State, info: Round, trains: Trains, orders: Orders
    ) -> State:
        """A trial in one group; everybody else trains as ever."""
        slot = state.memory["trial"]["slot"]
        inside = [c for c in info.cohort if state.groups[c] == slot]
        state = trains(state, [c for c in info.cohort if state.groups[c] != slot])

        def trained_once_more(now: State, slots: Mapping[ClientId, Slot]) -> list[Order]:
            return [orders(now, c) for c in slots]

        inner = replace(info, cohort=inside)
        after = trial.run(fed, state, inner, trained_once_more, SHARING.offer)
        return after if "trial" in after.memory else self.concluded(after, info, state)

    def concluded(self, state: State, info: Round, before: State | None = None) -> State:
        """After a trial, or when there is none to make: the next one, or what comes then."""
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
    """Without cuts of the tree into just as many groups as the evidence finds, but others.

    The tree is one of models after a few rounds. Where it disagrees with the evidence about who
    belongs together, it is the evidence that was shown to come out again.
    """
    own = evidence.labels
    return [c for c in cuts if (c == own).all() or c.max() != own.max()]


def asked(early: bool) -> dict[str, Any]:
    """What is remembered when finer groups are to be looked for."""
    return {"phase": "ask", "early": early, "queue": None}


def answered(fed: Federation, state: State) -> tuple[State, bool]:
    """With what clients answer to the probe, and whether it is complete.

    Whose answer is lost is asked again in the next rounds, up to ``TIMES`` in all: one that was
    never heard could only follow the others of its group.
    """
    start, known = state.memory["start"], state.memory.get("answers")
    heard = known["heard"] if known else []
    silent = [c for c in state.memory["clients"] if c in fed.clients and c not in heard]
    try:
        if known is None:
            answer = probing.ask(fed, Probe("model"), start, silent)
        elif silent and known["times"] < TIMES:
            answer = probing.ask_again(fed, {**known["probe"], "start": start}, silent)
        else:
            return state, True
    except NobodyAnswered:
        if known is None:
            return state, False  # they are asked again in the next round
        answers = {**known, "times": known["times"] + 1}
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
    if known is None:
        notes |= {"evidence": answer.notes, "why": answer.evidence.why, **answer.layer_notes}
    else:
        answers = _both(known, answers)
    state = replace(state.joined({}, answers=answers), notes=notes)
    return state, len(answers["heard"]) == len(heard) + len(silent) or answers["times"] >= TIMES


def _both(known: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Answers of two exchanges as those of one, in order of clients."""
    clients = [*known["clients"], *more["clients"]]
    order = sorted(range(len(clients)), key=clients.__getitem__)
    counts = [*known["counts"], *more["counts"]]
    halves = [side for side in (known["halves"], more["halves"]) if side.numel()]
    return {
        "clients": [clients[i] for i in order],
        "halves": torch.cat(halves, 1)[:, order] if halves else known["halves"],
        "counts": [counts[i] for i in order],
        "heard": [*known["heard"], *more["heard"]],
        "validated": known["validated"] or more["validated"],
        "probe": known["probe"],
        "times": known["times"] + 1,
    }


def ready(memory: Mapping[str, Any]) -> bool:
    """Whether there is no tree yet, but every two clients have been compared."""
    together = memory["pairs"][1].numpy() > 0
    met = bool((together | np.eye(len(together), dtype=bool)).all())
    return "merges" not in memory and len(together) > 1 and met


def mean_distances(memory: Mapping[str, Any]) -> Array:
    """The clients' mean distances; a pair that never met counts as average apart."""
    return mean_of_pairs(*memory["pairs"].numpy())


def mean_of_pairs(sums: Array, counts: Array) -> Array:
    """Means from sums over so many rounds; those that never met have the mean of all others."""
    met = (counts > 0) & ~np.eye(len(counts), dtype=bool)
    mean: Array = sums / np.maximum(counts, 1)
    mean[~met] = mean[met].mean() if met.any() else 0.0
    np.fill_diagonal(mean, 0.0)
    return mean


def tree_of(memory: Mapping[str, Any]) -> Dendrogram:
    """The hierarchy of those who were there when it was made."""
    return Dendrogram(len(memory["clients"]), memory["merges"].numpy())
