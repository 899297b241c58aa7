"""The tables of a run as data frames of pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, unknown
from coterie.results.notebook import the_pandas

if TYPE_CHECKING:
    import pandas

    from coterie.report.reading import Reading

_WHOLE = ("bytes_", "clients_", "groups", "round")  # columns of whole numbers, by prefix
_COUNTS = ("client", "newcomer", "train", "val", "test", "bytes_down", "bytes_up")
_WORDS = ("name", "group", "true_group")


def dataframe(reading: Reading, table: str) -> pandas.DataFrame:
    """A table of a run, as a data frame."""
    if table not in _TABLES:
        raise ConfigError(unknown("table", table, _TABLES))
    frame: pandas.DataFrame = the_pandas().DataFrame(_columns(*_TABLES[table](reading)))
    return frame


# --- tables -------------------------------------------------------------------------------------

Rows = tuple[Sequence[str], Sequence[Mapping[str, Any]]]


def _rounds(reading: Reading) -> Rows:
    from coterie.tracking.values import numbers

    rows = []
    for event in reading.rounds:
        row = {name.replace("/", "_"): value for name, value in numbers(event).items()}
        row |= {"round": event["round"], "abandoned": "abandoned" in event}
        rows.append(row)
    return _named(rows, first=("round",)), rows


def _clients(reading: Reading) -> Rows:
    if reading.clients:
        return list(reading.clients[0]), reading.clients
    titles = [
        t for t in ("received", "adapted", "alone") if reading.scores(t)
    ]  # a run that is not finished
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
        scores_by_title = event.get("client_scores") or {}
        for client in range(
            max((len(row_scores) for row_scores in scores_by_title.values()), default=0)
        ):
            row_scores = {title: _at(scores, client) for title, scores in scores_by_title.items()}
            if any(value is not None for value in row_scores.values()):
                rows.append({"round": event["round"], "client": client, **row_scores})
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
    """All columns of these rows, in order of appearance."""
    return list(dict.fromkeys([*first, *(key for row in rows for key in row)]))


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of one type each: whole numbers where no value is missing, else with NaN."""
    import pandas

    from coterie.report.reading import number

    columns: dict[str, Any] = {}
    for name in names:
        cells = [row.get(name) for row in rows]
        if name in ("kind", "abandoned"):
            columns[name] = pandas.Series(cells, dtype="bool" if name == "abandoned" else "object")
            continue
        known = [v for v in cells if v not in ("", None)]
        if name == "name" or (name in _WORDS and not all(map(_is_whole, known))):
            columns[name] = pandas.Series([None if v == "" else v for v in cells], dtype="object")
            continue
        values = [number(v) for v in cells]
        is_whole = name in (*_COUNTS, *_WORDS, "down", "up") or name.startswith(_WHOLE)
        if is_whole and None not in values:
            columns[name] = pandas.Series([int(v) for v in values if v is not None], dtype="int64")
        else:
            columns[name] = pandas.Series(values, dtype="float64")
    return columns


def _is_whole(value: Any) -> bool:
    """Whether this is a whole number, or the text of one, as in a CSV file."""
    return isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdecimal())
