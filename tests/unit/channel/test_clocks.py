"""Clocks: times worked by hand, the wireless paper's formula, draws that nothing else changes."""

import math
from fractions import Fraction

import pytest

from coterie.channel.clocks import CLOCKS, SYSTEMS, Leg, Moment, Seconds, make_clock, uniform
from coterie.errors import ConfigError
from coterie.seeds import seed_for

NOW = Moment(0, 0)
MODEL = 248_024  # bytes of the 62,006 float32 of LeNet-5
H20 = float(sum(Fraction(1, n) for n in range(1, 21)))


def clock(name, clients=20, seed=0, model_bytes=MODEL, **parameters):
    return make_clock(name, parameters, seed, clients, model_bytes)


def leg(client, down=MODEL, up=MODEL, stream=(0,), seconds=0.0, samples=1):
    """An order and its answer, with headers of 100 and 50 bytes."""
    return Leg(client, down + 100, up + 50, down, up, stream, seconds, samples)


def last(found):
    return max(s.total for s in found.values())


def test_seconds_add_up_kind_by_kind():
    both = Seconds(1.0, 2.0, 4.0) + Seconds(8.0, 16.0, 32.0)
    assert both == Seconds(9.0, 18.0, 36.0)
    assert both.total == 63.0


# --- links ---------------------------------------------------------------------------------------


def test_a_link_of_two_megabits_by_hand():
    found = clock("links").finishes([Leg(3, 250_000, 125_000, 1, 1, (0,), 9.0, 2500)], NOW)
    assert found == {3: Seconds(computation=2.5, communication=1.0 + 0.5)}


def test_every_parameter_of_a_link_by_hand():
    made = clock(
        "links", rate_up=4, rate_down=8.0, latency=0.25, speed=2.0, samples_per_second=500.0
    )
    found = made.finishes([Leg(0, 1_000_000, 1_000_000, 1, 1, (0,), 9.0, 2000)], NOW)
    assert found == {0: Seconds(computation=2.0, communication=0.5 + 1.0 + 2.0)}


def test_measured_work_is_scaled_by_the_speed_and_is_not_reproducible():
    made = clock("links", compute="measured", speed=4.0)
    found = made.finishes([Leg(0, 0, 0, 0, 0, (), seconds=3.0, samples=10**6)], NOW)
    assert found[0].computation == 0.75
    assert not made.reproducible
    assert clock("links").reproducible
    assert clock("wireless", draw=True).reproducible


def test_a_message_that_was_not_sent_has_no_latency():
    made = clock("links", latency=1.0)
    sizes = [(0, 0), (250_000, 0), (0, 250_000), (250_000, 250_000)]
    legs = [Leg(c, down, up, 0, 0, ()) for c, (down, up) in enumerate(sizes)]
    found = made.finishes(legs, NOW)
    assert [found[c].communication for c in range(4)] == [0.0, 2.0, 2.0, 4.0]


def test_spreads_are_drawn_once_for_each_client_uniformly_and_apart():
    n, low, high = 3000, 1.0, 5.0
    spreads = {k: [low, high] for k in ("rate_up", "rate_down", "latency", "speed")}
    made = clock("links", clients=n, **spreads)
    drawn = [made.rate_up, made.rate_down, made.latency, made.speed]
    # Uniform: mean 3 with variance 16/12, the square's mean 31/3 with variance of at most 25²/4.
    for values in drawn:
        assert all(low <= v < high for v in values)
        assert abs(sum(values) / n - 3) < 5 * math.sqrt(16 / 12 / n)
        assert abs(sum(v * v for v in values) / n - 31 / 3) < 5 * 12.5 / math.sqrt(n)
    # Independent: the products' mean is 9, their variance (31/3)² − 81.
    for a in range(4):
        for b in range(a):
            product = sum(x * y for x, y in zip(drawn[a], drawn[b], strict=True)) / n
            assert abs(product - 9) < 5 * math.sqrt(((31 / 3) ** 2 - 81) / n)
    assert clock("links", clients=10, **spreads).speed == made.speed[:10]
    assert clock("links", clients=10, seed=1, **spreads).speed != made.speed[:10]
    share = uniform(seed_for(0, "clock", client=7, stream="latency"))
    assert made.latency[7] == low + (high - low) * share


