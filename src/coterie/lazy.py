"""Names that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A package that knows in which module each of its names is."""

    def __getattr__(self, name: str) -> Any:
        homes: Mapping[str, str] = vars(self)["__homes__"]
        if name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        elif name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            value = self.__submodule(name)
        vars(self)[name] = value
        return value

    def __submodule(self, name: str) -> ModuleType:
        path = f"{self.__name__}.{name}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module coterie.run binds it to the name run, which means the function.
        if not (isinstance(value, ModuleType) and name in vars(self)["__homes__"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["__homes__"]})


def attach(package: str, homes: Mapping[str, str]) -> None:
    """Let a package have these names, each imported from its module when it is first asked for.

    A name means what its module has, even where the package has a module of the same name.
    """
    module = sys.modules[package]
    vars(module)["__homes__"] = dict(homes)
    module.__class__ = _Lazy


def named(place: str) -> Any:
    """What is called ``package.module:name``, for where the package is not to be known.

    >>> named("fractions:Fraction")(1, 2)
    Fraction(1, 2)
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
