"""The end of a rapid decrease, on curves with a known knee."""

import math

import numpy as np
import pytest

from coterie.methods.dc_pfl_decrease import falls_slower, has_ended, noise, radii, smallest

LATEST = 8  # rounds after the knee
SEEDS = range(1000, 1100)  # the constants of the rule were chosen on others


def hinge(knee, width=1.5):
    """A straight fall to 0 that bends over a few rounds, most in the round of the knee."""
    rounds = np.arange(knee + LATEST + 1)
    return width * np.log1p(np.exp((knee - rounds) / width))


def logistic(knee, width=5.0):
    """A fall from 1 to 0 whose curvature is largest ln(2 + √3) widths after the middle."""
    rounds = np.arange(knee + LATEST + 1)
    return 1 / (1 + np.exp((rounds - knee) / width + math.log(2 + math.sqrt(3))))


def test_the_knees_are_where_the_curvature_is_greatest():
    for curve in (hinge, logistic):
        assert np.diff(curve(30), 2).argmax() + 1 == 30


def first(losses, bend="slope", smooth=5, observe=3):
    """The round in which the end is found, or None."""
    for number in range(len(losses)):
        if has_ended(losses[: number + 1], bend, smooth, observe):
            return number
    return None


def noisy(curve, fall, seed):
    return curve + 0.02 * fall * np.random.default_rng(seed).normal(size=len(curve))


@pytest.mark.parametrize("curve", [hinge, logistic])
@pytest.mark.parametrize("knee", range(12, 61, 3))
def test_the_end_is_found_within_eight_rounds_after_the_knee(curve, knee):
    plain = curve(knee)
    assert knee <= first(plain) <= knee + LATEST
    fall = plain[0] - plain[-1]
    rounds = [first(noisy(plain, fall, [seed, knee])) for seed in SEEDS]
    right = sum(r is not None and knee <= r for r in rounds)
    # A fall of 60 rounds loses 0.033 of its noise's two hundredths in a round: it is found late.
    assert right >= (95 if knee <= 45 else 60)


@pytest.mark.parametrize(
    "curve",
    [np.ones(60), np.full(60, 0.1), np.linspace(1, 2, 60), np.linspace(2, 1, 60)],
    ids=["flat", "tenths", "rising", "straight"],
)
def test_curves_without_a_bend_have_no_end(curve):
    assert first(curve) is None
    assert sum(first(noisy(curve, 1.0, seed)) is not None for seed in SEEDS) <= 5


def test_the_papers_rule_is_a_timer_and_its_convex_one_is_not():
    # The first loss leaves the window of five, whatever comes.
    late = logistic(47)
    assert first(late, "absolute") == first(np.linspace(1, 2, 60) ** 2, "absolute") == 8
    assert first(late, "convex") > 40
    assert first(np.linspace(1, 2, 60), "convex") is None


def test_a_hinge_by_hand():
    # Eight points down by 1 each and seven steps at rest: slopes −1 and 0, noise √(1/13/6).
    losses = [7.0 - t for t in range(8)] + [0.0] * 7
    assert noise(losses) == pytest.approx(math.sqrt(1 / 13 / 6))
    # The spread of 8 points is 8·63/12 = 42, so the error is 0.113·√(2/42) = 0.025.
    assert falls_slower(losses)
    assert falls_slower(losses[1:])
    assert not falls_slower(losses[2:])  # fewer than six steps before
    assert not falls_slower([-v for v in losses])


def test_a_decrease_that_is_still_fast_goes_on():
    def bent(share):
        return [14.0 - t for t in range(8)] + [7.0 - share * (t + 1) for t in range(7)]

    assert falls_slower(bent(0.5))
    assert not falls_slower(bent(0.7))


def test_a_bend_that_noise_explains_is_none():
    losses = np.array([7.0 - t for t in range(8)] + [0.0] * 7)
    up_and_down = np.resize([1.0, -1.0], 15)
    # Its second differences are ±4, so the noise counts as 4/√6 = 1.63, the error is 0.36.
    assert falls_slower(losses + 0.4 * up_and_down)
    assert not falls_slower(losses + 0.8 * up_and_down)


def test_the_smallest_radius_needs_every_later_one_to_be_larger():
    assert smallest([3, 4], 1)
    assert not smallest([3, 3], 1)
    assert not smallest([4, 3], 1)
    assert smallest([3, math.inf], 1)
    assert not smallest([math.inf, math.inf], 1)
    assert smallest([3, 5, 4, 3.1], 3)
    assert not smallest([3, 5, 4, 3], 3)
    assert not smallest([3, 5, 4], 3)  # one more round must confirm it
    assert not smallest([3, 4, 5, 6, 7, 2], 3)
    assert smallest([9, 9, 2, 4, 5, 6], 3)  # judged by the round `observe` ago, and no other


def test_convex_radii_come_from_full_windows_and_bends_upwards():
    # Means of two: 3, 1.5, 0.75, 1.5; slopes −1.5, −0.75, 0.75; bends 0.75, 1.5.
    found = radii([4, 2, 1, 0.5, 2.5], 2, convex=True)
    assert found == pytest.approx([1.5625**1.5 / 0.75, 1.5625**1.5 / 1.5])
    assert radii([0, 2, 3, 3.5], 1, convex=True) == [math.inf] * 2
    assert radii([4, 2, 1], 2, convex=True) == []


@pytest.mark.parametrize("every", [3, 7, 10])
def test_where_some_rounds_have_no_loss_that_counts(every):
    """Losses of the first seven rounds, then of every few rounds, as when layers rest."""
    rounds = [t for t in range(90) if t < 7 or t % every == 0]
    bent = [max(60.0 - 2 * t, 0.0) if t < 30 else 0.0 for t in rounds]
    ends = [t for n, t in enumerate(rounds) if falls_slower(bent[: n + 1], rounds[: n + 1])]
    assert 30 <= ends[0] <= 30 + max(LATEST, 4 * every)
    straight = [100.0 - t for t in rounds]
    assert not any(falls_slower(straight[: n + 1], rounds[: n + 1]) for n in range(len(rounds)))
    assert noise(straight, rounds) == pytest.approx(0.0, abs=1e-9)
    # As if they were consecutive, the straight line would have a bend where losses become rare.
    assert noise(straight) > 0.1
