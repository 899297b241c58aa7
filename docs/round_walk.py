"""One round of FedAvg on the loop engine: every function of the package that it enters.

    python docs/round_walk.py                writes the walk into docs/architecture.md
    python docs/round_walk.py --count        prints how many functions in how many files
    python docs/round_walk.py --count --whole    the same with scores, checkpoints and events

A profiler hook sees each call between the end of one round and the end of the next. Functions are
listed in the order in which they are first entered; special methods, properties, comprehensions
and lambdas are left out. With --count it works at older commits, too (PYTHONPATH=OLD/src).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import coterie

ROOT = Path(coterie.__file__).parent
PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- made by docs/round_walk.py -->", "<!-- end of the walk -->"
CONFIG: Mapping[str, Any] = {
    "data": {"clients": 4, "samples": 200},
    "model": {"name": "mlp", "hidden": [12]},
    "train": {"batch_size": 16},
    "method": {"name": "fedavg"},
    "run": {"rounds": 4, "engine": "loop"},
}
Entered = tuple[str, str]  # file and function


def walk(whole: bool = False) -> list[Entered]:
    """The functions that a round enters; the ``whole`` one also scores and saves."""
    entered: dict[Entered, None] = {}

    def hook(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            entered.setdefault((file, code.co_qualname))

    def watch(event: Mapping[str, Any]) -> None:
        sys.setprofile(hook if event["round"] == 2 else None)

    config = {**CONFIG, "evaluation": {"every": int(whole)}}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        coterie.run(config, Path(folder) / "run" if whole else None, watch=watch)
    hidden = properties()
    return [
        (file, name)
        for file, name in entered
        if not name.rpartition(".")[2].startswith(("__", "<")) and (file, name) not in hidden
    ]


def properties() -> set[Entered]:
    """All properties of the package."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and any(
                    "property" in ast.unparse(d) for d in function.decorator_list
                ):
                    file = path.relative_to(ROOT).as_posix()
                    found.add((file, f"{node.name}.{function.name}"))
    return found


def counted(functions: list[Entered]) -> str:
    """How many there are, in how many files."""
    return f"{len(functions)} functions in {len({file for file, _ in functions})} files"


def table(functions: list[Entered]) -> str:
    """The walk as a table: runs of functions of one file share a row."""
    rows: list[tuple[str, list[str]]] = []
    for file, name in functions:
        if not rows or rows[-1][0] != file:
            rows.append((file, []))
        rows[-1][1].append(f"`{name.replace('.<locals>', '')}`")
    lines = [f"| `{file}` | {', '.join(names)} |" for file, names in rows]
    return "\n".join(
        ["| file | functions, in the order of their first call |", "|---|---|", *lines]
    )


def section(name: str, text: str) -> str:
    """The page with this between the markers of a section."""
    page = PAGE.read_text()
    begin, end = name, END
    before, rest = page.split(begin)
    return before + begin + "\n\n" + text + "\n\n" + end + rest.partition(end)[2]


def written() -> str:
    """The page with the walk as it is now."""
    functions = walk()
    text = f"{counted(functions)}; with scores, checkpoints and events {counted(walk(True))}.\n\n"
    return section(BEGIN, text + table(functions))


def main() -> None:
    """Write the walk, or print its count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="print the count, write nothing")
    parser.add_argument("--whole", action="store_true", help="with scores, checkpoints, events")
    asked = parser.parse_args()
    if asked.count:
        print(counted(walk(asked.whole)))
    else:
        PAGE.write_text(written())


if __name__ == "__main__":
    main()
