"""Groups by evidence, confirmed by a trial: what all methods that group by themselves share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from coterie import probing, trial
from coterie.client import Task
from coterie.compose import Assign, Check
from coterie.errors import ConfigError
from coterie.federation import ClientId, Federation, Slot
from coterie.grouping import agglomerate, cosine
from coterie.method import Public, Round, Setup, State, matrix
from coterie.probing import Answer, NobodyAnswered, Probe, View
from coterie.weights import Weights

Try = Literal["auto", "always", "off"]
Views = Callable[[Public | None], View]
NO_NOISE = (
    "finds groups by what two halves of each client's data say: these uploads, and those of a "
    "trial, are not in the calibration of the noise. Give it the groups: method known-groups"
)
ROOT = 0  # the group that everybody begins in
FIRST = 0  # rounds of one model before a trial of groups that the evidence is decided about
LATER = 5  # rounds before a trial of others: early on, everything finer looks better


@dataclass(frozen=True)
class Evidenced:
    """How a method finds its groups: what is probed, and when a trial is made.

    With ``tries`` "auto" a trial is made where the evidence finds more than one group; "always"
    makes it anyway; "off" takes the groups as the evidence finds them, at once. ``first`` is the
    round of the first trial where the evidence is decided about the groups, ``later`` where it is
    not; ``rounds`` is how many rounds a trial takes, ``again`` whether another may follow one that
    kept one model, in round ``later`` at the earliest.
    ``views`` makes what the server looks at of a client's model, where that is not the model.
    """

    probe: Probe = field(default_factory=Probe)
    tries: Try = "auto"
    rounds: int = 1
    first: int = FIRST
    later: int = LATER
    again: bool = True
    views: Views | None = None

    @property
    def sums(self) -> int:
        """How many sums a round has at most: in a trial the models, and then their scores."""
        return 1 if self.tries == "off" else 2

    @property
    def same_steps(self) -> str:
        """What of a client's training goes into two sums, as in ``Method``."""
        return "" if self.tries == "off" else trial.TWICE

    def begun(
        self,
        fed: Federation,
        state: State,
        slot: Slot = ROOT,
        number: int = 0,
        public: Public | None = None,
    ) -> tuple[State, Answer]:
        """After a probe of the members of one group: its groups at once, or a trial to come."""
        clients = sorted(c for c, s in state.groups.items() if s == slot)
        view = None if self.views is None else self.views(public)
        answer = probing.ask(fed, self.probe, state.models[slot], clients, number, view)
        return self.concluded(fed, state, answer, slot, number), answer

    def concluded(
        self, fed: Federation, state: State, answer: Answer, slot: Slot = ROOT, number: int = 0
    ) -> State:
        """With what follows from the answer to a probe: its groups at once, or a trial to come."""
        state = replace(state, notes={**state.notes, **shown(answer)})
        if len(answer.clients) < 2 or not (answer.evidence.groups > 1 or self.tries == "always"):
            return state
        if self.tries != "off" and answer.validated:
            steps, notes = answer.memory["steps"], state.notes
            if not steps:  # what was compared takes no training, or a number of epochs
                people, model = answer.clients, state.models[slot]
                steps, samples = probing.steps_needed(fed, model, people, number)
                evidence = {**notes["evidence"], "samples": notes["evidence"]["samples"] + samples}
                state = replace(state, notes={**notes, "evidence": evidence})
            plan = trial.proposed(
                answer.clients,
                answer.evidence,
                answer.places,
                slot,
                max(number, self.first if answer.evidence.decisive else self.later),
                fed.min_group,
                self.rounds,
                self.again,
                steps,
                later=self.later,
            )
            return state.joined({}, trial={**plan, "probe": answer.memory})
        if not answer.validated:
            state = replace(state, notes={**state.notes, "verdict": {"why": trial.NOBODY}})
        names = [f"{number}/{g}" for g in answer.evidence.labels]
        models = {s: m for s, m in state.models.items() if s != slot}
        models |= dict.fromkeys(names, state.models[slot])
        groups = {c: s for c, s in state.groups.items() if s != slot}
        groups |= dict(zip(answer.clients, names, strict=True))
        after = replace(state, models=models, groups=groups)
        plan = {"clients": answer.clients, "places": answer.places, "probe": answer.memory}
        return with_split(after, slot, plan)

    def begun_in(self, fed: Federation, state: State, slot: Slot, info: Round) -> State | None:
        """The same before a round of training; nothing where nobody answers, as in any round."""
        try:
            return self.begun(fed, state, slot, info.number, info.public)[0]
        except NobodyAnswered:
            return None

    def settled(self, before: State, after: State) -> State:
        """After a trial that made groups: what newcomers to them are placed by is remembered."""
        plan = before.memory.get("trial")
        if plan is None or plan["slot"] in after.models:
            return after
        return with_split(after, plan["slot"], plan)

    def admitted(self, fed: Federation, state: State, info: Round) -> State:
        """From the first group down, at each split to the part whose direction is nearest."""
        view = None if self.views is None else self.views(info.public)
        splits = state.memory.get("splits", {})
        places: dict[ClientId, Slot] = dict.fromkeys(info.cohort, ROOT)
        while going := {c: s for c, s in places.items() if s in splits}:
            places = {c: s for c, s in places.items() if s not in splits}
            for slot in dict.fromkeys(going.values()):
                here = splits[slot]
                people = [c for c, s in going.items() if s == slot]
                found = probing.place(fed, here["probe"], here["centres"], people, view)
                places |= {c: here["slots"][i] for c, i in found.items()}
        return state.joined(places)


