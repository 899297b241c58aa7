"""Trials: is it worth splitting the clients of one model into groups, and into how many?

All clients first train one model for a while. In a trial they train it once more, and the same
uploads are averaged for every candidate grouping, a cut of a cluster tree: from one model for all
clients to one model each. Each client scores the models of its groups on its validation data. The
trial chooses the coarsest cut whose loss is within one standard error of the lowest, and its groups
continue from the models that were just averaged.

To be scored, each client trains a second copy of the model for as many steps as it takes to tell
clients apart. The groups continue from models of an ordinary round, so that a trial changes which
clients train together, but not for how long they train.

If the evidence has already decided for a grouping, finer cuts are judged by how well a client's
group does without the client's own update.
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
from coterie.clustering import Dendrogram, Evidence, canonical
from coterie.core.aggregate import mix
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Mean, Order, Reply, Scalar, Slot, Upload
from coterie.core.method import Round, State
from coterie.core.tree import Tree
from coterie.core.weights import Layout, Weights
from coterie.errors import TrainingError

KEPT = "trial"  # the client state that holds a trained model until it has been scored
KEPT_IN = "trial_round"  # the client state that holds the round of that model
STEPS = "trial_steps"  # in a training order: the minimum number of steps before a model is scored
ALL_CLIENTS = "everybody"  # the name of the slot for the sum of all scores
TWICE = "sends, in a trial, a model and a copy of it that may have made more steps"  # secure sums
SCORED = "scored"  # in an upload: the longer-trained copy, to be averaged and scored
SUFFICIENT_GAIN = 0.9  # a coarser cut is good enough with this share of the best gain
LARGEST_HALF = 60_000.0  # smaller numbers fit into 16 bits
DOMINANT = 20  # a client with more than 19/20 of its group's samples leaves only rounding errors
DATA = {"val": "validation", "train": "training"}  # the data that models are scored on
MOST_CUTS = 1000  # the most a client scores, as it sends numbers for every pair of cuts
EVERY_UP_TO = 16  # every number of groups up to this is a candidate, then increasing steps
Labels = np.ndarray[Any, Any]
Trains = Callable[[State, Mapping[ClientId, Slot]], list[Order]]
Offer = Callable[[Mapping[Any, Weights], Collection[Slot]], dict[str, Array]]
Train = Callable[[Client, Weights], Fit]


class Shares(Protocol):
    """Which layers are exchanged, and how received layers are combined with a client's own."""

    def travelling(self, layout: Layout) -> Layout:
        """The part of a model that is exchanged."""

    def received(self, client: Client, arrays: Mapping[str, Array]) -> tuple[str, Weights]:
        """The name of the received model, and the complete model."""


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
    """The server's memory for a trial of the clients of one group, due in round ``first``.

    With ``again``, a trial that keeps one model is repeated after twice as many rounds, but not
    before round ``later``. ``cuts`` are the groupings to try, coarsest first; by default, they are
    cuts of the evidence's tree. Models are scored on the data ``on``, "val" or "train".
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
    """The groupings to try, coarsest first: cuts of the tree, and the evidence's grouping.

    If groups must have ``min_group`` members, the groups of coarser cuts must be unions of those of
    the finest cut; the evidence's grouping is left out if they are not.
    """
    clients = len(evidence.labels)
    tree = evidence.tree or Dendrogram(clients, np.empty((0, 4)))
    counts = _group_counts(clients) if evidence.tree is not None else [1]
    cuts = [tree.cut_count(k) for k in counts] if counts != [1] else [np.zeros(clients, np.int64)]
    single, *finer = cuts  # a single group is always a candidate, however few clients it has
    cuts = [single, *(c for c in finer if np.bincount(c).min() >= min_group)]
    evidence_labels = evidence.labels
    nested = min_group == 1 or _refines(cuts[-1], evidence_labels)
    if nested and not any((evidence_labels == c).all() for c in cuts):
        cuts.append(evidence_labels)
    return sorted(cuts, key=lambda c: int(c.max()))


def _group_counts(clients: int) -> list[int]:
    """Numbers of groups: all up to 16, then in steps of a quarter up to one group per client."""
    counts = list(range(1, min(clients, EVERY_UP_TO) + 1))
    while counts[-1] < clients:
        counts.append(min(clients, math.ceil(counts[-1] * 1.25)))
    return counts


def _refines(fine: Labels, coarse: Labels) -> bool:
    """Whether every group of ``fine`` is contained in a group of ``coarse``."""
    return all(len(set(coarse[fine == g])) == 1 for g in range(fine.max() + 1))


def due(state: State, info: Round) -> bool:
    """Whether a trial begins or continues in this round."""
    trial = state.memory.get("trial")
    return trial is not None and info.number >= trial["next"]


def run(fed: Federation, state: State, info: Round, trains: Trains, offer: Offer) -> State:
    """One round of a trial: its clients train, and in its last round the cuts are judged.

    ``trains`` returns the orders of a round of training, ``offer`` the arrays to send for models.
    All clients of the trial take part, not just the cohort; other groups' clients train as usual.
    """
    plan = _TrialPlan(state.memory["trial"], fed.min_group)
    clients = [c for c in plan.clients if state.groups.get(c) == plan.slot]
    others = [c for c in info.cohort if state.groups.get(c, plan.slot) != plan.slot]
    train_round = _first_round if plan.first else _further_round
    trained = train_round(fed, state, plan, clients, others, trains)
    state = state.moved(trained.others)
    if plan.root not in trained.models:  # no client of the trial answered
        return state
    state = replace(state, models={**state.models, plan.slot: trained.models[plan.root]})
    if not plan.last:
        memory = {**plan.memory, "rounds": plan.memory["rounds"] - 1, "models": trained.models}
        return state.joined({}, trial=memory)
    scores = _scores(fed, plan, clients, trained, offer)
    return _conclude(state, info, plan, trained, scores)


def longer_trained(
    client: Client, config: Mapping[str, Scalar], start: Weights, train: Train
) -> dict[str, Weights]:
    """Train a copy of the model, to be scored, for as many steps as a trial (if any) asks for.

    The client keeps the copy until it has been scored, in the same round, and changes nothing else.
    """
    if STEPS not in config:
        return {}
    trainer = client.aside(steps=max(int(config[STEPS]), client.steps()))
    copy = train(trainer, start).weights
    client.samples += trainer.samples
    client.trained += trainer.trained
    layout = copy.layout
    client.state[KEPT] = copy.only([e.name for e in layout.entries if e.kind != "frozen"])
    client.state[KEPT_IN] = client.round
    return {SCORED: copy}


def _take_kept(client: Client) -> Weights | None:
    """Remove and return the model kept in this round; one left by an earlier trial is dropped."""
    weights, number = client.kept(KEPT), client.state.get(KEPT_IN)
    for name in (KEPT, KEPT_IN):
        client.state.pop(name, None)
    return weights.onto(client.base) if weights is not None and number == client.round else None


def score_cuts(
    client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar], sharing: Shares
) -> Upload:
    """Score the model of each cut on this client's validation data, or on its training data.

    The client sends a single row: 1 if it has data to score on; the loss of the first cut, and how
    much higher the loss of every other cut is; the same for models without the client's own update;
    and, for every pair of cuts, the squared difference of their losses and the variance of that
    difference due to the limited validation data. A verdict needs no more than sums of such rows.
    Differences are sent instead of losses because they keep their precision when rows are averaged,
    and are exactly zero if two models are equal.
    """
    names, on = str(config["cuts"]).split(), str(config.get("on", "val"))
    if len(names) > MOST_CUTS:
        raise TrainingError(
            f"client {client.id} was asked to score {len(names)} cuts, more than {MOST_CUTS}"
        )
    totals = [int(n) for n in str(config.get("totals", "")).split()]
    if totals and client.hidden:  # for whoever repeats its loss below, the difference is zero
        raise TrainingError(
            f"client {client.id} was asked for losses without its own update, and in a secure sum "
            "these could be the losses of a single client"
        )
    own_model = _take_kept(client)
    arrays = {n: _restored(a, sharing.travelling(client.base.layout)) for n, a in arrays.items()}
    losses, models = dict[str, Tensor](), dict[str, Weights]()
    for name in dict.fromkeys(names):
        if own_model is None and name not in arrays:  # it did not take part in the training
            return Upload({"scores": torch.zeros(row_length(len(names)))})
        if own_model is None:
            model = sharing.received(client, {name: arrays[name]})[1]
        else:  # with the personal layers that were trained together with it
            model = arrays[name].onto(own_model) if name in arrays else own_model
        losses[name] = client.losses(model, on)
        models[name] = model
    table = torch.stack([losses[name] for name in names])
    if not table.shape[1]:
        return Upload({"scores": torch.zeros(row_length(len(names)))})
    mean = table.mean(1)
    a, b = torch.triu_indices(len(names), len(names), 1)
    diffs = table[a] - table[b]
    samples = table.shape[1]
    within = diffs.var(1, unbiased=samples > 1) / samples if len(diffs) else diffs.new_zeros(0)
    others = mean
    if own_model is not None and totals:
        others = _losses_without_own(client, own_model, names, totals, models, mean)
    levels = [torch.cat([v[:1], v[1:] - v[0]]) for v in (mean, others)]
    row = torch.cat([torch.ones(1), *levels, (mean[a] - mean[b]) ** 2, within])
    return Upload({"scores": row.float()})


def _shortened(model: Array) -> Array:
    """The model's vector in half precision, or the model itself if its numbers are too large."""
    if not isinstance(model, Weights) or not model.vector.abs().max() < LARGEST_HALF:
        return model
    return model.vector.half()


