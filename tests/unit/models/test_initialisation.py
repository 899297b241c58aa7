"""First weights: the rules' bounds worked by hand, what they leave alone, and where they reach."""

import copy
from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import nn

import coterie
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import execute
from coterie.models import INITIALISATIONS, initialise, make_model
from coterie.results.toml import read_toml
from coterie.seeds import seed_for
from support import Stop, digits, experiment, stop_after

SMALL = {"data": {"clients": 3, "samples": 90}, "run": {"rounds": 2, "engine": "loop", "seed": 5}}
OTHERS = [name for name in INITIALISATIONS if name != "torch"]


def configured(**model):
    """A small experiment of a configuration with these keys of the model."""
    return experiment_of(parse({**SMALL, "model": {"name": "mlp", "hidden": [8], **model}}))


def copied(module):
    """A module's tensors as they are now."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module, before):
    """The tensors of a module that are not what they were."""
    now = module.state_dict()
    return {name for name in before if not torch.equal(now[name], before[name])}


# --- the rules -----------------------------------------------------------------------------------

# Linear(100, 50): 100 inputs, 50 outputs. Conv2d(4, 8, 5): 4·25 = 100 inputs, 8·25 = 200 outputs.
LAYERS = {
    "dense": (lambda: nn.Linear(100, 50), sqrt(6 / 100), sqrt(6 / 150)),
    "convolution": (lambda: nn.Conv2d(4, 8, 5), sqrt(6 / 100), sqrt(6 / 300)),
    "convolution 1d": (lambda: nn.Conv1d(10, 20, 5), sqrt(6 / 50), sqrt(6 / 150)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("init", OTHERS)
def test_weights_are_uniform_within_the_bounds_of_the_rule(init, kind):
    make, he, glorot = LAYERS[kind]
    torch.manual_seed(0)
    layer = make()
    initialise(layer, init)
    rule = init if init != "authors" else ("glorot" if kind == "dense" else "he")
    bound = {"he": he, "glorot": glorot}[rule]
    weights = layer.weight.detach()
    # Of 800 draws or more the largest misses 0.98 of the bound with probability 0.98⁸⁰⁰ ≈ 1e-7.
    assert 0.98 * bound < weights.max() <= bound
    assert -bound <= weights.min() < -0.98 * bound
    assert weights.square().mean() == pytest.approx(bound**2 / 3, rel=0.15)  # of a uniform draw
    assert layer.bias.count_nonzero() == 0


class Mixed(nn.Module):
    """A module with parts of every kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.memory = nn.LSTM(4, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.conv = nn.Conv2d(3, 4, 3)
        self.bare = nn.Linear(4, 4, bias=False)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.half_frozen = nn.Linear(4, 4)
        self.half_frozen.bias.requires_grad_(False)
        self.computed = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


@pytest.mark.parametrize("init", INITIALISATIONS)
def test_only_trained_convolutions_and_dense_layers_are_drawn_anew(init):
    module = Mixed()
    for name in ("norm", "group"):  # as if trained before
        nn.init.uniform_(getattr(module, name).weight)
        nn.init.uniform_(getattr(module, name).bias)
    module.norm.running_mean.fill_(3.0)
    before = copied(module)
    initialise(module, init)
    drawn = {"conv.weight", "conv.bias", "bare.weight", "inner.0.weight", "inner.0.bias"}
    drawn |= {"half_frozen.weight"}
    assert changed(module, before) == (set() if init == "torch" else drawn)


@pytest.mark.parametrize("init", ["glorto", "", None, ["he"]])
def test_an_unknown_rule_is_refused(init):
    with pytest.raises(ConfigError, match="choice of init"):
        initialise(nn.Linear(2, 2), init)
    with pytest.raises(ConfigError, match="choice of init"):
        coterie.simulate(digits(), init=init, rounds=1, engine="loop")


def test_an_unknown_rule_is_refused_before_data_is_read():
    tree = {"model": {"init": "glorto"}, "data": {"set": "mnist", "folder": "/nowhere"}}
    with pytest.raises(ConfigError, match="did you mean 'glorot'"):
        experiment_of(parse(tree))


# --- of experiments ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("init", [None, *INITIALISATIONS])
def test_first_weights_are_the_seeded_models_with_the_rule_over_them(init, number):
    made = configured(**({} if init is None else {"init": init}))
    torch.manual_seed(seed_for(5, "init", stream=str(number)))
    wanted = make_model("mlp", (1, 8, 8), 10, hidden=[8])
    plain = copied(wanted)
    if init not in (None, "torch"):
        initialise(wanted, init)
        assert changed(wanted, plain) == set(plain)
    result = made.fresh(number).state_dict()
    assert result.keys() == plain.keys()
    assert all(torch.equal(result[k], v) for k, v in wanted.state_dict().items())
    if number == 0:
        start = made.plan("nowhere").start.tensors()
        assert all(torch.equal(start[k], v) for k, v in wanted.state_dict().items())


@pytest.mark.parametrize("name", ["lenet5", "resnet9", "text"])
def test_every_kind_of_model_takes_a_rule(name):
    given = {"vocabulary": 9, "hidden": 150, "dim": 100} if name == "text" else {}
    model = make_model(name, (6,) if name == "text" else (1, 28, 28), 10, **given)
    before = copied(model)
    initialise(model, "authors")
    left = {"embedding.weight"} | {k for k in before if "norm" in k}
    assert before.keys() - changed(model, before) == left & before.keys()
    if name == "text":  # 100 inputs and 150 outputs
        assert 0.99 * sqrt(6 / 250) < model.hidden.weight.max() <= sqrt(6 / 250)


@pytest.mark.parametrize("given", ["name", "function", "module"])
def test_further_models_are_drawn_by_the_rule_too_and_differ(given):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model = {"name": "logistic", "function": lambda: copy.deepcopy(module), "module": module}[given]
    before = copied(module)
    one, again, other = (
        coterie.simulate(
            digits(), model, coterie.ifca(k=3), 1, init="he", epochs=0, seed=seed, engine="loop"
        ).state.models
        for seed in (1, 1, 2)
    )
    for slot, found in one.items():
        (weight, bias) = found.tensors().values()
        assert 0.98 * sqrt(6 / 64) < weight.max() <= sqrt(6 / 64)
        assert bias.count_nonzero() == 0
        assert torch.equal(found.vector, again[slot].vector)
        assert not torch.equal(found.vector, other[slot].vector)
    assert len({tuple(found.vector.tolist()) for found in one.values()}) == 3
    assert not changed(module, before)  # a module of the user's is only looked at


def test_a_modules_other_parts_and_frozen_layers_keep_its_weights():
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Linear(5, 10)
    )
    nn.init.uniform_(module[2].weight)
    before = copied(module)
    settings = {"rounds": 1, "epochs": 0, "engine": "loop"}
    result = coterie.simulate(digits(), module, init="he", freeze=["1"], **settings)
    now = result.plan.start.tensors()
    stays = {name for name in now if torch.equal(now[name], before[name])}
    assert stays == {n for n in now if n.startswith(("1.", "2."))}
    second = coterie.simulate(
        digits(), module, coterie.ifca(k=2), init="he", freeze=["1"], **settings
    )
    assert torch.equal(second.state.models[1].tensors()["1.weight"], before["1.weight"])
    assert not torch.equal(second.state.models[1].tensors()["3.weight"], now["3.weight"])


