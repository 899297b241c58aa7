"""CIFAR-10 and CIFAR-100 from Python or binary batches, their archives, or an image folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from coterie.data.files import Where, download, find, places, read_bytes, tar_files
from coterie.data.formats import (
    check_labels,
    parse_cifar_binary,
    parse_cifar_pickle,
    parse_label_names,
)
from coterie.data.images import image_tree_in, read_image_tree
from coterie.data.raw import Array, ClassNames, RawData
from coterie.errors import ConfigError, DataError
from coterie.registry import SETS

CIFAR_10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

# (file name, content, source for error messages)
Content = tuple[str, bytes, str]


@dataclass(frozen=True)
class _Batches:
    """The files of one of the two data sets, and the position of the labels in them."""

    name: str
    train: tuple[str, ...]
    test: str
    label_key: str
    label_bytes: int
    label_byte: int
    meta: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)

    def wanted(self, ending: str) -> list[str]:
        """The files to read from an archive: the batches and the class names."""
        return [file + ending for file in self.files] + list(self.meta)

    def parse(self, content: bytes, where: str, name: str) -> tuple[Array, Array]:
        """Parse a batch in either form into (images, labels)."""
        if name.endswith(".bin"):
            x, labels = parse_cifar_binary(content, where, self.label_bytes)
            return x, labels[:, self.label_byte]
        return parse_cifar_pickle(content, where, self.label_key)


@SETS.register("cifar-10")
def cifar_10(folder: Path | None = None, cache: Where = None, mirror: str | None = None) -> RawData:
    """Small colour photographs of 10 classes, 32x32: 50,000 and 10,000 held out.

    Reads the official Python or binary batches, unpacked or in their archive. Without them, reads
    an image folder, or one packed as images.tar.xz.
    """
    train = tuple(f"data_batch_{i}" for i in range(1, 6))
    batches = _Batches("cifar-10", train, "test_batch", "labels", 1, 0)
    folders = places(folder, "cifar-10", ("cifar-10-batches-py", "cifar-10-batches-bin"))
    contents = _local(batches, folders)
    if contents is None:
        tree = image_tree_in(folders)
        if tree is not None:
            return read_image_tree(tree)
        contents = _downloaded(batches, folder, cache, mirror)
    return _assemble(batches, contents, CIFAR_10)


@SETS.register("cifar-100")
def cifar_100(
    folder: Path | None = None,
    labels: str = "fine",
    cache: Where = None,
    mirror: str | None = None,
) -> RawData:
    """Small colour photographs, 32x32, of 100 fine or 20 coarse classes: 50,000 and 10,000."""
    if labels not in ("fine", "coarse"):
        raise ConfigError(f"labels = {labels!r}: choose 'fine' or 'coarse'")
    label_byte = 1 if labels == "fine" else 0
    meta = ("meta", f"{labels}_label_names.txt")
    batches = _Batches("cifar-100", ("train",), "test", f"{labels}_labels", 2, label_byte, meta)
    folders = places(folder, "cifar-100", ("cifar-100-python", "cifar-100-binary"))
    contents = _local(batches, folders) or _downloaded(batches, folder, cache, mirror)
    numbered = tuple(str(i) for i in range(100 if labels == "fine" else 20))
    return _assemble(batches, contents, numbered)


def _local(batches: _Batches, folders: Sequence[Path]) -> Iterator[Content] | None:
    """The contents of unpacked batches or of their archive, if the folders have any."""
    for ending in ("", ".bin"):
        paths = {file: find(folders, (file + ending,)) for file in batches.files}
        missing = [file + ending for file, path in paths.items() if path is None]
        if not missing:
            meta = [find(folders, (file,)) for file in batches.meta]
            return _from_disk([path for path in [*paths.values(), *meta] if path is not None])
        if len(missing) < len(paths):
            present = next(path for path in paths.values() if path is not None)
            raise DataError(
                f"data set '{batches.name}': {', '.join(missing)} missing next to {present}; "
                "unpack the official archive again"
            )
    for form, ending in (("python", ""), ("binary", ".bin")):
        archive = find(folders, (f"{batches.name}-{form}.tar.gz",))
        if archive is not None:
            return _from_archive(archive, batches.wanted(ending))
    return None


def _downloaded(
    batches: _Batches, folder: Path | None, cache: Where, mirror: str | None
) -> Iterator[Content]:
    archive = download(batches.name, f"{batches.name}-python.tar.gz", folder, cache, mirror)
    return _from_archive(archive, batches.wanted(""))


def _from_disk(paths: Sequence[Path]) -> Iterator[Content]:
    for path in paths:
        yield path.name, read_bytes(path), str(path)


def _from_archive(archive: Path, names: Sequence[str]) -> Iterator[Content]:
    for path, content in tar_files(archive, lambda path: PurePosixPath(path).name in names):
        name = PurePosixPath(path).name
        yield name, content, f"{archive}: {name}"


def _assemble(batches: _Batches, contents: Iterator[Content], classes: ClassNames) -> RawData:
    """Parse the files one by one, then concatenate the training batches in order."""
    parsed: dict[str, tuple[Array, Array]] = {}
    names = None
    source = batches.name
    for name, content, source in contents:
        if name == "meta":
            key = batches.label_key.replace("labels", "label_names")
            names = parse_label_names(content, source, key)
        elif name in batches.meta:
            names = tuple(content.decode("utf-8", "replace").split())
        else:
            x, y = batches.parse(content, source, name)
            check_labels(y, len(classes), source)
            parsed[name.removesuffix(".bin")] = (x, y)
    missing = [file for file in batches.files if file not in parsed]
    if missing:
        raise DataError(f"{source.split(': ')[0]}: there is no {', '.join(missing)} in it")
    if names is not None and len(names) != len(classes):
        raise DataError(f"{source}: {len(names)} class names instead of {len(classes)}")
    train = [parsed[file] for file in batches.train]
    x = np.concatenate([images for images, _ in train])
    y = np.concatenate([labels for _, labels in train])
    return RawData(x, y, "image", names or classes, parsed[batches.test])
