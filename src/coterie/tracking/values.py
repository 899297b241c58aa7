"""What trackers log: an event as numbers by name, and a configuration as one flat table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TABLES = ("received", "adapted", "seconds", "clock", "privacy")
_WHO = ("worst_client",)  # numbers that identify clients


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a round, by name.

    Bytes are those of the round; ``total`` and ``total_wasted`` are since the start.

    >>> numbers({"round": 1, "groups": [0, 1, None], "bytes": {"down": 3, "up": 2},
    ...          "received": {"accuracy": 0.5, "worst_client": 7, "loss": float("nan")}})
    {'received/accuracy': 0.5, 'groups': 2.0, 'bytes/down': 3.0, 'bytes/up': 2.0}
    """
    values: dict[str, Any] = {}
    for table in _TABLES:
        entries = event.get(table) or {}
        values |= {f"{table}/{k}": v for k, v in entries.items() if k not in _WHO}
    if event.get("groups"):
        values["groups"] = len({g for g in event["groups"] if g is not None})
    values |= {f"bytes/{way}": count for way, count in event.get("bytes", {}).items()}
    for name, key in (("total", "total_bytes"), ("total_wasted", "total_wasted")):
        if key in event:
            values[f"bytes/{name}"] = sum(event[key].values())
    if "cohort" in event:
        values["clients/asked"] = len(event["cohort"])
    values |= {f"clients/{key}": event[key] for key in ("lost", "late") if key in event}
    values["abandoned"] = 1 if "abandoned" in event else None
    return {k: float(v) for k, v in values.items() if _is_number(v)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one with dotted names; keys without a value are left out.

    >>> flat({"run": {"rounds": 3, "cohort": None}, "train": {"lr": 0.1}, "freeze": ["a", "b"]})
    {'run.rounds': 3, 'train.lr': 0.1, 'freeze': 'a, b'}
    """
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            flattened[name] = ", ".join(map(str, value))
        elif value is not None:
            flattened[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flattened


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
