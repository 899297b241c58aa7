"""What clients gain and risk by learning from others: two terms of the user-centric bound."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from coterie.clustering.arrays import Array, table
from coterie.errors import ConfigError


class MixingTerms(NamedTuple):
    """Each row's effective number of samples and weighted discrepancy."""

    effective: Array
    discrepancy: Array


def mixing_diagnostics(weights: ArrayLike, counts: ArrayLike, distances: ArrayLike) -> MixingTerms:
    """The two terms of the user-centric bound that depend on the weights, row by row.

    In theorems 1 and 2 of Mestoukirdi et al. (2023) the excess risk of client i, whose model
    minimises the loss weighted by w_i1 … w_in, is at most a constant times √(Σ_j w_ij²/n_j), plus
    a term that grows with Σ_j w_ij d_ij. The first is 1/√N_i, where N_i = 1/Σ_j(w_ij²/n_j) is the
    number of samples that the mixture is worth; it is at most Σ_j n_j, reached for w_ij ∝ n_j. The
    second is the weighted mean discrepancy to the clients whose data are used.

    ``weights`` has a row for each client that receives a mixture and a column for each client that
    is mixed in, rows summing to 1; ``counts`` are the samples n_j of the latter; ``distances`` are
    the discrepancies d_ij, of the same shape as the weights.

    The first client learns alone, the second mixes two clients of equal size equally:

    >>> terms = mixing_diagnostics([[1, 0], [0.5, 0.5]], [100, 100], [[0, 3], [3, 0]])
    >>> terms.effective.tolist(), terms.discrepancy.tolist()
    ([100.0, 200.0], [0.0, 1.5])
    """
    rows, discrepancies = (table(t).astype(np.float64, copy=False) for t in (weights, distances))
    samples = table(counts, 1).astype(np.float64, copy=False)
    if rows.shape != discrepancies.shape or rows.shape[1:] != samples.shape:
        raise ConfigError(
            f"mixing weights of shape {rows.shape} need distances of the same shape and a count "
            f"for each column, not shapes {discrepancies.shape} and {samples.shape}"
        )
    if rows.min() < 0 or discrepancies.min() < 0 or samples.min() < 0:
        raise ConfigError("mixing weights, counts and distances must not be negative")
    if not np.allclose(rows.sum(axis=1), 1.0):
        raise ConfigError("each row of mixing weights must sum to 1")
    with np.errstate(divide="ignore"):
        inverses = np.divide(rows**2, samples, out=np.zeros_like(rows), where=rows > 0)
    return MixingTerms(1.0 / inverses.sum(axis=1), (rows * discrepancies).sum(axis=1))
