"""The how-to about groups: every block runs in its order, and prints what it says."""

from __future__ import annotations

import json

import pytest

from fenced import ROOT, run_page

PAGE = ROOT / "docs" / "howto" / "groups.md"

pytestmark = pytest.mark.timeout(600)  # a machine may be busy


def test_its_blocks_run_and_leave_what_they_promise(tmp_path):
    run_page(PAGE, tmp_path)
    groups = json.loads((tmp_path / "groups.json").read_text())["groups"]
    assert groups == {str(c): str(c % 4) for c in range(12)}
    assert "Map of clients" in (tmp_path / "groups.html").read_text()
    assert (tmp_path / "map.html").exists()
