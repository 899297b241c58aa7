"""The Python of the pages on tracking and notebooks runs as it stands there."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[3] / "docs" / "howto"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.S | re.M)


@pytest.mark.parametrize("page", ["tracking.md", "notebook.md"])
def test_every_block_runs(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard" if page == "tracking.md" else "pandas")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    said = capsys.readouterr().out
    if page == "tracking.md":
        lines = said.splitlines()
        assert lines[0] == "fedavg goes on after 0 rounds"
        assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "3", "finished"]
    else:
        assert "finished True" in said
        assert (tmp_path / "runs" / "first" / "result.json").exists()
