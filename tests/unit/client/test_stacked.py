"""Clients that train as one stacked model end where each of them ends alone."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.client import Objective, Schedule, contrastive, erm, linear, proximal
from coterie.client.fit import FitCall, FlatModel, data_gradient, decode, fit, outputs
from coterie.client.runtime import ClientRuntime
from coterie.client.stacked import (
    fit_stack,
    gradients_stack,
    outputs_stack,
    size_of_stacks,
    why_not_stacked,
)
from coterie.client.stacked_layers import StackedModel
from coterie.client.together import Together
from coterie.core.weights import Weights
from coterie.data import ClientData, Population, Split
from coterie.errors import Diverged
from coterie.experiment.experiment import execute, with_settings
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
    for training, together in zip(
        asked, fit_stack(StackedModel(model), asked, criterion), strict=True
    ):
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
    whole = fit_stack(StackedModel(model), trainings(model, (30, 45, 21)), LOSS)
    monkeypatch.setattr("coterie.client.stacked._DECODED", 150)  # two steps of three clients
    parts = fit_stack(StackedModel(model), trainings(model, (30, 45, 21)), LOSS)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.weights.vector, b.weights.vector)


def test_one_that_diverges_is_told_apart_and_harms_no_neighbour():
    model = FlatModel(network())
    asked = trainings(model, (8, 8, 8))
    bad = replace(asked[1], data=split(8, 1, scale=1e30))
    first, lost, last = fit_stack(StackedModel(model), [asked[0], bad, asked[2]], LOSS)
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


class Mixing(nn.Module):
    """A model whose outputs for a sample depend on the others of its batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        out = self.head(x.flatten(1))
        return out - out.mean(0)


class Owner(nn.Module):
    """A model with a parameter outside of its layers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x.flatten(1) * self.scale)


def test_which_models_are_stacked():
    assert reason(network()) == ""
    assert reason(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))) == ""
    assert reason(nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3))) == ""
    assert "(Conv1d)" in reason(nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(12, 3)))
    assert "(Owner)" in reason(Owner())
    assert "depends on its data" in reason(Branching())
    assert "another result" in reason(Mixing())


# --- layers, terms and precision ------------------------------------------------------------------


class Text(nn.Module):
    """Vectors of tokens, with padding, and their mean."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5, padding_idx=0)
        self.head = nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(9, (count, 4), generator=generator)
    return Split(x, torch.randint(3, (count,), generator=generator))


MODELS = {
    "dropout": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(8, 3),
    ),
    "batch norm": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ),
    "batch norm of channels": lambda: nn.Sequential(
        *(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3))
    ),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(3), nn.Flatten(), nn.Linear(6, 3)),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(6, 3)),
    "convolution": lambda: nn.Sequential(
        *(nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(4, 6, 1, groups=2, bias=False), nn.Flatten(), nn.Linear(12, 3)),
    ),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=False)),
    "three dimensions": lambda: nn.Sequential(
        *(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    ),
}


