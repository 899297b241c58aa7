"""A dry run: its bytes are the run's, or a range that contains them, and it leaves no trace."""

import json
import os

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import execute
from coterie.experiment.forecast import forecast

BASE = {
    "data": {"clients": 6, "samples": 300},
    "shift": {"name": "rotation", "groups": 2},
    "run": {"rounds": 11, "engine": "loop"},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"lr": 0.1},
}
# Five settings of the issue, and those with their own causes for a range.
SETTINGS = {
    "fedavg": ({}, "exact"),
    "fedclust, which finds its groups": ({"method": {"name": "fedclust"}}, "groups"),
    "dc-pfl": ({"method": {"name": "dc-pfl"}}, "which layers are sent"),
    "a codec of fixed length": ({"wire": {"up": "qsgd"}}, "exact"),
    "a codec that compresses": ({"wire": {"up": "raw+zstd"}}, "depends on the values"),
    "a part of the clients": ({"run": BASE["run"] | {"cohort": 0.5}}, "exact"),
    "two models": ({"method": {"name": "ifca", "k": 2}}, "exact"),
    "at random": ({"privacy": {"epsilon": 8.0}}, "at random"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_are_those_of_the_run(name):
    changes, kind = SETTINGS[name]
    experiment = experiment_of(parse({**BASE, **changes}))
    expected = forecast(experiment)
    moved = execute(experiment).summary["bytes"]
    if kind == "exact":  # downloads do not depend on data; uploads only in the digits of scores
        assert expected.down.exact
        assert expected.down.low == moved["down"]
        assert expected.up.high - expected.up.low < 0.2 * moved["up"]
    else:
        assert any(kind in cause for cause in expected.causes)
    assert expected.down.low <= moved["down"] <= expected.down.high
    assert expected.up.low <= moved["up"] <= expected.up.high


def test_counts_and_what_will_be_seen():
    found = forecast(experiment_of(parse({**BASE, "run": BASE["run"] | {"cohort": 0.5}})))
    assert (found.clients, found.cohort, found.rounds, found.sees) == (6, 3, 11, "means")
    assert sum(found.samples) == 300
    assert found.parameters == 64 * 8 + 8 + 8 * 10 + 10
    assert found.exposed
    assert found.seconds > 0
    nothing = forecast(experiment_of(parse({**BASE, "method": {"name": "local"}})))
    assert (nothing.down.high, nothing.up.high, nothing.causes) == (0, 0, [])
    noised = forecast(experiment_of(parse({**BASE, "privacy": {"epsilon": 8.0}})))
    assert noised.epsilon == 8.0


FLAGS = ["--clients", "4", "--rounds", "3", "--engine", "loop", "--dry-run"]


def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    told = CliRunner().invoke(app, ["run", *FLAGS, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["rounds"] == 3
    two = ["--methods", "local,fedavg", "--seeds", "2"]
    compared = CliRunner().invoke(app, ["compare", *FLAGS, *two])
    assert compared.exit_code == 0, compared.output
    assert "4 runs" in compared.output
    (tmp_path / "fl.toml").write_text("data.clients = 4\nrun.rounds = 2\n")
    served = CliRunner().invoke(app, ["serve", "fl.toml", "--dir", "runs/x", "--dry-run"])
    assert served.exit_code == 0, served.output
    assert "nothing was written" in served.output
    assert os.listdir(tmp_path) == ["fl.toml"]
