"""From Python: one's own clients, model, loss, metrics and methods."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import coterie
from coterie.client import erm
from coterie.compose.assign import everyone
from coterie.compose.grouped import grouped
from coterie.compose.local import Local, minimise
from coterie.data import from_clients
from coterie.errors import ConfigError, DataError, RunDirError, TrainingError

QUICK = {"rounds": 2, "engine": "loop", "batch_size": 8, "lr": 0.1}


def people(count=4, samples=30, seed=0):
    """Clients of a small classification, no two alike."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(count):
        x = rng.normal(size=(samples, 5)).astype(np.float32)
        clients.append((x, (x[:, 0] + 0.3 * x[:, 1] > 0).astype(np.int64)))
    return clients


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def same(one, other):
    return all(
        torch.equal(one.weights(c).vector, other.weights(c).vector)
        for c in range(len(one.plan.population.clients))
    )


def test_arrays_tensors_and_populations_are_the_same_clients():
    arrays = people()
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays]
    results = [
        coterie.simulate(given, "logistic", coterie.fedavg(), **QUICK)
        for given in (arrays, tensors, from_clients(arrays), iter(arrays))
    ]
    assert all(same(results[0], other) for other in results[1:])
    assert results[0].accuracy > 0.6
    assert [len(r.history) for r in results] == [2, 2, 2, 2]


def test_the_issues_own_example():
    clients = [(x, y) for x, y in people(6)]
    result = coterie.simulate(
        clients=clients, model="mlp", method=coterie.ifca(k=3), rounds=3, engine="loop"
    )
    assert set(result.groups) == set(range(6))
    assert set(result.groups.values()) <= {0, 1, 2}
    assert result.model(5)(torch.zeros(1, 5)).shape == (1, 2)


def test_regression_with_a_loss_and_metrics_of_ones_own():
    rng = np.random.default_rng(0)
    clients = []
    for _ in range(3):
        x = rng.normal(size=(60, 3)).astype(np.float32)
        clients.append((x, (x @ [1.0, -2.0, 0.5] + 3).astype(np.float32)))
    seen = []

    def loss(out, y):
        seen.append(out.shape)
        return (out.reshape(-1) - y).abs().mean()

    def largest_error(out, y):
        return float((out.reshape(-1) - y).abs().max())

    result = coterie.simulate(
        clients, "logistic", loss=loss, metrics={"largest": largest_error}, **QUICK | {"rounds": 15}
    )
    assert seen
    assert result.summary["judged_by"] == "r2"
    assert result.accuracy > 0.9
    held = result.plan.population.clients
    wanted = []
    for id, client in enumerate(held):
        out = result.predict(id, client.test.x).reshape(-1)
        wanted.append(float((out - client.test.y).abs().max()))
        assert result.clients[id]["received_largest"] == pytest.approx(wanted[-1], rel=1e-5)
        assert result.clients[id]["received_loss"] == pytest.approx(
            float((out - client.test.y).abs().mean()), rel=1e-5
        )
    assert result.summary["received"]["largest"] == pytest.approx(np.mean(wanted), rel=1e-5)
    assert result.history[0]["received"]["largest"] > result.history[-1]["received"]["largest"]


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_a_module_starts_from_its_own_weights(method):
    module = network()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    result = coterie.simulate(people(), module, method, epochs=0, seed=5, **QUICK)
    for client in range(4):
        found = result.model(client).state_dict()
        assert all(torch.equal(found[k], before[k]) for k in before)
    coterie.simulate(people(), module, method, **QUICK)
    assert all(torch.equal(module.state_dict()[k], before[k]) for k in before)  # and keeps them


def test_a_function_that_makes_a_module_is_seeded():
    one, again, other = (
        coterie.simulate(people(), network, epochs=0, seed=seed, **QUICK) for seed in (1, 1, 2)
    )
    assert same(one, again)
    assert not same(one, other)


def test_other_models_of_a_module_are_drawn_anew():
    torch.manual_seed(0)
    result = coterie.simulate(people(), network(), coterie.ifca(k=2), epochs=0, **QUICK)
    assert not torch.equal(result.state.models[0].vector, result.state.models[1].vector)


def test_frozen_layers_stay_and_cost_nothing():
    module = nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 2))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    free = coterie.simulate(people(), module, **QUICK)
    frozen = coterie.simulate(people(), module, freeze=["0"], **QUICK)
    for client in range(4):
        found = frozen.weights(client).tensors()
        assert torch.equal(found["0.weight"], before["0.weight"])
        assert torch.equal(found["0.bias"], before["0.bias"])
        assert not torch.equal(found["2.weight"], before["2.weight"])
        assert not torch.equal(free.weights(client).tensors()["0.weight"], before["0.weight"])
    # Two rounds, four clients, 6 x 300 numbers of 4 bytes; the rest of a message names tensors.
    for way in ("down", "up"):
        saved = free.summary["bytes"][way] - frozen.summary["bytes"][way]
        assert saved == pytest.approx(2 * 4 * 1800 * 4, rel=0.02)
    with pytest.raises(ConfigError, match="unknown layer 'o'"):
        coterie.simulate(people(), module, freeze=["o"], **QUICK)


