"""Partitions: how the samples of a data set are divided among clients.

Every partition returns sorted, disjoint index arrays, one per client. ``iid``, ``dirichlet``,
``shards``, ``quantity`` and ``column`` are complete: every sample is assigned to a client.
``label-skew`` assigns all samples of the labels that any client has, and ``primary-secondary`` as
many as its equal sizes and class shares permit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.data.heterogeneity import pairwise_kl
from coterie.data.partition_steps import (
    as_sorted_arrays,
    check_clients,
    check_label_groups,
    check_positive,
    check_whole,
    covering_label_sets,
    dirichlet_weights,
    distinct_label_sets,
    fill_up,
    partition_generator,
    present_classes,
)
from coterie.data.raw import Array
from coterie.data.splits import apportion
from coterie.errors import ConfigError, DataError, unknown
from coterie.registry import PARTITIONS

LEVELS = ("low", "mid", "high")
DRAWS = 100


@dataclass(frozen=True)
class Partition:
    """The samples of each client, and the clients' true groups and names, if there are any."""

    indices: list[Array]
    groups: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None


@PARTITIONS.register("iid")
def iid(labels: Array, clients: int, seed: int) -> Partition:
    """Shuffle, and divide into parts whose sizes differ by at most one. Complete.

    >>> [len(held) for held in iid(np.zeros(10), 3, seed=0).indices]
    [4, 3, 3]
    """
    check_clients(len(labels), clients, each=1)
    order = partition_generator(seed, "iid").permutation(len(labels))
    return Partition([np.sort(part) for part in np.array_split(order, clients)])


@PARTITIONS.register("dirichlet")
def dirichlet(
    labels: Array, clients: int, seed: int, alpha: float = 0.5, min_samples: int = 10
) -> Partition:
    """Each class is divided among the clients in proportions drawn from Dirichlet(alpha). Complete.

    The scheme of Yurochkin et al. (2019) and Hsu et al. (2019), but instead of drawing again, a
    client with fewer than ``min_samples`` gets random samples of the currently largest client.

    >>> held = dirichlet(np.repeat([0, 1], 50), 4, seed=0, alpha=0.1).indices
    >>> sum(len(h) for h in held), min(len(h) for h in held)
    (100, 10)
    """
    check_positive("alpha", alpha)
    check_clients(len(labels), clients, each=min_samples)
    rng = partition_generator(seed, "dirichlet")
    held: list[list[int]] = [[] for _ in range(clients)]
    for label in present_classes(labels, "dirichlet"):
        members = rng.permutation(np.flatnonzero(labels == label))
        counts = apportion(len(members), dirichlet_weights(alpha, clients, rng))
        for client, part in enumerate(np.split(members, np.cumsum(counts)[:-1])):
            held[client].extend(part.tolist())
    return Partition(fill_up(held, min_samples, rng))


