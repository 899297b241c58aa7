"""What a run's files should hold: whatever is of another type is dropped when they are read.

So nothing that comes after has to expect text where a number should be. ``None`` is allowed
anywhere: it is how a number that is not finite is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 1e300  # beyond that nobody counted; sums and products of such numbers overflow
HEADLINES = ("received", "adapted")
_MISSING = object()

# What is left of a value, and whether that is all of it.
Shape = Callable[[Any], tuple[Any, bool]]


def _plain(allowed: Callable[[Any], bool]) -> Shape:
    """A value that either is as it should be, or is dropped."""
    return lambda value: (value, True) if value is None or allowed(value) else (_MISSING, False)


def is_number(value: Any) -> bool:
    """A finite number, and no truth value.

    >>> [is_number(v) for v in (1, 0.5, True, "1", float("nan"), 10**400)]
    [True, True, False, False, False, False]
    """
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def is_count(value: Any) -> bool:
    """A whole number from 0 on that counts something."""
    return is_number(value) and isinstance(value, int) and 0 <= value < 2**53


def _sure(value: Any) -> tuple[Any, bool]:
    return (value, True) if is_number(value) else (_MISSING, False)


number = _plain(is_number)
count = _plain(is_count)
text = _plain(lambda v: isinstance(v, str))
name = _plain(lambda v: isinstance(v, str | int | float))
table = _plain(lambda v: isinstance(v, Mapping))
pair = _plain(lambda v: isinstance(v, list) and len(v) == 2 and all(map(is_number, v)))


def listed(each: Shape) -> Shape:
    """A list; of what does not belong there, None is left."""

    def shape(value: Any) -> tuple[Any, bool]:
        if value is None:
            return None, True
        if not isinstance(value, list):
            return _MISSING, False
        found = [each(v) for v in value]
        return [None if v is _MISSING else v for v, _ in found], all(well for _, well in found)

    return shape


def mapped(each: Shape, key: Callable[[str], bool] = lambda key: True) -> Shape:
    """A table of values that are all alike."""

    def shape(value: Any) -> tuple[Any, bool]:
        if value is None:
            return None, True
        if not isinstance(value, Mapping):
            return _MISSING, False
        found = {k: each(v) if key(k) else (_MISSING, False) for k, v in value.items()}
        kept = {k: v for k, (v, _) in found.items() if v is not _MISSING}
        return kept, all(well for _, well in found.values())

    return shape


def record(**fields: Shape) -> Shape:
    """A table with these fields, among others."""

    def shape(value: Any) -> tuple[Any, bool]:
        if value is None:
            return None, True
        if not isinstance(value, Mapping):
            return _MISSING, False
        dropped = list[str]()
        kept = mended(value, fields, dropped)
        return kept, not dropped

    return shape


def mended(tree: Mapping[str, Any], fields: Mapping[str, Shape], bad: list[str]) -> dict[str, Any]:
    """A table without what is not as it should be; the names of such fields are added to ``bad``.

    >>> bad = []
    >>> mended({"lost": "x", "bytes": {"down": 3, "up": "?"}, "new": 1}, EVENT, bad), bad
    ({'bytes': {'down': 3}, 'new': 1}, ['lost', 'bytes'])
    """
    found = dict(tree)
    for key in [key for key in tree if key in fields]:
        value, well = fields[key](tree[key])
        if well:
            continue
        bad.append(key)
        if value is _MISSING:
            del found[key]
        else:
            found[key] = value
    return found


_numbers = mapped(number)
_names, _counts = listed(name), listed(count)
_ways = record(down=_sure, up=_sure)
_all_bytes = record(down=_sure, up=_sure, apart=_ways, wasted=_ways, kinds=mapped(_ways))
_noise = record(epsilon=number, delta=number, budget=number)

EVENT: dict[str, Shape] = {
    "cohort": _counts,
    "clients": _counts,
    "groups": _names,
    **dict.fromkeys(("bytes", "total_bytes", "wasted", "total_wasted"), _ways),
    "kinds": mapped(pair),
    "client_bytes": mapped(pair, str.isdecimal),
    **dict.fromkeys(("lost", "late", "exchanges"), number),
    **dict.fromkeys(("received", "adapted", "seconds", "clock"), _numbers),
    "client_scores": mapped(listed(number)),
    "privacy": _noise,
    "notes": table,
}
RESULT: dict[str, Shape] = {
    **dict.fromkeys(("method", "judged_by", "sees"), text),
    "headline": _plain(lambda v: v in HEADLINES),
    **dict.fromkeys(("rounds", "groups"), count),
    **dict.fromkeys(("received", "adapted", "clock"), _numbers),
    "best_on_validation": record(round=count, val=number, received=_numbers),
    "bytes": _all_bytes,
    "privacy": _noise,
    **dict.fromkeys(("exposure", "scenario", "grouping"), table),
    "warnings": listed(text),
    "newcomers": record(
        clients=_counts,
        unanswered=_counts,
        groups=_names,
        received=_numbers,
        adapted=_numbers,
        bytes=_ways,
        epochs=number,
    ),
}
DATA: dict[str, Shape] = {
    **dict.fromkeys(("names", "groups", "classes"), _names),
    **dict.fromkeys(("labels", "quartiles"), listed(listed(_sure))),
}
CONFIG: dict[str, Shape] = dict.fromkeys(
    ("data", "method", "train", "run", "evaluation", "privacy", "python"), table
)
SESSION: dict[str, Shape] = {
    **dict.fromkeys(("at", "engine", "folder", "system"), text),
    "argv": _plain(lambda v: isinstance(v, list) and all(isinstance(w, str) for w in v)),
    **dict.fromkeys(("rounds", "done", "workers", "model_bytes"), count),
    "versions": mapped(text),
    "headline": RESULT["headline"],
}
