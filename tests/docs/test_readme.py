"""The README: every block runs, prints what it says, and leaves what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from coterie.report.reading import read_run
from fenced import ROOT, blocks, check_command, commands, run_page

README = ROOT / "README.md"

pytestmark = pytest.mark.timeout(900)  # a machine may be busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("readme")
    run_page(README, place)
    return place


def test_its_blocks_run_and_leave_what_they_promise(folder):
    mine = read_run(folder / "runs" / "mine")
    assert (mine.status, mine.method, len(mine.rounds)) == ("finished", "fedprox", 30)
    assert mine.config["train"]["lr"] == 0.1  # the flag, not the file
    assert mine.config["method"]["mu"] == 0.1  # --set
    assert load_file(folder / "client-3.safetensors")
    page = (folder / "mine.html").read_text()
    assert "<html" in page
    assert "fedprox" in page
    secure = read_run(folder / "runs" / "secure")
    assert secure.result["exposure"]["single"] == {}
    plain = read_run(folder / "runs" / "mine").result["bytes"]["up"] / 30
    assert read_run(folder / "runs" / "thrifty").result["bytes"]["up"] / 20 < plain / 5


def test_what_is_not_run_is_known_and_made_of_commands_that_exist():
    left = [block for block in blocks(README) if block.reason is not None]
    first = [block.text.split()[:2] for block in left]
    assert first == [["make", "demo"], ["coterie", "report"], ["coterie", "run"]]
    given = [words for block in left for words in commands(block)]
    assert [words[0] for words in given] == ["report", "watch", "run", "keys", "serve", "join"]
    for words in given:
        check_command(words)
    targets = (ROOT / "Makefile").read_text()
    assert "\ndemo: $(VENV)/.core\n" in targets
    assert "\ntest: setup\n" in targets
    for block in left:  # who runs it instead is there
        named = [word.strip(",;") for word in (block.reason or "").split() if "tests/" in word]
        assert named
        assert all((ROOT / name).exists() for name in named), named
