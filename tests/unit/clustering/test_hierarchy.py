"""Dendrograms and their cuts."""

import json
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster
from sklearn.metrics import silhouette_score

from coterie.clustering import LINKAGES, Dendrogram, agglomerate, best_cut, canonical, euclidean
from coterie.errors import ConfigError, TrainingError


def rng(seed=0):
    return np.random.default_rng(seed)


def groups(labels):
    return {frozenset(np.flatnonzero(labels == g).tolist()) for g in np.unique(labels)}


def refines(fine, coarse):
    return all(any(g <= h for h in groups(coarse)) for g in groups(fine))


def planted(seed, sizes=(7, 5, 9, 3), width=200):
    """Groups of unequal sizes, shuffled, and whose each row is."""
    random = rng(seed)
    truth = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return random.normal(size=(len(sizes), width))[truth] + 0.3 * random.normal(
        size=(len(truth), width)
    ), canonical(truth)


def line(*at):
    at = np.array(at, float)
    return abs(at[:, None] - at)


def naive_average(matrix):
    """Merge heights of UPGMA by its definition: the mean over all pairs of members."""
    clusters, heights = [[i] for i in range(len(matrix))], []
    while len(clusters) > 1:
        pairs = [
            (np.mean([matrix[a, b] for a in x for b in y]), i, j)
            for i, x in enumerate(clusters)
            for j, y in enumerate(clusters)
            if i < j
        ]
        height, i, j = min(pairs)
        heights.append(height)
        clusters[i] += clusters.pop(j)
    return heights


