"""Differences over seeds: against SciPy, and what is claimed where nothing differs."""

import numpy as np
import pytest
from scipy import stats

from coterie.results.differences import (
    BETTER,
    EQUAL,
    OPEN,
    UNTESTED,
    WORSE,
    adjusted,
    differences,
    p_value,
    seeds_needed,
)
from coterie.results.seeds import best_of, compared


def seeds(*values):
    return dict(enumerate(values))


def made_up(methods, count, seed, apart=0.0):
    """Scores of methods whose noise differs, with seeds that are hard for all."""
    random = np.random.default_rng(seed)
    hard = random.normal(0.8, 0.03, count)
    noise = random.normal(0, 0.01, (methods, count)) * random.uniform(0.3, 3, (methods, 1))
    rows = hard + noise + apart * np.arange(methods)[:, None]
    return {f"m{i}": seeds(*row) for i, row in enumerate(rows.tolist())}


def test_the_paired_test_is_scipys():
    scores = made_up(2, 7, 1)
    one, two = (list(own.values()) for own in scores.values())
    assert p_value(one, two) == pytest.approx(stats.ttest_rel(one, two).pvalue, rel=1e-9)
    assert p_value(one, one) == 1
    # The same difference in every seed, up to rounding: no doubt, and no division by zero.
    assert p_value([v - 0.1 for v in one], one) == 0
    assert p_value([0.1 + 0.2] * 5, [0.3] * 5) == 1


def test_holm_steps_down_and_never_back():
    # Times 4, 3, 2, 1; the last would be 0.045 alone, but no p is below the one before.
    found = adjusted({"a": 0.012, "b": 0.0166, "c": 0.026, "d": 0.045})
    assert found == pytest.approx({"a": 0.048, "b": 0.0498, "c": 0.052, "d": 0.052})
    assert adjusted({"d": 0.045, "e": 0.9}) == {"d": 0.09, "e": 0.9}
    assert adjusted({}) == {}


def test_all_pairs_count_and_intervals_are_scipys():
    """Of four methods there are six pairs: by hand with SciPy's tests and intervals."""
    scores = made_up(4, 6, 3, apart=0.03)
    found = differences("m3", scores)
    every = [(a, b) for a in scores for b in scores if a < b]
    raw = {(a, b): stats.ttest_rel(*(list(scores[n].values()) for n in (a, b))) for a, b in every}
    rank = {pair: i for i, pair in enumerate(sorted(raw, key=lambda p: raw[p].pvalue))}
    for name in ("m0", "m1", "m2"):
        test = raw[name, "m3"]
        # Holm's adjusted p is the largest of the steps until then.
        steps = [raw[p].pvalue * (6 - rank[p]) for p in raw if rank[p] <= rank[name, "m3"]]
        assert found[name].p == pytest.approx(min(1.0, max(steps)), rel=1e-9)
        low, high = test.confidence_interval(1 - 0.05 / 6)
        if found[name].verdict == OPEN:
            assert (found[name].low, found[name].high) == pytest.approx((low, high), rel=1e-9)
        else:
            assert found[name].low == pytest.approx(low, rel=1e-9)
            assert found[name].high == pytest.approx(min(high, 0.0), rel=1e-9)
    assert {found[n].verdict for n in found} == {OPEN, WORSE}


@pytest.mark.parametrize("methods", [2, 6, 20])
def test_equal_methods_are_hardly_ever_told_apart(methods):
    """Any claim among equal methods, with the best chosen from the same five seeds: at most 6 %."""
    claimed = 0
    for draw in range(2000):
        scores = made_up(methods, 5, 10_000 * methods + draw)
        (best,) = best_of(scores)
        verdicts = {each.verdict for each in differences(best, scores, margin=0.0).values()}
        claimed += bool(verdicts & {BETTER, WORSE})
    assert claimed <= 0.06 * 2000


def test_intervals_hold_together():
    """In at least 94 % of draws all intervals to the chosen best hold the true difference, 0."""
    held = 0
    for draw in range(1000):
        scores = made_up(6, 5, draw)
        (best,) = best_of(scores)
        found = differences(best, scores, margin=0.0).values()
        held += all(each.low <= 0 <= each.high for each in found)
    assert held >= 0.94 * 1000


def test_equal_only_if_the_interval_lies_within_the_margin():
    base = made_up(1, 5, 0)["m0"]
    gaps = [0.001, -0.001, 0.0005, -0.0005, 0.0]
    near = {s: v + gap for (s, v), gap in zip(base.items(), gaps, strict=True)}
    wide = {s: v + 20 * gap for (s, v), gap in zip(base.items(), gaps, strict=True)}
    found = differences("base", {"base": base, "near": near, "wide": wide})
    assert (found["near"].verdict, found["wide"].verdict) == (EQUAL, OPEN)
    half = found["near"].high
    inside = {"base": base, "near": near, "wide": wide}
    assert differences("base", inside, 1.01 * half)["near"].verdict == EQUAL
    assert differences("base", inside, 0.99 * half)["near"].verdict == OPEN
    # A difference that is sure and small is equal as well, and not with a smaller margin.
    little = {"a": base, "b": {s: v + 0.002 for s, v in base.items()}}
    assert differences("a", little)["b"].verdict == EQUAL
    assert differences("a", little, 0.001)["b"].verdict == BETTER


