"""Input checks for the clustering functions, and the limit of one thread that they compute with."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import ThreadpoolController

from coterie.errors import ConfigError, TrainingError

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Real = NDArray[Any]  # float32 or float64, as passed in


def one_thread() -> AbstractContextManager[object]:
    """Limit BLAS and OpenMP to one thread, so that results do not depend on the number of cores."""
    limit: AbstractContextManager[object] = _controller("sklearn" in sys.modules).limit(limits=1)
    return limit


@cache
def _controller(with_sklearn: bool) -> Any:
    # Looking up the loaded libraries takes milliseconds, so do it once, and again once scikit-learn
    # has loaded its own.
    return ThreadpoolController()


def table(rows: ArrayLike, dimensions: int = 2) -> Real:
    """Return the rows as a non-empty array of finite floating-point numbers, copied if need be."""
    array = np.asarray(rows)
    if array.ndim != dimensions or not len(array):
        raise ConfigError(
            f"clustering needs a {dimensions}-dimensional array with at least one row, not one of "
            f"shape {array.shape}"
        )
    if not np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if not finite.all():
        raise TrainingError(
            f"row {int(np.argmin(finite))} contains values that are not finite (as do "
            f"{int((~finite).sum())} of {len(finite)} rows), so clients cannot be compared; did "
            "training diverge?"
        )
    return array


def pair(rows: ArrayLike, others: ArrayLike | None, dimensions: int = 2) -> tuple[Real, Real]:
    """Both sides of a comparison, of rows of one shape; without ``others``, one array twice."""
    left = table(rows, dimensions)
    if others is None:
        return left, left
    right = table(others, dimensions)
    if left.shape[1:] != right.shape[1:]:
        raise ConfigError(
            f"rows of shape {left.shape[1:]} and {right.shape[1:]} cannot be compared"
        )
    return left, right


def square(distances: ArrayLike) -> Array:
    """Check that distances are square, finite, symmetric, non-negative, with a zero diagonal."""
    matrix = table(distances).astype(np.float64, copy=False)
    if matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"a distance matrix must be square, not of shape {matrix.shape}")
    if matrix.min() < 0 or matrix.diagonal().any() or not np.allclose(matrix, matrix.T):
        raise ConfigError(
            "a distance matrix must be symmetric and non-negative, with a zero diagonal"
        )
    return matrix
