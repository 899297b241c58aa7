"""Label differences, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import (
    describe,
    emd_to_population,
    from_clients,
    label_table,
    load,
    pairwise_kl,
)
from coterie.data.build import build_population
from coterie.errors import DataError


def test_kl_of_one_pair_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2):
    # KL(p,q) = 3/4 ln(3/2) + 1/4 ln(1/2), KL(q,p) = 1/2 ln(2/3) + 1/2 ln 2; half of their sum
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    expected += (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2
    assert expected == pytest.approx(math.log(3) / 8)
    assert pairwise_kl(np.array([[30, 10], [5, 5]]), smoothing=0) == pytest.approx(expected)


def test_kl_is_the_mean_over_pairs():
    # Clients 0 and 1 are alike; each differs from client 2 by ln(3)/8.
    table = np.array([[2, 2], [7, 7], [3, 1]])
    expected = 2 / (3 * 2) * (0 + 2 * math.log(3) / 8)
    assert pairwise_kl(table, smoothing=0) == pytest.approx(expected)


def test_smoothing_keeps_empty_classes_finite():
    table = np.array([[5, 0], [0, 5]])
    assert pairwise_kl(table, smoothing=0) == math.inf
    # mixed with the uniform: (1 - 0.05, 0.05) and the reverse; (p - q) ln(p / q) for both, halved
    assert pairwise_kl(table, smoothing=0.1) == pytest.approx(0.9 * math.log(0.95 / 0.05))
    assert math.isfinite(pairwise_kl(table))


tables = st.integers(2, 6).flatmap(
    lambda classes: st.lists(
        st.lists(st.integers(0, 30), min_size=classes, max_size=classes).filter(sum),
        min_size=2,
        max_size=6,
    )
)


@given(tables)
def test_laws(rows):
    table = np.array(rows)
    kl, emd = pairwise_kl(table), emd_to_population(table)
    assert kl >= 0
    assert pairwise_kl(table[::-1]) == pytest.approx(kl)
    assert pairwise_kl(3 * table) == pytest.approx(kl)
    assert ((emd >= 0) & (emd <= 2)).all()
    alike = np.tile(table[:1], (4, 1))
    assert pairwise_kl(alike) == pytest.approx(0)
    assert emd_to_population(alike) == pytest.approx(0)


def test_emd_by_hand():
    # overall (6, 2)/8; client 0 is (1, 0), client 1 (1/2, 1/2)
    assert emd_to_population(np.array([[4, 0], [2, 2]])) == pytest.approx([0.5, 0.5])
    # large clients weigh more: overall (7, 1)/8
    assert emd_to_population(np.array([[6, 0], [1, 1]])) == pytest.approx([0.25, 0.75])
    assert emd_to_population(np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9]])) == pytest.approx(4 / 3)


def test_single_clients_and_empty_ones():
    assert pairwise_kl(np.array([[1, 2]])) == 0
    with pytest.raises(DataError, match="client 1 has no samples"):
        pairwise_kl(np.array([[1, 2], [0, 0]]))


def test_table_and_description():
    x = np.zeros((10, 2))
    population = from_clients(
        [(x, np.zeros(10, int)), (x, np.arange(10) % 2), (x[:4], np.full(4, 2))],
        test_fraction=0,
        val_fraction=0,
    )
    table = label_table(population)
    assert table.tolist() == [[10, 0, 0], [5, 5, 0], [0, 0, 4]]
    summary = describe(population)
    assert summary["clients"] == 3
    assert summary["samples"] == {"min": 4, "median": 10, "max": 10}
    assert summary["classes_per_client"] == {"min": 1, "median": 1, "max": 2}
    assert summary["kl"] == pairwise_kl(table)
    assert summary["mean_emd"] == pytest.approx(emd_to_population(table).mean())
    assert summary["groups"] is None


def test_description_of_groups_and_of_regression():
    population = build_population(
        load("digits"), clients=6, partition="iid", shift="rotation", shift_params={"groups": 4}
    )
    assert describe(population)["groups"] == {0: 2, 1: 2, 2: 1, 3: 1}
    regression = from_clients([(np.zeros((5, 2)), np.zeros(5))])
    assert describe(regression)["kl"] is None
    with pytest.raises(DataError, match="no classes"):
        label_table(regression)


def test_more_skew_more_difference():
    raw = load("digits")

    def measured(alpha):
        params = {"alpha": alpha}
        population = build_population(
            raw, clients=10, partition="dirichlet", partition_params=params
        )
        return describe(population)

    even, skewed = measured(100.0), measured(0.1)
    assert even["kl"] < 0.2 < skewed["kl"]
    assert even["mean_emd"] < 0.3 < skewed["mean_emd"]
