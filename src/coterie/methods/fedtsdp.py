"""FedTSDP: two stages of clustering, by outputs and by weights, and personal layers that grow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client
from coterie.compose import Sharing, no_layer
from coterie.errors import ConfigError
from coterie.federation import Array, ClientId, Federation, Order, Scalar, Slot, Upload
from coterie.grouping import canonical, dbscan, euclidean, jensen_shannon
from coterie.grouping import hopkins as statistic
from coterie.method import (
    AboveZeroToOne,
    Count,
    Method,
    NonNegative,
    Positive,
    Public,
    Round,
    Setup,
    State,
    matrix,
    method,
)
from coterie.seeds import numpy_generator, seed_for
from coterie.weights import Layout, Weights

_ALL_STAY = Sharing(no_layer)
_OFFSET = 1e-6  # what the paper adds to every difference of weights
Matrix = np.ndarray[Any, Any]


@method
def fedtsdp(
    stages: Literal["both", "first", "second"] = "both",
    hopkins: NonNegative = 0.65,
    eps_outputs: Positive = 0.15,
    eps_weights: Positive = 3.5,
    min_points: Count = 2,
    shrink: AboveZeroToOne = 0.98,
    public_batch: Count = 50,
    weight_step: NonNegative | None = None,
) -> Method:
    """Clients cluster by outputs on public data, then by weights, whenever that has a tendency.

    Rule: clients return their whole model and receive the shared layers of their cluster's mean.
    The server runs the models on one batch of public samples. If the Hopkins statistic of the
    outputs is above ``hopkins``, DBSCAN groups clients by the Jensen-Shannon divergence of their
    outputs, and inside each group by the L2 distance of their weights; a client near nobody is a
    cluster of its own. The batch's samples then become likelier to be drawn again and the number of
    shared layers is multiplied by ``shrink``. Otherwise the clusters stay. Shared are the first
    layers, at the grain of half a layer (weight, then the rest).
    Args:
        stages: both stages, or only the "first" (outputs) or the "second" (weights).
        hopkins: the statistic above which clients are clustered, 0 or more.
        eps_outputs: DBSCAN's radius in the first stage (divergence, natural logarithm), above 0.
        eps_weights: DBSCAN's radius in the second stage, above 0.
        min_points: DBSCAN's neighbours for a dense point, itself counted, 1 or more.
        shrink: what the number of shared layers is multiplied by at each clustering, above 0 to 1.
        public_batch: public samples in a round, 1 or more.
        weight_step: what is added to the sampling weight of a batch that showed clusters, 0 or
            more; all public samples over the batch's when not given, as in the paper. That puts
            nearly all weight on the first such batches.
    Server sees: each client's whole model, every round.
    Travels: the shared layers down, 1 model up.
    Newcomers: train θ⁰ for a round and join the cluster whose model answers most like their own on
    public samples; they receive that model whole.
    Departs: the batch size is ours. The weights' distance adds the paper's constant symmetrically.
    With partial participation those who take part are clustered, and the others stay with most of
    their former cluster.
    Reference: Zhu et al., Federated Two Stage Decoupling With Adaptive Personalization Layers,
    Complex & Intelligent Systems 2024.
    """

    radii = {"eps_outputs": eps_outputs, "eps_weights": eps_weights}
    radii.pop({"first": "eps_weights", "second": "eps_outputs"}.get(stages, ""), None)

    def init(fed: Federation, setup: Setup) -> State:
        answers(public_of(setup.public), [setup.start], torch.arange(1))  # refuses a regression
        weights = uniform(len(public_of(setup.public).x))
        memory: dict[str, Any] = {"seed": setup.seed, "start": setup.start, "weights": weights}
        memory |= {"layers": float(len(setup.start.layout.layers)), "new": []}
        return State({0: setup.start}, dict.fromkeys(setup.clients, 0), memory)

    def round(fed: Federation, state: State, info: Round) -> State:
        cohort = [c for c in info.cohort if c in state.groups]
        replies = fed.gather([Order(c, "train", sends(state, c)) for c in cohort])
        if not replies:
            return state
        memory, public = dict(state.memory), public_of(info.public)
        memory["new"] = [c for c in memory["new"] if c not in {r.client for r in replies}]
        base = state.memory["start"]
        whole = {r.client: r.arrays["model"].onto(base) for r in replies}  # type: ignore[union-attr]
        batch = drawn(memory, info.number, public_batch)
        outputs = answers(public, list(whole.values()), batch)
        generator = numpy_generator(seed_for(memory["seed"], "hopkins", info.number))
        tendency = statistic(outputs.reshape(len(outputs), -1), generator)
        groups = dict(state.groups)
        notes: dict[str, Any] = {"hopkins": tendency, "shared_layers": memory["layers"]}
        if tendency > hopkins:
            rows, divergence = parameters(whole), jensen_shannon(outputs)
            gaps = {"eps_outputs": divergence, "eps_weights": euclidean(rows, offset=_OFFSET)}
            labels, memory["spans"] = staged(gaps, radii, min_points, memory.get("spans", {}))
            groups = followed(state.groups, dict(zip(whole, labels.tolist(), strict=True)))
            weights = memory["weights"].clone()
            weights[batch] += len(weights) / len(batch) if weight_step is None else weight_step
            memory |= {"weights": weights / weights.sum(), "layers": memory["layers"] * shrink}
            notes["warning_at_end"] = never_bound(radii, memory["spans"])
            notes |= {"clients": list(whole), "divergence": matrix(divergence)}
            notes["samples_in_play"] = float(1 / memory["weights"].square().sum())
        means = fed.average(replies, {c: {s: 1.0} for c, s in groups.items()})
        models = {s: m.arrays["model"].onto(base) for s, m in means.items()}  # type: ignore[union-attr]
        for c, slot in groups.items():  # a cluster of absent clients keeps the model it had
            models.setdefault(slot, state.models[state.groups[c]])
        return State(models, groups, memory, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        public, base = public_of(info.public), state.memory["start"]
        offer = Sharing().offer({"model": base}, ["model"])
        replies = fed.gather([Order(c, "show", offer) for c in info.cohort])
        if not replies:
            return state
        batch = drawn(state.memory, info.number, public_batch)
        theirs = [r.arrays["model"].onto(base) for r in replies]  # type: ignore[union-attr]
        both = [answers(public, m, batch) for m in (theirs, list(state.models.values()))]
        gaps = jensen_shannon(*both)
        places = [list(state.models)[g] for g in gaps.argmin(axis=1)]
        joined = dict(zip([r.client for r in replies], places, strict=True))
        return state.joined(joined, new=sorted({*state.memory["new"], *joined}))

    tasks = {"train": train, "show": show}
    return Method(
        "fedtsdp", init, round, sends, tasks, received, admit, sees="each", check=check,
        needs_all_layers="runs whole models on the server in every round",
        no_step="numbers its clusters anew in every clustering",
    )  # fmt: skip


def check(setup: Setup) -> None:
    """Refuse to begin without public samples."""
    public_of(setup.public)


def public_of(public: Public | None) -> Public:
    """The public samples, which this method cannot do without."""
    if public is None or not len(public.x):
        raise ConfigError(
            "method fedtsdp needs public samples to run models on: set data.public (--set "
            "data.public=1000), or give simulate a population with public samples"
        )
    return public


def uniform(count: int) -> Tensor:
    """Equal sampling weights."""
    return torch.full((count,), 1 / count, dtype=torch.float64)


def drawn(memory: Mapping[str, Any], round: int, size: int) -> Tensor:
    """The round's batch of public samples, by their sampling weights."""
    weights = memory["weights"].numpy()
    generator = numpy_generator(seed_for(memory["seed"], "public-batch", round))
    count = min(size, int(np.count_nonzero(weights)))
    return torch.from_numpy(
        np.sort(generator.choice(len(weights), count, replace=False, p=weights))
    )


