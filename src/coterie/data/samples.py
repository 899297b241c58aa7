"""Samples from files in the form of a population's: for predictions, or of a newcomer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.data.population import Population, Split
from coterie.data.raw import Array, check_finite, same_length
from coterie.data.tables import _npz_arrays, _Sheet, read_npy, read_sheet
from coterie.data.text import encode
from coterie.errors import DataError, unknown

ENDINGS = (".npy", ".npz", ".csv")


def samples_like(path: Path, population: Population) -> Tensor:
    """Read samples from a file, and check and prepare them like those of the population.

    The file is an array in an .npy file, the array ``x`` of an .npz file, or the rows of a .csv
    file, with features by name, if names are known, or texts in the column ``text``. Images may be
    (N,H,W), (N,H,W,C) or (N,C,H,W). Tables are standardised if those of the population were.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(f"{path}: samples must be in an {', '.join(ENDINGS)} file")
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct the path")
    if ending == ".csv":
        x = _from_sheet(read_sheet(path, ","), population)
    else:
        x = _prepared(_array(path), path, population)
    if not len(x):
        raise DataError(f"{path}: there are no samples in it")
    return torch.from_numpy(np.ascontiguousarray(x))


def labelled_like(
    path: Path,
    population: Population,
    label: str = "label",
    text: str = "text",
    delimiter: str = ",",
) -> Split:
    """Read labelled samples, and check and prepare them like those of the population.

    The path is an .npz file with arrays ``x`` and ``y``, a folder with ``x.npy`` and ``y.npy``, or
    a .csv file with labels in the column ``label``. Labels are class names; whole numbers are the
    numbers of the classes from 0, unless the names of the classes are numbers.
    """
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct the path")
    if path.suffix.lower() == ".csv":
        sheet = read_sheet(path, delimiter)
        x = _from_sheet(sheet, population, text, label)
        y = _sheet_targets(sheet, label, population)
    else:
        x, y = _labelled_arrays(path)
        if x.ndim == 0 or y.ndim == 0:
            raise DataError(f"{path}: a single number is not a list of samples or labels")
        same_length(x, y, str(path))
        x, y = _prepared(x, path, population), _targets(y, path, population)
    return Split(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (x, y)))


def _labelled_arrays(path: Path) -> tuple[Array, Array]:
    if path.is_dir():
        for name in ("x.npy", "y.npy"):
            if not (path / name).is_file():
                raise DataError(
                    f"{path}: there is no {name} in it; a folder must contain x.npy and y.npy"
                )
        return read_npy(path / "x.npy"), read_npy(path / "y.npy")
    if path.suffix.lower() != ".npz":
        raise DataError(
            f"{path}: labelled samples must be in an .npz file with x and y, a .csv file, or a "
            "folder with x.npy and y.npy"
        )
    return _member(path, "x"), _member(path, "y")


def _sheet_targets(sheet: _Sheet, label: str, population: Population) -> Array:
    if population.classes is None:
        return _targets(sheet.numbers(label), sheet.path, population)
    texts = [text.strip() for text in sheet.texts(label)]
    return _places(texts, population.classes, [f"{sheet.path}, line {n}" for n in sheet.lines])


def _targets(values: Array, path: Path, population: Population) -> Array:
    """Labels as numbers of the population's classes, or regression targets of the same shape."""
    if population.classes is not None:
        if values.ndim != 1:
            raise DataError(f"{path}: labels must be one per sample, not of shape {values.shape}")
        return _labels(values, path, population.classes)
    shape = tuple(population.clients[0].train.y.shape[1:])
    if values.dtype.kind not in "fiu" or values.shape[1:] != shape:
        raise DataError(
            f"{path}: the run's targets are numbers of shape ({', '.join(['N', *map(str, shape)])}"
            f"), these are {values.dtype} of shape {values.shape}"
        )
    return _finite_floats(values, path)


def _labels(values: Array, path: Path, classes: tuple[str, ...]) -> Array:
    if values.dtype.kind not in "fiubUS":
        raise DataError(f"{path}: labels must be numbers or texts, not {values.dtype}")
    check_finite(values, str(path))
    if values.dtype.kind == "b" or (values.dtype.kind == "f" and (values % 1 == 0).all()):
        values = values.astype(np.int64)
    named = values.dtype.kind in "US" or all(c.removeprefix("-").isdecimal() for c in classes)
    known = classes if named else tuple(str(i) for i in range(len(classes)))
    texts = [str(v) for v in values.astype(str).tolist()]
    return _places(texts, known, [f"{path}, row {i} (counted from 0)" for i in range(len(texts))])


