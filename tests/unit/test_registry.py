"""Registries: names, entry points, places, and the one checker of parameters."""

import ast
import importlib
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

import coterie
import forked
from coterie.errors import ConfigError
from coterie.experiment.user_code import admitted, by_name, digests_of
from coterie.registry import (
    CODECS,
    METHODS,
    MODELS,
    REGISTRIES,
    Registry,
    UserFunction,
    absolute,
    checked,
    function_at,
    is_place,
)
from registries import restored

ROOT = Path(__file__).parents[2]
NET = "from torch import nn\n\ndef net(shape, outputs, hidden=4):\n    return nn.Linear(4, {})\n"


@pytest.fixture(autouse=True)
def _as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with restored():
        yield


def shapes():
    return Registry("shape", "shapes")


# --- names ----------------------------------------------------------------------------------------


def test_a_name_stands_for_one_thing():
    known = shapes()
    known.register("square", module="a")(print)
    known.register("square", module="a")(repr)  # a's module, loaded again
    assert known.find("square") is repr
    with pytest.raises(ConfigError, match="there is already a shape 'square'"):
        known.register("square", module="b")(print)
    assert known.find("square") is repr


def test_nobody_registers_in_the_place_of_what_comes_with_coterie():
    with pytest.raises(ConfigError, match="there is already a codec 'raw'"):
        CODECS.register("raw", module="mine")(print)


def test_what_was_replaced_stays_so_when_its_module_is_imported(monkeypatch):
    fresh = Registry("model", "models")
    fresh["mlp"] = print
    fresh.register("mlp", module=fresh.index["mlp"]["module"])(repr)
    assert fresh["mlp"] is print
    del fresh["mlp"]
    assert "mlp" not in fresh


def installed(folder, name, points):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def test_an_installed_package_is_known_by_name_and_not_imported_for_that(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugged_in.py").write_text("def big(size=3):\n    return 'big'\n")
    points = "[coterie.shapes]\nbig = plugged_in:big\nbroken = plugged_in:none\n"
    installed(tmp_path, "plugged_in", points)
    known = shapes()
    assert known.knows("big")
    assert list(known.installed) == ["big", "broken"]
    assert "plugged_in" not in sys.modules
    assert known.make("big", {}) == "big"
    sys.modules.pop("plugged_in")
    with pytest.raises(ConfigError, match=r"shape 'broken' of an installed package .*AttributeErr"):
        known.find("broken")
    with pytest.raises(ConfigError, match="unknown shape 'bag'; did you mean 'big'"):
        known.find("bag")
    sys.modules.pop("plugged_in", None)


def test_names_are_never_taken_for_places(tmp_path):
    (tmp_path / "mine.py").write_text(NET.format(2))
    for name in ("mine.py:net", f"{tmp_path}/mine.py:net", "os:system", "mine:net"):
        assert not MODELS.knows(name)
        with pytest.raises(ConfigError, match="unknown model"):
            MODELS.find(name)
    assert "mine" not in sys.modules


# --- the index ------------------------------------------------------------------------------------


def test_the_index_and_the_stub_are_what_the_decorators_say():
    assert forked.run(ROOT / "docs" / "index_of_names.py", "--check", cwd=ROOT).stdout == ""


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda r: r.group)
def test_everything_in_the_index_can_be_had(registry):
    assert registry.index
    for name, row in registry.index.items():
        assert registry[name] is not None
        assert row["about"]
        assert row["module"] == registry.registered[name][0]


