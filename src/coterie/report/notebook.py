"""The tables of a run as data frames of pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, unknown
from coterie.results.notebook import the_pandas

if TYPE_CHECKING:
    import pandas

    from coterie.report.reading import Reading

_WHOLE = ("bytes_", "clients_", "groups", "round")  # columns of whole numbers, by how they begin
_COUNTS = ("client", "newcomer", "train", "val", "test", "bytes_down", "bytes_up")
_WORDS = ("name", "group", "true_group")


def dataframe(reading: Reading, table: str) -> pandas.DataFrame:
    """A table of a run, as a data frame."""
    if table not in _TABLES:
        raise ConfigError(unknown("table", table, _TABLES))
    made: pandas.DataFrame = the_pandas().DataFrame(_columns(*_TABLES[table](reading)))
    return made


# --- tables -------------------------------------------------------------------------------------

Rows = tuple[Sequence[str], Sequence[Mapping[str, Any]]]


def _rounds(reading: Reading) -> Rows:
    from coterie.tracking.values import numbers

    rows = []
    for event in reading.rounds:
        found = {name.replace("/", "_"): value for name, value in numbers(event).items()}
        found |= {"round": event["round"], "abandoned": "abandoned" in event}
        rows.append(found)
    return _named(rows, first=("round",)), rows


def _clients(reading: Reading) -> Rows:
    if reading.clients:
        return list(reading.clients[0]), reading.clients
    titles = [t for t in ("received", "adapted", "alone") if reading.scores(t)]  # not finished
    rows = []
    for client, name in enumerate(reading.names):
        row: dict[str, Any] = {"client": client, "name": name}
        row["group"] = _at(reading.groups, client)
        for title in titles:
            row[f"{title}_{reading.judged_by}"] = _at(reading.scores(title), client)
        rows.append(row)
    return _named(rows, first=("client", "name", "group")), rows


def _scores(reading: Reading) -> Rows:
    rows: list[dict[str, Any]] = []
    for event in reading.rounds:
        told = event.get("client_scores") or {}
        for client in range(max((len(own) for own in told.values()), default=0)):
            own = {title: _at(scores, client) for title, scores in told.items()}
            if any(value is not None for value in own.values()):
                rows.append({"round": event["round"], "client": client, **own})
    return _named(rows, first=("round", "client", "received")), rows


def _bytes(reading: Reading) -> Rows:
    rows: list[dict[str, Any]] = []
    before = dict(reading.begun.get("bytes") or {})
    if any(before.values()):
        rows.append({"round": 0, "kind": "all", **before})
    for event in reading.rounds:
        for kind, (down, up) in (event.get("kinds") or {}).items():
            rows.append({"round": event["round"], "kind": kind, "down": down, "up": up})
    return ("round", "kind", "down", "up"), rows


_TABLES: dict[str, Callable[[Reading], Rows]] = {
    "rounds": _rounds,
    "clients": _clients,
    "scores": _scores,
    "bytes": _bytes,
}


def _named(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> list[str]:
    """All columns that rows have, in the order in which they come."""
    return list(dict.fromkeys([*first, *(key for row in rows for key in row)]))


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of one type each: whole numbers where every row has one, NaN for what is missing."""
    import pandas

    from coterie.report.reading import number

    found: dict[str, Any] = {}
    for name in names:
        held = [row.get(name) for row in rows]
        if name in ("kind", "abandoned"):
            found[name] = pandas.Series(held, dtype="bool" if name == "abandoned" else "object")
            continue
        there = [v for v in held if v not in ("", None)]
        if name == "name" or (name in _WORDS and not all(map(_is_whole, there))):
            found[name] = pandas.Series([None if v == "" else v for v in held], dtype="object")
            continue
        values = [number(v) for v in held]
        whole = name in (*_COUNTS, *_WORDS, "down", "up") or name.startswith(_WHOLE)
        if whole and None not in values:
            found[name] = pandas.Series([int(v) for v in values if v is not None], dtype="int64")
        else:
            found[name] = pandas.Series(values, dtype="float64")
    return found


def _is_whole(value: Any) -> bool:
    """Whether this is a whole number, or the text of one, as in a CSV file."""
    return isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdecimal())
