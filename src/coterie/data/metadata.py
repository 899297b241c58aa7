"""Metadata: information about each client besides its samples, such as its site or device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.raw import Array
from coterie.data.tables import read_sheet
from coterie.errors import ConfigError, DataError, unknown

Values = Mapping[Any, Any] | Sequence[Any]  # by client id or name, or in the order of clients
Metadata = Mapping[str, Mapping[int, str]]  # column, client id, value

_SUFFIXES = (".json", ".csv", ".tsv")
_LISTED = 10  # the most clients listed in an error


def names_file(text: str) -> bool:
    """Whether a text is the path of a file rather than the name of a column.

    >>> names_file("groups.json"), names_file("lists/groups"), names_file("site")
    (True, True, False)
    """
    path = Path(text)
    return "/" in text or "\\" in text or path.suffix.lower() in _SUFFIXES or path.is_file()


def by_client(values: Values, names: Mapping[int, str], where: str) -> dict[int, str]:
    """Each client's value by id, where ``names`` are the names of all clients.

    The keys of a mapping are ids or names of clients; a list has a value for each client. Clients
    that are missing, unknown or named more than once are reported in a single error.

    >>> by_client({"rome": "south", "1": "north"}, {0: "rome", 1: "oslo"}, "groups")
    {0: 'south', 1: 'north'}
    >>> by_client({"rome": "south", "0": "north"}, {0: "rome", 1: "oslo"}, "groups")
    Traceback (most recent call last):
    coterie.errors.ConfigError: groups: client 1 (oslo) is missing; client 0 (rome) is named more...
    """
    if not isinstance(values, Mapping):
        if len(values) != len(names):
            raise ConfigError(
                f"{where}: {len(values)} values for {len(names)} clients: use one value per "
                "client, in the order of clients, or a mapping by client"
            )
        values = dict(zip(sorted(names), values, strict=True))
        clients: list[int | None] = list(values)
    else:
        clients = _clients([str(key) for key in values], names)
    problems = _problems(list(values), clients, names)
    if problems:
        raise ConfigError(
            f"{where}: {'; '.join(problems)}. Name each of the {len(names)} clients once, by its "
            "id or its name"
        )
    pairs = zip(clients, values.values(), strict=True)
    known = {c: _text(value, where, label(c, names)) for c, value in pairs if c is not None}
    return dict(sorted(known.items()))


def columns_by_client(
    columns: Mapping[str, Values], names: Sequence[str]
) -> dict[str, dict[int, str]]:
    """The values of several columns of metadata by client; ``names`` in the order of clients."""
    if not isinstance(columns, Mapping):
        raise ConfigError(
            'metadata must be a dict of columns, as in {"site": {0: "north", 1: "south"}}, not '
            f"{columns!r}"
        )
    for column, values in columns.items():
        if isinstance(values, str) or not isinstance(values, Mapping | Sequence | np.ndarray):
            raise ConfigError(
                f"metadata column {column!r}: use a dict of clients and their values, or a list "
                f"with one value per client, not {values!r}"
            )
    return {
        str(column): by_client(values, dict(enumerate(names)), f"metadata column '{column}'")
        for column, values in columns.items()
    }


def constant_columns(
    columns: Mapping[str, Array],
    wanted: Sequence[str],
    rows: Sequence[Array],
    names: Sequence[str],
) -> dict[str, dict[int, str]]:
    """The value of each wanted column for each client, which must be the same in all its rows.

    >>> site = np.array(["north", "north", "south"])
    >>> constant_columns({"site": site}, ["site"], [np.array([0, 1]), np.array([2])], ["a", "b"])
    {'site': {0: 'north', 1: 'south'}}
    """
    known: dict[str, dict[int, str]] = {}
    names_by_id = dict(enumerate(names))
    for column in wanted:
        if column not in columns:
            raise DataError(f"data.metadata: {unknown('column', column, columns)}")
        where, known[column] = f"data.metadata: column '{column}'", {}
        for client, client_rows in enumerate(rows):
            values = list(
                dict.fromkeys(np.asarray(columns[column])[client_rows].astype(str).tolist())
            )
            if len(values) > 1:
                raise DataError(
                    f"{where} varies within {label(client, names_by_id)}: {values[0]!r} and "
                    f"{values[1]!r}. Metadata has one value per client: partition the data by a "
                    "column such that it does not vary (partition.name = column), or leave it out"
                )
            known[column][client] = _text(values[0], where, label(client, names_by_id))
    return known


def label(client: int, names: Mapping[int, str]) -> str:
    """A client in an error message: its id, and its name if that is different.

    >>> label(0, {0: "rome"}), label(1, {1: "1"})
    ('client 0 (rome)', 'client 1')
    """
    name = names.get(client, "")
    return f"client {client}" if name in ("", str(client)) else f"client {client} ({name})"


def _clients(keys: Sequence[str], names: Mapping[int, str]) -> list[int | None]:
    """The client of each key; None if it is unknown or the name of several clients."""
    counts = Counter(names.values())
    by_name = {name: i for i, name in names.items() if name and counts[name] == 1}
    by_id = {str(i): i for i in names}
    # A client's name may be a number that is another client's id: if all keys are ids, but not all
    # are names, they are ids.
    if all(key in by_id for key in keys) and not all(key in by_name for key in keys):
        return [by_id[key] for key in keys]
    return [by_name.get(key, by_id.get(key)) for key in keys]


def _problems(
    keys: Sequence[Any], clients: Sequence[int | None], names: Mapping[int, str]
) -> list[str]:
    counts = Counter(c for c in clients if c is not None)
    missing = [label(c, names) for c in sorted(names) if c not in counts]
    unknown_keys = [f"'{k}'" for k, c in zip(keys, clients, strict=True) if c is None]
    repeated = [label(c, names) for c, n in sorted(counts.items()) if n > 1]
    verb = {True: "is", False: "are"}
    return [
        f"{_listed(group)} {verb[len(group) == 1]} {problem}"
        for group, problem in (
            (missing, "missing"),
            (unknown_keys, "not a known client" if len(unknown_keys) == 1 else "not known clients"),
            (repeated, "named more than once"),
        )
        if group
    ]


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + rest


def _text(value: Any, where: str, client: str) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    raise ConfigError(f"{where}: the value {value!r} of {client} must be a text or a whole number")


# --- files ---------------------------------------------------------------------------------------


class _Table(dict[str, Any]):
    """A JSON object that records its repeated keys."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        listed = list(pairs)
        super().__init__(listed)
        self.repeated = _duplicates([key for key, _ in listed])


