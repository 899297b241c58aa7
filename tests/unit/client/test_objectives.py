"""Objectives beyond the loss of the data: tilts, representations, gradients of one's own, parts."""

import math

import pytest
import torch
from torch import nn

from coterie.client import GradientRule, Objective, contrastive, erm, linear, proximal
from coterie.client.fit import FitCall, FlatModel, fit
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data import Split
from coterie.errors import ConfigError
from coterie.seeds import torch_generator
from support import Constant

LOSS = nn.functional.cross_entropy


def network(dropout=0.0, norm=False):
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))


def data(n=23):
    generator = torch.Generator().manual_seed(5)
    return Split(
        torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )


def train(model, objective, part=None, split=None, criterion=LOSS, start=None, **schedule):
    settings = Schedule(**({"epochs": 1, "batch_size": 5, "lr": 0.1} | schedule))
    begun = start or model.weights()
    layout = None if part is None else begun.layout.only(part)
    call = FitCall(begun, split or data(), objective, settings, 7, 8, layout)
    return fit(model, call, criterion)


def other(model, seed):
    """Random weights of the same model; running variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    weights = model.weights()
    return Weights(
        weights.layout, weights.vector + torch.rand(weights.layout.size, generator=generator)
    )


def scalar(start=0.0):
    """A model of one number θ, and ten samples at 10: the loss (θ − 10)², gradient 2(θ − 10)."""
    split = Split(torch.zeros(10, 1), torch.full((10,), 10.0))
    return FlatModel(Constant(start)), {"split": split, "criterion": nn.functional.mse_loss}


# --- linear ---------------------------------------------------------------------------------------


def test_the_gradient_of_a_tilt_is_the_tilt():
    slope = Weights.of(network()) * 3
    penalty = linear(slope).penalties[0]
    theta = torch.randn(slope.layout.trainable, requires_grad=True)
    (expected,) = torch.autograd.grad(penalty.value(theta, theta.detach()), theta)
    gradient = torch.ones(slope.layout.trainable)
    penalty.add_gradient(gradient, theta.detach(), torch.zeros_like(gradient))
    assert torch.allclose(gradient, expected + 1)
    assert torch.allclose(expected, slope.vector)


def test_a_tilt_works_on_a_row_and_on_rows_alike():
    slope = Weights.of(nn.Linear(4, 1))
    penalty, rows, together = linear(slope).penalties[0], torch.randn(3, 5), torch.zeros(3, 5)
    penalty.add_gradient(together, rows, rows)
    assert torch.equal(together, slope.vector.expand(3, 5))
    values = penalty.value(rows, rows)
    assert torch.allclose(values, torch.stack([penalty.value(r, r) for r in rows]))


def test_a_tilt_moves_the_optimum_of_a_quadratic():
    # (θ − 10)² + 4θ is least where 2(θ − 10) + 4 = 0.
    model, on = scalar()
    slope = Weights(model.layout, torch.tensor([4.0]))
    found = train(model, linear(slope), epochs=100, **on)
    assert float(found.weights.vector) == pytest.approx(8.0, abs=1e-4)


def test_a_tilt_leaves_buffers_alone():
    model = FlatModel(network(norm=True))
    start = model.weights()
    end = start.layout.trainable
    vector = torch.full((start.layout.size,), 100.0)
    vector[:end] = 0.0
    tilted = train(model, linear(Weights(start.layout, vector)), start=start)
    assert torch.equal(tilted.weights.vector, train(model, erm(), start=start).weights.vector)


# --- contrastive ----------------------------------------------------------------------------------


def by_formula(theta, split, mu, temperature, towards, away):
    """The whole objective in float64, written out without PyTorch's losses."""

    def hidden(vector):
        w, b = vector[:24].view(6, 4), vector[24:30]
        return torch.tanh(split.x.double() @ w.T + b)

    z = hidden(theta)
    scores = z @ theta[30:48].view(3, 6).T + theta[48:]
    chosen = scores[torch.arange(len(z)), split.y]
    loss = (scores.exp().sum(1).log() - chosen).mean()
    near, far = (
        (z * o).sum(1) / (z.square().sum(1).sqrt() * o.square().sum(1).sqrt()) / temperature
        for o in (hidden(towards), hidden(away))
    )
    return float(loss), float(-mu * (near.exp() / (near.exp() + far.exp())).log().mean())


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (3.0, 0.2)])
def test_the_contrastive_gradient_is_that_of_its_formula(mu, temperature):
    model, split = FlatModel(network()), data()
    start, towards, away = model.weights(), other(model, 2), other(model, 3)
    found = train(model, contrastive(mu, temperature, towards, away), batch_size=50, lr=1.0)
    gradient = (start.vector - found.weights.vector).double()
    at = (mu, temperature, towards.vector.double(), away.vector.double())
    expected = torch.empty(51, dtype=torch.float64)
    for i in range(51):
        step = torch.zeros(51, dtype=torch.float64)
        step[i] = 1e-5
        up, down = (sum(by_formula(start.vector.double() + s, split, *at)) for s in (step, -step))
        expected[i] = (up - down) / 2e-5
    assert torch.allclose(gradient, expected, atol=1e-5)
    loss, term = by_formula(start.vector.double(), split, *at)
    assert found.loss == pytest.approx(loss, abs=1e-6)  # the loss of the data alone
    assert term > 0.1


