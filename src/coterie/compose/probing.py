"""Probes: exchanges in which each client represents itself twice, by two halves of its data.

A probe provides the input of the evidence for groups (``clustering.evidence``). Usually, all
clients train the same model for the same number of steps on each half, and their changes of the
model are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client, Task
from coterie.client.fit import decode
from coterie.clustering import (
    SAMPLE,
    Evidence,
    basis,
    euclidean,
    find_evidence,
    find_evidence_in_products,
    one_thread,
    too_few,
)
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Order, Reply, Scalar, Upload
from coterie.core.tree import Tree
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError, TrainingError

Matrix = np.ndarray[Any, Any]
By = Literal["final-layer", "model", "gradient", "labels", "data"]
View = Callable[[Weights], Matrix]  # what the server compares of a client's model
STEPS = (25, 50, 100, 200, 300)
FALLEN = 0.2  # of the initial loss: below this, training has shown what is typical of a client
TOO_SHORT = (
    "too little training to tell: after {steps} steps the loss of most clients is still above a "
    "fifth of its initial value. Choose another learning rate (train.lr): usually a higher one, or "
    "a lower one if losses grow"
)
KEPT = "probe"  # the client state that holds the model to train
HALVES = ("first", "second")
MOST_BY_LAYER = 100  # the most clients whose distances are recorded for each layer
SKETCH = 4096  # the length that longer directions are reduced to, for assigning newcomers
_ROUNDING = float(np.finfo(np.float32).eps)  # of inputs and uploads, which are float32


class NobodyAnswered(TrainingError):
    """No client answered a probe."""


@dataclass(frozen=True)
class Probe:
    """What each client sends as a representation of itself, so that clients can be compared.

    ``by`` is what is compared: the change of the "final-layer" or of the whole "model" after some
    local steps, the "gradient" at the start, the frequencies of "labels", or the subspace of the
    inputs ("data"). ``steps`` is the number of local steps; with "auto", clients are first asked
    after how many steps their loss has fallen to a fifth. ``epochs`` replaces it by a number of
    epochs. With ``fallback``, the change of the whole model is requested if the final layers show
    no groups, and the final layers are compared if whole models show none. ``vectors`` is the
    largest dimension of a subspace. A different ``draw`` splits the data into different halves.
    """

    by: By = "final-layer"
    steps: int | Literal["auto"] = "auto"
    epochs: int | None = None
    fallback: bool = True
    vectors: int = 3
    draw: int = 0

    @property
    def trains(self) -> bool:
        """Whether clients train a model for the probe."""
        return self.by in ("final-layer", "model")


@dataclass(frozen=True, eq=False)
class ProbeAnswer:
    """The result of a probe: the clients that answered, the evidence, and their directions.

    ``places`` are the clients' directions, by which newcomers are assigned to groups; ``halves``
    are the directions of each half, and ``spreads`` the squared deviations of the halves from their
    mean. ``memory`` is what the server keeps to repeat the probe for newcomers, ``notes`` are for
    the run's events, and ``validated`` says whether any client has validation data. ``layers`` has
    the distances between clients in each layer, if whole models were sent.
    """

    clients: list[ClientId]
    examples: list[int]
    evidence: Evidence
    places: Tensor
    spreads: list[float]
    memory: dict[str, Tree]
    notes: dict[str, Any] = field(default_factory=dict)
    validated: bool = True
    halves: Tensor = field(default_factory=lambda: torch.empty(2, 0, 0))
    layers: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def layer_notes(self) -> dict[str, Any]:
        """The distances in each layer as a note for the run's events, if they are known."""
        if not self.layers:
            return {}
        return {"layer_distances": {"clients": self.clients, "layers": self.layers}}


