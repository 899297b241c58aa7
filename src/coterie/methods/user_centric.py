"""User-centric aggregation: each client has its own weights over all clients' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.special import softmax as scipy_softmax
from torch import Tensor

from coterie.client import Client
from coterie.clustering import best_k, cosine, euclidean, kmeans_up_to, mixing_diagnostics
from coterie.compose import probing
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import Probe, ProbeAnswer
from coterie.core.aggregate import mix
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Reply, Scalar, Slot, Upload
from coterie.core.method import Count, Method, NonNegative, Round, Setup, State, matrix, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError, TrainingError
from coterie.methods.by_evidence import NO_NOISE, ROOT, EvidenceRule, TrialMode, one_group, shown
from coterie.methods.tree_cuts import no_more

Matrix = np.ndarray[Any, Any]
Probed = tuple[Tensor, float, int]  # gradient or direction, its variance, samples
_UNRELIABLE = 0.05  # the lowest reliability of a direction, since distances are divided by it
_FLOOR = 1e-3  # the lowest σ, as a share of the mean: with one sample σ is 0, and it is a divisor
_SHARPER = 0.25  # σ² of a direction as a share of its halves' spread: chosen on digits, seed 0
_MOST_SCORED = 100  # clients; with more, k-means for every number of streams takes seconds
softmax = partial(scipy_softmax, axis=1)


class Rows(NamedTuple):
    """Each client's row of weights, and the squared distances that the weights come from."""

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
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Each client's model is its own weighted mean of all clients' models.

    Family: personalised.
    Rule: once, at the initial model θ⁰, each client sends its gradient g_i over all its data and
    σ_i², the mean squared deviation of its batch gradients from g_i. The weights are w_ij ∝
    (n_j/n_i)·exp(−‖g_i−g_j‖²/(2σ_iσ_j)), with rows that sum to 1, and in each round θ_i ← Σ_j w_ij
    θ_j. With ``streams``, k-means clusters the rows, and the clients of a cluster share its mean
    row and one model. With partial participation, rows are renormalised over the clients that
    answered; a model keeps its value if none of its clients answered. With ``probe`` "update", the
    direction of a short training replaces the gradient: each client trains θ⁰ on two halves of its
    data. The distances are corrected for the difference between the halves, and σ_i² is a quarter
    of that difference.
    Args:
        streams: how many different models the server sends, 1 or more; "all", one for each client;
            "auto", the number of groups whose means over one half of the clients' data best predict
            the other half, or one if no grouping predicts better than a single mean. With "auto", a
            trial on validation data then decides whether the groups are used.
        parallel: whether every client trains every stream (the paper's exact variant; multiplies
            the upload by the number of streams).
        probe: "gradient", the paper's rule, which says little when clients have few samples, or
            "update". When not given: "update" with "auto" streams, "gradient" otherwise.
        variance_batch: batch size for σ², 1 or more; a third of the client's samples when not given
            (the paper uses 100 for label shift). There are always at least two batches.
        select: how "auto" chooses the number of streams: "evidence", as described for ``streams``,
            or "silhouette", the paper's rule: the number k with the highest silhouette − penalty·k,
            one if no silhouette is above 0.1, and no trial. When not given: "evidence", unless
            ``probe`` is "gradient".
        penalty: how much silhouette each further stream must add, 0 or more.
        steps: steps of the short training of "update", 1 or more, or "auto": as many as the median
            client needs to bring its loss down to a fifth.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the streams of the evidence from θ⁰ on.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's gradient at θ⁰ (or two short updates), once; then weighted means; in
    a trial each client's model. With "all", there are as many means as clients and the server knows
    the weights, so it can compute every client's model.
    Travels: 1 model down, 1 up; with ``parallel``, as many as there are streams, both ways. Before
    the first round θ⁰ down and a gradient (or two updates) up; in a trial at most one more model
    up, and the models of all a client's candidate groups down.
    Newcomers: send what the other clients sent before the first round, and get their own row
    ("all") or join the stream with the nearest row; with "auto" streams, the stream with the
    nearest mean direction.
    Departs: "update", the evidence and the trial are not from the paper; with "auto", there is one
    stream until the trial. σ is at least 0.001 of its mean over clients, because it is 0 for a
    client with too few samples. A client whose first reply was lost is admitted like a newcomer the
    next time it is selected.
    Reference: Mestoukirdi et al., User-Centric Federated Learning: Trading off Wireless Resources
    for Personalization, IEEE TMLCN 2023.
    """
    compared = probe or ("update" if streams == "auto" and select != "silhouette" else "gradient")
    rule = select or ("silhouette" if compared == "gradient" else "evidence")
    if streams == "auto" and rule == "evidence" and compared == "gradient":
        raise ConfigError(
            "method user-centric: select = 'evidence' compares updates: set probe = 'update', or "
            "select = 'silhouette' to compare gradients"
        )
    by_evidence = streams == "auto" and rule == "evidence"
    how = EvidenceRule(Probe("model", steps), trial if by_evidence else "off", trial_rounds)
    weighing = Weighing(streams, compared == "update", by_evidence, how, penalty)
    assign = Assign(
        weighing.start,
        weighing.admit,
        parallel=parallel,
        mixes=mixes,
        tasks={"gradient": partial(send_gradient, variance_batch), **probing.TASKS},
        sees="each",
        check=no_more("user-centric", "streams", streams if isinstance(streams, int) else None),
        regrouped=weighing.regrouped,
        no_noise=NO_NOISE if compared == "update" else "",
        sums=how.sums,
        same_steps=how.same_steps,
    )
    return grouped("user-centric", assign)


@dataclass(frozen=True)
class Weighing:
    """How the clients' weights are computed, and the streams that share them.

    With ``updates``, short updates are compared instead of gradients. With ``by_evidence``, the
    streams are the groups of the evidence: there is one until a trial splits it.
    """

    streams: int | str
    updates: bool
    by_evidence: bool
    how: EvidenceRule
    penalty: float

    def start(self, fed: Federation, setup: Setup) -> State:
        """Ask every client once and compute the weights."""
        state = one_group(setup)
        if not self.updates:
            probed = gradients_of(fed, setup.start, {}, setup.clients)
            if not probed:
                raise TrainingError(
                    "user-centric: no client sent its gradient, so no weights can be computed"
                )
            return self.weighed(state.joined({}, start=setup.start), probed)
        if self.by_evidence:
            state, answer = self.how.probed(fed, state)
        else:
            answer = probing.ask(fed, self.how.probe, setup.start, setup.clients)
            state = replace(state, notes=shown(answer))
        if not answer.clients:
            raise ConfigError(
                "method user-centric: no client has the two samples that are needed to compare "
                "updates: set probe = 'gradient'"
            )
        return self.weighed(state.joined({}, probe=answer.memory), probed_in(answer))

    def rows(self, probed: Mapping[ClientId, Probed]) -> Rows:
        """Each client's row of weights."""
        squares = squared_distances(probed, self.updates)
        return Rows(softmax(log_weights(probed, squares, self.updates)), squares)

    def weighed(self, state: State, probed: dict[ClientId, Probed]) -> State:
        """The state with each client's weights and stream."""
        rows = self.rows(probed)
        weights = rows.weights
        notes: dict[str, Any] = {"clients": list(probed), "mixing": matrix(weights)}
        labels: list[Slot] = [state.groups[c] for c in probed]
        if self.streams == "all":
            labels = list(probed)
        elif isinstance(self.streams, int):
            labels = list(kmeans_up_to(weights, self.streams)[0].tolist())
        by_silhouette = self.streams == "auto" and not self.by_evidence
        if by_silhouette or len(weights) <= _MOST_SCORED:
            best = best_k(weights, penalty=self.penalty)
            notes["silhouette"] = {str(k): v for k, v in best.scores.items()}
            labels = list(best.labels.tolist()) if by_silhouette else labels
        models = state.models
        if not self.by_evidence:
            first = next(iter(models.values()))
            models = dict.fromkeys(sorted(set(labels), key=lambda s: (str(type(s)), s)), first)
        groups = dict(zip(probed, labels, strict=True))
        state = replace(state, models=models, groups=groups, notes={**state.notes, **notes})
        return mixed(state, probed, rows)

    def admit(self, fed: Federation, state: State, info: Round) -> State:
        """Ask newcomers what the other clients were asked, and give them a row or a stream."""
        memory, probed = state.memory, dict[ClientId, Probed](state.memory["seen"])
        if self.updates:
            answers = probed | probing.directions_of(fed, memory["probe"], info.cohort)
            probed = {c: answers[c] for c in sorted(answers)}
        else:
            probed = gradients_of(fed, memory["start"], probed, info.cohort)
        squares, clients = squared_distances(probed, self.updates), list(probed)
        logs = log_weights(probed, squares, self.updates)
        placed = [i for i, c in enumerate(clients) if c in state.groups]
        models, groups = dict(state.models), dict(state.groups)
        for i in sorted(set(range(len(clients))) - set(placed)):
            row = softmax(logs[[i]][:, placed])
            if self.streams == "all":
                groups[clients[i]] = clients[i]
                models[clients[i]] = blend(row[0], [state.models[clients[j]] for j in placed])
            elif self.by_evidence:
                groups[clients[i]] = nearest_part(state, probed[clients[i]][0])
            else:
                distances = euclidean(row, memory["mixing"].numpy())
                groups[clients[i]] = list(models)[int(np.argmin(distances))]
        state = replace(state, models=models, groups=groups)
        return mixed(state, probed, Rows(softmax(logs), squares))

    def regrouped(self, before: State, after: State) -> State:
        """Compute the rows of the new streams after a trial."""
        after = self.how.after_trial(before, after)
        probed = {c: v for c, v in after.memory["seen"].items() if c in after.groups}
        return mixed(after, probed, self.rows(probed))


