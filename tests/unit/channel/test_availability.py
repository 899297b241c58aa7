"""Availability: stretches by hand, answers that agree with one another, errors that name a line."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.channel.availability import (
    AVAILABILITIES,
    Trace,
    make_availability,
    read_trace,
    steps_in,
)
from coterie.errors import ConfigError, DataError


def written(tmp_path, *lines, header="client,start,end"):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def diurnal(clients=4, seed=0, **parameters):
    return make_availability("diurnal", parameters, seed, clients)


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_by_hand(tmp_path):
    path = written(tmp_path, "1,30,40", "0,0,10", "", "1, 5 ,15", "0,20,40")
    trace = make_availability("trace", {"file": str(path)}, 0, 2)
    times = [0, 4.9, 5, 9.9, 10, 15, 20, 29, 30, 39.9, 40, 1e9]
    assert [trace.on(0, t) for t in times] == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2
    assert [trace.on(1, t) for t in times] == (
        [False] * 2 + [True] * 3 + [False] * 3 + [True] * 2 + [False] * 2
    )
    assert [trace.until(0, t) for t in (0, 9, 10, 25, 40)] == [10, 10, 10, 40, 40]
    assert [trace.until(1, t) for t in (0, 5, 35)] == [0, 15, 40]
    changes = [0.0]
    for _ in range(7):
        changes.append(trace.next_change(changes[-1]))
    assert changes == [0, 5, 10, 15, 20, 30, 40, math.inf]
    assert trace.share(0) == 30 / 40
    assert trace.share(1) == 20 / 40
    assert Trace(((0, 10), (0, 40))).share(0) == 10 / 40


def test_a_trace_that_repeats(tmp_path):
    path = written(tmp_path, "0,0,10", "0,80,100", "1,0,100", "2,50,100")
    trace = make_availability("trace", {"file": str(path), "period": 100}, 0, 3)
    assert [trace.on(0, t) for t in (5, 10, 79, 80, 105, 110, 180)] == [
        *(True, False, False, True),
        *(True, False, True),
    ]
    assert trace.until(0, 5) == 10
    assert trace.until(0, 80) == trace.until(0, 100) == 110  # it is on across the period's end
    assert trace.until(0, 995) == 1010
    assert trace.until(1, 3) == trace.until(1, 777) == math.inf
    assert trace.until(2, 150) == trace.until(2, 199) == 200
    assert not trace.on(2, 200)
    assert [trace.share(c) for c in range(3)] == [0.3, 1.0, 0.5]
    changes = [0.0]
    for _ in range(6):
        changes.append(trace.next_change(changes[-1]))
    assert changes == [0, 10, 50, 80, 100, 110, 150]


def test_nothing_changes_when_all_are_always_on(tmp_path):
    trace = read_trace(written(tmp_path, "0,0,50", "0,50,100", "1,0,100"), 2, 100.0)
    assert trace.edges == ((0, 100), (0, 100))  # stretches that touch are one
    assert trace.next_change(12.0) == math.inf


@st.composite
def traces(draw):
    """A trace of one to three clients with a period that binary fractions cannot hold."""
    period = draw(st.sampled_from([0.7, 1.1, 86_400.1, math.pi]))
    clients = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(0, 10), min_size=2, max_size=6))
        edges = [period * n / 10 for n in sorted(cuts)]
        clients.append(tuple(edges[: len(edges) // 2 * 2]))
    return Trace(tuple(clients), period)


@given(traces(), st.integers(0, 10**6), st.integers(0, 10), st.integers(1, 30))
def test_answers_agree_also_where_numbers_are_rounded(trace, lap, tenth, steps):
    """States are constant between the named changes, and a stretch ends where it is said to."""
    time = trace.period * lap + trace.period * tenth / 10
    for _ in range(steps):
        following = trace.next_change(time)
        assert following > time
        for client in range(len(trace.edges)):
            on, until = trace.on(client, time), trace.until(client, time)
            assert on == (until > time)
            if not on:
                assert until == time
            elif math.isfinite(until):
                assert until >= following
                assert not trace.on(client, until)
            if math.isfinite(following):
                for between in (math.nextafter(following, 0), (time + following) / 2):
                    if time <= between < following:
                        assert trace.on(client, between) == on
        if math.isinf(following):
            break
        time = following


@given(st.floats(0, 1e12), st.sampled_from([0.1, 0.7, 600.0, math.pi]))
def test_steps_bracket_the_time(time, step):
    steps = steps_in(time, step)
    assert steps * step <= time < (steps + 1) * step


@given(st.integers(0, 10**9), st.sampled_from([0.1, 0.7, 600.0, math.pi]))
def test_a_step_that_has_passed_is_counted(steps, step):
    assert steps_in(steps * step, step) == steps


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["0,0,1", "2,0,1"], r"line 3: there is no client 2; clients are 0 to 1"),
        (["-1,0,1"], r"line 2: there is no client -1"),
        (["0,0,1", "1,5,5"], r"line 3: ends at 5, not after its start at 5"),
        (["0,7,5"], r"line 2: ends at 5, not after its start at 7"),
        (["0,-1,5"], r"line 2: starts at -1"),
        (["0,0,101"], r"line 2: ends at 101, after the period of 100"),
        (["0,0,nan"], r"line 2: '0,0,nan' is not"),
        (["0,0,inf"], r"line 2: '0,0,inf' is not"),
        (["0.5,0,1"], r"line 2: '0.5,0,1' is not"),
        (["0,0"], r"line 2: '0,0' is not"),
        (["0,0,1,2"], r"line 2: '0,0,1,2' is not"),
        (["0,20,30", "1,0,1", "0,10,21"], r"line 2: client 0 is on from 20, but line 4 .* 21"),
        (["0,0,50", "0,10,20", "1,0,1"], r"line 3: client 0 is on from 10, but line 2 .* 50"),
        (["0,0,50"], r"has no line for client 1 \(1 of 2 clients"),
        ([], r"has no line for client 0 \(2 of 2 clients"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, says):
    with pytest.raises(DataError, match=says):
        read_trace(written(tmp_path, *lines), 2, 100.0)


def test_a_file_that_is_none_of_ours_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.csv cannot be read"):
        read_trace(tmp_path / "nothing.csv", 1)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path, 1)
    with pytest.raises(DataError, match="line 1: the header must be client,start,end"):
        read_trace(written(tmp_path, "0,0,1", header="id,from,to"), 1)
    (tmp_path / "binary.csv").write_bytes(b"client,start,end\n\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "binary.csv", 1)


# --- day and night -------------------------------------------------------------------------------


def test_clients_are_on_as_often_as_the_hour_says():
    """Each client's slots at one hour over many days: a binomial of its probability."""
    made = diurnal(clients=3, low=0.1, high=0.9, day=240.0, slot=10.0)
    days = 800
    for client in range(3):
        for hour in range(0, 24, 4):
            p = made.probability(client, hour)
            assert 0.1 <= p <= 0.9
            on = sum(made.on(client, 240.0 * d + 10.0 * hour + 3.0) for d in range(days)) / days
            assert abs(on - p) < 5 * math.sqrt(p * (1 - p) / days)


