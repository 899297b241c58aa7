"""Distances between clients: each function gives a whole matrix, in float64.

A side is never copied to float64 as a whole: columns go by in blocks, so that a thousand models
cost little more memory than they hold.
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

_COLUMNS = 2048  # of one block of a matrix product
_COLUMNS_L1 = 1024  # a block of 1,000 rows stays in the cache: the fastest width measured
_NUMBERS = 2**21  # in one temporary array of an elementwise loop: 16 MB
_CLOSE = 1e-8  # of the squared norms: below it, a difference of products has lost its digits


def euclidean(rows: ArrayLike, others: ArrayLike | None = None, offset: float = 0.0) -> Array:
    """L2 distances between all rows, or from ``rows`` to ``others``.

    ``offset`` is the small constant that FedTSDP (as torch's ``pairwise_distance``) adds to every
    coordinate of the difference. ‖a − b + offset‖ is not symmetric; this is the root mean square
    of both orientations, √(‖a − b‖² + d·offset²), for distinct rows (bit-identical ones too) and
    0 on the diagonal. Between ``rows`` and ``others`` it applies everywhere.

    >>> euclidean(np.array([[0.0, 0.0], [3.0, 4.0]]))
    array([[0., 5.],
           [5., 0.]])
    """
    left, right = pair(rows, others)
    exponent = _exponent(max(_largest(left).max(), _largest(right).max()))
    unit = np.full(1, math.ldexp(1.0, exponent))  # a power of two changes no digit
    a = _Side(left, (unit,) if exponent else ())
    squares = _squares(a, None if others is None else a._replace(rows=right))
    found: Array = np.ldexp(np.sqrt(squares), exponent)
    if offset:
        found = np.hypot(found, offset * math.sqrt(left.shape[1]))
        if others is None:
            np.fill_diagonal(found, 0.0)
    return found


def cosine(rows: ArrayLike, others: ArrayLike | None = None) -> Array:
    """Cosine distances 1 − cos, in [0, 2].

    They are half the squared distances of the unit vectors: nearly parallel rows keep their
    digits. A zero vector is at distance 1 from everything but another zero vector (0).

    >>> cosine(np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    array([[0., 1., 2.],
           [1., 0., 1.],
           [2., 1., 0.]])
    """
    left, right = pair(rows, others)
    a, void = _units(left)
    b, other_void = (a, void) if others is None else _units(right)
    found = np.minimum(_squares(a, None if others is None else b) / 2, 2.0)
    found[void[:, None] ^ other_void] = 1.0
    return found


def manhattan(rows: ArrayLike) -> Array:
    """L1 distances between all rows.

    >>> manhattan(np.array([[0.0, 0.0], [3.0, 4.0]]))
    array([[0., 7.],
           [7., 0.]])
    """
    array = table(rows)
    blocks = (array[:, at].astype(np.float64) for at in _blocks(array.shape[1], _COLUMNS_L1))
    found: Array = squareform(sum(pdist(block, "cityblock") for block in blocks))
    return found


def min_max(rows: ArrayLike) -> Array:
    """Each row scaled to [0, 1] by its own minimum and maximum; a constant row becomes zeros.

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
    other = extent if others is None else _extent(right)
    total: Array | float = 0.0
    for at in _blocks(left.shape[1], _COLUMNS_L1):
        x = _scaled(left[:, at], extent)
        if others is None:
            total = total + pdist(x, "cityblock")
        else:
            total = total + cdist(x, _scaled(right[:, at], other), "cityblock")
    mean: Array = np.asarray(total) / max(left.shape[1], 1)
    return _symmetric(mean, len(left)) if others is None else mean


def jensen_shannon(p: ArrayLike, others: ArrayLike | None = None) -> Array:
    """Jensen–Shannon divergences (natural log, not its root), averaged over the samples.

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
    found = np.zeros((len(left), len(right)))
    step = max(1, _NUMBERS // max(left[0].size, 1))
    for i, one in enumerate(left):
        for start in range(i + 1 if others is None else 0, len(right), step):
            found[i, start : start + step] = _divergence(one, right[start : start + step])
    if others is None:
        found += found.T
    return np.clip(found, 0.0, math.log(2))


class _Side(NamedTuple):
    """Rows and what each is divided by, one divisor after another, when a block is taken."""

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

    Bit-identical rows are computed once and have a distance of exactly 0. Pairs much closer to
    each other than to the mean are computed again from their difference.
    """
    alone = b is None
    a, back = _distinct(a)
    b, forth = (a, back) if b is None else _distinct(b)
    product = np.zeros((len(a.rows), len(b.rows)))
    left, right = np.zeros(len(a.rows)), np.zeros(len(b.rows))
    with one_thread():
        for at in _blocks(a.rows.shape[1], _COLUMNS):
            x = a.block(at)
            y = x if alone else b.block(at)
            # Far from the origin, products are so large that their differences are noise.
            middle = x.mean(axis=0) if alone else (x.mean(axis=0) + y.mean(axis=0)) / 2
            x -= middle
            if not alone:
                y -= middle
            product += x @ y.T
            left += np.einsum("ij,ij->i", x, x)
            right += np.einsum("ij,ij->i", y, y)
    norms = left[:, None] + right
    squares: Array = norms - 2 * product
    close = squares < _CLOSE * norms  # negative ones too
    one, two = np.nonzero(np.triu(close, 1) if alone else close)
    squares[one, two] = _direct(a, b, one, two)
    if alone:
        squares = np.triu(squares, 1)
        squares += squares.T
    return squares[np.ix_(back, forth)]


def _direct(a: _Side, b: _Side, one: Labels, two: Labels) -> Array:
    """The squared distances of some pairs, from their differences."""
    found = np.zeros(len(one))
    for start in range(0, len(one), _NUMBERS // _COLUMNS):
        pairs = slice(start, start + _NUMBERS // _COLUMNS)
        for at in _blocks(a.rows.shape[1], _COLUMNS):
            gap = a.block(at, one[pairs]) - b.block(at, two[pairs])
            found[pairs] += np.einsum("ij,ij->i", gap, gap)
    return found


def _distinct(side: _Side) -> tuple[_Side, Labels]:
    """The rows that differ in some bit, and for every row which of these it is."""
    digests = [hashlib.blake2b(np.ascontiguousarray(r).data).digest() for r in side.rows]
    firsts = {digest: i for i, digest in reversed(list(enumerate(digests)))}
    kept = np.array(sorted(firsts.values()))
    back = np.searchsorted(kept, [firsts[digest] for digest in digests])
    return (side if len(kept) == len(digests) else side.only(kept)), back


def _units(rows: Real) -> tuple[_Side, NDArray[np.bool_]]:
    """Rows as unit vectors, and which of them are zero (those stay zero)."""
    largest = _largest(rows)
    void = largest == 0
    side = _Side(rows, (np.where(void, 1.0, largest),))  # first, so that no square overflows
    length = np.zeros(len(rows))
    for at in _blocks(rows.shape[1], _COLUMNS):
        block = side.block(at)
        length += np.einsum("ij,ij->i", block, block)
    return _Side(rows, (*side.divisors, np.where(void, 1.0, np.sqrt(length)))), void


def _largest(rows: Real) -> Array:
    """Each row's largest magnitude."""
    found: Array = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
    return found.astype(np.float64)


def _exponent(largest: float) -> int:
    """The power of two to divide by before squaring: 0 unless squares could over- or underflow."""
    if largest == 0 or 1e-100 < largest < 1e100:
        return 0
    return math.frexp(largest)[1] - 1


class _Extent(NamedTuple):
    """Each row's minimum and span, both times ``factor``: a half where the span would overflow."""

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
        raise ConfigError("Jensen–Shannon compares probabilities: each row must sum to 1, none < 0")


def _divergence(one: Real, many: Real) -> Array:
    p, q = one.astype(np.float64), many.astype(np.float64)
    middle = (p + q) / 2
    terms = rel_entr(p, middle) + rel_entr(q, middle)
    found: Array = terms.sum(axis=(1, 2)) / (2 * max(len(one), 1))
    return found


def _blocks(columns: int, width: int) -> Iterator[slice]:
    return (slice(start, start + width) for start in range(0, columns, width))


def _symmetric(condensed: Array, clients: int) -> Array:
    if clients == 1:
        return np.zeros((1, 1))
    whole: Array = squareform(condensed)
    return whole
