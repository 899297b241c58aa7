"""Papers' set-ups: what they say is what the papers say, and all of it can be run."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from coterie.cli.options import resolve
from coterie.data import build_population, describe, files, load, pairwise_kl
from coterie.data.partitions import DRAWS, LEVELS, primary_secondary, thirds
from coterie.errors import ConfigError, DataError
from coterie.experiment.compare.compare import method_list, set_up
from coterie.experiment.config import assign_texts, method_of, parse, population_of
from coterie.experiment.scenarios import (
    SCENARIOS,
    ChosenScenario,
    Scenario,
    choose,
    is_available,
    scenario,
    stand_in,
)
from coterie.experiment.scenarios.available import SIZES, STAND_INS
from coterie.experiment.scenarios.load import read_scenarios
from coterie.experiment.scenarios.scenario import SCORES, overlay
from coterie.methods import METHODS, make
from coterie.models import make_model
from coterie.report.scenario_tables import paper_notes, print_scenario, target_lines

# Typed from the papers, not from the tables in the code: (scenario, method, accuracy in per cent).
CELLS = [
    ("fedclust/fmnist-skew20", "fedclust", 97.92),
    ("fedclust/fmnist-skew20", "fedavg", 77.10),
    ("fedclust/cifar10-skew20", "fedclust", 95.82),
    ("fedclust/svhn-skew20", "pacfl", 95.48),
    ("fedclust/cifar100-skew30", "ifca", 66.21),
    ("fedclust/cifar10-skew30", "lg-fedavg", 75.42),
    ("fedclust/svhn-dir0.1", "fedclust", 78.23),
    ("fedclust/fmnist-dir0.1", "fednova", 83.68),
    ("fedclust/cifar10-newcomers", "fedprox", 27.74),
    ("fedclust/svhn-newcomers", "fedclust", 95.19),
    ("dc-pfl/cifar10-high", "dc-pfl", 81.7),
    ("dc-pfl/cifar10-low", "local", 75.0),
    ("dc-pfl/fmnist-mid", "clusterfl", 87.9),
    ("dc-pfl/fmnist-high", "fedavg", 80.1),
    ("dc-pfl/fmnist-mid", "dc-pfl dynamic=false gamma=0.8", 91.3 - 6.2),
    ("dc-pfl/cifar10-mid", "dc-pfl dynamic=false gamma=0.8", 82.7 - 3.1),
    ("fedtsdp/cifar10-dir0.2", "fedtsdp", 84.75),
    ("fedtsdp/cifar10-dir0.2", "fedper", 82.59),
    ("fedtsdp/svhn-iid-resnet18", "fedprox", 93.82),
    ("fedtsdp/cifar100-dir0.5-resnet18", "fedtsdp", 43.17),
    ("fedtsdp/cifar10-two-class", "ditto", 63.59),
    ("fedtsdp/cifar10-two-class-resnet18", "cfl", 78.80),
    ("user-centric/label", "fedprox", 79.6),
    ("user-centric/label", "user-centric", 79.4),
    ("user-centric/covariate", "user-centric streams=4", 79.7),
    ("user-centric/concept", "oracle", 49.5),
    ("user-centric/concept", "scaffold", 17.5),
    ("survey/adaptive-cifar10", "fedavg", 57.20),
    ("survey/adaptive-cifar10", "adaptive every=200", 64.00),
    ("survey/adaptive-cifar10", "adaptive", 66.50),
    ("survey/k-fed-d100-k16", "k-fed", 100.0),
    ("survey/k-fed-d300-k64", "k-fed", 98.82),
    ("survey/k-fed-d300-k100", "k-fed", 98.40),
    ("survey/fedfomo-cifar10", "per-fedavg", 72.40),
    ("survey/fedfomo-cifar10", "fedfomo", 92.10),
    ("survey/fedfomo-cifar100", "fedavg", 23.11),
    ("survey/fedfomo-cifar100", "fedprox", 39.79),
]
SETTINGS = [
    ("fedclust/fmnist-skew20", "data.clients", 100),
    ("fedclust/fmnist-skew20", "run.cohort", 0.1),
    ("fedclust/fmnist-skew20", "run.rounds", 200),
    ("fedclust/fmnist-skew20", "train.epochs", 10),
    ("fedclust/fmnist-skew20", "train.batch_size", 10),
    ("fedclust/fmnist-skew20", "train.momentum", 0.5),
    ("fedclust/fmnist-skew20", "method.clusters", 4),
    ("fedclust/svhn-skew20", "method.clusters", 2),
    ("fedclust/cifar100-dir0.1", "model.name", "resnet9"),
    ("fedclust/cifar100-dir0.1", "partition.alpha", 0.1),
    ("fedclust/cifar10-skew30", "partition.fraction", 0.3),
    ("fedclust/fmnist-newcomers", "run.rounds", 50),
    ("fedclust/fmnist-newcomers", "run.holdout", 20),
    ("fedclust/fmnist-newcomers", "run.admit_epochs", 5),
    ("dc-pfl/cifar10-high", "data.clients", 50),
    ("dc-pfl/cifar10-high", "partition.level", "high"),
    ("dc-pfl/cifar10-high", "train.batch_size", 32),
    ("dc-pfl/cifar10-high", "method.sleep", 6),
    ("dc-pfl/fmnist-low", "model.name", "cnn5"),
    ("fedtsdp/cifar10-dir0.2", "train.lr_decay", 0.95),
    ("fedtsdp/cifar10-dir0.2", "train.lr", 0.05),
    ("fedtsdp/cifar10-dir0.2", "data.clients", 20),
    ("fedtsdp/cifar10-dir0.2", "data.public", 10_000),
    ("fedtsdp/svhn-dir0.5", "data.public", 26_032),
    ("fedtsdp/svhn-dir0.5", "method.eps_weights", 3.5),
    ("fedtsdp/cifar10-two-class", "partition.per_client", 2),
    ("fedtsdp/svhn-iid-resnet18", "model.name", "resnet18"),
    ("user-centric/label", "data.samples", 10_000),
    ("user-centric/label", "method.variance_batch", 100),
    ("user-centric/label", "model.init", "authors"),
    ("user-centric/text", "model.init", "authors"),
    ("user-centric/text", "model.name", "text"),
    ("fedclust/fmnist-skew20", "model.init", "torch"),
    ("user-centric/covariate", "data.clients", 100),
    ("user-centric/covariate", "partition.alpha", 8),
    ("user-centric/covariate", "shift.name", "rotation"),
    ("user-centric/concept", "shift.name", "label-permutation"),
    ("user-centric/concept", "train.momentum", 0.9),
    ("user-centric/text", "data.clients", 35),
    ("user-centric/text", "train.batch_size", 32),
    ("user-centric/text", "method.streams", 16),
]
EVERY = list(SCENARIOS)


def laid(name: str, given: dict):
    """A scenario with settings laid over it, whatever data are available."""
    return choose(scenario(name), given, stand_in=True)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("name", "method", "accuracy"), CELLS)
def test_figures_are_those_of_the_papers(name, method, accuracy):
    assert scenario(name).figures[method] == pytest.approx(accuracy / 100, abs=1e-9)


@pytest.mark.parametrize(("name", "key", "value"), SETTINGS)
def test_settings_are_those_of_the_papers(name, key, value):
    table, leaf = key.split(".")
    assert parse(scenario(name).tree()).model_dump()[table][leaf] == value


def test_every_cell_of_the_papers_is_there():
    count = {p: [s for s in SCENARIOS.values() if s.method == p] for p in METHODS_OF}
    assert {p: len(found) for p, found in count.items()} == METHODS_OF
    rows = {"fedclust": {9, 10}, "dc-pfl": {5, 6}, "fedtsdp": {6}, "user-centric": {0, 8, 9}}
    rows |= {"adaptive": {3}, "k-fed": {1}, "fedfomo": {4}}
    for paper, found in count.items():
        assert {len(s.figures) for s in found} == rows[paper]
    counted = 12 * 10 + 4 * 9 + 32 + 20 * 6 + 26 + 3 + 3 + 2 * 4
    assert sum(len(s.figures) for s in SCENARIOS.values()) == counted
    assert scenario("fedclust/fmnist-skew20").spread["fednova"] == 0.045
    assert scenario("user-centric/covariate").worst["cfl"] == 0.761


METHODS_OF = {"fedclust": 16, "dc-pfl": 6, "fedtsdp": 20, "user-centric": 4}
METHODS_OF |= {"adaptive": 1, "k-fed": 3, "fedfomo": 2}


# Typed from tables 4 and 5 of FedClust's paper; None is a dash.
COSTS = [
    ("fedclust/cifar10-skew20", 0.80, "rounds", {"fedavg": None, "lg-fedavg": 27, "fedclust": 13}),
    ("fedclust/cifar100-skew20", 0.50, "rounds", {"fedavg": 135, "lg-fedavg": None, "cfl": None}),
    ("fedclust/fmnist-skew20", 0.75, "rounds", {"fednova": None, "cfl": 47, "fedclust": 7}),
    ("fedclust/svhn-skew20", 0.75, "rounds", {"per-fedavg": 37, "ifca": 19, "pacfl": 15}),
    ("fedclust/cifar10-skew30", 0.70, "megabits", {"fedprox": None, "ifca": 16.66, "pacfl": 10.31}),
    ("fedclust/cifar100-skew30", 0.50, "megabits", {"fednova": 3601.98, "lg-fedavg": None}),
    ("fedclust/fmnist-skew30", 0.80, "megabits", {"fedavg": 79.36, "cfl": None, "fedclust": 4.60}),
    ("fedclust/svhn-skew30", 0.80, "megabits", {"fednova": 79.36, "per-fedavg": 18.65}),
]


@pytest.mark.parametrize(("name", "target", "cost", "cells"), COSTS)
def test_costs_to_a_target_are_those_of_the_paper(name, target, cost, cells):
    found = scenario(name)
    assert found.target == parse(found.tree()).evaluation.target == target
    assert parse(found.tree()).evaluation.every == 1  # a round is the paper's resolution
    published = {"rounds": found.rounds_to_target, "megabits": found.megabits_to_target}
    assert {method: published[cost][method] for method in cells} == cells
    assert set(published[cost]) == set(found.figures) - {"local"}
    other = "megabits" if cost == "rounds" else "rounds"
    assert not published[other]
    never = laid(name, {"method": {"name": "cfl"}}).about()["to_target"]
    assert never == {"target": target, cost: published[cost]["cfl"]}
    assert laid(name, {"method": {"name": "local"}}).about()["to_target"] == {"target": target}


FOR_ONE = 2 * 32 * 10 / 100 / 1e6  # Mbit a client of one number, down and up, 10 of 100 a round


@pytest.mark.parametrize(
    ("short", "shape", "a_round", "rounds"),
    [
        ("svhn", (3, 32, 32), 0.3968, {"fedavg": 180, "fedprox": 180, "fednova": 200}),
        ("fmnist", (3, 32, 32), 0.3968, {"fedavg": 200, "fedprox": 180}),
        ("cifar100", (3, 32, 32), 42.37, {"fedavg": 100, "fednova": 85, "per-fedavg": 150}),
    ],
)
def test_what_megabits_count_is_told_by_the_model(short, shape, a_round, rounds):
    found = scenario(f"fedclust/{short}-skew30")
    classes = 100 if short == "cifar100" else 10
    model = make_model(found.config["model"]["name"], shape, classes)
    numbers = sum(p.numel() for p in model.parameters())
    assert numbers * FOR_ONE == pytest.approx(a_round, rel=5e-4)
    for method, count in rounds.items():
        assert found.megabits_to_target[method] == pytest.approx(count * a_round, rel=5e-4)
    note = next(n for n in found.notes if "megabits" in n)
    assert str(a_round) in note
    told = {"LeNet-5": "lenet5", "ResNet-9": "resnet9"}
    assert [m for words, m in told.items() if words in note] == [found.config["model"]["name"]]
    grey = make_model("lenet5", (1, 28, 28), 10)
    ours = sum(p.numel() for p in grey.parameters())
    assert (f"{ours:,} numbers" in note) == (short == "fmnist")
    assert (f"{ours * FOR_ONE:.4f}" in note) == (short == "fmnist")


def test_costs_are_the_papers_only_for_its_target_and_parameters():
    name = "fedclust/cifar10-skew20"
    assert laid(name, {}).about()["to_target"] == {"target": 0.8, "rounds": 13}
    assert laid(name, {"method": {"threshold": 1.5}}).about()["to_target"] == {"target": 0.8}
    other = laid(name, {"evaluation": {"target": 0.5}})
    assert other.about()["to_target"] is None
    assert other.changed == ["evaluation.target 0.5 instead of 0.8"]
    coarse = laid(name, {"evaluation": {"every": 5, "adapt_every": 5}})
    assert coarse.changed == ["evaluation.every 5 instead of 1"]
    assert laid("fedclust/cifar10-dir0.1", {"evaluation": {"every": 7}}).changed == []
    assert laid("fedclust/cifar10-dir0.1", {}).about()["to_target"] is None


def test_rounds_without_a_target():
    name = "survey/adaptive-cifar10"
    assert scenario(name).target is None
    published = {"fedavg": 120, "adaptive every=200": 95, "adaptive": 80}  # the survey's table I
    assert scenario(name).rounds_to_target == published
    static = laid(name, {"method": {"name": "adaptive", "every": 200}}).about()
    assert (static["figure"], static["to_target"]) == (0.64, {"target": None, "rounds": 95})
    told = target_lines(static, {"rounds": 61})
    assert told == ["the paper's run took 95 rounds, ours 61"]


def test_the_words_for_a_target():
    def told(costs, **summary):
        return target_lines({"to_target": costs}, summary)

    reached = {"round": 4, "bytes": {"down": 600_000, "up": 400_000}, "clients": 4}
    assert told({"target": 0.8, "rounds": 13}, to_target=reached) == [
        "80.0 %: in the paper after 13 rounds, here after 4 rounds"
    ]
    assert told({"target": 0.8, "megabits": 8.66}, to_target=reached) == [
        "80.0 %: in the paper after 8.66 Mbit a client, here after 2 Mbit a client"
    ]
    assert told({"target": 0.8, "rounds": None}, to_target=None, to_target_adapted=reached) == [
        "80.0 %: in the paper never, here never (adapted score: after 4 rounds)"
    ]
    assert told({"target": 0.8}, to_target=reached) == []  # the method is not in the table
    assert told(None, to_target=reached) == told({"target": 0.8, "rounds": 13}) == []


def test_which_score_the_papers_mean():
    newcomers = scenario("fedclust/svhn-newcomers")
    received = [m for m in newcomers.figures if newcomers.score_of(m) == "received"]
    assert received == ["fedavg", "fedprox", "fednova"]
    about = laid("fedclust/svhn-newcomers", {"method": {"name": "fedavg"}}).about()
    assert (about["score"], about["newcomers"]) == ("received", True)
    assert laid("fedclust/svhn-newcomers", {}).about()["score"] == "adapted"
    assert {scenario(n).score for n in EVERY if n.startswith("fedtsdp/")} == {"received"}
    assert scenario("fedclust/svhn-skew20").score == "unknown"
    assert scenario("fedclust/svhn-newcomers").score == "adapted"
    assert scenario("fedclust/svhn-newcomers").newcomers
    assert scenario("dc-pfl/fmnist-low").score == "unknown"


@pytest.mark.parametrize("name", EVERY)
def test_every_scenario_is_whole(name):
    found = scenario(name)
    assert parse(found.tree()).data.set == found.data
    assert found.score in SCORES
    assert found.paper
    assert found.table
    assert found.description
    assert "\n" not in found.description
    for numbers in (found.figures, found.spread, found.worst):
        assert all(0 <= value <= 1 for value in numbers.values())
    for costs in (found.rounds_to_target, found.megabits_to_target):
        assert set(costs) <= set(found.figures)
    assert set(found.scores) <= set(found.figures)
    assert set(found.spread) <= set(found.figures)
    keys = (*found.figures, *found.worst, *found.per_method)
    assert {key.split()[0] for key in keys} <= set(METHODS)
    for key in found.figures:  # as --methods writes it, and back
        assert method_list(key.replace(" ", ":"))[0][0] == key
        assert parse(found.tree(key.split()[0])).method.name == key.split()[0]


PAPER = """
[defaults]
paper = "Doe et al., 2024"
notes = ["A mean of three runs."]
config.method = { name = "ifca", k = 2 }

