"""Clients that train as one stacked model end where each of them ends alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.client import Schedule, erm, linear, proximal
from coterie.client.fit import FitCall, FlatModel, fit
from coterie.client.stacked import fit_stack, why_not_stacked
from coterie.client.together import Together
from coterie.core.weights import Weights
from coterie.data import Split
from coterie.errors import Diverged
from coterie.experiment.experiment import execute
from coterie.models import make_model
from support import ROWS, digits, experiment

LOSS = nn.functional.cross_entropy


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def split(count, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, 2, 3, generator=generator)
    return Split(x, torch.randint(3, (count,), generator=generator))


def trainings(model, sizes, objective=erm, part=None, **schedule):
    settings = Schedule(**{"epochs": 3, "batch_size": 4, "lr": 0.1} | schedule)
    starts = [
        Weights(model.layout, torch.randn(model.layout.size, generator=torch.manual_seed(i)) / 3)
        for i in range(len(sizes))
    ]
    layout = None if part is None else model.layout.only(part)
    return [
        FitCall(starts[i], split(n, i), objective(), settings, 100 + i, 200 + i, layout)
        for i, n in enumerate(sizes)
    ]


def check_agreement(model, asked, criterion=LOSS):
    for training, together in zip(asked, fit_stack(model, asked, criterion), strict=True):
        alone = fit(model, training, criterion)
        moved = torch.linalg.vector_norm(alone.weights.vector - training.start.vector)
        gap = torch.linalg.vector_norm(alone.weights.vector - together.weights.vector)
        assert moved > 0.01
        assert gap <= 1e-5 * moved
        assert together.loss == pytest.approx(alone.loss, rel=1e-5)
        assert (together.steps, together.samples) == (alone.steps, alone.samples)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.5, "weight_decay": 0.1},
        {"clip": 0.2},
        {"optimizer": "adam", "lr": 0.01},
        {"steps": 7},
        {"objective": lambda: proximal(2.0)},
        {"objective": lambda: proximal(0.5), "momentum": 0.9, "clip": 1.0},
        {"part": ["3"], "momentum": 0.9},
    ],
    ids=lambda s: ",".join(s) or "plain",
)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 17, 9, 8)], ids=["equal", "unequal"])
def test_a_stack_gives_what_each_training_gives_alone(sizes, settings):
    model = FlatModel(network())
    check_agreement(model, trainings(model, sizes, **settings))


def test_each_row_has_its_own_tilt_and_anchor():
    model = FlatModel(network())
    asked = [
        replace(
            t,
            objective=linear(Weights(model.layout, torch.full((model.layout.size,), i / 9)))
            + proximal(1.0, Weights(model.layout, torch.full((model.layout.size,), -i / 5))),
        )
        for i, t in enumerate(trainings(model, (8, 6, 12)))
    ]
    check_agreement(model, asked)


def test_other_losses_take_batches_of_different_sizes():
    model = FlatModel(network())
    asked = trainings(model, (7, 5, 9))
    check_agreement(model, asked, lambda out, y: (out[:, 0] - y).square().mean())


def test_many_samples_are_read_some_steps_at_a_time(monkeypatch):
    model = FlatModel(network())
    whole = fit_stack(model, trainings(model, (30, 45, 21)), LOSS)
    monkeypatch.setattr("coterie.client.stacked._SAMPLES", 25)  # two steps of three clients
    parts = fit_stack(model, trainings(model, (30, 45, 21)), LOSS)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.weights.vector, b.weights.vector)


def test_one_that_diverges_is_told_apart_and_harms_no_neighbour():
    model = FlatModel(network())
    asked = trainings(model, (8, 8, 8))
    bad = replace(asked[1], data=split(8, 1, scale=1e30))
    first, lost, last = fit_stack(model, [asked[0], bad, asked[2]], LOSS)
    assert isinstance(lost, Diverged)
    for training, result in ((asked[0], first), (asked[2], last)):
        alone = fit(model, training, LOSS)
        assert torch.allclose(result.weights.vector, alone.weights.vector, atol=1e-6)


# --- which models --------------------------------------------------------------------------------


class Branching(nn.Module):
    """A model that looks at its data."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        out = self.head(x.flatten(1))
        return out if out.sum().item() > 0 else -out


def reason(module):
    model = FlatModel(module)
    start = Weights.of(module)
    samples = [split(8, i) for i in range(3)]
    return why_not_stacked(model, start, samples, LOSS, Schedule(batch_size=4, lr=0.1))


def test_which_models_are_stacked():
    assert reason(network()) == ""
    assert "'1' (Dropout) cannot be stacked" in reason(
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))
    )
    assert "(Conv1d)" in reason(nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(12, 3)))
    assert "torch cannot stack it" in reason(Branching())


# --- tasks ---------------------------------------------------------------------------------------


