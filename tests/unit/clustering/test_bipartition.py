"""Two parts with the smallest largest similarity across the cut."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.clustering import bipartition
from coterie.errors import ConfigError, TrainingError


@st.composite
def similarities(draw, least=2, most=7):
    """Symmetric matrices of distinct similarities, so that there is one answer."""
    n = draw(st.integers(least, most))
    pairs = n * (n - 1) // 2
    values = draw(st.lists(st.integers(-1000, 999), min_size=pairs, max_size=pairs, unique=True))
    matrix = np.eye(n)
    matrix[np.triu_indices(n, 1)] = np.array(values) / 1000
    return np.triu(matrix) + np.triu(matrix, 1).T


def cuts(n):
    """Every way to make two parts of n, the first with position 0."""
    for size in range(n - 1):
        for rest in itertools.combinations(range(1, n), size):
            one = (0, *rest)
            yield one, tuple(i for i in range(n) if i not in one)


def across(matrix, one, two):
    return max(matrix[i, j] for i in one for j in two)


@given(similarities())
def test_no_other_cut_is_less_similar_across(matrix):
    halves = bipartition(matrix)
    least = min(across(matrix, *cut) for cut in cuts(len(matrix)))
    assert halves.cross == least == across(matrix, *halves.parts)
    assert sorted(halves.parts[0] + halves.parts[1]) == list(range(len(matrix)))
    assert 0 in halves.parts[0]
    assert halves.parts[1]


@given(similarities(), st.randoms(use_true_random=False))
def test_another_order_of_clients_gives_the_same_parts(matrix, random):
    order = list(range(len(matrix)))
    random.shuffle(order)
    turned = bipartition(matrix[np.ix_(order, order)])
    plain = bipartition(matrix)
    assert turned.cross == plain.cross
    assert {frozenset(order[i] for i in part) for part in turned.parts} == {
        frozenset(part) for part in plain.parts
    }


def test_by_hand():
    # Merged in turn: 1 and 3 (0.8), 0 and 2 (0.5), then 4 to 2 (0.1): two parts; −0.2 is left.
    matrix = np.array(
        [
            [1.0, -0.6, 0.5, -0.4, -0.1],
            [-0.6, 1.0, -0.3, 0.8, -0.9],
            [0.5, -0.3, 1.0, -0.2, 0.1],
            [-0.4, 0.8, -0.2, 1.0, -0.5],
            [-0.1, -0.9, 0.1, -0.5, 1.0],
        ]
    )
    halves = bipartition(matrix)
    assert halves.parts == ((0, 2, 4), (1, 3))
    assert halves.cross == -0.2


def test_a_chain_stays_together_however_far_its_ends_are_apart():
    """Only the largest similarity across counts, not the mean: 0-1-2 is a chain, 3 is by itself."""
    matrix = np.array(
        [[1, 0.9, -0.9, 0.2], [0.9, 1, 0.9, 0.2], [-0.9, 0.9, 1, 0.2], [0.2, 0.2, 0.2, 1]]
    )
    assert bipartition(matrix).parts == ((0, 1, 2), (3,))


def test_two_clients_are_two_parts():
    assert bipartition([[1.0, 0.3], [0.3, 1.0]]).parts == ((0,), (1,))
    assert bipartition([[1.0, 0.3], [0.3, 1.0]]).cross == 0.3


@pytest.mark.parametrize("matrix", [[[1.0]], [[1.0, 0.2, 0.1], [0.2, 1.0, 0.1]]])
def test_what_cannot_be_divided_is_refused(matrix):
    with pytest.raises(ConfigError, match="at least two clients"):
        bipartition(matrix)


def test_what_is_not_finite_is_refused():
    with pytest.raises(TrainingError, match="not finite"):
        bipartition([[1.0, float("nan")], [float("nan"), 1.0]])