def ask(
    fed: Federation,
    probe: Probe,
    start: Weights,
    clients: Sequence[ClientId],
    round: int = 0,
    view: View | None = None,
) -> ProbeAnswer:
    """Probe the clients with the model ``start``, and compare the answers of their two halves.

    ``view`` maps a client's model to what is compared, instead of its change from ``start``.
    """
    steps, too_short, counting_samples, holders = _count(probe, fed, start, clients, round)
    memory: dict[str, Tree] = {"start": start, "round": round, "steps": steps, "draw": probe.draw}
    if probe.epochs is not None:
        memory["epochs"] = probe.epochs
    if probe.by == "data":
        memory["vectors"] = probe.vectors
    memory = {**memory, "by": probe.by}
    replies = _answers(fed, memory, clients, holders)
    answer = _compare(replies, memory, view)
    if answer.evidence.groups == 1 and len(answer.clients) > 1 and view is None:
        other_by = _other_view(fed, probe, start)
        if other_by == "model":
            counting_samples += answer.notes["samples"]
            replies = _answers(fed, {**memory, "by": other_by}, clients)
        if other_by:
            second = _compare(replies, {**memory, "by": other_by}, view)
            if other_by == "model" or second.evidence.groups > 1:
                notes = {**second.notes, "fallback": answer.evidence.why}
                answer = replace(second, notes=notes)
    evidence = answer.evidence
    if evidence.groups == 1 and too_short:
        why = TOO_SHORT.format(steps=steps)
        evidence = replace(evidence, why=why, enough=False)
    notes = {**answer.notes, "samples": answer.notes["samples"] + counting_samples}
    notes |= {"clients": answer.clients, **evidence.to_notes()}
    if probe.trains:
        notes["steps"] = steps
    return replace(answer, evidence=evidence, notes=notes)


def ask_again(fed: Federation, memory: dict[str, Tree], clients: Sequence[ClientId]) -> ProbeAnswer:
    """Repeat a probe with clients whose answers were lost, and compare these with each other."""
    return _compare(_answers(fed, memory, clients), memory, None)


def steps_needed(
    fed: Federation, start: Weights, clients: Sequence[ClientId], round: int = 0
) -> tuple[int, float]:
    """The number of steps until clients' losses have fallen, and the samples used to find out."""
    steps, _, samples, _ = _count(Probe(), fed, start, clients, round, keep=False)
    return steps, samples


def place(
    fed: Federation,
    memory: Mapping[str, Tree],
    centres: Tensor,
    clients: Sequence[ClientId],
    view: View | None = None,
) -> dict[ClientId, int]:
    """Assign each newcomer to the group with the nearest mean direction, a row of ``centres``.

    Newcomers answer the same probe as the other clients: the same steps from the same start. Those
    that do not answer are missing from the result.
    """
    replies = fed.gather(_orders(memory, clients))
    rows = {r.client: _place(memory, r, view) for r in replies}
    return {c: int((centres @ row.to(centres.dtype)).argmax()) for c, row in rows.items()}


def directions_of(
    fed: Federation, memory: Mapping[str, Tree], clients: Sequence[ClientId]
) -> dict[ClientId, tuple[Tensor, float, int]]:
    """The newcomers' answers to the same probe: direction, spread of the halves, samples."""
    replies = fed.gather(_orders(memory, clients))
    return {
        r.client: (_place(memory, r, None), _spread(memory, r, None), r.examples) for r in replies
    }


def evidence_among(halves: Tensor, counts: Sequence[int], clients: Sequence[int]) -> Evidence:
    """The evidence for some of the clients, given by position, from the answers of all."""
    if len(clients) < 2:
        return too_few(len(clients))
    first, second = halves[:, list(clients)].numpy()
    return find_evidence(first, second, [counts[i] for i in clients], directions=True)


def centres(places: Tensor, labels: Sequence[int]) -> Tensor:
    """The mean direction of each group, scaled to unit length."""
    groups = torch.tensor(list(labels))
    means = [places[groups == g].double().mean(0) for g in range(int(groups.max()) + 1)]
    return torch.nn.functional.normalize(torch.stack(means)).float()


# --- the server's half --------------------------------------------------------------------------


