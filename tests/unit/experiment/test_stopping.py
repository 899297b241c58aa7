"""When a run ends: targets, patience, budgets; and what a target took."""

from dataclasses import replace

import pytest

import coterie
from coterie.core.method import Spent
from coterie.data import Population, Split
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.experiment.stopping import Stop, reaching, reason
from support import experiment, on_quadratics, quadratics

# --- the rule ------------------------------------------------------------------------------------


def rounds(*scores, headline="received"):
    """A history with these validation scores; None for a round that was not scored."""
    return [
        {"round": n} | ({} if s is None else {headline: {"val": s}})
        for n, s in enumerate(scores, 1)
    ]


def ended(stop, *scores, spent=Spent(), before=Spent(), kept=False):
    return reason(stop, rounds(*scores), "received", spent, before, kept)


def test_nothing_asked_is_nothing_stopped():
    assert ended(Stop(), 1.0, 1.0, 1.0, spent=Spent(10**12)) == ""


@pytest.mark.parametrize(
    ("scores", "stops"),
    [((0.79,), False), ((0.8,), True), ((0.9, 0.79), False), ((0.1, 0.81), True), ((None,), False)],
)
def test_a_target_is_reached_by_the_last_score(scores, stops):
    assert bool(ended(Stop(target=0.8), *scores)) == stops


@pytest.mark.parametrize(
    ("scores", "patience", "stops"),
    [
        ((0.5, 0.5), 2, False),
        ((0.5, 0.5, 0.5), 2, True),
        ((0.5, 0.4, 0.3), 2, True),
        ((0.5, 0.5, 0.7), 2, False),
        ((0.5, 0.7, 0.7), 2, False),
        ((0.5, 0.7, 0.6, 0.7), 2, True),
        ((0.5, None, None), 2, False),  # nothing was looked at
        ((0.5, None, 0.5), 2, True),
        ((None, None, 0.5), 2, False),
    ],
)
def test_patience_is_in_rounds_since_the_best(scores, patience, stops):
    assert bool(ended(Stop(patience=patience), *scores)) == stops


def test_a_gain_must_be_more_than_the_least():
    # Each score is 0.05 above the one before: too little each time, but not taken together.
    slow = (0.5, 0.55, 0.6)
    assert ended(Stop(patience=2, gain=0.11), *slow) == "no gain on validation data in 2 rounds"
    assert ended(Stop(patience=2, gain=0.07), *slow) == ""
    assert ended(Stop(patience=1, gain=0.06), *slow[:2]) != ""
    assert ended(Stop(patience=1, gain=0.0), 0.5, 0.5) != ""


@pytest.mark.parametrize(
    ("spent", "before", "kept", "stops"),
    [
        (60, 30, False, False),  # another 30 makes 90
        (70, 40, False, False),  # 100, all of it
        (71, 40, False, True),  # 102
        (100, 99, False, True),
        (99, 0, True, False),  # the method keeps to it by itself
        (100, 0, True, True),
    ],
)
def test_budgets_look_a_round_ahead(spent, before, kept, stops):
    asked = Stop(bytes=100)
    assert bool(ended(asked, 0.5, spent=Spent(spent), before=Spent(before), kept=kept)) == stops
    asked = Stop(seconds=100)
    now, then = Spent(0, spent / 2, spent / 4, spent / 4), Spent(0, before / 2, 0, before / 2)
    assert bool(ended(asked, 0.5, spent=now, before=then, kept=kept)) == stops


def test_the_first_round_at_target_is_reported_with_its_cost():
    history = [
        {"round": n, "received": {"accuracy": a}, "total_bytes": {"down": n, "up": 2 * n}}
        for n, a in ((1, 0.2), (2, 0.7), (3, 0.6), (4, 0.9))
    ]
    history.insert(1, {"round": 9})  # not scored
    found = reaching(history, "received", "accuracy", 0.7)
    assert found == {"target": 0.7, "round": 2, "bytes": {"down": 2, "up": 4}}
    assert reaching(history, "received", "accuracy", 0.95) is None
    history[2]["clock"] = {"total": 8.5}
    assert reaching(history, "received", "accuracy", 0.7)["seconds"] == 8.5


# --- through whole runs --------------------------------------------------------------------------


def learning(**settings):
    return experiment(coterie.fedavg(), settings={"rounds": 12, **settings})


@pytest.fixture(scope="module")
def whole():
    """A run that nothing stops, to see what others must do."""
    return execute(learning(clock={"name": "links"}))


def test_a_target_on_validation_data_ends_the_run(whole):
    values = [e["received"]["val"] for e in whole.history]
    target = sorted(values)[6]
    stopped = execute(learning(stop=Stop(target=target)))
    first = next(n for n, v in enumerate(values, 1) if v >= target)
    assert stopped.summary["rounds"] == len(stopped.history) == first < 12
    assert stopped.summary["stopped"] == f"reached {target:g} on validation data"
    assert whole.summary["stopped"] == ""