[[tables]]
table = "table 1"
config.data.set = "digits"

[[tables.scenarios]]
name = "doe/first"
description = "one of two"

[[tables.scenarios]]
name = "doe/second"
description = "two of two"
notes = ["With other settings."]
config.method = { name = "fedprox", mu = 0.1 }

[tables.figures]
ifca    = [50.0, "-"]
fedprox = [25.5, 30.1]

[tables.rounds_to_target]
ifca = [12, "never"]
"""


def test_a_scenario_inherits_from_its_table_and_from_the_papers_defaults(tmp_path):
    path = tmp_path / "doe.toml"
    path.write_text(PAPER)
    first, second = read_scenarios(path)
    assert first.config == {"data": {"set": "digits"}, "method": {"name": "ifca", "k": 2}}
    assert second.config["method"] == {"name": "fedprox", "mu": 0.1}
    assert second.notes == ("A mean of three runs.", "With other settings.")
    assert (second.paper, second.table) == ("Doe et al., 2024", "table 1")
    assert first.figures == {"ifca": 0.5, "fedprox": 0.255}
    assert second.figures == {"fedprox": 0.301}
    assert (first.rounds_to_target, second.rounds_to_target) == ({"ifca": 12}, {"ifca": None})


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("[defaults]", "[default]", "default: Extra inputs are not permitted"),
        ('paper = "', 'papr = "', "doe/first: paper: Field required; papr: Unexpected"),
        ("[tables.figures]", "[tables.figure]", "doe/first: figure: Unexpected"),
        ("data.set", "data.sett", "doe/first: unknown key 'data.sett'; did you mean 'data.set'"),
        ('notes = ["With', 'note = ["With', "doe/second: note: Unexpected"),
        ("[12, ", "[12, 3, ", "rounds_to_target.ifca has 3 cells for 2 scenarios"),
        ('"never"', '"nver"', "tables.0.rounds_to_target.ifca.1"),
        ("ifca    = [50.0", 'ifca    = ["high"', "tables.0.figures.ifca.0"),
        ('table = "table 1"', 'score = "good"', "score: Input should be 'received'"),
        ("[[tables.scenarios]]", "[[tables.scenario]]", "tables.0.scenarios: Field required"),
        ('table = "table 1"', "table = ", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_papers_file_is_named(written, instead, message, tmp_path):
    path = tmp_path / "doe.toml"
    assert written in PAPER
    path.write_text(PAPER.replace(written, instead))
    with pytest.raises(ConfigError) as error:
        list(read_scenarios(path))
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_papers_files_are_read_when_a_scenario_is_asked_for():
    script = """
