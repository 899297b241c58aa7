"""Unlabelled samples of the kind that a population holds, from a file, for prediction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.data.population import Population
from coterie.data.raw import Array, check_finite
from coterie.data.tables import _npz_arrays, _read_sheet, read_npy
from coterie.data.text import encode
from coterie.errors import DataError, unknown

ENDINGS = (".npy", ".npz", ".csv")


def samples_like(path: Path, population: Population) -> Tensor:
    """Samples as the population's own: read, checked, and prepared in the same way.

    An array in an .npy file, the array ``x`` of an .npz file, or the rows of a .csv file: features
    by their names where these are known, texts in the column ``text``. Images may be (N,H,W),
    (N,H,W,C) or (N,C,H,W). A table is standardised if the population was.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(f"{path}: samples come in {', '.join(ENDINGS)} files")
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct the path")
    if ending == ".csv":
        x = _from_csv(path, population)
    else:
        x = _prepared(_array(path), path, population)
    if not len(x):
        raise DataError(f"{path}: there are no samples in it")
    return torch.from_numpy(np.ascontiguousarray(x))


def _array(path: Path) -> Array:
    if path.suffix.lower() == ".npy":
        return read_npy(path)
    arrays = _npz_arrays(path)
    if "x" not in arrays:
        raise DataError(f"{path}: there is no array 'x' in it, only {sorted(arrays)}")
    return arrays["x"]


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
    wanted = ", ".join(["N", *(str(n) for n in population.shape)])
    return DataError(
        f"{path}: an array of shape {values.shape}, but the run's samples make ({wanted}); "
        "bring them into that shape"
    )


def _images(values: Array, path: Path, population: Population) -> Array:
    """As (N, C, H, W) in the type of the training data."""
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
            f"{path}: pixels are fractions, but the run's images hold whole numbers 0..255; "
            "multiply by 255 and store them as uint8"
        )
    if images.size and (images.min() < 0 or images.max() > 255):
        raise DataError(
            f"{path}: pixels must lie in 0..255, these reach from {images.min()} to {images.max()}"
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
    with np.errstate(over="ignore"):  # the check says which value is too large
        floats = values.astype(np.float32)
    check_finite(floats, str(path))
    return floats


def _from_csv(path: Path, population: Population) -> Array:
    if population.kind == "image":
        raise DataError(f"{path}: images come as arrays, in an .npy or .npz file")
    sheet = _read_sheet(path, ",")
    if population.kind == "text":
        if population.vocabulary is None:
            raise DataError(f"{path}: the run has no vocabulary to read texts with")
        texts = sheet.texts("text")
        return encode(texts, population.vocabulary, population.shape[0])
    names = list(population.features or sheet.columns)
    for name in names:
        if name not in sheet.columns:
            raise DataError(f"{path}: {unknown('column', name, sheet.columns)}")
    if (len(names),) != population.shape:
        raise DataError(
            f"{path}: {len(names)} columns ({', '.join(names[:8])}), but the run's data have "
            f"{population.shape[0]} features; keep these only, in their order"
        )
    columns = [sheet.numbers(name) for name in names]
    return _table(np.stack(columns, axis=1), path, population)
