"""Clipping on the grid, discrete Gaussian noise against exact probabilities, adaptive bounds."""

import hashlib
import itertools
import math
import os
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from coterie.channel.privacy import noise
from coterie.channel.privacy.noise import (
    centred,
    clipped,
    discrete_gaussian,
    enough_on_grid,
    next_bound,
    share_below,
    split_noise,
    stream,
    usual_count_sigma,
)
from coterie.errors import ConfigError, TrainingError


def seeded(seed):
    return lambda count: hashlib.shake_256(f"noise {seed}".encode()).digest(count)


def exact(sigma, reach=40):
    """Whole numbers and their probabilities under the discrete Gaussian."""
    x = np.arange(-math.ceil(reach * sigma), math.ceil(reach * sigma) + 1)
    p = np.exp(-0.5 * (x / sigma) ** 2)
    return x, p / p.sum()


def fit(drawn, sigma):
    """The p-value of a chi-square test against the exact probabilities; the tails are one cell."""
    x, p = exact(sigma)
    cells = np.flatnonzero(p * len(drawn) >= 10)
    seen = np.array([np.count_nonzero(drawn == x[c]) for c in cells])
    seen = np.append(seen, len(drawn) - seen.sum())
    return chisquare(seen, np.append(p[cells], 1 - p[cells].sum()) * len(drawn)).pvalue


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.7, 3.0])
def test_the_noise_has_the_exact_probabilities(sigma):
    drawn = discrete_gaussian(sigma, 400_000, seeded(sigma))
    assert drawn.dtype == np.int64
    assert fit(drawn, sigma) > 0.01
    x, p = exact(sigma)
    variance, fourth = (p * x**2).sum(), (p * x**4).sum()
    error = math.sqrt((fourth - variance**2) / len(drawn))
    assert abs((drawn**2).mean() - variance) < 4 * error
    # The test can tell: the next standard deviation does not fit.
    assert fit(drawn, sigma * 1.02) < 1e-4


@pytest.mark.parametrize("sigma", [1e3, 2.0**20 + 0.5, 2.0**40])
def test_large_noise(sigma):
    drawn = discrete_gaussian(sigma, 400_000, seeded(sigma))
    scaled = drawn / sigma
    assert abs(scaled.mean()) < 4 / math.sqrt(len(drawn))
    assert abs((scaled**2).mean() - 1) < 4 * math.sqrt(2 / len(drawn))
    assert abs((scaled**4).mean() - 3) < 4 * math.sqrt(96 / len(drawn))
    spread = drawn + np.random.default_rng(0).random(len(drawn)) - 0.5
    assert kstest(spread / sigma, "norm").pvalue > 0.01
    for bit in range(6):  # no coarser than its grid
        ones = np.count_nonzero(drawn >> bit & 1)
        assert abs(ones - len(drawn) / 2) < 4 * math.sqrt(len(drawn)) / 2