import sys
import coterie.cli.app
assert "coterie.experiment.scenarios" not in sys.modules
from coterie.experiment import scenarios
assert scenarios._scenarios.cache_info().currsize == 0
assert len(scenarios.SCENARIOS) == 52
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# What is said of published figures, and how a note would say it again.
SAID = {
    "unknown": r"received or adapted scores|before it is scored",
    "clustering": r"share of samples|not\s+measure",
    "received": r"comparable with|compare with (our )?received",
    "adapted": r"comparable with|compare with (our )?(received|adapted)",
}


@pytest.mark.parametrize("name", [n for n in EVERY if scenario(n).figures])
def test_with_what_figures_are_comparable_is_said_once(name):
    out = Console(file=io.StringIO(), width=100)
    print_scenario(out, scenario(name))
    lines = [line for line in out.file.getvalue().splitlines() if line.startswith("- ")]
    told = [line for line in lines if re.search(SAID[scenario(name).score], line)]
    assert len(told) == 1
    assert told[0].startswith("- The paper's figures: ")


@pytest.mark.parametrize("name", EVERY)
def test_methods_that_there_are_take_the_parameters(name):
    found = scenario(name)
    for key in found.figures:
        _, method, parameters = method_list(key.replace(" ", ":"))[0]
        if method in METHODS:
            tree = found.tree(method)
            make(method, {k: v for k, v in tree["method"].items() if k != "name"} | parameters)
    if found.method in METHODS:
        assert found.method == make(*_split(found.tree()["method"])).name


