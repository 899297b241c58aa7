"""The W&B tracker, with a module of its name that keeps what it is told."""

import sys
from types import SimpleNamespace

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.tracking import check

QUICK = {"data": {"clients": 4, "samples": 120}, "run": {"rounds": 2, "engine": "loop"}}
FAKE = """
import json, os, pathlib

class Run:
    def __init__(self, **given):
        self.given, self.logged, self.saved, self.code = given, [], [], None
        runs.setdefault(given["id"], {})
        self.summary = runs[given["id"]]

    def log(self, values, step):
        self.logged.append((step, values))
        self.summary.update(values)

    def save(self, path, policy):
        self.saved.append(pathlib.Path(path).name)

    def finish(self, exit_code):
        self.code = exit_code

runs, made = {}, []

def Settings(**given):
    return given

def init(**given):
    made.append(Run(**given))
    return made[-1]
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in ("wandb", "coterie.tracking.wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import wandb

    yield wandb
    for name in ("wandb", "coterie.tracking.wandb"):
        sys.modules.pop(name, None)


def test_every_round_is_logged_once_also_after_a_resume(wandb, tmp_path):
    people_dir = tmp_path / "run"
    result = coterie.run(QUICK, people_dir, track="wandb")
    (run,) = wandb.made
    assert [step for step, _ in run.logged] == [1, 2]
    for (_, values), event in zip(run.logged, result.history, strict=True):
        assert values["received/accuracy"] == event["received"]["accuracy"]
        assert values["bytes/up"] == event["bytes"]["up"]
    assert run.given["project"] == "coterie"
    assert run.given["config"]["run.rounds"] == 2
    assert run.saved == ["clients.csv"]
    assert (run.code, run.summary["status"]) == (0, "finished")
    assert run.summary["result/received.accuracy"] == result.accuracy
    about = SimpleNamespace(history=result.history)
    from coterie.tracking.wandb import WandB

    again = WandB(people_dir)
    again.begin({"config": {}, "versions": {}, "method": "fedavg", "seed": 0, **vars(about)})
    assert wandb.made[1].given["id"] == run.given["id"]
    assert wandb.made[1].logged == []  # they were logged before


def test_the_runs_of_a_comparison_are_a_group(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    coterie.compare(QUICK, ["local", "fedavg"], directory=tmp_path / "both", jobs=1, track="wandb")
    assert [(r.given["group"], r.given["name"]) for r in wandb.made] == [
        ("both", "local"),
        ("both", "fedavg"),
    ]
    assert {r.given["project"] for r in wandb.made} == {"mine"}


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("coterie.tracking.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"coterie\[wandb\]"):
        check(["wandb"])
