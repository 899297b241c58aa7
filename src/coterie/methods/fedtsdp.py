"""FedTSDP: two stages of clustering, by outputs and by weights, and personal layers that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client
from coterie.clustering import (
    canonical,
    dbscan,
    euclidean,
    find_evidence,
    jensen_shannon,
    with_most,
)
from coterie.clustering import hopkins as statistic
from coterie.compose.sharing import Sharing, no_layer
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Order, Scalar, Slot, Upload
from coterie.core.method import (
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
    no_public,
)
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError
from coterie.methods.by_evidence import NO_NOISE
from coterie.seeds import numpy_generator, seed_for

_NOTHING_SHARED = Sharing(no_layer)
MAY_HALVE = "keeps"  # in an order to train: the client may have to train again, on two halves
ROUND_START = "begun"  # the key under which a client keeps the model it began this round with
_OFFSET = 1e-6  # the constant that the paper adds to every difference of weights
Matrix = np.ndarray[Any, Any]


@method
def fedtsdp(
    stages: Literal["both", "first", "second"] = "both",
    hopkins: NonNegative = 0.65,
    eps_outputs: Literal["auto"] | Positive = "auto",
    eps_weights: Literal["auto"] | Positive = "auto",
    min_points: Count = 2,
    shrink: AboveZeroToOne = 0.98,
    shrink_at: Literal["change", "clustering"] = "change",
    public_batch: Count = 50,
    weight_step: NonNegative | None = None,
) -> Method:
    """Clusters clients by outputs on public data, then by weights, when outputs tend to cluster.

    Family: clustered.
    Rule: clients send their whole model and receive the shared layers of their cluster's mean. The
    server runs the models on one batch of public samples. If the Hopkins statistic of the outputs
    is above ``hopkins``, DBSCAN groups clients by the Jensen-Shannon divergence of their outputs
    and then, inside each group, by the L2 distance of their weights; a client near no other is a
    cluster of its own. By default, a stage takes the groups that the evidence finds: the clients
    repeat this round's training on each half of their data, and the groups are those whose mean
    outputs (or weights) on one half best predict those on the other. This happens at the first
    clustering, and again after twice as many rounds. Whenever clients are clustered, the samples of
    the batch become more likely to be drawn again, and if the clusters have changed, the number of
    shared layers is multiplied by ``shrink``. Otherwise the clusters stay. The shared layers are
    the first ones, counted in half layers (a layer's weight, then its other tensors).
    Args:
        stages: "both" stages, or only the "first" (outputs) or the "second" (weights).
        hopkins: the value of the statistic above which clients are clustered, 0 or more.
        eps_outputs: the first stage: "auto" for the groups that best predict the other halves of
            the clients' data, or the radius of DBSCAN (a divergence with natural logarithm), above
            0; the paper's is 0.15.
        eps_weights: the same for the second stage; the paper's radius is 3.5.
        min_points: how many neighbours, itself included, make a point dense for DBSCAN, 1 or more.
        shrink: the factor by which the number of shared layers shrinks, above 0 to 1.
        shrink_at: when it shrinks: at each "change" of the clusters, or at each "clustering", as in
            the paper's text. The paper's figure 11 has two steps in 200 rounds; by its text, nearly
            every round is one.
        public_batch: public samples in a round, 1 or more.
        weight_step: what is added to the sampling weights of a batch that showed clusters, 0 or
            more; when not given, the number of public samples divided by the batch size, as in the
            paper. This puts nearly all weight on the first such batches.
    Server sees: each client's whole model, every round; in some rounds two more.
    Travels: the shared layers down, 1 model up; 2 more up when halves are compared.
    Newcomers: train θ⁰ for a round and join the cluster whose model has the most similar outputs on
    public samples; they receive that model whole.
    Departs: the batch size, "auto" and ``shrink_at`` = "change" are not from the paper: with the
    paper's radii, weights separated no clients, and by outputs most clients were alone. The
    constant in the paper's distance of weights is added symmetrically. With partial participation,
    the clients that take part are clustered, and the others stay with most of their former cluster.
    Reference: Zhu et al., Federated Two Stage Decoupling With Adaptive Personalization Layers,
    Complex & Intelligent Systems 2024.
    """

    radii: dict[str, float | str] = {"eps_outputs": eps_outputs, "eps_weights": eps_weights}
    radii.pop({"first": "eps_weights", "second": "eps_outputs"}.get(stages, ""), None)
    rule = ClusteringStages(radii, min_points)

    def init(fed: Federation, setup: Setup) -> State:
        answers(public_of(setup.public), [setup.start], torch.arange(1))  # refuses a regression
        weights = uniform(len(public_of(setup.public).x))
        memory: dict[str, Any] = {"seed": setup.seed, "start": setup.start, "weights": weights}
        memory |= {"layers": float(len(setup.start.layout.layers)), "new": []}
        return State({0: setup.start}, dict.fromkeys(setup.clients, 0), memory)

    def round(fed: Federation, state: State, info: Round) -> State:
        cohort = [c for c in info.cohort if c in state.groups]
        may_halve = rule.asks and rule.due(state.memory, info.number)
        config: dict[str, Scalar] = {MAY_HALVE: True} if may_halve else {}
        replies = fed.gather([Order(c, "train", sends(state, c), config) for c in cohort])
        if not replies:
            return state
        memory, public = dict(state.memory), public_of(info.public)
        memory["new"] = [c for c in memory["new"] if c not in {r.client for r in replies}]
        base = state.memory["start"]
        sent = {r.client: r.arrays["model"].onto(base) for r in replies}  # type: ignore[union-attr]
        batch = drawn(memory, info.number, public_batch)
        outputs = answers(public, list(sent.values()), batch)
        generator = numpy_generator(seed_for(memory["seed"], "hopkins", info.number))
        tendency = statistic(outputs.reshape(len(outputs), -1), generator)
        groups = dict(state.groups)
        memory["tendency"] = max(tendency, memory.get("tendency", 0.0))
        notes = noted(tendency, memory, hopkins)
        if tendency > hopkins and rule.due(memory, info.number):
            labels, memory, details = rule.cluster(fed, public, batch, sent, outputs, memory, info)
            if labels:
                groups = followed(state.groups, labels)
                memory["weights"] = likelier(memory["weights"], batch, weight_step)
                if shrink_at == "clustering" or partition(groups) != partition(state.groups):
                    memory["layers"] *= shrink
                notes |= {**details, "samples_in_play": float(1 / memory["weights"].square().sum())}
        means = fed.average(replies, {c: {s: 1.0} for c, s in groups.items()})
        models = {s: m.arrays["model"].onto(base) for s, m in means.items()}  # type: ignore[union-attr]
        for c, slot in groups.items():  # a cluster of absent clients keeps its model
            models.setdefault(slot, state.models[state.groups[c]])
        return State(models, groups, memory, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        public, base = public_of(info.public), state.memory["start"]
        offer = Sharing().offer({"model": base}, ["model"])
        replies = fed.gather([Order(c, "show", offer) for c in info.cohort])
        if not replies:
            return state
        batch = drawn(state.memory, info.number, public_batch)
        newcomers = [r.arrays["model"].onto(base) for r in replies]  # type: ignore[union-attr]
        outputs = [answers(public, m, batch) for m in (newcomers, list(state.models.values()))]
        divergences = jensen_shannon(*outputs)
        slots = [list(state.models)[g] for g in divergences.argmin(axis=1)]
        slot_of = dict(zip([r.client for r in replies], slots, strict=True))
        return state.joined(slot_of, new=sorted({*state.memory["new"], *slot_of}))

    tasks = {"train": train, "show": show, "halves": train_on_halves}
    return Method(
        "fedtsdp", init, round, sends, tasks, received, admit, sees="each", check=check,
        needs_all_layers="runs whole models on the server in every round", needs_public=True,
        no_step="renumbers its clusters in every clustering",
        no_noise=NO_NOISE if rule.asks else "",
    )  # fmt: skip


def check(setup: Setup) -> None:
    """Refuse to begin without public samples."""
    public_of(setup.public)


def public_of(public: Public | None) -> Public:
    """The public samples, or an error if there are none."""
    if public is None or not len(public.x):
        raise no_public("fedtsdp")
    return public


def uniform(count: int) -> Tensor:
    """Equal sampling weights."""
    return torch.full((count,), 1 / count, dtype=torch.float64)


def drawn(memory: Mapping[str, Any], round: int, size: int) -> Tensor:
    """Draw the round's batch of public samples by their sampling weights."""
    weights = memory["weights"].numpy()
    generator = numpy_generator(seed_for(memory["seed"], "public-batch", round))
    count = min(size, int(np.count_nonzero(weights)))
    return torch.from_numpy(
        np.sort(generator.choice(len(weights), count, replace=False, p=weights))
    )


def answers(public: Public, models: Sequence[Weights], batch: Tensor) -> Matrix:
    """Each model's probabilities on the batch: clients × samples × classes."""
    x = public.x[batch]
    outputs = [public.outputs(m, x).double().softmax(-1).numpy() for m in models]
    if outputs[0].ndim != 2 or outputs[0].shape[1] < 2:
        raise ConfigError("method fedtsdp needs classes: it compares the probabilities of classes")
    return np.stack(outputs)


@dataclass(frozen=True)
class ClusteringStages:
    """The stages of the clustering, each with its radius: a number for DBSCAN, or "auto".

    In the server's memory, ``asks`` is the round from which clients may be asked again to train on
    halves, ``spans`` has the range of distances that each radius was compared with, and ``divided``
    has the stages that have ever separated clients.
    """

    radii: Mapping[str, float | str]
    min_points: int

    def due(self, memory: Mapping[str, Any], number: int) -> bool:
        """Whether clients can be clustered in this round: with "auto", only in some rounds."""
        return not self.asks or number >= memory.get("asks", 0)

    @property
    def asks(self) -> bool:
        """Whether a stage needs two models of each client."""
        return "auto" in self.radii.values()

    def cluster(
        self,
        fed: Federation,
        public: Public,
        batch: Tensor,
        models: Mapping[ClientId, Weights],
        outputs: Matrix,
        memory: Mapping[str, Any],
        info: Round,
    ) -> tuple[dict[ClientId, int], dict[str, Any], dict[str, Any]]:
        """The cluster of each client (empty if no client answers), the memory and the notes."""
        clients, halves = list(models), Halves()
        if self.asks:
            clients, halves = two_of_each(fed, public, batch, memory["start"], clients)
            memory = {**memory, "asks": 2 * info.number + 1} if clients else memory
        if not clients:
            return {}, dict(memory), {}
        rows = [list(models).index(c) for c in clients]
        compared = distances([models[c] for c in clients], outputs[rows])
        labels, memory, notes = self.clustered(compared, halves, memory)
        notes |= {"clients": clients, "divergence": matrix(compared["eps_outputs"])}
        return dict(zip(clients, labels.tolist(), strict=True)), memory, notes

    def clustered(
        self, compared: Mapping[str, Matrix], halves: Halves, memory: Mapping[str, Any]
    ) -> tuple[Matrix, dict[str, Any], dict[str, Any]]:
        """The clusters after all stages, with the new memory and the notes."""
        labels = np.zeros(len(next(iter(compared.values()))), int)
        counts, spans = dict[str, int](), dict(memory.get("spans", {}))
        divided = set(memory.get("divided", ()))
        for word, eps in self.radii.items():
            before = int(labels.max()) + 1
            if isinstance(eps, str):
                labels = refined(labels, partial(halves.groups, word))
            else:
                spans |= spanned(word, compared[word], labels, spans)
                labels = refined(labels, partial(near, compared[word], eps, self.min_points))
            counts[word] = int(labels.max()) + 1
            divided |= {word} if counts[word] > before else set()
        fixed = {w: e for w, e in self.radii.items() if not isinstance(e, str)}
        warnings = {w: never_between(w, e, spans[w]) for w, e in fixed.items() if w in spans}
        warnings |= {w: "" if w in divided else never_divided(w) for w in counts if w not in fixed}
        remembered = {**memory, "spans": spans, "divided": sorted(divided)}
        return labels, remembered, {"warning_at_end": {**warnings, "hopkins": ""}, "stages": counts}


@dataclass(frozen=True, eq=False)
class Halves:
    """Two models of each client, one from each half of its data: their outputs and weights."""

    counts: Sequence[int] = ()
    sides: Mapping[str, tuple[Matrix, Matrix]] = field(default_factory=dict)

    def groups(self, word: str, inside: Matrix) -> Matrix:
        """The groups of these clients in which one half best predicts the other."""
        if len(inside) < 2:
            return np.zeros(len(inside), int)
        first, second = (side[inside] for side in self.sides[word])
        return find_evidence(first, second, [self.counts[i] for i in inside]).labels


def never_divided(word: str) -> str:
    """A warning that a stage separated no clients.

    >>> never_divided("eps_weights")
    'the second stage changed nothing: within clusters, weights are alike'
    """
    stage, what = {"eps_outputs": ("first", "outputs"), "eps_weights": ("second", "weights")}[word]
    inside = "within clusters, " if stage == "second" else ""
    return f"the {stage} stage changed nothing: {inside}{what} are alike"


def distances(models: Iterable[Weights], outputs: Matrix) -> dict[str, Matrix]:
    """The distances between clients, by what each stage compares."""
    rows = parameters(models)
    return {"eps_outputs": jensen_shannon(outputs), "eps_weights": euclidean(rows, offset=_OFFSET)}


def parameters(models: Iterable[Weights]) -> Matrix:
    """The trained parameters of each model, one row per model."""
    return np.stack([w.parameters.numpy() for w in models])


def two_of_each(
    fed: Federation, public: Public, batch: Tensor, base: Weights, clients: Sequence[ClientId]
) -> tuple[list[ClientId], Halves]:
    """Two models of each of these clients that answers and has more than one sample."""
    replies = fed.gather([Order(c, "halves", {}, unhurried=True) for c in clients])
    reply_of = {r.client: r for r in replies if len(r.arrays) == 2}
    if not reply_of:
        return [], Halves()
    sides: dict[str, list[Matrix]] = {"eps_outputs": [], "eps_weights": []}
    for name in ("first", "second"):
        models = [r.arrays[name].onto(base) for r in reply_of.values()]  # type: ignore[union-attr]
        # Squared distances between the roots of probabilities are close to divergences.
        roots = np.sqrt(answers(public, models, batch))
        sides["eps_outputs"].append(roots.reshape(len(models), -1))
        sides["eps_weights"].append(parameters(models))
    pairs = {word: (first, second) for word, (first, second) in sides.items()}
    return list(reply_of), Halves([r.examples for r in reply_of.values()], pairs)


def likelier(weights: Tensor, batch: Tensor, step: float | None) -> Tensor:
    """The sampling weights, with those of a batch raised by ``step``.

    When not given, the step is the number of all samples divided by the batch size.
    """
    raised = weights.clone()
    raised[batch] += len(weights) / len(batch) if step is None else step
    return raised / raised.sum()


def partition(groups: Mapping[ClientId, Slot]) -> set[frozenset[ClientId]]:
    """The groups as sets of clients, whatever the groups are called."""
    members: dict[Slot, set[ClientId]] = {}
    for client, slot in groups.items():
        members.setdefault(slot, set()).add(client)
    return {frozenset(clients) for clients in members.values()}


def refined(labels: Matrix, divide: Callable[[Matrix], Matrix]) -> Matrix:
    """Divide each group separately; ``divide`` gets the positions of its members."""
    divided = np.zeros(len(labels), int)
    for group in np.unique(labels):
        inside = np.flatnonzero(labels == group)
        divided[inside] = divide(inside) + divided.max() + 1
    return canonical(divided)


def near(compared: Matrix, eps: float, min_points: int, inside: Matrix) -> Matrix:
    """DBSCAN of some of the clients."""
    return dbscan(compared[np.ix_(inside, inside)], eps, min_points)


def spanned(
    word: str, compared: Matrix, labels: Matrix, spans: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """The smallest and largest distance that a stage has compared within clusters so far."""
    within = compared[np.triu(labels[:, None] == labels, 1)]
    if not len(within):
        return {}
    low, high = spans.get(word, (math.inf, -math.inf))
    return {word: (min(low, float(within.min())), max(high, float(within.max())))}


def never_between(word: str, eps: float, span: tuple[float, float]) -> str:
    """A warning that all distances were on one side of a radius; "" if they were not.

    >>> never_between("eps_weights", 3.5, (0.2, 1.5))
    'eps_weights = 3.5 had no effect: the largest distance was 1.5, so it separated no clients'
    """
    low, high = span
    if high <= eps:
        return (
            f"{word} = {eps:g} had no effect: the largest distance was {high:.3g}, so it separated "
            "no clients"
        )
    if low > eps:
        return (
            f"{word} = {eps:g} was too small: the smallest distance was {low:.3g}, so every client "
            "was alone in its cluster"
        )
    return ""


def noted(tendency: float, memory: Mapping[str, Any], hopkins: float) -> dict[str, Any]:
    """The notes of a round before clients are clustered."""
    warnings = {"hopkins": never_reached(hopkins, memory["tendency"])}
    shared = memory["layers"]
    return {"hopkins": tendency, "shared_layers": shared, "warning_at_end": warnings}


def never_reached(hopkins: float, largest: float) -> str:
    """A warning that clients were never clustered; "" if they were."""
    if largest > hopkins:
        return ""
    return (
        f"hopkins = {hopkins:g} was never reached (largest value {largest:.2f}): the clients' "
        "outputs never looked clustered, and all clients share one model"
    )


def followed(
    before: Mapping[ClientId, Slot], present: Mapping[ClientId, int]
) -> dict[ClientId, Slot]:
    """The new clusters; an absent client joins the one to which most of its old cluster moved.

    A cluster of which no client is present stays together under a new number.
    """
    placed: dict[ClientId, Slot] = dict(with_most(before, present))
    absent = dict.fromkeys(old for client, old in before.items() if client not in placed)
    fresh = {old: max(present.values()) + 1 + i for i, old in enumerate(absent)}
    return {client: placed.get(client, fresh.get(old, 0)) for client, old in before.items()}


def first_tensors(layout: Layout, layers: float) -> list[str]:
    """The tensors of the first layers, rounded to half layers (a weight, then the rest)."""
    names: list[str] = []
    halves = math.floor(2 * layers + 0.5)
    for number, layer in enumerate(layout.layers):
        entries = sorted((e for e in layout.entries if e.layer == layer), key=lambda e: e.place)
        if 2 * number < halves:
            names += [e.name for e in entries[:1]]
        if 2 * number + 1 < halves:
            names += [e.name for e in entries[1:]]
    return names


def sends(state: State, client: ClientId) -> Mapping[str, Array]:
    """The shared layers of the cluster's model; the whole model for a newcomer."""
    if client not in state.groups:
        return {}
    model = state.models[state.groups[client]]
    layers = math.inf if client in state.memory["new"] else state.memory["layers"]
    return Sharing(
        lambda layout: layout.names if layers == math.inf else first_tensors(layout, layers)
    ).offer({"model": model}, ["model"])


def received(client: Client, arrays: Mapping[str, Array]) -> Weights:
    """The client's own model with the received layers put into it."""
    return _NOTHING_SHARED.received(client, arrays)[1]


def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the received layers with the client's own; keep the model, and send what is shared."""
    begin = received(client, arrays)
    weights = client.fit(begin).weights
    _NOTHING_SHARED.keep(client, weights)
    client.state.pop(ROUND_START, None)
    if config.get(MAY_HALVE):
        client.state[ROUND_START] = begin.part(_NOTHING_SHARED.staying(begin.layout))
    return Upload({"model": weights.only(weights.layout.shareable)})


def train_on_halves(
    client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]
) -> Upload:
    """Two models: this round's training repeated on each half of the data; none with one sample."""
    rows, kept = client.shuffled("halves"), client.kept(ROUND_START)
    client.state.pop(ROUND_START, None)
    begin = client.base if kept is None else kept.onto(client.base)
    steps, models = client.steps(), dict[str, Array]()
    for name, half in zip(("first", "second"), rows.tensor_split(2), strict=True):
        if len(half) and len(rows) > 1:
            stream = f"halves {name}"
            weights = client.fit(begin, stream=stream, rows=half, epochs=1, steps=steps).weights
            models[name] = weights.only(weights.layout.shareable)
    return Upload(models)


def show(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """A newcomer's model after a round of training from θ⁰; it is not kept."""
    weights = client.fit(arrays["model"].onto(client.base), stream="show").weights
    return Upload({"model": weights.only(weights.layout.shareable)})
