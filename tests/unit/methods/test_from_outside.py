"""What an extension costs: each one is a single file of the user's, and nothing else changes."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.channel.compression.codecs import codec
from coterie.cli.app import app, main
from coterie.engines import pool
from coterie.errors import ConfigError
from coterie.experiment.export import reopen
from coterie.report.catalogue import draw
from coterie.report.reading import read_run
from registries import restored

SMALL = ["--clients", "4", "--rounds", "2", "--engine", "loop", "--quiet", "--seed", "3"]

METHOD = '''
from coterie import Method, grouped, method, minimise, proximal


@method
def held_near(mu: float = 0.1) -> Method:
    """FedAvg whose clients stay near the model that they received."""
    return grouped("held-near", train=minimise(proximal(mu)))
'''

MODEL = '''
import math

from torch import nn


def narrow(shape, outputs, hidden: int = 4):
    """One hidden layer."""
    first = nn.Linear(math.prod(shape), hidden)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(hidden, outputs))
'''

DATA = '''
import numpy as np

from coterie.data import RawData


def rings(folder=None, samples: int = 400, width: float = 0.1):
    """Points on two rings."""
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 2
    angle, radius = rng.uniform(0, 2 * np.pi, samples), 1 + y + width * rng.standard_normal(samples)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)
    return RawData(x, y, "table", ("inner", "outer"))
'''

CODEC = """
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from coterie.channel.compression.codecs import Lossy
from coterie.registry import CODECS


@CODECS.register("grid", "every number as a multiple of `step`, from -127 to 127 of them")
@dataclass(frozen=True)
class Grid(Lossy):
    step: Annotated[float, Field(gt=0)] = 0.01

    @property
    def spec(self):
        return f"grid:step={self.step!r}"

    def _length(self, count):
        return count

    def _pack(self, numbers, seed):
        return np.rint(numbers / self.step).clip(-127, 127).astype(np.int8).view(np.uint8)

    def _unpack(self, data, count):
        return data.view(np.int8).astype(np.float32) * np.float32(self.step)
"""

FIGURE = """
from coterie.report.catalogue import figure
from coterie.report.figures.style import figure_of


@figure("rounds-done", "cost", "Rounds that were done", lambda run: f"{len(run.rounds)} rounds.")
def rounds_done(reading):
    return figure_of([{"type": "bar", "x": ["rounds"], "y": [len(reading.rounds)]}])