def answers(public: Public, models: Sequence[Weights], batch: Tensor) -> Matrix:
    """Each model's probabilities on the batch: clients × samples × classes."""
    x = public.x[batch]
    found = [public.outputs(m, x).double().softmax(-1).numpy() for m in models]
    if found[0].ndim != 2 or found[0].shape[1] < 2:
        raise ConfigError("method fedtsdp needs classes: it compares the probabilities of answers")
    return np.stack(found)


def parameters(models: Mapping[ClientId, Weights]) -> Matrix:
    """The trained parameters of each model, a row each."""
    return np.stack([w.parameters.numpy() for w in models.values()])


def refined(labels: Matrix, distances: Matrix, eps: float, min_points: int) -> Matrix:
    """Each group clustered again by itself."""
    found = np.zeros(len(labels), int)
    for group in np.unique(labels):
        inside = np.flatnonzero(labels == group)
        parts = dbscan(distances[np.ix_(inside, inside)], eps, min_points)
        found[inside] = parts + found.max() + 1
    return canonical(found)


def staged(
    gaps: Mapping[str, Matrix],
    radii: Mapping[str, float],
    min_points: int,
    spans: Mapping[str, tuple[float, float]],
) -> tuple[Matrix, dict[str, tuple[float, float]]]:
    """The clusters after one stage for each radius, and the span of distances held against each.

    A stage compares the clients of one cluster of the stage before it.
    """
    seen, labels = dict(spans), np.zeros(len(next(iter(gaps.values()))), int)
    for word, eps in radii.items():
        compared = gaps[word][np.triu(labels[:, None] == labels, 1)]
        if len(compared):
            low, high = seen.get(word, (math.inf, -math.inf))
            seen[word] = min(low, float(compared.min())), max(high, float(compared.max()))
        labels = refined(labels, gaps[word], eps, min_points)
    return labels, seen


