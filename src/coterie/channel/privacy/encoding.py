"""Encodes a client's contribution to a sum as a vector of integers, and decodes the mean.

Numbers are rounded to a grid of step 2^-bits. The arrays are multiplied by the client's weight, an
integer. They are followed by the metrics, the weight itself, the client's number of samples, and
for each metric whether it was reported, so that the sum is all the server needs. Metrics have the
same weight as the arrays: of a number that follows from both, two sums with different weights would
leave the part of the clients that count otherwise than most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.channel.privacy.secagg.ring import from_ring, to_ring
from coterie.core.messages import Array, vector_of
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError, Diverged, TrainingError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
_TYPES = ("float16", "float32", "float64", "uint8", "int32", "int64", "bool")
_LONGEST = 1 << 40


@dataclass(frozen=True)
class Form:
    """The form of a contribution's arrays, in order: names, tensors, shapes and types."""

    parts: tuple[tuple[str, tuple[str, ...] | None, tuple[int, ...], str], ...]
    layout: Layout

    @staticmethod
    def of(arrays: Mapping[str, Array], layout: Layout) -> Form:
        """The form of these arrays."""
        parts = []
        for name in sorted(arrays):
            array = arrays[name]
            tensors = array.layout.names if isinstance(array, Weights) else None
            vector = vector_of(array)
            parts.append((name, tensors, tuple(vector.shape), str(vector.dtype)[6:]))
        return Form(tuple(parts), layout)

    @property
    def size(self) -> int:
        """The number of values in all arrays together."""
        return sum(math.prod(shape) for _, _, shape, _ in self.parts)

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """The layers of each array, as the exposure ledger counts them."""
        return {
            name: () if tensors is None else self.layout.only(tensors).layers
            for name, tensors, _, _ in self.parts
        }

    def to_tree(self) -> list[Any]:
        """Convert to plain values, as sent to the server."""
        return [[n, None if t is None else list(t), list(s), d] for n, t, s, d in self.parts]

    @staticmethod
    def from_tree(tree: Sequence[Any], layout: Layout) -> Form:
        """Read a form from plain values, as a client sent it; TrainingError if it is invalid."""
        try:
            lists = [tree, *(part for _, t, s, _ in tree for part in ([] if t is None else t, s))]
            if not all(isinstance(part, list) for part in lists):
                raise TypeError("its layers and shapes are not lists")
            parts = [(n, None if t is None else tuple(t), tuple(s), d) for n, t, s, d in tree]
            if len({name for name, *_ in parts}) < len(parts):
                raise ValueError("one of its names comes twice")
            for name, tensors, shape, dtype in parts:
                sizes = all(type(n) is int and 0 <= n < _LONGEST for n in shape)
                if not isinstance(name, str) or dtype not in _TYPES or not sizes:
                    raise ValueError("its name, shape or type")
                if tensors is not None and shape != (layout.only(tensors).size,):
                    raise ValueError(f"the length of its '{name}'")
        except (TypeError, ValueError, ConfigError) as error:
            why = str(error)[:200]
            raise TrainingError(f"its part of a sum would be of no arrays ({why})") from None
        return Form(tuple(parts), layout)

    def flat(self, arrays: Mapping[str, Array]) -> Floats:
        """All values as one vector."""
        rows = [vector_of(arrays[name]).reshape(-1).double().numpy() for name, *_ in self.parts]
        return np.concatenate(rows) if rows else np.zeros(0)

    def arrays(self, flat: Floats) -> dict[str, Array]:
        """Divide one vector into arrays of this form."""
        arrays: dict[str, Array] = {}
        start = 0
        for name, tensors, shape, dtype in self.parts:
            size = math.prod(shape)
            kind = getattr(torch, dtype)
            row: Tensor = torch.from_numpy(flat[start : start + size]).to(kind).reshape(shape)
            arrays[name] = row if tensors is None else Weights(self.layout.only(tensors), row)
            start += size
        return arrays


@dataclass(frozen=True)
class Count:
    """How a client counts in a mean: by an integer weight, times its samples if ``by_examples``."""

    weight: int = 1
    by_examples: bool = True

    def of(self, examples: int) -> int:
        """The integer weight of a client with this number of samples."""
        return self.weight * (examples if self.by_examples else 1)


def contribution(
    arrays: Floats,
    examples: int,
    metrics: Mapping[str, float],
    names: Sequence[str],
    count: Count,
    bits: int,
    members: int,
) -> Integers:
    """The vector that a client adds to a sum over this number of members."""
    counts = count.of(examples)
    reported = [metrics.get(n, np.nan) for n in names]
    known = [float(np.isfinite(v)) for v in reported]
    values = np.where(np.array(known) > 0, np.array(reported), 0.0) if names else np.zeros(0)
    try:
        body = to_ring(arrays, bits, counts, members)
        numbers = to_ring(values, bits, counts, members)
        reports = [counts * report for report in known]
        ends = to_ring(np.array([counts, examples, *reports]), 0, 1, members)
    except ValueError:  # the message must not reveal which value it is, or how large
        raise Diverged(
            f"a value is not finite, or too large for a sum of {members} clients with {bits} "
            "fractional bits. Lower privacy.bits, or the learning rate if the model diverges"
        ) from None
    return np.concatenate([body, numbers, ends])


@dataclass(frozen=True)
class Total:
    """The sum of the contributions to a slot, over these clients."""

    form: Form
    clients: tuple[int, ...]
    metrics: tuple[str, ...]
    values: NDArray[np.uint64]
    bits: int
    delta_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def _ends(self) -> Integers:
        return self.values[self.form.size + len(self.metrics) :].view(np.int64)

    @property
    def count(self) -> int:
        """The sum of the clients' weights."""
        return int(self._ends[0])

    @property
    def examples(self) -> int:
        """The number of samples of all clients."""
        return int(self._ends[1])

    @property
    def arrays(self) -> dict[str, Array]:
        """The weighted mean of the arrays."""
        return self.form.arrays(from_ring(self.values[: self.form.size], self.bits) / self.count)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each metric over the clients that report it, weighted as the arrays are."""
        sums = from_ring(self.values[self.form.size :][: len(self.metrics)], self.bits)
        known = self._ends[2:]
        return {
            name: float(total / reports)
            for name, total, reports in zip(self.metrics, sums, known, strict=True)
            if reports
        }


def length(form: Form, metrics: Sequence[str]) -> int:
    """The length of a contribution."""
    return form.size + 2 * len(metrics) + 2