def test_equal_models_give_a_constant_term():
    model = FlatModel(network())
    start, towards = model.weights(), other(model, 2)
    same = train(model, contrastive(5.0, 0.5, towards, towards), start=start)
    plain = train(model, erm(), start=start)
    assert torch.allclose(same.weights.vector, plain.weights.vector, atol=1e-6)


def test_no_strength_is_no_term():
    model = FlatModel(network())
    assert contrastive(0.0, 0.5, model.weights(), model.weights()) == erm()


@pytest.mark.parametrize("bn", ["shared", "local"])
def test_further_passes_touch_neither_buffers_nor_dropout_nor_the_other_models(bn):
    # Where the learning rate moves nothing, buffers and the losses under dropout show every pass.
    model = FlatModel(network(dropout=0.5, norm=True), bn=bn)
    start, towards, away = model.weights(), other(model, 2), other(model, 3)
    before = towards.vector.clone(), away.vector.clone()
    plain = train(model, erm(), start=start, lr=1e-300, epochs=2)
    found = train(model, contrastive(5.0, 0.5, towards, away), start=start, lr=1e-300, epochs=2)
    assert not torch.equal(plain.weights.vector, start.vector)
    assert torch.equal(found.weights.vector, plain.weights.vector)
    assert found.loss == plain.loss
    assert torch.equal(towards.vector, before[0])
    assert torch.equal(away.vector, before[1])


def test_the_other_models_are_run_in_evaluation_mode():
    # Their representations come from running statistics: other buffers, another gradient.
    model = FlatModel(network(norm=True))
    start, towards, away = model.weights(), other(model, 2), other(model, 3)
    vector = towards.vector.clone()
    vector[towards.layout.trainable :] += 1
    changed = Weights(towards.layout, vector)
    first, again, moved = (
        train(model, contrastive(5.0, 0.5, t, away), start=start).weights.vector
        for t in (towards, towards, changed)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, moved)


def test_the_representation_is_what_the_last_layer_gets():
    model = FlatModel(network())
    x = data().x
    out, hidden = model.represent(x)
    w = model.weights().tensors()
    assert torch.allclose(hidden, torch.tanh(x @ w["0.weight"].T + w["0.bias"]), atol=1e-6)
    assert torch.allclose(out, hidden @ w["3.weight"].T + w["3.bias"], atol=1e-6)


# --- a descent of one's own -----------------------------------------------------------------------


def plainly(slope, batches):
    return slope.at(batches[0])


def ahead(slope, batches):
    """The gradient a quarter of a gradient further on."""
    loss, here = slope.at(batches[0]), slope.theta.clone()
    slope.theta.sub_(slope.gradient, alpha=0.25)
    slope.at(batches[0])
    slope.theta.copy_(here)
    return loss


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_descent_by_the_plain_gradient_is_plain_training(momentum):
    model = FlatModel(network(dropout=0.3, norm=True))
    start, schedule = model.weights(), {"epochs": 2, "momentum": momentum, "weight_decay": 0.01}
    plain = train(model, erm(), start=start, **schedule)
    own = train(model, Objective(gradient_rule=GradientRule(1, plainly)), start=start, **schedule)
    assert torch.equal(own.weights.vector, plain.weights.vector)
    assert (own.steps, own.loss) == (plain.steps, plain.loss)


