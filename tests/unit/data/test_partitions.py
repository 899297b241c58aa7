"""Laws of partitions: disjoint, complete, seeded, and true to their own description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import PARTITIONS
from coterie.errors import ConfigError, DataError

COMPLETE = ["iid", "dirichlet", "shards", "quantity"]
SEEDED = [*COMPLETE, "label-skew", "primary-secondary"]

label_sets = st.builds(
    lambda counts, seed: np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(counts)), counts)
    ),
    st.lists(st.integers(5, 60), min_size=3, max_size=10),
    st.integers(0, 1000),
)
seeds = st.integers(0, 2**31)
few_examples = settings(max_examples=30, deadline=None)


def balanced(classes: int = 10, each: int = 100) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def assert_disjoint_and_sorted(indices: list[np.ndarray], samples: int) -> None:
    for held in indices:
        assert (np.diff(held) > 0).all()
    together = np.concatenate(indices)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < samples


@few_examples
@given(labels=label_sets, clients=st.integers(1, 7), seed=seeds)
@pytest.mark.parametrize("name", COMPLETE)
def test_complete_partitions_use_every_sample_once(name, labels, clients, seed):
    params = {"min_samples": 2} if name in ("dirichlet", "quantity") else {}
    dealt = PARTITIONS[name](labels, clients, seed, **params)
    assert len(dealt.indices) == clients
    assert_disjoint_and_sorted(dealt.indices, len(labels))
    assert sum(len(held) for held in dealt.indices) == len(labels)


@few_examples
@given(labels=label_sets, clients=st.integers(1, 12), seed=seeds, fraction=st.floats(0.01, 1))
def test_label_skew_deals_all_samples_of_held_labels(labels, clients, seed, fraction):
    classes = len(np.unique(labels))
    each = max(1, int(fraction * classes + 0.5))
    dealt = PARTITIONS["label-skew"](labels, clients, seed, fraction=fraction)
    assert_disjoint_and_sorted(dealt.indices, len(labels))
    together = np.concatenate(dealt.indices)
    held_labels = np.unique(labels[together])
    assert len(together) == np.isin(labels, held_labels).sum()
    assert len(held_labels) >= min(classes, each)
    if clients * each >= classes:
        assert len(held_labels) == classes
    assert all(len(np.unique(labels[held])) <= each for held in dealt.indices)


@pytest.mark.parametrize("name", SEEDED)
def test_same_seed_same_partition_other_seed_another(name):
    labels = balanced()
    first, again, other = (PARTITIONS[name](labels, 7, seed).indices for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", SEEDED)
def test_labels_are_not_changed(name):
    labels = balanced()
    labels.flags.writeable = False
    PARTITIONS[name](labels, 7, 0)


def test_iid_sizes_and_proportions():
    labels = balanced(each=1000)
    dealt = PARTITIONS["iid"](labels, 8, 0)
    assert {len(held) for held in dealt.indices} == {1250}
    for held in dealt.indices:
        assert np.bincount(labels[held], minlength=10) == pytest.approx(125, abs=45)


@few_examples
@given(
    clients=st.integers(2, 40),
    alpha=st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 100.0]),
    least=st.integers(0, 25),
    seed=seeds,
)
@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_min_samples_is_kept(name, clients, alpha, least, seed):
    dealt = PARTITIONS[name](balanced(), clients, seed, alpha=alpha, min_samples=least)
    assert min(len(held) for held in dealt.indices) >= least
    assert sum(len(held) for held in dealt.indices) == 1000


def test_dirichlet_ends_at_the_tightest_possible_minimum():
    dealt = PARTITIONS["dirichlet"](balanced(), 100, 0, alpha=0.001, min_samples=10)
    assert {len(held) for held in dealt.indices} == {10}


def test_dirichlet_alpha_sets_the_skew():
    labels = balanced(each=500)

    def largest_share(alpha):
        dealt = PARTITIONS["dirichlet"](labels, 10, 0, alpha=alpha)
        tables = [np.bincount(labels[held], minlength=10) for held in dealt.indices]
        return np.mean([table.max() / table.sum() for table in tables])

    assert largest_share(1000) < 0.15
    assert 0.15 < largest_share(1) < 0.5
    assert largest_share(0.01) > 0.7


def test_dirichlet_mean_size_is_even():
    """E[share of a class at a client] = 1 / clients."""
    labels = balanced(2, 200)
    first = [
        PARTITIONS["dirichlet"](labels, 4, seed, alpha=1.0, min_samples=0).indices[0]
        for seed in range(150)
    ]
    of_each_class = np.mean([np.bincount(labels[held], minlength=2) for held in first], axis=0)
    assert of_each_class == pytest.approx(50, rel=0.15)


def test_label_skew_gives_each_client_its_number_of_labels():
    labels = balanced(each=100)
    dealt = PARTITIONS["label-skew"](labels, 20, 0, fraction=0.3)
    assert {len(np.unique(labels[held])) for held in dealt.indices} == {3}
    for label in range(10):
        counts = [np.sum(labels[held] == label) for held in dealt.indices]
        holders = [count for count in counts if count]
        assert max(holders) - min(holders) <= 1


def test_label_skew_groups_are_distinct_label_sets():
    labels = balanced(each=100)
    dealt = PARTITIONS["label-skew"](labels, 12, 5, fraction=0.2, groups=4)
    assert dealt.groups == (0, 1, 2, 3) * 3
    sets: dict[int, set[tuple[int, ...]]] = {}
    for group, held in zip(dealt.groups, dealt.indices, strict=True):
        sets.setdefault(group, set()).add(tuple(np.unique(labels[held])))
    assert all(len(found) == 1 for found in sets.values())
    assert len(set.union(*sets.values())) == 4


def test_label_skew_can_use_every_possible_set():
    labels = balanced(4, 30)
    dealt = PARTITIONS["label-skew"](labels, 6, 0, fraction=0.5, groups=6)
    assert len({tuple(np.unique(labels[held])) for held in dealt.indices}) == 6


@few_examples
@given(seed=seeds, clients=st.integers(1, 30), per_client=st.integers(1, 4))
def test_shards_bound_the_classes_of_a_client(seed, clients, per_client):
    labels = np.random.default_rng(seed).permutation(balanced(each=60))
    dealt = PARTITIONS["shards"](labels, clients, seed, per_client=per_client)
    shard = len(labels) / (clients * per_client)
    # a shard of s samples of classes of 60 touches at most this many
    touched = int(np.ceil((np.ceil(shard) - 1) / 60)) + 1
    assert all(len(np.unique(labels[held])) <= per_client * touched for held in dealt.indices)


@few_examples
@given(
    seed=seeds,
    clients=st.integers(1, 40),
    balanced_classes=st.booleans(),
    classes=st.integers(3, 12),
)
def test_primary_secondary_shares(seed, clients, balanced_classes, classes):
    labels = balanced(classes, 600)
    dealt = PARTITIONS["primary-secondary"](labels, clients, seed, balanced=balanced_classes)
    assert_disjoint_and_sorted(dealt.indices, len(labels))
    (size,) = {len(held) for held in dealt.indices}
    for held in dealt.indices:
        counts = np.sort(np.bincount(labels[held], minlength=classes))[::-1]
        assert 0.4 * size <= counts[0] <= 0.6 * size
        if counts[1] < counts[0]:
            assert 0.2 * size <= counts[1] <= 0.4 * size
        rest = counts[2:]
        assert rest.max() - rest.min() <= 1


def test_primary_secondary_shares_are_uniform_in_their_ranges():
    labels = balanced(each=2000)
    dealt = PARTITIONS["primary-secondary"](labels, 80, 0, size=100, balanced=True)
    shares = np.array([np.sort(np.bincount(labels[held]))[::-1][:2] for held in dealt.indices])
    assert shares.mean(axis=0) == pytest.approx([50, 30], abs=2.5)
    assert shares.std(axis=0) == pytest.approx(20 / np.sqrt(12), rel=0.25)


def test_primary_secondary_balanced_uses_more_data():
    labels = balanced(each=500)
    free, even = (
        len(PARTITIONS["primary-secondary"](labels, 50, 0, balanced=b).indices[0]) for b in (0, 1)
    )
    assert even > free
    assert even > 85


def test_primary_secondary_size_is_kept_or_refused():
    labels = balanced(each=500)
    dealt = PARTITIONS["primary-secondary"](labels, 10, 0, size=40)
    assert {len(held) for held in dealt.indices} == {40}
    with pytest.raises(DataError, match=r"10 clients of 501 samples each, but the classes permit"):
        PARTITIONS["primary-secondary"](labels, 10, 0, size=501)


def test_quantity_power_law_has_its_sizes():
    dealt = PARTITIONS["quantity"](np.zeros(1100, int), 3, 0, law="power", exponent=1)
    assert sorted(len(held) for held in dealt.indices) == [200, 300, 600]


def test_column_makes_a_client_of_each_value():
    by = np.array(["b", "a", "c", "a", "b"])
    dealt = PARTITIONS["column"](np.zeros(5), None, 0, by=by)
    assert dealt.names == ("a", "b", "c")
    assert [held.tolist() for held in dealt.indices] == [[1, 3], [0, 4], [2]]


@pytest.mark.parametrize("name", ["iid", "quantity"])
def test_regression_targets_can_be_dealt(name):
    dealt = PARTITIONS[name](np.linspace(0, 1, 50).astype(np.float32), 3, 0)
    assert sum(len(held) for held in dealt.indices) == 50


@pytest.mark.parametrize(
    ("name", "clients", "params", "message"),
    [
        ("iid", 1001, {}, "1001 clients .* need 1001 samples, but there are only 1000"),
        ("iid", 0, {}, "clients = 0"),
        ("iid", 2.5, {}, "clients = 2.5"),
        ("iid", None, {}, "needs the number of clients"),
        ("dirichlet", 101, {}, "101 clients with at least 10 samples each need 1010 samples"),
        ("dirichlet", 5, {"alpha": 0}, "alpha = 0"),
        ("dirichlet", 5, {"alpha": "high"}, "alpha = high"),
        ("quantity", 5, {"law": "zipf"}, "law = 'zipf'"),
        ("quantity", 5, {"min_samples": 201}, "201 samples each need 1005"),
        ("shards", 501, {}, "need 1002 samples"),
        ("shards", 5, {"per_client": 0}, "per_client = 0"),
        ("label-skew", 5, {"fraction": 0}, "fraction = 0"),
        ("label-skew", 3, {"groups": 4}, "at least 4 clients, but there are 3"),
        ("label-skew", 50, {"groups": 46}, "only 45 different sets of 2 of the 10 labels"),
        ("primary-secondary", 400, {}, "400 clients of at least 4 samples"),
        ("column", 3, {"by": np.arange(1000) % 2}, "2 different values, but clients = 3"),
        ("column", None, {"by": np.zeros(5)}, "there are 1000 samples"),
    ],
)
def test_impossible_partitions_say_why(name, clients, params, message):
    with pytest.raises((DataError, ConfigError), match=message):
        PARTITIONS[name](balanced(), clients, 0, **params)


def test_primary_secondary_needs_three_classes():
    with pytest.raises(DataError, match="at least 3 classes, the data has 2"):
        PARTITIONS["primary-secondary"](balanced(2), 4, 0)


@pytest.mark.parametrize("name", ["dirichlet", "label-skew", "shards", "primary-secondary"])
def test_class_partitions_refuse_regression(name):
    with pytest.raises(DataError, match="regression data set"):
        PARTITIONS[name](np.linspace(0, 1, 500), 3, 0)


def test_label_skew_groups_among_very_many_possible_sets():
    labels = balanced(100, 40)
    dealt = PARTITIONS["label-skew"](labels, 20, 0, fraction=0.2, groups=20)
    assert len({tuple(np.unique(labels[held])) for held in dealt.indices}) == 20