def test_patience_ends_the_run(whole):
    values = [e["received"]["val"] for e in whole.history]
    stopped = execute(learning(stop=Stop(patience=2, gain=0.5)))
    best = next(n for n in range(3, 13) if n - 1 >= 2 and max(values[:n]) <= values[0] + 0.5)
    assert len(stopped.history) == best
    assert "no gain" in stopped.summary["stopped"]


@pytest.mark.parametrize("name", ["bytes", "seconds"])
def test_budgets_are_not_exceeded_and_not_left_unused(name, whole):
    def spent(event):
        if name == "seconds":
            return event["clock"]["total"]
        return sum(event["total_bytes"].values()) + sum(event["total_wasted"].values())

    totals = [spent(e) for e in whole.history]
    for rounds_ in (3, 7):
        margin = (totals[-1] - totals[-2]) / 2
        for more in (margin, -margin):
            budget = totals[rounds_ - 1] + more
            asked = Stop(**{name: budget})
            result = execute(learning(clock={"name": "links"}, stop=asked))
            assert len(result.history) == rounds_ - (more < 0)
            assert spent(result.history[-1]) <= budget
            assert f"budget of {budget:g} {name}" in result.summary["stopped"]


def test_what_was_wasted_is_spent_too():
    # One of two reports is late in every round: half of the bytes are wasted, and count.
    def made(**settings):
        more = {"cohort": 1, "over_selection": 2.0, "clock": {"name": "links"}, "rounds": 9}
        return on_quadratics(coterie.fedavg(), [[1.0], [2.0] * 5], settings=more | settings)

    history = execute(made()).history
    assert all(e["wasted"]["up"] > 0 for e in history)
    totals = [sum(e["total_bytes"].values()) + sum(e["total_wasted"].values()) for e in history]
    result = execute(made(stop=Stop(bytes=totals[3] + 60)))
    assert len(result.history) == 4


def test_a_stopped_run_stays_stopped(tmp_path):
    made = learning(stop=Stop(target=0.3), checkpoint_every=100)
    first = execute(made, tmp_path / "run")
    assert 0 < len(first.history) < 12
    again = execute(made, tmp_path / "run", resume=True)
    assert len(again.history) == len(first.history)
    assert again.summary["stopped"] == first.summary["stopped"] != ""
    assert again.versions == first.versions
    # Without the rule, or with a higher one, it goes on from there.
    on = execute(
        replace(made, settings=replace(made.settings, stop=Stop())), tmp_path / "run", True
    )
    assert len(on.history) == 12
    assert on.history[: len(first.history)] == first.history


def test_a_method_that_adapts_is_judged_by_its_adapted_score():
    def made(target):
        method = coterie.per_fedavg(alpha=0.5, beta=0.1)
        return experiment(method, settings={"rounds": 6, "stop": Stop(target=target)})

    history = execute(made(1.0)).history
    received, adapted = ([e[k]["val"] for e in history] for k in ("received", "adapted"))
    # A score that is first reached by adapting, before what is received reaches it.
    turn = next(n for n in range(1, 6) if adapted[n] > max(received[: n + 1] + adapted[:n]))
    assert len(execute(made(adapted[turn])).history) == turn + 1


def test_what_a_target_took_is_told(whole):
    accuracy = [e["received"]["accuracy"] for e in whole.history]
    target = sorted(accuracy)[6]
    told = execute(learning(clock={"name": "links"}, target=target)).summary["to_target"]
    first = next(n for n, a in enumerate(accuracy) if a >= target)
    event = whole.history[first]
    assert told["round"] == first + 1
    assert told["bytes"] == event["total_bytes"]
    assert told["seconds"] == event["clock"]["total"]
    assert execute(learning(rounds=1, target=1.0)).summary["to_target"] is None


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [Stop(target=0.9), Stop(patience=3)])
def test_rules_on_validation_data_need_some(stop, tmp_path):
    people = quadratics([[1.0], [2.0]])
    none = Split(people.clients[0].val.x[:0], people.clients[0].val.y[:0])
    without = tuple(replace(c, val=none) for c in people.clients)
    bare = Population(without, people.kind, people.shape, people.classes, people.targets)
    made = on_quadratics(coterie.fedavg(), [], population=bare, settings={"stop": stop})
    with pytest.raises(ConfigError, match=r"no client has any: set data\.val_fraction"):
        execute(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_seconds_need_a_clock(tmp_path):
    made = learning(stop=Stop(seconds=10.0))
    with pytest.raises(ConfigError, match=r"stop\.seconds .* clock\.name = links"):
        execute(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()
