"""Docstrings, messages and pages of two commits side by side, drawn at random.

    python docs/drawn_at_random.py SEED BEFORE [AFTER]

Draws twenty docstrings, ten error messages and three pages among those that both commits have, and
prints them as Markdown. A file that was moved is followed by git's detection of renames, a class or
function by its name or, if it was renamed, by its body; a message by the closest text in the same
file. Unchanged paragraphs of a page are left out.
"""

from __future__ import annotations

import ast
import difflib
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

DOCSTRINGS, MESSAGES, PAGES = 20, 10, 3
_ALIKE = 0.5  # the similarity from which two bodies, or two messages, count as the same one
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Pair = tuple[str, str, str]  # a title, and the text before and after


@dataclass(frozen=True)
class Definition:
    """A module, class or function: its docstring, and its code without it."""

    docstring: str
    body: str


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout


def files(commit: str, *places: str) -> dict[str, str]:
    """The texts of a commit's files, by path."""
    paths = git("ls-tree", "-r", "--name-only", commit, "--", *places).splitlines()
    wanted = [path for path in paths if path.endswith((".py", ".md"))]
    return {path: git("show", f"{commit}:{path}") for path in wanted}


def origins(before: str, after: str) -> dict[str, str]:
    """The earlier path of each file that was moved."""
    lines = git("diff", "--name-status", "-l0", "-M30%", before, after).splitlines()
    moved = [line.split("\t") for line in lines if line.startswith("R")]
    return {new: old for _, old, new in moved}


def definitions(text: str) -> dict[str, Definition]:
    """What a module defines and documents, by qualified name; the module itself is ``""``."""
    found: dict[str, Definition] = {}

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, _Documented) and (docstring := ast.get_docstring(node)):
            body = "\n".join(ast.unparse(part) for part in node.body[1:]) if name else ""
            found[name] = Definition(docstring, body)
        for child in ast.iter_child_nodes(node):
            own = getattr(child, "name", "") if isinstance(child, _Documented) else ""
            visit(child, f"{name}.{own}".strip(".") if own else name)

    visit(ast.parse(text), "")
    return found


def messages(text: str) -> list[str]:
    """The messages that a module raises, with ``{…}`` where values are filled in."""
    raised = [n.exc for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Raise)]
    calls = [exc for exc in raised if isinstance(exc, ast.Call) and exc.args]
    texts = [_text(call.args[0]) for call in calls]
    return [message for message in texts if message.count(" ") > 2]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "{…}" for v in node.values)
    return ""


def same_docstrings(
    before: Mapping[str, str], after: Mapping[str, str], origin: Mapping[str, str]
) -> Iterator[Pair]:
    """The docstrings that both commits have."""
    for path, text in after.items():
        earlier = before.get(origin.get(path, path))
        if earlier is None:
            continue
        old, new = definitions(earlier), definitions(text)
        gone = {name: old[name] for name in old.keys() - new.keys()}
        for name, definition in new.items():
            match = old.get(name)
            if match is None and definition.body:
                match = _closest(definition, gone)
            if match is not None:
                yield f"{path}: {name or 'module'}", match.docstring, definition.docstring


def _closest(definition: Definition, gone: Mapping[str, Definition]) -> Definition | None:
    ratios = [
        (difflib.SequenceMatcher(None, other.body, definition.body).ratio(), name)
        for name, other in gone.items()
    ]
    ratio, name = max(ratios, default=(0.0, ""))
    return gone[name] if ratio >= _ALIKE else None


def same_messages(
    before: Mapping[str, str], after: Mapping[str, str], origin: Mapping[str, str]
) -> Iterator[Pair]:
    """The error messages that both commits have."""
    for path, text in after.items():
        earlier = before.get(origin.get(path, path))
        old = messages(earlier) if earlier is not None else []
        for message in messages(text):
            match = difflib.get_close_matches(message, old, 1, _ALIKE)
            if match:
                yield path, match[0], message


def drawn(pairs: Sequence[Pair], count: int, generator: random.Random, what: str) -> Iterator[str]:
    """A part of the output: some of the pairs, in a table."""
    chosen = generator.sample(sorted(pairs), min(count, len(pairs)))
    changed = sum(old != new for _, old, new in pairs)
    yield f"## {len(chosen)} {what} of {len(pairs)}\n"
    yield f"Of all {len(pairs)}, {changed} have changed.\n"
    yield "| where | before | after |\n|---|---|---|"
    for title, old, new in chosen:
        yield f"| `{title}` | {cell(old)} | {cell(new) if new != old else '(unchanged)'} |"
    yield ""


def page(title: str, old: str, new: str) -> Iterator[str]:
    """The paragraphs of a page that have changed, in a table."""
    first, second = ([p for p in text.split("\n\n") if p.strip()] for text in (old, new))
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    kept = sum(size for _, _, size in matcher.get_matching_blocks())
    yield f"### `{title}`\n"
    yield f"{kept} of {len(second)} paragraphs are unchanged.\n"
    yield "| before | after |\n|---|---|"
    for tag, low, high, start, end in matcher.get_opcodes():
        if tag != "equal":
            sides = "\n\n".join(first[low:high]), "\n\n".join(second[start:end])
            yield f"| {cell(sides[0])} | {cell(sides[1])} |"
    yield ""


def cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    escaped = text.strip().replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("\n", "<br>") or "–"


def main() -> None:
    """Print the samples."""
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    seed, before, after = (*sys.argv[1:], "HEAD")[:3]
    generator = random.Random(int(seed))
    origin = origins(before, after)
    code = files(before, "src"), files(after, "src")
    shown = files(before, "docs", "README.md"), files(after, "docs", "README.md")
    code_pairs = tuple({p: t for p, t in side.items() if p.endswith(".py")} for side in code)
    names = [git("rev-parse", "--short", commit).strip() for commit in (before, after)]
    print(f"# Drawn at random with seed {seed}: {names[0]} and {names[1]}\n")
    docstrings = list(same_docstrings(code_pairs[0], code_pairs[1], origin))
    raised = list(same_messages(code_pairs[0], code_pairs[1], origin))
    for line in drawn(docstrings, DOCSTRINGS, generator, "docstrings"):
        print(line)
    for line in drawn(raised, MESSAGES, generator, "error messages"):
        print(line)
    pages = sorted(
        path for path in shown[1] if path.endswith(".md") and origin.get(path, path) in shown[0]
    )
    print(f"## {PAGES} pages of {len(pages)}\n")
    for path in generator.sample(pages, PAGES):
        for line in page(path, shown[0][origin.get(path, path)], shown[1][path]):
            print(line)


if __name__ == "__main__":
    main()
