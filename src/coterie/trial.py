"""Does it pay to train apart? A trial of every cut of a tree, on validation data.

One model trains for a while. Then its clients train it once more, and the same uploads are averaged
for every cut: from one model for all to everybody alone. Each client scores the models of its
groups on its validation data. The coarsest cut whose loss is within one standard error of the
lowest is taken, and its groups go on from the models just made.

What is scored has trained for as many steps as it takes to tell clients apart: each client trains a
second copy for that. The groups still go on from models of an ordinary round, so a trial changes
who trains together and not how much anybody trains.

Where the evidence has decided for a grouping, finer cuts are judged by how well a client's group
does without what the client itself has sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client, Fit
from coterie.errors import TrainingError
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
    mix,
)
from coterie.grouping import Dendrogram, Evidence, canonical
from coterie.method import Round, State
from coterie.tree import Tree
from coterie.weights import Layout, Weights

KEPT = "trial"  # where a client keeps the model it trained until it has been scored
KEPT_IN = "trial_round"  # and the round in which it was trained
STEPS = "trial_steps"  # in an order to train: the least number of steps before a model is scored
SCALED = "scaled"  # in an order to score: whether scores are divided by a client's samples
EVERYBODY = "everybody"  # the slot of the sum of all scores
TWICE = "sends, in a trial, a model and a copy of it that may have made more steps"  # secure sums
SCORED = "scored"  # in an upload: the longer-trained copy that is averaged and scored
MOST = 0.9  # of the gain of the best cut: so much makes a coarser one good enough
LARGEST = 60_000.0  # below it, a number fits into 16 bits
DOMINANT = 20  # of so many samples of a group all but one are a client's: the rest is rounding
DATA = {"val": "validation", "train": "training"}  # what models are scored on
MOST_CUTS = 1000  # that a client scores: each pair of them has a number in what it sends
EVERY = 16  # up to so many groups every cut is a candidate, beyond it a ladder of them
Labels = np.ndarray[Any, Any]
Trains = Callable[[State, Mapping[ClientId, Slot]], list[Order]]
Offer = Callable[[Mapping[Any, Weights], Collection[Slot]], dict[str, Array]]
Train = Callable[[Client, Weights], Fit]


class Shares(Protocol):
    """Which layers travel, and how what was received is laid over a client's own."""

    def travelling(self, layout: Layout) -> Layout:
        """The part of a model that goes to and fro."""

    def received(self, client: Client, arrays: Mapping[str, Array]) -> tuple[str, Weights]:
        """What was received, by name, as a whole model."""


def proposed(
    clients: Sequence[ClientId],
    evidence: Evidence,
    places: Tensor,
    slot: Slot,
    first: int,
    min_group: int = 1,
    rounds: int = 1,
    again: bool = True,
    steps: int = 0,
    cuts: Sequence[Labels] = (),
    on: str = "val",
    later: int = 0,
) -> dict[str, Tree]:
    """What must be remembered for a trial of the clients of one group, in round ``first``.

    If it keeps one model there is another one after twice as many rounds, not before ``later``.
    ``cuts`` are the groupings to try, coarsest first, where they are not those of the evidence's
    tree; ``on`` is the data that models are scored on, "val" or "train".
    """
    cuts = cuts or candidates(evidence, min_group)
    return {
        "clients": list(clients),
        "cuts": torch.from_numpy(np.stack(cuts)),
        "places": places,
        "slot": slot,
        "own": next((i for i, c in enumerate(cuts) if (c == evidence.labels).all()), -1),
        "decisive": evidence.decisive,
        "next": first,
        "rounds": rounds,
        "asked_rounds": rounds,
        "again": again,
        "later": later,
        "steps": steps,
        "on": on,
    }


def candidates(evidence: Evidence, min_group: int = 1) -> list[Labels]:
    """The groupings to try, coarsest first: cuts of the tree, and the evidence's own.

    Where groups must have ``min_group`` members, coarser cuts must be sums of the finest one's
    groups: the evidence's own grouping is left out unless it is one.
    """
    clients = len(evidence.labels)
    tree = evidence.tree or Dendrogram(clients, np.empty((0, 4)))
    counts = _ladder(clients) if evidence.tree is not None else [1]
    cuts = [tree.cut_count(k) for k in counts] if counts != [1] else [np.zeros(clients, np.int64)]
    one, *finer = cuts  # one group stays a candidate however few clients there are
    cuts = [one, *(c for c in finer if np.bincount(c).min() >= min_group)]
    own = evidence.labels
    nested = min_group == 1 or _refines(cuts[-1], own)
    if nested and not any((own == c).all() for c in cuts):
        cuts.append(own)
    return sorted(cuts, key=lambda c: int(c.max()))


