"""One-shot clustering of all clients' points (k-FED): clients send centres, never points.

Nothing is random, and the result depends neither on the order of the points nor of the clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from coterie.clustering.angles import basis
from coterie.clustering.arrays import Array, Labels, one_thread, table
from coterie.clustering.kmeans import kmeans_up_to
from coterie.errors import ConfigError


def local_centres(points: ArrayLike, k: int) -> tuple[Labels, Array]:
    """The client's half: k-means of its points, with fewer centres if fewer points are distinct.

    Points are clustered after a projection onto their ``k`` strongest singular vectors, which
    separates the centres and removes most of the noise; centres are means of the original points.

    >>> local_centres([[1.0], [9.0], [1.0]], 5)
    (array([0, 1, 0]), array([[1.],
           [9.]]))
    """
    rows = table(points).astype(np.float64)
    distinct, copy_of = np.unique(rows, axis=0, return_inverse=True)
    copy_of = copy_of.reshape(-1)
    order = np.argsort(copy_of, kind="stable")  # does not depend on the order of the points
    rows = rows[order]
    strongest = basis(rows.T, min(k, *rows.shape))
    with one_thread():
        projected = (distinct @ strongest)[copy_of]
    labels = kmeans_up_to(projected, min(k, len(distinct)))[0]
    groups = labels[order]
    return labels, np.stack([rows[groups == g].mean(axis=0) for g in range(labels.max() + 1)])


def seed_centres(centres: Sequence[ArrayLike], k: int) -> Array:
    """The server's half: one client's centres, then farthest-first among all up to ``k``.

    ``centres`` has one array per client. The paper starts from the centres of any client; here, it
    is the client with the most centres and, of several, the one whose closest two centres are the
    farthest apart. There are fewer than ``k`` seeds if fewer centres are distinct.

    >>> seed_centres([[[0.0], [1.0]], [[2.0], [9.0]], [[5.0]]], 4).ravel()
    array([2., 9., 5., 0.])
    """
    # Sorted, so that ties and the numbering of the seeds do not depend on the order of the input.
    clients = [np.unique(table(c).astype(np.float64), axis=0) for c in centres]
    first = max(clients, key=lambda rows: (len(rows), _closest(rows), rows.tobytes()))
    if len(first) > k:
        raise ConfigError(f"{k} groups cannot begin with the {len(first)} centres of one client")
    rows = np.unique(np.concatenate(clients), axis=0)
    seeds = list(first)
    nearest = cdist(rows, first).min(axis=1)
    while len(seeds) < k and nearest.max() > 0:
        seeds.append(rows[nearest.argmax()])
        nearest = np.minimum(nearest, cdist(rows, seeds[-1][None])[:, 0])
    return np.stack(seeds)


def nearest_seed(centres: ArrayLike, seeds: ArrayLike) -> Labels:
    """The group of each centre: the number of the nearest seed (ties: the first)."""
    labels: Labels = cdist(table(centres), table(seeds)).argmin(axis=1)
    return labels


def _closest(rows: Array) -> float:
    """The distance between the closest two rows."""
    distances = cdist(rows, rows)
    np.fill_diagonal(distances, np.inf)
    return float(distances.min())
