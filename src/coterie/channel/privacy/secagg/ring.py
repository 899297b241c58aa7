"""Encodes real numbers as integers modulo 2^64, so that sums are exact and masks are uniform."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LIMIT = 1 << 63
"""The magnitude of sums must be below this, or their sign is lost."""


def to_ring(values: NDArray[np.float64], bits: int, weight: int, members: int) -> NDArray[np.int64]:
    """``weight`` times each value, rounded to a grid of step 2^-bits, ties to even.

    A value is refused if the sum of ``members`` such values could overflow, so no sum wraps around.

    >>> to_ring(np.array([0.5, -0.75, 0.125]), bits=2, weight=3, members=10)
    array([ 6, -9,  0])
    """
    if bits < 0 or weight != int(weight) or weight < 0 or members < 1:
        raise ValueError(f"bits {bits}, weight {weight} and members {members} make no ring")
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite, so it cannot be summed securely")
    with np.errstate(over="ignore"):  # to infinity, which is refused
        steps = np.rint(np.ldexp(values, bits))
    largest = float(np.abs(steps).max(initial=1.0))  # whole, so exact as an int
    if math.isinf(largest) or int(largest) * weight * members >= LIMIT:
        raise ValueError(
            f"a value of magnitude {np.abs(values).max(initial=0.0):.6g} with weight {weight} and "
            f"{members} members could overflow the 64-bit sum at {bits} bits after the point; "
            "use fewer bits"
        )
    return steps.astype(np.int64) * np.int64(weight)


def from_ring(total: NDArray[np.uint64], bits: int) -> NDArray[np.float64]:
    """Decode a sum: two's complement numbers in steps of 2^-bits.

    The result is exact below 2^53 steps, and the nearest float64 above.

    >>> from_ring(np.array([6, 2**64 - 9], dtype=np.uint64), bits=2)
    array([ 1.5 , -2.25])
    """
    signed = np.ascontiguousarray(total, dtype=np.uint64).view(np.int64)
    return np.ldexp(signed.astype(np.float64), -bits)
