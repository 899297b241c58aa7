"""The packages of Coterie and which imports which, drawn from the code.

    python docs/package_drawing.py    writes docs/images/packages.svg

Packages and modules directly under ``coterie`` are boxes, in rows so that each imports only from
rows below. Imports inside functions count; those for type checkers alone do not, and neither does
the facade ``coterie/__init__.py``. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import coterie

ROOT = Path(coterie.__file__).parent
TARGET = Path(__file__).parent / "images" / "packages.svg"
Graph = dict[str, set[str]]
Boxes = dict[str, frozenset[str]]  # a package, or a circle of them, by its first name
_WIDE, _HIGH, _GAP = 92, 26, 46


def imports() -> Graph:
    """Which package or module under ``coterie`` imports which."""
    known = {path.stem if path.suffix else path.name for path in ROOT.iterdir()}
    found: Graph = {}
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own.startswith("__"):  # the facade
            continue
        targets = found.setdefault(own, set())
        for module in _imported(ast.parse(path.read_text())):
            parts = module.split(".")
            if parts[0] == "coterie" and len(parts) > 1 and parts[1] in known - {own}:
                targets.add(parts[1])
    return found


def _imported(tree: ast.AST) -> Iterable[str]:
    """The modules that a file imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _imported(node)


def reachable(graph: Graph, start: str) -> set[str]:
    """Everything that a package imports, by however many steps."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.get(name, ())
    return found


def circles(graph: Graph) -> set[frozenset[str]]:
    """Packages that import each other."""
    reach = {name: reachable(graph, name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach.get(other, ()))
        for name in graph
        if name in reach[name]
    }


def boxed(graph: Graph) -> tuple[Boxes, Graph]:
    """Each circle as one box, and the arrows between boxes that do not follow from others."""
    box_of = {
        name: frozenset([name]) for name in {*graph, *(t for ts in graph.values() for t in ts)}
    }
    for circle in circles(graph):
        box_of |= dict.fromkeys(circle, circle)
    boxes = {min(box): box for box in box_of.values()}
    arrows: Graph = {name: set() for name in boxes}
    for name, targets in graph.items():
        arrows[min(box_of[name])] |= {min(box_of[t]) for t in targets} - {min(box_of[name])}
    reach = {name: reachable(arrows, name) for name in arrows}
    for targets in arrows.values():
        targets -= {t for t in targets if any(t in reach[other] for other in targets)}
    return boxes, arrows


def drawing() -> str:
    """The picture, as SVG."""
    boxes, arrows = boxed(imports())
    depth: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((level(t) for t in arrows[name]), default=-1)
        return depth[name]

    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(boxes):
        rows[level(name)].append(name)
    widths = {name: max(_WIDE, 8 * len(" · ".join(box)) + 16) for name, box in boxes.items()}
    whole = max(sum(widths[n] + 14 for n in row) for row in rows.values()) + 14
    places: dict[str, tuple[float, float]] = {}
    for depth_, row in rows.items():
        x = (whole - sum(widths[n] + 14 for n in row)) / 2 + 14
        for name in row:
            places[name] = x + widths[name] / 2, (len(rows) - depth_ - 1) * (_HIGH + _GAP) + 14
            x += widths[name] + 14
    high = len(rows) * (_HIGH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {high}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#667"/></marker></defs>',
        f'<rect width="{whole:.0f}" height="{high}" fill="#fff"/>',
    ]
    for name, targets in sorted(arrows.items()):
        x, y = places[name]
        for target in sorted(targets):
            to, down = places[target]
            parts.append(
                f'<line x1="{x:.0f}" y1="{y + _HIGH:.0f}" x2="{to:.0f}" y2="{down:.0f}" '
                'stroke="#99a" marker-end="url(#tip)"/>'
            )
    for name, box in sorted(boxes.items()):
        x, y = places[name]
        parts.append(
            f'<rect x="{x - widths[name] / 2:.0f}" y="{y:.0f}" width="{widths[name]}" '
            f'height="{_HIGH}" rx="4" fill="#eef" stroke="#667"/>'
            f'<text x="{x:.0f}" y="{y + 17:.0f}" text-anchor="middle" fill="#223">'
            f"{' · '.join(sorted(box))}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    TARGET.write_text(drawing())


if __name__ == "__main__":
    main()
