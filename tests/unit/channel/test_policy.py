"""Round policy: who is asked, whose reports count, how long it lasts."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.channel.availability import Trace
from coterie.channel.clocks import Seconds, make_clock
from coterie.channel.policy import (
    Accepted,
    Policy,
    accept,
    check,
    cohort_size,
    counts,
    ready,
    select,
    selecting,
)
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import numpy_generator, seed_for

CLOCK = make_clock("links", {}, 0, 10, 1)
LOST = Seconds(waiting=math.inf)


@dataclass(frozen=True)
class Shares:
    """Everybody but these is on, for these shares of the time."""

    shares: tuple[float, ...]
    off: frozenset[int] = frozenset()

    def on(self, client, time):
        return client not in self.off

    def until(self, client, time):
        return math.inf if self.on(client, time) else time

    def share(self, client):
        return self.shares[client]

    def next_change(self, time):
        return math.inf


# --- who is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [1.0, 0.3, 7, 1])
def test_plain_rounds_draw_as_they_always_did(asked):
    members = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    for seed in range(3):
        for round in range(20):
            generator = numpy_generator(seed_for(seed, "cohort", round))
            count = cohort_size(asked, len(members))
            drawn = generator.choice(len(members), count, replace=False)
            expected = sorted(members[i] for i in drawn)
            assert select(Policy(cohort=asked), seed, round, members) == expected


@pytest.mark.parametrize("asked", [0.01, 11, 0, 2.5e9])
def test_impossible_cohorts_are_refused(asked):
    with pytest.raises(ConfigError, match=r"run\.cohort = .* set it to a number from 1 to 10"):
        cohort_size(asked, 10)


@pytest.mark.parametrize(
    ("asked", "over", "count"),
    [(10, 1.0, 10), (50, 1.1, 55), (10, 1.3, 13), (10, 1.31, 14), (0.07, 1.5, 11), (3, 1.01, 4)],
)
def test_over_selection_rounds_up_exactly(asked, over, count):
    policy = Policy(cohort=asked, over_selection=over)
    assert counts(policy, 100).orders == count
    drawn = select(policy, 0, 0, range(100))
    assert len(set(drawn)) == len(drawn) == count
    assert drawn == sorted(drawn)


def test_only_those_who_are_on_are_asked():
    trace = Trace(((0, 10), (0, 20), (5, 20), (0, 20)))
    policy = Policy(cohort=2)
    drawn = {tuple(select(policy, 0, r, range(4), trace, 0.0)) for r in range(50)}
    assert drawn == {(0, 1), (0, 3), (1, 3)}
    drawn = {tuple(select(policy, 0, r, range(4), trace, 12.0)) for r in range(50)}
    assert drawn == {(1, 2), (1, 3), (2, 3)}
    assert select(Policy(cohort=3), 0, 0, [0, 2, 3], trace, 2.0) == [0, 3]  # as many as there are
    for weighted in (False, True):
        assert select(Policy(cohort=2, weighted=weighted), 0, 0, range(4), trace, 20.0) == []


def test_a_cohort_is_of_all_members_whoever_is_present():
    assert select(Policy(cohort=3), 0, 1, range(4), present={0, 2}) == [0, 2]
    assert select(Policy(cohort=3), 0, 1, range(4), present=set()) == []
    coins = Policy(cohort=2, sampling="poisson")  # two of ten, on average: one of any five
    drawn = [select(coins, 0, round, range(10), present=range(5)) for round in range(2000)]
    assert 1800 < sum(map(len, drawn)) < 2200
    assert all(client < 5 for clients in drawn for client in clients)


def test_a_weighted_draw_is_in_proportion_to_the_time_on():
    shares = (0.1, 0.2, 0.4, 0.8, 0.5)
    there = Shares(shares, off=frozenset({4}))
    n = 3000
    counts = dict.fromkeys(range(5), 0)
    for round in range(n):
        (client,) = select(Policy(cohort=1, weighted=True), 0, round, range(5), there)
        counts[client] += 1
    for client in range(4):
        p = shares[client] / 1.5
        assert abs(counts[client] / n - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert counts[4] == 0
    plain = [select(Policy(cohort=1), 0, r, range(5), there)[0] for r in range(n)]
    for client in range(4):
        assert abs(plain.count(client) / n - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)


def test_a_round_starts_when_enough_are_on():
    trace = Trace(((10, 30), (0, 15), (20, 30), (12, 14)))
    members = range(4)

    def start(reports, time, asked=4):
        return ready(Policy(cohort=asked, min_reports=reports), members, trace, time)

    assert start(1, 0.0) == 0
    assert start(2, 0.0) == 10
    assert start(3, 0.0) == 12
    assert start(0.5, 13.0) == 13  # half of the cohort of four
    assert start(2, 15.0) == 20
    assert start(1.0, 0.0, asked=2) == 10
    assert ready(Policy(min_reports=4), members, None, 7.0) == 7
    for reports, time in [(4, 0.0), (3, 14.0), (1, 30.0)]:
        with pytest.raises(TrainingError, match=f"fewer than {reports} of 4 clients are on"):
            start(reports, time)


def test_nobody_waits_longer_than_thirty_days():
    day = 86_400.0
    assert ready(Policy(), [0], Trace(((30 * day, 31 * day),)), 0.0) == 30 * day
    with pytest.raises(TrainingError, match="30 days after second 0"):
        ready(Policy(), [0], Trace(((30 * day + 1, 31 * day),)), 0.0)


def test_selection_hides_behind_the_round_before():
    policy = Policy(selection=4.0)
    assert [selecting(policy, b) for b in (None, 0.0, 1.5, 4.0, 9.0)] == [4.0, 4.0, 2.5, 0.0, 0.0]


# --- whose reports count -------------------------------------------------------------------------

THREE = {4: Seconds(3.0, 2.0), 1: Seconds(1.0, 2.0), 7: Seconds(1.0, 1.0, 1.0)}  # 5, 3 and 3 s


@pytest.mark.parametrize(
    ("enough", "left", "gone", "expected"),
    [
        (None, None, None, Accepted((1, 7, 4), (), Seconds(3.0, 2.0))),
        (3, None, None, Accepted((1, 7, 4), (), Seconds(3.0, 2.0))),
        (9, 50.0, None, Accepted((1, 7, 4), (), Seconds(3.0, 2.0))),
        (2, None, None, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 1.0))),
        (1, None, None, Accepted((1,), (4, 7), Seconds(1.0, 2.0))),
        (1, 50.0, None, Accepted((1,), (4, 7), Seconds(1.0, 2.0))),
        (None, 5.0, None, Accepted((1, 7, 4), (), Seconds(3.0, 2.0))),
        (None, 4.5, None, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 2.5))),
        (3, 4.5, None, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 2.5))),
        (2, 4.5, None, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 1.0))),
        (None, 2.0, None, Accepted((), (1, 4, 7), Seconds(0.0, 0.0, 2.0))),
        (None, -1.0, None, Accepted((), (1, 4, 7), Seconds())),
        (None, None, {4: 4.0}, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 2.0))),
        (None, None, {4: 4.0, 1: 20.0}, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 2.0))),
        (None, None, {1: 1.0}, Accepted((7, 4), (1,), Seconds(3.0, 2.0))),
        (None, None, {4: 5.0, 7: 3.5}, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 3.0))),
        (None, None, {4: math.inf}, Accepted((1, 7, 4), (), Seconds(3.0, 2.0))),
        (2, None, {1: 3.0}, Accepted((7, 4), (1,), Seconds(3.0, 2.0))),
        (None, 9.0, {4: 4.0}, Accepted((1, 7), (4,), Seconds(1.0, 1.0, 7.0))),
        (None, None, {4: 0.0, 1: 1.0, 7: 2.0}, Accepted((), (1, 4, 7), Seconds(0.0, 0.0, 2.0))),
    ],
)
def test_hand_worked_exchanges(enough, left, gone, expected):
    assert accept(THREE, enough, left, gone) == expected
    assert accept(dict(reversed(THREE.items())), enough, left, gone) == expected


def test_a_lost_reply_is_waited_for_until_the_deadline_or_until_its_client_goes():
    finishes = {0: Seconds(1.0), 1: LOST}
    assert accept(finishes, None, None) == Accepted((0,), (1,), Seconds(1.0))
    assert accept(finishes, None, 5.0) == Accepted((0,), (1,), Seconds(1.0, 0.0, 4.0))
    assert accept(finishes, None, None, {1: 3.0}) == Accepted((0,), (1,), Seconds(1.0, 0.0, 2.0))
    assert accept(finishes, None, None, {1: math.inf}).lasted == Seconds(1.0)
    assert accept(finishes, 1, 5.0) == Accepted((0,), (1,), Seconds(1.0))


def test_an_exchange_with_nobody_takes_no_time():
    assert accept({}, None, 5.0) == Accepted((), (), Seconds())


whole = st.integers(0, 12).map(float)
finishing = st.dictionaries(st.integers(0, 15), st.builds(Seconds, whole, whole, whole))
maybe = st.none() | st.integers(0, 40).map(float)
going = st.none() | st.dictionaries(st.integers(0, 15), whole | st.just(math.inf))
wanted = st.none() | st.integers(1, 16)


@given(finishing, wanted, maybe, going)
def test_laws_of_acceptance(finishes, enough, left, gone):
    found = accept(finishes, enough, left, gone)
    assert sorted(found.reported + found.late) == sorted(finishes)  # each is one of the two
    assert enough is None or len(found.reported) <= enough
    places = [(finishes[c].total, c) for c in found.reported]
    assert all(a < b for a, b in pairwise(places))
    for client in found.reported:
        assert left is None or finishes[client].total <= left
        assert finishes[client].total < (gone or {}).get(client, math.inf)
        assert finishes[client].total <= found.lasted.total
    if left is not None:
        assert found.lasted.total <= left
    in_time = {
        c
        for c, s in finishes.items()
        if (left is None or s.total <= left) and s.total < (gone or {}).get(c, math.inf)
    }
    if enough is None or len(found.reported) < enough:
        assert set(found.reported) == in_time
    else:  # nobody who was in time was passed over for someone slower
        assert all((finishes[c].total, c) > places[-1] for c in in_time - set(found.reported))


@given(finishing, wanted, going, whole, whole)
def test_a_later_deadline_only_adds_reports(finishes, enough, gone, left, more):
    early = accept(finishes, enough, left, gone).reported
    assert accept(finishes, enough, left + more, gone).reported[: len(early)] == early
    assert accept(finishes, enough, None, gone).reported[: len(early)] == early


@given(finishing)
def test_without_deadline_or_over_selection_everybody_counts(finishes):
    found = accept(finishes, len(finishes) or None, None)
    assert set(found.reported) == set(finishes)
    assert found.late == ()
    assert found.lasted.total == max((s.total for s in finishes.values()), default=0.0)


# --- what is refused -----------------------------------------------------------------------------


def test_least_reports_by_number_and_by_share():
    assert [
        counts(Policy(cohort=10, min_reports=m), 100).least for m in (1, 7, 1.0, 0.7, 0.71, 3.0)
    ] == [
        *(1, 7, 10),
        *(7, 8, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cohort": 11}, r"run\.cohort = 11"),
        ({"over_selection": 0.9}, r"run\.over_selection = 0\.9: must be at least 1"),
        ({"over_selection": math.nan}, r"run\.over_selection = nan"),
        ({"over_selection": math.inf}, r"run\.over_selection = inf"),
        ({"cohort": 8, "over_selection": 1.3}, r"selects 11 of 10 clients for a cohort of 8"),
        ({"deadline": 0.0}, r"run\.deadline = 0\.0: must be greater than 0"),
        ({"deadline": math.nan}, r"run\.deadline = nan"),
        ({"real_deadline": -1.0}, r"run\.real_deadline = -1\.0: must be greater than 0"),
        ({"cohort": 5, "min_reports": 6}, r"run\.min_reports = 6 with a cohort of 5"),
        ({"min_reports": 0}, r"run\.min_reports = 0"),
        ({"min_reports": 0.0}, r"run\.min_reports = 0\.0"),
        ({"min_reports": 1.5e9}, r"run\.min_reports"),
        ({"selection": -1.0}, r"run\.selection = -1"),
        ({"abandoned": 0}, r"run\.abandoned = 0"),
        ({"weighted": True}, r"run\.weighted selects clients by the time that they are on"),
    ],
)
def test_policies_that_cannot_work_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        check(Policy(**changes), 10, CLOCK)


@pytest.mark.parametrize(
    ("changes", "there", "key"),
    [
        ({"cohort": 5, "over_selection": 1.2}, None, r"run\.over_selection"),
        ({"deadline": 3.0}, None, r"run\.deadline"),
        ({"selection": 3.0}, None, r"run\.selection"),
        ({}, Shares((1.0,) * 10), "availability"),
    ],
)
def test_what_is_about_simulated_time_needs_a_clock(changes, there, key):
    with pytest.raises(ConfigError, match=f"{key} uses simulated time"):
        check(Policy(**changes), 10, None, there)
    check(Policy(**changes), 10, CLOCK, there)


def test_plain_policies_need_no_clock():
    plain = [Policy(), Policy(cohort=0.5, min_reports=0.8, real_deadline=60.0)]
    assert [check(policy, 10, None) for policy in plain] == [None, None]  # neither is refused
    timed = Policy(cohort=5, over_selection=2.0, weighted=True)
    assert check(timed, 10, CLOCK, Shares((1.0,) * 10)) is None
