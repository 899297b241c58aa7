"""How settings are written in the titles of a comparison's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value_in_title(value: Any) -> str:
    """A value as it is written in a title.

    >>> value_in_title(0.1), value_in_title(True), value_in_title([64, 32]), value_in_title("iid")
    ('0.1', 'true', '[64, 32]', 'iid')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def place_of(title: str, settings: Mapping[str, Any]) -> str:
    """The title of a method with its settings.

    >>> place_of("fedavg", {"partition": "iid", "train.lr": 0.1})
    'fedavg, iid, train.lr 0.1'
    """
    parts = (f"{key} {value_in_title(value)}" for key, value in settings.items())
    return ", ".join([title, *(text.removeprefix("partition ") for text in parts)])


def reference_of(title: str) -> str:
    """What a method is a reference line for: "ceiling", "alone", or "" for a usable method.

    The oracle is told the true groups, which nobody knows, and training alone needs no federation.

    >>> reference_of("oracle"), reference_of("local"), reference_of("ifca k=4")
    ('ceiling', 'alone', '')
    """
    names = title.partition(" ")[0].split("+")
    if "oracle" in names:
        return "ceiling"
    return "alone" if names == ["local"] else ""
