"""Imports keep to the design's order, so that the core stays small and replaceable."""

import ast
from pathlib import Path

import pytest

import coterie

SRC = Path(coterie.__file__).parent
FORBIDDEN = {
    "weights": {"federation", "client", "method", "methods", "door", "engines", "run", "data"},
    "grouping": {"federation", "client", "method", "methods", "door", "engines", "run", "data"}
    | {"models", "weights"},
    "tree": {"federation", "client", "method", "methods", "door", "engines", "run"},
    "federation": {"client", "method", "methods", "door", "engines", "run"},
    "client": {"method", "methods", "door", "engines", "run"},
    "data": {"client", "method", "methods", "door", "engines", "run", "models"},
    "models": {"client", "method", "methods", "door", "engines", "run", "data"},
    "method": {"compose", "methods", "door", "engines", "run"},
    "compose": {"methods", "door", "engines", "run"},
    "layerwise": {"methods", "door", "engines", "run"},
    "methods": {"door", "engines", "run"},
    "door": {"methods", "run"},
    "engines": {"methods", "run"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("coterie.")}
    return found


@pytest.mark.parametrize("part", FORBIDDEN)
def test_import_rule(part):
    files = list((SRC / part).rglob("*.py")) or [SRC / f"{part}.py"]
    assert files
    for file in files:
        assert not imports(file) & FORBIDDEN[part], file


def test_there_is_one_training_loop():
    loops = [
        p.name
        for p in SRC.rglob("*.py")
        if ".backward()" in p.read_text() and "randperm" in p.read_text()
    ]
    assert loops == ["fit.py"]


def test_ray_and_flower_are_not_imported_by_the_core():
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        assert "import ray" not in text
        assert "import flwr" not in text


def test_methods_are_short():
    import inspect

    for name, factory in coterie.METHODS.items():
        source = ast.parse(inspect.getsource(inspect.unwrap(factory)))
        body = source.body[0].body
        lines = body[-1].end_lineno - body[1].lineno + 1
        assert lines <= 60, name