def test_the_probability_is_a_cosine_about_the_clients_hour():
    made = diurnal(clients=50, low=0.2, high=0.6, day=240.0, slot=10.0, zones=4)
    assert set(made.peak) == {0.0, 0.25, 0.5, 0.75}
    client = made.peak.index(0.25)  # 60 s; its slots are around 55 and 65 s
    assert made.probability(client, 5) == pytest.approx(0.4 + 0.2 * math.cos(math.pi / 24))
    assert made.probability(client, 6) == pytest.approx(made.probability(client, 5))
    assert made.probability(client, 17) == pytest.approx(0.4 - 0.2 * math.cos(math.pi / 24))
    assert made.probability(client, 6 + 24) == pytest.approx(made.probability(client, 6))
    for c in range(50):
        day = sum(made.probability(c, s) for s in range(24)) / 24
        assert made.share(c) == pytest.approx(day) == pytest.approx(0.4)


def test_hours_are_anywhere_in_the_day_without_zones():
    peaks = diurnal(clients=2000).peak
    assert len(set(peaks)) == 2000
    assert abs(sum(peaks) / 2000 - 0.5) < 5 * math.sqrt(1 / 12 / 2000)


def test_clients_may_differ_in_how_often_they_are_on():
    made = diurnal(clients=100, low=[0.0, 0.2], high=[0.2, 1.0])
    assert len(set(made.low)) == len(set(made.high)) == 100
    assert all(0 <= a <= 0.2 <= b <= 1 for a, b in zip(made.low, made.high, strict=True))
    assert [made.share(c) for c in range(100)] == [
        (a + b) / 2 for a, b in zip(made.low, made.high, strict=True)
    ]


