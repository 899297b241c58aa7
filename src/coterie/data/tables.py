"""Tables and texts in CSV files, and arrays in NumPy's files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.data.files import damaged
from coterie.data.raw import Array, RawData, as_samples, encode_targets, same_length
from coterie.errors import ConfigError, DataError, unknown

Classes = int | Sequence[str] | None


@dataclass(frozen=True)
class _Sheet:
    """The columns of a CSV file as texts, and the line of the file on which each row ends."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def texts(self, name: str) -> list[str]:
        if name not in self.columns:
            raise DataError(f"{self.path}: {unknown('column', name, self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> Array:
        """A column as float32; an error with the line of the first invalid value."""
        texts = self.texts(name)
        values = np.empty(len(texts), np.float32)
        for row, text in enumerate(texts):
            try:
                with np.errstate(over="ignore"):
                    values[row] = float(text)
            except ValueError:
                raise self._bad(row, name, "is not a number") from None
        invalid = np.flatnonzero(~np.isfinite(values))
        if invalid.size:
            raise self._bad(int(invalid[0]), name, "is not a finite number")
        return values

    def _bad(self, row: int, name: str, problem: str) -> DataError:
        text = self.columns[name][row]
        shown = f"'{text}'" if text.strip() else "an empty field"
        return DataError(
            f"{self.path}, line {self.lines[row]}, column '{name}': {shown} {problem}; correct or "
            f"remove the row, or list the column in columns if it is not a feature"
        )


def read_sheet(path: Path, delimiter: str) -> _Sheet:
    """Read a CSV file with a header line; errors give the line of the problem."""
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigError(f"delimiter = {delimiter!r}: choose a single character")
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            header = next(reader, None)
            for row in reader:
                if row:  # skip blank lines
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}); convert it") from error
    except csv.Error as error:
        raise DataError(f"{path}, after line {lines[-1] if lines else 1}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not header:
        raise DataError(f"{path}: the file is empty; expected a header line with column names")
    _check_rows(path, header, rows, lines)
    columns = dict(zip(header, (list(column) for column in zip(*rows, strict=True)), strict=True))
    return _Sheet(path, columns, lines)


def _check_rows(path: Path, header: list[str], rows: list[list[str]], lines: list[int]) -> None:
    duplicates = sorted({name for name in header if header.count(name) > 1})
    if duplicates:
        raise DataError(f"{path}: two columns are named '{duplicates[0]}'; names must be unique")
    if not rows:
        raise DataError(f"{path}: there are no rows below the header")
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}; "
                "correct the line (quote fields that contain the delimiter)"
            )


def read_csv(
    path: Path,
    label: str,
    columns: Sequence[str] = (),
    target: str = "classes",
    classes: Classes = None,
    delimiter: str = ",",
) -> RawData:
    """Read a table with a header line. All columns except ``label`` and ``columns`` are features.

    ``columns`` are kept separately, for partitions and metadata. ``target`` is "classes" (with
    texts or numbers as labels) or "regression".
    """
    sheet = read_sheet(path, delimiter)
    other_columns = _other_columns(sheet, label, columns)
    features = [name for name in sheet.columns if name != label and name not in other_columns]
    if not features:
        raise DataError(
            f"{path}: there are no features besides the columns '{label}' and {columns}"
        )
    x = np.stack([sheet.numbers(name) for name in features], axis=1)
    y, names = _csv_targets(sheet, label, target, classes)
    return RawData(x, y, "table", names, columns=other_columns, features=tuple(features))


def read_text_csv(
    path: Path,
    label: str = "label",
    text: str = "text",
    columns: Sequence[str] = (),
    classes: Classes = None,
    delimiter: str = ",",
) -> RawData:
    """Read texts and their labels from two columns of a CSV file."""
    sheet = read_sheet(path, delimiter)
    other_columns = _other_columns(sheet, label, columns)
    y, names = _csv_targets(sheet, label, "classes", classes)
    return RawData(sheet.texts(text), y, "text", names, columns=other_columns)


def _other_columns(sheet: _Sheet, label: str, columns: Sequence[str]) -> dict[str, Array]:
    if isinstance(columns, str):
        raise ConfigError(f"columns = {columns!r}: use a list of names, as in ['{columns}']")
    sheet.texts(label)
    return {name: np.array(sheet.texts(name)) for name in columns}


def _csv_targets(
    sheet: _Sheet, label: str, target: str, classes: Classes
) -> tuple[Array, tuple[str, ...] | None]:
    if target == "regression":
        return sheet.numbers(label), None
    if target != "classes":
        raise ConfigError(f"target = {target!r}: choose 'classes' or 'regression'")
    texts = [text.strip() for text in sheet.texts(label)]
    for line, text in zip(sheet.lines, texts, strict=True):
        if not text:
            raise DataError(f"{sheet.path}, line {line}, column '{label}': the label is empty")
    if classes is not None and not isinstance(classes, int):
        declared = [str(name) for name in classes]
        for line, text in zip(sheet.lines, texts, strict=True):
            if text not in declared:
                raise DataError(
                    f"{sheet.path}, line {line}, column '{label}': the label '{text}' is not "
                    f"among the declared classes {declared}"
                )
    (y,), names = encode_targets([(np.array(texts), str(sheet.path))], classes)
    return y, names


def read_npz(path: Path, channels: str = "auto", classes: Classes = None) -> RawData:
    """Read x and y (and x_test and y_test) of an .npz file; other 1-D arrays are columns."""
    arrays = _npz_arrays(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{path}: there is no array '{name}' in it, only {sorted(arrays)}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: x_test and y_test belong together, but there is only one of them")
    used = {"x", "y", "x_test", "y_test"}
    length = len(arrays["y"])
    columns = {
        name: values
        for name, values in arrays.items()
        if name not in used and values.shape == (length,)
    }
    parts = [("x", "y")] + ([("x_test", "y_test")] if "x_test" in arrays else [])
    named = [(arrays[x], arrays[y], f"{path}, {x} and {y}") for x, y in parts]
    return raw_from_arrays(named, columns, channels, classes)


def _npz_arrays(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an archive of named ones")
            arrays = {name: archive[name] for name in archive.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("not all of its members are arrays")
            return arrays
    except Exception as error:  # a damaged archive can raise almost any error
        raise damaged(path, error) from error


def read_npy(path: Path) -> Array:
    """Read an array; files that would need unpickling are an error."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise damaged(path, error) from error
    if not isinstance(array, np.ndarray):
        raise damaged(path, "not a single array")
    return array


def raw_from_arrays(
    parts: Sequence[tuple[Array, Array, str]],
    columns: dict[str, Array],
    channels: str = "auto",
    classes: Classes = None,
) -> RawData:
    """Create a data set from the (x, y, where) of its training part and any held-out part."""
    for x, y, where in parts:
        if x.ndim == 0 or y.ndim == 0:
            raise DataError(f"{where}: a single number is not a list of samples or labels")
        same_length(x, y, where)
    samples = [as_samples(x, where, channels) for x, _, where in parts]
    targets, names = encode_targets([(y, where) for _, y, where in parts], classes)
    shapes = {x.shape[1:] for x, _ in samples}
    if len(shapes) > 1:
        raise DataError(f"{parts[0][2]}: train and test samples differ in shape: {shapes}")
    held_out = (samples[1][0], targets[1]) if len(parts) > 1 else None
    return RawData(samples[0][0], targets[0], samples[0][1], names, held_out, columns)
