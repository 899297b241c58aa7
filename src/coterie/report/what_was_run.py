"""What was run, in one line: data, clients, partition and shift, model, rounds, seeds and date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from coterie.report.reading import Reading
from coterie.report.words import DAMAGE, count

_MOST = 3  # different values that are written out
# Settings of a partition, shift or model that are not worth a place in the line.
_QUIET = ("name", "init", "freeze", "bn", "options")


def what_was_run(readings: Sequence[Reading]) -> str:
    """The line under a page's title; parts that are not known are left out."""
    parts: dict[str, Callable[[Reading], str]] = {
        "data sets": lambda r: str(r.settings("data").get("set") or ""),
        "numbers of clients": lambda r: count(len(r.names), "client") if r.names else "",
        "partitions": lambda r: _named(r, "partition"),
        "shifts": lambda r: _named(r, "shift"),
        "numbers of samples": _samples,
        "models": lambda r: _named(r, "model"),
        "numbers of rounds": lambda r: count(r.planned, "round"),
    }
    shown = [_together([_safely(part, r) for r in readings], what) for what, part in parts.items()]
    shown += [f"{count(len(readings), 'run')}" if len(readings) > 1 else "", _seeds(readings)]
    shown.append(_dates(readings))
    return " · ".join(part for part in shown if part)


def _safely(part: Callable[[Reading], str], reading: Reading) -> str:
    try:
        return part(reading)
    except DAMAGE:
        return ""


def _together(values: Sequence[str], what: str) -> str:
    different = list(dict.fromkeys(value for value in values if value))
    return " or ".join(different) if len(different) <= _MOST else f"{len(different)} {what}"


def _named(reading: Reading, table: str) -> str:
    settings = reading.settings(table)
    name = str(settings.get("name") or "")
    if not name or name == "none":
        return ""
    if name == "iid":
        return "IID"
    values = [f"{k}={_plain(v)}" for k, v in settings.items() if k not in _QUIET and v != ""]
    return " ".join([name, *values])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_plain(v)}" for k, v in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _samples(reading: Reading) -> str:
    counts = reading.train_counts
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    span = str(least) if least == most else f"{least} to {most}"
    return f"{span} training samples a client"


def _seeds(readings: Sequence[Reading]) -> str:
    seeds = sorted({r.seed for r in readings if r.seed is not None})
    if not seeds:
        return ""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if seeds == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def _dates(readings: Sequence[Reading]) -> str:
    days = []
    for reading in readings:
        for session in reading.sessions:
            try:
                days.append(datetime.fromisoformat(str(session.get("at"))).date())
            except ValueError:
                continue
    if not days:
        return ""
    first, last = (f"{day.day} {day:%B %Y}" for day in (min(days), max(days)))
    return first if first == last else f"{first} to {last}"
