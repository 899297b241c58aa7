"""Names written with their parameters, as in ``ifca:k=4`` or ``dirichlet:alpha=0.1``."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.registry import CLOCKS, METHODS, MODELS, PARTITIONS, SHIFTS, Registry, is_place

SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma inside [1, 2] does not separate
# The tables whose name may be written with parameters.
NAMED: Mapping[str, Registry[Any]] = {
    "method": METHODS,
    "model": MODELS,
    "partition": PARTITIONS,
    "shift": SHIFTS,
    "clock": CLOCKS,
}


def value_of(text: str) -> Any:
    """A value written as in TOML, or a bare word.

    >>> value_of("0.1"), value_of("[1, 2]"), value_of("rotation")
    (0.1, [1, 2], 'rotation')
    """
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def apart(item: str) -> list[str]:
    """Split a name from its settings; the name may contain a path, as in ``mine.py:function``.

    >>> apart("ifca:k=4"), apart("mine.py:my_method+ditto:k=4:lam=1")
    (['ifca', 'k=4'], ['mine.py:my_method+ditto', 'k=4', 'lam=1'])
    """
    parts = item.split(":")
    settings = list(itertools.takewhile(lambda part: "=" in part, reversed(parts)))[::-1]
    rest = parts[: len(parts) - len(settings)]
    name = ":".join(rest)
    known = any(registry.knows(parts[0]) for registry in NAMED.values())
    if len(rest) > 1 and (known or not any(is_place(part) for part in name.split("+"))):
        return parts
    return [name, *settings]


def parameters_in(settings: list[str], item: str, where: str) -> dict[str, Any]:
    """The parameters of settings such as ``k=4``."""
    parameters = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{where} {item}: write name:parameter=value, as in ifca:k=4")
        parameters[key.strip()] = value_of(value)
    return parameters


def spelled_out(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which names with parameters became names and their parameters.

    A method's training settings go to ``[train]``.

    >>> spelled_out({"method": {"name": "ifca:k=4"}, "train": {"lr": 0.1}})
    {'method': {'name': 'ifca', 'k': 4}, 'train': {'lr': 0.1}}
    """
    spelled = dict(tree)
    for table in NAMED:
        values = tree.get(table)
        text = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(text, str) or ":" not in text or NAMED[table].knows(text):
            continue
        name, *settings = apart(text)
        own = dict(values)  # type: ignore[arg-type]
        own["name"] = name
        for key, value in parameters_in(settings, text, f"{table}.name =").items():
            if table == "method" and key.startswith("train."):
                leaf = key.removeprefix("train.")
                spelled["train"] = {**(spelled.get("train") or {}), leaf: value}
                continue
            if own.setdefault(key, value) != value:
                raise ConfigError(f"{table}.name = {text}: {key} is given twice")
        spelled[table] = own
    return spelled
