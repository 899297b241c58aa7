"""The command line, in this process or in one of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import coterie.cli.app
from processes import starting


@dataclass
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    def says(self, code: int, *parts: str) -> None:
        """It is a mistake of the user's: the exit code, one sentence with these parts, no more."""
        assert self.code == code, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        told = self.err.strip().splitlines()[-1]
        assert told.startswith("error: ")
        for part in parts:
            assert part in told, told


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    """Every test works in a folder of its own, without the user's data or cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cli(monkeypatch, capsys) -> Callable[..., Ended]:
    """Run a command in this process."""

    def call(*words: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                coterie.cli.app.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        return Ended(int(ended.value.code or 0), said.out, said.err)

    return call


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command as a process of its own, at the head of its process group."""
    with starting() as call:
        yield call


SMALL = (
    "--clients",
    4,
    "--set",
    "data.samples=200",
    "--engine",
    "loop",
    "--set",
    "model.hidden=[8]",
)


@pytest.fixture
def small() -> tuple[object, ...]:
    """Flags of a run that takes a moment."""
    return SMALL


@pytest.fixture
def table(tmp_path) -> Path:
    """A CSV file of three sites: two features of different scales, a class, a number."""
    rng = np.random.default_rng(0)
    lines = ["height,weight,site,kind,target"]
    for i in range(120):
        a, b = rng.normal(1.7, 0.1), rng.normal(70, 20)
        kind = "tall" if a > 1.7 else "small"
        lines.append(f"{a:.5f},{b:.5f},{'nsw'[i % 3]},{kind},{10 * a + b / 10 + i % 3:.5f}")
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
