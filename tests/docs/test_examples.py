"""The scripts in examples/: each runs by itself, is short, and shows what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forked
from fenced import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NUMBER = re.compile(r"\d+\.\d+")


def printed(name: str, folder: Path) -> list[str]:
    """The lines that an example prints."""
    return forked.run(ROOT / "examples" / f"{name}.py", cwd=folder).stdout.splitlines()


def numbers(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


def test_compare_methods(tmp_path):
    lines = {line.split()[0]: line for line in printed("compare_methods", tmp_path)}
    mean = {name: numbers(line)[0] for name, line in lines.items()}
    assert list(mean) == ["local", "fedavg", "fedper", "fedclust"]
    assert max(mean, key=mean.__getitem__) == "fedclust"  # one model for each of the three rules
    assert mean["fedclust"] > mean["local"] + 0.05
    assert mean["fedavg"] < mean["local"]  # one model for all fits nobody
    assert all(numbers(line)[1] <= numbers(line)[0] for line in lines.values())
    assert lines["local"].endswith(" 0 kB sent")


def test_own_method(tmp_path):
    [fedavg, middle] = printed("own_method", tmp_path)
    assert fedavg.startswith("fedavg ")
    assert middle.startswith("middle ")
    assert numbers(middle) > numbers(fedavg)  # a wrong fifth of the clients pulls the mean


def test_find_groups(tmp_path):
    verdict, *groups, compared = printed("find_groups", tmp_path)
    assert verdict.startswith("There are 2 groups ")
    assert "Training them separately pays off" in verdict
    assert groups == [
        "group 0: clients [0, 2, 4, 6, 8, 10]",
        "group 1: clients [1, 3, 5, 7, 9, 11]",
    ]
    apart, one = numbers(compared)
    assert apart > one + 0.05


def test_private_run(tmp_path):
    pytest.importorskip(
        "dp_accounting", reason="it needs the extra: pip install 'coterie[privacy]'"
    )
    plain, private, spent = printed("private_run", tmp_path)
    assert plain.endswith("own upload arrived: 40")
    assert private.endswith("own upload arrived: 0")
    assert numbers(plain)[0] >= numbers(private)[0] > 0.8  # privacy costs accuracy, but not all
    epsilon, delta = numbers(spent)
    assert 7.9 < epsilon <= 8
    assert delta < 1 / 40


def test_newcomers(tmp_path):
    import torch

    newcomers, kept = printed("newcomers", tmp_path)
    assert newcomers.startswith("3 newcomers: ")
    before, after = numbers(newcomers)
    assert 0.5 < before <= after
    [path] = tmp_path.glob("client-*.pt")
    parameters = torch.load(path, weights_only=True)
    assert kept == f"{path.name}: {sum(p.numel() for p in parameters.values()):,} parameters"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_it_is_short_run_here_and_listed(script):
    assert len(script.read_text().splitlines()) <= 50
    assert f"def test_{script.stem}(" in Path(__file__).read_text()
    assert f"[`{script.name}`]({script.name})" in (ROOT / "examples/README.md").read_text()
