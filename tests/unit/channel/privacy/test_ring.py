"""Whole numbers for real ones: exact sums, and nothing that wraps unseen."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.channel.privacy.secagg import from_ring, to_ring

numbers = st.floats(-1e4, 1e4, allow_nan=False)


def exactly(value: float, bits: int) -> Fraction:
    """A value on the grid; Python rounds halves of a fraction to even."""
    return Fraction(round(Fraction(value) * 2**bits), 2**bits)


@given(
    st.lists(st.tuples(numbers, st.integers(0, 2000)), min_size=1, max_size=20),
    st.integers(0, 30),
)
def test_the_sum_is_the_rational_sum_of_the_rounded_values(rows, bits):
    total = np.zeros(1, np.uint64)
    for value, weight in rows:
        total += to_ring(np.array([value]), bits, weight, len(rows)).view(np.uint64)
    expected = sum(weight * exactly(value, bits) for value, weight in rows)
    assert from_ring(total, bits)[0] == float(expected)


def test_by_hand():
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.75])  # halves go to the even number
    assert to_ring(values, 0, 1, 2).tolist() == [0, 2, 2, 0, -2, 1]
    assert to_ring(np.array([0.3]), 10, 7, 2).tolist() == [7 * 307]  # 307.2
    assert to_ring(np.array([-1.25]), 2, 3, 2).tolist() == [-15]
    assert from_ring(np.array([2**64 - 1, 2**63, 5], np.uint64), 1).tolist() == [
        -0.5,
        -(2.0**62),
        2.5,
    ]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_last_value_that_fits(sign):
    """2^62 once, or 2^60 for three members with weight 1, but not 2^63 in any way."""
    assert to_ring(np.array([sign * 2.0**62]), 0, 1, 1).tolist() == [sign * 2**62]
    assert to_ring(np.array([sign * 2.0**40]), 20, 1, 7).tolist() == [sign * 2**60]
    for value, bits, weight, members in (
        (2.0**63, 0, 1, 1),
        (2.0**62, 0, 2, 1),
        (2.0**62, 0, 1, 2),
        (2.0**40, 20, 2, 4),
        (2.0**40, 20, 1, 8),
        (1e300, 30, 1, 1),
        (1.7e308, 30, 1, 1),
    ):
        with pytest.raises(ValueError, match="overflow"):
            to_ring(np.array([0.0, sign * value]), bits, weight, members)


def test_members_at_the_limit_do_not_wrap():
    largest = np.array([(2.0**63 - 2.0**20) / 7])
    steps = to_ring(np.floor(largest), 0, 1, 7)
    assert 0 < sum(int(steps[0]) for _ in range(7)) < 2**63


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        to_ring(np.array([1.0, value]), 10, 1, 2)


@pytest.mark.parametrize("rule", [(-1, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_what_makes_no_ring_is_refused(rule):
    with pytest.raises(ValueError, match="no ring"):
        to_ring(np.array([1.0]), *rule)


def test_nothing_is_nothing():
    assert to_ring(np.zeros(0), 10, 1, 2).shape == (0,)
    with pytest.raises(ValueError, match="overflow"):
        to_ring(np.zeros(3), 10, 2**63, 1)