def _restored(model: Array, layout: Layout) -> Weights:
    return model if isinstance(model, Weights) else Weights(layout, model.float())


def _losses_without_own(
    client: Client,
    own: Weights,
    names: Sequence[str],
    totals: Sequence[int],
    models: Mapping[str, Weights],
    losses: Tensor,
) -> Tensor:
    """The loss of every cut's model without this client's own contribution to it.

    ``totals`` are the samples behind each model. A client that is alone in its group, or has nearly
    all of its samples, is scored with the model of the next coarser cut, so that being on its own
    is no advantage by itself.
    """
    examples, losses_of_others = len(client.train), dict[str, float]()
    row: list[float] = []
    for name, total, loss in zip(names, totals, losses.tolist(), strict=True):
        samples_of_others = total - examples
        if samples_of_others < total / DOMINANT:
            row.append(row[-1] if row else loss)
            continue
        if name not in losses_of_others:
            sum_of_others = total * models[name].vector.double() - examples * own.vector.double()
            others = Weights(own.layout, (sum_of_others / samples_of_others).float())
            losses_of_others[name] = float(client.losses(others).mean())
        row.append(losses_of_others[name])
    return torch.tensor(row, dtype=losses.dtype)


def row_length(cuts: int) -> int:
    """The number of values that a client sends for this number of cuts."""
    return 1 + 2 * cuts + cuts * (cuts - 1)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of a trial: the mean validation loss of every cut, and the chosen cut.

    ``errors`` are the standard errors of the differences from the lowest loss, ``from_one`` those
    of the differences from the loss of one model. ``others`` are the losses of models without the
    client's own update; the list is empty if they are not known.
    """

    losses: list[float]
    errors: list[float]
    chosen: int
    clients: float
    others: list[float]
    from_one: list[float]


def judge(total: Tensor, count: float, cuts: int) -> Verdict:
    """Choose the coarsest cut within one standard error of the lowest loss, from the mean of rows.

    The standard error is that of the mean of paired differences over clients. It combines the
    variance between clients with the variance due to each client's few validation samples.
    """
    row = total.double()
    clients = float(row[0]) * count
    row = row / row[0]
    levels, pairs = row[1 : 1 + 2 * cuts].view(2, cuts), row[1 + 2 * cuts :]
    losses, others = torch.cat([levels[:, :1], levels[:, 1:] + levels[:, :1]], 1).unbind()
    squares, within = pairs.tensor_split(2)
    matrices = torch.zeros(2, cuts, cuts, dtype=torch.float64)
    a, b = torch.triu_indices(cuts, cuts, 1)
    matrices[0, a, b], matrices[1, a, b] = squares, within
    matrices = matrices + matrices.transpose(1, 2)

    def errors_from(k: int) -> Tensor:
        diffs = losses - losses[k]
        between = (matrices[0, k] - diffs**2).clamp(min=0) * clients / max(clients - 1, 1)
        return ((between + matrices[1, k]) / max(clients, 1)).sqrt()

    best = int(losses.argmin())
    errors, diffs = errors_from(best), losses - losses[best]
    chosen = next(k for k in range(cuts) if float(diffs[k]) <= float(errors[k]))
    lists = [v.tolist() for v in (losses, errors, others, errors_from(0))]
    return Verdict(lists[0], lists[1], chosen, clients, *lists[2:])


# --- steps of a trial ---------------------------------------------------------------------------


class _TrialPlan:
    """The named groups of every cut, and the server's memory of the trial.

    A group that occurs in several cuts has one name and one model. ``evidence_cut`` is the cut that
    the evidence has decided for, −1 if there is none. It is ignored if models are scored on
    training data, which favour finer cuts.
    """

    def __init__(self, memory: Mapping[str, Tree], min_group: int) -> None:
        self.memory, self.clients = memory, list(memory["clients"])
        self.slot: Slot = memory["slot"]
        self.cuts: Labels = memory["cuts"].numpy()
        self.nested = min_group == 1
        names_by_members = dict[tuple[int, ...], str]()
        self.names: list[list[str]] = []  # by cut and client
        self.members = dict[str, list[ClientId]]()
        for k, labels in enumerate(self.cuts):
            names = dict[int, str]()
            for g in range(int(labels.max()) + 1):
                positions = tuple(np.flatnonzero(labels == g).tolist())
                names[g] = names_by_members.setdefault(positions, f"{k}.{g}")
                self.members[names[g]] = [self.clients[i] for i in positions]
            self.names.append([names[int(g)] for g in labels])
        self.root = self.names[0][0]
        self.first = "models" not in memory
        self.last = memory["rounds"] == 1
        self.on = str(memory.get("on", "val"))
        self.evidence_cut = memory["own"] if memory["decisive"] and self.on == "val" else -1
        self.index = {c: i for i, c in enumerate(self.clients)}

    def groups_of(self, client: ClientId) -> list[str]:
        """The client's group in each cut."""
        position = self.index[client]
        return [names[position] for names in self.names]

    def finest(self, client: ClientId) -> str:
        """The client's group in the finest cut."""
        return self.groups_of(client)[-1]

    def slots(self, client: ClientId) -> dict[Slot, float]:
        """The groups whose means include the client; only the finest under secure sums."""
        names = self.groups_of(client) if self.nested else [self.finest(client)]
        return dict.fromkeys(names, 1.0)


