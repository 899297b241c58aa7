"""The building blocks of partitions: distributing samples, and checks of parameters."""

from __future__ import annotations

import itertools
import math

import numpy as np

from coterie.data.raw import Array
from coterie.errors import ConfigError, DataError
from coterie.seeds import numpy_generator, seed_for

# With more possible label sets than this, duplicates are so rare that drawing again is cheaper than
# listing all sets.
MOST_LISTED_SETS = 10_000


def partition_generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of the named partition."""
    return numpy_generator(seed_for(seed, "partition", stream=name))


def as_sorted_arrays(held: list[list[int]]) -> list[Array]:
    """Each client's indices, in increasing order."""
    return [np.sort(np.array(positions, dtype=np.int64)) for positions in held]


def dirichlet_weights(alpha: float, clients: int, rng: np.random.Generator) -> Array:
    """A draw from the symmetric Dirichlet(alpha) distribution, even if alpha is almost zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = rng.dirichlet(np.full(clients, alpha))
    if np.isfinite(weights).all() and weights.sum() > 0:
        return weights
    # A tiny alpha can underflow; its limit is that one client gets everything.
    one_hot = np.zeros(clients)
    one_hot[rng.integers(clients)] = 1.0
    return one_hot


def fill_up(held: list[list[int]], least: int, rng: np.random.Generator) -> list[Array]:
    """Bring every client to ``least`` samples by moving some from the currently largest client.

    If possible, they come from a single client, so that a client with few classes keeps few. This
    always terminates: with at least ``least`` samples per client in total, there is a client above
    whenever one is below, and each step moves at least one sample.
    """
    for positions in held:
        rng.shuffle(positions)  # so that the last ones, which are moved, are random
    sizes = np.array([len(positions) for positions in held])
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            largest = int(sizes.argmax())
            moved = int(min(least - sizes[client], sizes[largest] - least))
            held[client] += held[largest][-moved:]
            del held[largest][-moved:]
            sizes[largest] -= moved
            sizes[client] += moved
    return as_sorted_arrays(held)


def covering_label_sets(
    classes: int, size: int, sets: int, rng: np.random.Generator
) -> list[frozenset[int]]:
    """Random label sets of equal size that cover all labels, if ``sets`` of them can."""
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
    """Random label sets that are all different; the caller checks that enough of them exist."""
    chosen = list(dict.fromkeys(covering_label_sets(classes, size, sets, rng)))
    if math.comb(classes, size) <= MOST_LISTED_SETS:
        all_sets = _all_sets(classes, size)
        further = [
            all_sets[i] for i in rng.permutation(len(all_sets)) if all_sets[i] not in set(chosen)
        ]
        return (chosen + further)[:sets]
    while len(chosen) < sets:
        candidate = frozenset(rng.choice(classes, size, replace=False).tolist())
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


def _all_sets(classes: int, size: int) -> list[frozenset[int]]:
    return [frozenset(labels) for labels in itertools.combinations(range(classes), size)]


def check_label_groups(groups: int, clients: int, classes: int, size: int) -> None:
    """Raise an error unless each group has a client and a label set of its own."""
    check_whole("groups", groups, 1)
    if groups > clients:
        raise DataError(
            f"label-skew with groups = {groups} needs at least {groups} clients, but there "
            f"are {clients}: lower groups or raise clients"
        )
    possible = math.comb(classes, size)
    if groups > possible:
        raise DataError(
            f"label-skew with groups = {groups}: only {possible} different sets of {size} of the "
            f"{classes} labels exist; lower groups or change fraction"
        )


def check_whole(name: str, value: int, least: int) -> None:
    """Raise an error if a value is not a whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} = {value}: choose a whole number, at least {least}")


def check_positive(name: str, value: float) -> None:
    """Raise an error if a value is not a finite number above 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} = {value}: choose a number above 0")


def check_clients(samples: int, clients: int | None, each: int) -> None:
    """Raise an error if there are no clients, or fewer than ``each`` samples for each."""
    if clients is None:
        raise ConfigError("this partition needs the number of clients")
    check_whole("clients", clients, 1)
    check_whole("min_samples", each, 0)
    needed = clients * max(each, 1)
    if needed > samples:
        raise DataError(
            f"{clients} clients with at least {max(each, 1)} samples each need {needed} samples, "
            f"but there are only {samples}: use fewer clients, fewer samples each, or more data"
        )


def present_classes(labels: Array, name: str) -> Array:
    """The labels that occur; an error for regression targets, which have no classes."""
    if labels.dtype.kind == "f":
        raise DataError(
            f"the partition '{name}' needs class labels, but this is a regression data set; "
            "use 'iid', 'quantity' or 'column'"
        )
    return np.unique(labels)