def with_split(state: State, slot: Slot, plan: Mapping[str, Any]) -> State:
    """With what is needed to place newcomers at the split of this group."""
    parts = sorted({state.groups[c] for c in plan["clients"]}, key=str)
    labels = [parts.index(state.groups[c]) for c in plan["clients"]]
    here = {
        "probe": plan["probe"],
        "centres": probing.centres(plan["places"], labels),
        "slots": parts,
    }
    return state.joined({}, splits={**state.memory.get("splits", {}), slot: here})


def by_evidence(
    how: Evidenced,
    probes: Callable[[Federation, State, Round], State] | None = None,
    check: Check | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> Assign:
    """One group of all at first, and groups once a trial has confirmed the evidence for them.

    The evidence is asked for before the first round, or when ``probes`` does it.
    """

    def start(fed: Federation, setup: Setup) -> State:
        state = everybody(setup)
        return state if probes is not None else how.begun(fed, state)[0]

    def checks(setup: Setup) -> None:
        if setup.smallest_group > 1 and how.tries != "off" and how.rounds > 1:
            raise ConfigError(
                f"trial_rounds = {how.rounds} needs sums of overlapping groups in one round, which "
                "secure aggregation refuses: leave it at 1"
            )
        if check is not None:
            check(setup)

    return Assign(
        start,
        how.admitted,
        tasks={**probing.TASKS, **(tasks or {})},
        sees="each",
        check=checks,
        sums=how.sums,
        same_steps=how.same_steps,
        probes=probes,
        regrouped=how.settled,
        no_noise=NO_NOISE,
        shows=probing.SHOWS,
    )


def everybody(setup: Setup) -> State:
    """One group of all clients, with θ⁰."""
    models: dict[Slot, Weights] = {ROOT: setup.start}
    return State(models, dict.fromkeys(setup.clients, ROOT))


def once_after(how: Evidenced, rounds: int) -> Callable[[Federation, State, Round], State]:
    """Ask for the evidence before the round that comes after so many."""

    def probes(fed: Federation, state: State, info: Round) -> State:
        if info.number < rounds or "probed" in state.memory:
            return state
        after = how.begun_in(fed, state, ROOT, info)
        return state if after is None else after.joined({}, probed=True)

    return probes


def while_one(how: Evidenced, every: int) -> Callable[[Federation, State, Round], State]:
    """Ask before the first round; while there is one group, again after ``every`` rounds.

    Then after twice as many, and so on: a difference that was not there at first may come to light.
    With 0 they are asked once.
    """

    def probes(fed: Federation, state: State, info: Round) -> State:
        if ROOT not in state.models or "trial" in state.memory:
            return state
        if info.number < state.memory.get("asks", 0):
            return state
        after = how.begun_in(fed, state, ROOT, info)
        if after is None:
            return state
        return after.joined({}, asks=max(every, 2 * info.number) if every else 10**9)

    return probes


def shown(answer: Answer) -> dict[str, Any]:
    """What there is to show of a probe: the evidence, and the clients' distances with a tree."""
    notes: dict[str, Any] = {"evidence": answer.notes, "clients": answer.clients}
    notes |= answer.layer_notes
    if len(answer.clients) > 1:
        distances = cosine(answer.places.numpy())
        tree = answer.evidence.tree or agglomerate(distances)
        notes |= {"distances": matrix(distances), "dendrogram": tree.to_list(), "threshold": None}
    return {**notes, "why": answer.evidence.why}