def _split(table):
    return table["name"], {k: v for k, v in table.items() if k != "name"}


def runs(config):
    """A population and a model of a configuration that fit each other."""
    population = population_of(config)
    model = make_model(
        config.model.name, population.shape, population.targets, **config.model.parameters
    )
    x = population.clients[0].train.x[:2]
    with torch.no_grad():
        outputs = model.eval()(x.float() / 255)
    assert outputs.shape == (len(x), population.targets)
    assert len(population.clients) == config.data.clients
    return population


@pytest.mark.parametrize("name", EVERY)
def test_every_scenario_can_be_run_with_no_file_at_all(name):
    chosen = choose(scenario(name), {}, stand_in=True)
    assert chosen.data == ("mixture" if name.startswith("survey/k-fed") else "digits")
    population = runs(parse(chosen.tree))
    wants_public = scenario(name).method == "fedtsdp"
    assert (population.public is not None) == wants_public
    if wants_public:
        assert len(population.public) >= chosen.tree["method"]["public_batch"]


@pytest.mark.parametrize(
    "name",
    ["user-centric/covariate", pytest.param("fedtsdp/svhn-dir0.5", marks=pytest.mark.e2e)],
)
def test_stand_ins_can_be_run_on_real_data(name):
    folder = os.environ.get("COTERIE_DATA")
    if not folder:
        pytest.skip("set COTERIE_DATA to a folder with the real data sets to run this")
    first = STAND_INS[scenario(name).data][0]
    chosen = choose(scenario(name), {"data": {"folder": folder}}, stand_in=True)
    assert chosen.data == first, "this folder should have the stand-in, but not the set itself"
    small = {"data": {"folder": folder, "samples": 3000, "public": 100}}
    runs(parse(choose(scenario(name), small, stand_in=True).tree))
    sizes = load(first, folder)
    assert (len(sizes), len(sizes.held_out[1])) == SIZES[first]


