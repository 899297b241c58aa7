"""Presets: a method's name that stands for settings."""

import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.experiment.config import experiment_of, parse
from support import same_bits

SMALL = {"data": {"clients": 4, "samples": 240}, "run": {"rounds": 2, "engine": "loop"}}


def test_fedpaq_is_fedavg_with_steps_a_part_of_the_clients_and_qsgd():
    written = {
        **SMALL,
        "method": {"name": "fedavg"},
        "train": {"steps": 5},
        "run": {**SMALL["run"], "cohort": 0.5},
        "wire": {"up": "qsgd"},
    }
    by_name = {**SMALL, "method": {"name": "fedpaq"}}
    ours, theirs = (coterie.run(tree) for tree in (by_name, written))
    assert parse(by_name) == parse(written)
    assert same_bits(
        [ours.weights(c).vector for c in range(4)], [theirs.weights(c).vector for c in range(4)]
    )
    assert all(len(event["cohort"]) == 2 for event in ours.history)
    raw = coterie.run({**written, "wire": {}})
    assert ours.summary["bytes"]["up"] < raw.summary["bytes"]["up"] / 6


def test_what_the_user_says_wins():
    config = parse(
        {
            "method": {"name": "fedpaq", "steps": 9, "codec": "fp16", "layer_interval": 3},
            "run": {"cohort": 3},
            "train": {"lr": 0.1},
        }
    )
    assert (config.train.steps, config.train.lr) == (9, 0.1)
    assert (config.run.cohort, config.wire.up) == (3, "fp16")
    assert (config.method.name, config.method.layer_interval) == ("fedavg", 3)


def test_unknown_parameters_are_refused_by_the_presets_own_names():
    with pytest.raises(ConfigError, match="of fedpaq 'step'; did you mean 'steps'"):
        parse({"method": {"name": "fedpaq", "step": 9}})


def test_another_method_keeps_what_was_written():
    tree = {"method": {"name": "fedprox", "mu": 0.5}}
    assert parse(tree).method.parameters == {"mu": 0.5}
    assert experiment_of(parse({**SMALL, **tree})).method.name == "fedprox"


def test_the_listing_and_the_page_name_it():
    listed = CliRunner().invoke(app, ["methods"]).output
    assert "fedpaq" in listed
    page = CliRunner().invoke(app, ["methods", "fedpaq"]).output
    for word in ("fedavg", "train.steps = 5", "run.cohort = 0.5", "wire.up = qsgd", "Reisizadeh"):
        assert word in page
