"""Evidence about groups from two halves of every client, against numbers by hand and laws."""

import json
import math
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.clustering import canonical, evidence, find_evidence, find_evidence_in_products
from coterie.clustering.evidence import NO_SIGNAL, ONE_GROUP, TOO_FEW, cohen_kappa
from coterie.errors import ConfigError, TrainingError

# Four clients on a line. One mean of the first halves, 7, and one of the second, 6.5. In two groups
# the means are 1 and 13, and 1 and 12; in three 1, 10, 16 and 1, 14, 10.
FIRST = np.array([[0.0], [2.0], [10.0], [16.0]])
SECOND = np.array([[2.0], [0.0], [14.0], [10.0]])
# Each client's error: half the squares of its second half about the first halves' mean, and the
# other way round.
RESIDUALS = {
    1: [(25 + 42.25) / 2, (49 + 20.25) / 2, (49 + 12.25) / 2, (9 + 90.25) / 2],
    2: [(1 + 1) / 2, (1 + 1) / 2, (1 + 4) / 2, (9 + 16) / 2],
    3: [1, 1, (16 + 16) / 2, (36 + 36) / 2],
    4: [4, 4, 16, 36],
}


def rng(seed=0):
    return np.random.default_rng(seed)


def planted(seed, sizes=(5, 4, 3), width=6, noise=0.3, apart=1.0):
    """Both halves of clients whose groups have different means, and the groups."""
    random = rng(seed)
    truth = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    means = apart * random.normal(size=(len(sizes), width))[truth]
    return *(means + noise * random.normal(size=(2, *means.shape))), canonical(truth)


def ones(rows):
    return np.ones(len(rows))


def same(one, two, order=None):
    """Whether two pieces of evidence are equal beyond rounding, the second in another order."""
    order = np.arange(len(one.labels)) if order is None else order
    assert two.labels.tolist() == canonical(one.labels[order]).tolist()
    np.testing.assert_allclose(two.certainty, one.certainty[order], atol=1e-6)
    for name in ("errors", "deviations", "kappa"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9)
    assert (two.why, two.enough) == (one.why, one.enough)


# --- by hand --------------------------------------------------------------------------------------


def test_held_out_errors_by_hand():
    result = find_evidence(FIRST, SECOND, ones(FIRST))
    assert result.errors == pytest.approx({1: 37.125, 2: 4.25, 3: 13.5, 4: 15})
    assert result.errors == pytest.approx({k: sum(r) / 4 for k, r in RESIDUALS.items()})
    assert result.labels.tolist() == [0, 0, 1, 1]
    assert result.groups == 2
    assert result.explained == pytest.approx(1 - 4.25 / 37.125)


def test_standard_errors_by_hand():
    # Of the differences from two groups, client by client: their deviation over √4. For one group
    # 32.625, 33.625, 28.125, 37.125; their squares about 32.875 add up to 41.25: √(41.25/3/4).
    result = find_evidence(FIRST, SECOND, ones(FIRST))
    assert result.deviations[1] == pytest.approx(math.sqrt(41.25 / 12))
    for k, row in RESIDUALS.items():
        gaps = np.array(row) - RESIDUALS[2]
        assert result.deviations[k] == pytest.approx(gaps.std(ddof=1) / 2, abs=1e-12)
    assert result.plausible == [2]
    assert result.decisive


def test_kappa_by_hand():
    # Three groups: 14 is nearest to 16 and 10 to 10, so the last two change places both ways. Half
    # agree, by chance 1/4 + 1/16 + 1/16: (0.5 − 0.375)/0.625. Four groups: nobody is where it was,
    # by chance a quarter would: −0.25/0.75.
    result = find_evidence(FIRST, SECOND, ones(FIRST))
    assert result.kappa == pytest.approx({2: 1.0, 3: 0.2, 4: -1 / 3})
    assert cohen_kappa([0, 0, 0], [0, 0, 0]) == 1.0