def test_looking_ahead_by_hand():
    # From 0: gradient −20, ahead at 5 it is −10, a step of 0.1: θ = 1. Momentum 0.5, from 1:
    # −18, ahead at 5.5 it is −9, v = −5 − 9: θ = 2.4. The losses are 100 and 81.
    model, on = scalar()
    looking = Objective(gradient_rule=GradientRule(1, ahead))
    on |= {"batch_size": 10, "momentum": 0.5}
    for epochs, theta, loss in ((1, 1.0, 100.0), (2, 2.4, 90.5)):
        model, _ = scalar()
        found = train(model, looking, epochs=epochs, **on)
        assert float(found.weights.vector) == pytest.approx(theta, abs=1e-5)
        assert found.loss == pytest.approx(loss, abs=1e-4)


def test_penalties_come_on_top_of_a_descent():
    # As above: −10, with a tilt of 4 and a pull that is zero at the start: θ = 0.6.
    # Then 2(0.6 − 10) = −18.8, ahead at 5.3 it is −9.4, + 4 + 2·0.6 = −4.2: θ = 1.02.
    model, on = scalar()
    tilt = linear(Weights(model.layout, torch.tensor([4.0])))
    objective = Objective(gradient_rule=GradientRule(1, ahead)) + tilt + proximal(2.0)
    for epochs, theta in ((1, 0.6), (2, 1.02)):
        model, _ = scalar()
        found = train(model, objective, epochs=epochs, batch_size=10, **on)
        assert float(found.weights.vector) == pytest.approx(theta, abs=1e-5)


def test_each_batch_of_a_step_comes_from_a_shuffle_of_its_own():
    seen = [[], [], []]

    def look(slope, batches):
        for rows, (x, _) in zip(seen, batches, strict=True):
            rows.append(x[:, 0].int().tolist())
        return slope.at(batches[0])

    split = Split(torch.arange(23.0)[:, None].expand(23, 4), data().y)
    model = FlatModel(network())
    train(model, Objective(gradient_rule=GradientRule(3, look)), split=split, epochs=2)
    flat = [[r for rows in stream for r in rows] for stream in seen]
    for stream in flat:
        assert sorted(stream[:23]) == sorted(stream[23:]) == list(range(23))
        assert stream[:23] != stream[23:]
    assert len({tuple(stream) for stream in flat}) == 3
    # The first is the shuffle of plain training.
    assert flat[0][:23] == torch.randperm(23, generator=torch_generator(7)).tolist()
    assert [len(rows) for rows in seen[2]] == [5, 5, 5, 5, 3] * 2


def test_a_slope_has_the_gradient_of_the_batch_it_was_last_asked_for():
    found = []

    def look(slope, batches):
        first, second = batches
        for batch in (first, second, first):
            loss = slope.at(batch)
            found.append((float(loss), slope.gradient.clone()))
        return loss

    model = FlatModel(network())
    train(model, Objective(gradient_rule=GradientRule(2, look)), steps=1)
    assert found[0][0] == found[2][0]
    assert torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][1], found[1][1])


def test_a_descent_sees_the_whole_vector_buffers_too():
    def look(slope, batches):
        before = slope.vector.clone()
        loss = slope.at(batches[0])
        assert not torch.equal(slope.vector, before)  # a pass moves running statistics
        assert torch.equal(slope.theta, before[: slope.theta.numel()])
        slope.vector.copy_(before)
        return loss

    model = FlatModel(network(norm=True))
    start = model.weights()
    found = train(model, Objective(gradient_rule=GradientRule(1, look)))
    end = start.layout.trainable
    assert torch.equal(found.weights.vector[end:], start.vector[end:])
    assert not torch.equal(found.weights.parameters, start.parameters)