def test_every_public_name_is_there_once_and_is_what_its_module_has():
    stub = ast.parse((ROOT / "src/coterie/__init__.pyi").read_text())
    pairs = [
        (alias.name, node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module != "coterie"
        for alias in node.names
    ]
    assert sorted(name for name, _ in pairs) == coterie.__all__
    for name, module in pairs:
        assert getattr(coterie, name) is getattr(importlib.import_module(module), name)
    assert set(coterie.__all__) <= set(dir(coterie))
    for name in METHODS.index:
        assert getattr(coterie, name.replace("-", "_")) is METHODS[name]


def test_a_public_name_wins_over_a_module_of_the_same_name():
    text = (
        "import coterie.experiment.config, coterie.core.method, coterie.methods.cfl\n"
        "import coterie; from coterie import *\n"
        "assert callable(coterie.run) and callable(coterie.method) and callable(run)\n"
        "assert coterie.methods.cfl is coterie.cfl is coterie.METHODS['cfl']\n"
        "assert coterie.data.load and coterie.models.make_model\n"
        "assert not hasattr(coterie, 'nothing') and not hasattr(coterie, '_nothing')\n"
        "from coterie.experiment.api import run as again; assert again is coterie.run\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


# --- start-up -------------------------------------------------------------------------------------

LISTS = ["--help", "--version", "methods", "wire", "data", "partitions", "models", "run --help"]
LISTS += ["compare --help", "serve --help", "join --help", "keys make --help", "report --help"]


HEAVY = """
import sys, coterie
def look(words):
    print(f"{words}:", *{'torch', 'numpy', 'scipy', 'sklearn', 'plotly'} & {*sys.modules})
look("import")
from coterie.cli.app import app
for words in sys.argv[1:]:
    app(words.split(), standalone_mode=False)
    look(words)
"""


def test_what_only_lists_names_imports_no_torch():
    """Nor NumPy nor pydantic: of what is imported, torch alone takes two seconds."""
    command = [sys.executable, "-c", HEAVY, *LISTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"import:", *(f"{words}:" for words in LISTS)} <= set(found.stdout.splitlines())


# --- parameters -----------------------------------------------------------------------------------


def waves(
    given,
    height: Annotated[float, Field(gt=0)],
    kind: Literal["long", "short"] = "long",
    sizes: tuple[int, ...] = (),
):
    """Not called."""


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({}, "the sea needs the parameter 'height': say height=4"),
        ({"hight": 1}, "unknown parameter of the sea 'hight'; did you mean 'height'"),
        ({"height": 1, "given": 2}, "unknown parameter of the sea 'given'"),
        ({"height": 0}, "the sea: height = 0: must be greater than 0"),
        ({"height": "1"}, "the sea: height = '1': must be a valid number"),
        ({"height": 1, "kind": "wide"}, "kind = 'wide': must be 'long' or 'short'"),
        ({"height": 1, "sizes": [1, 2.5]}, "sizes = .1, 2.5.: must be a valid integer"),
        ({"height": 1j}, "height = 1j: .* use plain numbers and texts"),
    ],
)
def test_the_checker_says_which_parameter_is_wrong(parameters, why):
    with pytest.raises(ConfigError, match=why):
        checked("the sea", waves, parameters, given=("given",), hint="say {}=4")


def test_the_checker_gives_values_as_the_signature_wants_them():
    found = checked("the sea", waves, {"height": 2, "sizes": [1, 2]}, given=("given",))
    assert found == {"height": 2.0, "sizes": (1, 2)}
    assert isinstance(found["height"], float)
    with pytest.raises(ConfigError, match="the pond takes no parameters, but 'depth' was given"):
        checked("the pond", lambda given: None, {"depth": 1}, given=("given",))
    assert checked("anything", lambda **more: None, {"depth": 1}) == {"depth": 1}


def test_hints_that_cannot_be_had_are_no_reason_to_refuse():
    def later(x: "Nowhere" = 1):  # noqa: F821
        """Its hint is of a module that is imported for type checkers only."""

    def array(x: typing.Any = 1, y: object = 2, z: Path | Registry = Path()): ...

    assert checked("it", later, {"x": 5}) == {"x": 5}
    assert checked("it", array, {"x": [5], "y": 6, "z": 7}) == {"x": [5], "y": 6, "z": 7}


# --- a user's own code ----------------------------------------------------------------------------


def test_a_place_is_a_file_or_a_module_and_a_function():
    for text in ("mine.py:net", "/a b/mine.py:net", "my.nets:net", "os:system"):
        assert is_place(text)
    for text in ("mine.py", "ifca:k=4", "a:b:c", ":net", "mine.py:", "fedavg", "my nets:net"):
        assert not is_place(text)