def test_certainty_by_hand():
    # The means of both halves, 1, 1, 12 and 13, have centres 1 and 12.5. How much nearer each half
    # is to its own: 0 is 1 from 1 and 12.5 from the other, squared 1 and 156.25.
    result = find_evidence(FIRST, SECOND, ones(FIRST))
    wanted = [
        1 - (1 / 12.5**2 + 1 / 10.5**2) / 2,
        1 - (1 / 10.5**2 + 1 / 12.5**2) / 2,
        1 - (2.5**2 / 9**2 + 1.5**2 / 13**2) / 2,
        1 - (3.5**2 / 15**2 + 2.5**2 / 9**2) / 2,
    ]
    np.testing.assert_allclose(result.certainty, wanted)
    assert result.between == []


def test_a_client_whose_halves_fall_into_different_groups_sits_between_them():
    near = [0.0, 0.1, 0.2, 0.3]
    first = np.array([*near, *(10 + x for x in near), 0.0])[:, None]
    second = np.array([*near[::-1], *(10 + x for x in near), 10.2])[:, None]
    result = find_evidence(first, second, ones(first))
    assert result.groups == 2
    assert result.between == [8]
    assert result.certainty[:8].min() > 0.8


def test_clients_count_by_their_samples_by_hand():
    # Weights 3, 1, 1, 1 on a line: one mean of the first halves is (0 + 2 + 10 + 16)/6 = 28/6, of
    # the second (6 + 0 + 14 + 10)/6 = 5.
    result = find_evidence(FIRST, SECOND, [3, 1, 1, 1])
    share = np.array([3, 1, 1, 1]) / 6
    one = ((SECOND - 28 / 6) ** 2 + (FIRST - 5) ** 2).ravel() / 2
    assert result.errors[1] == pytest.approx(share @ one)
    # Two groups: centres (3·0 + 2)/4 = 0.5 and 13, and (3·2 + 0)/4 = 1.5 and 12.
    two = [(1.5**2 + 1.5**2) / 2, (0.5**2 + 0.5**2) / 2, 2.5, 12.5]
    assert result.errors[2] == pytest.approx(share @ two)
    gaps = one - two
    gaps = gaps - share @ gaps
    assert result.deviations[1] == pytest.approx(
        math.sqrt((share**2 * gaps**2).sum() / (1 - (share**2).sum()))
    )


def test_the_fewest_groups_within_one_standard_error_are_chosen():
    kinds = set()
    for seed in range(20):
        first, second, _ = planted(seed, noise=0.7)
        result = find_evidence(first, second, ones(first), most=8)
        lowest = min(result.errors, key=result.errors.get)
        allowed = {k: result.errors[lowest] + result.deviations[k] for k in result.errors}
        assert result.groups == min(k for k in allowed if result.errors[k] <= allowed[k])
        assert ("no better by more than one standard error" in result.why) == (
            1 < result.groups != lowest
        )
        kinds.add((result.groups == 1, result.groups == lowest))
    assert {(False, True), (False, False)} <= kinds  # so the test can tell


def test_what_is_shown_is_plain_json():
    notes = find_evidence(FIRST, SECOND, ones(FIRST)).to_notes()
    assert json.loads(json.dumps(notes)) == notes
    assert notes["errors"] == {"1": 37.125, "2": 4.25, "3": 13.5, "4": 15.0}
    assert notes["kappa"] == {"2": 1.0, "3": 0.2, "4": -0.3333}
    assert notes["groups"] == 2
    assert "2 groups predict the clients' other halves with 11% of one mean's error" in notes["why"]


# --- laws -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    arrays(np.float64, (2, 5, 2), elements=st.integers(-3, 3).map(float)),
    st.permutations(range(5)),
    st.lists(st.integers(1, 3), min_size=5, max_size=5),
    st.booleans(),
)
def test_the_order_of_clients_changes_nothing_even_with_ties(halves, order, counts, directions):
    order, counts = np.array(order), np.array(counts)
    one = find_evidence(*halves, counts, directions=directions)
    two = find_evidence(*halves[:, order], counts[order], directions=directions)
    same(one, two, order)