def _ladder(clients: int) -> list[int]:
    """Numbers of groups: all up to 16, then each a quarter more than the one before, and all."""
    counts = list(range(1, min(clients, EVERY) + 1))
    while counts[-1] < clients:
        counts.append(min(clients, math.ceil(counts[-1] * 1.25)))
    return counts


def _refines(fine: Labels, coarse: Labels) -> bool:
    """Whether every group of the first lies within one group of the second."""
    return all(len(set(coarse[fine == g])) == 1 for g in range(fine.max() + 1))


def due(state: State, info: Round) -> bool:
    """Whether a trial goes on, or begins, in this round."""
    trial = state.memory.get("trial")
    return trial is not None and info.number >= trial["next"]


def run(fed: Federation, state: State, info: Round, trains: Trains, offer: Offer) -> State:
    """One round of a trial: its clients train, and in its last round the cuts are judged.

    ``trains`` makes the orders of a round's training, ``offer`` what is sent of models. All clients
    of the trial take part, not only the cohort; clients of other groups train as ever.
    """
    plan = _Plan(state.memory["trial"], fed.min_group)
    people = [c for c in plan.clients if state.groups.get(c) == plan.slot]
    others = [c for c in info.cohort if state.groups.get(c, plan.slot) != plan.slot]
    train = _begin if plan.first else _go_on
    trained = train(fed, state, plan, people, others, trains)
    state = state.moved(trained.others)
    if plan.root not in trained.models:  # nobody answered
        return state
    state = replace(state, models={**state.models, plan.slot: trained.models[plan.root]})
    if not plan.last:
        memory = {**plan.memory, "rounds": plan.memory["rounds"] - 1, "models": trained.models}
        return state.joined({}, trial=memory)
    scores = _scores(fed, plan, people, trained, offer)
    return _settle(state, info, plan, trained, scores)


def longer_trained(
    client: Client, config: Mapping[str, Scalar], start: Weights, train: Train
) -> dict[str, Weights]:
    """The copy that is to be scored, after as many steps as a trial asks for; none outside of one.

    The client keeps it until it has been scored, in the same round, and changes nothing else.
    """
    if STEPS not in config:
        return {}
    aside = client.aside(steps=max(int(config[STEPS]), client.steps()))
    copy = train(aside, start).weights
    client.samples += aside.samples
    client.trained += aside.trained
    layout = copy.layout
    client.state[KEPT] = copy.only([e.name for e in layout.entries if e.kind != "frozen"])
    client.state[KEPT_IN] = client.round
    return {SCORED: copy}


def _kept(client: Client) -> Weights | None:
    """What was kept in this round; what an earlier trial left behind is dropped as well."""
    weights, number = client.kept(KEPT), client.state.get(KEPT_IN)
    for name in (KEPT, KEPT_IN):
        client.state.pop(name, None)
    return weights.onto(client.base) if weights is not None and number == client.round else None


