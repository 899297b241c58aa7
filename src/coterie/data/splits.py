"""Each client's own train, validation and test splits, stratified by label."""

from __future__ import annotations

import numpy as np

from coterie.data.raw import Array
from coterie.errors import ConfigError
from coterie.seeds import numpy_generator, seed_for


def check_fraction(name: str, value: float) -> None:
    """Raise an error if a fraction is outside [0, 1)."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name} = {value}: choose a number from 0 to below 1")


def apportion(total: int, weights: Array) -> Array:
    """Distribute ``total`` as whole numbers in proportion to the weights.

    By the largest remainder method: shares are rounded down, and what is left goes to the largest
    fractions (ties: to the first).

    >>> apportion(10, np.array([1.0, 1.0, 1.0])).tolist()
    [4, 3, 3]
    """
    exact = total * np.asarray(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)
    counts = np.floor(exact).astype(np.int64)
    remainder = total - int(counts.sum())
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[:remainder]] += 1
    return counts


def split_sizes(samples: int, test_fraction: float, val_fraction: float) -> tuple[int, int, int]:
    """The sizes of a client's train, val and test splits; train has at least one sample.

    With two samples, there is also a test sample, and with three a validation sample.

    >>> split_sizes(100, 0.2, 0.1), split_sizes(3, 0.2, 0.1), split_sizes(1, 0.2, 0.1)
    ((72, 8, 20), (1, 1, 1), (1, 0, 0))
    """
    val_at_least = 1 if val_fraction > 0 and samples >= 3 else 0
    test = 0
    if test_fraction > 0 and samples >= 2:
        target = int(samples * test_fraction + 0.5)
        test = min(max(target, 1), samples - 1 - val_at_least)
    remaining = samples - test
    val = min(max(int(remaining * val_fraction + 0.5), val_at_least), remaining - 1)
    return remaining - val, val, test


def split_client(
    labels: Array, test_fraction: float, val_fraction: float, seed: int, client: int
) -> tuple[Array, Array, Array]:
    """Split a client's positions into train, val and test: sorted, disjoint and complete.

    Float labels are regression targets, which are split at random; integer labels are stratified.
    The random stream is the client's own, so its splits do not depend on other clients.

    >>> train, val, test = split_client(np.repeat([0, 1], 50), 0.2, 0.1, seed=0, client=3)
    >>> len(train), len(val), len(test), int((test < 50).sum())
    (72, 8, 20, 10)
    """
    check_fraction("test_fraction", test_fraction)
    check_fraction("val_fraction", val_fraction)
    rng = numpy_generator(seed_for(seed, "split", client=client))
    strata = np.zeros(len(labels), np.int64) if labels.dtype.kind == "f" else labels
    _, val_size, test_size = split_sizes(len(labels), test_fraction, val_fraction)
    positions = np.arange(len(labels))
    remaining, test = _take_stratified(positions, strata, test_size, rng)
    train, val = _take_stratified(remaining, strata, val_size, rng)
    return train, val, test


def _take_stratified(
    positions: Array, strata: Array, size: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Take ``size`` positions in proportion to the strata: (remaining, taken)."""
    if size == 0:
        return positions, positions[:0]
    # Shuffling first chooses random members, and a random class for equal remainders.
    shuffled = rng.permutation(positions)
    values, first, members = np.unique(
        strata[shuffled], return_index=True, return_inverse=True, return_counts=False
    )
    in_random_order = np.argsort(first)
    counts = np.bincount(members, minlength=len(values))
    quota = np.empty(len(values), np.int64)
    quota[in_random_order] = apportion(size, counts[in_random_order])
    rank = _rank_within(members, len(values))
    taken = rank < quota[members]
    return np.sort(shuffled[~taken]), np.sort(shuffled[taken])


def _rank_within(members: Array, strata: int) -> Array:
    """The rank of each element within its stratum."""
    order = np.argsort(members, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(members, minlength=strata))[:-1]])
    rank = np.empty(len(members), np.int64)
    rank[order] = np.arange(len(members)) - starts[members[order]]
    return rank
