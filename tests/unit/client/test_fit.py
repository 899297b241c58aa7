"""The training loop against PyTorch's own, and its derived randomness."""

import pytest
import torch
from torch import nn

from coterie.client.fit import (
    FitCall,
    FlatModel,
    Schedule,
    data_gradient,
    decode,
    fit,
    optimiser_class,
    outputs,
)
from coterie.client.metrics import scores
from coterie.client.objectives import Objective, erm, proximal
from coterie.core.weights import Weights
from coterie.data import Split
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import torch_generator

LOSS = nn.functional.cross_entropy


def network(dropout=0.0, norm=False):
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3))


def data(n=23):
    generator = torch.Generator().manual_seed(5)
    return Split(
        torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )


def train(schedule, module=None, objective=None, split=None, seeds=(7, 8)):
    model = FlatModel(module or network())
    call = FitCall(model.weights(), split or data(), objective or erm(), schedule, *seeds)
    return fit(model, call, LOSS)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ({"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}),
        (
            {"momentum": 0.9, "options": {"nesterov": True}},
            {"momentum": 0.9, "nesterov": True},
        ),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_sgd_is_that_of_torch(ours, theirs, norm):
    found = train(Schedule(epochs=2, batch_size=5, lr=0.1, **ours), network(norm=norm))
    module = network(norm=norm)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, **theirs)
    split, generator, losses = data(), torch_generator(7), []
    for _ in range(2):
        order = torch.randperm(len(split), generator=generator)
        for rows in order.split(5):
            optimiser.zero_grad()
            loss = LOSS(module(split.x[rows]), split.y[rows])
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert torch.allclose(found.weights.vector, Weights.of(module).vector, atol=1e-6)
    assert found.steps == 10
    assert found.loss == pytest.approx(sum(losses) / 10, abs=1e-6)


@pytest.mark.parametrize("name", ["Adam", "adamw", "RMSprop", "Adagrad"])
def test_other_optimisers_are_those_of_torch(name):
    found = train(Schedule(epochs=1, batch_size=5, lr=0.01, optimizer=name))
    module = network()
    optimiser = optimiser_class(name)(module.parameters(), lr=0.01)
    split = data()
    order = torch.randperm(len(split), generator=torch_generator(7))
    for rows in order.split(5):
        optimiser.zero_grad()
        LOSS(module(split.x[rows]), split.y[rows]).backward()
        optimiser.step()
    assert torch.allclose(found.weights.vector, Weights.of(module).vector, atol=1e-6)


def test_optimisers_and_their_arguments_are_checked():
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        optimiser_class("adan")
    with pytest.raises(ConfigError, match="unknown optimizer 'LBFGS'"):
        optimiser_class("LBFGS")
    with pytest.raises(ConfigError, match=r"'beta'.*did you mean 'betas'"):
        train(Schedule(optimizer="adam", options={"beta": 1}))


def test_dropout_comes_from_its_seed_and_leaves_the_global_generator_alone():
    schedule = Schedule(epochs=1, batch_size=5, lr=0.1)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = train(schedule, network(0.5))
    torch.manual_seed(99)
    again = train(schedule, network(0.5))
    other = train(schedule, network(0.5), seeds=(7, 9))
    assert torch.equal(first.weights.vector, again.weights.vector)
    assert not torch.equal(first.weights.vector, other.weights.vector)
    torch.manual_seed(3)
    module = network(0.5)  # draws from the global generator, as network() above did
    assert torch.equal(Weights.of(module).vector, Weights.of(network(0.5)).vector)
    torch.random.set_rng_state(before)


def test_fit_does_not_disturb_the_global_generator():
    model = FlatModel(network(0.5))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    fit(model, FitCall(model.weights(), data(), erm(), Schedule(), 7, 8), LOSS)
    assert torch.equal(torch.rand(1), expected)


def test_batches_larger_than_the_chunk_and_smaller_give_every_sample_once():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            seen.append(x[:, 0].clone())
            return torch.zeros(len(x), 3) + self.w

    split = Split(torch.arange(1100.0)[:, None], torch.zeros(1100, dtype=torch.int64))
    for size in (7, 600, 5000):
        seen.clear()
        train(Schedule(epochs=1, batch_size=size), Spy(), split=split)
        assert sorted(torch.cat(seen).tolist()) == list(range(1100))
        assert all(len(s) == size for s in seen[:-1])


def test_batch_norm_never_meets_a_batch_of_one():
    found = train(Schedule(epochs=1, batch_size=11, lr=0.1), network(norm=True))  # 23 = 11 + 11 + 1
    assert found.steps == 2


def test_divergence_is_an_error():
    with pytest.raises(TrainingError, match="no longer finite"):
        train(Schedule(epochs=40, batch_size=5, lr=1e30))


def test_images_are_decoded_to_minus_one_to_one():
    x = torch.tensor([0, 255], dtype=torch.uint8)
    assert decode(x).tolist() == pytest.approx([-1, 1], abs=1e-6)
    assert decode(torch.tensor([2.5])).tolist() == [2.5]


@pytest.mark.parametrize("norm", [False, True])
def test_gradient_over_all_data_is_the_mean_over_batches(norm):
    split = data(600)
    model = FlatModel(network(norm=norm))
    start = model.weights()
    found, loss = data_gradient(model, start, split, LOSS)
    module = network(norm=norm).eval()
    whole = LOSS(module(split.x), split.y)
    whole.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert torch.allclose(found.parameters, expected, atol=1e-6)
    assert loss == pytest.approx(float(whole.detach()), abs=1e-6)
    assert torch.equal(model.weights().vector, start.vector)


def test_outputs_are_those_of_evaluation_mode():
    model = FlatModel(network(0.9, norm=True))
    split = data(600)
    expected = network(0.9, norm=True).eval()(split.x)
    assert torch.allclose(outputs(model, model.weights(), split.x), expected, atol=1e-6)


def test_proximal_gradient_is_that_of_its_value():
    penalty = proximal(0.7).penalties[0]
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    start = torch.randn(5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(penalty.value(theta, start), theta)
    gradient = torch.ones(5, dtype=torch.float64)
    penalty.add_gradient(gradient, theta.detach(), start)
    assert torch.allclose(gradient, expected + 1)


def test_objectives_work_on_a_row_and_on_rows_alike():
    penalty = proximal(0.7).penalties[0]
    thetas, starts = torch.randn(3, 5), torch.randn(3, 5)
    together = torch.zeros(3, 5)
    penalty.add_gradient(together, thetas, starts)
    for row, theta, start in zip(together, thetas, starts, strict=True):
        alone = torch.zeros(5)
        penalty.add_gradient(alone, theta, start)
        assert torch.equal(row, alone)
    values = penalty.value(thetas, starts)
    assert torch.allclose(
        values, torch.stack([penalty.value(t, s) for t, s in zip(thetas, starts, strict=True)])
    )


def test_objectives_compose_and_zero_strength_is_nothing():
    assert proximal(0.0) == erm() == Objective()
    both = proximal(1.0) + proximal(2.0)
    gradient = torch.zeros(2)
    for penalty in both.penalties:
        penalty.add_gradient(gradient, torch.ones(2), torch.zeros(2))
    assert gradient.tolist() == [3, 3]


def test_proximal_can_be_anchored_elsewhere():
    module = nn.Linear(1, 1)
    anchor = Weights.of(module) * 0 + Weights.of(module) * 0
    gradient = torch.zeros(2)
    proximal(2.0, anchor).penalties[0].add_gradient(gradient, torch.ones(2), torch.ones(2))
    assert gradient.tolist() == [2, 2]


def test_scores_of_classes_against_scikit_learn():
    from sklearn.metrics import balanced_accuracy_score, f1_score

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        out = torch.randn(30, 5, generator=generator)
        y = torch.randint(0, 4, (30,), generator=generator)  # a class that is never there
        (found,) = scores([out], [y], LOSS, 5)
        guess = out.argmax(1)
        assert found["accuracy"] == pytest.approx(float((guess == y).float().mean()))
        assert found["balanced_accuracy"] == pytest.approx(
            sum(float((guess[y == c] == c).float().mean()) for c in y.unique()) / len(y.unique())
        )
        assert found["f1"] == pytest.approx(f1_score(y, guess, average="macro"))
    assert (
        balanced_accuracy_score(y, y)
        == scores([nn.functional.one_hot(y, 5) * 9.0], [y], LOSS, 5)[0]["balanced_accuracy"]
    )


def test_scores_of_several_clients_are_those_of_each_alone():
    """To the bit, whatever classes the others have."""
    generator = torch.Generator().manual_seed(0)
    sizes = [5, 0, 30, 1, 12]
    outs = [torch.randn(n, 12, generator=generator) for n in sizes]
    labels = [torch.randint(3 + i, (n,), generator=generator) for i, n in enumerate(sizes)]
    together = scores(outs, labels, LOSS, 12)
    assert together == [scores([o], [y], LOSS, 12)[0] for o, y in zip(outs, labels, strict=True)]
    assert together[1] == {"count": 0.0}


def test_scores_of_a_regression_against_scikit_learn():
    from sklearn.metrics import mean_absolute_error, r2_score

    out, y = torch.tensor([1.0, 2.5, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    loss = lambda o, t: nn.functional.mse_loss(o.reshape(t.shape), t)  # noqa: E731
    (found,) = scores([out[:, None]], [y], loss, None)
    assert found["r2"] == pytest.approx(r2_score(y, out))
    assert found["mae"] == pytest.approx(mean_absolute_error(y, out))
    assert found["rmse"] == pytest.approx(found["loss"] ** 0.5)
    assert scores([out], [y[:0]], LOSS, None) == [{"count": 0.0}]