def test_few_seeds_tell_nothing_but_how_many_would():
    few = {"a": seeds(0.9, 0.92, 0.88, 0.9), "b": seeds(0.1, 0.12, 0.1, 0.12)}
    found = differences("a", few)["b"]
    assert (found.verdict, found.low, found.p) == (UNTESTED, None, None)
    assert found.mean == pytest.approx(-0.79)
    assert found.needed == 5
    assert differences("a", {"a": {0: 0.9}, "b": {0: 0.1}})["b"].needed is None


@pytest.mark.parametrize(("mean", "deviation", "pairs"), [(0.02, 0.02, 1), (0.03, 0.02, 15)])
def test_the_seeds_that_are_needed_have_the_power(mean, deviation, pairs):
    """With them, a test at 5 % over the pairs finds the difference in about 80 % of cases."""
    level = 0.05 / pairs

    def power(count):
        shift = mean / deviation * count**0.5
        limit = stats.t.ppf(1 - level / 2, count - 1)
        return stats.nct.sf(limit, count - 1, shift)

    count = seeds_needed(mean, deviation, pairs, margin=0.0)
    assert 0.78 < power(count) < 0.92
    assert power(count - 2) < 0.8


def test_small_differences_need_many_seeds_or_an_interval_within_the_margin():
    assert seeds_needed(0.0, 0.02, 1, margin=0.005) > 100
    assert seeds_needed(0.0, 0.001, 1, margin=0.005) == 5
    assert seeds_needed(0.0, 0.02, 1, margin=0.0) is None
    assert seeds_needed(0.0001, 0.5, 1, margin=0.0) is None
    assert seeds_needed(0.01, 0.0) == 5


# --- marks ----------------------------------------------------------------------------------------


def test_marks_of_five_seeds():
    best = seeds(0.90, 0.80, 0.85, 0.70, 0.95)
    scores = {
        "best": best,
        "near": seeds(0.91, 0.78, 0.86, 0.68, 0.95),  # sometimes better
        "always": {s: v - 0.01 for s, v in best.items()},  # a little worse, each time
        "bad": seeds(0.5, 0.4, 0.45, 0.35, 0.5),
        "short": {s: v - 0.2 for s, v in best.items() if s < 4},  # one failed: too few
        "never": {},
    }
    marks, found = compared(scores)
    assert marks == {
        "best": "highest",  # "near" may be as good
        "near": "open",
        "always": "worse",
        "bad": "worse",
        "short": "untested",
        "never": "",
    }
    assert set(found) == {"near", "always", "bad", "short"}
    proven = {name: scores[name] for name in ("best", "always", "bad")}
    assert compared(proven)[0] == {"best": "best", "always": "worse", "bad": "worse"}
    same = {"best": best, "same": dict(best), "bad": scores["bad"]}
    assert compared(same)[0] == {"best": "best", "same": "best", "bad": "worse"}
    # Who has nobody to be better than is not the best.
    assert compared({"best": best})[0] == {"best": "highest"}


def test_reference_lines_are_compared_but_never_the_best():
    usable = seeds(0.90, 0.80, 0.85, 0.70, 0.95)
    ceiling = {s: v + 0.02 for s, v in usable.items()}
    alone = {s: v - 0.1 for s, v in usable.items()}
    scores = {"oracle": ceiling, "ifca": usable, "local": alone}
    marks, found = compared(scores, references=("oracle", "local"))
    assert marks == {"oracle": "better", "ifca": "highest", "local": "worse"}
    assert found["oracle"].mean == pytest.approx(0.02)
    assert compared({"local": alone}, references=("local",)) == ({"local": ""}, {})


def test_marks_are_corrected_for_all_pairs():
    best = seeds(0.9, 0.9, 0.9, 0.9, 0.9)
    doubtful = seeds(0.86, 0.88, 0.89, 0.86, 0.89)
    alone = p_value(list(doubtful.values()), list(best.values()))
    assert 0.05 / 3 < alone < 0.05 / 2  # significant of two comparisons, not of three pairs
    assert compared({"best": best, "doubtful": doubtful})[0]["doubtful"] == "worse"
    more = {"x": seeds(0.8, 1, 0.9, 0.85, 0.9)}
    assert compared({"best": best, "doubtful": doubtful, **more})[0]["doubtful"] == "open"


def test_below_five_seeds_only_the_highest_is_marked():
    few = {"a": seeds(0.9, 0.9, 0.9, 0.9), "b": seeds(0.1, 0.1, 0.1, 0.1)}
    assert compared(few)[0] == {"a": "highest", "b": ""}


def test_who_does_better_on_common_seeds_is_not_worse():
    # "lucky" lacks the hard seed, and so has the best mean; on the others it is beaten.
    others = dict.fromkeys(range(5), 0.8)
    lucky = dict(others)
    steady = dict.fromkeys(range(5), 0.81) | {5: 0.0}
    assert compared({"lucky": lucky, "steady": steady})[0] == {"lucky": "worse", "steady": "best"}
    few = {"lucky": {0: 0.8, 1: 0.8}, "steady": {0: 0.81, 1: 0.81, 2: 0.0}}
    assert best_of(few) == {"steady"}
    # One seed in common is none to choose by: then each is judged by all that it has.
    assert best_of({"a": {0: 0.8, 1: 0.2}, "b": {0: 0.7}}) == {"b"}


def test_what_differs_by_rounding_is_as_good():
    scores = {"a": {0: 0.1 + 0.2}, "b": {0: 0.3}}
    assert scores["a"] != scores["b"]
    assert best_of(scores) == {"a", "b"}
