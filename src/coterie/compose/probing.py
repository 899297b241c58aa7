"""Asking clients to represent themselves twice, from two halves of their data.

This is where the evidence about groups comes from: everybody makes the same number of steps from
one model, on each half, and what changed is compared (``grouping.evidence``).
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
View = Callable[[Weights], Matrix]  # what the server looks at of a client's model
STEPS = (25, 50, 100, 200, 300)
FALLEN = 0.2  # of the loss at the start: below it, a client has learnt what its data say
TOO_SHORT = (
    "too little training to tell: after {steps} steps the loss of most clients is still above a "
    "fifth of its start. Choose another learning rate (train.lr): usually a higher one, a lower "
    "one if losses grow"
)
KEPT = "probe"  # where a client keeps the model that it was asked to train
HALVES = ("first", "second")
MOST_BY_LAYER = 100  # clients whose distances are noted layer by layer
SKETCH = 4096  # numbers kept of a longer direction, to place newcomers by
_ROUNDING = float(np.finfo(np.float32).eps)  # of inputs and of what is sent: both are float32


class NobodyAnswered(TrainingError):
    """No client answered a probe."""


@dataclass(frozen=True)
class Probe:
    """How clients represent themselves.

    ``by`` is what is compared: the change of the "final-layer" or of the whole "model" after some
    steps, the "gradient" at the start, the frequencies of "labels", or the subspace of the inputs
    ("data"). ``steps`` is how many steps everybody makes; "auto" asks clients when their loss has
    fallen to a fifth. ``epochs`` is a number of epochs instead. With ``fallback`` the whole change
    is asked for when the final layer tells nothing; where the whole change tells nothing, its final
    layer is looked at. ``vectors`` is how many directions a subspace has at most. Another ``draw``
    divides the data into other halves.
    """

    by: By = "final-layer"
    steps: int | Literal["auto"] = "auto"
    epochs: int | None = None
    fallback: bool = True
    vectors: int = 3
    draw: int = 0

    @property
    def trains(self) -> bool:
        """Whether clients train for it."""
        return self.by in ("final-layer", "model")


@dataclass(frozen=True, eq=False)
class Answer:
    """What a probe found: who answered, the evidence, and what newcomers are placed by.

    ``places`` are the clients' directions, ``halves`` those of either half, ``spreads`` how much
    the halves differ: the squared deviation of each from their mean. ``memory`` is what must be
    kept to ask newcomers the same; ``notes`` are for the run's events. ``validated`` says whether
    any client has validation data. ``layers`` has the clients' distances in each layer, where whole
    models were sent.
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
        """The distances in each layer as a note; none where they are not known."""
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
) -> Answer:
    """Have everybody train ``start`` on two halves of its data, and compare what came of it.

    ``view`` is what is compared of each client's models, where that is not their change.
    """
    steps, short, samples, holding = _count(probe, fed, start, clients, round)
    memory: dict[str, Tree] = {"start": start, "round": round, "steps": steps, "draw": probe.draw}
    if probe.epochs is not None:
        memory["epochs"] = probe.epochs
    if probe.by == "data":
        memory["vectors"] = probe.vectors
    memory = {**memory, "by": probe.by}
    replies = _answers(fed, memory, clients, holding)
    answer = _compare(replies, memory, view)
    if answer.evidence.groups == 1 and len(answer.clients) > 1 and view is None:
        other = _other_view(fed, probe, start)
        if other == "model":
            samples += answer.notes["samples"]
            replies = _answers(fed, {**memory, "by": other}, clients)
        if other:
            second = _compare(replies, {**memory, "by": other}, view)
            if other == "model" or second.evidence.groups > 1:
                notes = {**second.notes, "fallback": answer.evidence.why}
                answer = replace(second, notes=notes)
    evidence = answer.evidence
    if evidence.groups == 1 and short:
        why = TOO_SHORT.format(steps=steps)
        evidence = replace(evidence, why=why, enough=False)
    notes = {**answer.notes, "samples": answer.notes["samples"] + samples}
    notes |= {"clients": answer.clients, **evidence.to_notes()}
    if probe.trains:
        notes["steps"] = steps
    return replace(answer, evidence=evidence, notes=notes)


def ask_again(fed: Federation, memory: dict[str, Tree], clients: Sequence[ClientId]) -> Answer:
    """What those answer to the same probe whose answers were lost, compared among themselves."""
    return _compare(_answers(fed, memory, clients), memory, None)


def steps_needed(
    fed: Federation, start: Weights, clients: Sequence[ClientId], round: int = 0
) -> tuple[int, float]:
    """How many steps it takes to learn what clients' data say, and the samples that took to ask."""
    steps, _, samples, _ = _count(Probe(), fed, start, clients, round, keep=False)
    return steps, samples


