"""Each public format, written in tiny form and read back exactly; each kind of damage, named."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest
import scipy.io

from coterie.data import SETS, load
from coterie.errors import ConfigError, DataError


def test_digits_need_no_files():
    raw = load("digits")
    assert raw.x.shape == (1797, 1, 8, 8)
    assert raw.x.dtype == np.uint8
    assert raw.x.max() == 255
    assert raw.x[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]  # 0 0 5 13 9 1 0 0 of 16
    assert raw.y[:5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", ""),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist/FashionMNIST/raw"),
    ],
)
def test_mnist_layouts(tmp_path, write_mnist, mnist_files, name, place, zipped):
    write_mnist(tmp_path / place, zipped)
    raw = load(name, tmp_path)
    assert np.array_equal(raw.x[:, 0], mnist_files["train-images-idx3-ubyte"])
    assert np.array_equal(raw.y, mnist_files["train-labels-idx1-ubyte"])
    assert raw.x.dtype == np.uint8
    assert raw.y.dtype == np.int64
    assert np.array_equal(raw.held_out[0][:, 0], mnist_files["t10k-images-idx3-ubyte"])
    assert raw.held_out[1].tolist() == [9, 0, 5]
    assert len(raw.classes) == 10


def test_emnist_is_transposed_and_letters_start_at_one(tmp_path, as_idx):
    image = np.arange(6).reshape(1, 2, 3)
    for part in ("train", "test"):
        for kind, array in (("images-idx3", image), ("labels-idx1", np.array([26]))):
            path = tmp_path / f"emnist-letters-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(as_idx(array)))
    raw = load("emnist", tmp_path, split="letters")
    assert raw.x[0, 0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert raw.classes[raw.y[0]] == "z"


def test_emnist_from_the_official_zip(tmp_path, as_idx):
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for part in ("train", "test"):
            for kind, array in (("images-idx3", np.ones((2, 3, 3))), ("labels-idx1", [46, 0])):
                name = f"gzip/emnist-balanced-{part}-{kind}-ubyte.gz"
                archive.writestr(name, gzip.compress(as_idx(np.array(array))))
    raw = load("emnist", tmp_path)
    assert raw.y.tolist() == [46, 0]
    assert len(raw.classes) == 47
    assert raw.classes[46] == "t"
    with pytest.raises(DataError, match="there is no emnist-digits-train-images"):
        load("emnist", tmp_path, split="digits")


def cifar_batches(seed: int, per_batch: int = 2, labels: str = "labels") -> dict[str, dict]:
    rng = np.random.default_rng(seed)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return {
        name: {
            b"data": rng.integers(0, 256, (per_batch, 3072)).astype(np.uint8),
            labels.encode(): rng.integers(0, 10, per_batch).tolist(),
        }
        for name in names
    }


def assert_is_cifar(raw, batches) -> None:
    train = [batches[f"data_batch_{i}"] for i in range(1, 6)]
    assert np.array_equal(raw.x, np.concatenate([b[b"data"] for b in train]).reshape(-1, 3, 32, 32))
    assert raw.y.tolist() == [label for b in train for label in b[b"labels"]]
    assert np.array_equal(raw.held_out[0].reshape(-1, 3072), batches["test_batch"][b"data"])
    assert raw.held_out[1].tolist() == batches["test_batch"][b"labels"]
    assert raw.classes[3] == "cat"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_cifar_10_python_batches(tmp_path, protocol):
    batches = cifar_batches(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, batch in batches.items():
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    assert_is_cifar(load("cifar-10", tmp_path), batches)


def python_2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 wrote: byte strings, and NumPy's old module names."""
    out = io.BytesIO()
    text = lambda s: b"U" + bytes([len(s)]) + s  # noqa: E731 - SHORT_BINSTRING
    number = lambda n: b"J" + int(n).to_bytes(4, "little")  # noqa: E731 - BININT
    out.write(b"\x80\x02}(" + text(b"data"))
    out.write(b"cnumpy.core.multiarray\n_reconstruct\n")
    out.write(b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R")
    out.write(b"(" + number(1) + number(data.shape[0]) + number(data.shape[1]) + b"\x86")
    out.write(b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R")
    out.write(b"(" + number(3) + text(b"|") + b"NNN" + number(2**32 - 1) * 2 + number(0) + b"tb")
    raw = data.tobytes()
    out.write(b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb")  # BINSTRING
    out.write(text(b"labels") + b"](" + b"".join(number(n) for n in labels) + b"eu.")
    return out.getvalue()


def test_cifar_10_official_archive_of_python_2(tmp_path, tar_of):
    batches = cifar_batches(1)
    files = {
        f"cifar-10-batches-py/{name}": python_2_pickle(batch[b"data"], batch[b"labels"])
        for name, batch in reversed(batches.items())
    }
    # The real archive has more in it than is needed.
    files["cifar-10-batches-py/readme.html"] = b"<html>"
    tar_of(tmp_path / "cifar-10-python.tar.gz", files)
    assert_is_cifar(load("cifar-10", tmp_path), batches)


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_10_binary(tmp_path, tar_of, packed):
    batches = cifar_batches(2)
    files = {}
    for name, batch in batches.items():
        records = np.concatenate([np.array(batch[b"labels"])[:, None], batch[b"data"]], axis=1)
        files[f"cifar-10-batches-bin/{name}.bin"] = records.astype(np.uint8).tobytes()
    if packed:
        tar_of(tmp_path / "cifar-10-binary.tar.gz", files)
    else:
        (tmp_path / "cifar-10-batches-bin").mkdir()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    assert_is_cifar(load("cifar-10", tmp_path), batches)


@pytest.mark.parametrize("labels", ["fine", "coarse"])
@pytest.mark.parametrize("binary", [True, False])
def test_cifar_100(tmp_path, tar_of, labels, binary):
    data = np.random.default_rng(3).integers(0, 256, (2, 3072)).astype(np.uint8)
    coarse, fine = [3, 19], [70, 99]
    names = {k: [f"{k}{i}" for i in range(n)] for k, n in (("fine", 100), ("coarse", 20))}
    if binary:
        content = np.concatenate([np.array([coarse, fine]).T, data], axis=1).astype(np.uint8)
        files = {f"cifar-100-binary/{n}.bin": content.tobytes() for n in ("train", "test")}
        for key, values in names.items():
            files[f"cifar-100-binary/{key}_label_names.txt"] = "\n".join(values).encode()
        tar_of(tmp_path / "cifar-100-binary.tar.gz", files)
    else:
        batch = {b"data": data, b"fine_labels": fine, b"coarse_labels": coarse}
        meta = {f"{key}_label_names".encode(): values for key, values in names.items()}
        files = {f"cifar-100-python/{n}": pickle.dumps(batch, 2) for n in ("train", "test")}
        files["cifar-100-python/meta"] = pickle.dumps(meta, 2)
        tar_of(tmp_path / "cifar-100-python.tar.gz", files)
    raw = load("cifar-100", tmp_path, labels=labels)
    assert raw.y.tolist() == (fine if labels == "fine" else coarse)
    assert np.array_equal(raw.x.reshape(2, 3072), data)
    assert raw.classes == tuple(names[labels])


def test_svhn_zero_is_stored_as_ten(tmp_path):
    x = np.random.default_rng(4).integers(0, 256, (32, 32, 3, 4)).astype(np.uint8)
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": [[1], [10], [9], [2]]})
    raw = load("svhn", tmp_path)
    assert raw.y.tolist() == [1, 0, 9, 2]
    assert np.array_equal(raw.x[1, 2], x[:, :, 2, 1])


# Damage ------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('harmed').touch()",))


def test_a_pickle_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": Harmful()}, 2))
    (tmp_path / "test").write_bytes(pickle.dumps({}, 2))
    with pytest.raises(DataError, match=r"train: .*requests (__builtin__|builtins)\.exec"):
        load("cifar-100", tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_pickled_object_arrays_are_refused(tmp_path):
    batch = {b"data": np.array([print, 1], dtype=object), b"fine_labels": [1]}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps({**batch, b"data": np.array([None])}, 2))
    with pytest.raises(DataError, match=r"train: .*type O8"):
        load("cifar-100", tmp_path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "contains a list"),
        ({b"data": 5}, "no 'fine_labels'"),
        ({b"data": 5, b"fine_labels": [1]}, "not an array of bytes"),
        ({b"data": np.zeros((1, 5), np.uint8), b"fine_labels": [1]}, r"shape \(1, 5\)"),
        (
            {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [1]},
            "one per image for 2 images",
        ),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [100]}, "label 100 of sample 0"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": ["x"]}, "not whole numbers"),
    ],
)
def test_wrong_cifar_batches(tmp_path, batch, message):
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(DataError, match=message) as caught:
        load("cifar-100", tmp_path)
    assert str(tmp_path / "train") in str(caught.value)