@pytest.fixture
def double():
    """Numbers of 64 bits, in which rounding is far below what is compared."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gaps(model, asked, criterion=LOSS, least=0.01):
    """How far each result of a stack is from that alone, as a share of what training moved."""
    for training, together in zip(
        asked, fit_stack(StackedModel(model), asked, criterion), strict=True
    ):
        alone = fit(model, training, criterion).weights.vector
        moved = torch.linalg.vector_norm(alone - training.start.vector)
        assert moved > least
        yield float(torch.linalg.vector_norm(alone - together.weights.vector) / moved)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (11, 11)], ids=["whole", "short last batch"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_what_they_compute_alone(name, sizes, double):
    torch.manual_seed(0)
    model = FlatModel(MODELS[name]())
    asked = trainings(model, sizes, steps=20, momentum=0.5)
    assert max(gaps(model, asked)) < 1e-9


def test_vectors_of_padding_are_never_trained(double):
    torch.manual_seed(0)
    model = FlatModel(Text())
    asked = [
        replace(t, data=tokens(n, n))
        for n, t in zip((8, 9, 5), trainings(model, (8, 9, 5), steps=20), strict=True)
    ]
    assert max(gaps(model, asked)) < 1e-9
    for training, result in zip(asked, fit_stack(StackedModel(model), asked, LOSS), strict=True):
        before, after = (w.tensors()["embedding.weight"] for w in (training.start, result.weights))
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1:], after[1:])


@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 17, 9)], ids=["equal", "unequal"])
def test_representations_are_compared_in_a_stack(sizes, double):
    model = FlatModel(network())
    asked = trainings(model, sizes, steps=20)
    others = [t.start for t in trainings(model, (8,) * 7)]
    asked = [
        replace(t, objective=contrastive(2.0, 0.5, others[i], others[i + 3]) + proximal(0.1))
        for i, t in enumerate(asked)
    ]
    assert max(gaps(model, asked)) < 1e-9
    plain = [fit(model, replace(t, objective=erm()), LOSS) for t in asked]
    for term, without in zip(fit_stack(StackedModel(model), asked, LOSS), plain, strict=True):
        assert not torch.allclose(term.weights.vector, without.weights.vector)


def test_float32_is_as_near_as_its_rounding():
    model = FlatModel(network())
    assert max(gaps(model, trainings(model, (8, 9, 3), steps=20, momentum=0.9))) < 1e-4


def test_bfloat16_is_coarser_and_the_same_in_a_stack():
    model = FlatModel(network())
    exact, coarse = (
        trainings(model, (8, 8, 8), steps=20, precision=p) for p in ("float32", "bf16")
    )
    for a, b in zip(exact, coarse, strict=True):
        alone, other = (fit(model, t, LOSS).weights for t in (a, b))
        moved = torch.linalg.vector_norm(alone.vector - a.start.vector)
        gap = torch.linalg.vector_norm(alone.vector - other.vector)
        assert 1e-5 * moved < gap < 0.1 * moved
        assert other.vector.dtype == torch.float32
    assert max(gaps(model, coarse)) < 0.05


def test_models_of_a_stack_are_evaluated_as_alone(double):
    model = FlatModel(MODELS["batch norm"]())
    asked, stack = trainings(model, (3, 700, 9)), StackedModel(model)
    starts = [Weights(model.layout, t.start.vector.abs()) for t in asked]  # variances, too
    data = [t.data for t in asked]
    for start, split_, out in zip(
        starts, data, outputs_stack(stack, starts, [d.x for d in data]), strict=True
    ):
        assert torch.allclose(out, outputs(model, start, split_.x), atol=1e-12)
    slopes = gradients_stack(stack, starts, data, LOSS)
    for start, split_, (slope, loss) in zip(starts, data, slopes, strict=True):
        alone, alone_loss = data_gradient(model, start, split_, LOSS)
        assert loss == pytest.approx(alone_loss, rel=1e-12)
        assert torch.allclose(slope.vector.double(), alone.vector.double(), atol=1e-12)


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
    assert losses == [r.loss for r in fit_stack(StackedModel(model), asked, LOSS)]
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


# One method for each way of training: what is added to the loss, what is trained, and who asks for
# losses, outputs and gradients. The others are marked e2e.
COVERING = {
    "fedavg": "the loss alone",
    "fedprox": "a pull towards the model received",
    "ditto": "two trainings, one with a pull towards another model",
    "scaffold": "a tilt for each client",
    "feddyn": "a tilt and a pull",
    "moon": "representations of three models",
    "fedrep": "parts of the model, one after another",
    "ifca": "the losses of several models",
    "per-fedavg": "a gradient rule, which trains alone",
    "apfl": "gradients of a model of each client's own, and a mixture",
    "fedfomo": "losses of the models of others",
    "adaptive-tau": "numbers of steps that change",
    "user-centric all": "gradients of the start, batch by batch",
}
every_method = pytest.mark.parametrize(
    "name",
    [name if name in COVERING else pytest.param(name, marks=pytest.mark.e2e) for name in ROWS],
)


def run(name, batch_clients, directory=None, resume=False, **settings):
    made = experiment(
        ROWS[name](),
        settings={"batch_clients": batch_clients, "rounds": 2, **settings},
        schedule={"steps": None if name in STEPLESS else 10},
    )
    return execute(made, directory, resume)


STEPLESS = {"adaptive-tau", "ifca+adaptive-tau"}  # they choose the number of steps


@every_method
def test_every_method_ends_where_it_ends_one_by_one(name):
    """Over twenty steps, with masks of dropout, as far as numbers of 32 bits can tell."""
    alone, together = run(name, 1), run(name, 6)
    assert together.groups == alone.groups
    start = alone.plan.start.vector
    for client in range(6):
        one, other = alone.weights(client).vector, together.weights(client).vector
        assert torch.linalg.vector_norm(one - other) <= 1e-4 * torch.linalg.vector_norm(one - start)
    # Losses in headers may have a digit more or less; arrays have not.
    for way in ("down", "up"):
        sent = [r.summary["bytes"][way] for r in (alone, together)]
        assert sent[0] == pytest.approx(sent[1], rel=1e-3)


def doubled(weights):
    return Weights(weights.layout, weights.vector.double())


def doubled_call(call):
    """A training in numbers of 64 bits."""
    penalties = tuple(
        p.remake(p.anchor.double()) if p.anchor is not None else p for p in call.objective.penalties
    )
    terms = tuple(replace(t, models=tuple(map(doubled, t.models))) for t in call.objective.terms)
    return replace(
        call,
        start=doubled(call.start),
        data=Split(decode(call.data.x).double(), call.data.y),
        objective=Objective(penalties, terms),
    )


@every_method
def test_every_training_of_a_method_is_that_of_one_alone(name, monkeypatch, double):
    """With numbers of 64 bits, where rounding cannot hide a difference."""
    asked = []

    def record(stack, calls, criterion):
        asked.append(list(calls))
        return fit_stack(stack, calls, criterion)

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("coterie.client.together.fit_stack", record)
    module = run(name, 6).plan.module
    assert asked or name == "per-fedavg"
    torch.set_default_dtype(torch.float64)
    model = FlatModel(copy.deepcopy(module).double())
    for calls in asked[:4]:
        assert max(gaps(model, [doubled_call(c) for c in calls], least=0.0)) < 1e-9


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


def test_a_run_that_ended_within_a_stack_resumes_with_the_same_bits(tmp_path, monkeypatch):
    """States of two of three clients are on disk: the third does not train alone then."""
    whole = run("ditto", 3, rounds=2)
    run("ditto", 3, tmp_path / "run", rounds=1)
    finish, finished = ClientRuntime._finish, []

    def dying(runtime, prepared, upload):
        if len(finished) == 2:
            raise KeyboardInterrupt
        finished.append(prepared.client.id)
        return finish(runtime, prepared, upload)

    monkeypatch.setattr(ClientRuntime, "_finish", dying)
    with pytest.raises((KeyboardInterrupt, coterie.CoterieError)):
        run("ditto", 3, tmp_path / "run", resume=True, rounds=2)
    assert len(finished) == 2
    monkeypatch.setattr(ClientRuntime, "_finish", finish)
    resumed = run("ditto", 3, tmp_path / "run", resume=True, rounds=2)
    for client in range(6):
        assert torch.equal(whole.weights(client).vector, resumed.weights(client).vector)


def test_stacked_runs_are_not_those_of_one_by_one(tmp_path):
    """Their bits differ, so their checkpoints are not each other's."""
    run("fedavg", 3, tmp_path / "run", rounds=1)
    with pytest.raises(coterie.CoterieError, match="another experiment"):
        run("fedavg", 1, tmp_path / "run", resume=True, rounds=2)


