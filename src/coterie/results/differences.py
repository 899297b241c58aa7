"""Differences between methods, paired over seeds, and adjusted for the number of pairs.

The best method is chosen from the same numbers that it is then compared by. So all pairs of methods
count, not only those with the best: with twenty equal methods, the one that happens to be the
highest would otherwise look better than some other in far more than 5 % of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np

LEAST_SEEDS = 5  # with fewer seeds a test has hardly any power
LEVEL = 0.05
MARGIN = 0.005  # scores that differ by no more are equal: half a point
MOST_NEEDED = 1000  # numbers of seeds above this are not computed
# What may be said of a difference.
BETTER, WORSE, EQUAL, OPEN, UNTESTED = "better", "worse", "equal", "open", "untested"
SAME = 1e-12  # smaller differences of scores are rounding errors
_POWER = 0.8  # the probability with which the number of seeds that is needed settles it

Scores = Mapping[int, float]  # by seed
Name = TypeVar("Name", str, tuple[str, str])


@dataclass(frozen=True)
class Difference:
    """The difference of a method's scores to those of another, seed by seed.

    The interval from ``low`` to ``high`` holds at 95 % together with those of all other pairs
    (Bonferroni), and ``p`` is adjusted by Holm's procedure over all pairs; with fewer than five
    common seeds these are None. ``verdict`` is "better" or "worse" if p is at most 0.05, "equal" if
    the interval lies within the margin, "open" if neither, and "untested" with too few seeds.
    ``needed`` is about the number of seeds that would settle it; None if it cannot be told.
    """

    mean: float
    seeds: int
    verdict: str
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None


def differences(
    base: str, scores: Mapping[str, Scores], margin: float = MARGIN
) -> dict[str, Difference]:
    """The difference of each method to one of them, over the seeds that both have.

    ``base`` may be chosen by the scores: the intervals and p-values are adjusted for all pairs.

    >>> a = {0: 0.5, 1: 0.75, 2: 0.5, 3: 0.75, 4: 0.5}
    >>> found = differences("a", {"a": a, "b": {s: v - 0.25 for s, v in a.items()}})
    >>> found["b"].mean, found["b"].verdict
    (-0.25, 'worse')
    """
    names = list(scores)
    columns = {seed: place for place, seed in enumerate(sorted(set().union(*scores.values())))}
    table = np.full((len(names), len(columns)), np.nan)
    for row, name in zip(table, names, strict=True):
        for seed, score in scores[name].items():
            row[columns[seed]] = score
    first, second = np.triu_indices(len(names), 1)
    gaps = table[first] - table[second]
    counts = (~np.isnan(gaps)).sum(axis=1)
    usable = counts >= LEAST_SEEDS
    tested = {
        (names[i], names[j]): p
        for i, j, p in zip(first[usable], second[usable], _p_values(gaps[usable]), strict=True)
    }
    adjusted_p, pairs = adjusted(tested), len(tested) or int((counts > 0).sum())
    found: dict[str, Difference] = {}
    for name, row in zip(names, table, strict=True):
        gap = row - table[names.index(base)]
        gap = gap[~np.isnan(gap)]
        if name == base or not len(gap):
            continue
        pair = (base, name) if names.index(base) < names.index(name) else (name, base)
        found[name] = _difference(gap, adjusted_p.get(pair), pairs, margin)
    return found


def _difference(gap: np.ndarray, p: float | None, pairs: int, margin: float) -> Difference:
    mean = float(gap.mean())
    if len(gap) < 2:
        return Difference(mean, len(gap), UNTESTED)
    spread = 0.0 if np.ptp(gap) <= SAME else float(gap.std(ddof=1))
    needed = seeds_needed(mean, spread, pairs, margin)
    if p is None:
        return Difference(mean, len(gap), UNTESTED, needed=needed)
    half = _quantile(1 - LEVEL / (2 * pairs), len(gap) - 1) * spread / len(gap) ** 0.5
    low, high = mean - half, mean + half
    different = p <= LEVEL
    if different:  # Holm's procedure can tell the sign where Bonferroni's interval has both
        low, high = (max(low, 0.0), high) if mean > 0 else (low, min(high, 0.0))
    if max(abs(low), abs(high)) <= margin + SAME:
        verdict = EQUAL
    elif different:
        verdict = BETTER if mean > 0 else WORSE
    else:
        verdict = OPEN
    return Difference(mean, len(gap), verdict, low, high, p, needed)


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of a paired two-sided t-test; 0 or 1 if all differences are equal.

    >>> p_value([0.5, 0.75], [0.5, 0.75]), p_value([0.5, 0.75], [0.25, 0.5])
    (1.0, 0.0)
    """
    gap = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    return _p_values(gap[None])[0]


def _p_values(gaps: np.ndarray) -> list[float]:
    """The p-value of each row's mean; seeds that a row lacks are nan."""
    if not len(gaps):
        return []
    from scipy.special import stdtr  # scipy.stats takes ten times as long to import

    count = (~np.isnan(gaps)).sum(axis=1)
    mean = np.nansum(gaps, axis=1) / count
    squares = np.nansum((gaps - mean[:, None]) ** 2, axis=1)
    error = np.sqrt(squares / (count - 1) / count)
    constant = np.nanmax(gaps, axis=1) - np.nanmin(gaps, axis=1) <= SAME
    t = np.abs(mean) / np.where(constant, 1.0, error)
    alike = np.where(np.abs(mean) <= SAME, 1.0, 0.0)
    found: list[float] = np.where(constant, alike, 2 * stdtr(count - 1, -t)).tolist()
    return found


def _quantile(share: float, freedom: int) -> float:
    """A quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))


def adjusted(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """The p-values of several tests adjusted by Holm's procedure, which holds for any dependence.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none becomes smaller than
    the one before.

    >>> adjusted({"a": 0.5, "b": 0.125, "c": 0.25})
    {'b': 0.375, 'c': 0.5, 'a': 0.5}
    """
    found: dict[Name, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        found[name] = largest
    return found


def seeds_needed(
    mean: float, deviation: float, pairs: int = 1, margin: float = MARGIN
) -> int | None:
    """About how many seeds would settle a difference of this mean and deviation over seeds.

    It is settled if the interval excludes 0 or lies within the margin, with a probability of 80 %
    if mean and deviation stay as they are. None if a thousand seeds would not do.

    >>> seeds_needed(0.02, 0.01), seeds_needed(0.02, 0.01, pairs=15)
    (5, 8)
    """
    gap = max(abs(mean), margin - abs(mean))
    shares = (1 - LEVEL / (2 * max(1, pairs)), _POWER)
    # Student's quantiles are above the normal ones, so fewer seeds than these cannot do.
    at_least = (sum(map(NormalDist().inv_cdf, shares)) * deviation / gap) ** 2 if gap else math.inf
    if deviation == 0 or at_least > MOST_NEEDED:
        return None if deviation else LEAST_SEEDS
    for seeds in range(max(LEAST_SEEDS, math.ceil(at_least)), MOST_NEEDED + 1):
        sure = sum(_quantile(share, seeds - 1) for share in shares)
        if sure * deviation / seeds**0.5 <= gap:
            return seeds
    return None
