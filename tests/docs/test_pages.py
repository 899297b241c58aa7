"""All pages of the documentation: their commands exist, and what is made from the code is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import forked
from coterie.cli.app import all_commands
from fenced import ROOT, blocks, check_command, close, commands, like, not_printed, run_page

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_its_commands_exist_with_their_options(page):
    for block in blocks(page):
        for words in commands(block) if block.language in ("sh", "bash") else ():
            try:
                check_command([word for word in words if word not in ("\\", "&")])
            except Exception as wrong:
                raise AssertionError(f"{page.name}, line {block.line}: {words}: {wrong}") from wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_its_blocks_are_python_and_toml(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}, line {block.line}", "exec")
        elif block.language == "toml":
            tomllib.loads(block.text)


def test_the_reference_is_that_of_the_code():
    script = ROOT / "docs" / "reference_pages.py"
    forked.run(script, "--check")  # or else: make pages


def test_the_reference_has_every_command_and_every_public_name():
    import coterie

    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    listed = [name for name, command in all_commands().commands.items() if not command.hidden]
    assert all(f"\n## coterie {name}" in text for name in listed)
    assert {"run", "groups", "keys"} <= set(listed)
    names = set(re.findall(r"^### (\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.M))
    methods = {name.replace("-", "_") for name in coterie.METHODS}
    assert names == set(coterie.__all__) - methods - {"METHODS"}


def test_extras_on_the_first_page_are_those_that_there_are():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.search(r"^\| extra \|.*?\n\n", (ROOT / "docs/index.md").read_text(), re.S | re.M)
    assert table
    assert set(re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE)) == set(
        project["optional-dependencies"]
    )


# --- the tests' own reading of pages ------------------------------------------------------------


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_blocks_share_a_folder_and_a_namespace(tmp_path):
    page = page_of(
        tmp_path,
        "```toml\n# a.toml\nx = 1\n```\nwords\n"
        "```sh\ncat a.toml; echo 3.14 > b\n```\n```\nx = 1\n```\n"
        "```python\ny = open('b').read()\n```\n```python\nprint('is', y)\n```\n```\nis 3.1\n```\n"
        "<!-- not run: never -->\n```sh\nfalse\n```\n",
    )
    assert run_page(page, tmp_path) == ["# a.toml\nx = 1\n", "", "is 3.14\n\n"]
    assert [b.reason for b in blocks(page)][-1] == "never"


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nfalse\ntrue\n```\n",
        "```sh\necho 1\n```\n```\n2\n```\n",
        "```python\nprint(0.95)\n```\n```\n0.8\n```\n",
        "```python\n1 / 0\n```\n",
        "```ruby\nputs 1\n```\n",
        "```sh\nprintf 'a\\nb\\n'\n```\n```\nb\na\n```\n",
    ],
)
def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path, text):
    with pytest.raises((AssertionError, ZeroDivisionError)):
        run_page(page_of(tmp_path, text), tmp_path)


def test_numbers_are_compared_to_the_decimals_that_are_said():
    assert close("92.8", "92.84")
    assert not close("92.8", "92.9")
    assert not close("5", "6")
    assert like("received … %  92.8 kB", "received  12 %   92.75 kB")
    assert not like("a 1 2", "a 12")
    assert like("0,1,0.99…", "0,1,0.9971")
    assert not like("0,1,0.99…", "0,2,0.9971")
    assert not like("0,1,0.99…", "0,1,0.9871")
    assert like("1,000 of 20", "1,000 of 20")
    assert not like("1,000 of 20", "1,001 of 20")
    assert like("-3 at 86.9±2.1", "-3 at 86.88±2.13")
    assert not_printed("one\n...\nthree", "one\ntwo\nthree") is None
    assert not_printed("one\nfour", "one\ntwo") == "four"


def test_a_command_that_does_not_exist_is_found():
    with pytest.raises(AssertionError):
        check_command(["tell"])
    with pytest.raises(Exception, match="--sedes"):
        check_command(["compare", "--sedes", "3"])