@PARTITIONS.register("label-skew")
def label_skew(
    labels: Array, clients: int, seed: int, fraction: float = 0.2, groups: int | None = None
) -> Partition:
    """Each client has only a few labels; a label's samples are divided equally among its holders.

    Each client gets round(fraction * classes) random labels, at least one, such that every label
    has a holder if that is possible; labels without a holder are left out. With ``groups``, there
    are that many different label sets, and client i has the set i % groups, its true group. As in
    FedClust and NIID-bench.

    >>> y = np.repeat(np.arange(10), 20)
    >>> [np.unique(y[held]).size for held in label_skew(y, 5, seed=0, fraction=0.2).indices]
    [2, 2, 2, 2, 2]
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction = {fraction}: choose a number above 0, at most 1")
    check_clients(len(labels), clients, each=1)
    present = present_classes(labels, "label-skew")
    per_client = max(1, int(fraction * len(present) + 0.5))
    rng = partition_generator(seed, "label-skew")
    if groups is None:
        sets = covering_label_sets(len(present), per_client, clients, rng)
        assigned = [sets[i] for i in rng.permutation(clients)]
    else:
        check_label_groups(groups, clients, len(present), per_client)
        sets = distinct_label_sets(len(present), per_client, groups, rng)
        assigned = [sets[client % groups] for client in range(clients)]
    held: list[list[int]] = [[] for _ in range(clients)]
    for number, label in enumerate(present):
        holders = [client for client in range(clients) if number in assigned[client]]
        if holders:
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, part in zip(holders, np.array_split(members, len(holders)), strict=True):
                held[client].extend(part.tolist())
    true_groups = None if groups is None else tuple(c % groups for c in range(clients))
    return Partition(as_sorted_arrays(held), true_groups)


@PARTITIONS.register("shards")
def shards(labels: Array, clients: int, seed: int, per_client: int = 2) -> Partition:
    """Sort by label, cut into equal shards, and give each client ``per_client`` of them. Complete.

    McMahan et al. (2017). A shard has one class, or two if a class ends within it.

    >>> [len(held) for held in shards(np.repeat([0, 1], 20), 4, seed=0).indices]
    [10, 10, 10, 10]
    """
    check_whole("per_client", per_client, 1)
    check_clients(len(labels), clients, each=per_client)
    present_classes(labels, "shards")
    rng = partition_generator(seed, "shards")
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_label, clients * per_client)
    hands = rng.permutation(len(pieces)).reshape(clients, per_client)
    return Partition([np.sort(np.concatenate([pieces[i] for i in hand])) for hand in hands])


@PARTITIONS.register("primary-secondary")
def primary_secondary(
    labels: Array,
    clients: int,
    seed: int,
    size: int | None = None,
    balanced: bool = False,
    level: str | None = None,
) -> Partition:
    """Equal sizes; one class makes up 40-60 % of a client's data, another one 20-40 %.

    The rest is spread evenly over the other classes, as in DC-PFL. ``size`` is the number of
    samples of each client, by default the largest that the classes permit. As in the paper, each
    client's two classes are random; with ``balanced=True`` they are assigned in turn instead, so
    that no class runs out early and more of the data is used. ``level``, "low", "mid" or "high",
    draws 100 such partitions, and takes the first whose mean pairwise divergence of labels (see
    ``pairwise_kl``) is in that third of their range, as in the tables of the paper.

    >>> y = np.repeat(np.arange(10), 100)
    >>> held = primary_secondary(y, 5, seed=0, size=50).indices
    >>> all(20 <= np.bincount(y[own]).max() <= 30 for own in held)
    True
    """
    check_clients(len(labels), clients, each=1)
    present = present_classes(labels, "primary-secondary")
    if len(present) < 3:
        raise DataError(
            f"primary-secondary needs at least 3 classes, the data has {len(present)}; "
            "use 'dirichlet' instead"
        )
    supply = np.array([np.count_nonzero(labels == label) for label in present])

    def draw(draw_number: int) -> tuple[Array, np.random.Generator]:
        stream = "primary-secondary" + (f" {draw_number}" if draw_number else "")
        rng = partition_generator(seed, stream)
        tastes = _draw_tastes(clients, len(present), balanced, rng)
        return _counts_at(_feasible_size(tastes, supply, size), tastes), rng

    counts, rng = draw(0) if level is None else _draw_at(level, draw)
    held: list[list[int]] = [[] for _ in range(clients)]
    for number, label in enumerate(present):
        members = rng.permutation(np.flatnonzero(labels == label))
        for client, part in enumerate(np.split(members, np.cumsum(counts[:, number]))[:clients]):
            held[client].extend(part.tolist())
    return Partition(as_sorted_arrays(held))


def _draw_at(
    level: str, draw: Callable[[int], tuple[Array, np.random.Generator]]
) -> tuple[Array, np.random.Generator]:
    """The first of ``DRAWS`` draws whose divergence is in the requested third of their range."""
    if level not in LEVELS:
        raise ConfigError(unknown("level of primary-secondary", level, LEVELS))
    draws = [draw(number) for number in range(DRAWS)]
    matching = np.flatnonzero(thirds([pairwise_kl(counts) for counts, _ in draws]) == level)
    if not len(matching):
        raise DataError(
            f"primary-secondary: none of {DRAWS} draws has the level '{level}'; change clients or "
            "the seed"
        )
    return draws[int(matching[0])]


def thirds(values: Sequence[float]) -> Array:
    """The third of the range of all values that each value is in.

    >>> thirds([0.0, 1.0, 0.4, 0.3]).tolist()
    ['low', 'high', 'mid', 'low']
    """
    edges = np.linspace(min(values), max(values), len(LEVELS) + 1)[1:-1]
    third: Array = np.array(LEVELS)[np.digitize(values, edges)]
    return third


@dataclass(frozen=True)
class _Tastes:
    """Each client's ranking of the classes, and the shares of the first two."""

    order: Array
    primary_share: Array
    secondary_share: Array


def _draw_tastes(clients: int, classes: int, balanced: bool, rng: np.random.Generator) -> _Tastes:
    if balanced:
        # In each block of as many clients as classes, every class is primary once and secondary
        # once.
        deck = rng.permutation(classes)
        order = np.stack([np.roll(deck, -(i % classes)) for i in range(clients)])
        for start in range(0, clients, classes):
            shift = rng.integers(1, classes)
            block = order[start : start + classes]
            block[:, 1:] = np.roll(block[:, 1:], shift - 1, axis=1)
    else:
        order = rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)
    return _Tastes(order, rng.uniform(0.4, 0.6, clients), rng.uniform(0.2, 0.4, clients))


