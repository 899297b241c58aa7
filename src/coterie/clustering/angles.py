"""Angles, in degrees, between the subspaces spanned by clients' data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import subspace_angles

from coterie.clustering.arrays import Array, Real, one_thread, table
from coterie.clustering.distances import cosine
from coterie.errors import ConfigError


def basis(data: ArrayLike, p: int) -> Array:
    """The first ``p`` left singular vectors of a (features × samples) matrix, as columns."""
    array = table(data).astype(np.float64, copy=False)
    if not 1 <= p <= min(array.shape):
        raise ConfigError(f"data of shape {array.shape} do not have {p} singular vectors")
    with one_thread():
        vectors: Array = np.linalg.svd(array, full_matrices=False)[0]
    return vectors[:, :p].copy()


def principal_angles(a: ArrayLike, b: ArrayLike) -> Array:
    """The angles between the column spaces of two bases (features × p), ascending.

    >>> principal_angles([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0], [0.0], [1.0]]).round(9)
    array([45.])
    """
    left, right = table(a), table(b)
    if len(left) != len(right):
        raise ConfigError(f"bases of {len(left)} and {len(right)} features cannot be compared")
    with one_thread():
        angles: Array = np.degrees(
            subspace_angles(left.astype(np.float64), right.astype(np.float64))
        )
    return angles[::-1].copy()


def smallest_angle_matrix(bases: Sequence[ArrayLike]) -> Array:
    """The smallest principal angle between every two orthonormal bases (features × p each).

    It is computed from the distance between the closest unit vectors of the two subspaces, because
    the arc cosine of a small angle loses half of its digits.
    """
    stack = _stack(bases).astype(np.float64)
    angles = np.zeros((len(stack), len(stack)))
    with one_thread():
        for i, basis in enumerate(stack[:-1]):
            others = stack[i + 1 :]
            u, _, vt = np.linalg.svd(basis.T @ others)
            difference = u[:, :, 0] @ basis.T - np.einsum("nfp,np->nf", others, vt[:, 0])
            angles[i, i + 1 :] = _degrees(np.einsum("nf,nf->n", difference, difference) / 2)
    return angles + angles.T


def paired_angle_matrix(bases: Sequence[ArrayLike]) -> Array:
    """The sum of the angles between the k-th vectors of every two orthonormal bases.

    A singular vector has no sign, so each angle is the smaller one: arccos |u·v|.
    """
    stack = _stack(bases)
    angles = np.zeros((len(stack), len(stack)))
    for k in range(stack.shape[2]):
        vectors = stack[:, :, k]
        angles += _degrees(np.minimum(cosine(vectors), cosine(vectors, -vectors)))
    return np.triu(angles, 1) + np.triu(angles, 1).T


def _stack(bases: Sequence[ArrayLike]) -> Real:
    shapes = {np.shape(b) for b in bases}
    if len(shapes) != 1:
        raise ConfigError(f"bases must have the same shape to be compared, not {sorted(shapes)}")
    return table(np.stack([np.asarray(b) for b in bases]), dimensions=3)


def _degrees(cosine_distance: Array) -> Array:
    """The angle whose cosine distance 1 − cos is given: 1 − cos(a) = 2·sin²(a/2)."""
    degrees: Array = np.degrees(2 * np.arcsin(np.sqrt(np.clip(cosine_distance / 2, 0.0, 0.5))))
    return degrees