@dataclass(frozen=True, eq=False)
class _Trained:
    """The groups' models after a round, the copies to score, and the means of all other groups.

    ``totals`` are the samples behind each model, if clients can subtract their own contribution:
    in the first round of a trial, if means are plain and not of secure sums.
    """

    models: dict[str, Weights]
    scored: dict[str, Weights]
    others: dict[Slot, Mean]
    totals: Mapping[str, int] = field(default_factory=dict)


def _first_round(
    fed: Federation,
    state: State,
    plan: _TrialPlan,
    clients: Sequence[ClientId],
    others: Sequence[ClientId],
    trains: Trains,
) -> _Trained:
    """All clients train one model, and each group of each cut gets the mean of its members."""
    into: dict[ClientId, Mapping[Slot, float]] = {c: plan.slots(c) for c in clients}
    into |= {c: {state.groups[c]: 1.0} for c in others}
    slots = {c: state.groups[c] for c in [*clients, *others]}
    orders = _orders(plan, clients, trains(state, slots))
    means = fed.reduce(orders, into)
    start = state.models[plan.slot]
    trial_means: dict[Slot, Mean] = {s: m for s, m in means.items() if s in plan.members}
    if not plan.nested:
        trial_means = _merged_means(plan, trial_means)
    models = {str(s): _model(m, start) for s, m in trial_means.items()}
    scored = {str(s): _model(m, start, SCORED) for s, m in trial_means.items()}
    other_means = {s: m for s, m in means.items() if s not in plan.members}
    exact = fed.plain_means and fed.min_group == 1 and plan.on == "val"
    totals = {str(s): m.examples for s, m in trial_means.items()} if exact else {}
    return _Trained(models, scored, other_means, totals)


