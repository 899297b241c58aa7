"""Distance matrices: agreement with SciPy and naive loops, exact zeros, accuracy, refusals."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cdist, jensenshannon

from coterie.clustering import cosine, distances, euclidean, jensen_shannon, min_max, scaled_l1
from coterie.errors import ConfigError, TrainingError

VECTOR = [euclidean, cosine, scaled_l1]
finite = st.floats(-1e3, 1e3, allow_nan=False)
small = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=finite)


def rng(seed=0):
    return np.random.default_rng(seed)


def probabilities(clients, samples=4, classes=3, seed=0):
    return rng(seed).dirichlet(np.full(classes, 0.4), (clients, samples))


def naive_scaled_l1(x, y):
    def scaled(v):
        return [(a - min(v)) / (max(v) - min(v)) for a in v] if max(v) > min(v) else [0.0] * len(v)

    return [
        [sum(abs(a - b) for a, b in zip(scaled(v), scaled(w), strict=True)) / len(v) for w in y]
        for v in x
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 7, 5000])
def test_agrees_with_scipy(dtype, width):
    x = (rng().normal(size=(9, width)) + 3).astype(dtype)
    y = rng(1).normal(size=(4, width)).astype(dtype)
    big, other = x.astype(np.float64), y.astype(np.float64)
    for function, metric in ((euclidean, "euclidean"), (cosine, "cosine")):
        np.testing.assert_allclose(function(x), cdist(big, big, metric), rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(function(x, y), cdist(big, other, metric), rtol=1e-9, atol=1e-13)
    if width < 100:
        np.testing.assert_allclose(scaled_l1(x), naive_scaled_l1(big, big), atol=1e-14)
        np.testing.assert_allclose(scaled_l1(x, y), naive_scaled_l1(big, other), atol=1e-14)
    assert all(f(x).dtype == f(x, y).dtype == np.float64 for f in VECTOR)


@given(small)
def test_any_finite_rows_give_a_symmetric_matrix_without_nan(x):
    for function in VECTOR:
        result = function(x)
        assert np.isfinite(result).all()
        assert (result == result.T).all()
        assert (result.diagonal() == 0).all()
        assert (result >= 0).all()
    assert (cosine(x) <= 2).all()
    assert (cosine(x, -x) <= 2).all()
    # math.dist scales each pair; ours scales by the largest number, so that a difference
    # 150 decades below it squares to zero.
    exact = [[math.dist(a, b) for b in x.tolist()] for a in x.tolist()]
    np.testing.assert_allclose(euclidean(x), exact, rtol=1e-7, atol=1e-150 * np.abs(x).max())
    np.testing.assert_allclose(scaled_l1(x), naive_scaled_l1(x, x), atol=1e-12)


@pytest.mark.parametrize("function", VECTOR)
def test_rows_and_others_may_be_the_same(function):
    x = rng().normal(size=(6, 30))
    np.testing.assert_allclose(function(x, x.copy()), function(x), atol=1e-13)
    np.testing.assert_allclose(function(x, x[2:4]), function(x)[:, 2:4], atol=1e-13)
    assert (function(x, x.copy()).diagonal() == 0).all()


@pytest.mark.parametrize("function", VECTOR)
def test_many_columns_are_the_sum_of_the_blocks(function, monkeypatch):
    x = rng().normal(size=(5, 50))
    whole = function(x), function(x, x[:2])
    monkeypatch.setattr(distances, "_COLUMNS", 7)
    monkeypatch.setattr(distances, "_COLUMNS_L1", 7)
    np.testing.assert_allclose(function(x), whole[0], atol=1e-14)
    np.testing.assert_allclose(function(x, x[:2]), whole[1], atol=1e-14)


@pytest.mark.parametrize("function", VECTOR)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identical_rows_are_at_exactly_zero(function, dtype):
    x = (rng().normal(size=(4, 3000)) * 100 + 1e4).astype(dtype)
    x = x[[0, 1, 2, 0, 1, 0, 3]]
    result = function(x)
    assert (result[np.ix_([0, 3, 5], [0, 3, 5])] == 0).all()
    assert (result[1, 4], result[4, 1]) == (0, 0)
    assert (result == 0).sum() == 7 + 6 + 2
    np.testing.assert_array_equal(result[0], result[5])
    assert (function(x, x[:1])[[0, 3, 5]] == 0).all()


@pytest.mark.parametrize("function", VECTOR)
def test_zero_and_minus_zero_are_the_same(function):
    assert (function(np.array([[0.0, 1.0], [-0.0, 1.0], [5.0, 2.0]]))[0, 1]) == 0


@pytest.mark.parametrize("function", VECTOR)
def test_one_client_and_two(function):
    x = rng().normal(size=(2, 5))
    assert function(x[:1]).tolist() == [[0.0]]
    assert function(x).shape == (2, 2)
    assert function(x)[0, 1] > 0


@pytest.mark.parametrize("function", VECTOR)
def test_reordering_clients_reorders_the_matrix(function):
    x = rng().normal(size=(12, 40)).astype(np.float32)
    order = rng(3).permutation(12)
    np.testing.assert_allclose(function(x[order]), function(x)[np.ix_(order, order)], rtol=1e-10)


@pytest.mark.parametrize("function", VECTOR)
def test_the_number_of_threads_changes_no_bit(function):
    from threadpoolctl import threadpool_limits

    x = rng().normal(size=(300, 3000)).astype(np.float32)
    with threadpool_limits(1):
        one = function(x)
    with threadpool_limits(2):
        np.testing.assert_array_equal(function(x), one)


@pytest.mark.parametrize("function", [*VECTOR, jensen_shannon])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(function, bad):
    x = probabilities(3) if function is jensen_shannon else rng().normal(size=(3, 4))
    worse = x.copy()
    worse[1, 2] = bad
    with pytest.raises(TrainingError, match=r"row 1 .*not finite"):
        function(worse)
    with pytest.raises(TrainingError, match="row 1"):
        function(x, worse)


@pytest.mark.parametrize("function", VECTOR)
def test_rows_of_other_widths_or_shapes_are_refused(function):
    with pytest.raises(ConfigError, match=r"\(3,\) and \(2,\)"):
        function(np.ones((2, 3)), np.ones((2, 2)))
    for shape in ((0, 3), (3,), (1, 2, 3)):
        with pytest.raises(ConfigError):
            function(np.ones(shape))


@pytest.mark.parametrize("others", [False, True])
def test_tiny_differences_far_from_the_origin_are_accurate(others):
    x = (1000 + 1e-3 * rng().normal(size=(20, 4000))).astype(np.float32)
    big = x.astype(np.float64)
    exact = np.array([[math.sqrt(math.fsum((a - b) ** 2)) for b in big] for a in big])
    result = euclidean(x, x.copy()) if others else euclidean(x)
    np.testing.assert_allclose(result, exact, rtol=1e-6)
    np.testing.assert_allclose(result, exact, rtol=1e-11)


@pytest.mark.parametrize("others", [False, True])
def test_tight_groups_far_apart_are_accurate(others):
    """Centring alone does not help here: the pairs are recomputed from their differences."""
    x = np.repeat(rng().normal(size=(3, 3000)) * 1e6, 4, axis=0)
    x += 1e-4 * rng(1).normal(size=x.shape)
    result = euclidean(x, x.copy()) if others else euclidean(x)
    np.testing.assert_allclose(result, cdist(x, x), rtol=1e-8)


@pytest.mark.parametrize("function", [euclidean, cosine])
@pytest.mark.parametrize("others", [False, True])
def test_neither_a_common_offset_nor_copies_make_pairs_be_computed_twice(
    function, others, monkeypatch
):
    """Centring and taking copies once: without either, every pair would go the slow way."""
    again = []
    direct = distances._direct
    monkeypatch.setattr(
        distances,
        "_direct",
        lambda a, b, *pairs: again.append(len(pairs[0])) or direct(a, b, *pairs),
    )
    x = (1000 + 1e-3 * rng().normal(size=(20, 4000))).astype(np.float32)
    y = (1000 + 1e-3 * rng(1).normal(size=(9, 4000))).astype(np.float32)
    function(x, y if others else None)
    assert again == [0]
    function(x[[0] * 9 + [1] * 9], x[[0] * 9] if others else None)
    assert again[1] == (1 if others else 0)


def test_cosine_keeps_the_digits_of_nearly_parallel_rows():
    angle = np.array([0.0, 1e-9, 1e-6, 3e-5])
    x = 7 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    exact = 2 * np.sin((angle[:, None] - angle) / 2) ** 2
    np.testing.assert_allclose(cosine(x), exact, rtol=1e-6)


def test_cosine_by_hand():
    x = np.array([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    expected = [
        [0.0, 0.4, 2.0, 1.0, 1.0],
        [0.4, 0.0, 1.6, 1.0, 1.0],
        [2.0, 1.6, 0.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 0.0, 0.0],
    ]
    np.testing.assert_allclose(cosine(x), expected, atol=1e-15)
    np.testing.assert_allclose(cosine(x, x[2:4]), np.array(expected)[:, 2:4], atol=1e-15)


def test_cosine_ignores_length():
    x = rng().normal(size=(5, 20))
    np.testing.assert_allclose(cosine(x * [[1], [2], [1e-30], [1e30], [7]]), cosine(x), rtol=1e-12)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 8e307])
def test_absurd_magnitudes_neither_overflow_nor_vanish(size):
    x = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]) * size
    expected = np.sqrt([[0, 2, 4, 1], [2, 0, 2, 1], [4, 2, 0, 1], [1, 1, 1, 0]])
    rtol = 1e-3 if size < 1e-300 else 1e-12
    np.testing.assert_allclose(euclidean(x) / size, expected, rtol=rtol)
    np.testing.assert_allclose(euclidean(x[3:], x[:3]) / size, [[1, 1, 1]], rtol=rtol)
    np.testing.assert_allclose(cosine(x)[:3, :3], [[0, 1, 2], [1, 0, 1], [2, 1, 0]], atol=1e-3)
    assert np.isfinite(scaled_l1(x)).all()
    assert scaled_l1(x)[0, 1] == pytest.approx(1.0, rel=1e-3)
    wide = np.array([[-1.7e308, 0.0, 1.7e308], [0.0, 5e-324, 0.0]])
    assert min_max(wide).tolist() == [[0, 0.5, 1], [0, 1, 0]]


def test_the_offset_is_the_root_mean_square_of_both_orientations():
    x = rng().normal(size=(4, 6))
    x[3] = x[0]
    offset = 0.3
    result = euclidean(x, offset=offset)
    for i, j in product(range(4), repeat=2):
        ways = [np.linalg.norm(a - b + offset) ** 2 for a, b in ((x[i], x[j]), (x[j], x[i]))]
        assert result[i, j] == pytest.approx(0 if i == j else math.sqrt(sum(ways) / 2), rel=1e-12)
    assert result[0, 3] == pytest.approx(0.3 * math.sqrt(6))
    assert euclidean(x, x, offset=offset)[0, 0] == pytest.approx(0.3 * math.sqrt(6))


def test_min_max_by_hand():
    rows = np.array([[2.0, 4.0, 10.0], [-1.0, 0.0, 1.0], [3.0, 3.0, 3.0]], np.float32)
    assert min_max(rows).tolist() == [[0, 0.25, 1], [0, 0.5, 1], [0, 0, 0]]
    assert min_max(rows).dtype == np.float64


def test_scaled_l1_by_hand():
    rows = np.array([[2.0, 4.0, 10.0], [-1.0, 0.0, 1.0], [3.0, 3.0, 3.0]])
    # |0.25 − 0.5| / 3; (0.25 + 1) / 3; (0.5 + 1) / 3
    a, b, c = 0.25 / 3, 1.25 / 3, 1.5 / 3
    np.testing.assert_allclose(scaled_l1(rows), [[0, a, b], [a, 0, c], [b, c, 0]], atol=1e-16)


def test_scaled_l1_ignores_each_rows_own_scale_and_shift():
    x = rng().normal(size=(5, 40))
    moved = x * rng(1).uniform(0.1, 9, (5, 1)) + rng(2).normal(size=(5, 1))
    np.testing.assert_allclose(scaled_l1(moved), scaled_l1(x), atol=1e-13)


def test_jensen_shannon_by_hand():
    p = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]]])
    # between [1, 0] and [½, ½]: m = [¾, ¼]: ½ ln(4/3) + ½ (½ ln(2/3) + ½ ln 2)
    half = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2)
    ln2 = math.log(2)
    expected = [[0, ln2, half], [ln2, 0, half], [half, half, 0]]
    np.testing.assert_allclose(jensen_shannon(p), expected, rtol=1e-14)


def test_jensen_shannon_agrees_with_scipy(monkeypatch):
    monkeypatch.setattr(distances, "_NUMBERS", 30)  # two clients at a time
    p, q = probabilities(7), probabilities(3, seed=1)
    p[2, 1], q[0, 0] = [0, 0, 1], [1, 0, 0]

    def naive(x, y):
        return [[np.mean(jensenshannon(a, b, axis=1) ** 2) for b in y] for a in x]

    np.testing.assert_allclose(jensen_shannon(p), naive(p, p), atol=1e-14)
    np.testing.assert_allclose(jensen_shannon(p, q), naive(p, q), atol=1e-14)


def test_jensen_shannon_of_reordered_or_equal_clients():
    p = probabilities(6).astype(np.float32)
    p[4] = p[1]
    divergences = jensen_shannon(p)
    assert divergences[1, 4] == 0
    assert (divergences == divergences.T).all()
    assert (divergences.diagonal() == 0).all()
    assert divergences.max() <= math.log(2)
    order = rng().permutation(6)
    np.testing.assert_array_equal(jensen_shannon(p[order]), divergences[np.ix_(order, order)])
    assert jensen_shannon(p[:1]).tolist() == [[0.0]]


@pytest.mark.parametrize("bad", [[[1.2, -0.2]], [[0.5, 0.4]], [[3.0, 1.0]]])
def test_jensen_shannon_refuses_what_is_no_probability(bad):
    with pytest.raises(ConfigError, match="sum to 1"):
        jensen_shannon(np.array([bad]))