def score_cuts(
    client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar], sharing: Shares
) -> Upload:
    """Score the model of each cut on this client's validation data, or on its training data.

    What leaves the client is one row: whether it has validation data; the loss of the first cut,
    and by how much that of every other is higher; the same without its own contribution; for every
    pair of cuts the squared difference of losses, and the variance of that difference that comes of
    having no more validation data. Sums of such rows are all that a verdict needs. Differences are
    sent and not losses because a mean has no more digits than what it is of: what is compared keeps
    all of them, and models that are alike stay so.
    """
    names, on = str(config["cuts"]).split(), str(config.get("on", "val"))
    if len(names) > MOST_CUTS:
        raise TrainingError(f"client {client.id} was asked for the scores of {len(names)} cuts")
    totals = [int(n) for n in str(config.get("totals", "")).split()]
    kept = _kept(client)
    arrays = {n: _restored(a, sharing.travelling(client.base.layout)) for n, a in arrays.items()}
    losses, models = dict[str, Tensor](), dict[str, Weights]()
    for name in dict.fromkeys(names):
        if kept is None and name not in arrays:  # it was not there when the others trained
            return Upload({"scores": torch.zeros(row_length(len(names)))})
        if kept is None:
            model = sharing.received(client, {name: arrays[name]})[1]
        else:  # with the personal layers that were trained along with it
            model = arrays[name].onto(kept) if name in arrays else kept
        losses[name] = client.losses(model, on)
        models[name] = model
    table = torch.stack([losses[name] for name in names])
    if not table.shape[1]:
        return Upload({"scores": torch.zeros(row_length(len(names)))})
    mean = table.mean(1)
    a, b = torch.triu_indices(len(names), len(names), 1)
    gaps = table[a] - table[b]
    blocks = table.shape[1]
    within = gaps.var(1, unbiased=blocks > 1) / blocks if len(gaps) else gaps.new_zeros(0)
    others = mean
    if kept is not None and totals:
        others = _without_own(client, kept, names, totals, models, mean)
    levels = [torch.cat([v[:1], v[1:] - v[0]]) for v in (mean, others)]
    row = torch.cat([torch.ones(1), *levels, (mean[a] - mean[b]) ** 2, within])
    if config.get(SCALED):
        row = row / max(1, client.weight)
    return Upload({"scores": row.float()})


def _shortened(model: Array) -> Array:
    """A model to be scored in numbers of half the length; as it is where they are too large."""
    if not isinstance(model, Weights) or not model.vector.abs().max() < LARGEST:
        return model
    return model.vector.half()


def _restored(model: Array, layout: Layout) -> Weights:
    return model if isinstance(model, Weights) else Weights(layout, model.float())


def _without_own(
    client: Client,
    own: Weights,
    names: Sequence[str],
    totals: Sequence[int],
    models: Mapping[str, Weights],
    losses: Tensor,
) -> Tensor:
    """The loss of every cut's model without this client's own contribution to it.

    ``totals`` are the samples that went into each model. Who is alone, or nearly all of its group,
    has nobody else's model and is scored with that of the next coarser cut, so that leaving is no
    gain by itself.
    """
    examples, found = len(client.train), dict[str, float]()
    row: list[float] = []
    for name, total, loss in zip(names, totals, losses.tolist(), strict=True):
        rest = total - examples
        if rest < total / DOMINANT:
            row.append(row[-1] if row else loss)
            continue
        if name not in found:
            sum_of_others = total * models[name].vector.double() - examples * own.vector.double()
            others = Weights(own.layout, (sum_of_others / rest).float())
            found[name] = float(client.losses(others).mean())
        row.append(found[name])
    return torch.tensor(row, dtype=losses.dtype)


