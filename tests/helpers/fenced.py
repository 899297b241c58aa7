"""The blocks of code of a page of documentation, and what happens when they are run.

A page's blocks are run in their order in one folder. ``sh`` goes to ``bash -e``, where ``coterie``
is a forked process (``forked.py``), and ``python`` to one namespace; a block of either, or of
``toml``, whose first line is a comment with a file's name is written to that file. A block without
a language is what the block before it prints: its lines are found there in their order. In such a
line ``…`` stands for anything, and a number is the same if it is the printed one, rounded to as
many decimals (``0.9…`` is how it begins). A block after ``<!-- not run: reason -->`` is not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import forked
from coterie.cli.app import all_commands

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PRINTED = r"-?(?>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\d.])(?>{PRINTED})(?!…)")  # with … it is only how a number begins


@dataclass(frozen=True)
class Block:
    """A block of code: where it begins, its language, its text, why it is not run."""

    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def file(self) -> str | None:
        """The file that it is to be written to, if its first line names one."""
        named = re.match(r"# ([\w.-]+\.(?:py|toml|sh))\n", self.text)
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, m.start()) + 1, m["language"], m["text"], m["reason"])
        for m in FENCE.finditer(text)
    ]


def run_page(page: Path, folder: Path, environment: dict[str, str] | None = None) -> list[str]:
    """Run a page's blocks in a folder; each one's output. Asserts what the page says it prints."""
    environment = {
        **os.environ,
        **forked.SETTINGS,
        "PATH": os.pathsep.join([str(forked.commands()), str(BIN), os.environ["PATH"]]),
        **(environment or {}),
    }
    space: dict[str, Any] = {"__name__": "__main__"}
    said: list[str] = []
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.reason is not None:
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language in ("sh", "bash"):
            said.append(_shell(block.text, folder, environment, where))
        elif block.language == "python":
            said.append(_python(block, folder, space, where))
        elif block.language == "":
            missing = not_printed(block.text, said[-1])
            assert missing is None, f"{where}: not printed: {missing!r}, but:\n{said[-1]}"
        else:
            raise AssertionError(f"{where}: nobody runs a block of {block.language!r}")
    return said


def _shell(text: str, folder: Path, environment: dict[str, str], where: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def _python(block: Block, folder: Path, space: dict[str, Any], where: str) -> str:
    code = compile("\n" * block.line + block.text, where, "exec")
    output = io.StringIO()
    with in_folder(folder), contextlib.redirect_stdout(output):
        exec(code, space)
    return output.getvalue()


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work in a folder, with its modules, as Python does that is started there."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def not_printed(expected: str, output: str) -> str | None:
    """The first line of what is expected that the output does not have in its turn."""
    lines = iter(output.splitlines())
    for wanted in expected.splitlines():
        if wanted.strip() in ("", "..."):
            continue
        if not any(like(wanted, line) for line in lines):
            return wanted
    return None


def like(wanted: str, line: str) -> bool:
    """Is this the line that is wanted, whatever its white space and further decimals?"""
    parts = [_pattern(word) for word in wanted.split()]
    found = re.fullmatch(r"\s+".join(parts), line.strip())
    if found is None:
        return False
    texts = NUMBER.findall(wanted)
    return all(close(text, other) for text, other in zip(texts, found.groups(), strict=True))


def _pattern(word: str) -> str:
    """Of one word, with a group for each number."""
    pieces, end = [], 0
    for number in NUMBER.finditer(word):
        pieces += [re.escape(word[end : number.start()]), f"({PRINTED})"]
        end = number.end()
    return "".join([*pieces, re.escape(word[end:])]).replace("…", ".*?")


def close(wanted: str, printed: str) -> bool:
    """Does the printed number, to as many decimals, give the wanted one?"""
    decimals = len(wanted.partition(".")[2])
    a, b = (float(text.replace(",", "")) for text in (wanted, printed))
    return abs(a - b) <= 0.5 * 10**-decimals * (decimals > 0) + 1e-9


def commands(block: Block) -> list[list[str]]:
    """The words of the commands of ours in a block of the shell, without the first."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [words[1:] for words in found if words and words[0] == "coterie"]


@cache
def ours() -> Any:
    return all_commands()


def check_command(words: list[str]) -> None:
    """A command that exists, with options that it has and all that it needs."""
    command: Any = ours()
    rest = list(words)
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else ""
        assert name in command.commands, words
        command = command.commands[name]
    command.make_context("coterie", rest)
