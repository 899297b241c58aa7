"""The keys of a configuration as the command line and the documentation show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coterie.core.schema import Config, fields_of


@dataclass(frozen=True)
class Key:
    """A declared key of the configuration."""

    table: str
    name: str
    info: FieldInfo

    @property
    def path(self) -> str:
        """The key as written after ``--set``."""
        return f"{self.table}.{self.name}"

    @property
    def meaning(self) -> str:
        """The meaning of the key, in Markdown."""
        return self.info.description or ""

    @property
    def help(self) -> str:
        """The first sentence of the meaning, without links, and the default."""
        first = re.split(r"(?<=\.)\s+(?=[\"`A-Z\[])", self.meaning, maxsplit=1)[0]
        sentence = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first).rstrip(".")
        default = self.info.default
        if default in (None, "") or isinstance(default, bool) or self.info.default_factory:
            return f"{sentence}."
        start = f"{sentence[:-1]}; " if sentence.endswith(")") else f"{sentence} ("
        return f"{start}default: {default})."

    @property
    def flag(self) -> str:
        """The option of the command line, if there is one."""
        return str(self._extra("flag"))

    @property
    def parameter(self) -> str:
        """The name of the option's value in commands."""
        return self.flag.strip("-").replace("-", "_")

    @property
    def env(self) -> str:
        """The environment variable with the default of the option, if there is one."""
        return str(self._extra("env"))

    @property
    def option_type(self) -> type:
        """The type that the option's value is parsed as: text if there are several types."""
        types = {_plain(choice) for choice in _choices(self.info.annotation)}
        (only,) = types if len(types) == 1 else (str,)
        return only if only in (int, float, bool) else str

    @property
    def default(self) -> str:
        """The default as written in TOML, in Markdown."""
        shown = str(self._extra("shown"))
        value = self.info.get_default(call_default_factory=True)
        return shown or ("none" if value is None else f"`{_toml(value)}`")

    @property
    def values(self) -> str:
        """The permitted values, with their bounds, in words."""
        bounds = _bounds(self.info.metadata)
        words = [_in_words(kind, bounds) for kind in _choices(self.info.annotation)]
        if {"whole number", "number"} <= {k.removesuffix(bounds) for k in words}:
            words = [f"number{bounds}"]
        return " or ".join(words)

    def _extra(self, name: str) -> Any:
        extra = self.info.json_schema_extra
        return extra.get(name, "") if isinstance(extra, dict) else ""


def keys(config: type[BaseModel] = Config) -> Iterator[Key]:
    """All keys, by table.

    >>> [key.path for key in keys() if key.table == "wire"]
    ['wire.up', 'wire.down', 'wire.layers', 'wire.down_layers']
    """
    for table, info in config.model_fields.items():
        for name, field in fields_of(info.annotation).items():
            yield Key(table, name, field)


def flags(config: type[BaseModel] = Config) -> dict[str, Key]:
    """The keys that are options of the command line, by the names of their values in commands."""
    return {key.parameter: key for key in keys(config) if key.flag}


def _choices(annotation: Any) -> list[Any]:
    """The types that an annotation permits, except None."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _choices(member)]
    return [] if annotation is NoneType else [annotation]


def _plain(kind: Any) -> Any:
    """A type without its bounds; text for a choice among words."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    return str if get_origin(kind) is Literal else kind


_KINDS = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}


def _in_words(kind: Any, bounds: str) -> str:
    if get_origin(kind) is Literal:
        words = [f'`"{word}"`' for word in get_args(kind)]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if get_origin(kind) is Annotated:
        plain, *limits = get_args(kind)
        return _in_words(plain, _bounds(limit for group in limits for limit in group.metadata))
    if kind in (int, float):
        return f"{_KINDS[kind]}{bounds}"
    return _KINDS.get(kind) or {list: "list", dict: "table"}.get(get_origin(kind) or kind, "")


def _bounds(metadata: Any) -> str:
    """Bounds in words, as in " from 1"."""
    limits = dict[str, float]()
    for limit in metadata:
        limits |= {name: getattr(limit, name) for name in _BOUNDS if hasattr(limit, name)}
    words = [f"{_BOUNDS[name]} {value:g}" for name, value in limits.items()]
    return f" {', '.join(words)}" if words else ""


_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below", "multiple_of": "in steps of"}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
