"""The house as docs/architecture.md draws it: no circles of imports, no round that grows."""

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

import coterie

DOCS = Path(__file__).parents[2] / "docs"
SRC = Path(coterie.__file__).parent
# A round's path: what a round goes through, however it is run.
# Beside it are the protocol of secure sums (``secagg``) and a real member's record.
PATH = (
    *(f"core/{name}.py" for name in ("engine", "loop", "federation", "messages", "aggregate")),
    *sorted(p.relative_to(SRC).as_posix() for p in (SRC / "channel").glob("*.py")),
    *(f"channel/privacy/{name}.py" for name in ("client", "client_sums", "client_noise")),
    *(f"channel/privacy/{name}.py" for name in ("secure_sums", "sum_rules")),
    *(f"channel/privacy/{name}.py" for name in ("central_noise", "local_noise")),
    "channel/compression/stage.py",
    "experiment/observers.py",
    "experiment/membership.py",
    "experiment/session.py",
    "experiment/running.py",
    "engines/loop.py",
)
CLIENT = tuple(f"client/{name}.py" for name in ("runtime", "built_in", "scoring", "plan", "store"))


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn():
    """The script that draws the packages; it reads the code once."""
    module = script("package_drawing")
    module.imports = cache(module.imports)
    return module


def test_no_package_imports_one_that_imports_it(drawn):
    assert not drawn.circles(drawn.imports())


def test_imports_inside_functions_count_and_those_for_type_checkers_do_not(drawn):
    text = "def f():\n    import coterie.a\nif TYPE_CHECKING:\n    from coterie import b\n"
    assert list(drawn._imported(ast.parse(text))) == ["coterie.a"]
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert drawn.circles(graph) == {frozenset("abc")}
    assert drawn.boxed({"a": {"b", "c"}, "b": {"c"}, "c": set()})[1]["a"] == {"b"}


def test_the_drawing_is_of_the_code(drawn):
    assert drawn.TARGET.read_text() == drawn.drawing(), "run: python docs/package_drawing.py"


def classes():
    """Every class and function on the path of a round."""
    for place in (*PATH, *CLIENT):
        if place == "channel/exposure.py":  # a ledger of its own
            continue
        path = SRC / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                yield file.relative_to(SRC).as_posix(), node


def members(node):
    """A class's methods, without special ones and properties, and its fields."""
    methods, fields = [], []
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            hidden = part.name.startswith("__") or any(
                "property" in ast.unparse(d) for d in part.decorator_list
            )
            methods += [] if hidden else [part.name]
        elif isinstance(part, ast.AnnAssign):
            fields.append(part.target.id)
    for part in ast.walk(node):
        if isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            named = [t.elts if isinstance(t, ast.Tuple) else [t] for t in targets]
            for target in (t for group in named for t in group):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    fields.append(target.attr)
    return methods, list(dict.fromkeys(fields))


def test_nothing_on_the_path_of_a_round_is_large():
    for file, node in classes():
        if isinstance(node, ast.ClassDef):
            methods, fields = members(node)
            assert len(methods) <= 15, (file, node.name, methods)
            if not any(ast.unparse(base) == "TypedDict" for base in node.bases):
                assert len(fields) <= 12, (file, node.name, fields)
        elif isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 70, (file, node.name)
            arguments = node.args
            count = len(arguments.args + arguments.kwonlyargs)
            assert count - (arguments.args[:1] != [] and arguments.args[0].arg == "self") <= 12, (
                node.name
            )


def test_a_round_is_as_short_as_the_page_says():
    pytest.importorskip("torch")
    walked = script("round_walk")
    page = (DOCS / "architecture.md").read_text()
    functions = walked.walk()
    assert len(functions) <= MOST[0]
    assert len({file for file, _ in functions}) <= MOST[1]
    assert walked.BEGIN in page
    assert "`core/loop.py`" in page


MOST = 110, 31  # functions and files of a round: fewer is better, more is a step back
