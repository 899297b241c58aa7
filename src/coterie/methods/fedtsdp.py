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

_ALL_STAY = Sharing(no_layer)
KEEPS = "keeps"  # in an order to train: it may be asked for again, on halves of the data
BEGUN = "begun"  # where a client keeps the model that it began this round with
_OFFSET = 1e-6  # what the paper adds to every difference of weights
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
    """Clients cluster by outputs on public data, then by weights, whenever that has a tendency.

    Family: clustered.
    Rule: clients return their whole model and receive the shared layers of their cluster's mean.
    The server runs the models on one batch of public samples. If the Hopkins statistic of the
    outputs is above ``hopkins``, DBSCAN groups clients by the Jensen-Shannon divergence of their
    outputs, and inside each group by the L2 distance of their weights; a client near nobody is a
    cluster of its own. At the defaults a stage takes the groups that hold: everybody trains this
    round's model again, on each half of its data, and the groups are those in which one half's
    answers, or weights, best predict the other's; this is asked for at the first clustering and
    again after twice as many rounds. The batch's samples then become likelier to be drawn again
    and, if the clusters have changed, the number of shared layers is multiplied by ``shrink``.
    Otherwise the clusters stay. Shared are the first layers, at the grain of half a layer (weight,
    then the rest).
    Args:
        stages: both stages, or only the "first" (outputs) or the "second" (weights).
        hopkins: the statistic above which clients are clustered, 0 or more.
        eps_outputs: the first stage: "auto" for groups that predict the other halves of clients'
            data, or DBSCAN's radius (divergence, natural logarithm), above 0; the paper's is 0.15.
        eps_weights: the second stage, alike; the paper's radius is 3.5.
        min_points: DBSCAN's neighbours for a dense point, itself counted, 1 or more.
        shrink: what the number of shared layers is multiplied by, above 0 to 1.
        shrink_at: when that is: at each "change" of the clusters, or at each "clustering", as the
            paper's text has it. Its figure 11 has two steps in 200 rounds, the text's rule makes
            one in nearly every round.
        public_batch: public samples in a round, 1 or more.
        weight_step: what is added to the sampling weight of a batch that showed clusters, 0 or
            more; all public samples over the batch's when not given, as in the paper. That puts
            nearly all weight on the first such batches.
    Server sees: each client's whole model, every round; now and then two more.
    Travels: the shared layers down, 1 model up; 2 more when halves are asked for.
    Newcomers: train θ⁰ for a round and join the cluster whose model answers most like their own on
    public samples; they receive that model whole.
    Departs: the batch size, "auto" and ``shrink_at`` = "change" are ours: with the paper's radii
    nobody was told apart by weights, and most clients were left alone by outputs. The weights'
    distance adds the paper's constant symmetrically. With partial participation those who take part
    are clustered, and the others stay with most of their former cluster.
    Reference: Zhu et al., Federated Two Stage Decoupling With Adaptive Personalization Layers,
    Complex & Intelligent Systems 2024.
    """

    radii: dict[str, float | str] = {"eps_outputs": eps_outputs, "eps_weights": eps_weights}
    radii.pop({"first": "eps_weights", "second": "eps_outputs"}.get(stages, ""), None)
    two = Stages(radii, min_points)

    def init(fed: Federation, setup: Setup) -> State:
        answers(public_of(setup.public), [setup.start], torch.arange(1))  # refuses a regression
        weights = uniform(len(public_of(setup.public).x))
        memory: dict[str, Any] = {"seed": setup.seed, "start": setup.start, "weights": weights}
        memory |= {"layers": float(len(setup.start.layout.layers)), "new": []}
        return State({0: setup.start}, dict.fromkeys(setup.clients, 0), memory)

    def round(fed: Federation, state: State, info: Round) -> State:
        cohort = [c for c in info.cohort if c in state.groups]
        keeps = two.asks and two.due(state.memory, info.number)
        config: dict[str, Scalar] = {KEEPS: True} if keeps else {}
        replies = fed.gather([Order(c, "train", sends(state, c), config) for c in cohort])
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
        memory["tendency"] = max(tendency, memory.get("tendency", 0.0))
        notes = noted(tendency, memory, hopkins)
        if tendency > hopkins and two.due(memory, info.number):
            labels, memory, told = two.looked_for(fed, public, batch, whole, outputs, memory, info)
            if labels:
                groups = followed(state.groups, labels)
                memory["weights"] = likelier(memory["weights"], batch, weight_step)
                if shrink_at == "clustering" or partition(groups) != partition(state.groups):
                    memory["layers"] *= shrink
                notes |= {**told, "samples_in_play": float(1 / memory["weights"].square().sum())}
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

    tasks = {"train": train, "show": show, "halves": train_on_halves}
    return Method(
        "fedtsdp", init, round, sends, tasks, received, admit, sees="each", check=check,
        needs_all_layers="runs whole models on the server in every round", needs_public=True,
        no_step="numbers its clusters anew in every clustering",
        no_noise=NO_NOISE if two.asks else "",
    )  # fmt: skip