def send_gradient(
    variance_batch: int | None,
    client: Client,
    arrays: Mapping[str, Any],
    config: Mapping[str, Scalar],
) -> Upload:
    """The gradient over all of a client's data, and how much batch gradients deviate from it."""
    client.round = 0  # the same batches in whichever round the client is asked
    start, count = arrays["model"].onto(client.base), len(client.train)
    full_gradient = client.gradient(start)
    batch_count = 3 if variance_batch is None else round(count / variance_batch)
    batches = client.shuffled("variance").tensor_split(min(max(2, batch_count), count))
    deviations = [(client.gradient(start, rows) - full_gradient).norm() for rows in batches]
    payload = full_gradient.only(full_gradient.layout.shareable)
    variance = sum(g * g for g in deviations) / len(deviations)
    return Upload({"gradient": payload}, {"variance": variance})


def mixes(state: State, client: ClientId) -> Mapping[Slot, float]:
    """The weight of a client's model in each stream's mean."""
    column = state.memory["mixing"][:, list(state.memory["seen"]).index(client)]
    return dict(zip(state.models, column.tolist(), strict=True))


def nearest_part(state: State, direction: Tensor) -> Slot:
    """The stream with the nearest mean direction; the only stream as long as there is one."""
    split = state.memory.get("splits", {}).get(ROOT)
    if split is None:
        return ROOT
    slot: Slot = split["slots"][int((split["centres"] @ direction).argmax())]
    return slot


