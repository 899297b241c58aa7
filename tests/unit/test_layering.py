"""Imports keep to the design's order, so that the core stays small and replaceable."""

import ast
import inspect
import textwrap
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
    "client": {"methods", "engines", "run"},
    "client/fit.py": {"method", "methods", "door", "channel", "engines", "run"},
    "client/client.py": {"method", "methods", "door", "channel", "engines", "run"},
    "client/objectives.py": {"method", "methods", "door", "channel", "engines", "run"},
    "core": {"methods", "channel", "engines", "run"},
    "channel": {"methods", "engines", "run"},
    "data": {"client", "method", "methods", "door", "engines", "run", "models"},
    "models": {"client", "method", "methods", "door", "engines", "run", "data"},
    "method": {"compose", "methods", "door", "engines", "run"},
    "compose": {"methods", "door", "engines", "run"},
    "layerwise": {"methods", "door", "engines", "run"},
    "serverside": {"methods", "door", "engines", "run"},
    "tau": {"methods", "door", "engines", "run"},
    "methods": {"channel", "door", "engines", "run"},
    "door": {"methods", "channel", "client", "engines", "run"},
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
    place = SRC / part if part.endswith(".py") else SRC / f"{part}.py"
    files = list((SRC / part).rglob("*.py")) or [place]
    assert files
    for file in files:
        assert not imports(file) & FORBIDDEN[part], file


@pytest.mark.parametrize("part", ["schema", "keys", "events"])
def test_declarations_stand_below_everything(part):
    assert imports(SRC / f"{part}.py") <= {"errors", "schema"}


def test_there_is_one_training_loop():
    loops = [
        p.name
        for p in SRC.rglob("*.py")
        if ".backward()" in p.read_text() and "randperm" in p.read_text()
    ]
    assert loops == ["fit.py"]


HOMES = {"ray": "engines/ray.py", "flwr": "engines/flower"}


def packages(nodes) -> set[str]:
    """The first names of all modules that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("extra", HOMES)
def test_ray_and_flower_are_imported_in_one_place_each(extra):
    for path in SRC.rglob("*.py"):
        inside = path.relative_to(SRC).as_posix().startswith(HOMES[extra])
        assert inside or extra not in packages(ast.walk(ast.parse(path.read_text()))), path


def test_ray_is_imported_only_when_it_is_needed():
    assert "ray" not in packages(ast.parse((SRC / HOMES["ray"]).read_text()).body)


def code_lines(function):
    """How many lines of a function's body hold code: no docstring, comment or blank line."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    tree = ast.parse(source)
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    code = [n for n, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"]
    return len([n for n in code if n >= tree.body[0].body[0].lineno and n not in words])


def module_lines(path):
    """How many lines of a module hold code: no docstrings, imports, comments or blank lines."""
    source = path.read_text()
    words = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            words |= set(range(node.lineno, node.end_lineno + 1))
        documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node):
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return len(
        [n for n, line in lines if line.strip() and line.strip()[0] != "#" and n not in words]
    )


def test_modules_are_short_for_what_they_hold():
    """The lines of a method's module, shared out among the methods in it."""
    homes = [inspect.getsourcefile(inspect.unwrap(f)) for f in coterie.METHODS.values()]
    shares = sorted(module_lines(Path(home)) / homes.count(home) for home in homes)
    assert shares[len(shares) // 2] < 40


def test_methods_are_short():
    lengths = {name: code_lines(factory) for name, factory in coterie.METHODS.items()}
    assert {name: n for name, n in lengths.items() if n > 60} == {}
    assert sorted(lengths.values())[len(lengths) // 2] < 40
