"""Weighted sums that, put together, single somebody out."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.door.privacy import isolation
from coterie.door.privacy.isolation import isolated


def ones(*clients):
    return dict.fromkeys(clients, 1.0)


@pytest.mark.parametrize(
    ("rows", "below", "alone"),
    [
        ([ones(1, 2, 3), ones(1, 2, 3, 4)], 2, {4}),
        ([ones(1, 2, 3), ones(1, 2, 3, 4, 5)], 3, {4, 5}),
        ([ones(1, 2, 3), ones(1, 2, 3, 4, 5)], 2, None),  # two together are no single one
        ([ones(1, 2, 3), ones(4, 5, 6)], 3, None),
        ([ones(1, 2, 3), ones(3, 4, 5)], 3, None),  # the difference has four in it
        ([ones(1, 2), ones(2, 3), ones(1, 3)], 2, {1}),  # (a + c − b) / 2
        ([ones(1, 2, 3), {1: 2.0, 2: 2.0, 3: 2.0}], 3, None),  # the same sum twice
        ([ones(1, 2, 3), {1: 1.0, 2: 1.0, 3: 2.0}], 2, {3}),
        ([{1: 1.0, 2: 1.0, 3: 1.0}, {1: 1.0, 2: 2.0, 3: 3.0}], 3, {1, 2}),
        ([ones(1)], 2, {1}),
        ([ones(1, 2)], 2, None),
        ([{1: 1.0, 2: 0.0}], 2, {1}),  # a weight of nothing hides nobody
        ([], 3, None),
        ([{}], 3, None),
    ],
)
def test_hand_cases(rows, below, alone):
    found = isolated(rows, below)
    if alone is None:
        assert found is None
    else:
        assert len(found) == len(alone)  # others may do as well as those
    if alone is not None and len(alone) < 2 and len(rows) != 3:
        assert found == alone


matrices = st.integers(1, 3).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 2), min_size=rows, max_size=rows), min_size=1, max_size=6
    )
)


@settings(max_examples=300, deadline=None)
@given(matrices, st.integers(2, 4))
def test_as_brute_force_over_all_combinations(columns, below):
    """Every smallest support is that of a combination whose factors are minors of at most 2 x 2.

    With numbers of 0 to 2 these lie between −4 and 4, so looking at all such factors misses none.
    """
    matrix = np.array(columns).T
    factors = np.array(list(product(range(-4, 5), repeat=len(matrix))))
    supports = {frozenset(np.flatnonzero(row).tolist()) for row in factors @ matrix} - {frozenset()}
    rows = [dict(enumerate(map(float, row))) for row in matrix]
    found = isolated(rows, below)
    assert (found is not None) == any(len(s) < below for s in supports)
    if found is not None:
        assert len(found) < below
        assert any(s <= found for s in supports)


@settings(max_examples=50, deadline=None)
@given(matrices, st.integers(2, 4), st.lists(st.sampled_from([0.1, 0.3, 7.0]), min_size=6))
def test_scaling_a_client_or_repeating_a_sum_changes_nothing(columns, below, scales):
    matrix = np.array(columns).T
    rows = [dict(enumerate(map(float, row))) for row in matrix]
    scaled = [{c: w * scales[c] for c, w in row.items()} for row in rows]
    assert (isolated(rows, below) is None) == (isolated(scaled, below) is None)
    assert (isolated(rows, below) is None) == (isolated([*rows, *rows], below) is None)


def test_too_many_combinations_to_look_at_count_as_yes(monkeypatch):
    """Three sums of nine clients in general position show five at the least, never four."""
    rows = [{c: float((c + 1) ** power) for c in range(9)} for power in range(3)]
    assert isolated(rows, 4) is None
    monkeypatch.setattr(isolation, "MOST", 20)
    assert isolated(rows, 4) is not None


def test_names_of_any_kind():
    """Contents of orders, say, which cannot be compared with each other."""
    one, other = ("a", 1), (2, "b")
    assert isolated([ones(one, other, 7), ones(one, other, 7, None)], 2) == {None}
