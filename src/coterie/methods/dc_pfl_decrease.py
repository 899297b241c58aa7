"""Detect the end of a rapid decrease of the loss, after which DC-PFL tries finer groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from coterie.clustering.arrays import Array

Bend = Literal["slope", "convex", "absolute"]
BEFORE, AFTER = 18, 7  # rounds of the line before a bend, at most, and of the line after it
FEWEST, LEAST_STEPS = 6, 3  # rounds before the bend; steps from loss to loss on either side
SLOWER = 0.6  # a decrease is no longer rapid below this share of the earlier slope
SIGNIFICANT = 4.0  # standard errors; a noisy straight line then has a bend in 2 of 100 runs
_ROUNDING = 1e-9  # of the level; a smaller fall is rounding error


def has_ended(
    losses: Sequence[float],
    bend: Bend,
    smooth: int,
    observe: int,
    rounds: Sequence[int] | None = None,
) -> bool:
    """Whether the rapid decrease of these losses has just ended.

    "slope" compares the slopes of two lines. "convex" and "absolute" look for the smallest radius
    of curvature of the loss, smoothed over ``smooth`` rounds and confirmed by ``observe`` rounds:
    "convex" counts only upward bends and full windows, "absolute" any bend, as in DC-PFL's paper.
    ``rounds`` are the rounds of the losses, if some rounds have none.
    """
    if bend == "slope":
        return falls_slower(losses, rounds)
    return smallest(radii(losses, smooth, bend == "convex"), observe)


def falls_slower(losses: Sequence[float], rounds: Sequence[int] | None = None) -> bool:
    """Whether losses fall clearly more slowly in the last rounds than in those before.

    Two lines that share the loss of one round are fitted: to the last ``AFTER`` rounds, and to up
    to ``BEFORE`` rounds before them. The earlier line must fall, the later one less than ``SLOWER``
    times as fast, and the difference must be significant compared with the noise of the losses.

    >>> falls_slower([12.0 - t for t in range(12)] + [1.0] * 6)
    True
    >>> falls_slower([20.0 - t for t in range(18)])
    False
    """
    values = np.asarray(losses, np.float64)
    times = np.arange(len(values), dtype=np.float64)
    times = times if rounds is None else np.asarray(rounds, np.float64)
    if len(times) <= 2 * LEAST_STEPS:
        return False
    at = int(np.searchsorted(times, times[-1] - AFTER, side="right")) - 1
    at = min(at, len(times) - 1 - LEAST_STEPS)
    if at < LEAST_STEPS or times[at] - times[0] < FEWEST:
        return False
    first = slice(int(np.searchsorted(times, times[at] - BEFORE)), at + 1)
    second = slice(at, None)
    before, after = _slope(times[first], values[first]), _slope(times[second], values[second])
    fall = before * (times[at] - times[first][0] + 1)
    if not fall < -_ROUNDING * np.abs(values).max() or after < SLOWER * before:
        return False
    spreads = 1 / _spread(times[first]) + 1 / _spread(times[second])
    return bool(after - before > SIGNIFICANT * noise(values, times) * math.sqrt(spreads))


def noise(losses: ArrayLike, rounds: ArrayLike | None = None) -> float:
    """The standard deviation of independent noise on a smooth curve.

    Each loss is compared with the line through its neighbours; the bend of the curve itself between
    them is small compared with the noise.

    >>> noise([3.0, 2.0, 1.0, 0.0]), noise([3.0, 1.0, 0.0], rounds=[0, 2, 3])
    (0.0, 0.0)
    """
    values = np.asarray(losses, np.float64)
    times = np.arange(len(values), dtype=np.float64)
    times = times if rounds is None else np.asarray(rounds, np.float64)
    if len(values) < 3:
        return math.inf
    left = (times[2:] - times[1:-1]) / (times[2:] - times[:-2])  # the weight of the one before
    deviations = values[1:-1] - left * values[:-2] - (1 - left) * values[2:]
    return math.sqrt(float(np.mean(deviations**2 / (1 + left**2 + (1 - left) ** 2))))


def radii(losses: Sequence[float], smooth: int, convex: bool = False) -> list[float]:
    """The radius of curvature of the smoothed loss, (1 + l'²)^1.5/|l''|, from its third value on.

    With ``convex``, only full windows are averaged, and the radius is infinite where the loss does
    not bend upwards.

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


def _slope(times: Array, values: Array) -> float:
    """The slope of the least-squares line."""
    return float((times - times.mean()) @ values) / _spread(times)


def _spread(times: Array) -> float:
    """The sum of squared deviations from the mean.

    The variance of a fitted slope is the variance of the noise divided by this.
    """
    return float(np.square(times - times.mean()).sum())
