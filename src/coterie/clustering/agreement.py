"""How far two groupings of the same clients agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb


def adjusted_rand(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """The adjusted Rand index: 1 if two groupings agree wholly, 0 if no more than by chance.

    By itself, because scikit-learn's takes a second to import.

    >>> adjusted_rand("aabb", "yyxx"), adjusted_rand("aabb", "xyxy")
    (1.0, -0.5)
    """
    both = _pairs(list(zip(one, other, strict=True)))
    a, b, every = _pairs(one), _pairs(other), comb(len(one), 2)
    # Over what chance gives, a · b / every, as a share of what there could be at most.
    most = (a + b) * every - 2 * a * b
    return 2 * (both * every - a * b) / most if most else 1.0


def _pairs(labels: Sequence[Hashable]) -> int:
    """How many pairs have the same label."""
    return sum(comb(n, 2) for n in Counter(labels).values())
