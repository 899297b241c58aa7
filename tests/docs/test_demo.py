"""The demo: its command prints the tables of the README and of the first page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest

from fenced import BIN, ROOT, check_command, like

pytestmark = pytest.mark.timeout(900)  # a machine may be busy


def rows(page: str) -> list[list[str]]:
    """The cells of the table of methods in a page, its head first."""
    found = re.search(r"^\| method \| received.*?\n\n", (ROOT / page).read_text(), re.S | re.M)
    assert found, page
    lines = [line.strip("| \n").split(" | ") for line in found[0].strip().splitlines()]
    return [line for line in lines if not line[0].startswith("---")]


def test_the_tables_are_what_make_demo_prints(tmp_path):
    recipe = re.search(
        r"^demo: .*\n\t.* groups .*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe
    line = recipe[1].replace("$(BIN)", str(BIN)).replace("$(DEMO_DIR)", str(tmp_path / "demo"))
    words = shlex.split(line)
    check_command(words[1:])
    done = subprocess.run(
        [*words, "--quiet"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    head, *full = rows("docs/index.md")
    plain = re.sub(r"(?<=\d)\^", " ", done.stdout)  # the sign of the highest
    lines = [line for line in plain.splitlines() if re.search(r"\d", line)]
    for row in full:
        seconds = [*row[:-1], "…", row[-1]]  # the page leaves out the column of the time
        assert any(like("  ".join(seconds), line) for line in lines), (row, done.stdout)
    assert len(full) == 7
    short, *extract = rows("README.md")
    places = [head.index(name) for name in short]
    assert extract == [[row[place] for place in places] for row in full]
