"""Two parts that resemble each other as little as possible: CFL's split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coterie.clustering.arrays import table
from coterie.clustering.hierarchy import agglomerate
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Halves:
    """Two parts, and the largest similarity between members of different ones.

    Members are positions in the matrix, not clients: whoever takes some clients' rows of a larger
    one must look them up.
    """

    parts: tuple[tuple[int, ...], tuple[int, ...]]
    cross: float


def bipartition(similarity: ArrayLike) -> Halves:
    """The two parts whose largest similarity across the cut is the smallest there is.

    Pairs are merged by descending similarity until two parts are left; the first holds position 0.

    >>> bipartition([[1.0, -0.5, 0.9], [-0.5, 1.0, -0.2], [0.9, -0.2, 1.0]])
    Halves(parts=((0, 2), (1,)), cross=-0.2)
    """
    matrix = table(similarity).astype(np.float64)
    if matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ConfigError(
            f"two parts need a square matrix of two or more clients, not shape {matrix.shape}"
        )
    gaps = matrix.max() - matrix  # single linkage on these merges the most similar pair first
    np.fill_diagonal(gaps, 0.0)
    labels = agglomerate(gaps, "single").cut_count(2)
    one, two = (tuple(np.flatnonzero(labels == part).tolist()) for part in (0, 1))
    return Halves((one, two), float(matrix[np.ix_(one, two)].max()))
