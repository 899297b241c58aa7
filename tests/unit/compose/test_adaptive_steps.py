"""The control of local steps: its formulae, its costs, what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import coterie
from coterie.client.losses import hinge
from coterie.compose.adaptive_steps import (
    GRADIENT,
    KEY,
    Control,
    Costs,
    Estimates,
    Measured,
    Resource,
    _ended,
    _MeasuringFederation,
    adaptive_steps,
    best_steps,
    bound,
    drift,
    weight_of,
)
from coterie.compose.grouped import grouped
from coterie.compose.robust import coordinate_median, with_robust_aggregation
from coterie.compose.server_optimizer import momentum_step, with_server_optimizer
from coterie.core.messages import Mean, Order, Reply, Upload
from coterie.core.method import Budget, Round, Spent, State
from coterie.core.weights import Layout
from coterie.errors import ConfigError
from coterie.methods import METHODS, make
from coterie.methods.adaptive_tau import adaptive_tau
from coterie.models import make_model
from scripted import Scripted, linears, setup, weights

LINE = linears((1, 1))


def row(*steps):
    return np.array(steps, dtype=float)


# --- h and G ------------------------------------------------------------------------------------


def test_drift_by_hand():
    # η = 0.5, β = 2, δ = 3: (ηβ + 1)^τ is 2^τ; 1.5·(2^τ − 1) − 1.5τ.
    gaps = drift(row(1, 2, 3, 5), 0.5, Estimates(1.0, 2.0, 3.0))
    assert gaps.tolist() == pytest.approx([0, 1.5, 6.0, 39.0])


numbers = st.floats(1e-3, 1e3)


@given(numbers, numbers, numbers)
@settings(max_examples=60, deadline=None)
def test_one_step_does_not_drift_and_more_drift_more(lr, beta, delta):
    gaps = drift(np.arange(1.0, 101), lr, Estimates(1.0, beta, delta))
    assert gaps[0] == 0
    assert (np.diff(gaps[np.isfinite(gaps)]) > 0).all()
    assert not np.isnan(gaps).any()


def test_equal_clients_do_not_drift_nor_do_those_with_straight_losses():
    for seen in (Estimates(1.0, 2.0, 0.0), Estimates(1.0, 0.0, 2.0), Estimates(0.0, 0.0, 0.0)):
        assert drift(row(1, 50, 100), 0.1, seen).tolist() == [0, 0, 0]


def test_bound_by_hand():
    # c = 1, b = 9 of 100: R' = 90; at τ = 2 A = 11/180, A/(2ηφ) = 0.61111 with η = 0.5, φ = 0.1.
    # ρh = 2·1.5 = 3, over ηφτ = 0.1 it is 30: 0.61111 + √(0.37346 + 30) + 3 = 9.12232.
    # At τ = 1 h = 0: A/(ηφ) = (10/90)/0.05 = 2.22222.
    seen, resource = Estimates(2.0, 2.0, 3.0), Resource("s", 100.0, 0.0, 1.0, 9.0)
    bounds = bound(row(1, 2), 0.5, 0.1, seen, [resource])
    assert bounds.tolist() == pytest.approx([2.22222, 9.12232], abs=1e-5)


def test_what_is_spent_already_is_no_part_of_the_bound():
    seen = Estimates(2.0, 2.0, 3.0)
    ends = [
        bound(row(1, 2, 3), 0.5, 0.1, seen, [Resource("s", 100.0, spent, 1.0, 9.0)])
        for spent in (0.0, 60.0)
    ]
    assert (ends[0] == ends[1]).all()


def plain_bound(tau, lr, phi, rho, beta, delta, resources):
    """G with nothing but Python's arithmetic, as the paper writes it."""
    h = delta / beta * ((lr * beta + 1) ** tau - 1) - lr * delta * tau
    a = max((c * tau + b) / ((budget - b - c) * tau) for budget, c, b in resources)
    root = math.sqrt(a**2 / (4 * lr**2 * phi**2) + rho * h / (lr * phi * tau))
    return a / (2 * lr * phi) + root + rho * h