def check(setup: Setup) -> None:
    """Refuse to begin without public samples."""
    public_of(setup.public)


def public_of(public: Public | None) -> Public:
    """The public samples, which this method cannot do without."""
    if public is None or not len(public.x):
        raise no_public("fedtsdp")
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


@dataclass(frozen=True)
class Stages:
    """Which stages there are, each with its radius: a number for DBSCAN, or "auto".

    In the server's memory, ``asks`` is the round from which clients are asked again for two models,
    ``spans`` are the distances that were held against each number, ``divided`` says which stages
    ever told clients apart.
    """

    radii: Mapping[str, float | str]
    min_points: int

    def due(self, memory: Mapping[str, Any], number: int) -> bool:
        """Whether clients can be clustered in this round, as to when they are asked."""
        return not self.asks or number >= memory.get("asks", 0)

    @property
    def asks(self) -> bool:
        """Whether any stage needs two models of each client."""
        return "auto" in self.radii.values()

    def looked_for(
        self,
        fed: Federation,
        public: Public,
        batch: Tensor,
        models: Mapping[ClientId, Weights],
        outputs: Matrix,
        memory: Mapping[str, Any],
        info: Round,
    ) -> tuple[dict[ClientId, int], dict[str, Any], dict[str, Any]]:
        """The cluster of each client, nothing if none of them answers; the memory and the notes."""
        people, halves = list(models), Halves()
        if self.asks:
            people, halves = two_of_each(fed, public, batch, memory["start"], people)
            memory = {**memory, "asks": 2 * info.number + 1} if people else memory
        if not people:
            return {}, dict(memory), {}
        rows = [list(models).index(c) for c in people]
        gaps = distances([models[c] for c in people], outputs[rows])
        labels, known, notes = self.clustered(gaps, halves, memory)
        notes |= {"clients": people, "divergence": matrix(gaps["eps_outputs"])}
        return dict(zip(people, labels.tolist(), strict=True)), known, notes

    def clustered(
        self, gaps: Mapping[str, Matrix], halves: Halves, memory: Mapping[str, Any]
    ) -> tuple[Matrix, dict[str, Any], dict[str, Any]]:
        """The clusters after all stages, with what is remembered and noted of them."""
        labels = np.zeros(len(next(iter(gaps.values()))), int)
        counts, seen = dict[str, int](), dict(memory.get("spans", {}))
        divided = set(memory.get("divided", ()))
        for word, eps in self.radii.items():
            before = int(labels.max()) + 1
            if isinstance(eps, str):
                labels = refined(labels, partial(halves.groups, word))
            else:
                seen |= spanned(word, gaps[word], labels, seen)
                labels = refined(labels, partial(near, gaps[word], eps, self.min_points))
            counts[word] = int(labels.max()) + 1
            divided |= {word} if counts[word] > before else set()
        given = {w: e for w, e in self.radii.items() if not isinstance(e, str)}
        warnings = {w: never_between(w, e, seen[w]) for w, e in given.items() if w in seen}
        warnings |= {w: "" if w in divided else never_divided(w) for w in counts if w not in given}
        known = {**memory, "spans": seen, "divided": sorted(divided)}
        return labels, known, {"warning_at_end": {**warnings, "hopkins": ""}, "stages": counts}


@dataclass(frozen=True, eq=False)
class Halves:
    """Two models of each client, each from one half of its data: answers and weights of both."""

    counts: Sequence[int] = ()
    sides: Mapping[str, tuple[Matrix, Matrix]] = field(default_factory=dict)

    def groups(self, word: str, inside: Matrix) -> Matrix:
        """The groups of these clients in which one half predicts the other best."""
        if len(inside) < 2:
            return np.zeros(len(inside), int)
        first, second = (side[inside] for side in self.sides[word])
        return find_evidence(first, second, [self.counts[i] for i in inside]).labels


def never_divided(word: str) -> str:
    """A warning that a stage told nobody apart.

    >>> never_divided("eps_weights")
    'the second stage changed nothing: within clusters, weights are alike'
    """
    stage, what = {"eps_outputs": ("first", "outputs"), "eps_weights": ("second", "weights")}[word]
    inside = "within clusters, " if stage == "second" else ""
    return f"the {stage} stage changed nothing: {inside}{what} are alike"


def distances(models: Iterable[Weights], outputs: Matrix) -> dict[str, Matrix]:
    """How far apart clients are, by what each stage compares."""
    rows = parameters(models)
    return {"eps_outputs": jensen_shannon(outputs), "eps_weights": euclidean(rows, offset=_OFFSET)}


def parameters(models: Iterable[Weights]) -> Matrix:
    """The trained parameters of each model, a row each."""
    return np.stack([w.parameters.numpy() for w in models])


