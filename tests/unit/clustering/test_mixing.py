"""The two terms of the user-centric bound, against numbers by hand and their limits."""

import numpy as np
import pytest

from coterie.clustering import mixing_diagnostics
from coterie.errors import ConfigError, TrainingError

GAPS = np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 5.0], [4.0, 5.0, 0.0]])
COUNTS = np.array([10, 20, 30])


def test_equal_weights_on_equal_counts_are_worth_all_samples():
    terms = mixing_diagnostics(np.full((4, 4), 0.25), [50] * 4, np.zeros((4, 4)))
    assert np.allclose(terms.effective, 200)


def test_who_learns_alone_has_its_own_samples_and_no_discrepancy():
    terms = mixing_diagnostics(np.eye(3), COUNTS, GAPS)
    assert terms.effective.tolist() == [10, 20, 30]
    assert terms.discrepancy.tolist() == [0, 0, 0]


def test_terms_by_hand():
    # 1/(0.25/10 + 0.25/20) = 80/3 and 0.5·1; 1/(0.04/10 + 0.36/20 + 0.04/30) = 300/7 and
    # 0.2·1 + 0.2·5 (to client 1).
    rows = [[0.5, 0.5, 0.0], [0.2, 0.6, 0.2]]
    terms = mixing_diagnostics(rows, COUNTS, GAPS[:2])
    assert terms.effective == pytest.approx([80 / 3, 300 / 7])
    assert terms.discrepancy == pytest.approx([0.5, 1.2])


def test_shares_of_samples_are_worth_the_most():
    shares = COUNTS / COUNTS.sum()
    best = mixing_diagnostics([shares], COUNTS, GAPS[:1])
    assert best.effective == pytest.approx([60])
    assert best.discrepancy == pytest.approx([(20 * 1 + 30 * 4) / 60])
    rows = np.random.default_rng(0).dirichlet([1, 1, 1], size=200)
    others = mixing_diagnostics(rows, COUNTS, np.tile(GAPS[0], (200, 1)))
    assert (others.effective <= 60 + 1e-9).all()
    assert (others.effective >= 10 - 1e-9).all()  # no mixture is worth less than the smallest


def test_who_has_no_samples_adds_nothing_and_is_worth_nothing():
    terms = mixing_diagnostics([[0.5, 0.5, 0], [0, 0, 1.0]], [10, 10, 0], np.zeros((2, 3)))
    assert terms.effective.tolist() == [20, 0]


@pytest.mark.parametrize(
    ("weights", "counts", "distances", "says"),
    [
        ([[0.5, 0.5]], [1, 2, 3], [[0, 1]], "a count for each column"),
        ([[0.5, 0.5]], [1, 2], [[0, 1], [1, 0]], "of the same shape"),
        ([[0.5, 0.4]], [1, 2], [[0, 1]], "sum to 1"),
        ([[1.5, -0.5]], [1, 2], [[0, 1]], "not be negative"),
        ([[0.5, 0.5]], [1, -2], [[0, 1]], "not be negative"),
        ([[0.5, 0.5]], [1, 2], [[0, -1]], "not be negative"),
    ],
)
def test_what_is_no_mixture_is_a_sentence(weights, counts, distances, says):
    with pytest.raises(ConfigError, match=says):
        mixing_diagnostics(weights, counts, distances)


def test_numbers_that_are_not_finite_are_a_sentence():
    with pytest.raises(TrainingError, match="not finite"):
        mixing_diagnostics([[0.5, 0.5]], [1, 2], [[0, np.nan]])
