"""Imports keep to the design's order, so that the core stays small and replaceable."""

import ast
import inspect
import textwrap
from functools import cache
from pathlib import Path

import pytest

import coterie

SRC = Path(coterie.__file__).parent
BASE = {"errors", "lazy", "registry", "seeds"}
# What each package may import besides, so that the core stays small and everything replaceable.
MAY = {
    "core": set(),
    "clustering": set(),
    "data": {"core"},
    "models": {"core"},
    "channel": {"core"},
    "client": {"core", "channel", "data"},
    "compose": {"core", "client", "clustering"},
    "methods": {"core", "client", "clustering", "compose", "data"},
    "engines": {"core", "channel", "client", "data"},
    "results": {"core", "channel", "client", "clustering", "data", "engines"},
    "tracking": {"core", "results"},
    "report": {"core", "channel", "data", "engines", "methods", "results", "tracking"},
}
# What trains a client, whatever it trains it for.
TRAINING = ["client/fit.py", "client/client.py", "client/objectives.py"]


def statements(tree):
    """All statements that run, in functions too; not those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from statements(node)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    names = set()
    for node in statements(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    return {name for name in names if name.startswith("coterie.")}


def imports(path: Path) -> set[str]:
    """The packages directly under ``coterie`` that a file imports from."""
    return {name.split(".")[1] for name in modules(path)}


@pytest.mark.parametrize("package", MAY)
def test_a_package_imports_only_what_is_below_it(package):
    files = list((SRC / package).rglob("*.py"))
    assert files
    for file in files:
        assert imports(file) <= MAY[package] | BASE | {package}, file


@pytest.mark.parametrize("file", TRAINING)
def test_training_knows_no_channel(file):
    assert imports(SRC / file) <= {"client", "core", "data", "errors", "registry", "seeds"}


@pytest.mark.parametrize("part", ["schema", "keys", "events"])
def test_declarations_stand_below_everything(part):
    file = SRC / "core" / f"{part}.py"
    assert imports(file) <= {"core", "errors"}
    assert modules(file) <= {"coterie.errors", "coterie.core.schema"}


def test_the_top_level_holds_packages():
    modules = {path.stem for path in SRC.glob("*.py")} - {"__init__", "__main__"}
    assert modules == BASE


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
        assert inside or extra not in packages(ast.walk(parsed(path))), path


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