def never_bound(
    radii: Mapping[str, float], spans: Mapping[str, tuple[float, float]]
) -> dict[str, str]:
    """What there is to say of each radius, should this be the last clustering."""
    return {word: never_between(word, radii[word], span) for word, span in spans.items()}


def never_between(word: str, eps: float, span: tuple[float, float]) -> str:
    """A warning that all distances were on one side of a radius; "" if they were not.

    >>> never_between("eps_weights", 3.5, (0.2, 1.5))
    'eps_weights = 3.5 never bound: the largest distance was 1.5, so nobody was told apart by it'
    """
    low, high = span
    if high <= eps:
        return (
            f"{word} = {eps:g} never bound: the largest distance was {high:.3g}, so nobody was "
            "told apart by it"
        )
    if low > eps:
        return (
            f"{word} = {eps:g} never bound: the smallest distance was {low:.3g}, so everybody was "
            "left alone by it"
        )
    return ""


def followed(
    before: Mapping[ClientId, Slot], present: Mapping[ClientId, int]
) -> dict[ClientId, Slot]:
    """New clusters for those present; an absent client goes where most of its old cluster went.

    A cluster nobody of which is present stays together under a number of its own.
    """
    found: dict[ClientId, Slot] = {}
    fresh: dict[Slot, int] = {}
    for client, old in before.items():
        went = Counter(present[c] for c in present if before[c] == old)
        if client in present:
            found[client] = present[client]
        elif went:
            found[client] = min(went, key=lambda g: (-went[g], g))
        else:
            found[client] = fresh.setdefault(old, max(present.values()) + 1 + len(fresh))
    return found


def first_tensors(layout: Layout, layers: float) -> list[str]:
    """The tensors of the first layers, a fraction rounded to half layers: weight, then the rest."""
    names: list[str] = []
    halves = math.floor(2 * layers + 0.5)
    for number, layer in enumerate(layout.layers):
        own = sorted((e for e in layout.entries if e.layer == layer), key=lambda e: e.place)
        if 2 * number < halves:
            names += [e.name for e in own[:1]]
        if 2 * number + 1 < halves:
            names += [e.name for e in own[1:]]
    return names


def sends(state: State, client: ClientId) -> Mapping[str, Array]:
    """The shared layers of the cluster's model; all of it to one who has just come."""
    if client not in state.groups:
        return {}
    model = state.models[state.groups[client]]
    layers = math.inf if client in state.memory["new"] else state.memory["layers"]
    return Sharing(
        lambda layout: layout.names if layers == math.inf else first_tensors(layout, layers)
    ).offer({"model": model}, ["model"])


def received(client: Client, arrays: Mapping[str, Array]) -> Weights:
    """What came, over the client's own."""
    return _ALL_STAY.received(client, arrays)[1]


def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train what was received over one's own layers; keep all of it and send all that may go."""
    weights = client.fit(received(client, arrays)).weights
    _ALL_STAY.keep(client, weights)
    return Upload({"model": weights.only(weights.layout.shareable)})


def show(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """A newcomer's model after a round of training from θ⁰, kept by nobody."""
    weights = client.fit(arrays["model"].onto(client.base), stream="show").weights
    return Upload({"model": weights.only(weights.layout.shareable)})