# --- wireless ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 4, 20])
@pytest.mark.parametrize(
    ("system", "uplink", "computing"), [(1, 80, 1 + H20), (2, 40, 1), (3, 20, 1)]
)
def test_the_papers_formula_for_its_three_systems(system, streams, uplink, computing):
    legs = [leg(c, stream=(c % streams,)) for c in range(20)]
    found = clock("wireless", system=system).finishes(legs, NOW)
    slowest = max(found.values(), key=lambda s: s.total)
    assert slowest.communication == streams + uplink
    assert slowest.computation == pytest.approx(computing, rel=1e-15)
    assert slowest.waiting == 0
    assert {s.computation for s in found.values()} == {slowest.computation}


def test_the_papers_systems_and_the_defaults():
    assert {k: s[1:] for k, s in SYSTEMS.items()} == {1: (4, 1, 1), 2: (2, 1, 0), 3: (1, 1, 0)}
    assert clock("wireless") == clock("wireless", system=1)
    assert clock("wireless", system=2) == clock("wireless", rho=2.0, t_min=1.0, inverse_mu=0.0)


def test_everything_is_in_units_of_the_downlink_time():
    legs = [leg(c, stream=(c % 3,)) for c in range(7)]
    once, half = (clock("wireless", t_dl=t, draw=True).finishes(legs, NOW) for t in (1.0, 0.5))
    for c in range(7):
        assert half[c].computation == once[c].computation / 2
        assert half[c].communication == once[c].communication / 2


def test_a_hand_worked_exchange():
    """Three streams of 1, ½ and 2 models, uploads of 1, 2 and ¼ models, ρ=3, T_min=2."""
    made = clock("wireless", model_bytes=400, rho=3.0, t_dl=10.0, t_min=2.0, inverse_mu=0.0)
    legs = [
        leg(0, down=400, up=400, stream=(0,)),
        leg(1, down=200, up=800, stream=(1,)),
        leg(2, down=800, up=100, stream=(2, 3)),
        leg(3, down=400, up=400, stream=(0,)),
    ]
    found = made.finishes(legs, NOW)
    # The downlink takes 35 s for everybody, computing 20 s, uploads 30, 60, 7.5 and 30 s by turns.
    assert found == {
        0: Seconds(20.0, 65.0),
        1: Seconds(20.0, 125.0),
        2: Seconds(20.0, 132.5),
        3: Seconds(20.0, 162.5),
    }
    assert made.finishes(legs[::-1], NOW) == found


def test_fedfomo_and_the_parallel_variant_cost_what_the_paper_says():
    n, models = 20, 5
    made = clock("wireless", system=3)
    fomo = [leg(c, down=models * MODEL, stream=(c, 100)) for c in range(n)]
    assert last(made.finishes(fomo, NOW)) == models * n + n + 1
    parallel = [leg(c, down=4 * MODEL, up=4 * MODEL, stream=(0, 1, 2, 3)) for c in range(n)]
    assert last(made.finishes(parallel, NOW)) == 4 + 4 * n + 1


def test_who_sends_and_hears_nothing_waits_for_nobody():
    made = clock("wireless", rho=2.0, t_min=3.0, inverse_mu=0.0)
    alone, listens, sends = leg(0, 0, 0, ()), leg(1, up=0), leg(2, down=0, stream=())
    idle, whole = leg(3, 0, 0, (), samples=0), leg(4, samples=0)
    found = made.finishes([alone, listens, sends, idle, whole], NOW)
    assert found[0] == Seconds(3.0, 0.0)
    assert found[1] == Seconds(3.0, 1.0)
    assert found[3] == Seconds(0.0, 0.0)
    assert found[4] == Seconds(0.0, 1.0 + 2.0)  # it need not compute, so it is the first to send
    assert found[2] == Seconds(3.0, 2.0 + 2.0)


def test_turns_go_by_when_clients_are_done_and_not_by_how_long_they_took():
    made = clock("wireless", rho=2.0, t_min=3.0, inverse_mu=0.0)
    found = made.finishes([leg(0), leg(1, down=0, stream=())], NOW)
    assert found == {1: Seconds(3.0, 2.0), 0: Seconds(3.0, 1.0 + 4.0)}


def test_the_expected_maximum_is_over_those_who_compute():
    made = clock("wireless", t_min=0.0, inverse_mu=1.0)
    legs = [leg(0), leg(1, samples=0), leg(2), leg(3)]
    found = made.finishes(legs, NOW)
    assert found[0].computation == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert found[1].computation == 0


def test_the_first_reports_take_what_a_round_of_as_many_takes():
    made = clock("wireless", draw=True, rho=4.0, t_min=1.0, inverse_mu=5.0)
    found = made.finishes([leg(c, stream=(c % 4,)) for c in range(20)], NOW)
    by_work = sorted(found.values(), key=lambda s: s.computation)
    assert [s.communication for s in by_work] == [4 + 4 * k for k in range(1, 21)]
    totals = [s.total for s in by_work]
    assert totals == sorted(totals)
    assert len({s.computation for s in by_work}) == 20
    assert totals[-1] == 4 + 4 * 20 + max(s.computation for s in by_work)


