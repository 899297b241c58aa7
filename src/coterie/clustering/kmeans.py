"""K-means without a random seed: the groups do not depend on the order of the clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import linkage as scipy_linkage

from coterie.clustering.arrays import Array, Labels, one_thread, table
from coterie.clustering.distances import euclidean
from coterie.clustering.hierarchy import Dendrogram, canonical
from coterie.errors import ConfigError

STARTS = 10  # Ward's groups, farthest-first, and eight draws as in k-means++
_FEW_STARTS = 4  # for tables with many rows, where a start takes long and rarely ends badly
_MANY = 300  # rows
_TIE = 1e-12  # scores this close are equal: rounding must not choose the number of groups
_ROUNDS = 300
_LARGEST_TREE = 3000  # rows; a larger tree takes seconds, and memory quadratic in the rows


@dataclass(frozen=True, eq=False)
class Streams:
    """The chosen groups, their centres, their silhouette (0 for one group), and those of all k."""

    labels: Labels
    centres: Array
    silhouette: float
    scores: dict[int, float]


def kmeans(rows: ArrayLike, k: int, weights: ArrayLike | None = None) -> tuple[Labels, Array]:
    """Group rows into ``k`` clusters: the labels and centres with the lowest inertia of ten starts.

    ``weights`` say how much each row counts: a row of weight 2 equals two rows.

    >>> labels, centres = kmeans([[9.0], [0.0], [11.0], [1.0]], 2)
    >>> labels, centres.ravel()
    (array([0, 1, 0, 1]), array([10. ,  0.5]))
    """
    if k < 1:
        raise ConfigError(f"k-means needs at least 1 group, not {k}")
    search = Search(rows, k, weights)
    if k > search.distinct:
        raise ConfigError(f"k-means cannot form {k} groups from {search.distinct} distinct rows")
    return search.groups(k)


def kmeans_up_to(rows: ArrayLike, k: int) -> tuple[Labels, Array]:
    """Group rows into ``k`` clusters, or fewer if there are fewer distinct rows.

    >>> kmeans_up_to([[1.0], [9.0], [1.0]], 5)[0]
    array([0, 1, 0])
    """
    search = Search(rows, k)
    return search.groups(min(k, search.distinct))


def best_k(
    rows: ArrayLike, floor: float = 0.1, penalty: float = 0.0, most: int | None = None
) -> Streams:
    """Choose the k from 2 to n − 1 (or ``most``) with the highest silhouette − ``penalty``·k.

    Only silhouettes above ``floor`` count. If there is none, or fewer than three rows, or if all
    rows are identical, there is one group whose centre is the mean. Ties go to fewer groups.

    >>> best_k([[0.0], [0.1], [5.0], [5.1], [9.0], [9.1]]).labels
    array([0, 0, 1, 1, 2, 2])
    """
    from sklearn.metrics import silhouette_score

    search = Search(rows, most)
    limit = len(search.order) - 1 if most is None else min(most, len(search.order) - 1)
    distances = euclidean(search.rows)
    chosen, best = 1, -np.inf
    silhouette, scores = 0.0, {}
    for k in range(2, min(limit, search.distinct) + 1):
        labels = search.sorted_groups(k)
        scores[k] = score = float(silhouette_score(distances, labels, metric="precomputed"))
        if score > floor and score - penalty * k > best + _TIE:
            chosen, best, silhouette = k, score - penalty * k, score
    return Streams(*search.groups(chosen), silhouette, scores)


class Search:
    """K-means of one table for several numbers of groups, which share their preparations.

    ``most`` is the largest number of groups that will be requested (by default, the number of
    rows). Rows are sorted and duplicates are counted instead of kept, so the groups are the same,
    to the bit, for any order of the clients, and if every client is duplicated.
    """

    def __init__(
        self, rows: ArrayLike, most: int | None = None, weights: ArrayLike | None = None
    ) -> None:
        array = table(rows).astype(np.float64) + 0.0  # −0 and 0 count as equal
        self.order: Labels = np.array(sorted(range(len(array)), key=lambda i: array[i].tobytes()))
        self.rows: Array = array[self.order]
        counts = np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)
        self.weights: Array = counts[self.order]
        # Without centring, rows far from the origin have products so large that the differences
        # between them are rounding noise.
        mean = self.weights @ self.rows / self.weights.sum()
        points, copies = np.unique(self.rows - mean, axis=0, return_inverse=True)
        self._copies: Labels = copies.reshape(-1)
        self._points: Array = points
        self._mass: Array = np.bincount(self._copies, self.weights).astype(np.float64)
        self._most = len(points) if most is None else min(most, len(points))

    @property
    def distinct(self) -> int:
        """The number of distinct rows."""
        return len(self._points)

    def groups(self, k: int) -> tuple[Labels, Array]:
        """Canonical labels in the order of the clients, and each group's weighted mean row."""
        ordered = self.sorted_groups(k)
        labels = np.empty_like(ordered)
        labels[self.order] = ordered
        labels = canonical(labels)
        sorted_labels = labels[self.order]
        means = [
            np.average(
                self.rows[sorted_labels == g], axis=0, weights=self.weights[sorted_labels == g]
            )
            for g in range(labels.max() + 1)
        ]
        return labels, np.stack(means)

    def sorted_groups(self, k: int) -> Labels:
        """The labels of ``k`` groups, in the order of ``self.rows``."""
        if k == 1:
            return np.zeros(len(self.order), np.int64)
        best, lowest = np.zeros(len(self._points), np.int64), np.inf
        with one_thread():
            for centres in self._starts(k):
                labels, inertia = _lloyd(self._points, self._mass, centres)
                if inertia < lowest * (1 - _TIE):
                    best, lowest = labels, inertia
        return best[self._copies]

    def _starts(self, k: int) -> Iterator[Array]:
        """The initial centres of each start."""
        if self._tree is not None:
            labels = self._tree.cut_count(k)
            yield _means(self._points, self._mass, labels, k)
        for sequence in self._sequences:
            yield self._points[sequence[:k]]

    @cached_property
    def _tree(self) -> Dendrogram | None:
        if len(self._points) > _LARGEST_TREE:
            return None
        return Dendrogram(len(self._points), scipy_linkage(self._points, "ward"))

    @cached_property
    def _sequences(self) -> list[Labels]:
        """Sequences of initial rows: one farthest-first, the others drawn as in k-means++.

        A start with k groups takes the first k rows of a sequence. The draws have fixed seeds.
        """
        starts = STARTS if self.distinct <= _MANY else _FEW_STARTS
        drawn = [self._sequence(np.random.Generator(np.random.PCG64(i))) for i in range(starts - 2)]
        return [self._sequence(None), *drawn]

    def _sequence(self, random: np.random.Generator | None) -> Labels:
        """Rows that are each farthest from the earlier ones, or drawn by that distance squared."""
        nearest = np.einsum("ij,ij->i", self._points, self._points)
        first = nearest if random is None else np.ones(len(nearest))
        taken, chances = list[int](), first
        while len(taken) < self._most:
            if taken:
                differences = self._points - self._points[taken[-1]]
                squares = np.einsum("ij,ij->i", differences, differences)
                nearest = squares if len(taken) == 1 else np.minimum(nearest, squares)
                nearest[taken] = 0.0
                chances = nearest
            if random is None:
                taken.append(int(chances.argmax()))
                continue
            steps = np.cumsum(chances * self._mass)
            if not steps[-1] > 0:  # the remaining rows differ by less than rounding errors
                taken.append(next(i for i in range(self.distinct) if i not in set(taken)))
                continue
            taken.append(int(np.searchsorted(steps, random.random() * steps[-1], side="right")))
        return np.array(taken)