def _count(
    probe: Probe,
    fed: Federation,
    start: Weights,
    clients: Sequence[ClientId],
    round: int,
    keep: bool = True,
) -> tuple[int, bool, float, set[ClientId]]:
    """The number of local steps of a probe; 0 if it does not train or is given in epochs.

    Also whether these are too few, the samples used to find out, and the clients that keep the
    model.
    """
    if not probe.trains or probe.epochs is not None:
        return 0, False, 0.0, set()
    if probe.steps != "auto":
        return probe.steps, False, 0.0, set()
    shared = start.only(start.layout.shareable)
    config: dict[str, Scalar] = {"round": round, "draw": probe.draw, "keep": keep}
    orders = [Order(c, "steps", {"model": shared}, config, unhurried=True) for c in clients]
    replies = fed.gather(orders)
    if not replies:
        raise NobodyAnswered(
            "no client answered how many steps it needs, so clients cannot be grouped"
        )
    needed = sorted(int(r.metrics["enough"]) or STEPS[-1] + 1 for r in replies)
    median = needed[(len(needed) - 1) // 2]
    samples = sum(r.metrics["samples"] for r in replies)
    holders = {r.client for r in replies}
    return min(median, STEPS[-1]), median > STEPS[-1], samples, holders


def _other_view(fed: Federation, probe: Probe, start: Weights) -> By | None:
    """What else could distinguish clients: the change of the whole model, or of its final layer."""
    shared_size = start.only(start.layout.shareable).layout.trainable
    if not probe.fallback or final_layer(start.layout).size == shared_size:
        return None
    if probe.by == "model":
        return "final-layer"
    # Where single clients are hidden from the server, it sees no more than the final layer.
    return "model" if probe.by == "final-layer" and fed.min_group == 1 else None


def _orders(
    memory: Mapping[str, Tree], clients: Collection[ClientId], holders: Collection[ClientId] = ()
) -> list[Order]:
    """The orders of a probe; ``holders`` already have the model and do not receive it again."""
    start: Weights = memory["start"]
    keys = ("by", "round", "draw", "epochs", "vectors")
    config = {k: memory[k] for k in keys if k in memory} | {"probe_steps": memory["steps"]}
    arrays: dict[str, Array] = {}
    if memory["by"] in ("final-layer", "model", "gradient"):
        arrays["model"] = start.only(start.layout.shareable)
    return [
        Order(c, "halves", {} if c in holders else arrays, config, unhurried=True) for c in clients
    ]


def _answers(
    fed: Federation,
    memory: Mapping[str, Tree],
    clients: Sequence[ClientId],
    holders: Collection[ClientId] = (),
) -> list[Reply]:
    """The clients' answers to a probe."""
    replies = fed.gather(_orders(memory, clients, holders))
    if not replies:
        raise NobodyAnswered("no client answered the probe, so clients cannot be grouped")
    return replies


def _compare(replies: Sequence[Reply], memory: dict[str, Tree], view: View | None) -> ProbeAnswer:
    """The evidence from the answers of all clients."""
    usable = [r for r in replies if r.metrics["halves"] == 2]
    # A client too small for two halves is no evidence for groups; it is assigned to one afterwards.
    clients = [r.client for r in usable]
    rows = [_row(memory, r, n, view) for n in HALVES for r in usable]
    first, second = rows[: len(usable)], rows[len(usable) :]
    counts = [r.examples for r in usable]
    if len(usable) < 2:
        evidence = too_few(len(usable))
    elif memory["by"] == "data" and len(usable) <= SAMPLE:
        evidence = find_evidence_in_products(_overlaps([*first, *second]), counts)
    else:
        directions = memory["by"] != "labels" and view is None
        if len(usable) > SAMPLE:  # long rows of so many clients are compared by sketches
            first, second = ([_sketched(memory, row) for row in side] for side in (first, second))
        sides = np.stack(first), np.stack(second)
        evidence = find_evidence(*sides, counts, directions=directions)
    places = torch.stack([_place(memory, r, view) for r in usable]) if usable else torch.empty(0, 0)
    notes = {"by": memory["by"], "samples": sum(r.metrics["samples"] for r in replies)}
    too_small = [r.client for r in replies if r.metrics["halves"] != 2]
    if too_small:
        notes["too_small"] = too_small
    validated = any(r.metrics["validation"] > 0 for r in replies)
    spreads = [_spread(memory, r, view) for r in usable]
    units = [[sketch(u).float() for u in _units(memory, r, view)] for r in usable]
    halves = torch.stack([torch.stack(u) for u in zip(*units, strict=True)] or [torch.empty(0)] * 2)
    layers = layers_apart(usable, memory)
    return ProbeAnswer(
        clients, counts, evidence, places, spreads, memory, notes, validated, halves, layers
    )


def layers_apart(
    replies: Sequence[Reply], memory: Mapping[str, Tree]
) -> dict[str, list[list[float]]]:
    """The distances between clients' changes in each layer; row i has those to earlier clients.

    They are Euclidean distances between the means of both halves. The result is empty if clients
    sent fewer than two layers, or if there are more than ``MOST_BY_LAYER`` clients.
    """
    if not 2 <= len(replies) <= MOST_BY_LAYER or memory["by"] not in ("final-layer", "model"):
        return {}
    sides = [[r.arrays[array_name("model", half)] for r in replies] for half in HALVES]
    models = [[m for m in side if isinstance(m, Weights)] for side in sides]
    layout = models[0][0].layout
    parts = {n: layout.only([n]) for n in layout.layers if layout.only([n]).trainable}
    distances = {}
    for name, part in parts.items() if len(parts) > 1 else ():
        first, second = (np.stack([m.part(part).parameters for m in side]) for side in models)
        rows = euclidean((first + second) / 2)  # the common start cancels out
        distances[name] = [[float(f"{v:.4g}") for v in row[:i]] for i, row in enumerate(rows)]
    return distances


def _row(memory: Mapping[str, Tree], reply: Reply, name: str, view: View | None) -> Matrix:
    """One half of a client's answer: the change of the model, or what it sent as it is."""
    array = reply.arrays[array_name(str(memory["by"]), name)]
    if isinstance(array, Weights):
        if view is not None:
            return view(array.onto(memory["start"]))
        if memory["by"] == "final-layer":  # also if the whole model was sent
            array = array.part(final_layer(array.layout))
        numbers = array.parameters
        if memory["by"] != "gradient":
            numbers = numbers - memory["start"].part(array.layout).parameters
        return np.asarray(numbers)
    return np.asarray(array)


def _units(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> Tensor:
    """Both halves of a client's answer, scaled to unit length."""
    halves = [_flat(memory, _row(memory, reply, name, view)) for name in HALVES]
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(halves)).double())