def row_length(cuts: int) -> int:
    """How many numbers a client sends for so many cuts."""
    return 1 + 2 * cuts + cuts * (cuts - 1)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a trial said: the mean validation loss of every cut, and which one was chosen.

    ``errors`` are the standard errors of the differences from the lowest, ``from_one`` of those
    from one model; ``others`` are the losses of the models that a client's groups would have
    without the client's own contribution, empty if they are not known.
    """

    losses: list[float]
    errors: list[float]
    chosen: int
    clients: float
    others: list[float]
    from_one: list[float]


def judge(total: Tensor, count: float, cuts: int) -> Verdict:
    """The coarsest cut within one standard error of the lowest loss, from the mean of rows.

    The standard error is that of a mean over clients of paired differences: how much clients
    differ, and how much each client's own difference is worth with its few validation samples.
    """
    row = total.double()
    clients = float(row[0]) * count
    row = row / row[0]
    levels, pairs = row[1 : 1 + 2 * cuts].view(2, cuts), row[1 + 2 * cuts :]
    losses, others = torch.cat([levels[:, :1], levels[:, 1:] + levels[:, :1]], 1).unbind()
    squares, within = pairs.tensor_split(2)
    both = torch.zeros(2, cuts, cuts, dtype=torch.float64)
    a, b = torch.triu_indices(cuts, cuts, 1)
    both[0, a, b], both[1, a, b] = squares, within
    both = both + both.transpose(1, 2)

    def errors_from(k: int) -> Tensor:
        gaps = losses - losses[k]
        between = (both[0, k] - gaps**2).clamp(min=0) * clients / max(clients - 1, 1)
        return ((between + both[1, k]) / max(clients, 1)).sqrt()

    best = int(losses.argmin())
    errors, gaps = errors_from(best), losses - losses[best]
    chosen = next(k for k in range(cuts) if float(gaps[k]) <= float(errors[k]))
    found = [v.tolist() for v in (losses, errors, others, errors_from(0))]
    return Verdict(found[0], found[1], chosen, clients, *found[2:])


# --- the smaller steps --------------------------------------------------------------------------


class _Plan:
    """The groups of every cut by name, and what the trial remembers.

    A group that several cuts have in common has one name, and one model. ``own`` is the cut that
    the evidence has decided for; on training data, which favours finer cuts, it has no say.
    """

    def __init__(self, memory: Mapping[str, Tree], min_group: int) -> None:
        self.memory, self.clients = memory, list(memory["clients"])
        self.slot: Slot = memory["slot"]
        self.cuts: Labels = memory["cuts"].numpy()
        self.nested = min_group == 1
        known = dict[tuple[int, ...], str]()
        self.names: list[list[str]] = []  # of each cut, of each client
        self.members = dict[str, list[ClientId]]()
        for k, labels in enumerate(self.cuts):
            names = dict[int, str]()
            for g in range(int(labels.max()) + 1):
                inside = tuple(np.flatnonzero(labels == g).tolist())
                names[g] = known.setdefault(inside, f"{k}.{g}")
                self.members[names[g]] = [self.clients[i] for i in inside]
            self.names.append([names[int(g)] for g in labels])
        self.root = self.names[0][0]
        self.first = "models" not in memory
        self.last = memory["rounds"] == 1
        self.on = str(memory.get("on", "val"))
        self.own = memory["own"] if memory["decisive"] and self.on == "val" else -1
        self.place = {c: i for i, c in enumerate(self.clients)}

    def path(self, client: ClientId) -> list[str]:
        """The group that this client is in, at each cut."""
        at = self.place[client]
        return [names[at] for names in self.names]

    def finest(self, client: ClientId) -> str:
        """The group of the finest cut."""
        return self.path(client)[-1]

    def slots(self, client: ClientId) -> dict[Slot, float]:
        """The means that an upload goes into: all its groups', or the finest where they hide."""
        names = self.path(client) if self.nested else [self.finest(client)]
        return dict.fromkeys(names, 1.0)


@dataclass(frozen=True, eq=False)
class _Trained:
    """The models of groups after a round, those to score, and the means of groups not on trial.

    ``totals`` are the samples that went into each model, where a client can take its own
    contribution out of it: in the first round of a trial, if means are plain.
    """

    models: dict[str, Weights]
    scored: dict[str, Weights]
    others: dict[Slot, Mean]
    totals: Mapping[str, int] = field(default_factory=dict)


def _begin(
    fed: Federation,
    state: State,
    plan: _Plan,
    people: Sequence[ClientId],
    others: Sequence[ClientId],
    trains: Trains,
) -> _Trained:
    """Everybody trains the one model, and every group of every cut gets the mean of its members."""
    into: dict[ClientId, Mapping[Slot, float]] = {c: plan.slots(c) for c in people}
    into |= {c: {state.groups[c]: 1.0} for c in others}
    orders = _told(plan, people, trains(state, {c: state.groups[c] for c in [*people, *others]}))
    means = fed.reduce(orders, into)
    base = state.models[plan.slot]
    ours: dict[Slot, Mean] = {s: m for s, m in means.items() if s in plan.members}
    if not plan.nested:
        ours = _added_up(plan, ours)
    models = {str(s): _model(m, base) for s, m in ours.items()}
    scored = {str(s): _model(m, base, SCORED) for s, m in ours.items()}
    rest = {s: m for s, m in means.items() if s not in plan.members}
    exact = fed.plain_means and plan.on == "val"
    totals = {str(s): m.examples for s, m in ours.items()} if exact else {}
    return _Trained(models, scored, rest, totals)