def test_a_model_that_cannot_be_stacked_trains_one_by_one_and_says_so():
    people, said = digits(), []
    net = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(1, 2), nn.Conv1d(8, 2, 3), nn.Flatten(), nn.Linear(12, people.targets)
    )
    made = experiment(coterie.fedavg(), people, model=net, settings={"batch_clients": 3})
    result = execute(made, say=said.append)
    assert result.plan.training.batch_clients == 1
    assert [t for t in said if "clients train one by one: the model's layer '1'" in t]
    plain = execute(with_settings(made, batch_clients=1))
    assert torch.equal(result.weights(0).vector, plain.weights(0).vector)


def test_a_resumed_run_uses_the_recorded_number(tmp_path, monkeypatch):
    run("fedavg", "auto", tmp_path / "run", rounds=1)
    # Whatever another version would choose.
    monkeypatch.setattr("coterie.experiment.experiment.size_of_stacks", lambda *_: 5)
    resumed = run("fedavg", "auto", tmp_path / "run", resume=True, rounds=2)
    assert resumed.plan.training.batch_clients == 1
    assert run("fedavg", "auto").plan.training.batch_clients == 5


def test_auto_depends_on_model_batch_and_cohort_alone():
    """A quarter of a cohort, or half of a small one, if the model is small."""
    sizes = {1: 1, 7: 1, 8: 4, 10: 5, 16: 5, 40: 10, 100: 25, 1000: 32}
    assert {cohort: size_of_stacks(7850, 10, cohort) for cohort in sizes} == sizes
    assert size_of_stacks(50_890, 10, 100) == 25
    assert size_of_stacks(50_890, 64, 100) == 1  # a step has enough to do
    assert size_of_stacks(400_000, 2, 100) == 5  # more would not fit into a cache
    people = digits(clients=18)
    auto = experiment(coterie.fedavg(), people, settings={"rounds": 1, "batch_clients": "auto"})
    for workers in (1, 2):
        made = with_settings(auto, engine="pool", workers=workers)
        assert execute(made).plan.training.batch_clients == 5


def diverging(batch_clients, outliers):
    """A run of eight clients, of which the data of number 5 are beyond all bounds."""
    generator = torch.Generator().manual_seed(0)
    people = []
    for client in range(8):
        x = torch.randn(20, 6, generator=generator) * (1e30 if client == 5 else 1)
        y = (x[:, :3]).argmax(1)
        parts = (Split(x[i:j], y[i:j]) for i, j in ((0, 12), (12, 14), (14, 20)))
        people.append(ClientData(*parts))
    population = Population(tuple(people), "table", (6,), tuple("abc"), 3)
    settings = {"batch_clients": batch_clients, "outliers": outliers, "rounds": 2}
    return execute(experiment(coterie.fedavg(), population, settings=settings))


def test_a_client_that_diverges_in_a_stack_is_named():
    with pytest.raises(coterie.CoterieError, match=r"client 5, round 1: .* no longer finite"):
        diverging(4, "off")


def test_a_client_that_diverges_in_a_stack_harms_no_neighbour():
    alone, together = diverging(1, "reject"), diverging(4, "reject")
    start = alone.plan.start.vector
    one, other = alone.weights(0).vector, together.weights(0).vector
    gap, moved = (torch.linalg.vector_norm(d) for d in (one - other, one - start))
    assert moved > 0.01
    assert gap <= 1e-4 * moved
    for result in (alone, together):
        assert [list(e["rejected"]) for e in result.history] == [["5"], ["5"]]