def test_a_file_is_loaded_once_and_again_when_it_has_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(NET.format(2))
    name = MODELS.admit("mine.py:net", "--model")
    assert name == f"{tmp_path}/mine.py:net" == absolute("mine.py:net")
    first = MODELS.find(name)
    assert MODELS.admit(name, "--model") == MODELS.admit("mine.py:net", "--model") == name
    assert MODELS.find(name) is first
    assert not (tmp_path / "__pycache__").exists()
    digest = MODELS.own[name].digest
    file.write_text(NET.format(3))  # as long as before, and in the same second
    assert MODELS.admit("mine.py:net", "--model") == name
    assert MODELS.make(name, {}, shape=(4,), outputs=2).out_features == 3
    assert MODELS.own[name].digest != digest
    with pytest.raises(ConfigError, match=r"mine\.py has changed since the run began"):
        MODELS.admit("mine.py:net", "--model", digest)


def test_another_process_imports_a_file_by_the_name_of_its_module(tmp_path):
    """What is pickled names its module; percent signs and dots of a path are none of Python's."""
    folder = tmp_path / "a.b%2E c"
    folder.mkdir()
    (folder / "beside.py").write_text("SIZE = 3\n")
    (folder / "mine.py").write_text("from beside import SIZE\nclass Net:\n    size = SIZE\n")
    made = function_at(f"{folder}/mine.py:Net", "--model")
    assert made.size == 3
    text = (
        "import importlib, sys, coterie.registry\n"
        f"print(importlib.import_module({made.__module__!r}).Net.size)"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert found.stdout == "3\n", found.stderr
    sys.modules.pop("beside")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nowhere.py:net", "FileNotFoundError"),
        ("nowhere:net", "ModuleNotFoundError"),
        ("mine.py:other", "AttributeError"),
        ("mine.py:nn", "is not a function"),
        ("sys:exit", "no file of source code"),
        ("broken.py:net", "ZeroDivisionError"),
    ],
)
def test_a_place_with_nothing_there_is_a_sentence(text, why, tmp_path):
    (tmp_path / "mine.py").write_text(NET.format(2))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=f"model.name = .*{text.split(':')[0]}.*{why}"):
        admitted({"model": {"name": text}})


def test_a_configuration_is_admitted_wherever_a_name_stands(tmp_path):
    (tmp_path / "mine.py").write_text("import coterie\n\ndef f(inner=None): ...\ng = f\n")
    tree = {
        "method": {"name": "mine.py:f+ditto", "mu": 1},
        "wire": {"up": "mine.py:f:levels=3+zstd", "down": "raw", "layers": {"head": "mine.py:g"}},
        "clock": {"name": "none"},
        "run": 3,
    }
    place = f"{tmp_path}/mine.py"
    assert admitted(tree) == {
        "method": {"name": f"{place}:f+ditto", "mu": 1},
        "wire": {
            "up": f"{place}:f:levels=3+zstd",
            "down": "raw",
            "layers": {"head": f"{place}:g"},
        },
        "clock": {"name": "none"},
        "run": 3,
    }
    assert set(digests_of(admitted(tree))) == {
        f"method {place}:f",
        f"codec {place}:f",
        f"codec {place}:g",
    }
    assert admitted(admitted(tree)) == admitted(tree)


def test_a_server_calls_its_own_functions_by_their_names(tmp_path):
    (tmp_path / "mine.py").write_text("def my_method(): ...\ndef ditto(): ...\n")
    said = []
    tree = admitted({"method": {"name": "mine.py:my_method"}})
    assert by_name(tree, said.append) == {"method": {"name": "my-method"}}
    assert "coterie join --method my-method=FILE.py:FUNCTION" in said[0]
    assert METHODS.own["my-method"] == UserFunction(
        tree["method"]["name"], METHODS.own["my-method"].digest
    )
    with pytest.raises(ConfigError, match="'ditto' is built in: choose another name"):
        by_name(admitted({"method": {"name": "mine.py:ditto"}}), said.append)
    with pytest.raises(ConfigError, match=r"entry point coterie\.codecs"):
        by_name(admitted({"wire": {"up": "mine.py:ditto"}}), said.append)
