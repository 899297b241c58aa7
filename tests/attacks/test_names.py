"""A server that names code, files or addresses: members know names, and resolve nothing else."""

import inspect
import json
import sys

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.wire import Message
from coterie.data import SETS
from coterie.deploy import allowed_names as names
from coterie.deploy import serve as serving
from coterie.deploy.terms import agreement_digest
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.errors import ConfigError, Interrupted, WireError
from coterie.registry import METHODS, MODELS, function_at
from faked_grid import Federation, assert_models, tree
from registries import restored

NETWORK = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()


def net(shape, outputs, hidden=4):
    inputs = 1
    for size in shape:
        inputs *= size
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Linear(hidden, outputs))
"""


@pytest.fixture
def lying_about(tmp_path, monkeypatch):
    """A folder on sys.path with a module that says when it is imported."""
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "lying_about.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    return place


def imported(place):
    return (place / "imported").exists() or "lying_about" in sys.modules


CODE = [
    "os:system",
    "os.system",
    "lying_about",
    "lying_about:net",
    "lying_about.net",
    "lying_about.py:net",
    "./lying_about.py",
    "{place}/lying_about.py:net",
    "{place}/lying_about.py",
    "file://{place}/lying_about.py",
    "torch.nn.Linear",
    "",
]


@pytest.fixture
def unchecked(monkeypatch):
    """The server's own checks are taken out, and it does not wait for those who refuse."""
    monkeypatch.setattr(serving, "_check", lambda config: None)

    def pause(engine):
        raise Interrupted("enough")

    monkeypatch.setattr(serving.Served, "pause", pause)


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("table", ["model", "method", "codec"])
def test_a_member_imports_nothing_that_a_server_names(
    table, name, lying_about, unchecked, tmp_path
):
    fed = Federation(tmp_path / "fed", tree(2), secure=True)  # with keys, who refuses has a name
    name = name.format(place=lying_about)
    fed.config |= {"wire": {"up": name}} if table == "codec" else {table: {"name": name}}
    with pytest.raises(Interrupted):
        fed.serve()
    for client in range(2):
        (said,) = (t for t in fed.said if t.startswith(f"client {client} cannot take part"))
        assert f"names the {table} '" in said
    heard = [line for line in fed.heard if f"names the {table} '" in line]
    assert len(heard) == 2
    assert not imported(lying_about)
    assert {post.kind for post in fed.grid.posts} == {"describe"}


def told(fed, kind, config, run="f" * 16, client=0):
    """What a member says to terms that were changed by hand."""
    (agreed,) = (fed.root / f"site{client}/runs").glob("*/agreed.json")
    terms = json.loads(agreed.read_text())
    from coterie import __version__

    terms |= {"config": config, "version": __version__}
    packet = Packet(kind, run, Message(b"{}", ()), {"json": json.dumps(terms)})
    with fed.in_memory():
        answer, _ = opened(fed.grid.members[client].answer(sealed(packet, Digests())), {})
    return answer


def test_nor_in_terms_that_differ_from_what_it_described(lying_about, tmp_path):
    fed = Federation(tmp_path / "fed", tree(2, run={"rounds": 1}))
    fed.serve()
    for table in ("model", "method"):
        wanted = {**fed.config, table: {"name": "lying_about:net"}}
        answer = told(fed, "enrol", wanted)
        assert answer.kind == "refused"
        assert f"names the {table} 'lying_about:net'" in answer.told["text"]
    assert not imported(lying_about)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "{place}/secret.npz"),
        ("file", "../secret.npz"),
        ("file", ".."),
        ("file", ["secret.npz"]),
        ("x", "/etc/passwd"),
        ("y", "sub/y.npy"),
        ("cache", "{place}/made"),
        ("cache", "made"),
        ("mirror", "http://127.0.0.1:1/"),
    ],
)
def test_a_simulated_member_opens_no_place_that_a_server_names(
    key, value, tmp_path, monkeypatch, unchecked
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.data.load", lambda *given, **options: pytest.fail("it was read"))
    fed = Federation(tmp_path / "fed", tree(2), secure=True)
    named = value.format(place=tmp_path) if isinstance(value, str) else value
    sets = {"x": "npy", "y": "npy", "cache": "mnist", "mirror": "mnist"}
    fed.config["data"] |= {"set": sets.get(key, "npz"), "options": {key: named}}
    with pytest.raises(Interrupted):
        fed.serve()
    assert sum(f"data.options.{key}" in line for line in fed.said) == 2
    assert sum(f"data.options.{key}" in line for line in fed.heard) == 2
    assert not (tmp_path / "made").exists()


def test_all_options_of_data_sets_that_name_places_are_known():
    """A new one must be added to those that a server may not give."""
    for factory in SETS.values():
        for name, parameter in inspect.signature(factory).parameters.items():
            places = ("Where", "Path", "mirror")
            named = any(word in str(parameter.annotation) for word in places) or name == "mirror"
            if named and name != "folder":
                assert name in (*names.FILES, *names.PLACES)


@pytest.mark.parametrize("table", ["data", "partition", "shift"])
def test_names_of_data_are_those_that_there_are(table, unchecked, tmp_path):
    fed = Federation(tmp_path, tree(2))
    key = "set" if table == "data" else "name"
    fed.config[table] = {**fed.config.get(table, {}), key: "lying_about:net"}
    with pytest.raises(Interrupted):
        fed.serve()
    assert sum("'lying_about:net'" in line for line in fed.heard) == 2


# --- names that a member knows --------------------------------------------------------------------


def test_a_package_that_is_installed_at_a_member_is_known_by_name(lying_about, tmp_path):
    info = lying_about / "lying_about-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lying-about\nVersion: 1.0\n")
    points = "[coterie.models]\nplugged = lying_about:net\n"
    (info / "entry_points.txt").write_text(points)
    try:
        fed = Federation(tmp_path / "fed", tree(2, model={"name": "plugged", "hidden": 3}))
        fed.serve()
        assert_models(fed, fed.loop())
    finally:
        sys.modules.pop("lying_about", None)


