"""The user's own files: CSV, text, NumPy arrays and image folders."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from coterie.data import load
from coterie.errors import ConfigError, DataError

TABLE = "age,site,height,ill\n30,north,1.7,yes\n41,south,1.8,no\n\n52,north,1.9,yes\n"


def csv_file(tmp_path, content: str | bytes, name: str = "data.csv"):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_csv_is_read_exactly(tmp_path):
    raw = load("csv", csv_file(tmp_path, TABLE), label="ill", columns=["site"])
    assert raw.x.dtype == np.float32
    assert raw.x == pytest.approx(np.array([[30, 1.7], [41, 1.8], [52, 1.9]]))
    assert raw.y.tolist() == [1, 0, 1]
    assert raw.classes == ("no", "yes")
    assert raw.columns["site"].tolist() == ["north", "south", "north"]
    assert raw.kind == "table"


def test_csv_is_found_in_its_folder(tmp_path):
    csv_file(tmp_path, TABLE)
    assert len(load("csv", tmp_path, label="ill", columns=["site"])) == 3
    csv_file(tmp_path, TABLE, "second.csv")
    assert len(load("csv", tmp_path, file="second.csv", label="ill", columns=["site"])) == 3
    assert len(load("csv", file=tmp_path / "data.csv", label="ill", columns=["site"])) == 3
    with pytest.raises(
        DataError, match=r"contains 2 .csv files \(data.csv, second.csv\): set file"
    ):
        load("csv", tmp_path, label="ill")
    with pytest.raises(DataError, match=r"there is no file third.csv in"):
        load("csv", tmp_path, file="third.csv", label="ill")
    with pytest.raises(ConfigError, match="needs a folder"):
        load("csv", label="ill")
    with pytest.raises(ConfigError, match="needs the parameter 'label'"):
        load("csv", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no .csv file in"):
        load("csv", tmp_path / "empty", label="ill")


def test_csv_regression_and_numbered_classes(tmp_path):
    path = csv_file(tmp_path, "a;y\n1;10\n2;2\n3;10\n")
    raw = load("csv", path, label="y", target="regression", delimiter=";")
    assert raw.classes is None
    assert raw.y.tolist() == [10, 2, 10]
    assert raw.y.dtype == np.float32
    raw = load("csv", path, label="y", delimiter=";")
    assert raw.classes == ("2", "10")
    assert raw.y.tolist() == [1, 0, 1]


def test_csv_with_byte_order_mark_and_quotes(tmp_path):
    path = csv_file(tmp_path, '\ufeffa,y\n1,"x, or ""y"""\n2,z\n')
    assert load("csv", path, label="y").classes == ('x, or "y"', "z")


@pytest.mark.parametrize(
    ("content", "params", "message"),
    [
        ("", {}, "the file is empty"),
        ("a,y\n", {}, "no rows below the header"),
        ("a,y\n1,0\n2\n", {}, "line 3: 1 fields, but the header has 2"),
        ("a,y\n1,0\n2,1,5\n", {}, "line 3: 3 fields"),
        ("a,y\n1,0\ntwo,1\n", {}, "line 3, column 'a': 'two' is not a number"),
        ("a,y\n1,0\n\n ,1\n", {}, "line 4, column 'a': an empty field is not a number"),
        ("a,y\n1,0\nNaN,1\n", {}, "line 3, column 'a': 'NaN' is not a finite"),
        ("a,y\n1,0\n2,1\n-inf,1\n", {}, "line 4, column 'a': '-inf' is not a finite"),
        ("a,y\n1e99,0\n", {}, "line 2, column 'a': '1e99' is not a finite"),
        ("a,y\n1,\n", {}, "line 2, column 'y': the label is empty"),
        ("a,y\n1,x\n", {"target": "regression"}, "line 2, column 'y': 'x' is not a number"),
        ("a,b\n1,0\n", {}, "unknown column 'y'"),
        ("a,y\n1,0\n", {"columns": ["b"]}, "unknown column 'b'"),
        ("a,a,y\n1,2,0\n", {}, "two columns are named 'a'"),
        ("y\n1\n", {}, "there are no features besides"),
        ("a,y\n1,0\n1,2\n", {"classes": ["0", "1"]}, "line 3, column 'y': the label '2' is not"),
        ("a,y\n1,0\n1,2\n", {"classes": 1}, "2 different labels, but classes = 1"),
        (b"a,y\n\xff\xfe,0\n", {}, "not UTF-8"),
        ('a,y\n1,"0\n2,1\n', {}, "unexpected end of data"),
        ("a,y\n1,0\n", {"target": "guess"}, "target = 'guess'"),
        ("a,y\n1,0\n", {"columns": "a"}, r"as in \['a'\]"),
        ("a,y\n1,0\n", {"delimiter": ""}, "choose a single character"),
    ],
)
def test_wrong_csv(tmp_path, content, params, message):
    path = csv_file(tmp_path, content)
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        load("csv", path, label="y", **params)
    if caught.type is DataError:
        assert str(path) in str(caught.value)


