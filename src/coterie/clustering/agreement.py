"""The agreement between two groupings of the same clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb


def adjusted_rand(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """The adjusted Rand index: 1 for identical groupings, about 0 for independent ones.

    Implemented here because importing scikit-learn takes a second.

    >>> adjusted_rand("aabb", "yyxx"), adjusted_rand("aabb", "xyxy")
    (1.0, -0.5)
    """
    joint_pairs = _pairs(list(zip(one, other, strict=True)))
    one_pairs, other_pairs, all_pairs = _pairs(one), _pairs(other), comb(len(one), 2)
    # The pairs beyond those expected by chance (one_pairs · other_pairs / all_pairs), relative to
    # the largest possible excess.
    maximum = (one_pairs + other_pairs) * all_pairs - 2 * one_pairs * other_pairs
    return 2 * (joint_pairs * all_pairs - one_pairs * other_pairs) / maximum if maximum else 1.0


def _pairs(labels: Sequence[Hashable]) -> int:
    """The number of pairs with the same label."""
    return sum(comb(n, 2) for n in Counter(labels).values())
