"""User-centric aggregation: every client has a row of weights over all clients' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.special import softmax as scipy_softmax
from torch import Tensor

from coterie import probing
from coterie.client import Client
from coterie.compose import Assign, grouped
from coterie.errors import ConfigError, TrainingError
from coterie.federation import ClientId, Federation, Order, Reply, Scalar, Slot, Upload, mix
from coterie.grouping import best_k, cosine, euclidean, kmeans_up_to, mixing_diagnostics
from coterie.method import Count, Method, NonNegative, Round, Setup, State, matrix, method
from coterie.methods.evidenced import NO_NOISE, ROOT, Evidenced, Try, everybody, shown
from coterie.methods.trees import no_more
from coterie.probing import Answer, Probe
from coterie.weights import Weights

Matrix = np.ndarray[Any, Any]
Seen = tuple[Tensor, float, int]  # gradient or direction, its variance, samples
_UNRELIABLE = 0.05  # no direction is taken to be less reliable than this: it divides
_FLOOR = 1e-3  # of the mean deviation: that of a client with one sample is 0, and it divides
_SHARPER = 0.25  # σ² of a direction in units of its halves' spread: chosen on digits, seed 0
_MOST_SCORED = 100  # clients: of more, k-means for every number of streams takes seconds
softmax = partial(scipy_softmax, axis=1)


class Rows(NamedTuple):
    """Everybody's row of weights, and the squared distances that they come from."""

    weights: Matrix
    squares: Matrix