def place(
    fed: Federation,
    memory: Mapping[str, Tree],
    centres: Tensor,
    clients: Sequence[ClientId],
    view: View | None = None,
) -> dict[ClientId, int]:
    """The group whose mean direction is nearest to each newcomer's, by position of the centre.

    Newcomers do what everybody did: the same steps from the same start. Who does not answer is
    missing.
    """
    replies = fed.gather(_orders(memory, clients))
    rows = {r.client: _place(memory, r, view) for r in replies}
    return {c: int((centres @ row.to(centres.dtype)).argmax()) for c, row in rows.items()}


def directions_of(
    fed: Federation, memory: Mapping[str, Tree], clients: Sequence[ClientId]
) -> dict[ClientId, tuple[Tensor, float, int]]:
    """What newcomers answer to the same probe: direction, spread of its halves, samples."""
    replies = fed.gather(_orders(memory, clients))
    return {
        r.client: (_place(memory, r, None), _spread(memory, r, None), r.examples) for r in replies
    }


def evidence_among(halves: Tensor, counts: Sequence[int], clients: Sequence[int]) -> Evidence:
    """The evidence about some of the clients, by position, from what all of them answered."""
    if len(clients) < 2:
        return too_few(len(clients))
    first, second = halves[:, list(clients)].numpy()
    return find_evidence(first, second, [counts[i] for i in clients], directions=True)


def centres(places: Tensor, labels: Sequence[int]) -> Tensor:
    """The mean direction of each group, of length 1."""
    groups = torch.tensor(list(labels))
    means = [places[groups == g].double().mean(0) for g in range(int(groups.max()) + 1)]
    return torch.nn.functional.normalize(torch.stack(means)).float()


# --- the server's smaller steps -----------------------------------------------------------------