def test_what_a_members_own_command_line_maps(lying_about, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = tree(2, model={"name": "mynet", "hidden": 3}, run={"rounds": 1})
    fed = Federation(tmp_path / "fed", asked)
    names.map_names([], names.mapped(["mynet=lying_about.py:net"]))
    try:
        fed.serve()
        assert_models(fed, fed.loop())
        assert fed.model(0)["1.weight"].shape == (3, 64)
    finally:
        del MODELS["mynet"]
    answer = told(fed, "enrol", asked)  # a member that was started without it
    assert answer.kind == "refused"
    assert "names the model 'mynet'" in answer.told["text"]
    assert "--model NAME=FILE.py:FUNCTION" in answer.told["text"]


METHOD = """
from coterie import grouped, method


@method
def mine(share: float = 1.0):
    return grouped("mine")
"""


def test_a_place_is_refused_even_if_this_process_has_loaded_it(lying_about):
    with restored():
        place = MODELS.admit("lying_about.py:net", "--model")
        assert MODELS.knows(place)
        with pytest.raises(WireError, match=r"names the model '.*lying_about\.py:net', which"):
            names.checked_config({"model": {"name": place}}, simulated=False)


def test_a_method_that_a_members_own_command_line_maps(lying_about, tmp_path):
    (lying_about / "methods.py").write_text(METHOD)
    asked = tree(2, method={"name": "mine", "share": 0.5}, run={"rounds": 1})
    fed = Federation(tmp_path / "fed", asked)
    with restored():
        names.map_names(names.mapped(["mine=methods.py:mine"]), [])
        fed.serve()
        assert_models(fed, fed.loop())
        (agreed,) = (fed.root / "site0/runs").glob("*/agreed.json")
        digest = METHODS.own["mine"].digest
        assert json.loads(agreed.read_text())["code"] == {"method mine": digest}
        (lying_about / "methods.py").write_text(METHOD.replace("1.0", "2.0"))
        names.map_names(["mine=methods.py:mine"], [])  # the member is started with another file
        answer = told(fed, "enrol", asked)
    assert answer.kind == "refused"
    assert (
        "the method mine of this client comes from another file than the server's"
        in answer.told["text"]
    )
    answer = told(fed, "enrol", asked)  # and without it
    assert answer.kind == "refused"
    assert "--method NAME=FILE.py:FUNCTION" in answer.told["text"]


def test_the_digests_are_a_part_of_what_is_agreed():
    terms = {"config": {}, "like": {}, "least": 1, "start": "s"}
    plain = agreement_digest("r", terms)
    first = agreement_digest("r", {**terms, "code": {"method mine": "a"}})
    assert len({plain, first, agreement_digest("r", {**terms, "code": {"method mine": "b"}})}) == 3


def test_a_run_does_not_get_other_code_under_way(lying_about, tmp_path):
    """Terms that a member has agreed to, but for the digest of a function, are other terms."""
    fed = Federation(tmp_path / "fed", tree(2, run={"rounds": 1}))
    fed.serve()
    (agreed,) = (fed.root / "site0/runs").glob("*/agreed.json")
    terms = json.loads(agreed.read_text())
    packet = Packet(
        "enrol", agreed.parent.name, Message(b"{}", ()),
        {"json": json.dumps({**terms, "code": {"method fedavg": "0"}})},
    )  # fmt: skip
    with fed.in_memory():
        answer, _ = opened(fed.grid.members[0].answer(sealed(packet, Digests())), {})
    assert answer.kind == "refused"
    assert "not the terms that this run began with" in answer.told["text"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mynet", "write NAME=FILE.py:FUNCTION"),
        ("=mine.py:net", "write NAME=FILE.py:FUNCTION"),
        ("my.net=mine.py:net", "write NAME=FILE.py:FUNCTION"),
        ("mynet=mine", "write package.module:function or FILE.py:function"),
        ("mynet=nowhere.py:net", "FileNotFoundError"),
        ("mynet=lying_about.py:other", "AttributeError"),
        ("mynet=lying_about:__name__", "is not a function"),
        ("mlp=lying_about.py:net", "'mlp' is built in"),
    ],
)
def test_a_mapping_that_is_wrong_is_said_at_once(text, why, lying_about, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=f"--model .*{why}"):
        names.map_names([], [text])
    assert not MODELS.own
    sys.modules.pop("lying_about", None)


def test_a_file_may_use_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("import torch\nLAYER = torch.nn.Linear\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from beside_it import LAYER\n\n\n@dataclass\nclass Size:\n    inputs: int\n\n\n"
        "def net(shape, outputs):\n    return LAYER(Size(shape[0]).inputs, outputs)\n"
    )
    made = function_at(f"{tmp_path}/mine.py:net", "--model")((4,), 2)
    assert isinstance(made, torch.nn.Linear)
    sys.modules.pop("beside_it")


def test_a_configuration_that_makes_no_sense_is_a_sentence():
    with pytest.raises(WireError, match=r"configuration is wrong: unknown key 'data.nam'"):
        names.checked_config({"data": {"nam": 1}, "model": {"name": 3}}, simulated=False)
