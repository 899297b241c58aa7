"""Aggregation: weighted means of replies, one for each slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from coterie.core.messages import Array, Chosen, Mean, Mixing, Reply, Slot, vector_of
from coterie.core.weights import Weights
from coterie.errors import TrainingError


def mix(replies: Iterable[Reply], into: Mixing, by_examples: bool = True) -> dict[Slot, Mean]:
    """Compute the weighted mean of each slot.

    Weights are normalised first, and models are summed in float64 in the order of client ids, so
    that results do not depend, to the bit, on the order of replies or on the number of workers.

    >>> replies = [Reply(1, 30, {"w": torch.tensor([4.0])}, {}),
    ...            Reply(0, 10, {"w": torch.tensor([0.0])}, {})]
    >>> mix(replies, {0: {"all": 1.0}, 1: {"all": 1.0}})["all"].arrays["w"]
    tensor([3.])
    """
    members: dict[Slot, list[tuple[float, Reply]]] = {}
    for reply in sorted(replies, key=lambda r: r.client):
        if isinstance(into, Chosen):
            row: Mapping[Slot, float] = {int(reply.metrics[into.metric]): 1.0}
        else:
            row = into.get(reply.client, {})
        for slot, weight in row.items():
            scale = float(weight) * (reply.examples if by_examples else 1)
            if scale > 0:
                members.setdefault(slot, []).append((scale, reply))
    return {slot: _mean(members[slot]) for slot in sorted(members, key=lambda s: (str(type(s)), s))}


def _mean(members: Sequence[tuple[float, Reply]]) -> Mean:
    total = sum(scale for scale, _ in members)
    shares = [scale / total for scale, _ in members]
    replies = [reply for _, reply in members]
    first = replies[0]
    for reply in replies:
        if set(reply.arrays) != set(first.arrays):
            raise TrainingError(
                f"clients {first.client} and {reply.client} sent different arrays for a mean: "
                f"{sorted(first.arrays)} and {sorted(reply.arrays)}"
            )
    values: dict[str, list[float]] = {}  # of each metric, of the clients that report it
    for reply in replies:
        for name, value in reply.metrics.items():
            values.setdefault(name, []).append(value)
    return Mean(
        arrays={k: _weighted(shares, [r.arrays[k] for r in replies]) for k in first.arrays},
        examples=sum(r.examples for r in replies),
        clients=tuple(r.client for r in replies),
        metrics={name: sum(of) / len(of) for name, of in values.items()},
    )


def _weighted(shares: Sequence[float], arrays: Sequence[Array]) -> Array:
    first = arrays[0]
    if len(arrays) == 1:
        return first
    vectors = [vector_of(a) for a in arrays]
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for share, array, vector in zip(shares, arrays, vectors, strict=True):
        if isinstance(first, Weights) and isinstance(array, Weights):
            first.check_layout(array)
        total.add_(vector.double(), alpha=share)
    mean = total.to(vectors[0].dtype)
    return Weights(first.layout, mean) if isinstance(first, Weights) else mean
