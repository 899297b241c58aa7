"""DBSCAN with noise as groups of one, and the Hopkins statistic."""

import numpy as np
import pytest
from sklearn.cluster import DBSCAN

from coterie.clustering import canonical, dbscan, euclidean, hopkins
from coterie.errors import ConfigError, TrainingError


def rng(seed=0):
    return np.random.default_rng(seed)


def line(*at):
    at = np.array(at, float)
    return abs(at[:, None] - at)


def test_by_hand():
    matrix = line(7, 0, 1, 2, 20, 7.5, 30)
    assert dbscan(matrix, 1.0).tolist() == [0, 1, 1, 1, 2, 0, 3]
    assert dbscan(matrix, 0.99).tolist() == [0, 1, 2, 3, 4, 0, 5]
    assert dbscan(matrix, 1.0, min_points=3).tolist() == [0, 1, 1, 1, 2, 3, 4]
    assert dbscan(matrix, 1.0, min_points=4).tolist() == list(range(7))
    assert dbscan(matrix, 100).tolist() == [0] * 7


def test_single_double_and_identical_clients():
    assert dbscan([[0.0]], 1.0).tolist() == [0]
    assert dbscan(line(0, 3), 1.0).tolist() == [0, 1]
    assert dbscan(line(0, 3), 3.0).tolist() == [0, 0]
    assert dbscan(np.zeros((5, 5)), 1e-9).tolist() == [0] * 5


def test_a_client_between_two_groups_joins_the_nearer_one_in_any_order():
    at = np.array([0.0, 0.5, 1.0, 1.9, 3.0, 3.5, 4.0])  # 1.9 has one neighbour on either side
    for seed in range(8):
        order = rng(seed).permutation(7)
        labels = dbscan(line(*at[order]), 1.1, min_points=4)
        expected = canonical(np.array([0, 0, 0, 0, 1, 1, 1])[order])
        assert labels.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("min_points", [1, 2, 3])
def test_agrees_with_scikit_learn_in_any_order(seed, min_points):
    x = rng(seed).normal(size=(40, 2))
    labels = DBSCAN(eps=0.35, min_samples=min_points).fit(x).labels_
    labels = np.where(labels < 0, 1000 + np.arange(40), labels)
    if min_points < 3:  # no borders
        assert dbscan(euclidean(x), 0.35, min_points).tolist() == canonical(labels).tolist()
    order = rng(seed + 9).permutation(40)
    assert (
        dbscan(euclidean(x[order]), 0.35, min_points).tolist()
        == canonical(dbscan(euclidean(x), 0.35, min_points)[order]).tolist()
    )


@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found(seed):
    truth = rng(seed).permutation(np.repeat([0, 1, 2], [6, 4, 8]))
    x = 5 * rng(seed).normal(size=(3, 50))[truth] + 0.1 * rng(seed + 1).normal(size=(18, 50))
    assert dbscan(euclidean(x), eps=3.0).tolist() == canonical(truth).tolist()


def test_wrong_arguments_are_refused():
    for eps, points in ((0.0, 2), (-1.0, 2), (np.nan, 2), (1.0, 0)):
        with pytest.raises(ConfigError):
            dbscan(line(0, 1), eps, points)
    with pytest.raises(TrainingError):
        dbscan([[0, np.inf], [np.inf, 0]], 1.0)
    with pytest.raises(TrainingError):
        hopkins([[0.0], [np.nan], [1.0]], rng())
    with pytest.raises(ConfigError):
        hopkins(np.ones((4, 2)), rng(), draws=0)


def test_hopkins_is_its_definition():
    x = rng(5).normal(size=(23, 3)) * [1, 5, 0.1] + 7
    random, total = rng(2), 0.0
    for _ in range(4):
        picked = random.choice(23, 4, replace=False)
        uniform = random.uniform(x.min(axis=0), x.max(axis=0), (4, 3))
        u = sum(min(np.linalg.norm(p - q) for q in x) for p in uniform)
        w = sum(min(np.linalg.norm(x[i] - x[j]) for j in range(23) if j != i) for i in picked)
        total += u / (u + w)
    assert hopkins(x, rng(2), draws=4) == pytest.approx(total / 4, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_hopkins_tells_clusters_from_a_blob_in_many_dimensions(seed):
    random = rng(seed)
    blob = random.normal(size=(20, 500))
    assert 0.42 < hopkins(blob, rng(seed)) < 0.58
    centres = random.normal(size=(4, 500))[np.arange(20) % 4]
    assert hopkins(centres + 0.05 * blob, rng(seed)) > 0.75


@pytest.mark.parametrize("seed", range(5))
def test_hopkins_is_about_a_half_for_uniform_points(seed):
    assert 0.4 < hopkins(rng(seed).uniform(size=(400, 2)), rng(seed)) < 0.6


def test_hopkins_ignores_scale_and_shift():
    x = rng().normal(size=(30, 4))
    assert hopkins(1000 * x - 5, rng(1)) == pytest.approx(hopkins(x, rng(1)), rel=1e-9)


def test_hopkins_that_cannot_tell():
    assert hopkins([[1.0, 2.0]], rng()) == 0.5
    assert hopkins([[1.0, 2.0], [5.0, 9.0]], rng()) == 0.5
    assert hopkins(np.ones((9, 4)), rng()) == 0.5
    assert hopkins(np.repeat([[0.0, 0.0], [1.0, 1.0]], 4, axis=0), rng()) == 1.0
    assert hopkins([[0.0], [0.4], [1.0]], rng()) != 0.5  # three points are enough