def _count(
    probe: Probe,
    fed: Federation,
    start: Weights,
    clients: Sequence[ClientId],
    round: int,
    keep: bool = True,
) -> tuple[int, bool, float, set[ClientId]]:
    """How many steps everybody makes; 0 stand for a number of epochs.

    With it come whether they are too few, what it took to find out, and who keeps the model.
    """
    if not probe.trains or probe.epochs is not None:
        return 0, False, 0.0, set()
    if probe.steps != "auto":
        return probe.steps, False, 0.0, set()
    whole = start.only(start.layout.shareable)
    config: dict[str, Scalar] = {"round": round, "draw": probe.draw, "keep": keep}
    orders = [Order(c, "steps", {"model": whole}, config, unhurried=True) for c in clients]
    replies = fed.gather(orders)
    if not replies:
        raise NobodyAnswered("no client said how many steps it needs: nobody can be grouped")
    needed = sorted(int(r.metrics["enough"]) or STEPS[-1] + 1 for r in replies)
    median = needed[(len(needed) - 1) // 2]
    samples = sum(r.metrics["samples"] for r in replies)
    holding = {r.client for r in replies}
    return min(median, STEPS[-1]), median > STEPS[-1], samples, holding


def _other_view(fed: Federation, probe: Probe, start: Weights) -> By | None:
    """What else could tell clients apart: the whole change, or only its final layer."""
    whole = start.only(start.layout.shareable).layout.trainable
    if not probe.fallback or final_layer(start.layout).size == whole:
        return None
    if probe.by == "model":
        return "final-layer"
    # Where single clients are hidden, no more than the final layer is shown.
    return "model" if probe.by == "final-layer" and fed.min_group == 1 else None


def _orders(
    memory: Mapping[str, Tree], clients: Collection[ClientId], holding: Collection[ClientId] = ()
) -> list[Order]:
    """What is asked of these clients; who holds the model already is not sent it again."""
    start: Weights = memory["start"]
    keys = ("by", "round", "draw", "epochs", "vectors")
    config = {k: memory[k] for k in keys if k in memory} | {"probe_steps": memory["steps"]}
    arrays: dict[str, Array] = {}
    if memory["by"] in ("final-layer", "model", "gradient"):
        arrays["model"] = start.only(start.layout.shareable)
    return [
        Order(c, "halves", {} if c in holding else arrays, config, unhurried=True) for c in clients
    ]


def _answers(
    fed: Federation,
    memory: Mapping[str, Tree],
    clients: Sequence[ClientId],
    holding: Collection[ClientId] = (),
) -> list[Reply]:
    """One exchange: both halves of everybody."""
    replies = fed.gather(_orders(memory, clients, holding))
    if not replies:
        raise NobodyAnswered("no client answered the probe: nobody can be grouped")
    return replies


def _compare(replies: Sequence[Reply], memory: dict[str, Tree], view: View | None) -> Answer:
    """The evidence from both halves of everybody."""
    whole = [r for r in replies if r.metrics["halves"] == 2]
    # A client too small for two halves says nothing about groups; it is placed afterwards.
    people = [r.client for r in whole]
    rows = [_row(memory, r, n, view) for n in HALVES for r in whole]
    first, second = rows[: len(whole)], rows[len(whole) :]
    counts = [r.examples for r in whole]
    if len(whole) < 2:
        evidence = too_few(len(whole))
    elif memory["by"] == "data" and len(whole) <= SAMPLE:
        evidence = find_evidence_in_products(_overlaps([*first, *second]), counts)
    else:
        directions = memory["by"] != "labels" and view is None
        if len(whole) > SAMPLE:  # of so many, long rows are compared by sketches
            first, second = ([_sketched(memory, row) for row in side] for side in (first, second))
        sides = np.stack(first), np.stack(second)
        evidence = find_evidence(*sides, counts, directions=directions)
    places = torch.stack([_place(memory, r, view) for r in whole]) if whole else torch.empty(0, 0)
    notes = {"by": memory["by"], "samples": sum(r.metrics["samples"] for r in replies)}
    small = [r.client for r in replies if r.metrics["halves"] != 2]
    if small:
        notes["too_small"] = small
    validated = any(r.metrics["validation"] > 0 for r in replies)
    spreads = [_spread(memory, r, view) for r in whole]
    units = [[sketch(u).float() for u in _units(memory, r, view)] for r in whole]
    halves = torch.stack([torch.stack(u) for u in zip(*units, strict=True)] or [torch.empty(0)] * 2)
    layers = layers_apart(whole, memory)
    return Answer(
        people, counts, evidence, places, spreads, memory, notes, validated, halves, layers
    )


def layers_apart(
    replies: Sequence[Reply], memory: Mapping[str, Tree]
) -> dict[str, list[list[float]]]:
    """How far apart clients' changes are in each layer: row i has the distances to those before.

    These are Euclidean, between the means of both halves. Nothing where clients sent less than two
    layers, or where they are so many that nobody could read it.
    """
    if not 2 <= len(replies) <= MOST_BY_LAYER or memory["by"] not in ("final-layer", "model"):
        return {}
    sides = [[r.arrays[array_name("model", half)] for r in replies] for half in HALVES]
    models = [[m for m in side if isinstance(m, Weights)] for side in sides]
    layout = models[0][0].layout
    parts = {n: layout.only([n]) for n in layout.layers if layout.only([n]).trainable}
    found = {}
    for name, part in parts.items() if len(parts) > 1 else ():
        first, second = (np.stack([m.part(part).parameters for m in side]) for side in models)
        rows = euclidean((first + second) / 2)  # what all began from cancels out
        found[name] = [[float(f"{v:.4g}") for v in row[:i]] for i, row in enumerate(rows)]
    return found


def _row(memory: Mapping[str, Tree], reply: Reply, name: str, view: View | None) -> Matrix:
    """One half of a client's answer: what it changed, or what it sent as it is."""
    array = reply.arrays[array_name(str(memory["by"]), name)]
    if isinstance(array, Weights):
        if view is not None:
            return view(array.onto(memory["start"]))
        if memory["by"] == "final-layer":  # also where the whole change was sent
            array = array.part(final_layer(array.layout))
        numbers = array.parameters
        if memory["by"] != "gradient":
            numbers = numbers - memory["start"].part(array.layout).parameters
        return np.asarray(numbers)
    return np.asarray(array)


def _units(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> Tensor:
    """Both halves of a client's answer, each of length 1."""
    halves = [_flat(memory, _row(memory, reply, name, view)) for name in HALVES]
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(halves)).double())


def _flat(memory: Mapping[str, Tree], row: Matrix) -> Matrix:
    """A representation as one vector; of a subspace its projection matrix, which has no signs."""
    flat: Matrix = (row @ row.T if memory["by"] == "data" else row).reshape(-1)
    return flat


def _sketched(memory: Mapping[str, Tree], row: Matrix) -> Matrix:
    short: Matrix = sketch(torch.from_numpy(_flat(memory, row)).float()).numpy()
    return short