def test_objectives_add_up():
    tilt = linear(Weights.of(nn.Linear(4, 1)))
    gradient_rule = Objective(gradient_rule=GradientRule(1, plainly))
    both = (
        tilt + gradient_rule + contrastive(1.0, 0.5, Weights.of(network()), Weights.of(network()))
    )
    assert both.gradient_rule is gradient_rule.gradient_rule
    assert len(both.penalties) == len(both.terms) == 1
    assert (gradient_rule + tilt).gradient_rule is gradient_rule.gradient_rule


# --- a part of the model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.3, "momentum": 0.5},
        {"optimizer": "Adam", "weight_decay": 0.3},
        {"clip": 0.1},
    ],
    ids=["sgd", "momentum", "decay", "adam", "clip"],
)
@pytest.mark.parametrize("part", [["0"], ["4"]], ids=["body", "head"])
def test_only_the_part_changes_and_the_rest_is_as_it_was_to_the_bit(schedule, part):
    model = FlatModel(network(norm=True))
    start = other(model, 4)
    objective = proximal(0.3, other(model, 5)) + linear(other(model, 6))
    found = train(model, objective, part, start=start, epochs=3, **schedule)
    body = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    head = ["4.weight", "4.bias"]
    trained = body if part == ["0"] else head
    for name, tensor in found.weights.tensors().items():
        assert torch.equal(tensor, start.tensors()[name]) == (name not in trained)


@pytest.mark.parametrize("part", [["0"], ["4"]], ids=["body", "head"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_a_part_is_training_with_the_rest_frozen(part, clip):
    model = FlatModel(network(dropout=0.3, norm=True))
    schedule = {"epochs": 3, "momentum": 0.9, "weight_decay": 0.1, "clip": clip}
    found = train(model, erm(), part, **schedule).weights.tensors()
    module = network(dropout=0.3, norm=True)
    rest = ["4"] if part == ["0"] else ["0", "1"]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in rest)
    expected = train(FlatModel(module), erm(), **schedule).weights.tensors()
    for name in [n for n in found if n.split(".")[0] not in rest]:
        assert torch.allclose(found[name], expected[name], atol=1e-6)


def test_all_layers_as_a_part_is_plain_training():
    model = FlatModel(network(norm=True))
    start = model.weights()
    whole = train(model, erm(), ["0", "4"], start=start, epochs=2, momentum=0.9)
    plain = train(model, erm(), start=start, epochs=2, momentum=0.9)
    assert torch.allclose(whole.weights.vector, plain.weights.vector, atol=1e-6)
    assert whole.steps == plain.steps


def test_an_empty_part_changes_nothing():
    model = FlatModel(network(norm=True))
    start = model.weights()
    found = train(model, erm(), [], start=start, epochs=2, momentum=0.9)
    assert torch.equal(found.weights.vector, start.vector)
    assert math.isfinite(found.loss)


def test_a_part_can_be_trained_by_a_term_and_a_descent():
    model = FlatModel(network())
    start = model.weights()
    term = contrastive(2.0, 0.5, other(model, 2), other(model, 3))
    for objective in (term, term + Objective(gradient_rule=GradientRule(2, plainly))):
        found = train(model, objective, ["0"], start=start).weights
        assert torch.equal(found.only(["3"]).vector, start.only(["3"]).vector)
        assert not torch.equal(found.only(["0"]).vector, start.only(["0"]).vector)


class Unused(nn.Module):
    """Its last layer in order of registration is never called."""

    def __init__(self, by_name=False):
        super().__init__()
        self.first, self.second, self.by_name = nn.Linear(3, 4), nn.Linear(4, 2), by_name
        if not by_name:
            self.spare = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(input=hidden) if self.by_name else self.second(hidden)


def test_a_last_layer_that_is_never_called_has_no_representation():
    with pytest.raises(ConfigError, match=r"last layer .spare. is not called exactly once"):
        FlatModel(Unused()).represent(torch.zeros(1, 3))


def test_a_last_layer_may_be_called_by_name():
    model = FlatModel(Unused(by_name=True))
    x = torch.randn(5, 3)
    out, hidden = model.represent(x)
    assert torch.equal(hidden, model.module.first(x))
    assert torch.equal(out, model.module.second(hidden))