def _lloyd(points: Array, mass: Array, centres: Array) -> tuple[Labels, float]:
    """Lloyd's iterations from the given centres: the groups and their weighted inertia."""
    k = len(centres)
    norms = np.einsum("ij,ij->i", points, points)
    labels: Labels | None = None
    for _ in range(_ROUNDS):
        squares = norms[:, None] - 2 * points @ centres.T + np.einsum("ij,ij->i", centres, centres)
        nearest = squares.argmin(axis=1)
        sizes = np.bincount(nearest, minlength=k)
        if not sizes.all():  # an empty group takes the row farthest from its centre
            worst = np.argsort(-squares[np.arange(len(points)), nearest], kind="stable")
            for g in np.flatnonzero(sizes == 0):
                row = next(i for i in worst if sizes[nearest[i]] > 1)
                sizes[nearest[row]] -= 1
                nearest[row], sizes[g] = g, 1
        if labels is not None and (nearest == labels).all():
            break
        labels = nearest
        centres = _means(points, mass, labels, k)
    assert labels is not None
    differences = points - centres[labels]
    return labels, float(mass @ np.einsum("ij,ij->i", differences, differences))


def _means(points: Array, mass: Array, labels: Labels, k: int) -> Array:
    """The weighted mean of each group."""
    member = (labels == np.arange(k)[:, None]) * mass
    means: Array = (member @ points) / member.sum(axis=1, keepdims=True)
    return means