def test_a_stretch_ends_with_the_first_slot_that_is_off():
    made = diurnal(day=1000.0, slot=7.0)
    ended = 0
    for client in range(4):
        for slot in range(200):
            time = 7.0 * slot + 2.5
            if not made.on(client, time):
                assert made.until(client, time) == time
                continue
            end = made.until(client, time)
            assert end > time
            assert end % 7.0 == 0
            assert not made.on(client, end)
            assert all(made.on(client, 7.0 * s) for s in range(slot, int(end // 7)))
            ended += 1
    assert ended > 100
    assert made.next_change(13.9) == 14.0
    assert made.next_change(14.0) == 21.0


def test_who_is_always_on_never_goes():
    made = diurnal(low=1.0, high=1.0)
    assert made.on(2, 1e7)
    assert made.until(2, 1e7) == math.inf
    assert made.share(2) == 1.0


def test_the_order_of_questions_changes_nothing():
    even = {"low": 0.5, "high": 0.5}  # so that only the draws can differ
    places = [(c, 600.0 * s) for c in range(4) for s in range(60)]
    forth = {p: diurnal(**even).on(*p) for p in places}
    made = diurnal(**even)
    assert {p: made.on(*p) for p in reversed(places)} == forth
    assert {p: diurnal(clients=9, **even).on(*p) for p in places} == forth
    assert {p: diurnal(seed=1, **even).on(*p) for p in places} != forth
    rows = [[forth[c, 600.0 * s] for s in range(60)] for c in range(4)]
    assert all(rows[a] != rows[b] for a in range(4) for b in range(a))


# --- names, keys and values ----------------------------------------------------------------------


def test_always_on():
    assert make_availability("always", {}, 0, 5) is None
    assert set(AVAILABILITIES) == {"always", "trace", "diurnal"}


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("diurnl", {}, "unknown availability 'diurnl'; did you mean 'diurnal'"),
        ("always", {"file": "x"}, "availability 'always' takes no parameters, but 'file'"),
        ("trace", {}, "availability 'trace' needs the parameter 'file'"),
        ("trace", {"file": 3}, "file = 3: must be a valid string"),
        ("trace", {"file": "x", "period": 0.0}, "period = 0.0: must be greater than 0"),
        ("diurnal", {"lo": 0.1}, "'lo'; did you mean 'low'"),
        ("diurnal", {"low": 1.5}, "low = 1.5: must be at least 0 and at most 1"),
        ("diurnal", {"low": 0.9}, "low = 0.9 and high = 0.8, but high must be"),
        ("diurnal", {"low": 0.0, "high": 0.0}, "high must be above 0"),
        ("diurnal", {"slot": 50_000.0}, "slot = 50000 is more than half of day"),
        ("diurnal", {"day": -1.0}, "day = -1.0: must be greater than 0"),
        ("diurnal", {"zones": -1}, "zones = -1: must be"),
    ],
)
def test_wrong_names_keys_and_values_are_refused(name, parameters, says):
    with pytest.raises(ConfigError, match=says):
        make_availability(name, parameters, 0, 3)
