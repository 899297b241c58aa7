"""The named data sets: public ones and the user's own files."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.files import Where, download, find, places, read_bytes, zip_member
from coterie.data.formats import check_labels, parse_idx, read_svhn
from coterie.data.images import image_tree_in, read_image_tree
from coterie.data.raw import Array, ClassNames, RawData, same_length
from coterie.data.tables import (
    Classes,
    raw_from_arrays,
    read_csv,
    read_npy,
    read_npz,
    read_text_csv,
)
from coterie.errors import ConfigError, DataError, unknown
from coterie.registry import SETS

DIGITS = tuple(string.digits)
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# EMNIST's merged splits drop the lower-case letters that look like their capitals.
_MERGED = "".join(c for c in string.ascii_lowercase if c not in "cijklmopsuvwxyz")
EMNIST: dict[str, ClassNames] = {
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": tuple(string.digits + string.ascii_uppercase + _MERGED),
    "balanced": tuple(string.digits + string.ascii_uppercase + _MERGED),
    "letters": tuple(string.ascii_lowercase),
    "digits": DIGITS,
    "mnist": DIGITS,
}


@SETS.register("digits")
def digits(folder: Path | None = None) -> RawData:
    """The 1,797 handwritten digits of 8x8 pixels included in scikit-learn; no file needed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return RawData(pixels, labels.astype(np.int64), "image", DIGITS)


@SETS.register("mnist")
def mnist(folder: Path | None = None, cache: Where = None, mirror: str | None = None) -> RawData:
    """Handwritten digits, 28x28: 60,000 and 10,000 held out."""
    return _mnist_like("mnist", "MNIST", DIGITS, folder, cache, mirror)


@SETS.register("fashion-mnist")
def fashion_mnist(
    folder: Path | None = None, cache: Where = None, mirror: str | None = None
) -> RawData:
    """Zalando's articles of clothing, 28x28: 60,000 and 10,000 held out."""
    return _mnist_like("fashion-mnist", "FashionMNIST", FASHION, folder, cache, mirror)


def _mnist_like(
    name: str, layout: str, classes: ClassNames, folder: Path | None, cache: Where, mirror: Any
) -> RawData:
    folders = places(folder, name, (f"{layout}/raw", "raw"))

    def content(file: str) -> tuple[bytes, str]:
        path = find(folders, (file + ".gz", file))
        path = path or download(name, file + ".gz", folder, cache, mirror)
        return read_bytes(path), str(path)

    train = _idx_pair(
        content("train-images-idx3-ubyte"), content("train-labels-idx1-ubyte"), classes
    )
    test = _idx_pair(content("t10k-images-idx3-ubyte"), content("t10k-labels-idx1-ubyte"), classes)
    return RawData(*train, "image", classes, test)


@SETS.register("emnist")
def emnist(
    folder: Path | None = None,
    split: str = "balanced",
    cache: Where = None,
    mirror: str | None = None,
) -> RawData:
    """Handwritten letters and digits, 28x28, in one of the official splits."""
    if split not in EMNIST:
        raise ConfigError(unknown("EMNIST split", split, EMNIST))
    folders = places(folder, "emnist", ("EMNIST/raw", "raw", "gzip", "EMNIST/raw/gzip"))

    def content(part: str) -> tuple[bytes, str]:
        file = f"emnist-{split}-{part}-ubyte"
        path = find(folders, (file + ".gz", file))
        if path is not None:
            return read_bytes(path), str(path)
        archive = find(folders, ("gzip.zip",))
        archive = archive or download("emnist", "gzip.zip", folder, cache, mirror)
        return zip_member(archive, file + ".gz"), f"{archive}: {file}.gz"

    first_label = 1 if split == "letters" else 0
    parts = []
    for part in ("train", "test"):
        images, labels = content(f"{part}-images-idx3"), content(f"{part}-labels-idx1")
        x, y = _idx_pair(images, labels, EMNIST[split], first_label)
        parts.append((x.swapaxes(2, 3), y))  # EMNIST stores its images transposed
    return RawData(*parts[0], "image", EMNIST[split], parts[1])


def _idx_pair(
    images: tuple[bytes, str], labels: tuple[bytes, str], classes: ClassNames, first_label: int = 0
) -> tuple[Array, Array]:
    x = parse_idx(*images, dimensions=3)[:, None]
    y = parse_idx(*labels, dimensions=1).astype(np.int64) - first_label
    same_length(x, y, f"{images[1]} and {labels[1]}")
    check_labels(y, len(classes), labels[1])
    return x, y