def _further_round(
    fed: Federation,
    state: State,
    plan: _TrialPlan,
    clients: Sequence[ClientId],
    others: Sequence[ClientId],
    trains: Trains,
) -> _Trained:
    """Each group of each cut trains its own model for another round."""
    models: dict[str, Weights] = dict(plan.memory["models"])
    trained = _Trained(models, dict(models), {})
    starts: dict[Slot, Weights] = {**state.models, **plan.memory["models"]}
    trial_state = replace(state, models=starts)
    for k in range(len(plan.names)):
        slots: dict[ClientId, Slot] = {c: plan.groups_of(c)[k] for c in clients}
        slots = {c: s for c, s in slots.items() if str(s).startswith(f"{k}.") and s in models}
        if k == 0:
            slots |= {c: state.groups[c] for c in others}
        orders = _orders(plan, clients, trains(trial_state, slots))
        if not orders:
            continue
        for slot, mean in fed.reduce(orders, {c: {s: 1.0} for c, s in slots.items()}).items():
            if slot not in plan.members:
                trained.others[slot] = mean
                continue
            start = starts[slot]
            trained.models[str(slot)] = _model(mean, start)
            trained.scored[str(slot)] = _model(mean, start, SCORED)
    return trained


def _orders(
    plan: _TrialPlan, clients: Collection[ClientId], orders: Sequence[Order]
) -> list[Order]:
    """The orders without a deadline; in the last round, with a minimum of steps to be scored."""
    orders = [replace(o, unhurried=True) for o in orders]
    if not plan.last:
        return orders
    trial_clients, steps = set(clients), plan.memory["steps"]
    return [
        replace(o, config={**o.config, STEPS: steps}) if o.client in trial_clients else o
        for o in orders
    ]


