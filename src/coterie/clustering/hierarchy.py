"""Agglomerative clustering: merge the two closest groups until one is left, then choose a cut."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import squareform

from coterie.clustering.arrays import Array, Labels, square
from coterie.errors import ConfigError, unknown

LINKAGES = ("average", "complete", "single", "ward")
_TIE = 1e-12  # silhouettes this close are equal: rounding must not choose the number of groups


def canonical(labels: ArrayLike) -> Labels:
    """The same groups, numbered by their smallest member: 0 is client 0's group.

    >>> canonical([7, 3, 7, 0])
    array([0, 1, 0, 2])
    """
    _, first, group = np.unique(np.asarray(labels), return_index=True, return_inverse=True)
    numbers: Labels = np.argsort(np.argsort(first)).astype(np.int64)[group.reshape(-1)]
    return numbers


@dataclass(frozen=True, eq=False)
class Dendrogram:
    """The merges of ``clients`` leaves, lowest first, as SciPy's: left, right, height, size.

    Every cut undoes the merges above some point, so cuts are nested: a lower one refines a
    higher one.
    """

    clients: int
    merges: Array

    @property
    def heights(self) -> Array:
        """The height of each merge, ascending."""
        return self.merges[:, 2]

    def cut(self, height: float) -> Labels:
        """The groups whose merges lie at or below ``height``; 0 joins exact duplicates only."""
        if math.isnan(height):
            raise ConfigError("a dendrogram cannot be cut at a height that is not a number")
        return self._after(int(np.searchsorted(self.heights, height, side="right")))

    def cut_normalised(self, gamma: float) -> Labels:
        """The cut at ``gamma`` times the last merge's height; one group from ``gamma`` 1 on."""
        if not gamma >= 0:
            raise ConfigError(f"a normalised height is 0 or more, not {gamma}")
        if gamma >= 1 or not len(self.merges):
            return self._after(len(self.merges))
        return self.cut(gamma * float(self.heights[-1]))

    def cut_count(self, k: int) -> Labels:
        """Exactly ``k`` groups: the last k − 1 merges undone, also where their heights tie."""
        if not 1 <= k <= self.clients:
            raise ConfigError(f"{self.clients} clients cannot form {k} groups")
        return self._after(self.clients - k)

    def reach_normalised(self, groups: Sequence[Hashable]) -> float:
        """The height of the highest merge that joins members of one group, over the last one's.

        It is the lowest cut at which nobody is apart from its group; 0 if everybody is alone.

        >>> agglomerate([[0, 1, 8], [1, 0, 6], [8, 6, 0]]).reach_normalised("aab")
        0.14285714285714285
        """
        inside = [{g} for g in groups]
        highest = 1.0 if len(set(groups)) == 1 else 0.0
        for left, right, height, _ in self.merges:
            parts = inside[int(left)], inside[int(right)]
            if parts[0] & parts[1]:
                highest = float(height / (self.heights[-1] or 1.0))
            inside.append(parts[0] | parts[1])
        return highest

    def to_list(self) -> list[list[int | float]]:
        """The merges as plain numbers, for JSON."""
        return [[int(a), int(b), float(h), int(size)] for a, b, h, size in self.merges]

    def _after(self, count: int) -> Labels:
        """The groups after the first ``count`` merges."""
        root = np.arange(self.clients + count)
        for i in reversed(range(count)):  # from the top, so that a root is known before its parts
            left, right = self.merges[i, :2].astype(int)
            root[left] = root[right] = root[self.clients + i]
        return canonical(root[: self.clients])


def agglomerate(distances: ArrayLike, linkage: str = "average") -> Dendrogram:
    """Merge clients by a distance matrix; ``linkage`` is the distance between two groups.

    ``average`` is the mean over all pairs of members (UPGMA), ``single`` the smallest, ``complete``
    the largest.

    >>> tree = agglomerate([[0, 1, 8], [1, 0, 6], [8, 6, 0]])
    >>> tree.to_list(), tree.cut(1.5)
    ([[0, 1, 1.0, 2], [2, 3, 7.0, 3]], array([0, 0, 1]))
    """
    if linkage not in LINKAGES:
        raise ConfigError(unknown("linkage", linkage, LINKAGES))
    matrix = square(distances)
    if len(matrix) == 1:
        return Dendrogram(1, np.empty((0, 4)))
    return Dendrogram(len(matrix), scipy_linkage(squareform(matrix, checks=False), linkage))