def mixed(state: State, probed: Mapping[ClientId, Probed], rows: Rows) -> State:
    """The state with each model's row of weights, and with notes about the rows."""
    clients, weights = list(probed), rows.weights
    slots = np.array([str(state.groups[c]) for c in clients])
    own_stream_weights = (slots[:, None] == slots) * weights
    mixing = rows_of(state.models, {c: state.groups[c] for c in clients}, weights)
    notes: dict[str, Any] = {"streams": len(state.models)}
    shared = None
    if len(state.models) < len(clients):
        row_of = {slot: i for i, slot in enumerate(state.models)}
        shared = mixing.numpy()[[row_of[state.groups[c]] for c in clients]]
    notes["mixing_terms"] = {"clients": clients, **terms_of(probed, rows, shared)}
    if 1 < len(state.models) < len(clients):
        notes["own_group"] = round(float(own_stream_weights.sum(1).mean()), 4)
    state = replace(state, notes={**state.notes, **notes})
    return state.joined({}, seen=dict(probed), mixing=mixing)


def terms_of(
    probed: Mapping[ClientId, Probed], rows: Rows, shared: Matrix | None
) -> dict[str, list[float]]:
    """The terms of the paper's bound for each client: with its own row, and with FedAvg's weights.

    ``shared`` has the rows that clients get instead of their own where they share streams.
    """
    counts = np.array([examples for *_, examples in probed.values()], float)
    fedavg_rows = np.tile(counts / counts.sum(), (len(counts), 1))
    own_terms = mixing_diagnostics(rows.weights, counts, rows.squares)
    fedavg_discrepancy = mixing_diagnostics(fedavg_rows, counts, rows.squares).discrepancy
    terms = {"samples": counts, **own_terms._asdict(), "together": fedavg_discrepancy}
    if shared is not None:
        in_streams = mixing_diagnostics(shared, counts, rows.squares)
        terms |= {f"stream_{name}": values for name, values in in_streams._asdict().items()}
    return {name: [float(f"{v:.6g}") for v in values] for name, values in terms.items()}