def _merged_means(plan: _TrialPlan, means: Mapping[Slot, Mean]) -> dict[Slot, Mean]:
    """The means of all groups, computed from those of the finest cut."""
    replies, into = [], dict[ClientId, dict[Slot, float]]()
    for number, (slot, mean) in enumerate(means.items()):
        replies.append(Reply(number, mean.examples, mean.arrays, {}))
        into[number] = dict.fromkeys(plan.groups_of(plan.members[str(slot)][0]), 1.0)
    return mix(replies, into)


def _model(mean: Mean, start: Weights, name: str = "model") -> Weights:
    """A group's model; the copy to score is the model itself unless it was trained for longer."""
    model = mean.arrays.get(name, mean.arrays.get("model"))
    return model.onto(start) if isinstance(model, Weights) else start


def _scores(
    fed: Federation,
    plan: _TrialPlan,
    clients: Sequence[ClientId],
    trained: _Trained,
    offer: Offer,
) -> tuple[Tensor, int] | None:
    """The mean of the clients' rows, and the number of clients."""
    models = trained.scored
    exact = bool(trained.totals)  # a client has kept exactly what it sent
    # Under secure sums, all that clients send in a round has the same weights: those of the models
    # just summed, by samples. So clients count by their samples in such a trial, and not equally.
    hidden = fed.min_group > 1
    # One sum is enough for the verdict, except under secure sums (members have already signed the
    # sums of their groups) and with robust means (which are robust within a group only).
    single_sum = fed.plain_means and not hidden
    orders = []
    for client in clients:
        names = [n if n in models else plan.root for n in plan.groups_of(client)]
        needed = [n for n in dict.fromkeys(names) if not (exact and len(plan.members[n]) == 1)]
        config: dict[str, Scalar] = {"cuts": " ".join(names)}
        if plan.on != "val":
            config["on"] = plan.on
        if exact:
            config["totals"] = " ".join(str(trained.totals[n]) for n in names)
        offered = offer(models, needed)
        if exact:
            offered = {name: _shortened(model) for name, model in offered.items()}
        orders.append(Order(client, "score-cuts", offered, config, unhurried=True))
    into: dict[ClientId, Mapping[Slot, float]]
    into = {c: {ALL_CLIENTS if single_sum else plan.finest(c): 1.0} for c in clients}
    means = fed.reduce(orders, into, by_examples=hidden)
    answered = [m for m in means.values() if m.arrays]
    rows = [(m.arrays["scores"], m.examples if hidden else len(m.clients)) for m in answered]
    count, weight = sum(len(m.clients) for m in answered), sum(n for _, n in rows)
    if not count:
        return None
    total = sum((row.double() * n for row, n in rows), torch.zeros(()))  # type: ignore[union-attr]
    return total / weight, count


def _conclude(
    state: State,
    info: Round,
    plan: _TrialPlan,
    trained: _Trained,
    scores: tuple[Tensor, int] | None,
) -> State:
    """The state after the verdict: the groups of the chosen cut, or one group and a later trial."""
    counts = [int(c.max()) + 1 for c in plan.cuts]
    if scores is None:  # no client answered: continue in the next round
        return state
    if not float(scores[0][0]) > 0:
        verdict_note = {"verdict": {"cuts": counts, "why": NOBODY}}
        return _without_trial(replace(state, notes={**state.notes, **verdict_note}))
    verdict = judge(*scores, len(counts))
    if not trained.totals:
        verdict = replace(verdict, others=[])
    chosen, why = decide(verdict, counts, plan.evidence_cut, DATA[plan.on])
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
        return _without_trial(state)
    next_round = max(2 * info.number + 1, plan.memory["later"])
    later = {**plan.memory, "next": next_round, "rounds": plan.memory["asked_rounds"]}
    later.pop("models", None)
    return state.joined({}, trial=later)


