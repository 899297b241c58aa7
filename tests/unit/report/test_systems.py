"""A run's times in other systems of up- and downlink, and the picture of them."""

import pytest

from clocked import EXCHANGES, H20, MODEL, clocked, legs, measured
from coterie.channel.clocks import SYSTEMS
from coterie.errors import ConfigError
from coterie.experiment.config import experiment_of, parse, population_of
from coterie.experiment.experiment import execute
from coterie.report import catalogue, systems
from coterie.report.captions import systems as captions_systems
from coterie.report.figures import systems as drawn
from coterie.report.reading import Reading, read_run
from runs_by_hand import finished


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_parts_of_a_round_are_read_off_its_time(name):
    exchange, streams, uploads = EXCHANGES[name]
    assert systems.load_of(measured(exchange), MODEL, 20) == systems.Load(streams, uploads, 1)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("number", SYSTEMS)
def test_other_systems_times_are_what_their_own_clock_says(name, number):
    exchange = EXCHANGES[name][0]
    found = systems.load_of(measured(exchange), MODEL, 20).lasts(SYSTEMS[number], 20)
    assert found == pytest.approx(clocked(exchange, number).total, abs=1e-9)


def test_rounds_of_the_three_systems_by_hand():
    one, four, all_ = (systems.Load(m, 20, 1) for m in (1, 4, 20))
    assert one.lasts(SYSTEMS[1], 20) == pytest.approx(1 + 80 + 1 + H20)
    assert [one.lasts(SYSTEMS[n], 20) for n in (2, 3)] == [42, 22]
    assert [four.lasts(SYSTEMS[n], 20) for n in (2, 3)] == [45, 25]
    assert [all_.lasts(SYSTEMS[n], 20) for n in (2, 3)] == [61, 41]


def test_without_bytes_by_kind_uploads_are_whole_models():
    before = measured(legs([7] * 20))
    del before["kinds"]
    assert systems.load_of(before, MODEL, 20) == systems.Load(1, 20, 1)


def test_a_round_that_some_sat_out_is_refused():
    with pytest.raises(ConfigError, match=r"round 3 .* 12 up, and .* times that all 20 users"):
        systems.load_of(measured(legs([7] * 12), number=3), MODEL, 20)
    for what in ({"lost": 1}, {"late": 1}):
        with pytest.raises(ConfigError, match="round 1"):
            systems.load_of({**measured(legs([7] * 20)), **what}, MODEL, 20)


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [{"name": "fedavg"}, {"name": "user-centric", "streams": 2}, {"name": "fedfomo", "m": 2}],
    ids=lambda method: method["name"],
)
def test_times_in_another_system_are_those_of_a_run_there(tmp_path, method):
    people, runs = None, {}
    for number in SYSTEMS:
        tree = {
            "data": {"set": "digits", "clients": 4, "samples": 200},
            "model": {"name": "logistic"},
            "method": method,
            "run": {"rounds": 2, "engine": "loop"},
            "clock": {"name": "wireless", "system": number, "t_dl": 2.0},
        }
        people = people or population_of(parse(tree))
        execute(experiment_of(parse(tree), people), tmp_path / str(number))
        runs[number] = read_run(tmp_path / str(number))
    for run in runs.values():
        asked = run.begun
        if asked:  # what it took before round 1 is told apart by kind, and that is all of it
            ways = [sum(way) for way in zip(*asked["kinds"].values(), strict=True)]
            assert ways == [asked["bytes"]["down"], asked["bytes"]["up"]]
    for measured_in in SYSTEMS:
        for number in SYSTEMS:
            found = systems.times(runs[measured_in], SYSTEMS[number])
            wanted = {e["round"]: e["clock"]["total"] / 2.0 for e in runs[number].rounds}
            assert found == pytest.approx(wanted), (measured_in, number)


