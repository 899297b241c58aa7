"""The steps that partitions are made of: dealing samples out, and refusing what cannot be dealt."""

from __future__ import annotations

import itertools
import math

import numpy as np

from coterie.data.raw import Array
from coterie.errors import ConfigError, DataError
from coterie.seeds import numpy_generator, seed_for

# Above this number of possible label sets, drawing one that was drawn before is so rare that
# drawing again is cheaper than listing them all.
MOST_LISTED_SETS = 10_000


def partition_generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of the partition of that name."""
    return numpy_generator(seed_for(seed, "partition", stream=name))


def as_sorted_arrays(held: list[list[int]]) -> list[Array]:
    """Each client's indices, in increasing order."""
    return [np.sort(np.array(own, dtype=np.int64)) for own in held]


def dirichlet_weights(alpha: float, clients: int, rng: np.random.Generator) -> Array:
    """One draw from the symmetric Dirichlet(alpha), also where alpha is almost zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = rng.dirichlet(np.full(clients, alpha))
    if np.isfinite(weights).all() and weights.sum() > 0:
        return weights
    # A tiny alpha can underflow; its limit is that one client gets everything.
    alone = np.zeros(clients)
    alone[rng.integers(clients)] = 1.0
    return alone


def fill_up(held: list[list[int]], least: int, rng: np.random.Generator) -> list[Array]:
    """Bring every client to ``least`` samples with those of whoever is largest at the moment.

    What a client lacks comes from one other if that one can spare it, so that few classes stay
    few. Ends always: with ``least`` samples a client in total, whenever somebody is below,
    somebody is above, and each step moves at least one sample.
    """
    for own in held:
        rng.shuffle(own)  # the last ones, which are moved, are then random ones
    sizes = np.array([len(own) for own in held])
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            largest = int(sizes.argmax())
            moved = int(min(least - sizes[poor], sizes[largest] - least))
            held[poor] += held[largest][-moved:]
            del held[largest][-moved:]
            sizes[largest] -= moved
            sizes[poor] += moved
    return as_sorted_arrays(held)


def covering_label_sets(
    classes: int, size: int, sets: int, rng: np.random.Generator
) -> list[frozenset[int]]:
    """Random label sets of one size that cover all labels, when ``sets`` of them can."""
    order = rng.permutation(classes)
    result: list[frozenset[int]] = []
    for start in range(0, classes, size):
        chunk = order[start : start + size]
        others = np.setdiff1d(order, chunk)
        extra = rng.choice(others, size - len(chunk), replace=False)
        result.append(frozenset(int(i) for i in np.concatenate([chunk, extra])))
    while len(result) < sets:
        result.append(frozenset(rng.choice(classes, size, replace=False).tolist()))
    return result[:sets]


def distinct_label_sets(
    classes: int, size: int, sets: int, rng: np.random.Generator
) -> list[frozenset[int]]:
    """The same, all different; the caller has checked that there are enough of them."""
    chosen = list(dict.fromkeys(covering_label_sets(classes, size, sets, rng)))
    if math.comb(classes, size) <= MOST_LISTED_SETS:
        every = _all_sets(classes, size)
        fresh = [every[i] for i in rng.permutation(len(every)) if every[i] not in set(chosen)]
        return (chosen + fresh)[:sets]
    while len(chosen) < sets:
        candidate = frozenset(rng.choice(classes, size, replace=False).tolist())
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


def _all_sets(classes: int, size: int) -> list[frozenset[int]]:
    return [frozenset(labels) for labels in itertools.combinations(range(classes), size)]


def check_label_groups(groups: int, clients: int, classes: int, size: int) -> None:
    """There must be a client for each group and a different label set for each."""
    check_whole("groups", groups, 1)
    if groups > clients:
        raise DataError(
            f"label-skew with groups = {groups} needs at least {groups} clients, there are "
            f"{clients}: lower groups or raise clients"
        )
    possible = math.comb(classes, size)
    if groups > possible:
        raise DataError(
            f"label-skew with groups = {groups}: only {possible} different sets of {size} of the "
            f"{classes} labels exist; lower groups or change fraction"
        )


def check_whole(name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number or too small."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} = {value}: choose a whole number, at least {least}")


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} = {value}: choose a number above 0")


def check_clients(samples: int, clients: int | None, each: int) -> None:
    """There must be clients, and ``each`` samples for every one of them."""
    if clients is None:
        raise ConfigError("this partition needs the number of clients")
    check_whole("clients", clients, 1)
    check_whole("min_samples", each, 0)
    needed = clients * max(each, 1)
    if needed > samples:
        raise DataError(
            f"{clients} clients with at least {max(each, 1)} samples each need {needed} samples, "
            f"but there are only {samples}: use fewer clients, fewer for each or more samples"
        )


def present_classes(labels: Array, name: str) -> Array:
    """The labels that occur; refuses regression targets, which have no classes."""
    if labels.dtype.kind == "f":
        raise DataError(
            f"the partition '{name}' goes by class labels, but this is a regression set; "
            "use 'iid', 'quantity' or 'column'"
        )
    return np.unique(labels)