def _place(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> Tensor:
    """The direction that a client is placed by: the mean of both halves, each of length 1."""
    mean = _units(memory, reply, view).mean(0)
    return sketch(torch.nn.functional.normalize(mean, dim=0)).float()


def _spread(memory: Mapping[str, Tree], reply: Reply, view: View | None) -> float:
    """The squared deviation of both halves, each of length 1, from their mean."""
    first, second = _units(memory, reply, view)
    return float((first - second).square().sum()) / 4


def sketch(vector: Tensor, size: int | None = None) -> Tensor:
    """A vector in ``size`` numbers whose inner products are nearly those of the vector itself.

    Every number is added, with a sign, to one of ``size`` sums; places and signs are fixed.
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
    """Inner products of the projection matrices of subspaces: ‖QᵀR‖², 0 to their dimension."""
    columns = np.concatenate(bases, axis=1).astype(np.float64)
    starts = np.cumsum([0, *(basis.shape[1] for basis in bases[:-1])])
    with one_thread():
        squares = np.square(columns.T @ columns)
    overlaps: Matrix = np.add.reduceat(np.add.reduceat(squares, starts, axis=0), starts, axis=1)
    return overlaps


# --- the client's half --------------------------------------------------------------------------


def array_name(by: str, half: str) -> str:
    """What a client's answer from one half is called; only models go by the half alone.

    >>> array_name("model", "first"), array_name("labels", "second")
    ('first', 'second labels')
    """
    return half if by in ("final-layer", "model") else f"{half} {by}"


def final_layer(layout: Layout) -> Layout:
    """The trained tensors of the last layer that has any which may travel."""
    free = [e for e in layout.entries if e.kind == "parameter" and not e.local]
    if not free:
        raise ConfigError("no layer of this model is both trained and shared: none can be compared")
    last = max(free, key=lambda e: e.place).layer
    return layout.only([e.name for e in free if e.layer == last])


def count_steps(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """After how many steps on its first half this client's loss is below a fifth of its start."""
    client.round = int(config["round"])  # a newcomer does what everybody did
    rows, _ = _halves(client, config)
    if config["keep"]:
        client.state[KEPT] = arrays["model"]  # what follows starts from it, too
    weights = arrays["model"].onto(client.base)
    before, done, enough = client.loss(weights, rows=rows) if len(rows) else 0.0, 0, 0
    for steps in STEPS:
        stream, more = f"steps {steps}", steps - done
        weights = client.fit(weights, stream=stream, rows=rows, epochs=1, steps=more).weights
        done = steps
        if not len(rows) or client.loss(weights, rows=rows) < FALLEN * before:
            enough = steps
            break
    return Upload(metrics={"enough": float(enough), "samples": client.samples})


def send_halves(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Two representations of this client, from two halves of its training data.

    One with a single sample, or none, represents itself by the same data twice, and says so.
    """
    client.round = int(config["round"])
    kept = client.kept(KEPT)
    if kept is not None:
        arrays = {"model": kept, **arrays}
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
    """What this client looks like from these rows of its data."""
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
            f"the targets of client {client.id} are numbers, not classes: they have no "
            "frequencies. Compare clients by something else, such as final-layer"
        )
    classes = client.outputs(client.base, client.train.x[:1]).shape[-1]
    counts = torch.bincount(client.train.y[rows].reshape(-1), minlength=classes).double()
    return (counts / counts.sum().clamp(min=1)).float()


def inputs(client: Client, label: str) -> Matrix:
    """A client's training inputs as its model sees them, each sample a row."""
    x = client.train.x
    if not (x.is_floating_point() or x.dtype == torch.uint8):
        raise ConfigError(
            f"{label} compares inputs as quantities, but those of client {client.id} are "
            f"numbers of tokens ({x.dtype}): take a method that compares models, such as fedclust"
        )
    rows: Matrix = decode(x).reshape(len(x), -1).numpy()
    return rows


def directions(rows: Matrix, p: int) -> Matrix:
    """Up to ``p`` left singular vectors of the data matrix, as columns: no more than its rank.

    Beyond the rank there are none, only what rounding happens to leave. Data that are all zero
    have a column of zeros.

    >>> abs(directions(np.array([[0.0, 3.0, 0.0], [0.0, 4.0, 0.0]]), 3)).round(9).tolist()
    [[0.0], [1.0], [0.0]]
    """
    data = rows.T
    vectors = basis(data, min(p, *data.shape))
    values = np.linalg.norm(vectors.T @ data, axis=1)  # the singular values
    real = values > values[0] * max(data.shape) * _ROUNDING
    return vectors[:, real] if real.any() else np.zeros((len(data), 1))


TASKS: Mapping[str, Task] = {"steps": count_steps, "halves": send_halves}
SHOWS = {"steps": ("enough", "samples"), "halves": ("halves", "samples", "validation")}
