"""Where a client's data comes from; what is wrong is a sentence."""

import sys

import numpy as np
import pytest
from PIL import Image

from coterie.deploy.data import MemberData
from coterie.errors import ConfigError, DataError
from coterie.experiment.config import parse

X = np.arange(120, dtype=np.float32).reshape(40, 3)
Y = np.arange(40) % 2
ASKED = parse({"data": {"test_fraction": 0.25, "val_fraction": 0.1}, "run": {"seed": 1}})


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith("loading_"):
            del sys.modules[name]


def read(source, asked=ASKED):
    source.check()
    return source.read(asked, 7)


def whole(population, place):
    own = population.clients[place]
    return sum(len(s) for s in (own.train, own.val, own.test))


def assert_forty(source):
    population, place = read(source)
    assert place == 0
    assert whole(population, place) == 40
    assert len(population.clients[0].test) == 10
    assert population.classes == ("0", "1")
    again, _ = read(source)
    assert population.clients[0].train.x.equal(again.clients[0].train.x)


def test_npz(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    assert_forty(MemberData(tmp_path / "mine.npz"))
    np.savez(tmp_path / "odd", x=X, y=Y)
    (tmp_path / "odd.npz").rename(tmp_path / "odd")
    with pytest.raises(ConfigError, match="--form"):
        MemberData(tmp_path / "odd").check()
    assert_forty(MemberData(tmp_path / "odd", form="npz"))


def test_npy_folder(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    assert_forty(MemberData(tmp_path))


def test_csv_with_options(tmp_path):
    lines = ["a;b;kind"] + [f"{i};{i * 2};{'ill' if i % 2 else 'well'}" for i in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(lines).replace(";", ",") + "\n")
    population, place = read(MemberData(tmp_path / "mine.csv", options={"label": "kind"}))
    assert population.classes == ("ill", "well")
    assert (population.shape, whole(population, place)) == ((2,), 40)
    with pytest.raises(ConfigError, match="options"):
        read(MemberData(tmp_path / "mine.csv", options={"label": "kind", "options": 3}))
    with pytest.raises(DataError, match="gender"):
        read(MemberData(tmp_path / "mine.csv", options={"label": "gender"}))


def test_image_folder(tmp_path):
    for kind in ("cat", "dog"):
        place = tmp_path / "images/train" / kind
        place.mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(place / f"{i}.png")
    population, place = read(MemberData(tmp_path / "images"))
    assert population.classes == ("cat", "dog")
    assert (population.shape, whole(population, place)) == ((3, 8, 8), 20)


def test_a_function_of_the_user_in_the_folder_one_is_in(tmp_path):
    (tmp_path / "loading_mine.py").write_text(
        "import numpy as np\n"
        "def read(path):\n"
        "    x = np.load(path)\n"
        "    return x, np.arange(len(x)) % 2\n"
    )
    np.save(tmp_path / "mine.npy", X)
    assert_forty(MemberData(tmp_path / "mine.npy", "loading_mine:read"))


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ("loading_one", "write package.module:function"),
        ("loading_nowhere:read", "No module named 'loading_nowhere'"),
        ("loading_one:write", "write"),
        ("loading_one:NUMBER", "is not a function"),
        ("loading_wrong:read", "SyntaxError"),
        ("loading_raises:read", "RuntimeError: no licence"),
    ],
)
def test_a_function_that_is_not_there_is_named_at_once(loader, told, tmp_path):
    (tmp_path / "loading_one.py").write_text("NUMBER = 3\n")
    (tmp_path / "loading_wrong.py").write_text("def read(:\n")
    (tmp_path / "loading_raises.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError) as refused:
        MemberData(loader=loader).check()
    assert f"--data-loader {loader}" in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise OSError('no such disk')", "loading_bad:read failed with OSError: no such disk"),
        ("return 5", ""),
        ("return None", ""),
        ("return [[1, 2], [1]]", ""),
        ("return __import__('numpy').zeros((0, 3)), []", ""),
    ],
)
def test_what_it_does_wrong_is_a_mistake_in_the_data(code, told, tmp_path):
    (tmp_path / "loading_bad.py").write_text(f"def read(path):\n    {code}\n")
    with pytest.raises(DataError) as refused:
        read(MemberData(loader="loading_bad:read"))
    assert told in str(refused.value)


def test_the_experiment_s_own_data():
    asked = parse({"data": {"set": "digits", "clients": 3, "samples": 60}})
    source = MemberData(simulated=True)
    source.check()
    population, place = source.read(asked, 2)
    assert (place, len(population.clients)) == (2, 3)
    with pytest.raises(DataError, match=r"client 3 has no part of .* among 3 clients"):
        source.read(asked, 3)


def test_the_folder_of_the_server_is_not_the_client_s(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    asked = parse({"data": {"set": "npz", "folder": "/nowhere/on/the/server.npz", "clients": 2}})
    population, place = MemberData(tmp_path / "mine.npz", simulated=True).read(asked, 1)
    assert (place, len(population.clients)) == (1, 2)


@pytest.mark.parametrize(
    ("source", "kind", "told"),
    [
        (MemberData(), ConfigError, "give this client's data with --data PATH"),
        (MemberData(form="npz"), ConfigError, "give this client's data with --data PATH"),
        (
            MemberData(simulated=True, form="npz"),
            ConfigError,
            "--simulated uses the experiment's own",
        ),
        (MemberData(simulated=True, loader="a:b"), ConfigError, "--simulated uses"),
    ],
)
def test_what_cannot_be_is_refused_at_once(source, kind, told):
    with pytest.raises(kind, match=told):
        source.check()


def test_a_missing_or_unknown_file(tmp_path):
    with pytest.raises(DataError, match="there is no file or folder"):
        MemberData(tmp_path / "nowhere.npz").check()
    (tmp_path / "notes.docx").touch()
    with pytest.raises(ConfigError, match="give it with --form"):
        MemberData(tmp_path / "notes.docx").check()
    (tmp_path / "bad.npz").write_text("none")
    with pytest.raises(DataError):
        read(MemberData(tmp_path / "bad.npz"))


def test_texts_need_words_that_all_share(tmp_path):
    (tmp_path / "texts.csv").write_text("text,label\n" + "a word,x\nmore words,y\n" * 5)
    with pytest.raises(DataError, match="a vocabulary that all clients share"):
        read(
            MemberData(
                tmp_path / "texts.csv", form="text", options={"text": "text", "label": "label"}
            )
        )