def _places(texts: Sequence[str], classes: Sequence[str], where: Sequence[str]) -> Array:
    number = {name: i for i, name in enumerate(classes)}
    for text, row in zip(texts, where, strict=True):
        if text not in number:
            raise DataError(f"{row}: {unknown('label', text, classes)}")
    return np.array([number[text] for text in texts], np.int64)


def _array(path: Path) -> Array:
    return read_npy(path) if path.suffix.lower() == ".npy" else _member(path, "x")


def _member(path: Path, name: str) -> Array:
    arrays = _npz_arrays(path)
    if name not in arrays:
        raise DataError(f"{path}: there is no array '{name}' in it, only {sorted(arrays)}")
    return arrays[name]


def _prepared(values: Array, path: Path, population: Population) -> Array:
    if values.dtype.kind not in "fiub":
        raise DataError(f"{path}: samples must be numbers, not {values.dtype}")
    if population.kind == "image":
        return _images(values, path, population)
    if values.shape[1:] != population.shape or values.ndim == 0:
        raise _misfit(values, path, population)
    return (
        _tokens(values, path, population)
        if population.kind == "text"
        else _table(values, path, population)
    )


def _misfit(values: Array, path: Path, population: Population) -> DataError:
    shape = ", ".join(["N", *(str(n) for n in population.shape)])
    return DataError(
        f"{path}: an array of shape {values.shape}, but the run's samples have the "
        f"shape ({shape}); convert them"
    )


def _images(values: Array, path: Path, population: Population) -> Array:
    """Convert images to (N, C, H, W) with the type of the training data."""
    images = values
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1:] != population.shape:
        images = np.moveaxis(images, 3, 1)
    if images.shape[1:] != population.shape:
        raise _misfit(values, path, population)
    if population.clients[0].train.x.dtype != torch.uint8:
        return _finite_floats(images, path)
    if images.dtype.kind == "f":
        raise DataError(
            f"{path}: pixels are fractions, but the run's images have whole numbers 0..255; "
            "multiply them by 255 and store them as uint8"
        )
    if images.size and (images.min() < 0 or images.max() > 255):
        raise DataError(
            f"{path}: pixels must lie in 0..255, but these range from {images.min()} to "
            f"{images.max()}"
        )
    return images.astype(np.uint8)


def _tokens(values: Array, path: Path, population: Population) -> Array:
    known = len(population.vocabulary or ())
    if values.dtype.kind not in "iu" or (values.size and values.min() < 0):
        raise DataError(f"{path}: text must be whole token numbers from 0, or a .csv file of texts")
    if values.size and values.max() >= known:
        raise DataError(
            f"{path}: the token number {values.max()} is outside the vocabulary 0..{known - 1}"
        )
    return values.astype(np.int64)


def _table(values: Array, path: Path, population: Population) -> Array:
    table = _finite_floats(values, path)
    if population.mean is None or population.std is None:
        return table
    table -= population.mean.numpy()
    table /= population.std.numpy()
    return table


def _finite_floats(values: Array, path: Path) -> Array:
    with np.errstate(over="ignore"):  # the check reports values that are too large
        floats = values.astype(np.float32)
    check_finite(floats, str(path))
    return floats


def _from_sheet(
    sheet: _Sheet, population: Population, text: str = "text", label: str | None = None
) -> Array:
    """The samples in the rows of a CSV file; the column ``label`` is not a feature."""
    path = sheet.path
    if population.kind == "image":
        raise DataError(f"{path}: images must be in an .npy or .npz file")
    if population.kind == "text":
        if population.vocabulary is None:
            raise DataError(f"{path}: the run has no vocabulary to encode texts with")
        return encode(sheet.texts(text), population.vocabulary, population.shape[0])
    names = list(population.features or (c for c in sheet.columns if c != label))
    for name in names:
        if name not in sheet.columns:
            raise DataError(f"{path}: {unknown('column', name, sheet.columns)}")
    if (len(names),) != population.shape:
        raise DataError(
            f"{path}: {len(names)} columns ({', '.join(names[:8])}), but the run's data have "
            f"{population.shape[0]} features; keep only these, in the same order"
        )
    columns = [sheet.numbers(name) for name in names]
    return _table(np.stack(columns, axis=1), path, population)
