"""Clustering all clients' points in one exchange (k-FED): clients send centres, never points.

Nothing is drawn at random, and neither the order of the points nor that of the clients counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError
from coterie.grouping.arrays import Array, Labels, table
from coterie.grouping.distances import euclidean
from coterie.grouping.kmeans import kmeans


def local_centres(points: ArrayLike, k: int) -> tuple[Labels, Array]:
    """The client's half: k-means of its own points, with fewer centres if fewer points differ.

    >>> local_centres([[1.0], [9.0], [1.0]], 5)
    (array([0, 1, 0]), array([[1.],
           [9.]]))
    """
    rows = table(points)
    for count in range(min(k, len(np.unique(rows, axis=0))), 1, -1):
        try:
            return kmeans(rows, count)
        except ConfigError:  # rows that differ by less than rounding count as copies
            continue
    return kmeans(rows, 1)


def seed_centres(centres: Sequence[ArrayLike], k: int) -> Array:
    """The server's half: one client's centres, then farthest-first among all up to ``k``.

    ``centres`` holds those of each client. The paper begins with any client's; this is the one
    that has most of them, and of several the one whose closest two are farthest apart. Fewer than
    ``k`` when no more differ.

    >>> seed_centres([[[0.0], [1.0]], [[2.0], [9.0]], [[5.0]]], 4).ravel()
    array([2., 9., 5., 0.])
    """
    clients = [table(c).astype(np.float64) for c in centres]
    first = max(clients, key=lambda own: (len(own), _closest(own), own.tobytes()))
    if not len(first) <= k:
        raise ConfigError(f"{k} groups cannot begin with the {len(first)} centres of one client")
    everyone = np.concatenate(clients)
    # In an order of their own, so that ties do not fall by the order of the clients.
    rows = everyone[sorted(range(len(everyone)), key=lambda i: everyone[i].tobytes())]
    seeds = list(first)
    nearest = euclidean(rows, first).min(axis=1)
    while len(seeds) < k and nearest.max() > 0:
        seeds.append(rows[nearest.argmax()])
        nearest = np.minimum(nearest, euclidean(rows, seeds[-1][None])[:, 0])
    return np.stack(seeds)


def nearest_seed(centres: ArrayLike, seeds: ArrayLike) -> Labels:
    """The group of each centre: that of the nearest seed (ties: the first)."""
    found: Labels = euclidean(centres, seeds).argmin(axis=1)
    return found


def _closest(rows: Array) -> float:
    """The distance of the closest two rows."""
    apart = euclidean(rows)
    np.fill_diagonal(apart, np.inf)
    return float(apart.min())