def read_groups(path: Path) -> dict[str, str]:
    """Read a group for each client from a JSON or a CSV file.

    A JSON file contains ``{"groups": {client: group}}``, whose other keys are ignored, or just the
    inner object; a CSV (or TSV) file has the columns ``client`` and ``group``.
    """
    content = _content(path)
    if not _is_json(path, content):
        columns = _columns_of(path, content)
        if "group" not in columns:
            raise DataError(
                f"{path}: there is no column 'group'; its header line must be client,group"
            )
        return columns["group"]
    table = _parsed(path, content)
    inner = table.get("groups")
    return _values(path, inner if isinstance(inner, _Table) else table)


def read_metadata(path: Path) -> dict[str, dict[str, str]]:
    """Read columns of metadata from a JSON or a CSV file.

    A JSON file contains ``{column: {client: value}}``; a CSV (or TSV) file has a row for each
    client, and a column ``client`` besides the others.
    """
    content = _content(path)
    if not _is_json(path, content):
        return _columns_of(path, content)
    table = _parsed(path, content)
    if table.repeated:
        raise ConfigError(
            f"{path}: two columns are named '{table.repeated[0]}'; names must be unique"
        )
    for column, values in table.items():
        if not isinstance(values, _Table):
            raise DataError(f"{path}: column '{column}' must be an object of clients and values")
    return {column: _values(path, values) for column, values in table.items()}


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}); convert it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _is_json(path: Path, content: str) -> bool:
    return path.suffix.lower() == ".json" or content.lstrip().startswith(("{", "["))


def _parsed(path: Path, content: str) -> _Table:
    try:
        table = json.loads(content, object_pairs_hook=_Table)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(table, _Table):
        raise DataError(f'{path}: expected a JSON object, as in {{"groups": {{"0": "a"}}}}')
    return table


def _values(path: Path, table: _Table) -> dict[str, str]:
    if table.repeated:
        raise _named_twice(path, table.repeated)
    return {key: _text(value, str(path), f"client '{key}'") for key, value in table.items()}


def _columns_of(path: Path, content: str) -> dict[str, dict[str, str]]:
    header = content.partition("\n")[0]
    sheet = read_sheet(path, "\t" if "\t" in header else ",")
    if "client" not in sheet.columns:
        raise DataError(
            f"{path}: there is no column 'client'; its header line must name it, as in client,group"
        )
    clients = [text.strip() for text in sheet.texts("client")]
    if repeated := _duplicates(clients):
        raise _named_twice(path, repeated)
    return {
        column: {
            client: _text(value, f"{path}, line {line}, column '{column}'", f"client '{client}'")
            for client, value, line in zip(clients, values, sheet.lines, strict=True)
        }
        for column, values in sheet.columns.items()
        if column != "client"
    }


def _duplicates(keys: Iterable[str]) -> list[str]:
    return [key for key, count in Counter(keys).items() if count > 1]


def _named_twice(path: Path, repeated: Sequence[str]) -> ConfigError:
    clients = _listed([f"'{key}'" for key in repeated])
    verb = "is" if len(repeated) == 1 else "are"
    return ConfigError(f"{path}: {clients} {verb} named more than once; name each client once")
