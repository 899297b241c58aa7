"""Image folders, on disk or in a tar archive: train/<class>/*.jpg and test/<class>/*.jpg."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from coterie.data.files import damaged, tar_files
from coterie.data.raw import Array, RawData
from coterie.errors import ConfigError, DataError

ENDINGS = (".jpg", ".jpeg", ".png")
PARTS = ("train", "test")
ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def read_image_tree(
    root: Path, size: int | tuple[int, int] | None = None, channels: int | None = None
) -> RawData:
    """Read an image folder, or an archive of one without unpacking it to disk.

    All images are resized to ``size`` (one number, or height and width); by default, they must all
    have the size of the first one. ``channels`` is 1 (grey) or 3 (colour), by default as in the
    first image.
    """
    if channels not in (None, 1, 3):
        raise ConfigError(f"channels = {channels}: choose 1 (grey) or 3 (colour)")
    shape = _Shape(size, channels)
    collected = {part: _Collected() for part in PARTS}
    files = _archived(root) if root.is_file() else _on_disk(root)
    for path, stream in files:
        collected[path.parts[-3]].add(path, shape.read(stream, f"{root}: {path}"))
    train, test = collected["train"], collected["test"]
    if not train.names:
        raise DataError(
            f"{root}: no images found; expected train/<class>/*.jpg (or .jpeg, .png) in it"
        )
    classes = tuple(sorted({name for name, _ in train.names}))
    unknown_classes = sorted({name for name, _ in test.names} - set(classes))
    if unknown_classes:
        raise DataError(f"{root}: the class '{unknown_classes[0]}' is in test but not in train")
    held_out = test.sorted_arrays(classes, shape.of_array) if test.names else None
    x, y = train.sorted_arrays(classes, shape.of_array)
    return RawData(x, y, "image", classes, held_out)


def image_tree_in(folders: Sequence[Path]) -> Path | None:
    """The first folder that contains an image tree, or an archive named images.tar.* in one."""
    for folder in folders:
        if (folder / "train").is_dir():
            return folder
        for ending in ARCHIVE_ENDINGS:
            if (folder / f"images{ending}").is_file():
                return folder / f"images{ending}"
    return None


class _Collected:
    """Images in the order in which they are read, in one growing buffer to avoid a second copy."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.pixels = bytearray()

    def add(self, path: PurePosixPath, image: Array) -> None:
        self.names.append((path.parts[-2], path.name))
        self.pixels += image.tobytes()

    def sorted_arrays(
        self, classes: tuple[str, ...], shape: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """The images and labels, sorted by class and file name."""
        x = np.frombuffer(self.pixels, np.uint8).reshape(len(self.names), *shape)
        number = {name: i for i, name in enumerate(classes)}
        y = np.array([number[name] for name, _ in self.names], dtype=np.int64)
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        if order != list(range(len(order))):
            x, y = x[order], y[order]
        return x, y


class _Shape:
    """The common shape of all images: the requested one, or that of the first image."""

    def __init__(self, size: int | tuple[int, int] | None, channels: int | None) -> None:
        self.size = (size, size) if isinstance(size, int) else (tuple(size) if size else None)
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ConfigError(f"size = {size}: choose one number or (height, width), above 0")
        self.resize = size is not None
        self.channels = channels
        self.convert = channels is not None

    @property
    def of_array(self) -> tuple[int, ...]:
        """(C, H, W)."""
        height, width = self.size or (0, 0)
        return (self.channels or 0, height, width)

    def read(self, stream: IO[bytes], where: str) -> Array:
        """Read an image as an array of bytes of shape (C, H, W)."""
        from PIL import Image

        try:
            with Image.open(stream) as image:
                return self._fitted(image, where)
        except DataError:
            raise
        except Exception as error:  # decoders raise many types of errors for damaged files
            raise damaged(where, error) from error

    def _fitted(self, image: Any, where: str) -> Array:
        channels = 1 if image.mode in ("1", "L") else 3
        self.channels = self.channels or channels
        if channels != self.channels and not self.convert:
            raise DataError(
                f"{where}: {channels} colour channels, but the first image has {self.channels}; "
                "set channels = 1 or 3 to convert them all"
            )
        image = image.convert("L" if self.channels == 1 else "RGB")
        width, height = image.size
        self.size = self.size or (height, width)
        if (height, width) != self.size:
            if not self.resize:
                raise DataError(
                    f"{where}: {height}x{width} pixels, but the first image has "
                    f"{self.size[0]}x{self.size[1]}; set size to resize them all"
                )
            image = image.resize((self.size[1], self.size[0]))
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)


def _is_image(path: PurePosixPath) -> bool:
    return (
        len(path.parts) >= 3
        and path.parts[-3] in PARTS
        and path.suffix.lower() in ENDINGS
        and not path.name.startswith(".")
    )


def _on_disk(root: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    files: Iterable[Path] = (f for part in PARTS for f in sorted((root / part).glob("*/*")))
    for file in files:
        path = PurePosixPath(file.relative_to(root).as_posix())
        if _is_image(path) and file.is_file():
            with file.open("rb") as stream:
                yield path, stream


def _archived(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    for name, content in tar_files(archive, lambda name: _is_image(PurePosixPath(name))):
        yield PurePosixPath(name), io.BytesIO(content)