def _flat(memory: Mapping[str, Tree], row: Matrix) -> Matrix:
    """A representation as a vector; for a subspace, its projection matrix, which is unique."""
    vector: Matrix = (row @ row.T if memory["by"] == "data" else row).reshape(-1)
    return vector


def _sketched(memory: Mapping[str, Tree], row: Matrix) -> Matrix:
    sketched: Matrix = sketch(torch.from_numpy(_flat(memory, row)).float()).numpy()
    return sketched


def _place(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> Tensor:
    """A client's direction: the mean of both halves, each scaled to unit length."""
    mean = _units(memory, reply, view).mean(0)
    return sketch(torch.nn.functional.normalize(mean, dim=0)).float()


def _spread(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> float:
    """The squared deviation of both halves, each scaled to unit length, from their mean."""
    first, second = _units(memory, reply, view)
    return float((first - second).square().sum()) / 4


def sketch(vector: Tensor, size: int | None = None) -> Tensor:
    """Reduce a vector to ``size`` numbers, approximately preserving inner products (count sketch).

    Every number is added, with a sign, to one of ``size`` sums; positions and signs are fixed.
    """
    size = size or SKETCH
    if len(vector) <= size:
        return vector
    places, signs = _places_and_signs(len(vector), size)
    return torch.zeros(size, dtype=vector.dtype).index_add_(0, places, vector * signs)


@lru_cache(maxsize=2)
def _places_and_signs(length: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(size, (length,), generator=generator)
    return places, torch.randint(2, (length,), generator=generator) * 2 - 1


def _overlaps(bases: Sequence[Matrix]) -> Matrix:
    """Inner products of the subspaces' projection matrices: ‖QᵀR‖², from 0 to the dimension."""
    columns = np.concatenate(bases, axis=1).astype(np.float64)
    starts = np.cumsum([0, *(basis.shape[1] for basis in bases[:-1])])
    with one_thread():
        squares = np.square(columns.T @ columns)
    overlaps: Matrix = np.add.reduceat(np.add.reduceat(squares, starts, axis=0), starts, axis=1)
    return overlaps


# --- the client's half --------------------------------------------------------------------------


def array_name(by: str, half: str) -> str:
    """The name of an array in a client's answer: for models, just the name of the half.

    >>> array_name("model", "first"), array_name("labels", "second")
    ('first', 'second labels')
    """
    return half if by in ("final-layer", "model") else f"{half} {by}"


def final_layer(layout: Layout) -> Layout:
    """The parameters of the last layer that has parameters to share."""
    free = [e for e in layout.entries if e.kind == "parameter" and not e.local]
    if not free:
        raise ConfigError(
            "no layer of this model is both trained and shared, so there is nothing to compare"
        )
    last = max(free, key=lambda e: e.place).layer
    return layout.only([e.name for e in free if e.layer == last])


def count_steps(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Count the steps on the first half until the loss is below a fifth of its initial value."""
    client.round = int(config["round"])  # a newcomer repeats what the others did in that round
    rows, _ = _halves(client, config)
    if config["keep"]:
        client.state[KEPT] = arrays["model"]  # the probe that follows starts from it as well
    weights = arrays["model"].onto(client.base)
    loss_at_start, done, enough = client.loss(weights, rows=rows) if len(rows) else 0.0, 0, 0
    for steps in STEPS:
        stream, additional = f"steps {steps}", steps - done
        weights = client.fit(weights, stream=stream, rows=rows, epochs=1, steps=additional).weights
        done = steps
        if not len(rows) or client.loss(weights, rows=rows) < FALLEN * loss_at_start:
            enough = steps
            break
    return Upload(metrics={"enough": float(enough), "samples": client.samples})


def send_halves(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Send two representations of this client, computed from two halves of its training data.

    A client with fewer than two samples represents itself by the same data twice, and says so.
    """
    client.round = int(config["round"])
    model = client.kept(KEPT)
    if model is not None:
        arrays = {"model": model, **arrays}
        del client.state[KEPT]
    first, second = _halves(client, config)
    by = str(config["by"])
    sides = {
        array_name(by, name): _represent(client, arrays, config, name, rows)
        for name, rows in zip(HALVES, (first, second), strict=True)
    }
    metrics = {
        "halves": 2.0 if len(client.train) > 1 else 1.0,
        "samples": client.samples,
        "validation": float(len(client.val)),
    }
    return Upload(sides, metrics)


def _halves(client: Client, config: Mapping[str, Scalar]) -> tuple[Tensor, Tensor]:
    rows = client.shuffled(f"halves {config['draw']}")
    if len(rows) < 2:
        return rows, rows
    first, second = rows.tensor_split(2)
    return first, second


def _represent(
    client: Client,
    arrays: Mapping[str, Any],
    config: Mapping[str, Scalar],
    name: str,
    rows: Tensor,
) -> Array:
    """Represent the client by the given rows of its data."""
    by = config["by"]
    if by == "labels":
        return _label_frequencies(client, rows)
    if by == "data":
        data = inputs(client, "a probe by data")[rows.numpy()]
        return torch.from_numpy(directions(data, int(config["vectors"])).astype(np.float32))
    start: Weights = arrays["model"].onto(client.base)
    if by == "gradient":
        weights = client.gradient(start, rows)
    else:
        changes: dict[str, Any] = {"epochs": 1, "steps": int(config["probe_steps"])}
        if "epochs" in config:
            changes = {"epochs": int(config["epochs"]), "steps": None}
        stream = f"halves {config['draw']} {name}"
        weights = client.fit(start, stream=stream, rows=rows, **changes).weights
    layout = weights.layout
    return weights.part(
        final_layer(layout) if by == "final-layer" else layout.only(layout.shareable)
    )


def _label_frequencies(client: Client, rows: Tensor) -> Tensor:
    if client.train.y.is_floating_point():
        raise ConfigError(
            f"the targets of client {client.id} are numbers, not classes, so there are no label "
            "frequencies to compare; compare clients by something else, such as final-layer"
        )
    classes = client.outputs(client.base, client.train.x[:1]).shape[-1]
    counts = torch.bincount(client.train.y[rows].reshape(-1), minlength=classes).double()
    return (counts / counts.sum().clamp(min=1)).float()


def inputs(client: Client, label: str) -> Matrix:
    """A client's training inputs as its model receives them, one row per sample."""
    x = client.train.x
    if not (x.is_floating_point() or x.dtype == torch.uint8):
        raise ConfigError(
            f"{label} needs numeric inputs, but those of client {client.id} are token indices "
            f"({x.dtype}); choose a method that compares models, such as fedclust"
        )
    rows: Matrix = decode(x).reshape(len(x), -1).numpy()
    return rows


def directions(rows: Matrix, p: int) -> Matrix:
    """The first ``p`` left singular vectors of the data matrix, as columns, or as many as its rank.

    Singular vectors beyond the rank would be rounding noise. Data that are all zero have a column
    of zeros.

    >>> abs(directions(np.array([[0.0, 3.0, 0.0], [0.0, 4.0, 0.0]]), 3)).round(9).tolist()
    [[0.0], [1.0], [0.0]]
    """
    data = rows.T
    vectors = basis(data, min(p, *data.shape))
    values = np.linalg.norm(vectors.T @ data, axis=1)  # the singular values
    nonzero = values > values[0] * max(data.shape) * _ROUNDING
    return vectors[:, nonzero] if nonzero.any() else np.zeros((len(data), 1))


TASKS: Mapping[str, Task] = {"steps": count_steps, "halves": send_halves}
SHOWS = {"steps": ("enough", "samples"), "halves": ("halves", "samples", "validation")}