def _counts_at(size: int, tastes: _Tastes) -> Array:
    """The samples of each client and class for ``size`` per client, with shares in their ranges."""

    def within(share: Array, low: int, high: int) -> Array:
        tenths_up, tenths_down = -(-low * size // 10), high * size // 10
        nearest: Array = np.rint(size * share).astype(np.int64)
        return nearest.clip(tenths_up, tenths_down)

    clients, classes = tastes.order.shape
    primary = within(tastes.primary_share, 4, 6)
    secondary = within(tastes.secondary_share, 2, 4)
    rest, extra = np.divmod(size - primary - secondary, classes - 2)
    by_rank = np.empty((clients, classes), np.int64)
    by_rank[:, 0] = primary
    by_rank[:, 1] = secondary
    by_rank[:, 2:] = rest[:, None] + (np.arange(classes - 2) < extra[:, None])
    counts = np.empty_like(by_rank)
    np.put_along_axis(counts, tastes.order, by_rank, axis=1)
    return counts


def _feasible_size(tastes: _Tastes, supply: Array, requested: int | None) -> int:
    """The requested size, or the largest one for which no class runs out."""
    clients, classes = tastes.order.shape
    demand = _counts_at(1000, tastes).sum(axis=0) / 1000  # samples of each class per unit of size
    estimate = int((supply / np.maximum(demand, 1e-9)).min())
    # Because of rounding, a slightly larger size may be possible.
    largest = min(int(supply.sum()) // clients, estimate + classes + 10)
    # Below 4, no whole number of samples is within 40-60 %.
    while largest >= 4 and (_counts_at(largest, tastes).sum(axis=0) > supply).any():
        largest -= 1
    if largest < 4 or (requested is not None and not 4 <= requested <= largest):
        raise DataError(
            f"primary-secondary: {clients} clients of "
            f"{'at least 4' if requested is None else requested} samples each, but the classes "
            f"permit at most {max(largest, 0)} and each client needs at least 4; change size, use "
            "fewer clients or more samples"
        )
    return largest if requested is None else requested


@PARTITIONS.register("quantity")
def quantity(
    labels: Array,
    clients: int,
    seed: int,
    alpha: float = 0.5,
    law: str = "dirichlet",
    exponent: float = 1.0,
    min_samples: int = 10,
) -> Partition:
    """Equal labels, different sizes: Dirichlet(alpha), or a power law rank**-exponent. Complete.

    A client with fewer than ``min_samples`` gets samples of the currently largest client.

    >>> held = quantity(np.zeros(60, int), 3, seed=0, law="power", min_samples=1).indices
    >>> sorted(len(h) for h in held)
    [11, 16, 33]
    """
    check_clients(len(labels), clients, each=min_samples)
    rng = partition_generator(seed, "quantity")
    if law == "dirichlet":
        check_positive("alpha", alpha)
        weights = dirichlet_weights(alpha, clients, rng)
    elif law == "power":
        check_positive("exponent", exponent)
        weights = (1.0 + rng.permutation(clients)) ** -exponent
    else:
        raise ConfigError(f"law = {law!r}: choose 'dirichlet' or 'power'")
    counts = apportion(len(labels), weights)
    order = rng.permutation(len(labels))
    held = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
    return Partition(fill_up(held, min_samples, rng))


@PARTITIONS.register("column")
def column(labels: Array, clients: int | None, seed: int, by: Array) -> Partition:
    """One client for each value of a column of the user's data (a hospital, a writer). Complete.

    ``by`` has the column's value for every sample; clients are in the order of the sorted values
    and named after them. ``clients`` may be None or 0, for the number of values.

    >>> column(np.zeros(3), None, 0, by=np.array(["b", "a", "b"])).names
    ('a', 'b')
    """
    values = np.asarray(by)
    if values.shape != (len(labels),):
        raise DataError(
            f"the column to divide by has shape {values.shape}, but there are {len(labels)} samples"
        )
    names, owner = np.unique(values, return_inverse=True)
    if clients and clients != len(names):
        raise DataError(
            f"the column to divide by has {len(names)} different values, but clients = {clients}; "
            f"leave clients out or set it to {len(names)}"
        )
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))[:-1]
    return Partition(
        [np.sort(part) for part in np.split(order, ends)], names=tuple(str(name) for name in names)
    )