@pytest.mark.parametrize("width", [3, 500])
def test_the_order_of_clients_changes_nothing(width):
    for seed in range(5):
        first, second, _ = planted(seed, width=width, noise=1.0)
        counts, order = rng(seed).integers(1, 50, len(first)), rng(seed + 1).permutation(len(first))
        one = find_evidence(first, second, counts)
        two = find_evidence(first[order], second[order], counts[order])
        same(one, two, order)
        # The tree's leaves are numbered as the clients are.
        for k in (2, 3, 5):
            cut = canonical(one.tree.cut_count(k)[order])
            assert two.tree.cut_count(k).tolist() == cut.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_everybody_twice_changes_no_error_and_no_planted_group(seed):
    first, second, truth = planted(seed)
    one = find_evidence(first, second, ones(first))
    twice = np.concatenate([first, first]), np.concatenate([second, second])
    two = find_evidence(*twice, np.ones(2 * len(first)))
    for k, error in one.errors.items():
        assert two.errors[k] == pytest.approx(error, rel=1e-9)
    assert one.labels.tolist() == truth.tolist()
    assert two.labels.tolist() == [*truth, *truth]


def test_a_client_of_two_samples_is_the_same_client_twice():
    first, second, _ = planted(3, noise=1.0)
    counts = rng(3).integers(1, 4, len(first))
    often = np.repeat(np.arange(len(first)), counts)
    one = find_evidence(first, second, counts)
    many = find_evidence(first[often], second[often], np.ones(len(often)))
    for k, error in one.errors.items():
        assert many.errors[k] == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_equal_halves_are_reproduced_for_every_number_of_groups(seed):
    first, _, _ = planted(seed, noise=1.0)
    result = find_evidence(first, first, ones(first))
    assert result.kappa == dict.fromkeys(range(2, len(first) + 1), 1.0)
    assert result.errors[len(first)] == pytest.approx(0, abs=1e-12)


def test_planted_groups_are_found_and_shuffled_halves_are_one_group(monkeypatch):
    """In 100 draws; where the second halves are exchanged among clients, nothing is left."""
    monkeypatch.setattr(evidence, "cohen_kappa", lambda *_: 0.0)  # it decides nothing, and is slow
    right, alone = 0, 0
    for seed in range(100):
        first, second, truth = planted(seed, noise=0.4, apart=1.5)
        result = find_evidence(first, second, ones(first), most=6)
        right += result.labels.tolist() == truth.tolist()
        other = rng(1000 + seed).permutation(len(first))
        alone += find_evidence(first, second[other], ones(first), most=6).groups == 1
    assert right >= 95  # so that the shuffling means something
    assert alone >= 95


@pytest.mark.parametrize("width", [4, 300])
def test_lengths_do_not_matter_to_directions(width):
    first, second, truth = planted(1, width=width, apart=3.0)
    far = rng(1).uniform(0.01, 100, size=(2, len(first), 1))
    plain = find_evidence(first, second, ones(first), directions=True)
    scaled = find_evidence(first * far[0], second * far[1], ones(first), directions=True)
    same(plain, scaled)
    assert plain.labels.tolist() == truth.tolist()
    # And they do where lengths count.
    loose = find_evidence(first * far[0], second * far[1], ones(first))
    assert loose.errors != pytest.approx(plain.errors)


@pytest.mark.parametrize("width", [6, 100])
@pytest.mark.parametrize("seed", range(3))
def test_inner_products_say_the_same_as_rows(seed, width):
    """Up to the planted number: groups that are not there depend on where k-means begins."""
    first, second, truth = planted(seed, width=width)
    counts, stacked = rng(seed).integers(1, 9, len(first)), np.concatenate([first, second])
    one = find_evidence(first, second, counts, most=3)
    same(one, find_evidence_in_products(stacked @ stacked.T, counts, most=3))
    assert one.labels.tolist() == truth.tolist()


def test_a_wide_table_says_the_same_as_a_narrow_one():
    """A rotation into more dimensions changes no distance."""
    first, second, _ = planted(2)
    turn = np.linalg.qr(rng(0).normal(size=(90, 90)))[0][:6]
    one = find_evidence(first, second, ones(first), most=3)
    same(one, find_evidence(first @ turn, second @ turn, ones(first), most=3))


# --- the edges ------------------------------------------------------------------------------------