def test_text(tmp_path):
    path = csv_file(tmp_path, 'label,text,who\nspam,"Buy, now!",ann\nham,"two\nlines",bob\n')
    raw = load("text", path, columns=["who"])
    assert raw.x == ["Buy, now!", "two\nlines"]
    assert raw.kind == "text"
    assert raw.classes == ("ham", "spam")
    assert raw.columns["who"].tolist() == ["ann", "bob"]
    with pytest.raises(DataError, match="unknown column 'body'"):
        load("text", path, text="body")


def test_npz_images_table_and_columns(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3)).astype(np.uint8)
    np.savez(
        tmp_path / "a.npz",
        x=x,
        y=[0, 2, 1, 0],
        x_test=x[:1],
        y_test=[3],
        site=["p", "q", "p", "q"],
        notes=np.zeros((2, 2)),
    )
    raw = load("npz", tmp_path)
    assert np.array_equal(raw.x, x.transpose(0, 3, 1, 2))
    assert raw.classes == ("0", "1", "2", "3")
    assert raw.held_out[1].tolist() == [3]
    assert list(raw.columns) == ["site"]
    np.savez(tmp_path / "b.npz", x=np.eye(3), y=np.array([0.5, 1, 2]))
    raw = load("npz", tmp_path, file="b.npz")
    assert (raw.kind, raw.classes, raw.x.dtype, raw.y.dtype) == ("table", None, "f4", "f4")


@pytest.mark.parametrize(
    ("shape", "channels", "expected"),
    [
        ((2, 4, 5), "auto", (2, 1, 4, 5)),
        ((2, 1, 4, 5), "auto", (2, 1, 4, 5)),
        ((2, 4, 5, 1), "auto", (2, 1, 4, 5)),
        ((2, 3, 5, 3), "auto", (2, 3, 5, 3)),
        ((2, 3, 5, 3), "last", (2, 3, 3, 5)),
        ((2, 4, 5, 7), "last", (2, 7, 4, 5)),
        ((2, 4, 5, 7), "first", (2, 4, 5, 7)),
    ],
)
def test_image_axes(tmp_path, shape, channels, expected):
    np.savez(tmp_path / "a.npz", x=np.zeros(shape, np.uint8), y=[0, 1])
    assert load("npz", tmp_path, channels=channels).x.shape == expected


@pytest.mark.parametrize(
    ("arrays", "params", "message"),
    [
        ({"x": np.eye(2)}, {}, "no array 'y'"),
        ({"x": np.eye(2), "y": [1]}, {}, "2 samples but 1 labels"),
        ({"x": np.zeros((0, 2)), "y": []}, {}, "no samples"),
        ({"x": np.array([[1, 2], [3, np.nan]]), "y": [0, 1]}, {}, "nan at row 1, column 1"),
        ({"x": np.array([[1, np.inf], [3, 4]]), "y": [0, 1]}, {}, "inf at row 0, column 1"),
        ({"x": np.eye(2), "y": [0, np.nan]}, {}, "nan at row 1"),
        ({"x": np.eye(2), "y": [0, -1]}, {}, "label -1 at row 1"),
        ({"x": np.eye(2), "y": [0, 5]}, {"classes": 5}, r"label 5 at row 1 .* outside 0..4"),
        ({"x": np.eye(2), "y": [0, 10**9]}, {}, "would mean 1000000001 classes"),
        ({"x": np.eye(2), "y": [[0], [1]]}, {}, "one per sample"),
        ({"x": np.arange(2), "y": [0, 1]}, {}, "neither rows of a table"),
        ({"x": np.full((2, 2, 2), 300), "y": [0, 1]}, {}, "0..255"),
        ({"x": np.zeros((2, 4, 5, 7), np.uint8), "y": [0, 1]}, {}, "which axis"),
        ({"x": np.array(["a", "b"]), "y": [0, 1]}, {}, "must be numbers"),
        ({"x": np.eye(2), "y": [0, 1], "x_test": np.eye(2)}, {}, "belong together"),
        (
            {"x": np.eye(2), "y": [0, 1], "x_test": np.eye(3), "y_test": [0, 1, 0]},
            {},
            "differ in shape",
        ),
        ({"x": np.eye(2), "y": np.array(["a", "b"])}, {"classes": ["a"]}, "label 'b' at row 1"),
        ({"x": np.array([[None]]), "y": [0]}, {}, "damaged"),
    ],
)
def test_wrong_npz(tmp_path, arrays, params, message):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load("npz", path, **params)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_truncated_npz(tmp_path, keep):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.eye(20), y=np.arange(20))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a.npz: damaged"):
        load("npz", path)