def test_a_key_decides_the_noise():
    one, again, other = (discrete_gaussian(9, 5000, seeded(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.count_nonzero(one == other) < 500
    assert len(np.unique([discrete_gaussian(2.0**40, 1, os.urandom)[0] for _ in range(5)])) == 5


def test_one_key_is_drawn():
    asked = []
    discrete_gaussian(2.0, 100_000, lambda count: asked.append(count) or bytes(count))
    assert asked == [32]


def test_noise_over_several_passes(monkeypatch):
    monkeypatch.setattr(noise, "_PROPOSALS", 20)
    drawn = discrete_gaussian(3.0, 20_000, seeded(0))
    assert len(drawn) == 20_000
    assert fit(drawn, 3.0) > 0.01


def test_no_noise():
    np.testing.assert_array_equal(discrete_gaussian(0.0, 4, seeded(0)), np.zeros(4))
    assert len(discrete_gaussian(1.0, 0, seeded(0))) == 0


@pytest.mark.parametrize("sigma", [-1.0, 0.4, 2.0**41, math.inf, math.nan])
def test_noise_that_cannot_be_drawn(sigma):
    with pytest.raises(ConfigError, match="cannot be drawn"):
        discrete_gaussian(sigma, 1, seeded(0))


def test_shares_add_up_to_the_noise():
    shares = discrete_gaussian(6 / math.sqrt(10), 2_000_000, seeded(3)).reshape(10, -1)
    assert enough_on_grid(6, 10) < 1e-12
    assert fit(shares.sum(0), 6) > 0.01


@pytest.mark.parametrize("sigma", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("sharers", [2, 3, 5])
def test_how_far_a_sum_is_from_discrete_gaussian(sigma, sharers):
    _, p = exact(sigma)
    total = p
    for _ in range(sharers - 1):
        total = np.convolve(total, p)
    whole = np.arange(-(len(total) // 2), len(total) // 2 + 1)
    one = np.exp(-0.5 * (whole / sigma) ** 2 / sharers)
    seen = total > 1e-12
    away = np.abs(np.log(total[seen] / (one / one.sum())[seen])).max()
    tau = enough_on_grid(sigma * math.sqrt(sharers), sharers)
    assert away <= tau
    assert tau <= 1000 * away  # a bound, but one of the right order


def test_how_far_by_hand():
    assert enough_on_grid(1.0, 1) == 0
    # σᵢ² = 1/2: the first of two terms is exp(-π²/2), the second exp(-2π²/3).
    by_hand = 10 * (math.exp(-(math.pi**2) / 2) + math.exp(-2 * math.pi**2 / 3))
    assert enough_on_grid(math.sqrt(1.5), 3) == pytest.approx(by_hand)
    with pytest.raises(ConfigError, match="0 clients"):
        enough_on_grid(1.0, 0)


def norm_squared(grid):
    return sum(int(v) ** 2 for v in grid.ravel())


@settings(max_examples=300, deadline=None)
@given(
    change=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    bound=st.floats(0.01, 1e3),
    bits=st.integers(0, 40),
)
@example([1.5] * 4, 3.0, 0)  # each rounds up: 4, were the rounding not allowed for
@example([1e300, -1e300], 2.0, 10)
@example([5e-324], 2.0, 40)
def test_the_rounded_change_is_within_the_bound(change, bound, bits):
    assume(bound > 1.01 * math.sqrt(len(change)) / 2 ** (bits + 1))
    grid, norm = clipped(np.array(change), bound, bits)
    assert norm_squared(grid) <= (Fraction(bound) * 2**bits) ** 2
    assert norm == pytest.approx(math.hypot(*change))


@pytest.mark.parametrize("bits", [0, 12])
def test_the_bound_holds_to_the_last_bit(bits):
    """Every number of the scaled change lies half way, where a last bit decides its rounding."""
    for count, k in itertools.product(range(1, 200), range(4)):
        bound = math.sqrt(count) * (k + 1) * 2.0**-bits
        grid, _ = clipped(np.full(count, 1e5), bound, bits)
        assert norm_squared(grid) <= (Fraction(bound) * 2**bits) ** 2
        assert grid.min() >= k  # and no more is taken off than must be


def test_clipping_keeps_the_direction_and_what_is_short():
    change = np.random.default_rng(0).normal(size=(30, 40))
    grid, norm = clipped(change, 1.0, 40)
    assert grid.shape == change.shape
    assert norm == pytest.approx(np.sqrt((change**2).sum()))
    np.testing.assert_allclose(grid * 2.0**-40, change / norm, atol=1e-9)
    short, _ = clipped(change, 100.0, 20)
    np.testing.assert_array_equal(short, np.rint(change * 2**20))
    zeros, none = clipped(np.zeros(3), 1.0, 8)
    assert none == 0
    assert not zeros.any()


def test_clipping_refused():
    with pytest.raises(ConfigError, match="lost in rounding 10000 numbers"):
        clipped(np.ones(10_000), 0.04, 10)
    with pytest.raises(ConfigError, match="use fewer bits"):
        clipped(np.ones(2), 2.0**30, 32)
    with pytest.raises(TrainingError, match="not finite"):
        clipped(np.array([1.0, math.nan]), 1.0, 8)


def test_the_bound_finds_the_quantile():
    norms = np.random.default_rng(1).lognormal(size=1001)
    for target in (0.25, 0.5, 0.9):
        bound = 1e-2
        for _ in range(300):
            bits = sum(centred(n, bound) for n in norms)
            bound = next_bound(bound, share_below(bits, len(norms)), target)
        assert (norms <= bound).mean() == pytest.approx(target, abs=0.01)


def test_bounds_by_hand():
    assert next_bound(2.0, 1.0, 0.5) == pytest.approx(2 * math.exp(-0.1))
    assert next_bound(2.0, 0.0, 0.5, rate=1.0) == pytest.approx(2 * math.exp(0.5))
    assert (centred(1.0, 1.0), centred(1.1, 1.0)) == (0.5, -0.5)
    assert share_below(-5.0, 20) == 0.25
    assert usual_count_sigma(100) == 5.0


def test_noise_split_by_hand():
    # 1/9 - 1/25 = 16/225
    assert split_noise(3.0, 2.5) == pytest.approx(15 / 4)
    assert split_noise(0.0, 5.0) == 0.0


@given(st.floats(0.01, 9.0))
def test_noise_split_adds_up(multiplier):
    changes = split_noise(multiplier, 5.0)
    assert changes > multiplier
    assert changes**-2 + 10.0**-2 == pytest.approx(multiplier**-2)


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 0.5), (1.0, 0.1), (2.0, 0.0), (-1.0, 5.0)])
def test_noise_that_cannot_be_split(multiplier, count):
    with pytest.raises(ConfigError, match="leaves nothing for the changes"):
        split_noise(multiplier, count)


def test_the_stream_is_aes_in_counter_mode():
    """The first block under a key is that of an all-zero counter: NIST's AES-256 known answer."""
    key = bytes.fromhex("c47b0294dbbbee0fec4757f22ffeee3587ca4730c3d33b691df38bab076bc558")
    assert stream(key)(16).hex() == "46f2fb342d6f0ab477476fc501242c5f"


def test_streams_refused(monkeypatch):
    with pytest.raises(ConfigError, match="32 bytes, not 16"):
        stream(bytes(16))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r"coterie\[privacy\]"):
        stream(bytes(32))
