"""What trackers write down of a run: an event as numbers by name, a configuration as one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TABLES = ("received", "adapted", "seconds", "clock", "privacy")
_WHO = ("worst_client",)  # numbers that name somebody


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round, by name; those that are not finite are left out.

    Bytes are those of the round, and since the start in ``total`` and ``total_wasted``.

    >>> numbers({"round": 1, "groups": [0, 1, None], "bytes": {"down": 3, "up": 2},
    ...          "received": {"accuracy": 0.5, "worst_client": 7, "loss": float("nan")}})
    {'received/accuracy': 0.5, 'groups': 2.0, 'bytes/down': 3.0, 'bytes/up': 2.0}
    """
    found: dict[str, Any] = {}
    for table in _TABLES:
        own = event.get(table) or {}
        found |= {f"{table}/{k}": v for k, v in own.items() if k not in _WHO}
    if event.get("groups"):
        found["groups"] = len({g for g in event["groups"] if g is not None})
    found |= {f"bytes/{way}": moved for way, moved in event.get("bytes", {}).items()}
    for name, key in (("total", "total_bytes"), ("total_wasted", "total_wasted")):
        if key in event:
            found[f"bytes/{name}"] = sum(event[key].values())
    if "cohort" in event:
        found["clients/asked"] = len(event["cohort"])
    found |= {f"clients/{key}": event[key] for key in ("lost", "late") if key in event}
    found["abandoned"] = 1 if "abandoned" in event else None
    return {k: float(v) for k, v in found.items() if _is_number(v)}


def flat(tree: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Tables within tables as one, with dotted names; what has no value is left out.

    >>> flat({"run": {"rounds": 3, "cohort": None}, "train": {"lr": 0.1}, "freeze": ["a", "b"]})
    {'run.rounds': 3, 'train.lr': 0.1, 'freeze': 'a, b'}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(map(str, value))
        elif value is not None:
            found[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