def probed_in(answer: ProbeAnswer) -> dict[ClientId, Probed]:
    """Each client's direction, the spread of its two halves, and its number of samples."""
    values = zip(answer.places, answer.spreads, answer.examples, strict=True)
    return dict(zip(answer.clients, values, strict=True))


def gradients_of(
    fed: Federation, start: Weights, probed: Mapping[ClientId, Probed], clients: Sequence[ClientId]
) -> dict[ClientId, Probed]:
    """Ask these clients for gradients; all answers so far, in the order of client ids."""
    model, answers = start.only(start.layout.shareable), dict(probed)
    for reply in fed.gather([Order(c, "gradient", {"model": model}) for c in clients]):
        gradient = reply.arrays["gradient"]
        assert isinstance(gradient, Weights)
        answers[reply.client] = (gradient.parameters, reply.metrics["variance"], reply.examples)
    return {c: answers[c] for c in sorted(answers)}


def squared_distances(probed: Mapping[ClientId, Probed], directions: bool = False) -> Matrix:
    """‖g_i−g_j‖²; for ``directions`` of updates, corrected for the noise of small samples."""
    vectors, variances, _ = zip(*probed.values(), strict=True)
    rows = np.stack([v.numpy() for v in vectors])
    if directions:
        return true_distances(rows, np.array(variances))
    squares: Matrix = euclidean(rows) ** 2
    return squares


def log_weights(
    probed: Mapping[ClientId, Probed], squares: Matrix, directions: bool = False
) -> Matrix:
    """log n_j − ‖g_i−g_j‖²/(2σ_iσ_j), up to a constant for each row.

    For ``directions`` of updates, ``squares`` are already corrected for the difference between the
    halves of a client's data, so σ can be smaller.
    """
    _, variances, examples = zip(*probed.values(), strict=True)
    deviations = np.sqrt(np.array(variances))
    deviations = np.maximum(deviations, max(_FLOOR * deviations.mean(), 1e-12))
    factor = _SHARPER if directions else 1.0
    spread = 2 * factor * np.outer(deviations, deviations)
    logs: Matrix = np.log(examples)[None] - squares / spread
    return logs


def true_distances(rows: Matrix, spreads: Matrix) -> Matrix:
    """Squared distances between directions, corrected for the noise of small samples.

    The cosine of two measured directions is too small by a factor: the root of the product of their
    reliabilities (the correction for attenuation, known from psychometrics). The reliability of the
    mean of two halves follows from their agreement ρ by the Spearman-Brown formula, 2ρ/(1 + ρ).

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
    clients = sorted(groups)
    rows = [w[[i for i, c in enumerate(clients) if groups[c] == slot]].mean(0) for slot in models]
    return torch.from_numpy(np.stack(rows))


def blend(shares: Matrix, models: Sequence[Weights]) -> Weights:
    """The weighted mean of some models."""
    replies = [Reply(i, 1, {"model": model}, {}) for i, model in enumerate(models)]
    mean = mix(replies, {i: {0: float(s)} for i, s in enumerate(shares)})[0].arrays["model"]
    assert isinstance(mean, Weights)
    return mean