def test_one_two_and_three_clients():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = find_evidence([[1.0, 2.0]], [[1.0, 2.0]], [7])
        assert (alone.groups, alone.enough, alone.why) == (1, False, TOO_FEW)
        assert alone.certainty.tolist() == [1.0]
        # 0 and 10 with halves 1 apart: two groups have 1/2·(1 + 1), one mean about 25.
        two = find_evidence([[0.0], [10.0]], [[1.0], [9.0]], [1, 1])
        assert two.labels.tolist() == [0, 1]
        assert two.errors == pytest.approx({1: (16 + 25) / 2, 2: 1.0})
        # Halves that say the opposite of each other.
        two = find_evidence([[0.0], [10.0]], [[10.0], [0.0]], [1, 1])
        assert two.errors == pytest.approx({1: 25.0, 2: 100.0})
        assert two.labels.tolist() == [0, 0]
        three = find_evidence([[0.0], [10.0], [0.5]], [[0.2], [9.0], [0.0]], [1, 1, 1])
        assert three.labels.tolist() == [0, 1, 0]


def test_equal_clients_are_one_group_and_zeros_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for directions in (False, True):
            alike = find_evidence(*np.ones((2, 5, 3)), np.ones(5), directions=directions)
            assert (alike.groups, alike.enough, alike.why) == (1, True, ONE_GROUP)
            assert alike.certainty.tolist() == [1.0] * 5
            nothing = find_evidence(*np.zeros((2, 5, 3)), np.ones(5), directions=directions)
            assert (nothing.groups, nothing.enough, nothing.why) == (1, False, NO_SIGNAL)


@pytest.mark.parametrize("width", [3, 60])
def test_a_row_of_zeros_has_no_direction_and_does_no_harm(width):
    first, second, truth = planted(1, width=width, apart=3.0)
    first[2] = second[2] = 0.0
    result = find_evidence(first, second, ones(first), directions=True)
    assert np.isfinite(list(result.errors.values())).all()
    others = np.delete(np.arange(len(first)), 2)
    pairs = {(truth[i], result.labels[i]) for i in others}
    assert len(pairs) == 3


def test_halves_that_have_nothing_in_common_are_too_little():
    first, second = rng(0).normal(size=(2, 10, 200))
    result = find_evidence(first, second, np.ones(10))
    assert (result.groups, result.enough, result.why) == (1, False, NO_SIGNAL)
    one = find_evidence(first + 3, second + 3, np.ones(10))
    assert (one.groups, one.enough, one.why) == (1, True, ONE_GROUP)


def test_ten_thousand_clients():
    began = time.perf_counter()
    first, second, truth = planted(0, sizes=(5000, 3000, 1500, 500), width=8, noise=0.1)
    result = find_evidence(first, second, np.ones(10_000), directions=True)
    assert time.perf_counter() - began < 10
    assert result.labels.tolist() == truth.tolist()
    assert result.certainty.min() > 0
    assert result.tree is None


def test_what_cannot_be_compared_is_refused_in_a_sentence():
    for wrong in (math.nan, math.inf):
        rows = FIRST.copy()
        rows[1] = wrong
        for pair in ((rows, SECOND), (SECOND, rows)):
            with pytest.raises(TrainingError, match="finite"):
                find_evidence(*pair, ones(FIRST))
    with pytest.raises(TrainingError, match="finite"):
        find_evidence_in_products(np.full((4, 4), np.nan), [1, 1])
    with pytest.raises(ConfigError, match=r"3 first halves .* 4 second"):
        find_evidence(FIRST[:3], SECOND, [1, 1, 1])
    for counts in ([1, 1, 1], [1, 1, 1, 0], [1, 1, 1, -2], [1, 1, 1, math.nan]):
        with pytest.raises(ConfigError, match="positive number of samples"):
            find_evidence(FIRST, SECOND, counts)
    with pytest.raises(ConfigError, match="square"):
        find_evidence_in_products(np.ones((3, 4)), [1])


def test_kappa_is_scikit_learns():
    from sklearn.metrics import cohen_kappa_score

    random = np.random.default_rng(4)
    for groups in (2, 3, 7):
        one, two = random.integers(0, groups, (2, 30))
        two[:12] = one[:12]
        assert cohen_kappa(one, two) == pytest.approx(cohen_kappa_score(one, two), abs=1e-12)
    assert cohen_kappa([0, 0], [0, 0]) == 1.0
