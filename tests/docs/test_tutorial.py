"""The tutorial: every block runs in its order, and prints what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.report.reading import read_run
from fenced import ROOT, blocks, check_command, commands, run_page

TUTORIAL = ROOT / "docs" / "tutorial.md"

pytestmark = pytest.mark.timeout(900)  # a machine may be busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tutorial")
    run_page(TUTORIAL, place)
    return place


@pytest.mark.e2e  # nearly two minutes; what it shows is in README and the how-tos, too
def test_its_blocks_run_and_leave_what_they_promise(folder):
    assert {p.name for p in folder.glob("*.safetensors")} == {
        "late.safetensors",
        "client-1.safetensors",
    }
    assert "fedclust" in (folder / "first.html").read_text()
    first = read_run(folder / "runs" / "first")
    assert (first.status, len(first.rounds)) == ("finished", 25)
    assert len(first.sessions) == 2
    secure = read_run(folder / "runs" / "secure").result["exposure"]["single"]
    assert set(secure) == {"revealed by consent"}
    assert read_run(folder / "runs" / "noised").result["privacy"]["epsilon"] <= 8


def test_what_is_not_run_is_known_and_made_of_commands_that_exist():
    left = [block for block in blocks(TUTORIAL) if block.reason is not None]
    given = [words for block in left for words in commands(block)]
    assert [words[0] for words in given] == ["run", "run"]
    for words in given:
        check_command(words)
    assert "tests/e2e/test_signals.py" in (left[0].reason or "")
    assert (ROOT / "tests/e2e/test_signals.py").exists()