def test_tasks_pause_where_they_train_and_keep_what_they_have_set():
    model = FlatModel(network())
    together, asked = Together(model, LOSS), trainings(model, (8, 8, 8))
    seen = []

    def task(number):
        def run():
            with torch.no_grad() if number == 1 else torch.enable_grad():
                seen.append(number)
                torch.manual_seed(number)
                first = together.fit(asked[number])
                seen.append(number)
                assert torch.is_grad_enabled() == (number != 1)
                assert torch.initial_seed() is not None
                drawn = torch.rand(1)
                assert torch.equal(
                    drawn, torch.rand(1, generator=torch.Generator().manual_seed(number))
                )
                return first.loss

        return run

    with torch.random.fork_rng(devices=[]):
        losses = together.run([task(i) for i in range(3)])
    assert seen == [0, 1, 2, 0, 1, 2]  # all wait before any goes on
    assert losses == [r.loss for r in fit_stack(model, asked, LOSS)]
    assert torch.is_grad_enabled()


def test_tasks_may_train_twice_not_at_all_or_otherwise_than_the_others():
    model = FlatModel(network())
    together, (one, two, three) = Together(model, LOSS), trainings(model, (8, 8, 8))
    other = replace(two, schedule=replace(two.schedule, lr=0.5))
    results = together.run(
        [
            lambda: together.fit(replace(one, start=together.fit(one).weights)),
            lambda: "nothing",
            lambda: together.fit(other),
            lambda: together.fit(three),
        ]
    )
    again = replace(one, start=fit(model, one, LOSS).weights)
    assert results[1] == "nothing"
    for training, result in ((again, results[0]), (other, results[2]), (three, results[3])):
        alone = fit(model, training, LOSS)
        assert torch.allclose(result.weights.vector, alone.weights.vector, atol=1e-5)


def test_an_error_belongs_to_the_task_that_asked():
    model = FlatModel(network())
    together, asked = Together(model, LOSS), trainings(model, (8, 8))
    bad = replace(asked[1], data=split(8, 1, scale=1e30))

    def failing():
        with pytest.raises(Diverged):
            together.fit(bad)
        return "told"

    good, told = together.run([lambda: together.fit(asked[0]).loss, failing])
    assert told == "told"
    assert good == pytest.approx(fit(model, asked[0], LOSS).loss, rel=1e-5)


# --- whole runs ----------------------------------------------------------------------------------


def run(name, batch_clients, directory=None, resume=False, method=None, **settings):
    people = digits()
    made = experiment(
        method or ROWS[name](),
        people,
        model=lambda: make_model("mlp", people.shape, people.targets, hidden=(12,)),
        settings={"batch_clients": batch_clients, **settings},
    )
    return execute(made, directory, resume)


@pytest.mark.parametrize("name", ROWS)
def test_every_method_ends_where_it_ends_one_by_one(name):
    alone, together = run(name, 1), run(name, 4)
    assert together.groups == alone.groups
    start = alone.plan.start.vector
    for client in range(6):
        one, other = alone.weights(client).vector, together.weights(client).vector
        assert torch.linalg.vector_norm(one - other) <= 1e-3 * torch.linalg.vector_norm(one - start)
    # Losses in headers may have a digit more or less; arrays have not.
    for way in ("down", "up"):
        sent = [r.summary["bytes"][way] for r in (alone, together)]
        assert sent[0] == pytest.approx(sent[1], rel=1e-3)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "ifca", "scaffold"])
def test_any_number_of_workers_gives_the_same_bits(name):
    loop = run(name, 3)
    for workers in (1, 3):
        pool = run(name, 3, engine="pool", workers=workers)
        for client in range(6):
            assert torch.equal(loop.weights(client).vector, pool.weights(client).vector)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    whole = run("ditto", 3, rounds=4)
    run("ditto", 3, tmp_path / "run", rounds=2)
    resumed = run("ditto", 3, tmp_path / "run", resume=True, rounds=4)
    for client in range(6):
        assert torch.equal(whole.weights(client).vector, resumed.weights(client).vector)


def test_stacked_runs_are_not_those_of_one_by_one(tmp_path):
    """Their bits differ, so their checkpoints are not each other's."""
    run("fedavg", 3, tmp_path / "run", rounds=1)
    with pytest.raises(coterie.CoterieError, match="another experiment"):
        run("fedavg", 1, tmp_path / "run", resume=True, rounds=2)


def test_a_model_that_cannot_be_stacked_trains_one_by_one_and_says_so():
    people = digits()
    said = []
    made = experiment(coterie.fedavg(), people, settings={"batch_clients": "auto"})  # has dropout
    result = execute(made, say=said.append)
    assert result.plan.training.batch_clients == 1
    assert any("clients train one by one: the model's layer" in text for text in said)
    plain = execute(experiment(coterie.fedavg(), people))
    assert torch.equal(result.weights(0).vector, plain.weights(0).vector)


def test_auto_depends_on_the_cohort_alone():
    people = digits()
    model = lambda: make_model("logistic", people.shape, people.targets)  # noqa: E731
    sizes = {
        cohort: execute(
            experiment(
                coterie.fedavg(),
                people,
                model=model,
                settings={"batch_clients": "auto", "cohort": cohort, "rounds": 1},
            )
        ).plan.training.batch_clients
        for cohort in (1, 4, 6)
    }
    assert sizes == {1: 1, 4: 2, 6: 2}
