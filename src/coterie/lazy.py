"""Lazy imports: names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A package whose names are imported from their modules on first use."""

    def __getattr__(self, name: str) -> Any:
        module_of_name: Mapping[str, str] = vars(self)["__module_of_name__"]
        if name in module_of_name:
            value = getattr(importlib.import_module(module_of_name[name]), name)
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
        # Importing a module such as coterie.run must not replace the public name run, a function.
        if not (isinstance(value, ModuleType) and name in vars(self)["__module_of_name__"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["__module_of_name__"]})


def attach(package: str, module_of_name: Mapping[str, str]) -> None:
    """Give a package lazily imported names, each from the given module.

    These names take precedence over modules of the package with the same name.
    """
    module = sys.modules[package]
    vars(module)["__module_of_name__"] = dict(module_of_name)
    module.__class__ = _Lazy


def named(path: str) -> Any:
    """Import ``package.module:name``, for callers that must not depend on the package.

    >>> named("fractions:Fraction")(1, 2)
    Fraction(1, 2)
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
