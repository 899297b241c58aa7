"""Robust aggregation: means that a few malicious or faulty clients cannot move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.compose.wrapping import _nothing_shared
from coterie.core.aggregate import mix
from coterie.core.federation import Federation
from coterie.core.messages import (
    Array,
    Chosen,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    vector_of,
)
from coterie.core.method import Method, Round, State
from coterie.core.weights import Weights
from coterie.errors import ConfigError

# From the vectors of a slot's replies, as rows, to the vector that represents them.
Centre = Callable[[Tensor], Tensor]


def with_robust_aggregation(inner: Method, centre: Centre, whole: bool = False) -> Method:
    """Wrap a method so that each mean is replaced by a robust centre of the replies.

    All clients count equally, whatever their numbers of samples, and the server sees each reply.
    With ``whole``, the client whose model is nearest to the centre is chosen, and all of its arrays
    are used together.
    """
    if reason := inner.no_robust_mean or _nothing_shared(inner):
        raise ConfigError(
            f"{inner.name} {reason}: no robust mean can wrap it. Remove the robust mean, or choose "
            "another method"
        )

    def round(fed: Federation, state: State, info: Round) -> State:
        return inner.round(_Robust(fed, centre, whole), state, info)

    return replace(
        inner,
        round=round,
        sees="each",
        pieces=None,
        needs_all_layers="compares whole models in each round",
    )


@dataclass
class _Robust:
    """A federation whose means are robust."""

    fed: Federation
    centre: Centre
    whole: bool

    @property
    def clients(self) -> Sequence[ClientId]:
        return self.fed.clients

    @property
    def min_group(self) -> int:
        return self.fed.min_group

    @property
    def plain_means(self) -> bool:
        return False

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        return self.fed.gather(orders)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        _refuse_weights(into)
        return self.average(self.fed.gather(orders), into, by_examples)

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        _refuse_weights(into)
        means = mix(
            replies, into, by_examples=False
        )  # for the clients of each slot, and the metrics
        by_client = {r.client: r for r in replies}
        return {
            slot: replace(mean, arrays=self._centred([by_client[c] for c in mean.clients]))
            for slot, mean in means.items()
        }

    def _centred(self, replies: Sequence[Reply]) -> dict[str, Array]:
        if self.whole and "model" in replies[0].arrays:
            rows = torch.stack([_parameters(r.arrays["model"]) for r in replies])
            nearest = torch.linalg.vector_norm(rows - self.centre(rows), dim=1).argmin()
            return dict(replies[int(nearest)].arrays)
        arrays: dict[str, Array] = {}
        for name, array in replies[0].arrays.items():
            rows = torch.stack([vector_of(r.arrays[name]) for r in replies])
            row = self.centre(rows)
            arrays[name] = Weights(array.layout, row) if isinstance(array, Weights) else row
        return arrays


def _refuse_weights(into: Mixing) -> None:
    if isinstance(into, Chosen):
        return
    if any(weight not in (0.0, 1.0) for row in into.values() for weight in row.values()):
        raise ConfigError(
            "a robust mean counts all clients equally, so it cannot be combined with a method that "
            "mixes models with weights (user-centric)"
        )


def _parameters(array: Array) -> Tensor:
    return array.parameters if isinstance(array, Weights) else array


def coordinate_median(rows: Tensor) -> Tensor:
    """The median of each coordinate; for even numbers, the mean of the middle two."""
    ordered, half = rows.sort(dim=0).values, len(rows) // 2
    if len(rows) % 2:
        return ordered[half]
    return ((ordered[half - 1].double() + ordered[half].double()) / 2).to(rows.dtype)


def _count(share: float, count: int) -> int:
    """The number of clients in a share, rounded down; robust to rounding errors of the product.

    >>> _count(0.29, 100), _count(0.1, 19)
    (29, 1)
    """
    return int(share * count + 1e-9)


def trimmed(share: float) -> Centre:
    """The mean of each coordinate without the ``share`` lowest and as many highest values."""

    def centre(rows: Tensor) -> Tensor:
        cut = _count(share, len(rows))
        inner = rows.sort(dim=0).values[cut : len(rows) - cut]
        return inner.double().mean(dim=0).to(rows.dtype)

    return centre


def krum_row(share: float) -> Centre:
    """The row with the smallest sum of squared distances to its n − f − 2 nearest others.

    f is ``share`` of the n rows; at least one neighbour is counted, however small n is.
    """

    def centre(rows: Tensor) -> Tensor:
        neighbours = max(1, len(rows) - _count(share, len(rows)) - 2)
        distances = torch.cdist(rows.double(), rows.double()).square()
        nearest = distances.sort(dim=1).values[:, 1 : neighbours + 1]  # the first is the row itself
        return rows[int(nearest.sum(dim=1).argmin())]

    return centre
