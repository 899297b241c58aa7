"""Trouble is told in one line, once; sound runs are silent."""

import math
import warnings

import pytest
import torch
from torch import nn

import coterie
from coterie.data import from_clients
from coterie.experiment.trouble import (
    adapting_harms,
    constant,
    has_exploded,
    is_at_chance,
    may_be_classes,
)


def people(count=8, samples=60, labels=None):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(samples, 5, generator=generator) for _ in range(count)]
    return [(x, (labels or (lambda x: (x[:, 0] > 0).long()))(x)) for x in rows]


def told(clients=None, **settings):
    """What a run warns of, in Python; its summary says the same."""
    settings = {"model": "logistic", "engine": "loop", "rounds": 6, "lr": 0.3} | settings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = coterie.simulate(clients or people(), **settings)
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    assert texts == result.summary["warnings"]
    assert len(set(texts)) == len(texts)
    return texts


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "ditto", "ifca:k=2", "scaffold"])
def test_a_sound_run_is_silent(method):
    two_rules = people(4) + people(4, labels=lambda x: (x[:, 0] < 0).long())
    clients = two_rules if method.startswith("ifca") else people()
    assert told(clients, method=method, rounds=12, adapt_epochs=0) == []


def test_sound_regression_and_rare_classes_are_silent():
    assert told(people(labels=lambda x: 3 * x[:, 0] + 1), lr=0.1, adapt_epochs=0) == []
    assert told(people(labels=lambda x: (x[:, 0] > 1.0).long()), rounds=20, adapt_epochs=0) == []


def test_a_learning_rate_far_too_high():
    net = lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))  # noqa: E731
    texts = told(model=net, lr=20.0, method="fedavg", rounds=6)
    assert any("Lower the learning rate (20)" in t or "far too high" in t for t in texts)


def test_a_loss_that_stays_at_its_start():
    (text,) = told(lr=1e-7, rounds=12)
    assert "still at its start" in text
    assert "after 10 of 12 rounds" in text
    assert "(1e-07) is far too low" in text


def test_the_first_rounds_may_be_at_the_start():
    assert told(lr=1e-7, rounds=9, adapt_epochs=0) == []


def test_labels_that_do_not_belong_to_their_inputs():
    generator = torch.Generator().manual_seed(1)
    noise = people(labels=lambda x: torch.randint(0, 2, (len(x),), generator=generator))
    texts = told(noise, lr=0.01, rounds=12)
    assert len([t for t in texts if "labels belong to their inputs" in t]) == 1


def test_float_labels():
    floats = people(labels=lambda x: (x[:, 0] > 0).float())
    (text,) = told(floats, lr=0.05, adapt_epochs=0)
    assert "whole numbers from 0 to 1" in text
    assert "y.long()" in text


def test_a_method_that_never_groups():
    texts = told(method=coterie.ifca(k=2), lr=0.3)
    if len(texts):  # all clients have the same rule: one model fits all best
        assert "trained as fedavg does" in texts[0]
    same = [(x, y) for x, y in people(1)] * 5
    (text,) = [t for t in told(same, method="ifca:k=2") if "adapting" not in t]
    assert "in the same group in all 6 rounds" in text
    assert not [t for t in told(same, method="ifca:k=1") if "same group" in t]