def test_missing_and_truncated_cifar_files(tmp_path, tar_of):
    for name, batch in cifar_batches(0).items():
        (tmp_path / name).write_bytes(pickle.dumps(batch, 2))
    (tmp_path / "test_batch").write_bytes((tmp_path / "test_batch").read_bytes()[:500])
    with pytest.raises(DataError, match="test_batch: damaged"):
        load("cifar-10", tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3 missing next to"):
        load("cifar-10", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train", "test"):
        (other / f"{name}.bin").write_bytes(bytes(3000))
    with pytest.raises(DataError, match=r"train.bin: .*3074-byte records"):
        load("cifar-100", other)
    tar_of(tmp_path / "cifar-100-python.tar.gz", {"cifar-100-python/test": b"x"})
    whole = (tmp_path / "cifar-100-python.tar.gz").read_bytes()
    third = tmp_path / "third"
    third.mkdir()
    (third / "cifar-100-python.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cifar-100-python.tar.gz: damaged"):
        load("cifar-100", third)


def test_an_archive_without_batches(tmp_path, tar_of):
    tar_of(tmp_path / "cifar-100-python.tar.gz", {"something": b"else"})
    with pytest.raises(DataError, match="there is no train, test in it"):
        load("cifar-100", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "the file is empty"),
        (lambda content: b"\x00\x00\x08\x01" + content[4:], "starts with 00000801"),
        (lambda content: content[:-1], "255 bytes, but its header announces 256"),
        (lambda content: content + b"x", "257 bytes, but its header announces 256"),
        (lambda content: content[:9], "damaged"),
    ],
)
def test_damaged_idx(tmp_path, write_mnist, change, message):
    write_mnist(tmp_path, zipped=False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda c: c[:40], lambda c: c[:60] + b"\xff" + c[61:], lambda c: b"not zipped"]
)
def test_damaged_gz(tmp_path, write_mnist, change):
    write_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz: damaged"):
        load("mnist", tmp_path)