@dataclass(frozen=True, eq=False)
class Cut:
    """The groups chosen, a height that yields them, their silhouette, and that of every count.

    One group has no silhouette; it is given as 0.
    """

    labels: Labels
    height: float
    silhouette: float
    scores: dict[int, float]


def best_cut(distances: ArrayLike, dendrogram: Dendrogram, floor: float = 0.1) -> Cut:
    """The cut with the highest silhouette among 2 to n − 1 groups (ties: fewer groups).

    A cut counts if its silhouette exceeds ``floor`` both as a mean over clients and as a mean over
    groups: one client that stands out by chance gives all the others a good silhouette, but is a
    group whose own is 0. One group if no cut counts, if all clients are identical, or if there are
    fewer than three clients: two have no silhouette, and are never separated. Where merges tie
    exactly no height separates them; the count still does, and ``height`` is then the tied one.

    >>> matrix = [[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 9, 1, 0]]
    >>> best_cut(matrix, agglomerate(matrix)).labels
    array([0, 0, 1, 1])
    """
    matrix = square(distances)
    if len(matrix) != dendrogram.clients:
        raise ConfigError(f"{len(matrix)} distances, but a tree of {dendrogram.clients} clients")
    heights = dendrogram.heights
    both = _silhouettes(matrix, dendrogram) if heights.any() else {}
    scores = {k: over_clients for k, (over_clients, _) in both.items()}
    best = 1
    for k, score in scores.items():
        if min(both[k]) > floor and (best == 1 or score > scores[best] + _TIE):
            best = k
    if best == 1:
        last = float(heights[-1]) if len(heights) else 0.0
        return Cut(dendrogram.cut_count(1), last, 0.0, scores)
    below, above = heights[-best], heights[1 - best]
    middle = below + (above - below) / 2
    height = float(middle if middle < above else below)
    return Cut(dendrogram.cut_count(best), height, scores[best], scores)


def _silhouettes(matrix: Array, dendrogram: Dendrogram) -> dict[int, tuple[float, float]]:
    """The silhouette of every cut into 2 to n − 1 groups: its mean over clients, and over groups.

    From the leaves up, a merge only adds two rows of sums: ten times faster, for a thousand
    clients, than each cut from scratch.
    """
    n = len(matrix)
    sums = matrix.copy()  # of each group (row) over its members, to each client
    sizes = np.ones(n)
    place = {i: i for i in range(n)}  # where each node of the tree has its row
    group = np.arange(n)  # the row of each client's group
    scores = {}
    for i, (left, right) in enumerate(dendrogram.merges[:-1, :2].astype(int)):
        kept, freed = sorted((place.pop(int(left)), place.pop(int(right))))
        last = n - 1 - i
        sums[kept] += sums[freed]
        sizes[kept] += sizes[freed]
        group[group == freed] = kept
        if freed != last:  # rows in use stay together at the front
            sums[freed], sizes[freed] = sums[last], sizes[last]
            group[group == last] = freed
            moved = next(node for node, row in place.items() if row == last)
            place[moved] = freed
        place[n + i] = kept
        scores[last] = _silhouette(sums[:last], sizes[:last], group)
    return dict(sorted(scores.items()))


def _silhouette(sums: Array, sizes: Array, group: Labels) -> tuple[float, float]:
    everyone = np.arange(len(group))
    within = sums[group, everyone] / np.maximum(sizes[group] - 1, 1)
    means = sums / sizes[:, None]
    means[group, everyone] = np.inf
    nearest = means.min(axis=0)
    largest = np.maximum(within, nearest)
    apart = (sizes[group] > 1) & (largest > 0)  # a singleton scores 0, and so do duplicates
    scores = np.where(apart, (nearest - within) / np.where(apart, largest, 1.0), 0.0)
    return float(scores.mean()), float((scores / sizes[group]).sum() / len(sizes))
