"""Figures of the code: lines by package, frequent local names, names that stand in many modules.

    python docs/code_figures.py                  of this tree
    python docs/code_figures.py OLD/src/coterie  of another one

Lines of code are those with a token that is neither a comment nor part of a docstring. Local names
are those that functions assign to; public names are classes, functions and constants of modules
that do not begin with an underscore.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "coterie"
_SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """How many lines of a module hold code."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _Documented) and ast.get_docstring(node):
            words |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - words)


def local_names(tree: ast.AST) -> Counter[str]:
    """In how many functions each name is assigned to."""
    names: Counter[str] = Counter()
    for function in ast.walk(tree):
        if isinstance(function, _Function):
            names.update(
                {
                    node.id
                    for node in ast.walk(function)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
            )
    return names


def public_names(tree: ast.Module) -> set[str]:
    """What a module defines for others."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, _Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def main() -> None:
    """Print the figures of a tree."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    lines: Counter[str] = Counter()
    locals_: Counter[str] = Counter()
    homes: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        parts = path.relative_to(root).parts
        lines[parts[0] if len(parts) > 1 else "(top)"] += code_lines(text)
        locals_ += local_names(tree)
        names = public_names(tree)
        homes.update(names)
        classes.update({n.name for n in tree.body if isinstance(n, ast.ClassDef)} & names)
    print("lines of code:", sum(lines.values()))
    print("  " + ", ".join(f"{name} {count}" for name, count in lines.most_common()))
    print("local names, by functions that assign to them:")
    print("  " + ", ".join(f"{name} {count}" for name, count in locals_.most_common(20)))
    print("public names in more than one module:", sum(n > 1 for n in homes.values()))
    several = sorted(name for name, count in classes.items() if count > 1)
    print(f"of these, classes: {len(several)} of {len(classes)} ({', '.join(several)})")


if __name__ == "__main__":
    main()