def test_a_resumed_run_warns_as_if_it_was_never_stopped(tmp_path):
    settings = {"model": "logistic", "engine": "loop", "lr": 1e-7, "directory": tmp_path / "run"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coterie.simulate(people(), rounds=11, **settings)
        more = coterie.simulate(people(), rounds=14, resume=True, **settings)
    assert len([t for t in more.summary["warnings"] if "still at its start" in t]) == 1
    assert coterie.read_run(tmp_path / "run").warnings == more.summary["warnings"]


def test_a_comparison_shows_what_its_runs_warn_of():
    compared = coterie.compare(
        people(), ["local", "fedavg"], model="logistic", rounds=11, lr=1e-7, engine="loop"
    )
    assert set(compared.warnings) == {"local", "fedavg"}
    assert "warning: local, fedavg: after 10 of 11 rounds the loss is still" in (
        compared.markdown().replace("\\", "")
    )


# --- the rules -----------------------------------------------------------------------------------


def test_a_loss_explodes_if_it_is_ten_times_its_lowest_and_worse_than_a_constant():
    class Level:
        loss, score, error = 2.3, 0.1, 0.01

    assert "9.9" in has_exploded([(1, 2.0), (2, 0.9), (3, 9.9)], Level, 0.1)
    assert "in round 2" in has_exploded([(1, 2.0), (2, 0.9), (3, 9.9)], Level, 0.1)
    assert not has_exploded([(1, 2.0), (2, 0.9), (3, 8.9)], Level, 0.1)
    assert not has_exploded([(1, 0.1), (2, 0.001), (3, 0.5)], Level, 0.1)  # still a good one
    assert "no longer finite" in has_exploded([(1, 2.0), (2, math.nan)], Level, 0.1)
    assert not has_exploded([(1, 2.0)], Level, 0.1)


def test_at_chance_needs_both_the_score_and_the_loss():
    class Level:
        loss, score, error = 2.3, 0.1, 0.01

    def at_chance(losses, accuracy):
        numbered = list(enumerate(losses, 1))
        return is_at_chance(numbered, accuracy, Level, "accuracy", (3, 9), 0.1)

    assert "does not fall" in at_chance([9.0, 2.31, 4.0], 0.1)
    assert "try other learning rates" in at_chance([9.0, 4.0, 4.0], 0.11)
    assert not at_chance([9.0, 5.0, 4.0], 0.11)  # on its way
    assert "still at its start" in at_chance([2.31, 2.3, 2.305], 0.3)
    assert not at_chance([9.0, 4.0, 4.0], 0.13)  # more than two standard errors above
    assert not at_chance([2.4, 2.2, 2.25], 0.1)  # the loss has learned something


def test_a_constant_answer_scores_what_the_data_say():
    y = torch.tensor([0, 0, 0, 1])
    clients = [((torch.zeros(4, 2), y), (torch.zeros(4, 2), y))] * 3
    found = constant(from_clients(clients, val_fraction=0.0), nn.functional.cross_entropy)
    assert found.score == pytest.approx(0.75)
    assert found.loss == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-5)
    assert found.error == pytest.approx(math.sqrt(3 * 0.75 * 0.25 / 4) / 3)
    numbers = [((torch.zeros(4, 2), y.float() * 2), (torch.zeros(4, 2), y.float() * 2))] * 2
    found = constant(from_clients(numbers, val_fraction=0.0), nn.functional.mse_loss)
    assert found.loss == pytest.approx(0.75)
    assert found.score == pytest.approx(math.sqrt(0.75))


@pytest.mark.parametrize(
    ("values", "alarm"),
    [
        ([0.0, 1.0], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([0.0, 1.5], False),
        ([0.0, 2.0, 7.0], False),  # counts and prices have gaps
        ([-1.0, 0.0, 1.0], False),
        ([3.0], False),
        (list(map(float, range(40))), False),
    ],
)
def test_floats_that_may_be_classes(values, alarm):
    y = torch.tensor(values * 200)
    population = from_clients([(torch.zeros(len(y), 2), y)] * 2)
    assert bool(may_be_classes(population)) == alarm
    few = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert not may_be_classes(from_clients([(torch.zeros(4, 2), few)] * 2))


def test_adapting_harms_if_clients_agree_that_it_does():
    def scores(values):
        return {c: {"test_accuracy": v, "test_count": 10.0} for c, v in enumerate(values)}

    before = scores([0.8, 0.7, 0.75, 0.9])
    worse = adapting_harms(before, scores([0.6, 0.5, 0.6, 0.7]), "accuracy", 3)
    assert "60.0 % instead of 78.8 %" in worse
    assert "fewer epochs than 3" in worse
    assert not adapting_harms(before, scores([0.79, 0.69, 0.74, 0.89]), "accuracy", 1)  # a point
    assert not adapting_harms(before, scores([0.1, 0.9, 0.9, 1.0]), "accuracy", 1)  # one client
    assert not adapting_harms(before, before, "accuracy", 1)
