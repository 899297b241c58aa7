"""What the grouping functions accept, and the one thread that they compute on."""

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
Real = NDArray[Any]  # float32 or float64, as it came


def one_thread() -> AbstractContextManager[object]:
    """BLAS and OpenMP on one thread, so that the bits do not depend on the number of cores."""
    limit: AbstractContextManager[object] = _controller("sklearn" in sys.modules).limit(limits=1)
    return limit


@cache
def _controller(with_sklearn: bool) -> Any:
    # Looking up the loaded libraries takes milliseconds: once, and once more for sklearn's own.
    return ThreadpoolController()


def table(rows: ArrayLike, dimensions: int = 2) -> Real:
    """An array of finite floating-point numbers with at least one row, not copied if it is one."""
    array = np.asarray(rows)
    if array.ndim != dimensions or not len(array):
        raise ConfigError(
            f"grouping needs {dimensions}-dimensional data of at least one client, "
            f"not shape {array.shape}"
        )
    if not np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    fine = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if not fine.all():
        raise TrainingError(
            f"row {int(np.argmin(fine))} holds numbers that are not finite ({int((~fine).sum())} "
            f"of {len(fine)} rows do), so clients cannot be compared; did training diverge?"
        )
    return array


def pair(rows: ArrayLike, others: ArrayLike | None, dimensions: int = 2) -> tuple[Real, Real]:
    """Both sides of a comparison, of one width; the same object twice when there is one side."""
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
    """A distance matrix: square, finite, symmetric, not negative, zero on the diagonal."""
    matrix = table(distances).astype(np.float64, copy=False)
    if matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"a distance matrix is square, not of shape {matrix.shape}")
    if matrix.min() < 0 or matrix.diagonal().any() or not np.allclose(matrix, matrix.T):
        raise ConfigError(
            "a distance matrix is symmetric, not negative, and zero on its diagonal; this is not"
        )
    return matrix
