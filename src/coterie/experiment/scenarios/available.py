"""Which data sets are on this machine, and what replaces one that is not."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.data.files import Where, cache_folder, find, places
from coterie.data.images import image_tree_in
from coterie.data.sources import SOURCES
from coterie.experiment.config import assign

Tree = dict[str, Any]

STAND_INS: dict[str, tuple[str, ...]] = {
    "cifar-100": ("cifar-10",),
    "svhn": ("cifar-10",),
    "emnist": ("mnist",),
    "fashion-mnist": ("mnist",),
}
"""The replacements of a set, in order of preference; ``digits``, which needs no file, is last."""

SIZES: dict[str, tuple[int, int]] = {
    "digits": (1_797, 0),
    "mnist": (60_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "cifar-10": (50_000, 10_000),
    "cifar-100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
    "emnist": (112_800, 18_800),
}
"""The numbers of training and of held-out samples; EMNIST's are of its balanced split."""

# Folders that other programs create, as the loaders search them.
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "mnist": ("MNIST/raw", "raw"),
    "fashion-mnist": ("FashionMNIST/raw", "raw"),
    "emnist": ("EMNIST/raw", "raw", "gzip", "EMNIST/raw/gzip"),
    "svhn": ("SVHN",),
    "cifar-10": ("cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar-100": ("cifar-100-python", "cifar-100-binary"),
}
_IDX = tuple(
    f"{part}-{content}-ubyte"
    for part in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_CIFAR_10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _file_sets(name: str, options: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Alternative lists of files; one of them is enough."""
    if name in ("mnist", "fashion-mnist"):
        return [_IDX]
    if name == "emnist":
        split = options.get("split", "balanced")
        files = tuple(f"emnist-{split}-{f.replace('t10k', 'test')}" for f in _IDX)
        return [files, ("gzip.zip",)]
    if name == "svhn":
        return [("train_32x32.mat", "test_32x32.mat")]
    batches = _CIFAR_10 if name == "cifar-10" else ("train", "test")
    archives = [(f"{name}-{form}.tar.gz",) for form in ("python", "binary")]
    return [batches, tuple(f"{b}.bin" for b in batches), *archives]


def is_available(name: str, folder: Where = None, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a set can be loaded without a download: from the folder, or from an earlier download.

    This only checks that files exist and does not read them. The formats of a user's own data
    (npz, csv, …) are available if the folder is a file of that format.

    >>> is_available("digits")
    True
    """
    if name in ("digits", "mixture"):  # these need no file
        return True
    path = None if folder is None else Path(folder)
    if name not in SOURCES:
        ending = ".csv" if name == "text" else f".{name}"
        return path is not None and path.is_file() and path.suffix == ending
    options = options or {}
    folders = places(path, name, _LAYOUTS[name])
    if any(_all_there(folders, files) for files in _file_sets(name, options)):
        return True
    if name == "cifar-10" and image_tree_in(folders) is not None:
        return True
    return _all_there([cache_folder(options.get("cache")) / name], tuple(SOURCES[name].files))


def _all_there(folders: Sequence[Path], files: Sequence[str]) -> bool:
    def names(file: str) -> tuple[str, ...]:
        return (file, f"{file}.gz") if file.endswith("-ubyte") else (file,)

    return all(find(folders, names(file)) is not None for file in files)


def searched(
    name: str, folder: Where = None, options: Mapping[str, Any] | None = None
) -> list[Path]:
    """The folders in which the files of a public set are searched."""
    downloads = cache_folder((options or {}).get("cache")) / name
    return [downloads] if folder is None else [Path(folder), downloads]


def stand_in(name: str, folder: Where = None, options: Mapping[str, Any] | None = None) -> str:
    """The set itself if it is available, else its replacement."""
    if is_available(name, folder, options):
        return name
    return next(
        (other for other in STAND_INS.get(name, ()) if is_available(other, folder)),
        "digits",
    )


def fitted(tree: Tree, name: str) -> Tree:
    """The tables of a scenario adapted to another data set.

    Options of the old set are dropped, ``samples`` and ``public`` are bounded by the size of the
    new one (a tenth of a set without a held-out part is public), and the model is one that fits the
    data.
    """
    tree = copy.deepcopy(tree)
    data = tree["data"]
    if name == data["set"]:
        return tree
    data["set"] = name
    data.pop("options", None)
    if name in SIZES:
        train, held_out = SIZES[name]
        data |= {k: min(data[k], train) for k in ("samples",) if k in data}
        data |= {k: min(data[k], held_out or train // 10) for k in ("public",) if k in data}
    if name == "text":
        assign(tree, "model.name", "text")
    elif tree["model"]["name"] == "text" or name in ("csv", "mixture"):
        assign(tree, "model.name", "mlp")
    return tree