# --- what is available -------------------------------------------------------------------------

IDX = [
    f"{part}-{content}-ubyte"
    for part in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
]
LETTERS = [f"emnist-balanced-{f.replace('t10k', 'test')}" for f in IDX]
TEN = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
PLACED = [
    ("mnist", "mnist", IDX),
    ("mnist", "MNIST/raw", [f"{f}.gz" for f in IDX]),
    ("fashion-mnist", "FashionMNIST/raw", IDX),
    ("fashion-mnist", ".", IDX),
    ("emnist", "emnist/gzip", [f"{f}.gz" for f in LETTERS]),
    ("emnist", "EMNIST/raw", LETTERS),
    ("emnist", "emnist", ["gzip.zip"]),
    ("svhn", "SVHN", ["train_32x32.mat", "test_32x32.mat"]),
    ("cifar-10", "cifar-10-batches-py", TEN),
    ("cifar-10", "cifar-10", [f"{f}.bin" for f in TEN]),
    ("cifar-10", ".", ["cifar-10-binary.tar.gz"]),
    ("cifar-10", "cifar-10", ["images.tar.xz"]),
    ("cifar-100", "cifar-100/cifar-100-python", ["train", "test"]),
    ("cifar-100", "cifar-100", ["cifar-100-python.tar.gz"]),
]


def put(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"nothing")


class Fetched(Exception):
    pass


@pytest.mark.parametrize(("name", "place", "names"), PLACED)
def test_available_means_what_the_loaders_find(name, place, names, tmp_path, monkeypatch):
    def fetch(*_, **__):
        raise Fetched

    for module in ("sets", "cifar"):
        monkeypatch.setattr(f"coterie.data.{module}.download", fetch)
    assert not is_available(name, tmp_path)
    with pytest.raises(Fetched):
        load(name, tmp_path)
    put(tmp_path / place, names)
    assert is_available(name, tmp_path)
    with pytest.raises(DataError):  # it reads what is there, and this is nothing
        load(name, tmp_path)
    (tmp_path / place / names[-1]).unlink()
    assert not is_available(name, tmp_path)


def test_what_was_downloaded_is_available(tmp_path, monkeypatch):
    assert not is_available("svhn")
    put(files.cache_folder() / "svhn", ["train_32x32.mat"])
    assert not is_available("svhn")
    put(files.cache_folder() / "svhn", ["test_32x32.mat"])
    assert is_available("svhn")
    assert not is_available("svhn", options={"cache": str(tmp_path / "other")})


def test_the_nearest_stand_in_is_taken(tmp_path):
    assert stand_in("svhn", tmp_path) == "digits"
    put(tmp_path / "mnist", IDX)
    assert stand_in("svhn", tmp_path) == "digits"
    assert stand_in("emnist", tmp_path) == "mnist"
    assert stand_in("fashion-mnist", tmp_path) == "mnist"
    put(tmp_path / "cifar-10", TEN)
    assert stand_in("svhn", tmp_path) == stand_in("cifar-100", tmp_path) == "cifar-10"
    put(tmp_path / "SVHN", ["train_32x32.mat", "test_32x32.mat"])
    assert stand_in("svhn", tmp_path) == "svhn"


def test_a_folder_that_is_not_there_is_a_mistake():
    with pytest.raises(DataError, match="/nowhere"):
        choose(scenario("fedclust/svhn-skew20"), {"data": {"folder": "/nowhere"}})


def test_a_csv_file_is_the_text_that_the_scenario_wants(tmp_path):
    questions = [f"how do i use {'snake' if i % 2 else 'bean'} number {i}" for i in range(700)]
    rows = [f"{q},{'python' if i % 2 else 'java'}" for i, q in enumerate(questions)]
    path = tmp_path / "questions.csv"
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    chosen = choose(scenario("user-centric/text"), {"data": {"folder": str(path), "samples": 700}})
    assert (chosen.data, chosen.warning, chosen.instead) == ("text", None, None)
    assert chosen.tree["model"] == {"name": "text", "init": "authors"}
    assert len(population_of(parse(chosen.tree)).clients) == 35


# --- choosing --------------------------------------------------------------------------------


