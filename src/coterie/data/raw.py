"""Data sets before they are divided among clients, and the checks of their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, DataError

Array = NDArray[Any]
Samples = Array | list[str]
ClassNames = tuple[str, ...]

# More classes than this are taken for a mistake: the labels are ids or regression targets.
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class RawData:
    """A complete data set: samples, labels, and a description of them.

    ``x`` are uint8 (or float32) images (N,C,H,W), a float32 table (N,F) or a list of texts; ``y``
    are int64 labels, or float32 targets if ``classes`` is None. ``held_out`` is the official test
    part, ``columns`` are further columns of the user's file with a value for each sample, and
    ``features`` are the names of a table's columns.
    """

    x: Samples
    y: Array
    kind: str
    classes: ClassNames | None
    held_out: tuple[Samples, Array] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    features: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.y)


def check_finite(values: Array, where: str) -> None:
    """Raise an error at NaN or infinity, with the first row and column (counted from 0)."""
    if values.dtype.kind != "f":
        return
    finite = np.isfinite(values)
    if finite.all():
        return
    first = np.argwhere(~finite)[0]
    position = f"row {first[0]}"
    if len(first) > 1:
        position += f", column {', '.join(str(i) for i in first[1:])}"
    value = values[tuple(first)]
    raise DataError(
        f"{where}: {value} at {position} (counted from 0); remove or fill in such values first"
    )


def same_length(x: Samples, y: Array, where: str) -> None:
    """Raise an error if samples and labels differ in number, or if there are none."""
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} samples but {len(y)} labels; the numbers must be equal")
    if len(y) == 0:
        raise DataError(f"{where}: there are no samples in it")


def as_samples(
    values: Array, where: str, channels: str = "auto", kind: str | None = None
) -> tuple[Array, str]:
    """Convert an array to one of the forms of ``RawData.x``, and return it with its kind.

    >>> x, kind = as_samples(np.zeros((5, 8, 8, 3), np.uint8), "x")
    >>> x.shape, kind
    ((5, 3, 8, 8), 'image')
    """
    if values.dtype.kind not in "fiub":
        raise DataError(f"{where}: samples must be numbers, not {values.dtype}")
    if kind == "text":
        return _as_tokens(values, where), "text"
    if values.ndim == 2:
        with np.errstate(over="ignore"):  # the check below reports values that are too large
            table = np.asarray(values, dtype=np.float32)
        check_finite(table, where)
        return table, "table"
    if values.ndim in (3, 4):
        return _channels_first(_pixels(values, where), where, channels), "image"
    raise DataError(
        f"{where}: samples of shape {values.shape[1:]} are neither rows of a table (N, F) nor "
        "images (N, H, W), (N, H, W, C) or (N, C, H, W)"
    )


def _as_tokens(values: Array, where: str) -> Array:
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise DataError(
            f"{where}: text must be whole token numbers of shape (N, length), "
            f"not {values.dtype} of shape {values.shape}"
        )
    if values.size and values.min() < 0:
        raise DataError(f"{where}: the token number {values.min()} is negative")
    return values.astype(np.int64)


def _pixels(values: Array, where: str) -> Array:
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            floats = np.asarray(values, dtype=np.float32)
        check_finite(floats, where)
        return floats
    if values.size and (values.min() < 0 or values.max() > 255):
        raise DataError(
            f"{where}: whole-number pixels must lie in 0..255, but these range from {values.min()} "
            f"to {values.max()}; scale them, or store them as floats"
        )
    return values.astype(np.uint8)


def _channels_first(images: Array, where: str, channels: str) -> Array:
    """Convert (N,H,W) and (N,H,W,C) to (N,C,H,W); if ambiguous, the channels come first."""
    if channels not in ("auto", "first", "last"):
        raise ConfigError(f"channels = {channels!r}: choose 'auto', 'first' or 'last'")
    if images.ndim == 3:
        return images[:, None]
    if channels == "auto":
        if images.shape[1] in (1, 3):
            channels = "first"
        elif images.shape[3] in (1, 3):
            channels = "last"
        else:
            raise DataError(
                f"{where}: cannot tell which axis of {images.shape} holds the colours; "
                "set channels = 'first' or 'last'"
            )
    return images if channels == "first" else np.moveaxis(images, 3, 1)


def encode_targets(
    parts: Sequence[tuple[Array, str]], classes: int | Sequence[str] | None = None
) -> tuple[list[Array], ClassNames | None]:
    """Encode labels of several parts (train and test, or clients) with common class names.

    Whole numbers are labels 0..max, texts become their position among the sorted class names, and
    floats are regression targets. ``classes`` declares the number of classes or their names.

    >>> encode_targets([(np.array(["cat", "ape", "cat"]), "y")])
    ([array([1, 0, 1])], ('ape', 'cat'))
    """
    kinds = {_target_kind(values, where) for values, where in parts}
    if len(kinds) > 1:
        listed = ", ".join(f"{where} has {_target_kind(v, where)}s" for v, where in parts[:5])
        raise DataError(f"labels must all be of one type: {listed}")
    kind = kinds.pop()
    if kind == "float" and classes is None:
        return [_regression_targets(values, where) for values, where in parts], None
    for values, where in parts:
        if values.ndim != 1:
            raise DataError(f"{where}: labels must be one per sample, not of shape {values.shape}")
    if kind == "text":
        return _encode_names(parts, classes)
    return _encode_numbers(parts, classes)


def _target_kind(values: Array, where: str) -> str:
    kinds = {"f": "float", "i": "whole number", "u": "whole number", "b": "whole number"}
    kinds |= {"U": "text", "S": "text"}
    if values.dtype.kind not in kinds:
        raise DataError(f"{where}: labels must be numbers or texts, not {values.dtype}")
    return kinds[values.dtype.kind]


def _regression_targets(values: Array, where: str) -> Array:
    if values.ndim not in (1, 2):
        raise DataError(f"{where}: targets must have shape (N,) or (N, k), not {values.shape}")
    with np.errstate(over="ignore"):
        targets = values.astype(np.float32)
    check_finite(targets, where)
    return targets


def _declared(classes: int | Sequence[str]) -> ClassNames:
    if isinstance(classes, int):
        if classes < 1:
            raise ConfigError(f"classes = {classes}: there must be at least one class")
        return tuple(str(i) for i in range(classes))
    names = tuple(str(name) for name in classes)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"classes = {list(classes)}: name each class once")
    return names


def _encode_names(
    parts: Sequence[tuple[Array, str]], classes: int | Sequence[str] | None
) -> tuple[list[Array], ClassNames]:
    labels = sorted({str(name) for values, _ in parts for name in np.unique(values.astype(str))})
    if classes is None or isinstance(classes, int):
        names = tuple(_by_number_if_possible(labels))
        if classes is not None and len(names) > classes:
            raise DataError(
                f"{parts[0][1]}: {len(names)} different labels, but classes = {classes} declares "
                f"{classes}; raise classes or correct the labels"
            )
    else:
        names = _declared(classes)
    number = {name: i for i, name in enumerate(names)}
    encoded = []
    for values, where in parts:
        texts = [str(v) for v in values.astype(str)]
        for row, text in enumerate(texts):
            if text not in number:
                raise DataError(
                    f"{where}: the label '{text}' at row {row} (counted from 0) is not among the "
                    f"declared classes {list(names)}"
                )
        encoded.append(np.array([number[text] for text in texts], dtype=np.int64))
    return encoded, names


def _by_number_if_possible(names: list[str]) -> list[str]:
    """Sort '2' before '10' if all names are numbers."""
    try:
        return sorted(names, key=float)
    except ValueError:
        return names


def _encode_numbers(
    parts: Sequence[tuple[Array, str]], classes: int | Sequence[str] | None
) -> tuple[list[Array], ClassNames]:
    encoded = []
    for values, where in parts:
        if values.dtype.kind == "f":
            check_finite(values, where)
            if (values != np.floor(values)).any():
                raise DataError(f"{where}: labels must be whole numbers when classes are declared")
        encoded.append(values.astype(np.int64))
    largest = max((int(v.max()) for v in encoded if v.size), default=0)
    if classes is None and largest >= MOST_CLASSES:
        raise DataError(
            f"{parts[0][1]}: the label {largest} would mean {largest + 1} classes; number the "
            "classes from 0, or store regression targets as floats"
        )
    names = _declared(largest + 1 if classes is None else classes)
    for values, (_, where) in zip(encoded, parts, strict=True):
        outside = np.flatnonzero((values < 0) | (values >= len(names)))
        if outside.size:
            row = int(outside[0])
            raise DataError(
                f"{where}: the label {values[row]} at row {row} (counted from 0) is outside "
                f"0..{len(names) - 1}; number the classes from 0 or declare more of them"
            )
    return encoded, names
