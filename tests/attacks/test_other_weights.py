"""A malicious server for which clients count in two ways in one round, or all but one not at all.

Members are as ``coterie join --secure`` starts them; the server says what it likes.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.privacy.secagg.ring import from_ring
from faked_grid import population_of
from malicious import Server

REVEAL = "final-layer"
# One client has one sample more than each of the others, and everybody makes one step on all data.
ONE_MORE = {
    "data": {"samples": 101},
    "partition": {"name": "iid"},
    "train": {"batch_size": 512, "lr": 0.5, "steps": 1},
}
TRIALS = {
    **ONE_MORE,
    "method": {"name": "fedclust"},
    "privacy": {"reveal": REVEAL},
}


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    """No power is cut here, and the same data is made once."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("coterie.deploy.data.population_of", population_of)


# --- one number by samples, and the same number by heads ------------------------------------------


def plans(server):
    """What each member knows of its run."""
    return {c: m._runtime.plan for c, m in server.fed.grid.members.items()}


def sizes(server):
    return {c: len(plan.population.clients[c].train) for c, plan in plans(server).items()}


def the_odd_one(server):
    """The client with another number of samples, its number, and the number of all others."""
    numbers = sizes(server)
    (usual,) = {n for n in numbers.values() if [*numbers.values()].count(n) > 1}
    (victim,) = [c for c, n in numbers.items() if n != usual]
    return victim, numbers[victim], usual


def blind(server):
    """A model whose outputs are the same for all inputs, and these outputs as log-probabilities."""
    tilt = torch.arange(10) / 4.0
    model = server.model(0.0)
    model.vector[server.start.layout.spans["head.bias"]] = tilt
    return model, torch.log_softmax(tilt.double(), 0)


def loss_of(server, client, logs):
    """The loss of the blind model on a client's training data, which nobody else should learn."""
    labels = plans(server)[client].population.clients[client].train.y
    return float(-logs[labels].mean())


def labels_by_samples(server, total, model, logs):
    """How many samples of each class there are: the sum by samples of what moved the biases."""
    span = server.start.layout.spans["head.bias"]
    after = torch.from_numpy(from_ring(total.values[: total.form.size], total.bits))[span]
    count, lr = sum(sizes(server).values()), plans(server)[0].training.schedule.lr
    return count * logs.exp() + (after - count * model.vector[span].double()) / lr


def test_metrics_count_as_the_arrays_beside_them_do(tmp_path):
    # The sum by samples says what the sum of losses by samples is; the sum by heads, less so many
    # times, is the odd one's own.
    server = Server(tmp_path, **ONE_MORE)
    victim, number, usual = the_odd_one(server)
    model, logs = blind(server)
    total = server.sum({"0": model}, by_examples=True)
    assert total is not None
    labels = labels_by_samples(server, total, model, logs)
    (losses,) = from_ring(total.values[total.form.size :][:1], total.bits)
    guess = (float(-(labels * logs).sum()) - usual * losses) / (number - usual)
    assert abs(guess - loss_of(server, victim, logs)) > 0.1
    assert losses == pytest.approx(float(-(labels * logs).sum()), abs=1e-3)  # nothing new


def test_scores_of_a_trial_count_as_its_models_do(tmp_path):
    server = Server(tmp_path, reveal=REVEAL, **TRIALS)
    victim, number, usual = the_odd_one(server)
    model, logs = blind(server)
    first = server.sum({"0": model}, by_examples=True, trial_steps=1)
    # Clients once divided their scores by their samples when they were told to.
    told = {"cuts": "0", "on": "train", "scaled": True}
    second = server.sum({"0": model}, "score-cuts", by_examples=True, **told)
    assert first is not None
    assert second is not None
    labels = labels_by_samples(server, first, model, logs)
    _, losses, _ = from_ring(second.values[: second.form.size], second.bits)
    guess = (float(-(labels * logs).sum()) - usual * losses) / (number - usual)
    assert abs(guess - loss_of(server, victim, logs)) > 0.1


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_buffers_count_as_the_parameters_before_them_do(method, tmp_path):
    # These methods sum models by heads, and multiplied buffers by samples: "count" is by what.
    server = Server(tmp_path, **{**ONE_MORE, "method": {"name": method}})
    arrays = {"0": server.start}
    if method == "scaffold":
        arrays["correction"] = torch.zeros(server.start.layout.trainable)
    total = server.sum(arrays)
    assert total is not None
    assert float(total.arrays["count"]) == 1


# --- sums in which all but one cancel -------------------------------------------------------------


def test_a_trial_of_secure_sums_has_no_losses_without_ones_own_update(tmp_path):
    # Whoever has nearly all of a group's samples repeats its loss; if the server says that all but
    # one have, the difference of both losses is that one's, as often as there are cuts.
    settings = {**TRIALS, "data": {"samples": 99}}
    server = Server(tmp_path, reveal=REVEAL, **settings)
    least = min(sizes(server).values())
    assert server.sum({"0": server.start}, trial_steps=1) is not None
    told = {"cuts": "0", "on": "train", "totals": str(least + 1)}
    assert server.sum({"0": server.start}, "score-cuts", **told) is None
    assert not server.gave_keys


def test_a_model_of_other_numbers_moves_nobody(tmp_path):
    # Rounded to single precision, it would have moved where nobody has trained it.
    server = Server(tmp_path, train={"lr": 1e-30})
    fine = replace(server.start, vector=server.model(1000.0).vector.double() + 2e-5)
    assert server.sum({"0": fine}) is None
    assert not server.gave_keys


@pytest.mark.parametrize(("mu", "taken"), [(1.0, True), (10.0, True), (1e6, False)])
def test_no_pull_makes_a_second_step_count_far_more_than_the_first(mu, taken, tmp_path):
    # A client of two steps would be pulled back a hundred thousand times as far as it has moved.
    server = Server(tmp_path, method={"name": "fedprox", "mu": mu}, train={"lr": 0.1})
    assert (server.sum({"0": server.start}) is not None) == taken


# --- noise ----------------------------------------------------------------------------------------

NOISY = {"privacy": {"noise": 0.1, "clip": 1.0, "delta": 1e-3}}


@pytest.mark.parametrize(("steps", "taken"), [(13.0, False), (200.0, True)])
def test_noise_too_coarse_for_the_grid_is_refused(steps, taken, tmp_path):
    # Shares of half a step add up to less than the noise that they are shares of.
    server = Server(tmp_path, **NOISY)
    bits = plans(server)[0].privacy.bits
    noise = {"clip": steps * 2.0**-bits, "multiplier": 0.1, "bits": 0.0, "counts": 0.0}
    assert (server.sum({"0": server.start}, noise=noise) is not None) == taken


@pytest.mark.parametrize("key", ["noise", "delta"])
def test_terms_say_how_much_noise_there_is(key, tmp_path):
    # Else it follows from the number of clients, which the server may change during a run.
    server = Server(tmp_path, privacy={"epsilon": 8.0})
    config = {table: dict(keys) for table, keys in server.terms["config"].items()}
    assert config["privacy"].pop(key)
    told = server.terms
    server.terms = {**told, "config": config}
    assert set(server.enrol("bb22")) == set(range(server.count))
    server.terms = told
    assert not server.enrol("cc33")