def test_drawn_work_has_the_papers_distribution():
    """Shifted exponential; the mean of the maximum of N is T_min + H_N/μ, its variance Σ1/n²."""
    n, rounds, t_min, inverse_mu = 20, 1500, 3.0, 2.0
    made = clock("wireless", draw=True, t_min=t_min, inverse_mu=inverse_mu)
    legs = [leg(c) for c in range(n)]
    works = [
        [s.computation for s in made.finishes(legs, Moment(r, 0)).values()] for r in range(rounds)
    ]
    every = [w for row in works for w in row]
    assert min(every) >= t_min
    mean = sum(every) / len(every)
    assert abs(mean - t_min - inverse_mu) < 5 * inverse_mu / math.sqrt(len(every))
    above = sum(w > t_min + inverse_mu for w in every) / len(every)
    p = math.exp(-1)
    assert abs(above - p) < 5 * math.sqrt(p * (1 - p) / len(every))
    variance = inverse_mu**2 * sum(1 / k**2 for k in range(1, n + 1))
    slowest = sum(max(row) for row in works) / rounds
    assert abs(slowest - t_min - inverse_mu * H20) < 5 * math.sqrt(variance / rounds)


def test_draws_depend_on_client_round_exchange_and_seed_and_on_nothing_else():
    made = clock("wireless", draw=True)
    legs = [leg(c) for c in range(6)]

    def works(made, legs, moment):
        return {c: s.computation for c, s in made.finishes(legs, moment).items()}

    asked = [Moment(r, e) for r in range(3) for e in range(2)]
    forth = {m: works(made, legs, m) for m in asked}
    back = {m: works(made, legs[::-1], m) for m in asked[::-1]}
    assert forth == back
    assert works(made, legs[2:4], asked[3]) == {c: forth[asked[3]][c] for c in (2, 3)}
    assert len({w for found in forth.values() for w in found.values()}) == 36
    assert works(clock("wireless", draw=True, seed=1), legs, asked[0]) != forth[asked[0]]


# --- names, keys and values ----------------------------------------------------------------------


def test_no_clock():
    assert clock("none") is None
    assert set(CLOCKS) == {"none", "links", "wireless"}


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("link", {}, "unknown clock 'link'; did you mean 'links'"),
        ("none", {"rho": 1.0}, "clock 'none' takes no parameters, but 'rho'"),
        ("links", {"rate_upp": 1.0}, "'rate_upp'; did you mean 'rate_up'"),
        ("links", {"seed": 1}, "unknown parameter of clock 'links' 'seed'"),
        ("links", {"rate_up": 0}, "clock 'links': rate_up = 0: must be above 0"),
        ("links", {"rate_up": -2.0}, "rate_up = -2.0: must be above 0"),
        ("links", {"rate_down": [3.0, 1.0]}, "the first of .* must not be above the second"),
        ("links", {"rate_down": [0.0, 1.0]}, "must be above 0"),
        ("links", {"latency": -0.1}, "latency = -0.1: must be at least 0"),
        ("links", {"latency": [0.0, 1.0, 2.0]}, "must be a number or .low, high."),
        ("links", {"speed": "fast"}, "must be a number or"),
        ("links", {"speed": True}, "must be a number or"),
        ("links", {"speed": math.inf}, "must be a number or"),
        ("links", {"compute": "guess"}, "compute = 'guess': must be 'samples' or 'measured'"),
        ("links", {"samples_per_second": 0.0}, "samples_per_second = 0.0: must be greater than 0"),
        ("wireless", {"rho": -1.0}, "rho = -1.0: must be"),
        ("wireless", {"t_dl": 0.0}, "t_dl = 0.0: must be"),
        ("wireless", {"t_min": math.nan}, "t_min = nan: must be a finite number"),
        ("wireless", {"draw": 1}, "draw = 1: must be a valid boolean"),
        ("wireless", {"system": 4}, "system = 4: must be 1, 2 or 3"),
        ("wireless", {"system": 1, "rho": 4.0}, "system = 1 also sets rho"),
        ("wireless", {"system": 2, "inverse_mu": 0.0}, "also sets inverse_mu"),
    ],
)
def test_wrong_names_keys_and_values_are_refused(name, parameters, says):
    with pytest.raises(ConfigError, match=says):
        make_clock(name, parameters, 0, 3, MODEL)
