"""CFL's split of a group of clients into the two most dissimilar parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coterie.clustering.arrays import table
from coterie.clustering.hierarchy import agglomerate
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Bipartition:
    """Two parts of a group, and the largest similarity between members of different parts.

    Members are row numbers of the similarity matrix. If its rows are only some of the clients, the
    caller has to translate them into clients.
    """

    parts: tuple[tuple[int, ...], tuple[int, ...]]
    cross: float


def bipartition(similarity: ArrayLike) -> Bipartition:
    """Split in two such that the largest similarity between the parts is as small as possible.

    Pairs are merged by descending similarity until two parts are left; the first contains row 0.

    >>> bipartition([[1.0, -0.5, 0.9], [-0.5, 1.0, -0.2], [0.9, -0.2, 1.0]])
    Bipartition(parts=((0, 2), (1,)), cross=-0.2)
    """
    matrix = table(similarity).astype(np.float64)
    if matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ConfigError(
            f"a split needs a square matrix of at least two clients, not shape {matrix.shape}"
        )
    distances = matrix.max() - matrix  # single linkage on these merges the most similar pair first
    np.fill_diagonal(distances, 0.0)
    labels = agglomerate(distances, "single").cut_count(2)
    first, second = (tuple(np.flatnonzero(labels == part).tolist()) for part in (0, 1))
    return Bipartition((first, second), float(matrix[np.ix_(first, second)].max()))