def test_start_weights_by_name_or_from_a_file():
    given = network().state_dict()
    save_file(given, "start.safetensors")
    named = coterie.simulate(people(), network, start=given, **QUICK)
    for place in ("start.safetensors", Path("start.safetensors")):
        assert same(named, coterie.simulate(people(), network, start=place, **QUICK))
    module = network()
    module.load_state_dict(given)
    assert same(named, coterie.simulate(people(), module, **QUICK))
    untouched = coterie.simulate(people(), network, start=given, epochs=0, **QUICK)
    assert torch.equal(untouched.weights(0).tensors()["0.bias"], given["0.bias"])
    with pytest.raises(ConfigError, match=r"'0\.weight' has shape"):
        coterie.simulate(people(), lambda: nn.Sequential(nn.Linear(5, 2)), start=given, **QUICK)
    with pytest.raises(ConfigError, match="there is no file"):
        coterie.simulate(people(), network, start="nowhere.safetensors", **QUICK)


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_continued_in_python(method):
    keep = {"method": method, "cohort": 0.5, "seed": 3}
    whole = coterie.simulate(people(), "logistic", **keep, **QUICK | {"rounds": 4})
    coterie.simulate(people(), "logistic", **keep, **QUICK, directory="r")
    resumed = coterie.simulate(
        people(), "logistic", **keep, **QUICK | {"rounds": 4}, directory="r", resume=True
    )
    assert same(resumed, whole)
    assert [e["round"] for e in resumed.history] == [1, 2, 3, 4]
    assert resumed.summary["received"] == whole.summary["received"]
    with pytest.raises(RunDirError, match="is not empty"):
        coterie.simulate(people(), "logistic", **keep, **QUICK, directory="r")
    with pytest.raises(RunDirError, match="belongs to another experiment"):
        coterie.simulate(
            people(), "logistic", **keep | {"seed": 4}, **QUICK, directory="r", resume=True
        )


def test_a_method_of_closures_runs_in_worker_processes():
    def made(factor):
        def train(client, start):
            fit = client.fit(start, erm())
            return coterie.Fit(start + (fit.weights - start) * factor, fit.steps, fit.loss)

        return grouped("longer", everyone(), Local(train, lambda _, received: received))

    pool = {**QUICK, "engine": "pool", "workers": 2}
    results = {
        (engine["engine"], factor): coterie.simulate(people(), "logistic", made(factor), **engine)
        for engine in (QUICK, pool)
        for factor in (1.0, 2.0)
    }
    assert same(results["loop", 2.0], results["pool", 2.0])
    assert not same(results["pool", 1.0], results["pool", 2.0])
    plain = grouped("plain", everyone(), minimise(erm()))
    step = coterie.simulate(people(), "logistic", plain, **pool).weights(0).vector
    assert torch.allclose(results["pool", 1.0].weights(0).vector, step, atol=1e-6)


@pytest.mark.parametrize("engine", [{"engine": "loop"}, {"engine": "pool", "workers": 2}])
def test_a_task_that_fails_names_the_client_and_the_task(engine):
    def train(client, start):
        if client.id == 2:
            raise ZeroDivisionError("no more")
        return client.fit(start)

    broken = grouped("broken", everyone(), Local(train, lambda _, received: received))
    with pytest.raises(TrainingError) as caught:
        coterie.simulate(people(), "logistic", broken, **QUICK | engine)
    for part in ("client 2", "task 'train'", "ZeroDivisionError", "no more", "test_simulate.py"):
        assert part in str(caught.value)


def test_a_watcher_sees_every_round():
    rounds = []
    coterie.simulate(people(), "logistic", watch=lambda e: rounds.append(e["round"]), **QUICK)
    assert rounds == [1, 2]
    config = {"data": {"clients": 3, "samples": 90}, "run": {"rounds": 3, "engine": "loop"}}
    coterie.run(config, watch=lambda e: rounds.append(e["round"]))
    assert rounds == [1, 2, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"method": "fedagv"}, "did you mean 'fedavg'"),
        ({"method": coterie.ifca}, "returned by its factory"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"engine": "pol"}, "did you mean 'pool'"),
        ({"cohort": 9}, "from 1 to 4"),
        ({"loss": "mse"}, "does not fit targets that are classes"),
        ({"loss": "los"}, "unknown loss 'los'"),
        ({"model": "mlp", "model_parameters": {"hiden": [3]}}, "did you mean 'hidden'"),
        ({"bn": "lokal"}, "did you mean 'local'"),
    ],
)
def test_what_is_wrong_is_said(changes, told):
    with pytest.raises(ConfigError) as caught:
        coterie.simulate(people(), **{"model": "logistic", **QUICK, **changes})
    assert told in str(caught.value)


def test_data_that_cannot_be_used_names_the_client():
    for spoil, told in (
        (lambda x, y: (x[:0], y[:0]), "no samples"),
        (lambda x, y: (x, y[:-1]), "30 samples but 29 labels"),
        (lambda x, y: (x, y - 5), "outside"),
        (lambda x, y: (x * np.nan, y), "nan at row 0"),
        (lambda x, y: (x[:, :2], y), "shape"),
    ):
        clients = people()
        clients[1] = spoil(*clients[1])
        with pytest.raises(DataError) as caught:
            coterie.simulate(clients, "logistic", **QUICK)
        assert "client 1" in str(caught.value)
        assert told in str(caught.value)
    with pytest.raises(DataError, match="no clients"):
        coterie.simulate([], "logistic", **QUICK)