def test_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(3, dtype=np.float64))
    np.save(tmp_path / "y.npy", np.array(["b", "a", "b"]))
    raw = load("npy", tmp_path)
    assert raw.y.tolist() == [1, 0, 1]
    np.save(tmp_path / "other.npy", np.array([0, 1, 1]))
    assert load("npy", tmp_path, y="other.npy").y.tolist() == [0, 1, 1]
    (tmp_path / "y.npy").write_bytes((tmp_path / "y.npy").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"y.npy: damaged"):
        load("npy", tmp_path)
    np.save(tmp_path / "y.npy", np.array([None, 1]))
    with pytest.raises(DataError, match=r"y.npy: damaged"):
        load("npy", tmp_path)


# Image folders -----------------------------------------------------------------------------------


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture
def pictures() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = ["train/cat/b.png", "train/ape/a.png", "train/cat/a.PNG", "test/cat/c.png"]
    return {name: rng.integers(0, 256, (4, 5, 3)).astype(np.uint8) for name in names}


def write_tree(root, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def assert_is_tree(raw, pictures) -> None:
    assert raw.classes == ("ape", "cat")
    assert raw.y.tolist() == [0, 1, 1]
    in_order = ["train/ape/a.png", "train/cat/a.PNG", "train/cat/b.png"]
    for image, name in zip(raw.x, in_order, strict=True):
        assert np.array_equal(image, pictures[name].transpose(2, 0, 1))
    assert np.array_equal(raw.held_out[0][0], pictures["test/cat/c.png"].transpose(2, 0, 1))
    assert raw.held_out[1].tolist() == [1]


def test_image_folder(tmp_path, pictures):
    write_tree(tmp_path, {name: png(p) for name, p in pictures.items()})
    write_tree(tmp_path, {"train/cat/notes.txt": b"no image", "train/.DS_Store": b""})
    assert_is_tree(load("image-folder", tmp_path), pictures)


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz")])
@pytest.mark.parametrize("prefix", ["", "./", "images/"])
def test_image_archive(tmp_path, pictures, tar_of, ending, mode, prefix):
    path = tmp_path / f"photos.{ending}"
    tar_of(path, {prefix + name: png(p) for name, p in pictures.items()}, mode)
    assert_is_tree(load("image-folder", path), pictures)
    assert_is_tree(load("image-folder", tmp_path, file=path.name), pictures)
    assert list(tmp_path.iterdir()) == [path]  # nothing was unpacked


def test_cifar_10_falls_back_to_images(tmp_path, pictures, tar_of):
    (tmp_path / "cifar-10").mkdir()
    tar_of(
        tmp_path / "cifar-10" / "images.tar.xz", {n: png(p) for n, p in pictures.items()}, "w:xz"
    )
    assert_is_tree(load("cifar-10", tmp_path), pictures)


def test_sizes_and_colours(tmp_path):
    files = {
        "train/a/1.png": png(np.zeros((4, 4), np.uint8)),
        "train/a/2.png": png(np.full((6, 4), 9, np.uint8)),
    }
    write_tree(tmp_path, files)
    with pytest.raises(DataError, match=r"train/a/2.png: 6x4 pixels, but the first image has 4x4"):
        load("image-folder", tmp_path)
    raw = load("image-folder", tmp_path, size=(3, 2))
    assert raw.x.shape == (2, 1, 3, 2)
    assert (raw.x[1] == 9).all()
    write_tree(tmp_path, {"train/a/2.png": png(np.zeros((4, 4, 3), np.uint8))})
    with pytest.raises(DataError, match=r"2.png: 3 colour channels, but the first image has 1"):
        load("image-folder", tmp_path)
    assert load("image-folder", tmp_path, channels=3).x.shape == (2, 3, 4, 4)
    assert load("image-folder", tmp_path, channels=1, size=8).x.shape == (2, 1, 8, 8)
    for wrong in ({"size": 0}, {"size": (1, 2, 3)}, {"channels": 2}):
        with pytest.raises(ConfigError):
            load("image-folder", tmp_path, **wrong)


def test_wrong_image_folders(tmp_path, pictures, tar_of):
    with pytest.raises(DataError, match="no images found"):
        load("image-folder", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load("image-folder", tmp_path / "nowhere")
    good = {name: png(p) for name, p in pictures.items()}
    write_tree(tmp_path, {**good, "test/dog/a.png": good["test/cat/c.png"]})
    with pytest.raises(DataError, match="class 'dog' is in test but not in train"):
        load("image-folder", tmp_path)
    for content in (b"", b"not an image", good["test/cat/c.png"][:60]):
        write_tree(tmp_path, {"train/cat/b.png": content})
        with pytest.raises(DataError, match=r"train/cat/b.png: damaged"):
            load("image-folder", tmp_path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_cut_archives(tmp_path, pictures, tar_of, mode):
    path = tmp_path / "cut.tar"
    tar_of(path, {name: png(p) for name, p in pictures.items()}, mode)
    whole = path.read_bytes()
    cuts = [*range(0, len(whole) - 1, 97), len(whole) - 10]
    if mode == "w":
        cuts = [512 * i for i in range(8)]  # also between two files
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"cut.tar"):
            load("image-folder", path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cut.tar: damaged"):
        load("image-folder", path)