def test_labels_that_do_not_fit(tmp_path, write_mnist, as_idx):
    write_mnist(tmp_path, zipped=False)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(as_idx(np.arange(12)))
    with pytest.raises(DataError, match=r"label 10 of sample 10 .* outside 0\.\.9"):
        load("mnist", tmp_path)
    path.write_bytes(as_idx(np.zeros(11)))
    with pytest.raises(DataError, match="12 samples but 11 labels"):
        load("mnist", tmp_path)


def test_damaged_mat(tmp_path):
    x = np.zeros((32, 32, 3, 4), np.uint8)
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": x, "y": [[1], [2]]})
    with pytest.raises(DataError, match="y has 2 labels"):
        load("svhn", tmp_path)
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": x})
    with pytest.raises(DataError, match="variables X and y"):
        load("svhn", tmp_path)
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": x, "y": [[1], [2], [3], [4]]})
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"train_32x32.mat: damaged"):
        load("svhn", tmp_path)


def test_names_and_parameters_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="unknown data set 'fashion_mnist'; did you mean"):
        load("fashion_mnist")
    with pytest.raises(ConfigError, match="unknown parameter of data set 'mnist' 'miror'"):
        load("mnist", miror="x")
    with pytest.raises(ConfigError, match="takes no parameters"):
        load("digits", cache="x")
    with pytest.raises(ConfigError, match="unknown EMNIST split 'leters'; did you mean 'letters'"):
        load("emnist", split="leters")
    with pytest.raises(ConfigError, match="choose 'fine' or 'coarse'"):
        load("cifar-100", labels="rough")
    with pytest.raises(DataError, match="does not exist"):
        load("mnist", tmp_path / "nowhere")
    assert set(SETS) >= {"digits", "mnist", "emnist", "svhn", "csv", "text", "npz", "npy"}


def test_damaged_zip(tmp_path):
    (tmp_path / "gzip.zip").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"gzip.zip: damaged"):
        load("emnist", tmp_path)


def test_wrong_cifar_names_and_big_endian_arrays(tmp_path):
    data = np.zeros((1, 3072), np.uint8)
    batch = {b"data": data, b"fine_labels": np.array([7], ">i4")}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(batch, 2))
    assert load("cifar-100", tmp_path).y.tolist() == [7]
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": ["one"]}, 2))
    with pytest.raises(DataError, match="1 class names instead of 100"):
        load("cifar-100", tmp_path)
    (tmp_path / "meta").write_bytes(pickle.dumps({}, 2))
    with pytest.raises(DataError, match="no list 'fine_label_names'"):
        load("cifar-100", tmp_path)
