"""K-means without a seed."""

import warnings
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

from coterie.clustering import best_k, canonical, kmeans
from coterie.errors import ConfigError, TrainingError


def rng(seed=0):
    return np.random.default_rng(seed)


def planted(seed, sizes=(7, 5, 9, 3), width=100, noise=0.3):
    random = rng(seed)
    truth = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = random.normal(size=(len(sizes), width))[truth]
    return rows + noise * random.normal(size=rows.shape), canonical(truth)


def test_by_hand():
    # 12 is farthest from the mean (4.4), 0 from 12; means 0.5 → {0, 1, 2} and {7, 12}.
    labels, centres = kmeans(np.array([[7.0], [0.0], [1.0], [12.0], [2.0]]), 2)
    assert labels.tolist() == [0, 1, 1, 0, 1]
    assert centres.tolist() == [[9.5], [1.0]]


def test_one_group_and_as_many_as_rows():
    x = rng().normal(size=(5, 3))
    labels, centres = kmeans(x, 1)
    assert labels.tolist() == [0] * 5
    np.testing.assert_allclose(centres, x.mean(axis=0)[None])
    labels, centres = kmeans(x, 5)
    assert labels.tolist() == list(range(5))
    np.testing.assert_allclose(centres, x)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_every_row_is_with_its_nearest_centre_and_every_centre_is_its_groups_mean(k):
    x = rng(k).normal(size=(30, 4)).astype(np.float32)
    labels, centres = kmeans(x, k)
    assert labels.tolist() == canonical(labels).tolist()
    assert centres.dtype == np.float64
    assert centres.shape == (k, 4)
    for g in range(k):
        np.testing.assert_allclose(centres[g], x[labels == g].astype(float).mean(axis=0))
    away = np.linalg.norm(x[:, None] - centres, axis=2)
    assert (away.argmin(axis=1) == labels).all()


def inertia(x, labels):
    return sum(((x[labels == g] - x[labels == g].mean(axis=0)) ** 2).sum() for g in set(labels))


def from_farthest_first(x, k):
    starts = [int(np.linalg.norm(x - x.mean(axis=0), axis=1).argmax())]
    while len(starts) < k:
        gaps = np.linalg.norm(x[:, None] - x[starts], axis=2).min(axis=1)
        starts.append(int(gaps.argmax()))
    return x[starts]


def from_ward(x, k):
    labels = fcluster(linkage(x, "ward"), k, "maxclust")
    return np.stack([x[labels == g].mean(axis=0) for g in set(labels)])


def test_neither_farthest_first_nor_wards_groups_alone_end_lower():
    lower = {from_farthest_first: 0, from_ward: 0}
    for seed in range(20):
        x = rng(seed).normal(size=(30, 2))
        ours = inertia(x, kmeans(x, 5)[0])
        for start in lower:
            theirs = inertia(x, KMeans(5, init=start(x, 5), n_init=1, tol=0).fit(x).labels_)
            assert ours <= theirs * (1 + 1e-9)
            lower[start] += ours < theirs * (1 - 1e-9)
    assert all(count > 5 for count in lower.values())  # each alone is often worse


def test_weights_by_hand():
    # {0, 1} and {2}: 0.5, or 1/2·1 with weights 1; {0} and {1, 2}: the same, until 2 weighs less.
    x = np.array([[0.0], [1.0], [2.1]])
    assert kmeans(x, 2)[0].tolist() == [0, 0, 1]
    # Squares 3·1/4·1² = 0.75 for {0, 1}, and 1·0.5/1.5·1.1² = 0.403 for {1, 2.1}.
    labels, centres = kmeans(x, 2, [3, 1, 0.5])
    assert labels.tolist() == [0, 1, 1]
    assert centres.ravel() == pytest.approx([0, (1 + 0.5 * 2.1) / 1.5])


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_a_row_of_weight_two_is_two_rows(k):
    x = rng(k).normal(size=(15, 3))
    counts = rng(k).integers(1, 5, 15)
    labels, centres = kmeans(x, k, counts)
    often = np.repeat(np.arange(15), counts)
    copied, same = kmeans(x[often], k)
    assert copied.tolist() == labels[often].tolist()
    np.testing.assert_allclose(same, centres, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3, 6])
def test_everybody_twice_changes_no_group(k):
    x = rng(k).normal(size=(15, 3))
    labels, centres = kmeans(x, k)
    twice, same = kmeans(np.concatenate([x, x]), k)
    assert twice.tolist() == [*labels, *labels]
    np.testing.assert_allclose(same, centres, atol=1e-12)


@given(
    arrays(np.float64, (7, 2), elements=st.integers(-2, 2).map(float)),
    st.permutations(range(7)),
    st.integers(1, 4),
)
def test_the_order_of_clients_changes_nothing_even_with_ties(x, order, k):
    order = np.array(order)
    if k <= len(np.unique(x, axis=0)):
        labels, centres = kmeans(x, k)
        again, moved = kmeans(x[order], k)
        assert again.tolist() == canonical(labels[order]).tolist()
        assert sorted(moved.tolist()) == sorted(centres.tolist())
    one, two = best_k(x), best_k(x[order])
    assert two.labels.tolist() == canonical(one.labels[order]).tolist()
    assert two.scores == one.scores
    assert sorted(two.centres.tolist()) == sorted(one.centres.tolist())


