"""K-means without a seed: the same groups whatever the order of the clients."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError
from coterie.grouping.arrays import Array, Labels, one_thread, table
from coterie.grouping.distances import euclidean
from coterie.grouping.hierarchy import canonical

_TIE = 1e-12  # scores this close are equal: rounding must not choose the number of groups


@dataclass(frozen=True, eq=False)
class Streams:
    """The groups chosen, their centres, their silhouette (0 for one group), and that of every k."""

    labels: Labels
    centres: Array
    silhouette: float
    scores: dict[int, float]


def kmeans(rows: ArrayLike, k: int) -> tuple[Labels, Array]:
    """``k`` groups and their centres, started farthest-first from the row farthest from the mean.

    >>> labels, centres = kmeans([[9.0], [0.0], [11.0], [1.0]], 2)
    >>> labels, centres.ravel()
    (array([0, 1, 0, 1]), array([10. ,  0.5]))
    """
    array, order = _sorted(rows)
    if k < 1:
        raise ConfigError(f"k-means needs at least 1 group, not {k}")
    labels = _lloyd(array, _farthest_first(array, k))
    found = len(np.unique(labels))
    if found < k:
        raise ConfigError(f"{k} groups were asked of {found} distinct rows")
    return _numbered(array, labels, order)


def kmeans_up_to(rows: ArrayLike, k: int) -> tuple[Labels, Array]:
    """The same with as many groups as there can be, at most ``k``: copies of a row are one.

    >>> kmeans_up_to([[1.0], [9.0], [1.0]], 5)[0]
    array([0, 1, 0])
    """
    for count in range(min(k, len(table(rows))), 1, -1):
        try:
            return kmeans(rows, count)
        except ConfigError:  # fewer rows differ, by more than rounding
            continue
    return kmeans(rows, 1)


def best_k(
    rows: ArrayLike, floor: float = 0.1, penalty: float = 0.0, most: int | None = None
) -> Streams:
    """The k from 2 to n − 1 (or ``most``) with the highest silhouette − ``penalty``·k.

    Only silhouettes above ``floor`` count; without one, with fewer than three rows or with
    identical ones, there is one group and its centre is the mean. Ties go to fewer groups.

    >>> best_k([[0.0], [0.1], [5.0], [5.1], [9.0], [9.1]]).labels
    array([0, 0, 1, 1, 2, 2])
    """
    from sklearn.metrics import silhouette_score

    array, order = _sorted(rows)
    limit = len(array) - 1 if most is None else min(most, len(array) - 1)
    starts = _farthest_first(array, max(limit, 1))
    distances = euclidean(array)
    chosen, best = np.zeros(len(array), np.int64), -np.inf
    silhouette, scores = 0.0, {}
    for k in range(2, len(starts) + 1):
        labels = _lloyd(array, starts[:k])
        if len(np.unique(labels)) < k:
            continue
        scores[k] = score = float(silhouette_score(distances, labels, metric="precomputed"))
        if score > floor and score - penalty * k > best + _TIE:
            chosen, best, silhouette = labels, score - penalty * k, score
    return Streams(*_numbered(array, chosen, order), silhouette, scores)


def _sorted(rows: ArrayLike) -> tuple[Array, Labels]:
    """Rows in an order of their own, and where each came from.

    All that follows is then bit for bit the same for any order of the clients, ties included.
    """
    array = table(rows).astype(np.float64)
    order = np.array(sorted(range(len(array)), key=lambda i: array[i].tobytes()))
    return array[order], order


def _farthest_first(rows: Array, k: int) -> Labels:
    """Up to ``k`` rows: the farthest from the mean, then each the farthest from those before it.

    Fewer when the rest are copies of rows already taken.
    """
    centred = rows - rows.mean(axis=0)
    nearest = np.einsum("ij,ij->i", centred, centred)
    taken = [int(nearest.argmax())]
    nearest[:] = np.inf
    while len(taken) < k:
        gap = rows - rows[taken[-1]]
        nearest = np.minimum(nearest, np.einsum("ij,ij->i", gap, gap))
        farthest = int(nearest.argmax())
        if not nearest[farthest] > 0:
            break
        taken.append(farthest)
    return np.array(taken)


def _lloyd(rows: Array, starts: Labels) -> Labels:
    if len(starts) == 1:
        return np.zeros(len(rows), np.int64)
    from sklearn.cluster import KMeans  # half of what it takes to import all of Coterie
    from sklearn.exceptions import ConvergenceWarning

    with one_thread(), warnings.catch_warnings():
        # Rows that differ by less than rounding count as copies: fewer groups, which callers see.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(len(starts), init=rows[starts], n_init=1, tol=0.0).fit(rows)
    labels: Labels = fitted.labels_.astype(np.int64)
    return labels


def _numbered(rows: Array, labels: Labels, order: Labels) -> tuple[Labels, Array]:
    """Canonical labels in the clients' own order, and each group's mean row."""
    own = np.empty_like(labels)
    own[order] = labels
    own = canonical(own)
    back = own[order]
    return own, np.stack([rows[back == g].mean(axis=0) for g in range(own.max() + 1)])