@SETS.register("svhn")
def svhn(folder: Path | None = None, cache: Where = None, mirror: str | None = None) -> RawData:
    """Street View house numbers, cropped digits in colour, 32x32: 73,257 and 26,032 held out."""
    folders = places(folder, "svhn", ("SVHN",))
    parts = []
    for part in ("train", "test"):
        file = f"{part}_32x32.mat"
        path = find(folders, (file,)) or download("svhn", file, folder, cache, mirror)
        x, y = read_svhn(path)
        same_length(x, y, str(path))
        check_labels(y, len(DIGITS), str(path))
        parts.append((x, y))
    return RawData(*parts[0], "image", DIGITS, parts[1])


@SETS.register("image-folder")
def image_folder(
    folder: Path | None = None,
    file: Where = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
) -> RawData:
    """Images in train/<class>/ and, optionally, test/<class>/; or a tar archive of these.

    ``folder`` is the root or the archive itself; ``file`` names one of them inside it.
    """
    root = _required(folder, "image-folder")
    root = root / file if file is not None else root
    if not root.exists():
        raise DataError(f"{root} does not exist: correct folder or file")
    tree = image_tree_in([root, root / "image-folder"]) if root.is_dir() else root
    return read_image_tree(tree or root, size, channels)


@SETS.register("npz")
def npz(
    folder: Path | None = None, file: Where = None, channels: str = "auto", classes: Classes = None
) -> RawData:
    """Arrays x and y (and x_test and y_test) of an .npz file; other 1-D arrays are columns."""
    return read_npz(_one_file(folder, file, "npz", ".npz"), channels, classes)


@SETS.register("npy")
def npy(
    folder: Path | None = None,
    x: str = "x.npy",
    y: str = "y.npy",
    channels: str = "auto",
    classes: Classes = None,
) -> RawData:
    """The samples and labels in two .npy files of a folder."""
    paths = [_one_file(folder, name, "npy", ".npy") for name in (x, y)]
    where = f"{paths[0]} and {paths[1]}"
    return raw_from_arrays([(read_npy(paths[0]), read_npy(paths[1]), where)], {}, channels, classes)


@SETS.register("csv")
def csv_table(
    label: str,
    folder: Path | None = None,
    file: Where = None,
    columns: Sequence[str] = (),
    target: str = "classes",
    classes: Classes = None,
    delimiter: str = ",",
) -> RawData:
    """A CSV table with a header: a label column, features, and columns that are no features."""
    path = _one_file(folder, file, "csv", ".csv")
    return read_csv(path, label, columns, target, classes, delimiter)


@SETS.register("text")
def text_csv(
    folder: Path | None = None,
    file: Where = None,
    label: str = "label",
    text: str = "text",
    columns: Sequence[str] = (),
    classes: Classes = None,
    delimiter: str = ",",
) -> RawData:
    """A CSV file with a column of texts and one of labels."""
    path = _one_file(folder, file, "text", ".csv")
    return read_text_csv(path, label, text, columns, classes, delimiter)


def _required(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise ConfigError(f"the data set '{name}' needs a folder: set the folder of your files")
    return Path(folder)


def _one_file(folder: Path | None, file: Where, name: str, ending: str) -> Path:
    """The path of the file: the folder itself, ``file`` in it, or its only file with the ending."""
    if folder is None and file is not None:
        folder, file = Path(file).parent, Path(file).name
    root = _required(folder, name)
    if root.is_file():
        return root
    folders = places(root, name)
    if file is not None:
        path = find(folders, (str(file),))
        if path is None:
            raise DataError(f"there is no file {file} in {root}: correct file or folder")
        return path
    for directory in folders:
        matches = sorted(directory.glob(f"*{ending}"))
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = ", ".join(path.name for path in matches[:5])
            raise DataError(
                f"{directory} contains {len(matches)} {ending} files ({listed}): set file"
            )
    raise DataError(f"there is no {ending} file in {root}: correct folder or set file")


def load(name: str, folder: str | Path | None = None, **params: Any) -> RawData:
    """Load the named data set from ``folder``, or a public one from the Internet.

    >>> raw = load("digits")
    >>> raw.x.shape, raw.kind, len(raw.classes)
    ((1797, 1, 8, 8), 'image', 10)
    """
    raw: RawData = SETS.make(name, params, folder=None if folder is None else Path(folder))
    return raw
