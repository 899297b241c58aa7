"""Laws of the train, validation and test splits inside a client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.splits import apportion, split_client, split_sizes
from coterie.errors import ConfigError

fractions = st.floats(0, 0.95)


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_apportion_adds_up_and_stays_near(total, weights):
    counts = apportion(total, np.array(weights))
    exact = total * np.array(weights) / np.sum(weights)
    assert counts.sum() == total
    assert (np.abs(counts - exact) < 1 + 1e-6).all()


@given(st.integers(1, 300), fractions, fractions)
def test_sizes_leave_everyone_something(samples, test_fraction, val_fraction):
    train, val, test = split_sizes(samples, test_fraction, val_fraction)
    assert train + val + test == samples
    assert train >= 1
    assert val >= 0
    assert test >= 0
    if test_fraction > 0 and samples >= 2:
        assert test >= 1
    if val_fraction > 0 and samples >= 3:
        assert val >= 1
    if test_fraction == 0:
        assert test == 0
    if val_fraction == 0:
        assert val == 0


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    test_fraction=fractions,
    val_fraction=fractions,
    seed=st.integers(0, 99),
)
def test_splits_are_disjoint_complete_and_stratified(labels, test_fraction, val_fraction, seed):
    y = np.array(labels)
    train, val, test = split_client(y, test_fraction, val_fraction, seed, client=2)
    assert np.array_equal(np.sort(np.concatenate([train, val, test])), np.arange(len(y)))
    for part, whole in ((test, np.arange(len(y))), (val, np.concatenate([train, val]))):
        for label in np.unique(y):
            expected = np.sum(y[whole] == label) * len(part) / len(whole)
            assert abs(np.sum(y[part] == label) - expected) < 1 + 1e-9


def test_exact_stratification_where_it_is_possible():
    y = np.repeat([0, 1, 2], [100, 50, 10])
    train, val, test = split_client(y, 0.2, 0.25, 0, 0)
    assert np.bincount(y[test]).tolist() == [20, 10, 2]
    assert np.bincount(y[val]).tolist() == [20, 10, 2]
    assert np.bincount(y[train]).tolist() == [60, 30, 6]


def test_regression_is_split_at_random():
    y = np.linspace(0, 1, 100).astype(np.float32)
    train, val, test = split_client(y, 0.2, 0.1, 0, 0)
    assert (len(train), len(val), len(test)) == (72, 8, 20)
    assert test.min() < 30
    assert test.max() > 70


def test_streams_belong_to_seed_and_client():
    y = np.zeros(100, int)

    def test_part(seed, client):
        return split_client(y, 0.2, 0.1, seed, client)[2].tolist()

    assert test_part(0, 1) == test_part(0, 1)
    assert test_part(0, 1) != test_part(0, 2)
    assert test_part(0, 1) != test_part(1, 1)


def test_a_rare_class_is_not_always_the_first_of_equals_to_be_tested():
    """Equal remainders fall to a random class, not always to the lowest label."""
    y = np.arange(10)
    tested = {int(y[split_client(y, 0.1, 0.0, seed, 0)[2]][0]) for seed in range(60)}
    assert len(tested) >= 8


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 3])
def test_fractions_out_of_range(fraction):
    with pytest.raises(ConfigError, match="test_fraction"):
        split_client(np.zeros(5, int), fraction, 0.1, 0, 0)
    with pytest.raises(ConfigError, match="val_fraction"):
        split_client(np.zeros(5, int), 0.1, fraction, 0, 0)
