"""Density-based clustering, and a statistic that tells whether there are clusters at all."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from coterie.clustering.arrays import Array, Labels, one_thread, square, table
from coterie.clustering.hierarchy import canonical
from coterie.errors import ConfigError


def dbscan(distances: ArrayLike, eps: float, min_points: int = 2) -> Labels:
    """DBSCAN of a distance matrix; a noise point is a group of its own.

    A client counts as one of its own ``min_points`` neighbours within ``eps``. A client on the
    border of two groups joins the group of the nearest dense client; plain DBSCAN lets the order
    of the clients decide.

    >>> points = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> dbscan(abs(points - points.T), eps=1.0)
    array([0, 0, 0, 1])
    """
    if not eps > 0 or min_points < 1:
        raise ConfigError(
            f"DBSCAN needs a radius above 0 and at least 1 point, not {eps} and {min_points}"
        )
    from sklearn.cluster import DBSCAN

    matrix = square(distances)
    with one_thread():
        fitted = DBSCAN(eps=eps, min_samples=min_points, metric="precomputed").fit(matrix)
    labels, dense = fitted.labels_.astype(np.int64), fitted.core_sample_indices_
    border = np.setdiff1d(np.flatnonzero(labels >= 0), dense)
    if len(border):
        labels[border] = labels[dense[matrix[np.ix_(border, dense)].argmin(axis=1)]]
    noise = labels < 0
    labels[noise] = labels.max() + 1 + np.arange(noise.sum())
    return canonical(labels)


def hopkins(points: ArrayLike, generator: np.random.Generator, draws: int = 10) -> float:
    """The Hopkins statistic: about 0.5 without clusters, towards 1 with them.

    A fifth of the points (at least two), drawn without replacement, is compared with as many
    uniform random points in the bounding box. With u the L2 distance of a uniform point to the
    nearest point, and w that of a drawn point to the nearest other point, the statistic is the
    mean of Σu / (Σu + Σw) over ``draws``. It is 0.5 for fewer than three points or identical ones.

    >>> hopkins([[0.0], [0.001], [1.0], [1.001]], np.random.default_rng(0)) > 0.9
    True
    """
    array = table(points).astype(np.float64, copy=False)
    if draws < 1:
        raise ConfigError(f"the Hopkins statistic needs at least one draw, not {draws}")
    low, high = array.min(axis=0), array.max(axis=0)
    if len(array) < 3 or (low == high).all():
        return 0.5
    distances = cdist(array, array)
    np.fill_diagonal(distances, np.inf)
    return float(np.mean([_draw(array, distances.min(axis=1), generator) for _ in range(draws)]))


def _draw(points: Array, nearest: Array, generator: np.random.Generator) -> float:
    count = max(2, len(points) // 5)
    w = nearest[generator.choice(len(points), count, replace=False)].sum()
    uniform = generator.uniform(points.min(axis=0), points.max(axis=0), (count, points.shape[1]))
    u = cdist(uniform, points).min(axis=1).sum()
    return float(u / (u + w))