def test_canonical_numbers_groups_by_their_smallest_member():
    assert canonical([5, 5, -1, 2, -1, 5]).tolist() == [0, 0, 1, 2, 1, 0]
    assert canonical(np.array(["b", "a", "b"])).tolist() == [0, 1, 0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_canonical_keeps_the_groups_and_is_its_own_fixed_point(labels):
    result = canonical(labels)
    assert groups(result) == groups(np.array(labels))
    assert canonical(result).tolist() == result.tolist()
    firsts = [result.tolist().index(g) for g in range(result.max() + 1)]
    assert firsts == sorted(firsts)


def test_average_linkage_by_hand_with_unequal_sizes():
    # 0-1 at 2, then 2 joins {0,1} at (4+6)/2 = 5; 3 then at (10+12+20)/3 = 14 (WPGMA: 15.5).
    matrix = np.array([[0, 2, 4, 10], [2, 0, 6, 12], [4, 6, 0, 20], [10, 12, 20, 0]])
    tree = agglomerate(matrix)
    assert tree.to_list() == [[0, 1, 2.0, 2], [2, 4, 5.0, 3], [3, 5, 14.0, 4]]
    assert agglomerate(matrix, "single").heights.tolist() == [2, 4, 10]
    assert agglomerate(matrix, "complete").heights.tolist() == [2, 6, 20]
    assert json.loads(json.dumps(tree.to_list())) == tree.to_list()


@pytest.mark.parametrize("seed", range(3))
def test_average_linkage_is_the_mean_over_all_pairs(seed):
    matrix = euclidean(rng(seed).normal(size=(11, 3)))
    np.testing.assert_allclose(agglomerate(matrix).heights, naive_average(matrix), rtol=1e-10)


def test_cuts_by_hand():
    tree = agglomerate(line(0, 1, 5, 5, 20))
    assert tree.heights.tolist() == [0, 1, 4.5, 17.25]
    assert tree.cut(-1).tolist() == [0, 1, 2, 3, 4]
    assert tree.cut(0).tolist() == [0, 1, 2, 2, 3]
    assert tree.cut(0.99).tolist() == [0, 1, 2, 2, 3]
    assert tree.cut(1).tolist() == [0, 0, 1, 1, 2]
    assert tree.cut(4.5).tolist() == [0, 0, 0, 0, 1]
    assert tree.cut(np.inf).tolist() == [0] * 5
    assert tree.cut_normalised(0.25).tolist() == tree.cut(0.25 * 17.25).tolist() == [0, 0, 1, 1, 2]
    assert tree.cut_normalised(0).tolist() == [0, 1, 2, 2, 3]
    assert tree.cut_normalised(0.99).tolist() == [0, 0, 0, 0, 1]
    assert tree.cut_normalised(1).tolist() == tree.cut_normalised(3).tolist() == [0] * 5
    assert [tree.cut_count(k).max() + 1 for k in range(1, 6)] == [1, 2, 3, 4, 5]
    assert tree.cut_count(3).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("seed", range(4))
def test_cuts_agree_with_scipy_and_are_nested(linkage, seed):
    matrix = euclidean(rng(seed).normal(size=(15, 4)))
    tree = agglomerate(matrix, linkage)
    assert (np.diff(tree.heights) >= 0).all()
    heights = np.linspace(0, tree.heights[-1] * 1.1, 25)
    cuts = [tree.cut(h) for h in heights]
    for height, labels in zip(heights, cuts, strict=True):
        assert groups(labels) == groups(fcluster(tree.merges, height, "distance"))
        assert labels.tolist() == canonical(labels).tolist()
    assert all(refines(a, b) for a, b in pairwise(cuts))
    counted = [tree.cut_count(k) for k in range(15, 0, -1)]
    assert all(refines(a, b) for a, b in pairwise(counted))
    assert len(groups(cuts[0])) == 15


@pytest.mark.parametrize("linkage", LINKAGES)
def test_one_client_and_two(linkage):
    alone = agglomerate([[0.0]], linkage)
    assert alone.merges.shape == (0, 4)
    assert alone.to_list() == alone.heights.tolist() == []
    for labels in (alone.cut(0), alone.cut_normalised(0.3), alone.cut_count(1)):
        assert labels.tolist() == [0]
    assert best_cut([[0.0]], alone).labels.tolist() == [0]
    two = agglomerate(line(0, 3), linkage)
    assert two.heights.tolist() == [3.0]
    assert two.cut(2.9).tolist() == [0, 1]
    assert two.cut_normalised(0.5).tolist() == [0, 1]
    cut = best_cut(line(0, 3), two, floor=-1)
    assert (cut.labels.tolist(), cut.height, cut.scores) == ([0, 0], 3.0, {})


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("clients", [2, 3, 8])
def test_identical_clients_are_one_group(linkage, clients):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = euclidean(np.ones((clients, 5)))
        tree = agglomerate(matrix, linkage)
        for labels in (tree.cut(0), tree.cut_normalised(0), tree.cut_normalised(0.5)):
            assert labels.tolist() == [0] * clients
        for labels in (tree.cut_normalised(1), tree.cut_normalised(np.inf)):
            assert labels.tolist() == [0] * clients
        cut = best_cut(matrix, tree, floor=-1)
        assert (cut.labels.tolist(), cut.height) == ([0] * clients, 0.0)
        assert len(groups(tree.cut_count(2))) == 2


def test_tied_heights_can_still_be_counted():
    matrix = np.ones((5, 5)) - np.eye(5)
    tree = agglomerate(matrix)
    assert tree.heights.tolist() == [1.0] * 4
    assert [len(groups(tree.cut_count(k))) for k in range(1, 6)] == [1, 2, 3, 4, 5]
    assert len(groups(tree.cut(0.999))) == 5
    assert best_cut(matrix, tree).labels.tolist() == [0] * 5


def test_the_last_merge_counts_at_one_whatever_the_rounding():
    low, middle, high = np.nextafter(0.3, 0), 0.3, 0.1 + 0.2
    tree = Dendrogram(4, np.array([[0, 1, low, 2], [2, 4, middle, 3], [3, 5, high, 4]]))
    assert tree.cut_normalised(1).tolist() == [0, 0, 0, 0]
    for seed in range(50):
        tree = agglomerate(euclidean(rng(seed).normal(size=(9, 3)) / 3))
        assert tree.cut_normalised(1.0).max() == 0
        assert tree.cut_normalised(np.nextafter(1, 0) - 1e-9).max() == 1


def test_equidistant_clients_are_one_group_at_one_despite_rounding():
    matrix = 0.1 * (np.ones((7, 7)) - np.eye(7))
    assert agglomerate(matrix).cut_normalised(1).max() == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'average'"):
        agglomerate(line(0, 1), "averge")
    tree = agglomerate(line(0, 1, 2))
    for k in (0, 4):
        with pytest.raises(ConfigError, match=f"3 clients .* {k} groups"):
            tree.cut_count(k)
    for gamma in (-0.1, np.nan):
        with pytest.raises(ConfigError):
            tree.cut_normalised(gamma)
    with pytest.raises(ConfigError):
        tree.cut(np.nan)
    with pytest.raises(ConfigError, match=r"4 clients, .* tree has 3"):
        best_cut(line(0, 1, 2, 3), tree)


@pytest.mark.parametrize(
    "matrix", [np.ones((2, 3)), [[0, 1], [2, 0]], [[0, -1], [-1, 0]], [[1, 1], [1, 1]]]
)
def test_what_is_no_distance_matrix_is_refused(matrix):
    with pytest.raises(ConfigError):
        agglomerate(matrix)


def test_nan_is_refused():
    with pytest.raises(TrainingError, match="not finite"):
        agglomerate([[0, np.nan], [np.nan, 0]])


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("duplicates", [False, True])
def test_scores_are_the_silhouettes_of_all_cuts(linkage, duplicates):
    for seed in range(4):
        x = rng(seed).normal(size=(13, 3))
        if duplicates:
            x = np.concatenate([x, x[[2, 2, 5]]])
        matrix = euclidean(x)
        tree = agglomerate(matrix, linkage)
        cut = best_cut(matrix, tree, floor=-1)
        expected = {
            k: silhouette_score(matrix, tree.cut_count(k), metric="precomputed")
            for k in range(2, len(x))
        }
        assert list(cut.scores) == list(expected)
        assert cut.scores == pytest.approx(expected, abs=1e-12)
        best = max(expected, key=lambda k: (round(expected[k], 10), -k))
        assert cut.labels.tolist() == tree.cut_count(best).tolist()
        assert cut.silhouette == pytest.approx(expected[best])
        assert groups(tree.cut(cut.height)) == groups(cut.labels)


def test_the_height_of_the_best_cut_lies_midway():
    matrix = line(0, 1, 10, 12)
    cut = best_cut(matrix, agglomerate(matrix))
    assert cut.labels.tolist() == [0, 0, 1, 1]
    assert cut.height == (2 + 10.5) / 2
    assert cut.silhouette == cut.scores[2]


def test_ties_go_to_fewer_groups():
    equal = np.ones((6, 6)) - np.eye(6)
    cut = best_cut(equal, agglomerate(equal), floor=-1)
    assert set(cut.scores.values()) == {0.0}
    assert cut.labels.max() + 1 == 2


def test_the_floor_must_be_exceeded():
    matrix = line(0, 1, 10, 12)
    tree = agglomerate(matrix)
    score = best_cut(matrix, tree).silhouette
    assert best_cut(matrix, tree, floor=score - 1e-9).labels.max() == 1
    one = best_cut(matrix, tree, floor=score)
    assert (one.labels.tolist(), one.height, one.silhouette) == ([0] * 4, 10.5, 0.0)
    assert one.scores[2] == score


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found_in_any_order(linkage, seed):
    x, truth = planted(seed)
    matrix = euclidean(x.astype(np.float32))
    tree = agglomerate(matrix, linkage)
    cut = best_cut(matrix, tree)
    assert cut.labels.tolist() == truth.tolist()
    assert tree.cut(cut.height).tolist() == truth.tolist()
    order = rng(seed + 9).permutation(len(x))
    again = euclidean(x[order].astype(np.float32))
    shuffled = agglomerate(again, linkage)
    assert best_cut(again, shuffled).labels.tolist() == canonical(truth[order]).tolist()


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("seed", range(4))
def test_every_cut_is_the_same_in_any_order(linkage, seed):
    x, order = rng(seed).normal(size=(14, 5)), rng(seed + 50).permutation(14)
    tree, shuffled = (agglomerate(euclidean(y), linkage) for y in (x, x[order]))
    for k in range(1, 15):
        assert shuffled.cut_count(k).tolist() == canonical(tree.cut_count(k)[order]).tolist()
    for gamma in (0.2, 0.5, 0.9):
        expected = canonical(tree.cut_normalised(gamma)[order])
        assert shuffled.cut_normalised(gamma).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_one_blob_is_one_group(seed):
    matrix = euclidean(rng(seed).normal(size=(24, 200)))
    assert best_cut(matrix, agglomerate(matrix)).labels.tolist() == [0] * 24


def apart(gap):
    """Nine clients, each 1 from the others, and a tenth that is ``gap`` from them all."""
    matrix = np.full((10, 10), 1.0)
    matrix[9] = matrix[:, 9] = gap
    np.fill_diagonal(matrix, 0.0)
    return matrix


def test_one_client_that_stands_out_by_chance_is_no_group():
    # Nine clients have (1.2 − 1)/1.2 = 1/6, the tenth has 0: 0.15 over clients, 1/12 over groups.
    matrix = apart(1.2)
    cut = best_cut(matrix, agglomerate(matrix))
    assert cut.scores[2] == pytest.approx(0.15)
    assert set(cut.labels) == {0}


def test_one_client_that_is_really_different_is():
    # (2 − 1)/2 for nine clients: 0.45 over clients, 0.25 over groups.
    matrix = apart(2.0)
    cut = best_cut(matrix, agglomerate(matrix))
    assert cut.labels.tolist() == [0] * 9 + [1]
    assert cut.silhouette == pytest.approx(0.45)
