"""What a server does with a round's means: an optimiser's step, or a mean no bad client can move.

Pieces that any averaging method can take: they wrap the finished method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.federation import (
    Array,
    Chosen,
    ClientId,
    Federation,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    mix,
    vector_of,
)
from coterie.method import Method, Round, State
from coterie.weights import Weights

KEY = "server"  # the optimiser's place in the server's memory
# From the change that the mean would make and what is remembered: the step, and what to remember.
Step = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
# From the vectors of a slot's replies, as rows: the row that stands for all.
Centre = Callable[[Tensor], Tensor]


def stepping(inner: Method, step: Step) -> Method:
    """The same method, its server moving each model by a step instead of to the mean.

    Δ is what the mean would change of a model's parameters; buffers become the mean. What the step
    remembers belongs to the model: a new group begins with nothing.
    """
    if reason := inner.no_step or _nothing_shared(inner):
        raise ConfigError(f"{inner.name} {reason}: no server's optimiser can go around it")

    def round(fed: Federation, state: State, info: Round) -> State:
        after = inner.round(fed, state, info)
        kept, models, memory = state.memory.get(KEY, {}), dict(after.models), {}
        for slot, model in after.models.items():
            if slot in kept:
                memory[slot] = kept[slot]
            before = state.models.get(slot)
            if before is None or before is model:  # a new model, or one that nobody answered for
                continue
            change = (model.parameters - before.parameters).double()
            moved, memory[slot] = step(change, kept.get(slot, {}))
            vector = model.vector.clone()
            vector[: model.layout.trainable] = (before.parameters.double() + moved).float()
            models[slot] = Weights(model.layout, vector)
        return replace(after, models=models, memory={**after.memory, KEY: memory})

    return replace(
        inner,
        round=round,
        pieces=None,
        needs_all_layers="has a server that moves every layer in each round",
    )


def robust(inner: Method, centre: Centre, whole: bool = False) -> Method:
    """The same method, each mean replaced by a centre of the replies that bad ones cannot move.

    Every client counts the same, whatever its samples. The server sees each reply. ``whole``: the
    centre is one of the rows, chosen by the model's parameters, and its client's arrays are taken
    together.
    """
    if reason := inner.no_robust_mean or _nothing_shared(inner):
        raise ConfigError(
            f"{inner.name} {reason}: no robust mean can go around it. Leave out the robust mean, "
            "or take another method"
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
        _refuse_shares(into)
        return self.average(self.fed.gather(orders), into, by_examples)

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        _refuse_shares(into)
        means = mix(replies, into, by_examples=False)  # who is in which slot, and the metrics
        by_client = {r.client: r for r in replies}
        return {
            slot: replace(mean, arrays=self._centred([by_client[c] for c in mean.clients]))
            for slot, mean in means.items()
        }

    def _centred(self, replies: Sequence[Reply]) -> dict[str, Array]:
        if self.whole and "model" in replies[0].arrays:
            rows = torch.stack([_parameters(r.arrays["model"]) for r in replies])
            best = torch.linalg.vector_norm(rows - self.centre(rows), dim=1).argmin()
            return dict(replies[int(best)].arrays)
        found: dict[str, Array] = {}
        for name, first in replies[0].arrays.items():
            rows = torch.stack([vector_of(r.arrays[name]) for r in replies])
            row = self.centre(rows)
            found[name] = Weights(first.layout, row) if isinstance(first, Weights) else row
        return found


def _nothing_shared(inner: Method) -> str:
    return "shares nothing" if inner.sees == "nothing" else ""


def _refuse_shares(into: Mixing) -> None:
    if isinstance(into, Chosen):
        return
    if any(weight not in (0.0, 1.0) for row in into.values() for weight in row.values()):
        raise ConfigError(
            "a robust mean counts every client alike: it does not go with a method that mixes "
            "models in shares (user-centric)"
        )


def _parameters(array: Array) -> Tensor:
    return array.parameters if isinstance(array, Weights) else array


# --- steps --------------------------------------------------------------------------------------


def momentum_step(lr: float, momentum: float) -> Step:
    """v ← βv + Δ, θ ← θ + η·v."""

    def step(change: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        velocity = change + momentum * kept["v"] if "v" in kept else change
        return lr * velocity, {"v": velocity} if momentum else {}

    return step


def adaptive_step(lr: float, beta1: float, beta2: float, tau: float, yogi: bool) -> Step:
    """m ← β₁m + (1−β₁)Δ; v by Adam's or Yogi's rule; θ ← θ + η·m/(√v + τ), v starting at τ²."""

    def step(change: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        m = kept["m"] if "m" in kept else torch.zeros_like(change)
        v = kept["v"] if "v" in kept else torch.full_like(change, tau**2)
        m, square = beta1 * m + (1 - beta1) * change, change.square()
        if yogi:
            v = v - (1 - beta2) * square * torch.sign(v - square)
        else:
            v = beta2 * v + (1 - beta2) * square
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return step


# --- centres ------------------------------------------------------------------------------------


def coordinate_median(rows: Tensor) -> Tensor:
    """The median of each coordinate; of an even number, the mean of the two in the middle."""
    ordered, middle = rows.sort(dim=0).values, len(rows) // 2
    if len(rows) % 2:
        return ordered[middle]
    return ((ordered[middle - 1].double() + ordered[middle].double()) / 2).to(rows.dtype)


def _part(share: float, count: int) -> int:
    """A share in whole clients, rounded down; 0.29 of 100 is 29 though the product falls short.

    >>> _part(0.29, 100), _part(0.1, 19)
    (29, 1)
    """
    return int(share * count + 1e-9)


def trimmed(share: float) -> Centre:
    """The mean of each coordinate without the ``share`` lowest and as many highest values."""

    def centre(rows: Tensor) -> Tensor:
        cut = _part(share, len(rows))
        kept = rows.sort(dim=0).values[cut : len(rows) - cut]
        return kept.double().mean(dim=0).to(rows.dtype)

    return centre


def krum_row(share: float) -> Centre:
    """The row with the smallest sum of squared distances to its n − f − 2 nearest others.

    f is ``share`` of the n rows; where n is too small for n − f − 2, one neighbour decides.
    """

    def centre(rows: Tensor) -> Tensor:
        near = max(1, len(rows) - _part(share, len(rows)) - 2)
        gaps = torch.cdist(rows.double(), rows.double()).square()
        nearest = gaps.sort(dim=1).values[:, 1 : near + 1]  # the first is the row itself
        return rows[int(nearest.sum(dim=1).argmin())]

    return centre