def test_given_weights_win_over_the_rule():
    start = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).state_dict()
    for model in (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ):
        result = coterie.simulate(
            digits(), model, init="he", start=start, rounds=1, engine="loop"
        ).plan.start.tensors()
        assert all(torch.equal(result[name], value) for name, value in start.items())


def test_loop_and_pool_train_the_same_models():
    results = [
        execute(experiment(coterie.ifca(k=2), init="authors", settings={"engine": engine}))
        for engine in ("loop", "pool")
    ]
    assert torch.equal(*(result.plan.start.vector for result in results))
    for client in range(6):
        assert torch.equal(*(result.weights(client).vector for result in results))


def test_a_comparison_may_vary_it():
    made = coterie.compare(SMALL, methods="fedavg", vary={"model.init": ["torch", "he"]}, jobs=1)
    assert [row["model.init"] for row in made.rows] == ["torch", "he"]


# --- going on ------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_keeps_it(tmp_path):
    whole = execute(configured(init="glorot"))
    with pytest.raises(Stop):
        execute(configured(init="glorot"), tmp_path / "run", watch=stop_after(1))
    kept = read_toml(tmp_path / "run" / "config.toml")
    assert kept["model"]["init"] == "glorot"
    resumed = execute(experiment_of(parse(kept)), tmp_path / "run", resume=True)
    assert all(torch.equal(whole.weights(c).vector, resumed.weights(c).vector) for c in range(3))


@pytest.mark.parametrize("weights", ["drawn", "given"])
def test_a_run_is_not_resumed_with_another(weights, tmp_path):
    made = experiment(coterie.ifca(k=2), init="he", settings={"rounds": 1})
    if weights == "given":  # then only the further models of IFCA are drawn
        made = replace(made, start=made.fresh(7).state_dict())
    execute(made, tmp_path / "run")
    for other in ("torch", "glorot"):
        with pytest.raises(RunDirError, match="another experiment"):
            execute(replace(made, init=other), tmp_path / "run", resume=True)
    execute(made, tmp_path / "run", resume=True)
