"""Groups by evidence, confirmed by a trial: used by all methods that find their own groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from coterie.client import Task
from coterie.clustering import agglomerate, cosine
from coterie.compose import probing, trial
from coterie.compose.assign import Assign
from coterie.compose.local import Check
from coterie.compose.probing import NobodyAnswered, Probe, ProbeAnswer, View
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Slot
from coterie.core.method import Public, Round, Setup, State, matrix
from coterie.core.weights import Weights
from coterie.errors import ConfigError

TrialMode = Literal["auto", "always", "off"]
Views = Callable[[Public | None], View]
NO_NOISE = (
    "finds groups by comparing two halves of each client's data, and the noise is not calibrated "
    "for these uploads and those of a trial. If you know the groups, use method known-groups"
)
ROOT = 0  # the group in which all clients begin
FIRST = 0  # rounds with one model before a trial, if the evidence is decisive
LATER = 5  # the same if it is not: early on, every finer grouping looks better


@dataclass(frozen=True)
class EvidenceRule:
    """How a method finds its groups: what the probe compares, and when a trial takes place.

    ``tries``: "auto" makes a trial if the evidence finds more than one group, "always" makes one in
    any case, and "off" uses the groups of the evidence at once. The first trial takes place in
    round ``first`` if the evidence is decisive and in round ``later`` if it is not, and takes
    ``rounds`` rounds. With ``again``, another trial may follow one that kept a single model, in
    round ``later`` at the earliest. ``views`` computes what the server compares from a client's
    model, where it is not the model itself.
    """

    probe: Probe = field(default_factory=Probe)
    tries: TrialMode = "auto"
    rounds: int = 1
    first: int = FIRST
    later: int = LATER
    again: bool = True
    views: Views | None = None

    @property
    def sums(self) -> int:
        """The largest number of sums in a round: in a trial, the models and then their scores."""
        return 1 if self.tries == "off" else 2

    @property
    def same_steps(self) -> str:
        """Why two sums could reveal a client that makes more steps, as in ``Method.same_steps``."""
        return "" if self.tries == "off" else trial.TWICE

    def probed(
        self,
        fed: Federation,
        state: State,
        slot: Slot = ROOT,
        number: int = 0,
        public: Public | None = None,
    ) -> tuple[State, ProbeAnswer]:
        """Probe the members of one group; then split it at once, or plan a trial."""
        clients = sorted(c for c, s in state.groups.items() if s == slot)
        view = None if self.views is None else self.views(public)
        answer = probing.ask(fed, self.probe, state.models[slot], clients, number, view)
        return self.decided(fed, state, answer, slot, number), answer

    def decided(
        self, fed: Federation, state: State, answer: ProbeAnswer, slot: Slot = ROOT, number: int = 0
    ) -> State:
        """Split a group by the answer to a probe at once, or plan a trial."""
        state = replace(state, notes={**state.notes, **shown(answer)})
        if len(answer.clients) < 2 or not (answer.evidence.groups > 1 or self.tries == "always"):
            return state
        if self.tries != "off" and answer.validated:
            cuts = trial.candidates(answer.evidence, fed.min_group)
            if len(cuts) == 1:
                why = trial.no_candidates(answer.evidence.groups, fed.min_group)
                verdict = {"why": why, "min_group": fed.min_group}
                return replace(state, notes={**state.notes, "verdict": verdict})
            steps, notes = answer.memory["steps"], state.notes
            if not steps:  # the probe needed no training, or a number of epochs
                model = state.models[slot]
                steps, samples = probing.steps_needed(fed, model, answer.clients, number)
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
                cuts,
                later=self.later,
            )
            return state.joined({}, trial={**plan, "probe": answer.memory})
        if self.tries != "off":
            state = replace(state, notes={**state.notes, "verdict": {"why": trial.NOBODY}})
        names = [f"{number}/{g}" for g in answer.evidence.labels]
        models = {s: m for s, m in state.models.items() if s != slot}
        models |= dict.fromkeys(names, state.models[slot])
        groups = {c: s for c, s in state.groups.items() if s != slot}
        groups |= dict(zip(answer.clients, names, strict=True))
        after = replace(state, models=models, groups=groups)
        plan = {"clients": answer.clients, "places": answer.places, "probe": answer.memory}
        return with_split(after, slot, plan)

    def probed_in(self, fed: Federation, state: State, slot: Slot, info: Round) -> State | None:
        """Like ``probed``, before a round of training; None if no client answers."""
        try:
            return self.probed(fed, state, slot, info.number, info.public)[0]
        except NobodyAnswered:
            return None

    def after_trial(self, before: State, after: State) -> State:
        """After a trial that split a group: remember how to place newcomers in the new groups."""
        plan = before.memory.get("trial")
        if plan is None or plan["slot"] in after.models:
            return after
        return with_split(after, plan["slot"], plan)

    def admit(self, fed: Federation, state: State, info: Round) -> State:
        """Place newcomers: at each split, in the part whose direction is nearest."""
        view = None if self.views is None else self.views(info.public)
        splits = state.memory.get("splits", {})
        places: dict[ClientId, Slot] = dict.fromkeys(info.cohort, ROOT)
        while descending := {c: s for c, s in places.items() if s in splits}:
            places = {c: s for c, s in places.items() if s not in splits}
            for slot in dict.fromkeys(descending.values()):
                split = splits[slot]
                clients = [c for c, s in descending.items() if s == slot]
                parts = probing.place(fed, split["probe"], split["centres"], clients, view)
                places |= {c: split["slots"][i] for c, i in parts.items()}
        return state.joined(places)


def with_split(state: State, slot: Slot, plan: Mapping[str, Any]) -> State:
    """The state with what is needed to place newcomers at the split of this group."""
    parts = sorted({state.groups[c] for c in plan["clients"]}, key=str)
    labels = [parts.index(state.groups[c]) for c in plan["clients"]]
    split = {
        "probe": plan["probe"],
        "centres": probing.centres(plan["places"], labels),
        "slots": parts,
    }
    return state.joined({}, splits={**state.memory.get("splits", {}), slot: split})


def by_evidence(
    how: EvidenceRule,
    probes: Callable[[Federation, State, Round], State] | None = None,
    check: Check | None = None,
    tasks: Mapping[str, Task] | None = None,
    why: str = "",
) -> Assign:
    """One group of all clients at first; more once a trial has confirmed the evidence for them.

    The evidence is gathered before the first round, or when ``probes`` gathers it. Until then,
    ``why`` says why there is one group.
    """

    def start(fed: Federation, setup: Setup) -> State:
        state = replace(one_group(setup), notes={"why": why} if why else {})
        return state if probes is not None else how.probed(fed, state)[0]

    def checks(setup: Setup) -> None:
        if setup.smallest_group > 1 and how.tries != "off" and how.rounds > 1:
            raise ConfigError(
                f"trial_rounds = {how.rounds} needs sums over overlapping groups in one round, "
                "which secure aggregation refuses: set trial_rounds = 1"
            )
        if check is not None:
            check(setup)

    return Assign(
        start,
        how.admit,
        tasks={**probing.TASKS, **(tasks or {})},
        sees="each",
        check=checks,
        sums=how.sums,
        same_steps=how.same_steps,
        probes=probes,
        regrouped=how.after_trial,
        no_noise=NO_NOISE,
        shows=probing.SHOWS,
    )


def one_group(setup: Setup) -> State:
    """One group of all clients, with the initial model."""
    models: dict[Slot, Weights] = {ROOT: setup.start}
    return State(models, dict.fromkeys(setup.clients, ROOT))


def once_after(how: EvidenceRule, rounds: int) -> Callable[[Federation, State, Round], State]:
    """Gather the evidence once, after this many rounds."""

    def probes(fed: Federation, state: State, info: Round) -> State:
        if info.number < rounds or "probed" in state.memory:
            return state
        after = how.probed_in(fed, state, ROOT, info)
        return state if after is None else after.joined({}, probed=True)

    return probes


def while_one(how: EvidenceRule, every: int) -> Callable[[Federation, State, Round], State]:
    """Gather the evidence before the first round, and again as long as there is one group.

    It is gathered again after ``every`` rounds, then after twice as many, and so on, because
    differences between clients may appear later. With 0 it is gathered once.
    """

    def probes(fed: Federation, state: State, info: Round) -> State:
        if ROOT not in state.models or "trial" in state.memory:
            return state
        if info.number < state.memory.get("asks", 0):
            return state
        after = how.probed_in(fed, state, ROOT, info)
        if after is None:
            return state
        return after.joined({}, asks=max(every, 2 * info.number) if every else 10**9)

    return probes


def shown(answer: ProbeAnswer) -> dict[str, Any]:
    """The notes about a probe: its evidence, and the clients' distances with a tree."""
    notes: dict[str, Any] = {"evidence": answer.notes, "clients": answer.clients}
    notes |= answer.layer_notes
    if len(answer.clients) > 1:
        distances = cosine(answer.places.numpy())
        tree = answer.evidence.tree or agglomerate(distances)
        notes |= {"distances": matrix(distances), "dendrogram": tree.to_list(), "threshold": None}
    return {**notes, "why": answer.evidence.why}
