"""Comparisons on own clients, with own methods and models, and settings tuned for each method."""

import json

import pytest
import torch
from torch import nn

import coterie
from coterie.data import build_population, load
from coterie.errors import ConfigError, Diverged, RunDirError
from coterie.experiment.compare.compare import go_on
from coterie.experiment.spelling import spelled_out
from coterie.results.watchers import Look


def people(count=6, samples=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rules = torch.randn(3, 5, generator=generator)
    rows = [torch.randn(samples, 5, generator=generator) for _ in range(count)]
    return [(x, (x @ rules[i % 3] > 0).long()) for i, x in enumerate(rows)]


def net():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))


def titles(comparison):
    return [row["method"] for row in comparison.rows]


def test_rows_are_those_of_simulate_with_the_same_settings():
    settings = {"rounds": 2, "lr": 0.2, "model": net, "loss": nn.CrossEntropyLoss(), "seed": 3}
    settings |= {"engine": "loop"}
    methods = ["fedavg", "ifca:k=2", coterie.ditto(), coterie.grouped("mine", coterie.by_loss(3))]
    compared = coterie.compare(people(), methods, **settings)
    assert [t.split()[0] for t in titles(compared)] == ["fedavg", "ifca", "ditto", "mine"]
    for method, row in zip(methods, compared.rows, strict=True):
        alone = coterie.simulate(people(), method=method, **settings)
        assert row["received"] == alone.accuracy
        moved = alone.summary["bytes"]
        assert row["bytes"] == moved["down"] + moved["up"]


def test_seeds_and_models_are_rows_of_their_own():
    models = {"small": net, "straight": "logistic"}
    compared = coterie.compare(people(), ["local", "fedavg"], 2, models=models, rounds=1)
    assert compared.axes == ["model"]
    assert {(r["model"], r["seed"]) for r in compared.rows} == {
        (m, s) for m in models for s in (0, 1)
    }
    assert all(row["gain"] is not None for row in compared.rows if row["method"] == "fedavg")


def test_a_population_has_its_true_groups():
    population = build_population(
        load("digits"),
        clients=4,
        partition="iid",
        samples=200,
        shift="rotation",
        shift_params={"groups": 2},
    )
    known = coterie.compare(population, rounds=1, lr=0.1)
    assert "oracle" in titles(known)
    assert "oracle" not in titles(coterie.compare(people(), rounds=1))
    with pytest.raises(ConfigError, match="needs clients with known groups"):
        coterie.compare(people(), ["oracle"], rounds=1)


def test_a_comparison_in_a_folder_goes_on_only_from_python(tmp_path):
    where = tmp_path / "own"
    first = coterie.compare(people(), ["local", "fedavg"], 1, rounds=1, directory=where)
    with pytest.raises(RunDirError, match="resume=True"):
        coterie.compare(people(), ["local", "fedavg"], 1, rounds=1, directory=where)
    more = coterie.compare(people(), ["local", "fedavg"], 2, rounds=1, directory=where, resume=True)
    assert [r for r in more.rows if r["seed"] == 0] == first.rows
    assert len(more.rows) == 4
    assert go_on(where, Look()).rows == more.rows  # the table needs no clients
    with pytest.raises(ConfigError, match=r"from Python with more seeds"):
        go_on(where, Look(), seeds=[7])
    (where / "fedavg" / "seed-1" / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"compare\(..., directory=..., resume=True\)"):
        go_on(where, Look())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": [coterie.fedavg]}, "fedavg is neither a name nor a method"),
        ({"methods": ["fedavg", "fedavg"]}, "given twice"),
        ({"methods": ["fedagv"]}, "did you mean 'fedavg'"),
        ({"partitions": ["iid"]}, "yours are divided already"),
        ({"vary": {"data.clients": [1, 2]}}, "the clients are your own"),
        ({"learning_rate": 0.1}, "unknown setting 'learning_rate'"),
        ({"models": [net, net]}, "two are called net"),
        ({"resume": True}, "resume needs the directory"),
        ({"tune": {"lr": [0.1]}}, "two values or more"),
        ({"tune": {"method.mu": [0.1, 1]}}, "only training settings"),
        ({"tune": {"lr": [0.1, 1]}, "vary": {"lr": [0.1, 1]}}, "it is varied, too"),
        ({"tune": {"lr": [0.1, 1]}, "methods": ["fedavg:train.lr=1"]}, "sets it already"),
        ({"tune": {"lr": [0.1, 1]}, "val_fraction": 0.0}, "no client has any"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message):
        coterie.compare(people(), **{"methods": ["fedavg"], "rounds": 1, **arguments})


def test_settings_belong_in_a_configuration():
    with pytest.raises(ConfigError, match="settings are keys of it"):
        coterie.compare({"data": {"clients": 4}}, lr=0.1)


