"""The file formats of the public sets: IDX, CIFAR's batches and MATLAB files.

Each reader takes the content of a file, and its name for error messages.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from coterie.data.files import damaged
from coterie.data.raw import Array
from coterie.errors import DataError

CIFAR_PIXELS = 3 * 32 * 32


def parse_idx(content: bytes, where: str, dimensions: int) -> Array:
    """Parse an IDX file of bytes: MNIST's images (3 dimensions) or labels (1).

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels", 1)
    array([7, 9], dtype=uint8)
    """
    if not content:
        raise damaged(where, "the file is empty")
    if content[:4] != bytes([0, 0, 8, dimensions]):
        raise damaged(
            where,
            f"it starts with {content[:4].hex()}, but an IDX file of {dimensions} dimensions with "
            f"{bytes([0, 0, 8, dimensions]).hex()}",
        )
    header = 4 + 4 * dimensions
    shape = tuple(
        int.from_bytes(content[i : i + 4], "big") for i in range(4, min(header, len(content)), 4)
    )
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise damaged(where, f"it has {len(content)} bytes, but its header announces {expected}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_cifar_binary(content: bytes, where: str, label_bytes: int) -> tuple[Array, Array]:
    """Parse a .bin file of CIFAR into images and labels of shape (N, label_bytes)."""
    record = label_bytes + CIFAR_PIXELS
    if not content or len(content) % record:
        raise damaged(
            where, f"{len(content)} bytes are not a whole number of {record}-byte records"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return images, records[:, :label_bytes].astype(np.int64)


class _PickledType:
    """A replacement of numpy.dtype in pickles, for plain numbers only."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        text = _as_text(code)
        if text not in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"):
            raise pickle.UnpicklingError(f"it contains an array of type {text}")
        self.plain: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if _as_text(state[1]) == ">":
            self.plain = self.plain.newbyteorder(">")


class _PickledArray:
    """A replacement of numpy.ndarray in pickles, so that NumPy's own code never sees the file."""

    def __init__(self, *_: object) -> None:
        self.array: Array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        flat: Array = np.frombuffer(content, kind.plain)
        self.array = flat.reshape(shape, order="F" if by_columns else "C")


def _from_buffer(content: bytes, kind: _PickledType, shape: tuple[int, ...], order: str) -> Any:
    array = _PickledArray()
    array.__setstate__((1, shape, kind, order == "F", content))
    return array


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it requests the encoding {encoding}")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """An unpickler of dictionaries, lists, texts and arrays of numbers; anything else is an error.

    A pickle may name any function to call. Therefore, the few names used for arrays are replaced by
    the classes of this module, and no other name is looked up.
    """

    stand_ins: ClassVar[dict[str, Callable[..., Any]]] = {
        "numpy.core.multiarray._reconstruct": _PickledArray,
        "numpy.core.numeric._frombuffer": _from_buffer,
        "numpy.ndarray": _PickledArray,
        "numpy.dtype": _PickledType,
        "_codecs.encode": _encode_latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        """The replacement for a name in the pickle."""
        # numpy.core was renamed numpy._core; old pickles contain the old name.
        key = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if key not in self.stand_ins:
            raise pickle.UnpicklingError(f"it requests {module}.{name}, which is not allowed")
        return self.stand_ins[key]


def parse_pickle(content: bytes, where: str) -> dict[str, Any]:
    """Parse a pickled dictionary of plain values and arrays without running code from the file."""
    try:
        # CIFAR's pickles are from Python 2, in which texts are bytes.
        content_dict = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise almost any error
        raise damaged(where, error) from error
    if not isinstance(content_dict, dict):
        raise damaged(where, f"it contains a {type(content_dict).__name__}, not a dictionary")
    return {
        _as_text(key): value.array if isinstance(value, _PickledArray) else value
        for key, value in content_dict.items()
    }


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def parse_cifar_pickle(content: bytes, where: str, label_key: str) -> tuple[Array, Array]:
    """Parse a Python batch of CIFAR into (images, labels)."""
    batch = parse_pickle(content, where)
    for key in ("data", label_key):
        if key not in batch:
            raise damaged(where, f"there is no '{key}' in it, only {sorted(batch)}")
    images, labels = batch["data"], batch[label_key]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise damaged(where, "its 'data' is not an array of bytes")
    if images.ndim != 2 or images.shape[1] != CIFAR_PIXELS:
        raise damaged(where, f"its 'data' has shape {images.shape}, not (N, {CIFAR_PIXELS})")
    if not isinstance(labels, list | np.ndarray) or len(labels) != len(images):
        raise damaged(where, f"its '{label_key}' are not one per image for {len(images)} images")
    try:
        numbers = np.array(labels, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise damaged(where, f"its '{label_key}' are not whole numbers") from error
    return images.reshape(-1, 3, 32, 32), numbers


def parse_label_names(content: bytes, where: str, key: str) -> tuple[str, ...]:
    """The class names in one of CIFAR's 'meta' pickles."""
    names = parse_pickle(content, where).get(key)
    if not isinstance(names, list):
        raise damaged(where, f"there is no list '{key}' in it")
    return tuple(_as_text(name) for name in names)


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Read (images, labels) from a MATLAB file of SVHN; the digit 0 is stored as 10."""
    from scipy.io import loadmat

    try:
        variables = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # a damaged .mat file can raise almost any error
        raise damaged(path, error) from error
    if "X" not in variables or "y" not in variables:
        raise damaged(path, "it does not contain the variables X and y")
    images, labels = variables["X"], variables["y"].ravel().astype(np.int64)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[3] != len(labels):
        raise damaged(
            path, f"X is {images.dtype} of shape {images.shape}, y has {len(labels)} labels"
        )
    labels[labels == 10] = 0
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels


def check_labels(labels: Array, classes: int, where: str) -> None:
    """Raise an error if labels are outside 0..classes-1, with the first of them."""
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if outside.size:
        raise DataError(
            f"{where}: the label {labels[outside[0]]} of sample {outside[0]} (counted from 0) is "
            f"outside 0..{classes - 1}; the file is damaged or of another data set"
        )
