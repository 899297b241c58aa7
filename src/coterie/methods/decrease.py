"""When a loss stops falling fast: DC-PFL's sign that it is time to look for finer groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from coterie.grouping.arrays import Array

Bend = Literal["slope", "convex", "absolute"]
BEFORE, AFTER, FEWEST = 18, 7, 6  # steps of the line before a round, of the line after it; at least
SLOWER = 0.6  # of the slope before: from there on, a decrease is no longer rapid
SIGNIFICANT = 4.0  # standard errors; a noisy straight line then has a bend in 2 of 100 runs
_ROUNDING = 1e-9  # of the level: a smaller fall is none


def has_ended(losses: Sequence[float], bend: Bend, smooth: int, observe: int) -> bool:
    """Whether the rapid decrease of these losses, the latest last, has just ended.

    "slope" compares the slopes of two lines; "convex" and "absolute" look for the smallest radius
    of curvature of the loss, smoothed over ``smooth`` rounds and confirmed by ``observe`` rounds:
    of bends to the right only, from full windows, or of any bend, as DC-PFL's paper has it.
    """
    if bend == "slope":
        return falls_slower(losses)
    return smallest(radii(losses, smooth, bend == "convex"), observe)


def falls_slower(losses: Sequence[float]) -> bool:
    """Whether losses fall clearly slower in the last rounds than in those before.

    Two lines are fitted that share the loss of one round: to the last ``AFTER`` steps, and to up to
    ``BEFORE`` steps before them. The first must fall, the second less than ``SLOWER`` times as
    fast, and the difference must be significant against the noise of the losses.

    >>> falls_slower([12.0 - t for t in range(12)] + [1.0] * 6)
    True
    >>> falls_slower([20.0 - t for t in range(18)])
    False
    """
    values = np.asarray(losses, np.float64)
    at = len(values) - 1 - AFTER
    if at < FEWEST:
        return False
    first, second = values[max(0, at - BEFORE) : at + 1], values[at:]
    before, after = _slope(first), _slope(second)
    if not before * len(first) < -_ROUNDING * np.abs(values).max() or after < SLOWER * before:
        return False
    error = noise(values) * math.sqrt(1 / _spread(len(first)) + 1 / _spread(len(second)))
    return bool(after - before > SIGNIFICANT * error)


def noise(losses: ArrayLike) -> float:
    """The standard deviation of independent noise on a smooth curve, from its second differences.

    A second difference of independent errors has six times their variance; what the curve itself
    bends in one round is small beside it.

    >>> noise([3.0, 2.0, 1.0, 0.0])
    0.0
    """
    bends = np.diff(np.asarray(losses, np.float64), 2)
    return math.sqrt(float(bends @ bends) / len(bends) / 6) if len(bends) else math.inf


def radii(losses: Sequence[float], smooth: int, convex: bool = False) -> list[float]:
    """The radius of curvature of the smoothed loss, (1 + l'²)^1.5/|l''|, from its third value on.

    With ``convex`` only full windows are means, and where the loss does not bend upwards the radius
    is infinite.

    >>> [round(r, 3) for r in radii([4.0, 2.0, 1.0, 0.5], smooth=1)]
    [2.828, 2.795]
    >>> [round(r, 3) for r in radii([4.0, 3.0, 1.0, 0.5], smooth=1, convex=True)]
    [inf, 0.932]
    """
    first = smooth - 1 if convex else 0
    level = [
        float(np.mean(losses[max(0, i + 1 - smooth) : i + 1])) for i in range(first, len(losses))
    ]
    slopes = np.diff(level)
    bends = np.diff(slopes) if convex else np.abs(np.diff(slopes))
    none = _ROUNDING * max(map(abs, level), default=0.0) if convex else 0.0
    return [
        float((1 + s * s) ** 1.5 / b) if b > none else math.inf
        for s, b in zip(slopes[1:], bends, strict=True)
    ]


def smallest(radii: Sequence[float], observe: int) -> bool:
    """Whether the radius was smaller ``observe`` rounds ago than in every round since.

    >>> smallest([9.0, 3.0, 4.0, 5.0, 3.5], 3), smallest([9.0, 3.0, 4.0, 2.0, 5.0], 3)
    (True, False)
    """
    return len(radii) > observe and all(radii[-1 - observe] < r for r in radii[-observe:])


def _slope(values: Array) -> float:
    """The slope of the line of least squares."""
    steps = np.arange(len(values)) - (len(values) - 1) / 2
    return float(steps @ values) / _spread(len(values))


def _spread(count: int) -> float:
    """The sum of squared deviations of 0, …, count − 1 from their mean.

    A slope's variance is that of the noise divided by it.
    """
    return count * (count * count - 1) / 12