def run_of(name, accuracies, clock=None, sizes=MODEL, **changes):
    everybody = list(range(20))
    events = [
        {**measured(EXCHANGES[name][0], n, a), "cohort": everybody}
        for n, a in enumerate(accuracies, 1)
    ]
    told = {
        "config": {"clock": clock or {"name": "wireless"}},
        "events": events,
        "result": {"method": name, "judged_by": "accuracy", "headline": "received"},
        "sessions": [{"model_bytes": sizes}] if sizes else (),
    }
    return Reading(name, "finished", **{**told, **changes})


def test_a_panel_for_each_system_over_the_time_of_fedavg():
    runs = [run_of("all", [0.3, 0.5, 0.7]), run_of("fedavg", [0.2, 0.3, 0.4])]
    figure = drawn.by_system(runs).figure()
    ours = {t.xaxis: list(t.x) for t in figure.data if t.name == "all"}
    assert ours["x3"] == [41, 82, 123]
    assert ours["x2"] == [61, 122, 183]
    assert [figure.layout[f"xaxis{n}"].range[1] for n in (2, 3)] == [126, 66]
    assert drawn.standings(runs) == {
        1: {"all": 0.5, "fedavg": 0.4},  # 104.6 a round, and 256.8 in all
        2: {"all": 0.5, "fedavg": 0.4},  # 122 is before 126
        3: {"all": 0.3, "fedavg": 0.4},
    }
    caption = captions_systems.by_system(runs)
    assert caption.startswith("When fedavg has completed all its rounds")
    assert "ρ = 2, no stragglers: all 50.0 %, fedavg 40.0 %;" in caption
    assert "ρ = 1, no stragglers: fedavg 40.0 %, all 30.0 %." in caption


def test_who_is_done_early_keeps_its_score():
    runs = [run_of("local", [0.1, 0.2]), run_of("streams=4", [0.2, 0.4])]
    (local,) = [
        t
        for t in drawn.by_system(runs).figure().data
        if t.name == "local (alone)" and t.xaxis == "x3"
    ]
    assert list(local.x) == [1, 2, 50]  # the other sends, so time is its: 25 a round
    assert list(local.y) == [0.1, 0.2, 0.2]
    assert drawn.standings(runs)[3]["local"] == 0.2


def test_runs_of_another_clock_are_left_out_and_not_drawn_alone():
    mine, other = run_of("fedavg", [0.2]), finished("links")
    names = {t.name for t in drawn.by_system([mine, other]).figure().data}
    assert names == {"fedavg"}
    caption = captions_systems.by_system([mine, other, finished("more")])
    assert caption.endswith(
        "Left out: links and more (times in other systems need --clock wireless)."
    )
    assert "Left out" not in captions_systems.by_system([mine])
    with pytest.raises(ConfigError, match="need --clock wireless"):
        drawn.by_system([other, finished("two")])
    with pytest.raises(ConfigError, match="drawn"):
        systems.times(run_of("fedavg", [0.2], {"name": "wireless", "draw": True}), SYSTEMS[1])
    with pytest.raises(ConfigError, match="does not know the size of its model"):
        systems.times(run_of("fedavg", [0.2], sizes=None), SYSTEMS[1])
    assert "compare-systems" not in {d.name for d in catalogue.compared([other, finished("two")])}
    both = catalogue.compared([mine, run_of("all", [0.5])])
    assert "compare-systems" in {d.name for d in both}


def test_a_clocks_own_numbers_count():
    clock = {"name": "wireless", "rho": 4.0, "t_min": 1.0, "inverse_mu": 1.0, "system": None}
    same = systems.times(run_of("fedavg", [0.2, 0.3], clock), SYSTEMS[3])
    assert same == pytest.approx({1: 22, 2: 44})
    slower = {**clock, "rho": 2.0}  # then more of the time was streams: 1 + (4 − 2)·20
    assert systems.times(run_of("fedavg", [0.2], slower), SYSTEMS[3]) == pytest.approx({1: 62})