def _go_on(
    fed: Federation,
    state: State,
    plan: _Plan,
    people: Sequence[ClientId],
    others: Sequence[ClientId],
    trains: Trains,
) -> _Trained:
    """Every group of every cut trains its own model for one more round."""
    models: dict[str, Weights] = dict(plan.memory["models"])
    trained = _Trained(models, dict(models), {})
    begun: dict[Slot, Weights] = {**state.models, **plan.memory["models"]}
    apart = replace(state, models=begun)
    for k in range(len(plan.names)):
        slots: dict[ClientId, Slot] = {c: plan.path(c)[k] for c in people}
        slots = {c: s for c, s in slots.items() if str(s).startswith(f"{k}.") and s in models}
        if k == 0:
            slots |= {c: state.groups[c] for c in others}
        orders = _told(plan, people, trains(apart, slots))
        if not orders:
            continue
        for slot, mean in fed.reduce(orders, {c: {s: 1.0} for c, s in slots.items()}).items():
            if slot not in plan.members:
                trained.others[slot] = mean
                continue
            base = begun[slot]
            trained.models[str(slot)] = _model(mean, base)
            trained.scored[str(slot)] = _model(mean, base, SCORED)
    return trained


def _told(plan: _Plan, people: Collection[ClientId], orders: Sequence[Order]) -> list[Order]:
    """Orders to train, however long it takes; in the last round the clients' models are scored."""
    orders = [replace(o, unhurried=True) for o in orders]
    if not plan.last:
        return orders
    asked, steps = set(people), plan.memory["steps"]
    return [
        replace(o, config={**o.config, STEPS: steps}) if o.client in asked else o for o in orders
    ]


def _added_up(plan: _Plan, means: Mapping[Slot, Mean]) -> dict[Slot, Mean]:
    """The means of coarser groups, from those of the finest cut."""
    replies, into = [], dict[ClientId, dict[Slot, float]]()
    for number, (slot, mean) in enumerate(means.items()):
        replies.append(Reply(number, mean.examples, mean.arrays, {}))
        into[number] = dict.fromkeys(plan.path(plan.members[str(slot)][0]), 1.0)
    return mix(replies, into)


def _model(mean: Mean, base: Weights, name: str = "model") -> Weights:
    """A group's model; the one to score is the same unless it was trained for longer."""
    model = mean.arrays.get(name, mean.arrays.get("model"))
    return model.onto(base) if isinstance(model, Weights) else base


def _scores(
    fed: Federation,
    plan: _Plan,
    people: Sequence[ClientId],
    trained: _Trained,
    offer: Offer,
) -> tuple[Tensor, int] | None:
    """The mean of all clients' rows, and how many clients it is of."""
    models = trained.scored
    kept = bool(trained.totals)  # then a client has what it trained alone, just as it sent it
    # Clients of secure sums sign one row of weights in a round: that of the models just summed,
    # which counts by samples. Their scores are divided by their samples, so each counts once.
    hidden = fed.min_group > 1
    # One sum is enough for the verdict. Where clients are hidden it is of groups whose members have
    # signed one already; where a robust mean may stand in for a plain one, of no more than a group.
    together = fed.plain_means and not hidden
    orders = []
    for client in people:
        names = [n if n in models else plan.root for n in plan.path(client)]
        sent = [n for n in dict.fromkeys(names) if not (kept and len(plan.members[n]) == 1)]
        config: dict[str, Scalar] = {"cuts": " ".join(names)}
        if plan.on != "val":
            config["on"] = plan.on
        if hidden:
            config[SCALED] = True
        if kept:
            config["totals"] = " ".join(str(trained.totals[n]) for n in names)
        offered = offer(models, sent)
        if kept:
            offered = {name: _shortened(model) for name, model in offered.items()}
        orders.append(Order(client, "score-cuts", offered, config, unhurried=True))
    into: dict[ClientId, Mapping[Slot, float]]
    into = {c: {EVERYBODY if together else plan.finest(c): 1.0} for c in people}
    means = fed.reduce(orders, into, by_examples=hidden)
    told = [m for m in means.values() if m.arrays]
    rows = [(m.arrays["scores"], m.examples if hidden else len(m.clients)) for m in told]
    count = sum(len(m.clients) for m in told)
    if not count:
        return None
    total = sum((row.double() * n for row, n in rows), torch.zeros(()))  # type: ignore[union-attr]
    return total / count, count