"""

TRACKER = '''
from pathlib import Path


class Lines:
    """A line a round."""

    def __init__(self, directory):
        self.file = Path(directory) / "lines.txt"

    def begin(self, about):
        self.file.write_text("")

    def event(self, event):
        with self.file.open("a") as file:
            file.write(f"{event['round']}\\n")

    def end(self, status, summary):
        pass
'''


@pytest.fixture(autouse=True)
def _as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with restored():
        yield


def cli(*words):
    found = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def same(a, b):
    return all(torch.equal(a.weights(c).vector, b.weights(c).vector) for c in range(4))


# --- one file each --------------------------------------------------------------------------------


def test_a_method(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD)
    cli("run", *SMALL, "--method", "mine.py:held_near", "--set", "method.mu=0.5", "--dir", "a")
    cli("run", *SMALL, "--method", "fedprox", "--set", "method.mu=0.5", "--dir", "b")
    assert same(reopen(tmp_path / "a"), reopen(tmp_path / "b"))
    several = "fedavg,mine.py:held_near:mu=1,mine.py:held_near+fedper"
    text = cli("compare", *SMALL, "--methods", several, "--jobs", "1", "--dir", "c", "--json")
    titles = [row["method"] for row in json.loads(text)["rows"]]
    assert titles == ["fedavg", "mine.py:held_near mu=1", "mine.py:held_near+fedper"]
    assert "stay near the model" in cli("methods", "mine.py:held_near")
    found = coterie.simulate(
        [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(4)],
        method="mine.py:held_near", rounds=1, engine="loop",
    )  # fmt: skip
    assert found.summary["method"] == "held-near"


def test_a_method_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "mymethods.py").write_text(METHOD)
    tree = {"method": {"name": "mymethods:held_near", "mu": 0.5}, "run": {"rounds": 1}}
    tree |= {"data": {"clients": 4}}
    tree["run"] |= {"engine": "loop"}
    theirs = coterie.run({**tree, "method": {"name": "fedprox", "mu": 0.5}})
    assert same(coterie.run(tree), theirs)


def test_a_model(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    cli("run", *SMALL, "--model", "mine.py:narrow", "--set", "model.hidden=3", "--dir", "a")
    made = reopen(tmp_path / "a").model(0)
    assert made[1].weight.shape == (3, 64)


def test_a_data_set(tmp_path):
    (tmp_path / "mine.py").write_text(DATA)
    cli("run", *SMALL, "--data", "mine.py:rings", "--set", "data.options.width=0.2", "--dir", "a")
    population = reopen(tmp_path / "a").plan.population
    assert (population.shape, population.classes) == ((2,), ("inner", "outer"))


def test_a_codec(tmp_path):
    (tmp_path / "mine.py").write_text(CODEC)
    text = "mine.py:Grid:step=0.02+zstd"
    cli("run", *SMALL, "--codec", text, "--dir", "a")
    plain = json.loads(cli("run", *SMALL, "--dir", "b", "--json"))
    made = json.loads((tmp_path / "a/result.json").read_text())
    assert made["bytes"]["up"] < plain["bytes"]["up"] / 3
    grid = codec(f"{tmp_path}/{text}")
    assert grid.spec == "grid:step=0.02+zstd" == codec(grid.spec).spec
    array = torch.tensor([0.019, -0.5, 9.0])
    assert np.allclose(grid.decode(grid.encode(array), "f4", [3]), [0.02, -0.5, 2.54])
    with pytest.raises(ConfigError, match="step = 0: must be greater than 0"):
        codec("grid:step=0")


def test_a_figure(tmp_path):
    (tmp_path / "mine.py").write_text(FIGURE)
    cli("run", *SMALL, "--dir", "a")
    cli("report", "a", "--figure", "mine.py:rounds_done", "--to", "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Rounds that were done" in page
    assert "2 rounds." in page
    assert draw("rounds-done", read_run(tmp_path / "a")).data[0].y == (2,)


def test_a_tracker(tmp_path):
    (tmp_path / "mine.py").write_text(TRACKER)
    cli("run", *SMALL, "--track", "mine.py:Lines", "--dir", "a")
    assert set((tmp_path / "a/lines.txt").read_text().split()) == {"1", "2"}


# --- going on -------------------------------------------------------------------------------------


@pytest.fixture
def says(capsys, monkeypatch):
    def said(*words):
        monkeypatch.setattr("sys.argv", ["coterie", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err

    return said


def test_a_run_goes_on_from_the_same_file_only(tmp_path, says):
    file = tmp_path / "mine.py"
    file.write_text(METHOD)
    cli("run", *SMALL, "--method", "mine.py:held_near", "--dir", "a")
    cli("run", "--resume", "a", "--rounds", "3", "--quiet")
    assert reopen(tmp_path / "a").rounds == 3
    file.write_text(METHOD.replace("0.1", "0.2"))
    for words in (["run", "--resume", "a", "--rounds", "4"], ["export", "a", "--client", "0"]):
        code, text = says(*words)
        assert code == 2
        assert f"{file} has changed since the run began" in text
        assert "restore the file, or start a new run" in text
    file.unlink()
    code, text = says("run", "--resume", "a", "--rounds", "4")
    assert (code, "FileNotFoundError" in text) == (2, True)
    file.write_text(METHOD)
    cli("run", "--resume", "a", "--rounds", "4", "--quiet")


def test_a_comparison_goes_on_from_the_same_file_only(tmp_path, says):
    file = tmp_path / "mine.py"
    file.write_text(METHOD)
    cli("compare", *SMALL, "--methods", "fedavg,mine.py:held_near", "--jobs", "1", "--dir", "c")
    cli("compare", "--resume", "c", "--quiet")
    file.write_text(METHOD.replace("0.1", "0.2"))
    code, text = says("compare", "--resume", "c")
    assert (code, "has changed since the run began" in text) == (2, True)


def test_a_place_where_nothing_is_is_a_sentence(says):
    code, text = says("run", "--method", "os:system")
    assert (code, "method.name = os:system: ImportError: os has no file" in text) == (2, True)
    code, text = says("run", "--method", "nowhere.py:x")
    assert (code, "/nowhere.py:x: FileNotFoundError" in text) == (2, True)
    code, text = says("compare", "--methods", "ifca:k", "--dir", "d")
    assert (code, "write name:parameter=value" in text) == (2, True)


def test_spawned_workers_know_the_same_functions(tmp_path, monkeypatch):
    """Workers share no memory and start without anything that was loaded here."""
    (tmp_path / "mine.py").write_text(METHOD + MODEL + CODEC)
    tree = {
        "data": {"clients": 4, "samples": 200},
        "method": {"name": "mine.py:held_near"},
        "model": {"name": "mine.py:narrow"},
        "wire": {"up": "mine.py:Grid"},
        "run": {"rounds": 1, "engine": "loop"},
    }
    here = coterie.run(tree)
    monkeypatch.setattr(pool.sys, "platform", "darwin")
    assert same(coterie.run({**tree, "run": {"rounds": 1, "workers": 1}}), here)
