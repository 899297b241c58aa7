"""Angles between the subspaces that clients' data span, in degrees."""

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
        raise ConfigError(f"data of shape {array.shape} cannot give {p} singular vectors")
    with one_thread():
        vectors: Array = np.linalg.svd(array, full_matrices=False)[0]
    return vectors[:, :p].copy()


def principal_angles(a: ArrayLike, b: ArrayLike) -> Array:
    """The angles between the column spaces of two bases (features × p), ascending.

    >>> principal_angles([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0], [0.0], [1.0]]).round(9)
    array([45.])
    """
    one, two = table(a), table(b)
    if len(one) != len(two):
        raise ConfigError(f"bases of {len(one)} and {len(two)} features cannot be compared")
    with one_thread():
        found: Array = np.degrees(subspace_angles(one.astype(np.float64), two.astype(np.float64)))
    return found[::-1].copy()


def smallest_angle_matrix(bases: Sequence[ArrayLike]) -> Array:
    """The smallest principal angle between every two orthonormal bases (features × p each).

    It is taken from the distance of the closest unit vectors of the two spaces: the arc cosine
    loses half the digits of a small angle.
    """
    stack = _stack(bases).astype(np.float64)
    found = np.zeros((len(stack), len(stack)))
    with one_thread():
        for i, one in enumerate(stack[:-1]):
            rest = stack[i + 1 :]
            u, _, vt = np.linalg.svd(one.T @ rest)
            gap = u[:, :, 0] @ one.T - np.einsum("nfp,np->nf", rest, vt[:, 0])
            found[i, i + 1 :] = _degrees(np.einsum("nf,nf->n", gap, gap) / 2)
    return found + found.T


def paired_angle_matrix(bases: Sequence[ArrayLike]) -> Array:
    """The summed angles between the k-th vectors of every two orthonormal bases.

    A singular vector has no sign, so each angle is the smaller one: arccos |u·v|.
    """
    stack = _stack(bases)
    found = np.zeros((len(stack), len(stack)))
    for k in range(stack.shape[2]):
        vectors = stack[:, :, k]
        found += _degrees(np.minimum(cosine(vectors), cosine(vectors, -vectors)))
    return np.triu(found, 1) + np.triu(found, 1).T


def _stack(bases: Sequence[ArrayLike]) -> Real:
    shapes = {np.shape(b) for b in bases}
    if len(shapes) != 1:
        raise ConfigError(f"bases of one shape can be compared, not of {sorted(shapes)}")
    return table(np.stack([np.asarray(b) for b in bases]), dimensions=3)


def _degrees(cosine_distance: Array) -> Array:
    """The angle of 1 − cos, which is 2·sin² of half of it."""
    found: Array = np.degrees(2 * np.arcsin(np.sqrt(np.clip(cosine_distance / 2, 0.0, 0.5))))
    return found
