"""Clustering in one exchange: what a client sends, and what the server makes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.clustering import canonical, kmeans, local_centres, nearest_seed, seed_centres
from coterie.errors import ConfigError, TrainingError


def rng(seed=0):
    return np.random.default_rng(seed)


# --- the client's half ---------------------------------------------------------------------------


def test_two_clouds_by_hand():
    points = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 2.0], [10.0, 2.0], [10.0, 4.0]])
    labels, centres = local_centres(points, 2)
    assert labels.tolist() == [0, 1, 0, 1, 1]
    np.testing.assert_allclose(centres, [[0, 1], [10, 2]], atol=1e-12)


def test_one_centre_is_the_mean():
    x = rng().normal(size=(9, 4)).astype(np.float32)
    labels, centres = local_centres(x, 1)
    assert labels.tolist() == [0] * 9
    np.testing.assert_allclose(centres, x.mean(axis=0, dtype=np.float64)[None], atol=1e-12)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_who_has_fewer_distinct_points_sends_as_many_centres(k):
    one = np.ones((4, 3))
    labels, centres = local_centres(one, k)
    assert (labels.tolist(), centres.tolist()) == ([0] * 4, [[1.0] * 3])
    two = np.array([[5.0, 1.0], [1.0, 1.0], [5.0, 1.0]])
    labels, centres = local_centres(two, k)
    assert labels.tolist() == [0, 1, 0]
    assert centres.tolist() == [[5.0, 1.0], [1.0, 1.0]]
    single = local_centres([[7.0, 8.0]], k)
    assert (single[0].tolist(), single[1].tolist()) == ([0], [[7.0, 8.0]])
    near = local_centres([[0.0], [1e-20], [1.0]], k)  # by less than rounding: a copy
    assert near[0].tolist() == [0, 0, 1]


def test_copies_of_a_point_are_never_separated():
    x = rng(3).normal(size=(6, 50))
    labels, centres = local_centres(np.repeat(x, [9, 1, 4, 7, 2, 3], axis=0), 6)
    assert labels.tolist() == np.repeat(np.arange(6), [9, 1, 4, 7, 2, 3]).tolist()
    np.testing.assert_allclose(centres, x, atol=1e-12)


@given(
    arrays(np.float64, (6, 3), elements=st.integers(-2, 2).map(float)),
    st.permutations(range(6)),
    st.integers(1, 4),
)
def test_the_order_of_points_changes_nothing(x, order, k):
    order = np.array(order)
    labels, centres = local_centres(x, k)
    again, moved = local_centres(x[order], k)
    assert again.tolist() == canonical(labels[order]).tolist()
    assert sorted(moved.tolist()) == sorted(centres.tolist())  # to the bit
    for g in range(len(centres)):
        np.testing.assert_allclose(centres[g], x[labels == g].mean(axis=0), atol=1e-12)


def test_the_projection_finds_clouds_that_noise_hides():
    # In 1000 dimensions the noise of one point, √1000 = 32, is far longer than the 8 between means.
    shares, plain = [], []
    for seed in range(5):
        random = rng(seed)
        means = 8 / np.sqrt(2) * np.eye(1000)[:6]
        truth = random.permutation(np.repeat(np.arange(6), 30))
        x = means[truth] + random.normal(size=(180, 1000))
        labels, centres = local_centres(x, 6)
        for g in range(6):  # of the points themselves, not of their projections
            np.testing.assert_allclose(centres[g], x[labels == g].mean(axis=0), atol=1e-12)
        shares.append(agreement(labels, truth))
        plain.append(agreement(kmeans(x, 6)[0], truth))
    assert min(shares) > 0.9
    assert np.mean(plain) < 0.8  # so the test above can tell


def agreement(labels, truth):
    """The share of points in a cloud whose most frequent true cloud is theirs."""
    return np.mean([np.bincount(truth[labels == g]).max() for g in set(labels)]) / np.mean(
        np.bincount(labels)
    )


# --- the server's half ---------------------------------------------------------------------------


def test_farthest_first_by_hand():
    # Inside a client the two are 4, 6 and √26 = 5.1 apart: the second begins, (0, 0) and (6, 0).
    # From these (0, 5) is at 5, (−1, ±2) at √5, (−1, 0) at 1. Then, (0, 5) being √10 from (−1, 2),
    # both (−1, ±2) are still at √5: the smaller comes first, the other one is 4 from it.
    clients = [[[-1.0, -2.0], [-1.0, 2.0]], [[0.0, 0.0], [6.0, 0.0]], [[0.0, 5.0], [-1.0, 0.0]]]
    assert seed_centres(clients, 5).tolist() == [[0, 0], [6, 0], [0, 5], [-1, -2], [-1, 2]]
    assert seed_centres(clients, 2).tolist() == [[0, 0], [6, 0]]
    assert seed_centres(clients, 6).tolist()[-1] == [-1, 0]
    assert len(seed_centres(clients, 9)) == 6  # there are no more


def test_the_server_begins_with_the_client_that_tells_most_apart():
    few = [[[0.0], [100.0]], [[0.0], [1.0], [2.0]]]
    assert seed_centres(few, 3).ravel().tolist() == [0, 1, 2]  # three centres before two
    split = [[[0.0], [0.1], [50.0]], [[0.0], [20.0], [50.0]]]  # one cloud cut in two against three
    assert seed_centres(split, 3).ravel().tolist() == [0, 20, 50]
    assert seed_centres(split[::-1], 3).ravel().tolist() == [0, 20, 50]


@given(
    arrays(np.float64, (5, 2, 2), elements=st.integers(-2, 2).map(float)),
    st.permutations(range(5)),
    st.integers(2, 7),
)
def test_the_order_of_clients_and_of_their_centres_changes_nothing_even_with_ties(x, order, k):
    seeds = seed_centres(list(x), k)
    again = seed_centres([x[i][::-1] for i in order], k)
    assert again.tolist() == seeds.tolist()
    everyone = np.unique(x.reshape(-1, 2), axis=0)
    assert len(seeds) == min(k, len(everyone))
    assert len(np.unique(seeds, axis=0)) == len(seeds)


def test_one_group_is_everybodys():
    centres = [rng(i).normal(size=(1, 3)) for i in range(4)]
    seeds = seed_centres(centres, 1)
    assert seeds.shape == (1, 3)
    assert all(nearest_seed(c, seeds).tolist() == [0] for c in centres)


def test_every_centre_goes_to_the_nearest_seed_and_the_first_of_two():
    seeds = [[0.0, 0.0], [4.0, 0.0], [4.0, 3.0]]
    centres = [[1.0, 0.0], [2.0, 0.0], [4.0, 1.5], [5.0, 5.0], [3.9, 1.6]]
    assert nearest_seed(centres, seeds).tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_mixture_is_found_whole(seed):
    """Nine clouds, three on each of twelve clients: every point of all with its own, and no other.

    In random positions, 20 apart at least, in units of the noise.
    """
    random = rng(seed)
    means = random.normal(size=(9, 50))
    gaps = np.linalg.norm(means[:, None] - means, axis=2)
    means *= 20 / gaps[gaps > 0].min()
    truth, result, sent = [], [], []
    for _ in range(4):
        for own in random.permutation(9).reshape(3, 3):
            y = random.permutation(np.repeat(own, 15))
            truth.append(y)
            sent.append(local_centres(means[y] + random.normal(size=(45, 50)), 3))
    seeds = seed_centres([c for _, c in sent], 9)
    result = [nearest_seed(c, seeds)[labels] for labels, c in sent]
    assert canonical(np.concatenate(result)).tolist() == canonical(np.concatenate(truth)).tolist()


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ConfigError, match="2 groups cannot begin with the 3 centres"):
        seed_centres([[[0.0], [1.0], [2.0]]], 2)
    with pytest.raises(TrainingError):
        local_centres([[np.nan]], 1)
    with pytest.raises(ConfigError):
        seed_centres([[[0.0, 0.0]], np.empty((0, 2))], 2)