def test_more_groups_than_distinct_rows_are_refused():
    x = np.array([[0.0], [-0.0], [1.0], [1.0], [2.0]])
    assert kmeans(x, 3)[0].tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(ConfigError, match=r"4 groups .* 3 distinct"):
        kmeans(x, 4)
    with pytest.raises(ConfigError):
        kmeans(x, 0)
    with pytest.raises(TrainingError):
        kmeans([[0.0], [np.nan]], 1)


@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found_in_any_order(seed):
    x, truth = planted(seed)
    best = best_k(x.astype(np.float32))
    assert best.labels.tolist() == truth.tolist()
    assert kmeans(x, 4)[0].tolist() == truth.tolist()
    assert best.silhouette == best.scores[4] == max(best.scores.values())
    order = rng(seed + 1).permutation(len(x))
    assert best_k(x[order]).labels.tolist() == canonical(truth[order]).tolist()
    for g in range(4):
        np.testing.assert_allclose(best.centres[g], x[truth == g].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_one_blob_is_one_group(seed):
    x = rng(seed).normal(size=(24, 200))
    best = best_k(x)
    assert best.labels.tolist() == [0] * 24
    assert best.silhouette == 0
    assert list(best.scores) == list(range(2, 24))
    np.testing.assert_allclose(best.centres, x.mean(axis=0)[None], atol=1e-12)


def test_scores_are_scikit_learns():
    x = rng(2).normal(size=(12, 3))
    best = best_k(x, floor=-1)
    expected = {k: silhouette_score(x, kmeans(x, k)[0]) for k in range(2, 12)}
    assert best.scores == pytest.approx(expected, abs=1e-9)
    assert best.labels.tolist() == kmeans(x, max(expected, key=expected.get))[0].tolist()


def test_the_penalty_and_the_limit_prefer_fewer_groups():
    x = np.array([0, 0.1, 2, 2.1, 20, 20.1, 22, 22.1])[:, None]
    assert best_k(x).labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    scores = best_k(x).scores
    fair = (scores[4] - scores[2]) / 2  # a penalty at which 2 and 4 groups are worth the same
    assert best_k(x, penalty=0.9 * fair).labels.max() == 3
    fewer = best_k(x, penalty=1.1 * fair)
    assert fewer.labels.tolist() == [0] * 4 + [1] * 4
    assert fewer.silhouette == scores[2]
    assert fewer.scores == scores
    limited = best_k(x, most=3)
    assert list(limited.scores) == [2, 3]
    assert limited.labels.tolist() == kmeans(x, 3)[0].tolist()
    assert best_k(x, most=2).labels.tolist() == [0] * 4 + [1] * 4
    assert best_k(x, most=1).labels.tolist() == [0] * 8
    assert best_k(x, floor=0.999).labels.tolist() == [0] * 8
    # A silhouette below the floor is no candidate, however cheap its k.
    assert best_k(x, floor=scores[2] + 1e-9, penalty=1.1 * fair).labels.max() == 3


def test_few_or_identical_rows_are_one_group_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (np.ones((1, 3)), np.array([[0.0], [9.0]]), np.ones((6, 2)), np.zeros((6, 2))):
            best = best_k(x, floor=-1)
            assert best.labels.tolist() == [0] * len(x)
            assert best.scores == {}
            np.testing.assert_allclose(best.centres, x.mean(axis=0)[None])
        x = np.array([[0.0], [0.0], [0.0], [5.0], [5.0], [9.0]])
        assert best_k(x).labels.tolist() == [0, 0, 0, 1, 1, 2]
        assert list(best_k(x).scores) == [2, 3]


def test_copies_are_not_tried_as_starts(monkeypatch):
    module, tried = import_module("coterie.clustering.kmeans"), []
    lloyd = module._lloyd

    def noted(points, mass, centres):
        tried.append((tuple(mass), len(centres)))
        return lloyd(points, mass, centres)

    monkeypatch.setattr(module, "_lloyd", noted)
    best_k(np.array([[0.0], [-0.0], [0.0], [5.0], [5.0], [9.0]]))
    assert set(tried) == {((3, 2, 1), 2), ((3, 2, 1), 3)}  # copies are counted, not kept


def test_rows_that_differ_by_less_than_rounding_are_copies_without_a_warning():
    x = np.array([[0.0], [1e-20], [1.0], [2.0], [2.0]])  # centred, the first two are the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kmeans(x, 3)[0].tolist() == [0, 0, 1, 2, 2]
        with pytest.raises(ConfigError, match=r"4 groups .* 3 distinct"):
            kmeans(x, 4)
        assert best_k(x).labels.tolist() == [0, 0, 1, 2, 2]
        assert list(best_k(x).scores) == [2, 3]
