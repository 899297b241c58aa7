"""A run that is killed at any moment and resumed ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
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
samples = 480
[shift]
name = "rotation"
groups = 2
[model]
name = "mlp"
hidden = [16]
[method]
name = "fedper"
[train]
epochs = 2
batch_size = 8
lr = 0.1
[run]
cohort = 0.5
workers = 2
"""
COMMAND = [sys.executable, "-m", "coterie", "run", "--quiet"]


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def events(folder: Path) -> list[dict]:
    found = RunDir(folder).read_events()
    return [{k: v for k, v in event.items() if k != "seconds"} for event in found]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.e2e)])
def test_killed_at_random_moments_and_resumed(times, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(f"{CONFIG}rounds = {6 * times}\n")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    forked.run("run", config, "--dir", whole, "--quiet")

    moments = random.Random(3)
    kills = 0
    arguments = [str(config), "--dir", str(parts)]
    while kills < times:
        before = _lines(parts)
        process = start(*arguments)
        # Kill it in its next round or the one after. The first time do not even wait for a round:
        # there is no checkpoint to go back to yet.
        while process.poll() is None and (
            _lines(parts) <= before if kills else not (parts / "config.toml").exists()
        ):
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        arguments = ["--resume", str(parts)]
    assert kills == times
    forked.run("run", "--resume", parts, "--quiet")

    assert events(parts) == events(whole)
    assert (parts / "clients.csv").read_text() == (whole / "clients.csv").read_text()
    one, other = reopen(whole), reopen(parts)
    assert same(one.state.to_tree(), other.state.to_tree())
    for client in range(8):
        assert same(one.weights(client), other.weights(client))


def _lines(folder: Path) -> int:
    path = folder / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
