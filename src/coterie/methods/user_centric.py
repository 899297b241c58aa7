"""User-centric aggregation: every client has a row of weights over all clients' models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import softmax as scipy_softmax
from torch import Tensor

from coterie.client import Client
from coterie.compose import Assign, grouped
from coterie.errors import TrainingError
from coterie.federation import ClientId, Federation, Order, Reply, Scalar, Slot, Upload, mix
from coterie.grouping import best_k, euclidean, kmeans_up_to
from coterie.method import Count, Method, NonNegative, Round, Setup, State, matrix, method
from coterie.methods.trees import no_more
from coterie.weights import Weights

Matrix = np.ndarray[Any, Any]
Seen = tuple[Tensor, float, int, int]  # gradient, its variance over how many batches, samples
_FLOOR = 1e-3  # of the mean deviation: that of a client with one sample is 0, and it divides
_CONTRAST = 1.5  # gradients at least this far apart, in units of their own noise, to be grouped
softmax = partial(scipy_softmax, axis=1)


@method
def user_centric(
    streams: Count | Literal["auto", "all"] = "all",
    parallel: bool = False,
    variance_batch: Count | None = None,
    penalty: NonNegative = 0.0,
) -> Method:
    """Each client's model is its own weighted mean of all clients' models.

    Rule: once, at θ⁰, each client sends its gradient g_i over all its data and σ_i², the mean
    squared deviation of batch gradients from it. Then w_ij ∝ (n_j/n_i)·exp(−‖g_i−g_j‖²/(2σ_iσ_j)),
    rows summing to 1, and in each round θ_i ← Σ_j w_ij θ_j. With ``streams`` the rows are clustered
    by k-means and the clients of a cluster share its centroid row and one model. With partial
    participation rows are renormalised over those who answered; a model none of whose clients
    answered stays as it is.
    Args:
        streams: how many models the server sends, 1 or more; "all", one for each client; "auto",
            the number with the best silhouette − penalty·k, one when no silhouette is above 0.1
            or when the gradients differ by no more than 1.5 times what sampling noise explains.
        parallel: every client trains every stream (the exact variant; uplink times the streams).
        variance_batch: samples in a batch for σ², 1 or more; a third of the client's when not
            given (the paper takes 100 for label shift). There are always two batches at least.
        penalty: what each further stream must earn in silhouette, with "auto", 0 or more.
    Server sees: each client's gradient at θ⁰, once; then weighted means. With "all" there are as
    many means as clients and their weights are known: every model can be computed from them.
    Travels: 1 model down, 1 up; ``parallel``: as many as streams, both ways. Before the first
    round θ⁰ down and a gradient up.
    Newcomers: send the same two things and get a row of their own ("all") or the stream with the
    nearest row.
    Departs: noise alone can have a silhouette well above 0.1, hence the second condition of "auto".
    σ is floored at 0.001 of the clients' mean, where a client has too few samples. A
    client whose first reply was lost is admitted like a newcomer when its turn comes.
    Reference: Mestoukirdi et al., User-Centric Federated Learning: Trading off Wireless Resources
    for Personalization, IEEE TMLCN 2023.
    """

    def probe(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        client.round = 0  # the same batches whenever it is asked
        start, count = arrays["model"].onto(client.base), len(client.train)
        whole = client.gradient(start)
        parts = 3 if variance_batch is None else round(count / variance_batch)
        batches = client.shuffled("variance").tensor_split(min(max(2, parts), count))
        gaps = [(client.gradient(start, rows) - whole).norm() for rows in batches]
        travels = whole.only(whole.layout.shareable)
        variance = sum(g * g for g in gaps) / len(gaps)
        return Upload({"gradient": travels}, {"variance": variance, "batches": len(gaps)})

    def start(fed: Federation, setup: Setup) -> State:
        seen = asked(fed, setup.start, {}, setup.clients)
        if not seen:
            raise TrainingError("user-centric: no client sent its gradient: nobody can be weighed")
        weights = softmax(log_weights(seen))
        labels: list[int] = list(seen)
        notes: dict[str, Any] = {"clients": list(seen), "mixing": matrix(weights)}
        if streams == "auto":
            best = best_k(weights, penalty=penalty)
            notes |= {"silhouette": dict(best.scores), "contrast": contrast(seen)}
            labels = best.labels.tolist() if notes["contrast"] > _CONTRAST else [0] * len(seen)
        elif streams != "all":
            labels = kmeans_up_to(weights, streams)[0].tolist()
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(labels)), setup.start)
        groups = dict(zip(seen, labels, strict=True))
        memory = {"start": setup.start, "seen": seen, "mixing": rows_of(models, groups, weights)}
        return State(models, groups, memory, {**notes, "streams": len(models)})

    def admit(fed: Federation, state: State, info: Round) -> State:
        seen = asked(fed, state.memory["start"], state.memory["seen"], info.cohort)
        logs, people = log_weights(seen), list(seen)
        known = [i for i, c in enumerate(people) if c in state.groups]
        models, groups = dict(state.models), dict(state.groups)
        for i in [i for i in range(len(people)) if i not in known]:
            row = softmax(logs[[i]][:, known])
            if streams == "all":
                groups[people[i]] = people[i]
                models[people[i]] = blend(row[0], [state.models[people[j]] for j in known])
            else:
                gaps = euclidean(row, state.memory["mixing"].numpy())
                groups[people[i]] = list(models)[int(np.argmin(gaps))]
        mixing = rows_of(models, groups, softmax(logs))
        memory = {**state.memory, "seen": seen, "mixing": mixing}
        return replace(state, models=models, groups=groups, memory=memory)

    def mixes(state: State, client: ClientId) -> Mapping[Slot, float]:
        column = state.memory["mixing"][:, list(state.memory["seen"]).index(client)]
        return dict(zip(state.models, column.tolist(), strict=True))

    check = no_more("user-centric", "streams", streams if isinstance(streams, int) else None)
    rule = Assign(start, admit, False, parallel, mixes, {"probe": probe}, "each", check=check)
    return grouped("user-centric", rule)


def asked(
    fed: Federation, start: Weights, seen: Mapping[ClientId, Seen], clients: Sequence[ClientId]
) -> dict[ClientId, Seen]:
    """What everybody answered, the earlier ones and these, in client-id order."""
    model, found = start.only(start.layout.shareable), dict(seen)
    for reply in fed.gather([Order(c, "probe", {"model": model}) for c in clients]):
        gradient = reply.arrays["gradient"]
        assert isinstance(gradient, Weights)
        found[reply.client] = (
            gradient.parameters,
            reply.metrics["variance"],
            int(reply.metrics["batches"]),
            reply.examples,
        )
    return {c: found[c] for c in sorted(found)}


def log_weights(seen: Mapping[ClientId, Seen]) -> Matrix:
    """log n_j − ‖g_i−g_j‖²/(2σ_iσ_j); what is the same all along a row does not matter."""
    gradients, variances, _, examples = zip(*seen.values(), strict=True)
    deviations = np.sqrt(np.array(variances))
    deviations = np.maximum(deviations, max(_FLOOR * deviations.mean(), 1e-12))
    squares = euclidean(np.stack([g.numpy() for g in gradients])) ** 2
    found: Matrix = np.log(examples)[None] - squares / (2 * np.outer(deviations, deviations))
    return found


def contrast(seen: Mapping[ClientId, Seen]) -> float:
    """How far apart gradients are, squared, over what the clients' own sampling noise explains.

    Clients of one distribution come out near 1: the gradient of a batch, one of b, deviates from
    the client's by b − 1 times the squared deviation of the client's from the truth.
    """
    gradients, variances, batches, _ = zip(*seen.values(), strict=True)
    noise = np.array(variances) / np.maximum(np.array(batches) - 1, 1)
    squares = euclidean(np.stack([g.numpy() for g in gradients])) ** 2
    pairs = np.triu_indices(len(noise), 1)
    explained = (noise[:, None] + noise)[pairs].sum()
    found = squares[pairs].sum()
    if not explained > 0:  # no noise at all: any difference is a real one
        return math.inf if found > 0 else 0.0
    return float(found / explained)


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
