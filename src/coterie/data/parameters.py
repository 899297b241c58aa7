"""Calling a registered function with a user's parameters, or saying which one is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from coterie.errors import ConfigError, unknown

Registered = TypeVar("Registered")


def pick(registry: Mapping[str, Registered], what: str, name: str) -> Registered:
    """The registry's entry of that name, or a ``ConfigError`` that offers the closest one.

    >>> pick({"iid": 1}, "partition", "iid")
    1
    """
    if name not in registry:
        raise ConfigError(unknown(what, name, registry))
    return registry[name]


def check_parameters(
    function: Callable[..., Any],
    what: str,
    params: Mapping[str, Any],
    given: Collection[str] = (),
) -> None:
    """Refuse parameters that ``function`` does not take and ask for those it cannot do without.

    ``given`` are the arguments that the caller fills in by itself.
    """
    takes = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given
    }
    for name in params:
        if name not in takes:
            raise ConfigError(
                unknown(f"parameter of {what}", name, takes)
                if takes
                else f"{what} takes no parameters, but '{name}' was given: remove it"
            )
    for name, parameter in takes.items():
        if parameter.default is inspect.Parameter.empty and name not in params:
            raise ConfigError(f"{what} needs the parameter '{name}'")
