"""The page on comparisons: its blocks run as they stand, one after the other."""

from __future__ import annotations

import json

import pytest

from fenced import ROOT, blocks, run_page

PAGE = ROOT / "docs" / "howto" / "compare.md"

pytestmark = pytest.mark.timeout(900)  # a machine may be busy


def test_its_blocks_run_and_leave_what_they_promise(tmp_path):
    said = run_page(PAGE, tmp_path)
    assert not [block for block in blocks(PAGE) if block.reason is not None]
    kept = {
        name: json.loads((tmp_path / "runs" / name / "comparison.json").read_text())
        for name in ("first", "sweep", "flags")
    }
    assert [row["method"] for row in kept["first"]["rows"]] == ["local", "fedavg", "ifca k=4"]
    assert len(kept["sweep"]["rows"]) == 2 * 4 * 2 * 2  # the fourth seed was added at the end
    assert kept["sweep"]["axes"] == kept["flags"]["axes"] == ["partition", "train.lr"]
    assert r"\begin{tabular}" in "".join(said)
    assert "| method | received" in said[-1]  # the block in Python