def two_of_each(
    fed: Federation, public: Public, batch: Tensor, base: Weights, clients: Sequence[ClientId]
) -> tuple[list[ClientId], Halves]:
    """Two models of each of these clients who answers and has more than one sample."""
    replies = fed.gather([Order(c, "halves", {}, unhurried=True) for c in clients])
    found = {r.client: r for r in replies if len(r.arrays) == 2}
    if not found:
        return [], Halves()
    sides: dict[str, list[Matrix]] = {"eps_outputs": [], "eps_weights": []}
    for name in ("first", "second"):
        models = [r.arrays[name].onto(base) for r in found.values()]  # type: ignore[union-attr]
        # Between roots of probabilities, squared distances are nearly divergences.
        roots = np.sqrt(answers(public, models, batch))
        sides["eps_outputs"].append(roots.reshape(len(models), -1))
        sides["eps_weights"].append(parameters(models))
    pairs = {word: (first, second) for word, (first, second) in sides.items()}
    return list(found), Halves([r.examples for r in found.values()], pairs)


def likelier(weights: Tensor, batch: Tensor, step: float | None) -> Tensor:
    """Sampling weights with those of a batch raised, by all samples over the batch's at first."""
    raised = weights.clone()
    raised[batch] += len(weights) / len(batch) if step is None else step
    return raised / raised.sum()


def partition(groups: Mapping[ClientId, Slot]) -> set[frozenset[ClientId]]:
    """Who is with whom, whatever the groups are called."""
    members: dict[Slot, set[ClientId]] = {}
    for client, slot in groups.items():
        members.setdefault(slot, set()).add(client)
    return {frozenset(found) for found in members.values()}


def refined(labels: Matrix, divide: Callable[[Matrix], Matrix]) -> Matrix:
    """Each group divided again by itself; ``divide`` gets the positions of its members."""
    found = np.zeros(len(labels), int)
    for group in np.unique(labels):
        inside = np.flatnonzero(labels == group)
        found[inside] = divide(inside) + found.max() + 1
    return canonical(found)


def near(gaps: Matrix, eps: float, min_points: int, inside: Matrix) -> Matrix:
    """DBSCAN of some clients."""
    return dbscan(gaps[np.ix_(inside, inside)], eps, min_points)


def spanned(
    word: str, gaps: Matrix, labels: Matrix, seen: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """The least and the greatest distance within a cluster so far: what a stage compares."""
    compared = gaps[np.triu(labels[:, None] == labels, 1)]
    if not len(compared):
        return {}
    low, high = seen.get(word, (math.inf, -math.inf))
    return {word: (min(low, float(compared.min())), max(high, float(compared.max())))}


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


def noted(tendency: float, memory: Mapping[str, Any], hopkins: float) -> dict[str, Any]:
    """What a round has to show before clients are clustered."""
    warnings = {"hopkins": never_reached(hopkins, memory["tendency"])}
    shared = memory["layers"]
    return {"hopkins": tendency, "shared_layers": shared, "warning_at_end": warnings}


def never_reached(hopkins: float, largest: float) -> str:
    """A warning that clients were never clustered; "" if they were."""
    if largest > hopkins:
        return ""
    return (
        f"hopkins = {hopkins:g} was never reached (largest value {largest:.2f}): clients' outputs "
        "never looked clustered, and all of them share one model"
    )


def followed(
    before: Mapping[ClientId, Slot], present: Mapping[ClientId, int]
) -> dict[ClientId, Slot]:
    """New clusters for those present; an absent client goes where most of its old cluster went.

    A cluster nobody of which is present stays together under a number of its own.
    """
    placed: dict[ClientId, Slot] = dict(with_most(before, present))
    absent = dict.fromkeys(old for client, old in before.items() if client not in placed)
    fresh = {old: max(present.values()) + 1 + i for i, old in enumerate(absent)}
    return {client: placed.get(client, fresh.get(old, 0)) for client, old in before.items()}


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
    begin = received(client, arrays)
    weights = client.fit(begin).weights
    _ALL_STAY.keep(client, weights)
    client.state.pop(BEGUN, None)
    if config.get(KEEPS):
        client.state[BEGUN] = begin.part(_ALL_STAY.staying(begin.layout))
    return Upload({"model": weights.only(weights.layout.shareable)})


def train_on_halves(
    client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]
) -> Upload:
    """Two models: this round's training again, on each half of one's data; none of one sample."""
    rows, kept = client.shuffled("halves"), client.kept(BEGUN)
    client.state.pop(BEGUN, None)
    own = client.base if kept is None else kept.onto(client.base)
    steps, found = client.steps(), dict[str, Array]()
    for name, half in zip(("first", "second"), rows.tensor_split(2), strict=True):
        if len(half) and len(rows) > 1:
            stream = f"halves {name}"
            weights = client.fit(own, stream=stream, rows=half, epochs=1, steps=steps).weights
            found[name] = weights.only(weights.layout.shareable)
    return Upload(found)


def show(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """A newcomer's model after a round of training from θ⁰, kept by nobody."""
    weights = client.fit(arrays["model"].onto(client.base), stream="show").weights
    return Upload({"model": weights.only(weights.layout.shareable)})