def _settle(
    state: State,
    info: Round,
    plan: _Plan,
    trained: _Trained,
    scores: tuple[Tensor, int] | None,
) -> State:
    """The state after the verdict: the groups of the cut chosen, or one group and a later trial."""
    counts = [int(c.max()) + 1 for c in plan.cuts]
    if scores is None:  # nobody answered: the trial goes on in the next round
        return state
    if not float(scores[0][0]) > 0:
        said = {"verdict": {"cuts": counts, "why": NOBODY}}
        return _ended(replace(state, notes={**state.notes, **said}))
    verdict = judge(*scores, len(counts))
    if not trained.totals:
        verdict = replace(verdict, others=[])
    chosen, why = decide(verdict, counts, plan.own, DATA[plan.on])
    notes: dict[str, Any] = {
        "cuts": counts,
        "losses": [float(f"{v:.6g}") for v in verdict.losses],
        "errors": [float(f"{v:.6g}") for v in verdict.errors],
        **({"others": [float(f"{v:.6g}") for v in verdict.others]} if verdict.others else {}),
        "chosen": counts[chosen],
        "clients": round(verdict.clients),
        "steps": plan.memory["steps"],
        "why": why,
    }
    state = replace(state, notes={**state.notes, "verdict": notes})
    if chosen:
        return _split(state, info, plan, trained.models, chosen)
    if not plan.memory["again"]:
        return _ended(state)
    at = max(2 * info.number + 1, plan.memory["later"])
    later = {**plan.memory, "next": at, "rounds": plan.memory["asked_rounds"]}
    later.pop("models", None)
    return state.joined({}, trial=later)


NOBODY = "no client has validation data: there is no way to tell whether groups pay"


def decide(
    verdict: Verdict, counts: Sequence[int], own: int = -1, data: str = "validation"
) -> tuple[int, str]:
    """Which cut is taken, and the sentence that says why.

    ``own`` is the cut that the evidence has decided for, if it has: then clients differ in kind,
    and the question is who belongs together. It must be better than one model by more than its
    standard error, or one model stays for now. Finer cuts are judged by how well a client's group
    does without the client, where that is known: the first is taken that has nine tenths of what
    the best one gains. With its own contribution everything finer looks better early on: models
    that were averaged once are not at their best yet.
    """
    chosen, losses, others = verdict.chosen, verdict.losses, verdict.others
    one = f"one model has {losses[0]:.3f}"
    if chosen == 0:
        return 0, f"no grouping is better than one model on {data} data (loss {losses[0]:.3f})"
    if not 0 < own < chosen:
        sentence = f"{counts[chosen]} groups have a {data} loss of {losses[chosen]:.3f}, {one}"
        same = "; these are the groups that the evidence finds" if chosen == own else ""
        return chosen, sentence + same
    if not losses[0] - losses[own] > verdict.from_one[own]:
        return 0, (
            f"the {counts[own]} groups that the evidence finds have a {data} loss of "
            f"{losses[own]:.3f}, not clearly less than one model's {losses[0]:.3f}"
        )
    finer = own + _first_with_most(others[0], others[own : chosen + 1]) if others else own
    sentence = f"{counts[finer]} groups have a {data} loss of {losses[finer]:.3f}, {one}; "
    if finer == own:
        return own, sentence + "these are the groups that the evidence finds"
    return finer, sentence + (
        f"the evidence finds {counts[own]}, but without the client itself these have "
        f"{others[own]:.3f} and {counts[finer]} groups {others[finer]:.3f}"
    )


def _first_with_most(one: float, losses: Sequence[float]) -> int:
    """The first of these losses that has nine tenths of the gain of the lowest over ``one``.

    Where nothing is gained, it is the first of all.

    >>> _first_with_most(1.0, [0.7, 0.63, 0.6]), _first_with_most(1.0, [0.7, 0.65, 0.6])
    (1, 2)
    """
    gain = one - min(losses)
    return next((k for k, loss in enumerate(losses) if one - loss >= MOST * gain > 0), 0)


def _split(
    state: State, info: Round, plan: _Plan, models: Mapping[str, Weights], chosen: int
) -> State:
    """The groups of a cut, each with the model just made; who was not in the trial joins later."""
    names = plan.names[chosen]
    labels = canonical(np.unique(names, return_inverse=True)[1])
    slots = {n: f"{info.number + 1}/{g}" for n, g in zip(names, labels, strict=True)}
    groups = {c: s for c, s in state.groups.items() if s != plan.slot}
    groups |= {c: slots[n] for c, n in zip(plan.clients, names, strict=True)}
    kept = {s: m for s, m in state.models.items() if s != plan.slot}
    kept |= {s: models.get(n, models[plan.root]) for n, s in slots.items()}
    return _ended(replace(state, models=kept, groups=groups))


def _ended(state: State) -> State:
    return replace(state, memory={k: v for k, v in state.memory.items() if k != "trial"})
