"""A run that is killed inside a trial of groups, and resumed, ends with the same bits."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from coterie.core.tree import same
from coterie.experiment.export import reopen
from coterie.results.rundir import RunDir

CONFIG = """
[data]
set = "digits"
clients = 8
samples = 400
[shift]
name = "rotation"
groups = 2
[model]
name = "mlp"
hidden = [16]
[method]
name = "fedclust"
trial = "always"
trial_rounds = 2
warmup_steps = 25
[train]
batch_size = 8
lr = 0.1
[run]
rounds = 9
engine = "loop"
"""

# Kills its own process at a moment of the trial: in the middle of the training of one of its
# rounds, or between its training and its scores.
DEADLY = """
import os, signal, sys
from pathlib import Path
from coterie.compose import trial
from coterie.cli.app import main

name, marks = sys.argv[1], Path(sys.argv[2])
inner = getattr(trial, name)

def deadly(*arguments):
    result = inner(*arguments)
    if not marks.exists():
        marks.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(trial, name, deadly)
sys.argv = ["coterie", *sys.argv[3:]]
main()
"""


def events(folder: Path) -> list[dict]:
    found = RunDir(folder).read_events()
    return [{k: v for k, v in event.items() if k != "seconds"} for event in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.toml").write_text(CONFIG)
    forked.run("run", folder / "config.toml", "--dir", folder / "run", "--quiet")
    verdicts = [e for e in events(folder / "run") if "verdict" in e.get("notes", {})]
    assert verdicts, "there was no trial"
    return folder


@pytest.mark.parametrize("moment", ["_first_round", "_further_round", "_scores"])
def test_killed_inside_a_trial_and_resumed(moment, whole, tmp_path):
    parts, marks = tmp_path / "parts", tmp_path / "marks"
    command = ["run", whole / "config.toml", "--dir", parts, "--quiet"]
    killed = subprocess.run(
        [sys.executable, "-c", DEADLY, moment, marks, *command], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    forked.run("run", "--resume", parts, "--quiet")
    assert events(parts) == events(whole / "run")
    one, other = reopen(whole / "run"), reopen(parts)
    assert same(one.state.to_tree(), other.state.to_tree())
    for client in range(8):
        assert same(one.weights(client), other.weights(client))


def test_nothing_of_a_trial_is_kept_after_it(whole):
    result = reopen(whole / "run")
    assert "trial" not in result.state.memory or result.state.memory["trial"]["next"] > 9
    held = [p for p in (whole / "run").rglob("*") if p.is_file() and "trial" in p.name]
    assert held == []