NOBODY = "no client has validation data, so nothing can tell whether training in groups helps"


def no_candidates(groups: int, min_group: int) -> str:
    """Why there is no trial if a single group is the only candidate.

    >>> no_candidates(3, 4)
    'the evidence finds 3 groups, but no grouping to try has 4 or more clients in every group, ...'
    """
    if min_group == 1:
        return "there is no grouping to try instead of one model"
    evidence = f"the evidence finds {groups} groups, but " if groups > 1 else ""
    return (
        f"{evidence}no grouping to try has {min_group} or more clients in every group, as secure "
        "sums need (privacy.min_group)"
    )


def decide(
    verdict: Verdict, counts: Sequence[int], decided: int = -1, data: str = "validation"
) -> tuple[int, str]:
    """Choose a cut, and say why in a sentence.

    ``decided`` is the cut that the evidence has decided for, if any. It must be better than
    one model by more than its standard error; otherwise one model is kept for now. Finer cuts are
    judged by how well a client's group does without the client's own update, if that is known: the
    first cut with nine tenths of the best gain is taken. With the client's own update, all finer
    cuts would look better early on, when models that were averaged only once are not yet good.
    """
    chosen, losses, others = verdict.chosen, verdict.losses, verdict.others
    one = f"one model has {losses[0]:.3f}"
    if chosen == 0:
        return 0, f"no grouping is better than one model on {data} data (loss {losses[0]:.3f})"
    if not 0 < decided < chosen:
        sentence = f"{counts[chosen]} groups have a {data} loss of {losses[chosen]:.3f}, {one}"
        agreement = "; these are the groups that the evidence finds" if chosen == decided else ""
        return chosen, sentence + agreement
    if not losses[0] - losses[decided] > verdict.from_one[decided]:
        return 0, (
            f"the {counts[decided]} groups that the evidence finds have a {data} loss of "
            f"{losses[decided]:.3f}, not clearly less than one model's {losses[0]:.3f}"
        )
    cut = (
        decided + _first_sufficient(others[0], others[decided : chosen + 1]) if others else decided
    )
    sentence = f"{counts[cut]} groups have a {data} loss of {losses[cut]:.3f}, {one}; "
    if cut == decided:
        return decided, sentence + "these are the groups that the evidence finds"
    return cut, sentence + (
        f"the evidence finds {counts[decided]}, but without a client's own update these have "
        f"{others[decided]:.3f} and {counts[cut]} groups {others[cut]:.3f}"
    )


def _first_sufficient(base: float, losses: Sequence[float]) -> int:
    """The first of the losses with nine tenths of the lowest one's gain over one model.

    It is the first of all if nothing is gained.

    >>> _first_sufficient(1.0, [0.7, 0.63, 0.6]), _first_sufficient(1.0, [0.7, 0.65, 0.6])
    (1, 2)
    """
    gain = base - min(losses)
    return next(
        (k for k, loss in enumerate(losses) if base - loss >= SUFFICIENT_GAIN * gain > 0), 0
    )


def _split(
    state: State, info: Round, plan: _TrialPlan, models: Mapping[str, Weights], chosen: int
) -> State:
    """Form the groups of a cut, each with its new model; clients not in the trial join later."""
    names = plan.names[chosen]
    labels = canonical(np.unique(names, return_inverse=True)[1])
    slots = {name: f"{info.number + 1}/{g}" for name, g in zip(names, labels, strict=True)}
    groups = {c: s for c, s in state.groups.items() if s != plan.slot}
    groups |= {c: slots[name] for c, name in zip(plan.clients, names, strict=True)}
    models_after = {s: m for s, m in state.models.items() if s != plan.slot}
    models_after |= {s: models.get(name, models[plan.root]) for name, s in slots.items()}
    return _without_trial(replace(state, models=models_after, groups=groups))


def _without_trial(state: State) -> State:
    return replace(state, memory={k: v for k, v in state.memory.items() if k != "trial"})
