"""The server's one door to its clients: orders out, replies or weighted means back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from coterie.errors import Diverged, TrainingError
from coterie.weights import Weights

ClientId = int
Slot = int | str
Scalar = bool | int | float | str
Array = Weights | Tensor


def vector_of(array: Array) -> Tensor:
    """The numbers of an array, whichever it is."""
    return array.vector if isinstance(array, Weights) else array


@dataclass(frozen=True)
class Order:
    """One piece of work for one client.

    ``apart`` marks work that a real client would do on its own, with no message: its bytes are
    counted apart, as those of scoring are. ``unhurried`` marks work beside a round's ordinary
    training, such as evidence about groups: the round's deadlines do not run for it, as before the
    first round; clients elsewhere have the real one anew.
    """

    client: ClientId
    task: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    config: Mapping[str, Scalar] = field(default_factory=dict)
    apart: bool = False
    unhurried: bool = False


@dataclass(frozen=True)
class Upload:
    """What a task returns.

    ``since`` says which received array each upload is a change of: codecs, clipping and fixed
    point act on that difference.
    """

    arrays: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What one client sent back."""

    client: ClientId
    examples: int
    arrays: Mapping[str, Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Mean:
    """A weighted mean of replies, and who contributed: orders can go unanswered.

    Metrics are plain means over those who report them: a loss is everybody's alike.
    """

    arrays: Mapping[str, Array]
    examples: int
    clients: tuple[ClientId, ...]
    metrics: Mapping[str, float]


def check_finite(client: ClientId, round: int, task: str, arrays: Mapping[str, Array]) -> None:
    """Refuse arrays that hold NaN or infinity, in words for the user."""
    for name, array in arrays.items():
        vector = vector_of(array)
        if vector.is_floating_point() and not bool(torch.isfinite(vector).all()):
            raise Diverged(
                f"client {client}, round {round + 1}: '{name}' from task '{task}' is no longer "
                "finite. Lower the learning rate (train.lr) or clip gradients (train.clip)"
            )


@dataclass(frozen=True)
class Chosen:
    """The slot is the client's own choice, named in this metric of its reply."""

    metric: str


def chosen(metric: str) -> Chosen:
    """Let each client name the slot that its reply goes into (IFCA's pick)."""
    return Chosen(metric)


Mixing = Mapping[ClientId, Mapping[Slot, float]] | Chosen


class Federation(Protocol):
    """The server's only door to its clients."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        ...

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of: 1 unless single clients are hidden."""
        ...

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent.

        With lossy codecs, noise, robust means or layers at rest it is not.
        """
        ...

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        ...

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        ...

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        ...


def mix(replies: Iterable[Reply], into: Mixing, by_examples: bool = True) -> dict[Slot, Mean]:
    """The weighted mean of each slot.

    Weights are normalised first and models are summed in float64 in client-id order, so the bits
    depend neither on who answered first nor on how the work was divided.

    >>> replies = [Reply(1, 30, {"w": torch.tensor([4.0])}, {}),
    ...            Reply(0, 10, {"w": torch.tensor([0.0])}, {})]
    >>> mix(replies, {0: {"all": 1.0}, 1: {"all": 1.0}})["all"].arrays["w"]
    tensor([3.])
    """
    members: dict[Slot, list[tuple[float, Reply]]] = {}
    for reply in sorted(replies, key=lambda r: r.client):
        row = _row(reply, into)
        for slot, weight in row.items():
            scale = float(weight) * (reply.examples if by_examples else 1)
            if scale > 0:
                members.setdefault(slot, []).append((scale, reply))
    return {slot: _mean(members[slot]) for slot in sorted(members, key=lambda s: (str(type(s)), s))}


def _row(reply: Reply, into: Mixing) -> Mapping[Slot, float]:
    if isinstance(into, Chosen):
        return {int(reply.metrics[into.metric]): 1.0}
    return into.get(reply.client, {})


def _mean(members: Sequence[tuple[float, Reply]]) -> Mean:
    total = sum(scale for scale, _ in members)
    shares = [scale / total for scale, _ in members]
    replies = [reply for _, reply in members]
    first = replies[0]
    for reply in replies:
        if set(reply.arrays) != set(first.arrays):
            raise TrainingError(
                f"clients {first.client} and {reply.client} sent different arrays into one mean: "
                f"{sorted(first.arrays)} and {sorted(reply.arrays)}"
            )
    return Mean(
        arrays={k: _weighted(shares, [r.arrays[k] for r in replies]) for k in first.arrays},
        examples=sum(r.examples for r in replies),
        clients=tuple(r.client for r in replies),
        metrics=_means_of_metrics(replies),
    )


def _means_of_metrics(replies: Sequence[Reply]) -> dict[str, float]:
    """The plain mean of each metric over those who report it."""
    found: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in reply.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _weighted(shares: Sequence[float], arrays: Sequence[Array]) -> Array:
    first = arrays[0]
    if len(arrays) == 1:
        return first
    vectors = [vector_of(a) for a in arrays]
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for share, array, vector in zip(shares, arrays, vectors, strict=True):
        if isinstance(first, Weights) and isinstance(array, Weights):
            first._other(array)
        total.add_(vector.double(), alpha=share)
    mean = total.to(vectors[0].dtype)
    return Weights(first.layout, mean) if isinstance(first, Weights) else mean