def test_it_is_said_that_another_set_is_used():
    chosen = choose(scenario("fedclust/svhn-skew20"), {}, stand_in=True)
    assert "svhn is not available, so digits is used instead" in chosen.warning
    assert chosen.instead == "on digits instead of svhn"
    text = choose(scenario("user-centric/text"), {}, stand_in=True)
    assert "digits is used instead" in text.warning
    assert text.tree["model"] == {"name": "mlp", "init": "authors"}
    images = scenario("user-centric/label").tree(data="text")
    assert images["model"] == {"name": "text", "init": "authors"}


def test_data_that_are_missing_are_asked_for(tmp_path):
    with pytest.raises(ConfigError) as told:
        choose(scenario("fedclust/svhn-skew20"), {"data": {"folder": str(tmp_path)}})
    cache = tmp_path / "cache" / "svhn"
    for part in (
        "fedclust/svhn-skew20 needs the data set svhn, which is not available",
        f"looked for in {tmp_path} and {cache}",
        "--folder DIR",
        "--data svhn",
        "or use digits in its place with --stand-in",
    ):
        assert part in str(told.value)
    put(tmp_path / "cifar-10", TEN)
    with pytest.raises(ConfigError, match="use cifar-10 in its place with --stand-in"):
        choose(scenario("fedclust/svhn-skew20"), {"data": {"folder": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"Stack Overflow.*CSV file.*--stand-in"):
        choose(scenario("user-centric/text"), {})
    put(cache, ["train_32x32.mat", "test_32x32.mat"])
    for stand_in_or_not in (False, True):
        chosen = choose(scenario("fedclust/svhn-skew20"), {}, stand_in_or_not)
        assert (chosen.data, chosen.warning, chosen.instead) == ("svhn", None, None)


def test_the_users_own_set_wins_without_a_word():
    chosen = choose(scenario("user-centric/label"), {"data": {"set": "mnist"}})
    assert (chosen.data, chosen.warning) == ("mnist", None)
    assert chosen.instead == "on mnist instead of emnist"
    assert "options" not in chosen.tree["data"]
    same = choose(scenario("user-centric/label"), {"data": {"set": "emnist"}})
    assert (same.data, same.instead) == ("emnist", None)
    assert same.tree["data"]["options"] == {"split": "balanced"}


def test_sizes_are_bounded_by_what_the_stand_in_has():
    tree = scenario("user-centric/covariate").tree(data="mnist")
    assert tree["data"]["samples"] == 60_000
    assert scenario("fedtsdp/svhn-iid").tree(data="cifar-10")["data"]["public"] == 10_000
    assert scenario("fedtsdp/svhn-iid").tree(data="digits")["data"]["public"] == 179


def test_what_the_user_sets_is_laid_over_the_scenario():
    given = {"run": {"rounds": 3}, "partition": {"name": "iid"}, "train": {"lr": 0.5}}
    chosen = laid("fedclust/cifar10-skew20", given)
    assert chosen.tree["partition"] == {"name": "iid"}  # without the old one's fraction
    assert chosen.tree["run"] == {"rounds": 3, "cohort": 0.1}
    assert chosen.changed == [
        "partition.name iid instead of label-skew",
        "partition.fraction unset instead of 0.2",
        "train.lr 0.5 instead of 0.01",
        "run.rounds 3 instead of 200",
    ]
    assert not laid("fedclust/cifar10-skew20", {"run": {"seed": 5}}).changed


def test_what_the_user_sets_wrongly_is_said():
    for given in ({"data": {"set": 3}}, {"data": 3}, {"run": {"round": 3}}, {"nothing": {}}):
        with pytest.raises(ConfigError):
            choose(scenario("fedclust/cifar10-skew20"), given)


def test_a_method_has_its_own_settings():
    name = "fedclust/fmnist-skew20"
    fedavg = laid(name, {"method": {"name": "fedavg"}}).tree
    assert fedavg["method"] == {"name": "fedavg"}
    assert (fedavg["train"]["momentum"], fedavg["train"]["epochs"]) == (0.9, 10)
    assert laid(name, {"method": {"name": "ifca"}}).tree["method"]["k"] == 2
    assert laid(name, {"method": {"name": "ifca", "k": 5}}).tree["method"]["k"] == 5
    assert laid(name, {}).tree["train"]["momentum"] == 0.5
    mine = {"method": {"name": "fedavg"}, "train": {"momentum": 0.1}}
    assert laid(name, mine).tree["train"]["momentum"] == 0.1
    assert scenario(name).config["train"]["momentum"] == 0.5  # the preset itself is never changed
    scaffold = scenario("user-centric/label").tree("scaffold")["train"]
    assert (scaffold["epochs"], scaffold["momentum"]) == (5, 0.0)
    assert scenario("user-centric/label").tree("pfedme")["train"]["batch_size"] == 20


def figure(name: str, method: dict) -> float | None:
    return laid(name, {"method": method}).about()["figure"]


def test_a_figure_belongs_to_a_method_with_its_parameters():
    place = "user-centric/covariate"
    assert figure(place, {"name": "user-centric"}) == 0.779
    assert figure(place, {"name": "user-centric", "streams": "all"}) == 0.779
    assert figure(place, {"name": "user-centric", "streams": 4}) == 0.797
    assert figure(place, {"name": "user-centric", "streams": 5}) is None
    assert figure(place, {"name": "fedprox", "mu": 0.5}) == 0.724  # a baseline: by its name
    assert figure(place, {"name": "fedclust"}) is None
    assert figure("dc-pfl/cifar10-mid", {"name": "dc-pfl"}) == 0.827
    assert figure("dc-pfl/cifar10-mid", {"name": "dc-pfl", "alpha": 1}) is None
    fixed = {"name": "dc-pfl", "dynamic": False, "gamma": 0.8}
    assert figure("dc-pfl/cifar10-mid", fixed) == 0.796
    assert figure("user-centric/text", {}) is None
    json.dumps(laid(place, {}).about())


def test_a_parameter_displaces_the_one_that_it_excludes():
    name = "fedclust/fmnist-skew20"
    by_height = laid(name, {"method": {"threshold": 1.5}})
    assert by_height.tree["method"] == {"name": "fedclust", "linkage": "average", "threshold": 1.5}
    assert method_of(parse(by_height.tree)).source.parameters["threshold"] == 1.5
    assert by_height.changed == [
        "method.threshold 1.5 instead of auto",
        "method.clusters unset instead of 4",
    ]
    assert by_height.about()["figure"] is None
    own = {"name": "fedclust", "threshold": "auto"}
    assert "clusters" not in laid(name, {"method": own}).tree["method"]
    both = laid(name, {"method": {"threshold": 1.5, "clusters": 3}})
    with pytest.raises(ConfigError, match="give threshold or clusters, not both"):
        method_of(parse(both.tree))
    other = laid(name, {"method": {"name": "pacfl", "clusters": 3}})
    assert other.tree["method"] == {"name": "pacfl", "clusters": 3}


@pytest.mark.parametrize("name", ["fedclust", "pacfl", "fl-hc"])
def test_a_later_layer_displaces_and_the_same_layer_does_not(name):
    tree = {"method": {"name": name, "clusters": 4}}
    assign_texts(tree, ["method.threshold=1.5"])
    assert tree == {"method": {"name": name, "threshold": 1.5}}
    assign_texts(tree, ["method.clusters=2"])
    assert tree == {"method": {"name": name, "clusters": 2}}
    assign_texts(tree, ["method.clusters=3", "method.threshold=1.5"])
    with pytest.raises(ConfigError, match="not both"):
        method_of(parse(tree))
    base = {"method": {"name": name, "clusters": 4, "linkage": "single"}}
    titled = (f"{name} threshold=1.5", name, {"threshold": 1.5})
    assert set_up(base, titled, [])["method"] == {
        "name": name,
        "linkage": "single",
        "threshold": 1.5,
    }
    varied = set_up(base, (name, name, {}), [("method.threshold", 0.5)])["method"]
    assert varied == {"name": name, "linkage": "single", "threshold": 0.5}
    twice = set_up(base, titled, [("method.clusters", 2)])
    with pytest.raises(ConfigError, match="not both"):
        method_of(parse(twice))


def test_file_then_scenarios_method_then_set(tmp_path):
    name, file = "fedclust/fmnist-skew20", tmp_path / "mine.toml"
    file.write_text("[method]\nthreshold = 0.5\n")  # of the scenario's method: none is named

    def method(*sets, **flags):
        given = resolve(file, list(sets), scenario=name, **flags)
        return laid(name, given).tree["method"]

    own = {"name": "fedclust", "linkage": "average"}
    assert method() == {**own, "threshold": 0.5}
    assert method("method.clusters=3") == {**own, "clusters": 3}
    assert method(method="fedclust") == {**own, "threshold": 0.5}
    assert method("method.clusters=3", method="pacfl") == {"name": "pacfl", "clusters": 3}
    assert method(method="fedavg") == {"name": "fedavg"}
    base = resolve(file, None, scenario=name)
    for title, expected in (
        ("fedclust", {"threshold": 0.5}),
        ("fedclust:clusters=3", {"clusters": 3}),
    ):
        compared = set_up(base, method_list(title)[0], [])
        assert laid(name, compared).tree["method"] == {**own, **expected}
    file.write_text("[method]\nname = 'pacfl'\nthreshold = 0.5\n")
    assert method("method.clusters=3") == {"name": "pacfl", "clusters": 3}


def test_a_run_that_is_read_back_has_its_figure_and_no_changes():
    name = "fedclust/fmnist-skew20"
    whole = parse(scenario(name).tree()).model_dump()  # as config.toml has it: defaults and all
    assert whole["method"]["layer_interval"] == 1
    again = ChosenScenario(scenario(name), "fashion-mnist", True, whole)
    assert again.about()["figure"] == 0.9792
    assert again.changed == []
    explicit = laid(name, {"method": {"fallback": True}})  # the default
    assert explicit.about()["figure"] == 0.9792
    assert not [c for c in explicit.changed if "fallback" in c]


def test_changed_parameters_are_told():
    assert laid("fedclust/fmnist-skew20", {"method": {"name": "ifca", "k": 5}}).changed == [
        "method.k 5 instead of 2"
    ]
    four = {"method": {"name": "user-centric", "streams": 4}}
    told = laid("user-centric/covariate", four).changed
    assert not [c for c in told if c.startswith("method.")]  # its figure is for four streams
    five = {"method": {"name": "user-centric", "streams": 5}}
    assert "method.streams 5 instead of all" in laid("user-centric/covariate", five).changed


def test_changed_options_of_the_scenarios_own_data_are_told(tmp_path):
    name = "survey/k-fed-d300-k64"

    def told(**options):
        return laid(name, {"data": {"options": options}}).changed

    assert told(samples=600) == ["data.options.samples 600 instead of 24000"]
    assert told(separation=2.0, standardize=True) == [
        "data.options.separation 2.0 instead of 10.0",
        "data.options.standardize True instead of False",
    ]
    assert told(seed=0, samples=24_000) == []  # the default, and the scenario's own
    fewer = laid(name, {"data": {"options": {"samples": 600}}}).tree["data"]["options"]
    assert (fewer["components"], fewer["dimensions"], fewer["samples"]) == (64, 300, 600)

    split = {"cache": str(tmp_path), "split": "letters"}
    own = laid("user-centric/label", {"data": {"set": "emnist", "options": split}})
    assert own.changed == ["data.options.split letters instead of balanced"]
    other = laid("user-centric/label", {"data": {"set": "mnist", "options": {"cache": "there"}}})
    assert other.changed == []  # these are options of another set


def test_a_comparison_says_whose_settings_changed():
    def row(**method):
        return laid("fedclust/fmnist-skew20", {"method": method, "run": {"rounds": 9}}).about()

    rows = {"fedclust": row(), "a": row(threshold=0.1), "fedavg": row(name="fedavg")}
    rows |= {"b": row(threshold=0.2), "c": row(threshold=0.1)}

    def told(*names):
        notes = paper_notes({name: rows[name] for name in names})
        start = "not the scenario's settings"
        return [n.removeprefix(start) for n in notes if n.startswith(start)]

    rounds, clusters = "run.rounds 9 instead of 200", "method.clusters unset instead of 4"
    assert told("fedclust", "fedavg") == [f": {rounds}"]
    assert told("a") == [f": {rounds}; method.threshold 0.1 instead of auto; {clusters}"]
    assert told("fedclust", "a", "fedavg", "b", "c") == [
        f": {rounds}",
        f" for a and c: method.threshold 0.1 instead of auto; {clusters}",
        f" for b: method.threshold 0.2 instead of auto; {clusters}",
    ]
    assert told("a", "b")[0] == f": {rounds}; {clusters}"  # what all have is said once
    assert paper_notes({}) == []


def test_the_methods_of_a_table_are_those_that_there_are():
    titles = [t for t, _, _ in method_list(",".join(scenario("user-centric/label").methods()))]
    assert {"fedprox", "local", "fedavg"} <= set(titles)
    assert "pacfl" not in titles
    assert all(t.split()[0] in METHODS for t in titles)
    if "user-centric" in METHODS:
        assert titles[:2] == ["user-centric", "user-centric streams=4"]


def test_overlay_takes_the_name_first():
    tree = {"method": {"name": "ifca", "k": 3}}
    overlay(tree, {"method": {"mu": 0.1, "name": "fedprox"}})
    assert tree == {"method": {"name": "fedprox", "mu": 0.1}}


def test_unknown_names_offer_the_closest():
    with pytest.raises(ConfigError, match="did you mean 'fedclust/svhn-skew20'"):
        scenario("fedclust/svhn-skew2")


def test_a_scenario_of_ones_own():
    mine = Scenario("a/b", "", "", "", {"data": {"set": "digits"}, "method": {"name": "fedavg"}})
    assert mine.tree() == {"data": {"set": "digits"}, "method": {"name": "fedavg"}}


# --- levels of heterogeneity -----------------------------------------------------------------


def divergences(y: np.ndarray, clients: int, seed: int) -> dict[str, float]:
    found = {}
    for level in LEVELS:
        held = primary_secondary(y, clients, seed, level=level).indices
        found[level] = pairwise_kl(np.stack([np.bincount(y[h], minlength=10) for h in held]))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_level_is_a_third_of_the_range_of_a_hundred_draws(seed, monkeypatch):
    y = np.repeat(np.arange(10), 1000)
    seen: list[float] = []

    def measured(table):
        seen.append(pairwise_kl(table))
        return seen[-1]

    monkeypatch.setattr("coterie.data.partitions.pairwise_kl", measured)
    found = divergences(y, 50, seed)
    assert len(seen) == 3 * DRAWS
    draws = seen[:DRAWS]
    assert seen == 3 * draws  # the same candidates, whichever third is wanted
    low, high = min(draws), max(draws)
    third = (high - low) / 3
    assert low <= found["low"] <= low + third < found["mid"] <= low + 2 * third < found["high"]
    for level, value in found.items():  # the first of them
        assert value == draws[list(thirds(draws)).index(level)]


def test_a_level_shows_in_the_population():
    kl = {}
    for level in LEVELS:
        chosen = laid(f"dc-pfl/fmnist-{level}", {})
        population = population_of(parse(chosen.tree))
        kl[level] = describe(population)["kl"]
        sizes = {len(c.train) + len(c.val) + len(c.test) for c in population.clients}
        assert len(sizes) == 1
    assert kl["low"] < kl["mid"] < kl["high"]


def test_without_a_level_the_partition_is_the_first_draw():
    y = np.repeat(np.arange(10), 200)
    plain = primary_secondary(y, 10, 3).indices
    levels = [primary_secondary(y, 10, 3, level=level).indices for level in LEVELS]
    same = [all(np.array_equal(a, b) for a, b in zip(plain, o, strict=True)) for o in levels]
    assert sum(same) == 1  # it lies in one of the thirds, and comes first there


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'high'"):
        build_population(
            load("digits"),
            clients=5,
            partition="primary-secondary",
            partition_params={"level": "hihg"},
        )