def test_methods_may_be_objects_beside_a_configuration():
    quick = {"data": {"clients": 4, "samples": 200}, "run": {"rounds": 1, "engine": "loop"}}
    both = coterie.compare(quick, ["ifca:k=2", coterie.fedprox(mu=0.5)])
    assert both.rows[1]["method"] == "fedprox mu=0.5"
    named = coterie.compare(quick, ["fedprox:mu=0.5"])
    assert named.rows[0]["received"] == both.rows[1]["received"]
    with pytest.raises(ConfigError, match="cannot be described in a configuration"):
        coterie.compare(quick, [coterie.grouped("mine", coterie.by_loss(2))])


# --- tuning --------------------------------------------------------------------------------------


def validation_scores(method, rates, **settings):
    """What the rule must come to, from runs of their own."""
    runs = [coterie.simulate(people(), method=method, lr=lr, **settings) for lr in rates]
    return [run.summary[run.summary["headline"]]["val"] for run in runs]


def test_each_method_gets_the_value_that_is_best_on_validation_data(tmp_path):
    rates, settings = [0.001, 0.3, 30.0], {"rounds": 3, "model": "logistic"}
    tuned = coterie.compare(
        people(), ["local", "fedavg"], 2, directory=tmp_path / "t", tune={"lr": rates}, **settings
    )
    for method in ("local", "fedavg"):
        scores = validation_scores(method, rates, **settings)
        best = rates[scores.index(max(scores))]
        about = tuned.tuning["rows"][method]
        assert about["chosen"] == {"train.lr": best}
        assert [one["val"] for one in about["tried"]] == scores
        for row in [r for r in tuned.rows if r["method"] == method]:
            alone = coterie.simulate(people(), method=method, lr=best, seed=row["seed"], **settings)
            assert row["received"] == alone.accuracy
    kept = json.loads((tmp_path / "t" / "tuning.json").read_text())
    assert kept["rows"] == tuned.tuning["rows"]
    assert not (tmp_path / "t" / "tuning").exists()
    again = go_on(tmp_path / "t", Look())
    assert again.rows == tuned.rows
    assert again.tuning == json.loads(json.dumps(tuned.tuning))


def test_what_was_chosen_and_its_cost_are_in_the_table():
    tuned = coterie.compare(people(), ["local", "fedavg"], rounds=1, tune={"lr": [0.1, 0.2]})
    text = tuned.markdown()
    chosen = tuned.tuning["rows"]["fedavg"]["chosen"]["train.lr"]
    assert f"fedavg: lr {chosen}" in text
    assert "tuning took 4 runs" in text
    assert "one learning rate" not in text


def test_without_tuning_the_table_says_so():
    plain = coterie.compare(people(), ["local", "fedavg"], rounds=1, lr=0.07)
    assert "all methods ran at one learning rate, 0.07" in plain.markdown()
    own = coterie.compare(people(), ["local", "fedavg:train.lr=0.5"], rounds=1)
    assert "one learning rate" not in own.markdown()
    varied = coterie.compare(people(), ["local", "fedavg"], vary={"lr": [0.1, 0.2]}, rounds=1)
    assert "one learning rate" not in varied.markdown()


def test_a_value_that_fails_is_not_chosen():
    tuned = coterie.compare(
        people(), ["local", "fedavg"], rounds=2, model=net, tune={"lr": [1e30, 0.1]}
    )
    assert {about["chosen"]["train.lr"] for about in tuned.tuning["rows"].values()} == {0.1}
    assert "failed while tuning" in tuned.markdown()
    with pytest.raises(Diverged, match="Lower the learning rate"):
        coterie.compare(people(), ["local"], rounds=2, tune={"lr": [1e30, 1e31]}, model=net)


# --- names with parameters ----------------------------------------------------------------------


def test_names_take_parameters_wherever_a_name_is_expected():
    tree = {"method": {"name": "ifca:k=4"}, "partition": {"name": "dirichlet:alpha=0.1"}}
    spelled = spelled_out(tree | {"model": {"name": "mlp:hidden=[8, 8]"}})
    assert spelled["method"] == {"name": "ifca", "k": 4}
    assert spelled["partition"] == {"name": "dirichlet", "alpha": 0.1}
    assert spelled["model"] == {"name": "mlp", "hidden": [8, 8]}
    own = spelled_out({"method": {"name": "mine.py:f:k=2"}})
    assert own["method"] == {"name": "mine.py:f", "k": 2}
    assert spelled_out({"method": {"name": "mine.py:f"}}) == {"method": {"name": "mine.py:f"}}
    with pytest.raises(ConfigError, match="k is given twice"):
        spelled_out({"method": {"name": "ifca:k=4", "k": 3}})
    settings = {"model": "logistic", "rounds": 1, "engine": "loop"}
    by_name = coterie.simulate(people(), method="ifca:k=3", **settings)
    by_call = coterie.simulate(people(), method=coterie.ifca(k=3), **settings)
    assert by_name.groups == by_call.groups
    assert torch.equal(by_name.weights(0).vector, by_call.weights(0).vector)
