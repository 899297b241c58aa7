"""Distances between clients: each function returns a full float64 matrix.

The input is never copied to float64 as a whole but converted a block of columns at a time, so that
comparing a thousand models takes little more memory than the models themselves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cdist, pdist, squareform
from scipy.special import rel_entr

from coterie.clustering.arrays import Array, Labels, Real, one_thread, pair, table
from coterie.errors import ConfigError

_COLUMNS = 2048  # in a block of a matrix product
_COLUMNS_L1 = 1024  # a block of 1,000 rows stays in the cache: the fastest width measured
_NUMBERS = 2**21  # in a temporary array of an elementwise loop: 16 MB
_CLOSE = 1e-8  # of the squared norms: a difference of products below this is inaccurate


def euclidean(rows: ArrayLike, others: ArrayLike | None = None, offset: float = 0.0) -> Array:
    """L2 distances between all rows, or from every row to every one of ``others``.

    ``offset`` is the small constant that FedTSDP (as torch's ``pairwise_distance``) adds to every
    coordinate of the difference. ‖a − b + offset‖ is not symmetric, so its root mean square over
    both directions, √(‖a − b‖² + d·offset²), is returned, also for two rows with equal values. The
    diagonal is 0; between ``rows`` and ``others`` the offset always applies.

    >>> euclidean(np.array([[0.0, 0.0], [3.0, 4.0]]))
    array([[0., 5.],
           [5., 0.]])
    """
    left, right = pair(rows, others)
    exponent = _exponent(max(_largest(left).max(), _largest(right).max()))
    unit = np.full(1, math.ldexp(1.0, exponent))  # dividing by a power of two is exact
    a = _Side(left, (unit,) if exponent else ())
    squares = _squares(a, None if others is None else a._replace(rows=right))
    distances: Array = np.ldexp(np.sqrt(squares), exponent)
    if offset:
        distances = np.hypot(distances, offset * math.sqrt(left.shape[1]))
        if others is None:
            np.fill_diagonal(distances, 0.0)
    return distances


def cosine(rows: ArrayLike, others: ArrayLike | None = None) -> Array:
    """Cosine distances 1 − cos, in [0, 2].

    They are computed as half the squared distances between unit vectors, which is accurate for
    nearly parallel rows. A zero vector is at distance 1 from all other vectors, and at distance 0
    from another zero vector.

    >>> cosine(np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    array([[0., 1., 2.],
           [1., 0., 1.],
           [2., 1., 0.]])
    """
    left, right = pair(rows, others)
    a, zero = _units(left)
    b, other_zero = (a, zero) if others is None else _units(right)
    distances = np.minimum(_squares(a, None if others is None else b) / 2, 2.0)
    distances[zero[:, None] ^ other_zero] = 1.0
    return distances


def manhattan(rows: ArrayLike) -> Array:
    """L1 distances between all rows.

    >>> manhattan(np.array([[0.0, 0.0], [3.0, 4.0]]))
    array([[0., 7.],
           [7., 0.]])
    """
    array = table(rows)
    blocks = (array[:, c].astype(np.float64) for c in _blocks(array.shape[1], _COLUMNS_L1))
    distances: Array = squareform(sum(pdist(block, "cityblock") for block in blocks))
    return distances


def min_max(rows: ArrayLike) -> Array:
    """Scale each row to [0, 1] by its own minimum and maximum; a constant row becomes zeros.

    >>> min_max(np.array([[1.0, 2.0, 5.0], [7.0, 7.0, 7.0]]))
    array([[0.  , 0.25, 1.  ],
           [0.  , 0.  , 0.  ]])
    """
    array = table(rows)
    return _scaled(array, _extent(array))


def scaled_l1(rows: ArrayLike, others: ArrayLike | None = None) -> Array:
    """DC-PFL's model discrepancy: the mean absolute difference of the ``min_max``-scaled rows.

    >>> scaled_l1(np.array([[0.0, 1.0, 4.0], [0.0, 2.0, 2.0]]))
    array([[0.  , 0.25],
           [0.25, 0.  ]])
    """
    left, right = pair(rows, others)
    extent = _extent(left)
    other_extent = extent if others is None else _extent(right)
    total: Array | float = 0.0
    for columns in _blocks(left.shape[1], _COLUMNS_L1):
        scaled = _scaled(left[:, columns], extent)
        if others is None:
            total = total + pdist(scaled, "cityblock")
        else:
            total = total + cdist(scaled, _scaled(right[:, columns], other_extent), "cityblock")
    mean: Array = np.asarray(total) / max(left.shape[1], 1)
    return _symmetric(mean, len(left)) if others is None else mean


def jensen_shannon(p: ArrayLike, others: ArrayLike | None = None) -> Array:
    """Jensen–Shannon divergences (natural logarithm, no square root), averaged over samples.

    ``p`` has the shape (clients, samples, classes) and holds probabilities; each result lies in
    [0, ln 2].

    >>> one, two = [[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]
    >>> jensen_shannon(np.array([one, two])).round(4)  # ln 2 for the first sample, 0 for the next
    array([[0.    , 0.3466],
           [0.3466, 0.    ]])
    """
    left, right = pair(p, others, dimensions=3)
    for side in (left,) if others is None else (left, right):
        _check_probabilities(side)
    divergences = np.zeros((len(left), len(right)))
    step = max(1, _NUMBERS // max(left[0].size, 1))
    for i, client in enumerate(left):
        for start in range(i + 1 if others is None else 0, len(right), step):
            divergences[i, start : start + step] = _divergence(client, right[start : start + step])
    if others is None:
        divergences += divergences.T
    return np.clip(divergences, 0.0, math.log(2))


class _Side(NamedTuple):
    """Rows, and the divisors that are applied to them, in order, whenever a block is read."""

    rows: Real
    divisors: tuple[Array, ...] = ()

    def block(self, columns: slice, picked: Labels | slice = slice(None)) -> Array:
        block: Array = self.rows[picked, columns].astype(np.float64)
        for divisor in self.divisors:
            block /= (divisor if len(divisor) == 1 else divisor[picked])[:, None]
        return block

    def only(self, picked: Labels) -> _Side:
        divisors = tuple(d if len(d) == 1 else d[picked] for d in self.divisors)
        return _Side(self.rows[picked], divisors)


def _squares(a: _Side, b: _Side | None = None) -> Array:
    """Squared L2 distances by matrix products of centred blocks.

    Bit-identical rows are computed once, at a distance of exactly 0. Pairs that are much closer to
    each other than to the mean are recomputed from their difference, which is more accurate.
    """
    symmetric = b is None
    a, left_rows = _distinct(a)
    b, right_rows = (a, left_rows) if b is None else _distinct(b)
    product = np.zeros((len(a.rows), len(b.rows)))
    left_norms, right_norms = np.zeros(len(a.rows)), np.zeros(len(b.rows))
    with one_thread():
        for columns in _blocks(a.rows.shape[1], _COLUMNS):
            x = a.block(columns)
            y = x if symmetric else b.block(columns)
            # Without centring, rows far from the origin have products so large that the differences
            # between them are rounding noise.
            centre = x.mean(axis=0) if symmetric else (x.mean(axis=0) + y.mean(axis=0)) / 2
            x -= centre
            if not symmetric:
                y -= centre
            product += x @ y.T
            left_norms += np.einsum("ij,ij->i", x, x)
            right_norms += np.einsum("ij,ij->i", y, y)
    norms = left_norms[:, None] + right_norms
    squares: Array = norms - 2 * product
    close = squares < _CLOSE * norms  # negative ones too
    i, j = np.nonzero(np.triu(close, 1) if symmetric else close)
    squares[i, j] = _direct(a, b, i, j)
    if symmetric:
        squares = np.triu(squares, 1)
        squares += squares.T
    return squares[np.ix_(left_rows, right_rows)]


def _direct(a: _Side, b: _Side, i: Labels, j: Labels) -> Array:
    """The squared distances of the pairs ``(i, j)``, computed from their differences."""
    squares = np.zeros(len(i))
    for start in range(0, len(i), _NUMBERS // _COLUMNS):
        pairs = slice(start, start + _NUMBERS // _COLUMNS)
        for columns in _blocks(a.rows.shape[1], _COLUMNS):
            difference = a.block(columns, i[pairs]) - b.block(columns, j[pairs])
            squares[pairs] += np.einsum("ij,ij->i", difference, difference)
    return squares


def _distinct(side: _Side) -> tuple[_Side, Labels]:
    """The distinct rows (compared bit by bit), and the position of every row among them."""
    digests = [hashlib.blake2b(np.ascontiguousarray(r).data).digest() for r in side.rows]
    firsts = {digest: i for i, digest in reversed(list(enumerate(digests)))}
    distinct = np.array(sorted(firsts.values()))
    position = np.searchsorted(distinct, [firsts[digest] for digest in digests])
    return (side if len(distinct) == len(digests) else side.only(distinct)), position


def _units(rows: Real) -> tuple[_Side, NDArray[np.bool_]]:
    """The rows as unit vectors, and a mask of the zero rows (which stay zero)."""
    largest = _largest(rows)
    zero = largest == 0
    side = _Side(rows, (np.where(zero, 1.0, largest),))  # before squaring, which could overflow
    length = np.zeros(len(rows))
    for columns in _blocks(rows.shape[1], _COLUMNS):
        block = side.block(columns)
        length += np.einsum("ij,ij->i", block, block)
    return _Side(rows, (*side.divisors, np.where(zero, 1.0, np.sqrt(length)))), zero


def _largest(rows: Real) -> Array:
    """Each row's largest magnitude."""
    magnitudes: Array = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
    return magnitudes.astype(np.float64)


def _exponent(largest: float) -> int:
    """The power of two to divide by before squaring: 0 unless squares could over- or underflow."""
    if largest == 0 or 1e-100 < largest < 1e100:
        return 0
    return math.frexp(largest)[1] - 1


class _Extent(NamedTuple):
    """Each row's minimum and span, multiplied by ``factor`` (½ where the span would overflow)."""

    low: Array
    span: Array
    factor: Array


def _extent(rows: Real) -> _Extent:
    low = rows.min(axis=1, initial=np.inf).astype(np.float64)
    high = rows.max(axis=1, initial=-np.inf).astype(np.float64)
    factor = np.where(high / 2 - low / 2 < np.finfo(np.float64).max / 2, 1.0, 0.5)
    return _Extent(low * factor, high * factor - low * factor, factor)


def _scaled(block: Real, extent: _Extent) -> Array:
    low, span, factor = (part[:, None] for part in extent)
    scaled: Array = block.astype(np.float64)
    scaled *= factor
    scaled -= low
    scaled /= np.where(span > 0, span, 1.0)
    return scaled


def _check_probabilities(p: Real) -> None:
    if p.min(initial=0.0) < 0 or not np.allclose(p.sum(axis=2, dtype=np.float64), 1.0, atol=1e-3):
        raise ConfigError(
            "the Jensen–Shannon divergence needs probabilities: no negative values, and rows that "
            "sum to 1"
        )


def _divergence(client: Real, others: Real) -> Array:
    p, q = client.astype(np.float64), others.astype(np.float64)
    mean = (p + q) / 2
    terms = rel_entr(p, mean) + rel_entr(q, mean)
    divergences: Array = terms.sum(axis=(1, 2)) / (2 * max(len(client), 1))
    return divergences


def _blocks(columns: int, width: int) -> Iterator[slice]:
    return (slice(start, start + width) for start in range(0, columns, width))


def _symmetric(condensed: Array, clients: int) -> Array:
    if clients == 1:
        return np.zeros((1, 1))
    matrix: Array = squareform(condensed)
    return matrix