@method
def user_centric(
    streams: Count | Literal["auto", "all"] = "all",
    parallel: bool = False,
    probe: Literal["update", "gradient"] | None = None,
    variance_batch: Count | None = None,
    select: Literal["evidence", "silhouette"] | None = None,
    penalty: NonNegative = 0.0,
    steps: Count | Literal["auto"] = "auto",
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Each client's model is its own weighted mean of all clients' models.

    Family: personalised.
    Rule: once, at θ⁰, each client sends its gradient g_i over all its data and σ_i², the mean
    squared deviation of batch gradients from it. Then w_ij ∝ (n_j/n_i)·exp(−‖g_i−g_j‖²/(2σ_iσ_j)),
    rows summing to 1, and in each round θ_i ← Σ_j w_ij θ_j. With ``streams`` the rows are clustered
    by k-means and the clients of a cluster share its centroid row and one model. With partial
    participation rows are renormalised over those who answered; a model none of whose clients
    answered stays as it is. With ``probe`` "update" the direction of a short training takes the
    place of the gradient: each client trains θ⁰ on two halves of its data. How much the halves
    differ is taken out of the distances, and a quarter of it is σ_i².
    Args:
        streams: how many models the server sends, 1 or more; "all", one for each client; "auto",
            the number of groups that best predicts the clients' other halves, one when none is
            better than one mean; a trial on validation data then decides whether they pay.
        parallel: every client trains every stream (the exact variant; uplink times the streams).
        probe: "gradient", the paper's, which tells little when clients have few samples, or
            "update". When not given: "update" with "auto" streams, "gradient" otherwise.
        variance_batch: samples in a batch for σ², 1 or more; a third of the client's when not
            given (the paper takes 100 for label shift). There are always two batches at least.
        select: with "auto" streams, "evidence" as above, or "silhouette", the paper's: the number
            with the best silhouette − penalty·k, one when no silhouette is above 0.1, no trial.
            When not given: "evidence", unless ``probe`` is "gradient".
        penalty: what each further stream must earn in silhouette, 0 or more.
        steps: steps of the short training of "update", 1 or more, or "auto", as many as the median
            client needs to bring its loss to a fifth.
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", the streams that
            the evidence finds, from θ⁰.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's gradient at θ⁰ (or two short updates), once; then weighted means; in
    a trial each client's model. With "all" there are as many means as clients and their weights are
    known: every model can be computed from them.
    Travels: 1 model down, 1 up; ``parallel``: as many as streams, both ways. Before the first round
    θ⁰ down and a gradient (or two updates) up; in a trial at most one more model up and those of
    all a client's groups down.
    Newcomers: send the same and get a row of their own ("all") or the stream with the nearest row;
    with "update", the stream whose mean direction is nearest.
    Departs: "update", the evidence and the trial are ours; with "auto" there is one stream until
    the trial. σ is floored at 0.001 of the clients' mean, where a client has too few samples. A
    client whose first reply was lost is admitted like a newcomer when its turn comes.
    Reference: Mestoukirdi et al., User-Centric Federated Learning: Trading off Wireless Resources
    for Personalization, IEEE TMLCN 2023.
    """
    by = probe or ("update" if streams == "auto" and select != "silhouette" else "gradient")
    rule = select or ("silhouette" if by == "gradient" else "evidence")
    if streams == "auto" and rule == "evidence" and by == "gradient":
        raise ConfigError(
            "method user-centric: select = 'evidence' compares updates: take probe = 'update', or "
            "select = 'silhouette' with gradients"
        )
    found = streams == "auto" and rule == "evidence"
    how = Evidenced(Probe("model", steps), trial if found else "off", trial_rounds)
    weighing = Weighing(streams, by == "update", found, how, penalty)
    assign = Assign(
        weighing.start,
        weighing.admit,
        parallel=parallel,
        mixes=mixes,
        tasks={"gradient": partial(send_gradient, variance_batch), **probing.TASKS},
        sees="each",
        check=no_more("user-centric", "streams", streams if isinstance(streams, int) else None),
        regrouped=weighing.regrouped,
        no_noise=NO_NOISE if by == "update" else "",
        sums=how.sums,
        same_steps=how.same_steps,
    )
    return grouped("user-centric", assign)


@dataclass(frozen=True)
class Weighing:
    """How everybody's weights come about, and the streams that share them.

    ``updates`` are weighed in place of gradients; streams that are ``found`` by evidence are one at
    first, and go apart after a trial.
    """

    streams: int | str
    updates: bool
    found: bool
    how: Evidenced
    penalty: float

    def start(self, fed: Federation, setup: Setup) -> State:
        """Ask everybody once, and weigh."""
        state = everybody(setup)
        if not self.updates:
            seen = asked(fed, setup.start, {}, setup.clients)
            if not seen:
                raise TrainingError(
                    "user-centric: no client sent its gradient: nobody can be weighed"
                )
            return self.weighed(state.joined({}, start=setup.start), seen)
        if self.found:
            state, answer = self.how.begun(fed, state)
        else:
            answer = probing.ask(fed, self.how.probe, setup.start, setup.clients)
            state = replace(state, notes=shown(answer))
        if not answer.clients:
            raise ConfigError(
                "method user-centric: no client has the two samples that it takes to compare "
                "updates: take probe = 'gradient'"
            )
        return self.weighed(state.joined({}, probe=answer.memory), seen_in(answer))

    def rows(self, seen: Mapping[ClientId, Seen]) -> Rows:
        """Everybody's row of weights."""
        squares = squared_distances(seen, self.updates)
        return Rows(softmax(log_weights(seen, squares, self.updates)), squares)

    def weighed(self, state: State, seen: dict[ClientId, Seen]) -> State:
        """With everybody's weights, and with its stream."""
        rows = self.rows(seen)
        weights = rows.weights
        notes: dict[str, Any] = {"clients": list(seen), "mixing": matrix(weights)}
        labels: list[Slot] = [state.groups[c] for c in seen]
        if self.streams == "all":
            labels = list(seen)
        elif isinstance(self.streams, int):
            labels = list(kmeans_up_to(weights, self.streams)[0].tolist())
        by_silhouette = self.streams == "auto" and not self.found
        if by_silhouette or len(weights) <= _MOST_SCORED:
            best = best_k(weights, penalty=self.penalty)
            notes["silhouette"] = {str(k): v for k, v in best.scores.items()}
            labels = list(best.labels.tolist()) if by_silhouette else labels
        models = state.models
        if not self.found:
            first = next(iter(models.values()))
            models = dict.fromkeys(sorted(set(labels), key=lambda s: (str(type(s)), s)), first)
        groups = dict(zip(seen, labels, strict=True))
        state = replace(state, models=models, groups=groups, notes={**state.notes, **notes})
        return mixed(state, seen, rows)

    def admit(self, fed: Federation, state: State, info: Round) -> State:
        """Newcomers answer the same question, and get a row or a stream."""
        memory, seen = state.memory, dict[ClientId, Seen](state.memory["seen"])
        if self.updates:
            answers = seen | probing.directions_of(fed, memory["probe"], info.cohort)
            seen = {c: answers[c] for c in sorted(answers)}
        else:
            seen = asked(fed, memory["start"], seen, info.cohort)
        squares, people = squared_distances(seen, self.updates), list(seen)
        logs = log_weights(seen, squares, self.updates)
        known = [i for i, c in enumerate(people) if c in state.groups]
        models, groups = dict(state.models), dict(state.groups)
        for i in sorted(set(range(len(people))) - set(known)):
            row = softmax(logs[[i]][:, known])
            if self.streams == "all":
                groups[people[i]] = people[i]
                models[people[i]] = blend(row[0], [state.models[people[j]] for j in known])
            elif self.found:
                groups[people[i]] = nearest_part(state, seen[people[i]][0])
            else:
                gaps = euclidean(row, memory["mixing"].numpy())
                groups[people[i]] = list(models)[int(np.argmin(gaps))]
        state = replace(state, models=models, groups=groups)
        return mixed(state, seen, Rows(softmax(logs), squares))

    def regrouped(self, before: State, after: State) -> State:
        """After a trial: rows of the streams that there are now."""
        after = self.how.settled(before, after)
        seen = {c: v for c, v in after.memory["seen"].items() if c in after.groups}
        return mixed(after, seen, self.rows(seen))


def send_gradient(
    variance_batch: int | None,
    client: Client,
    arrays: Mapping[str, Any],
    config: Mapping[str, Scalar],
) -> Upload:
    """The gradient over all of a client's data, and how much batches of it deviate."""
    client.round = 0  # the same batches whenever it is asked
    start, count = arrays["model"].onto(client.base), len(client.train)
    whole = client.gradient(start)
    parts = 3 if variance_batch is None else round(count / variance_batch)
    batches = client.shuffled("variance").tensor_split(min(max(2, parts), count))
    gaps = [(client.gradient(start, rows) - whole).norm() for rows in batches]
    travels = whole.only(whole.layout.shareable)
    variance = sum(g * g for g in gaps) / len(gaps)
    return Upload({"gradient": travels}, {"variance": variance})


def mixes(state: State, client: ClientId) -> Mapping[Slot, float]:
    """The share of a client's model in each stream's."""
    column = state.memory["mixing"][:, list(state.memory["seen"]).index(client)]
    return dict(zip(state.models, column.tolist(), strict=True))


def nearest_part(state: State, direction: Tensor) -> Slot:
    """The stream whose mean direction is nearest; while there is one, that."""
    split = state.memory.get("splits", {}).get(ROOT)
    if split is None:
        return ROOT
    slot: Slot = split["slots"][int((split["centres"] @ direction).argmax())]
    return slot


def mixed(state: State, seen: Mapping[ClientId, Seen], rows: Rows) -> State:
    """With the row of weights of each model; what the rows are like is noted."""
    people, weights = list(seen), rows.weights
    slots = np.array([str(state.groups[c]) for c in people])
    same = (slots[:, None] == slots) * weights
    mixing = rows_of(state.models, {c: state.groups[c] for c in people}, weights)
    notes: dict[str, Any] = {"streams": len(state.models)}
    given = None
    if len(state.models) < len(people):
        place = {slot: i for i, slot in enumerate(state.models)}
        given = mixing.numpy()[[place[state.groups[c]] for c in people]]
    notes["mixing_terms"] = {"clients": people, **terms_of(seen, rows, given)}
    if 1 < len(state.models) < len(people):
        notes["own_group"] = round(float(same.sum(1).mean()), 4)
    state = replace(state, notes={**state.notes, **notes})
    return state.joined({}, seen=dict(seen), mixing=mixing)


def terms_of(
    seen: Mapping[ClientId, Seen], rows: Rows, given: Matrix | None
) -> dict[str, list[float]]:
    """The bound's terms for everybody: by its own row, and with the weights of FedAvg.

    ``given`` are the rows that clients get instead of their own where they share streams.
    """
    counts = np.array([examples for *_, examples in seen.values()], float)
    alike = np.tile(counts / counts.sum(), (len(counts), 1))
    own = mixing_diagnostics(rows.weights, counts, rows.squares)
    together = mixing_diagnostics(alike, counts, rows.squares).discrepancy
    found = {"samples": counts, **own._asdict(), "together": together}
    if given is not None:
        shared = mixing_diagnostics(given, counts, rows.squares)
        found |= {f"stream_{name}": values for name, values in shared._asdict().items()}
    return {name: [float(f"{v:.6g}") for v in values] for name, values in found.items()}


def seen_in(answer: Answer) -> dict[ClientId, Seen]:
    """What a probe says of every client: its direction, the spread of its halves, its samples."""
    of = zip(answer.places, answer.spreads, answer.examples, strict=True)
    return dict(zip(answer.clients, of, strict=True))


def asked(
    fed: Federation, start: Weights, seen: Mapping[ClientId, Seen], clients: Sequence[ClientId]
) -> dict[ClientId, Seen]:
    """What everybody answered, the earlier ones and these, in client-id order."""
    model, answers = start.only(start.layout.shareable), dict(seen)
    for reply in fed.gather([Order(c, "gradient", {"model": model}) for c in clients]):
        gradient = reply.arrays["gradient"]
        assert isinstance(gradient, Weights)
        answers[reply.client] = (gradient.parameters, reply.metrics["variance"], reply.examples)
    return {c: answers[c] for c in sorted(answers)}


def squared_distances(seen: Mapping[ClientId, Seen], directions: bool = False) -> Matrix:
    """‖g_i−g_j‖²; of ``directions`` of updates, without what is due to having few samples."""
    vectors, variances, _ = zip(*seen.values(), strict=True)
    rows = np.stack([v.numpy() for v in vectors])
    if directions:
        return true_distances(rows, np.array(variances))
    squares: Matrix = euclidean(rows) ** 2
    return squares


def log_weights(seen: Mapping[ClientId, Seen], squares: Matrix, directions: bool = False) -> Matrix:
    """log n_j − ‖g_i−g_j‖²/(2σ_iσ_j); what is the same all along a row does not matter.

    Of ``directions`` of updates, what the two halves of a client's data differ by is taken out of
    the distances (``squares``), so σ can be smaller.
    """
    _, variances, examples = zip(*seen.values(), strict=True)
    deviations = np.sqrt(np.array(variances))
    deviations = np.maximum(deviations, max(_FLOOR * deviations.mean(), 1e-12))
    factor = _SHARPER if directions else 1.0
    spread = 2 * factor * np.outer(deviations, deviations)
    logs: Matrix = np.log(examples)[None] - squares / spread
    return logs


def true_distances(rows: Matrix, spreads: Matrix) -> Matrix:
    """Squared distances of directions, without what is due to having few samples.

    The cosine of two measured directions is too small by the root of both reliabilities (the
    correction for attenuation of psychometrics). The reliability of the mean of two halves comes
    from their agreement ρ by Spearman and Brown's formula, 2ρ/(1 + ρ).

    >>> true_distances(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.36, 0.36])).round(9)
    array([[0., 2.],
           [2., 0.]])
    """
    agreement = 1 - 2 * spreads
    reliability = np.clip(2 * agreement / np.maximum(1 + agreement, 1e-12), _UNRELIABLE, 1.0)
    cosines = (1 - cosine(rows)) / np.sqrt(np.outer(reliability, reliability))
    squares: Matrix = 2 - 2 * np.clip(cosines, -1.0, 1.0)
    np.fill_diagonal(squares, 0.0)
    return squares


def rows_of(models: Mapping[Slot, Weights], groups: Mapping[ClientId, Slot], w: Matrix) -> Tensor:
    """Each model's row of weights: the mean of its clients' rows."""
    people = sorted(groups)
    rows = [w[[i for i, c in enumerate(people) if groups[c] == slot]].mean(0) for slot in models]
    return torch.from_numpy(np.stack(rows))


def blend(shares: Matrix, models: Sequence[Weights]) -> Weights:
    """One model from many, in these shares."""
    replies = [Reply(i, 1, {"model": model}, {}) for i, model in enumerate(models)]
    found = mix(replies, {i: {0: float(s)} for i, s in enumerate(shares)})[0].arrays["model"]
    assert isinstance(found, Weights)
    return found
