"""Clustering all clients' points in one exchange (k-FED): clients send centres, never points.

Nothing is drawn at random, and neither the order of the points nor that of the clients counts.
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
    """The client's half: k-means of its own points, with fewer centres if fewer points differ.

    Points are first projected on their ``k`` strongest singular vectors, which keeps the centres
    apart and leaves most of the noise behind; centres are means of the points themselves.

    >>> local_centres([[1.0], [9.0], [1.0]], 5)
    (array([0, 1, 0]), array([[1.],
           [9.]]))
    """
    rows = table(points).astype(np.float64)
    distinct, copy_of = np.unique(rows, axis=0, return_inverse=True)
    copy_of = copy_of.reshape(-1)
    order = np.argsort(copy_of, kind="stable")  # the same however the points came
    rows = rows[order]
    strongest = basis(rows.T, min(k, *rows.shape))
    with one_thread():
        flat = (distinct @ strongest)[copy_of]
    labels = kmeans_up_to(flat, min(k, len(distinct)))[0]
    groups = labels[order]
    return labels, np.stack([rows[groups == g].mean(axis=0) for g in range(labels.max() + 1)])


def seed_centres(centres: Sequence[ArrayLike], k: int) -> Array:
    """The server's half: one client's centres, then farthest-first among all up to ``k``.

    ``centres`` holds those of each client. The paper begins with any client's; this is the one
    that has most of them, and of several the one whose closest two are farthest apart. Fewer than
    ``k`` when no more differ.

    >>> seed_centres([[[0.0], [1.0]], [[2.0], [9.0]], [[5.0]]], 4).ravel()
    array([2., 9., 5., 0.])
    """
    # Sorted, so that neither ties nor the seeds' numbers depend on the order of anything.
    clients = [np.unique(table(c).astype(np.float64), axis=0) for c in centres]
    first = max(clients, key=lambda own: (len(own), _closest(own), own.tobytes()))
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
    """The group of each centre: that of the nearest seed (ties: the first)."""
    found: Labels = cdist(table(centres), table(seeds)).argmin(axis=1)
    return found


def _closest(rows: Array) -> float:
    """The distance of the closest two rows."""
    apart = cdist(rows, rows)
    np.fill_diagonal(apart, np.inf)
    return float(apart.min())