costly = st.tuples(st.floats(50, 1000), st.floats(0.01, 5), st.floats(0.01, 20))
unit = st.floats(0.01, 2)


@given(unit, unit, unit, unit, st.lists(costly, min_size=1, max_size=2), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_the_search_finds_what_trying_all_finds(rho, beta, delta, lr, resources, most):
    tried = [plain_bound(tau, lr, 0.025, rho, beta, delta, resources) for tau in range(1, most + 1)]
    made = [Resource("", budget, 0.0, c, b) for budget, c, b in resources]
    steps = best_steps(most, lr, 0.025, Estimates(rho, beta, delta), made)
    assert tried[steps - 1] <= min(tried) * (1 + 1e-9)


def test_equal_clients_make_all_the_steps_they_may_if_aggregation_costs_anything():
    same = Estimates(1.0, 2.0, 0.0)
    assert best_steps(70, 0.1, 0.025, same, [Resource("s", 100.0, 0.0, 1.0, 0.1)]) == 70
    assert best_steps(70, 0.1, 0.025, same, [Resource("s", 100.0, 0.0, 1.0, 0.0)]) == 1


def test_dear_aggregation_makes_more_steps_and_differing_clients_fewer():
    def found(b, delta):
        seen = Estimates(1.0, 1.0, delta)
        return best_steps(100, 0.01, 0.025, seen, [Resource("s", 1000.0, 0.0, 1.0, b)])

    assert found(1, 0.5) < found(20, 0.5) < found(50, 0.5) < 100
    assert found(20, 2.0) < found(20, 0.5) < found(20, 0.1)


def test_steps_are_infinitely_bad_rather_than_not_a_number():
    wild = Estimates(1e200, 1e100, 1e200)
    bounds = bound(np.arange(1.0, 1001), 1.0, 0.025, wild, [Resource("s", 10.0, 0.0, 1.0, 1.0)])
    assert not np.isnan(bounds).any()
    assert best_steps(1000, 1.0, 0.025, wild, [Resource("s", 10.0, 0.0, 1.0, 1.0)]) == 1
    flat = bound(row(1, 500), 1.0, 0.025, replace(wild, rho=0.0), [])
    assert flat.tolist() == [0, 0]  # ρ = 0: no drift can raise the loss


def test_a_budget_smaller_than_a_round_leaves_one_step():
    assert best_steps(10, 0.1, 0.025, Estimates(1, 1, 0), [Resource("s", 2.0, 0.0, 1.0, 1.0)]) == 1


# --- costs --------------------------------------------------------------------------------------


def test_what_still_fits_by_hand():
    # 100 s, 80 spent, 2 a step, 3 an aggregation: 80 + 2(τ+1) + 6 ≤ 100 up to τ = 6.
    resource = Resource("s", 100.0, 80.0, 2.0, 3.0)
    assert resource.most_steps() == 6
    assert not resource.runs_short(5)  # 98
    assert resource.runs_short(6)  # 100: nothing will be left
    assert Resource("s", 100.0, 91.0, 2.0, 3.0).most_steps() == 0
    assert Resource("s", 100.0, 95.0, 2.0, 3.0).most_steps() == 0
    assert Resource("bytes", 100.0, 94.0, 0.0, 3.0).most_steps() == math.inf
    assert Resource("bytes", 100.0, 95.0, 0.0, 3.0).most_steps() == 0
    assert Resource("bytes", 100.0, 100.0, 0.0, 0.0).most_steps() == 0


def test_costs_are_means_over_rounds():
    # Steps take 3/4 of 4 s and all of 6 s: 9 s for 2 + 4 steps. The rest: 1 + 3 + 4 + 1 s waited.
    costs = Costs().plus(2, 0.75, Spent(100, 4.0, 3.0)).plus(4, 1.0, Spent(300, 6.0, 4.0, 1.0))
    seconds, sent = costs.resources(Spent(400, 10.0, 7.0, 1.0), Budget(1000, 50.0))
    assert (seconds.budget, seconds.spent) == (50, 18)
    assert (seconds.step, seconds.exchange) == pytest.approx((1.5, 4.5))
    assert (sent.budget, sent.spent, sent.step, sent.exchange) == (1000, 400, 0, 200)


def test_only_what_is_bounded_counts():
    costs = Costs().plus(1, 1.0, Spent(100, 4.0, 3.0))
    assert [r.name for r in costs.resources(Spent(), Budget(seconds=5.0))] == ["5 s"]
    assert [r.name for r in costs.resources(Spent(), Budget(bytes=800))] == ["800 bytes"]
    assert Costs().resources(Spent(), Budget(bytes=800))[0].exchange == 0


# --- what a round measured ------------------------------------------------------------------------


def mean(examples, numbers, gradient):
    arrays = {KEY: torch.tensor(numbers, dtype=torch.float64), GRADIENT: torch.tensor(gradient)}
    return Mean(arrays, examples, (0,), {})


def test_groups_count_by_their_samples():
    # Group 1 (10 samples): half of them know ρ = 4, β = 2; δ² = 25 − 16 = 9. Group 2 (30): all know
    # ρ = 1, β = 6; δ² = 6 − 5 = 1. Known: 0.125 + 0.75; ρ = (0.25·2 + 0.75·1)/0.875.
    first = mean(10, [0.5, 2.0, 1.0, 8.0, 25.0, 0.2], [4.0, 0.0])
    second = mean(30, [1.0, 1.0, 6.0, 4.0, 6.0, 0.6], [1.0, 2.0])
    result = Measured.of([first, second])
    assert result.known == pytest.approx(0.875)
    assert result.rho == pytest.approx(1.25 / 0.875)
    assert result.beta == pytest.approx(4.75 / 0.875)
    assert result.delta == pytest.approx(math.sqrt(0.25 * 9 + 0.75 * 1))
    assert result.loss == pytest.approx(5.0)
    assert result.work == pytest.approx(0.5)
    assert Measured.of([]) is None


def test_rounding_is_no_difference_between_clients():
    gradient = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    square = float(gradient.double().square().sum())
    for error in (1e-7, -1e-7):
        numbers = [1.0, 1.0, 1.0, 1.0, square * (1 + error), 1.0]
        assert Measured.of([mean(5, numbers, gradient.tolist())]).delta == 0
    numbers[4] = square * (1 + 1e-6)
    assert Measured.of([mean(5, numbers, gradient.tolist())]).delta > 0


# --- the federation in between --------------------------------------------------------------------


def upload(value, extra=True, **metrics):
    arrays = {"model": weights(LINE, value, value)}
    if extra:
        arrays |= {KEY: torch.full((6,), float(value)).double(), GRADIENT: torch.zeros(2)}
    return Upload(arrays, metrics)


def test_those_who_train_are_told_the_steps_and_others_are_not():
    fed = Scripted(lambda o: upload(1, o.task == "train"), range(2))
    asking = _MeasuringFederation(fed, 7)
    orders = [Order(0, "train", {"0": weights(LINE, 0, 0)}, {"mine": 3}), Order(1, "warm-up")]
    asking.gather(orders)
    (_, asked, _) = fed.asked[0]
    assert dict(asked[0].config) == {"mine": 3, "steps": 7, KEY: True}
    assert dict(asked[1].config) == {}
    assert orders[0].config == {"mine": 3}


def test_the_method_does_not_see_what_was_measured():
    fed = Scripted(lambda o: upload(o.client), range(4))
    asking = _MeasuringFederation(fed, 1)
    model = weights(LINE, 0, 0)
    orders = [Order(c, "train", {str(c // 2): model}) for c in range(4)]
    means = asking.reduce(orders, {c: {c // 2: 1.0} for c in range(4)})
    assert all(set(m.arrays) == {"model"} for m in means.values())
    assert [float(m.arrays[KEY][0]) for m in asking.means] == [0.5, 2.5]
    replies = _MeasuringFederation(fed, 1).gather(orders)
    assert all(set(r.arrays) == {"model"} for r in replies)
    looking = _MeasuringFederation(fed, 1)
    looking.gather(orders)  # by the model that each was offered
    assert [float(m.arrays[KEY][0]) for m in looking.means] == [0.5, 2.5]


def test_single_replies_of_clients_that_pick_go_by_their_pick():
    fed = Scripted(lambda o: upload(o.client, slot=float(o.client % 2)), range(4))
    model = weights(LINE, 0, 0)
    asking = _MeasuringFederation(fed, 1)
    asking.gather([Order(c, "train", {"0": model, "1": model}) for c in range(4)])
    assert [float(m.arrays[KEY][0]) for m in asking.means] == [1.0, 2.0]
    means = asking.average([Reply(0, 1, {"model": model}, {})], {0: {0: 1.0}})
    assert set(means) == {0}


# --- what fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (coterie.local, "local shares nothing"),
        (coterie.user_centric, "mixes models with weights"),
        (lambda: coterie.fedfomo(m=1), "fedfomo"),
        (lambda: coterie.dc_pfl(alpha=1), "exchange of its own"),
        (coterie.dc_pfl, "dc-pfl"),
        (coterie.fedtsdp, "fedtsdp"),
        (lambda: coterie.layer_wise(coterie.fedavg(), 2), "skips layers in some rounds"),
        (adaptive_tau, "best models seen"),
    ],
)
def test_what_does_not_fit_is_refused(inner, why):
    with pytest.raises(ConfigError, match=f"{why}.*adaptive-tau cannot wrap it"):
        adaptive_steps(inner())


def test_nor_can_others_go_around_it():
    with pytest.raises(ConfigError, match="measures the gradient of every layer"):
        coterie.layer_wise(adaptive_tau(), 2)
    with pytest.raises(ConfigError, match="which a step would move"):
        with_server_optimizer(adaptive_tau(), momentum_step(1.0, 0.9))
    with pytest.raises(ConfigError, match="plain means of gradients"):
        with_robust_aggregation(adaptive_tau(), coordinate_median)


def test_a_budget_must_be_given():
    start = weights(LINE, 0, 0)
    check = adaptive_tau().check
    with pytest.raises(ConfigError) as refused:
        check(setup(start, range(2)))
    text = "method adaptive-tau needs a budget: set stop.seconds or stop.bytes"
    assert str(refused.value) == text
    check(setup(start, range(2), budget=Budget(seconds=3.0)))
    check(setup(start, range(2), budget=Budget(bytes=3.0)))


def test_the_inner_methods_check_still_holds_and_some_layer_must_be_shared():
    enough = Budget(seconds=3.0)
    with pytest.raises(ConfigError, match="k = 9 models"):
        adaptive_steps(coterie.ifca(k=9)).check(setup(weights(LINE, 0, 0), range(2), budget=enough))
    alone = adaptive_steps(coterie.fedper(k=1))  # the one layer is personal
    with pytest.raises(ConfigError, match="fedper shares no layer"):
        alone.check(setup(weights(LINE, 0, 0), range(2), budget=enough))


def test_it_is_a_piece_for_others(monkeypatch):
    monkeypatch.setitem(METHODS, "adaptive-tau", adaptive_tau)
    made = make("ifca+adaptive-tau", {"k": 2, "phi": 0.1})
    assert made.name == "ifca+adaptive-tau"
    assert {"train", "pick", "tau.loss"} <= set(made.tasks)
    assert make("scaffold+adaptive-tau", {}).check is not None
    with pytest.raises(ConfigError, match="both say what wraps the method"):
        make("fedadam+adaptive-tau", {})


@pytest.mark.parametrize(
    ("key", "value"), [("phi", 0.0), ("gamma", 1), ("tau_max", 0), ("sample", -1)]
)
def test_parameters_have_ranges(key, value):
    with pytest.raises(ConfigError, match=f"{key} = "):
        adaptive_tau(**{key: value})


def built(*modules, frozen=()):
    model = nn.Sequential(*modules)
    for place in frozen:
        model[place].requires_grad_(False)
    return Layout.of(model)


@pytest.mark.parametrize(
    ("layout", "phi", "words"),
    [
        (built(nn.Flatten(), nn.Linear(4, 3)), 0.025, "convex"),
        (built(nn.Linear(4, 3, bias=False)), 0.025, "convex"),
        (Layout.of(make_model("logistic", (1, 8, 8), 10)), 0.025, "convex"),
        (Layout.of(make_model("mlp", (1, 8, 8), 10, hidden=())), 0.025, "convex"),
        (built(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), frozen=[0]), 0.025, "convex"),
        (Layout.of(make_model("mlp", (1, 8, 8), 10)), 5e-5, "2 trained layers"),
        (Layout.of(make_model("lenet5", (1, 28, 28), 10)), 5e-5, "5 trained layers"),
        (built(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), frozen=[2]), 5e-5, "frozen layers fo"),
        (built(nn.Linear(4, 3), nn.BatchNorm1d(3)), 5e-5, "more than a weight and a bias"),
    ],
)
def test_phi_is_the_authors_for_the_kind_of_model(layout, phi, words):
    result, why = weight_of("auto", layout)
    assert result == phi
    assert words in why
    assert weight_of(0.7, layout) == (0.7, "it was given")


def test_it_travels_by_name():
    made = adaptive_steps(coterie.fedprox(mu=0.5), 0.1, 5, 50, 8)
    back = made.source.make()
    assert (back.name, set(back.tasks)) == (made.name, set(made.tasks))
    assert dict(made.source.parameters) == {
        "inner": {
            "module": "coterie.methods.fedavg",
            "factory": "fedprox",
            "parameters": {"mu": 0.5},
        },
        "phi": 0.1, "gamma": 5, "tau_max": 50, "sample": 8,
    }  # fmt: skip
    assert adaptive_steps(grouped("mine")).source is None


# --- the loss of an SVM ---------------------------------------------------------------------------


def test_squared_hinges_by_hand():
    # Sample 1 (class 1): scores 0.5, 2, −3: class 0 should be below −1: 1.5² = 2.25; the others do.
    # Sample 2 (class 0): −0.5, −2, 0: 1.5² + 0 + 1² = 3.25. The mean is 2.75.
    out = torch.tensor([[0.5, 2.0, -3.0], [-0.5, -2.0, 0.0]])
    assert float(hinge(out, torch.tensor([1, 0]))) == pytest.approx(2.75)


def test_the_hinge_is_for_classes():
    from coterie.experiment.config import criterion_of
    from support import digits, quadratics

    assert criterion_of("hinge", digits()) is hinge
    with pytest.raises(ConfigError, match="does not fit targets that are numbers"):
        criterion_of("hinge", quadratics([[1.0]]))


def test_with_the_best_models_come_their_groups_and_who_joined_them_since_stays():
    models = {"a": object(), "b": object()}
    best = {"loss": 1.0, "models": {"a": models["a"]}, "groups": {0: "a"}, "memory": {}}
    state = State(models, {0: "b", 1: "a", 2: "b"})
    short = Resource("9 s", 9.0, 9.0, 1.0, 1.0)
    ended = _ended(None, coterie.fedavg(), state, Round(3, [0, 1, 2]), Control(best=best), short)
    assert dict(ended.models) == {"a": models["a"]}
    assert dict(ended.groups) == {0: "a", 1: "a"}
    assert "9 s" in ended.over
