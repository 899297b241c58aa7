"""The methods by name. ``@method`` registers one, in a module here or in a plug-in package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, Literal

from coterie.compose.grouped import combined
from coterie.compose.layerwise import layer_wise
from coterie.core.method import Method, Source, exclusive_sets, method
from coterie.errors import ConfigError, unknown
from coterie.lazy import attach
from coterie.methods.known_groups import with_groups_read
from coterie.registry import METHODS, is_place

attach(__name__, {name.replace("-", "_"): row["module"] for name, row in METHODS.index.items()})


def find(name: str) -> Callable[..., Method]:
    """The factory of a method: built in, your own, or from a plug-in."""
    factory = METHODS.find(name)
    plain = inspect.isfunction(factory) and not hasattr(factory, "makes")
    return method(factory) if plain else factory


def parts_of(name: str) -> list[str]:
    """The names in a combination.

    >>> parts_of("ifca+ditto"), parts_of("fedavg")
    (['ifca', 'ditto'], ['fedavg'])
    """
    return [name] if name in METHODS else name.split("+")


def short(name: str) -> str:
    """The display name of a method: its name, or its function's name if it is given by location.

    >>> short("fedavg"), short("/home/me/mine.py:my_method")
    ('fedavg', 'my-method')
    """
    return name.rpartition(":")[2].replace("_", "-") if is_place(name) else name


def excluded_by(name: str, parameter: str) -> set[str]:
    """The parameters of a method, or of a combination, that cannot be combined with this one.

    >>> excluded_by("fedclust", "threshold"), excluded_by("fedclust", "linkage")
    ({'clusters'}, set())
    """
    factories = [find(part) for part in parts_of(name) if METHODS.knows(part)]
    declared = [names for factory in factories for names in exclusive_sets(factory)]
    return {other for names in declared if parameter in names for other in names} - {parameter}


def make(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    layer_interval: int = 1,
    layer_share: float | Literal["auto"] = "auto",
) -> Method:
    """Build a method from its name and parameters.

    Names joined by ``+`` combine parts of several methods into one. Each parameter is passed to the
    method that has it; if two have it, write it with the method's name, as in ``ifca.k``. With
    ``layer_interval`` above 1, layers that differ little are averaged only every so many rounds.

    >>> make("fedprox", {"mu": 0.01}).name
    'fedprox'
    >>> make("ifca+fedper", {"ifca.k": 3, "fedper.k": 1}).name
    'ifca+fedper'
    """
    joined = len(parts_of(name)) > 1
    built = join(name, parameters or {}) if joined else find(name)(**(parameters or {}))
    return layer_wise(built, layer_interval, layer_share) if layer_interval > 1 else built


def join(name: str, parameters: Mapping[str, Any]) -> Method:
    """Build a combination from the methods in ``name``, which are joined by ``+``."""
    parameters = with_groups_read(name, parameters)
    names = parts_of(name)
    for part in names:
        if not part or names.count(part) > 1:
            raise ConfigError(f"method {name}: write each part once, as in ifca+ditto")
    factories = {short(part): find(part) for part in names}
    title = "+".join(factories)
    by_part = shared_out(title, factories, parameters)
    joint = combined(title, {part: make(**by_part[part]) for part, make in factories.items()})
    return replace(joint, source=Source(__name__, "join", {"name": name, "parameters": parameters}))


def shared_out(
    name: str, factories: Mapping[str, Callable[..., Method]], parameters: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The parameters of each part: those written ``part.key``, and those that only it has."""
    by_part: dict[str, dict[str, Any]] = {part: {} for part in factories}
    title = f"method {name}"
    keys_of = {part: list(signature(f).parameters) for part, f in factories.items()}
    for key, value in parameters.items():
        part, dot, name_in_part = key.partition(".")
        if part in by_part and (dot or isinstance(value, Mapping)):
            by_part[part] |= {name_in_part: value} if dot else dict(value)
            continue
        owners = [p for p, keys in keys_of.items() if key in keys]
        if not owners:
            every = [k for keys in keys_of.values() for k in keys]
            raise ConfigError(unknown(f"parameter of {title}", key, every or ["(it takes none)"]))
        if len(owners) > 1:
            ways = " or ".join(f"{p}.{key}" for p in owners)
            raise ConfigError(f"{title}: two parts have the parameter {key}: write {ways}")
        by_part[owners[0]][key] = value
    return by_part
