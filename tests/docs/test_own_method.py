"""The how-to on a method of one's own: in 30 lines, in Python and by name on the command line."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path

from fenced import ROOT, blocks, run_page

HOWTO = ROOT / "docs" / "howto" / "own-method.md"


def install(folder: Path) -> None:
    """What `pip install -e .` leaves, of the page's own pyproject.toml: a name that is found."""
    [text] = [b.text for b in blocks(HOWTO) if b.file == "pyproject.toml"]
    project = tomllib.loads(text)["project"]
    place = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir()
    known = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (place / "METADATA").write_text(known)
    points = "\n".join(
        f"[{group}]\n" + "\n".join(f"{name} = {where}" for name, where in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (place / "entry_points.txt").write_text(points)


def test_its_blocks_run_the_laws_hold_and_compare_knows_it_by_name(tmp_path):
    install(tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    run_page(HOWTO, tmp_path, {"PYTHONPATH": path})
    assert (tmp_path / "runs" / "mine").is_dir()


def test_it_is_as_short_as_it_says():
    [text] = [b.text for b in blocks(HOWTO) if b.file == "by_labels.py"]
    [function] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    lines = text.splitlines()[function.lineno - 1 : function.end_lineno]
    assert len([line for line in lines if line.strip()]) <= 30


def test_only_the_installation_is_not_run():
    assert [b.text for b in blocks(HOWTO) if b.reason is not None] == ["pip install -e .\n"]
