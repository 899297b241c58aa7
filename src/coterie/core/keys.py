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
    """A key as it was declared."""

    table: str
    name: str
    info: FieldInfo

    @property
    def path(self) -> str:
        """As it is written behind ``--set``."""
        return f"{self.table}.{self.name}"

    @property
    def meaning(self) -> str:
        """What it means, in Markdown."""
        return self.info.description or ""

    @property
    def help(self) -> str:
        """The first sentence of that, without links, and the default."""
        first = re.split(r"(?<=\.)\s+(?=[\"`A-Z\[])", self.meaning, maxsplit=1)[0]
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first).rstrip(".")
        usual = self.info.default
        if usual in (None, "") or isinstance(usual, bool) or self.info.default_factory:
            return f"{words}."
        before = f"{words[:-1]}; " if words.endswith(")") else f"{words} ("
        return f"{before}default: {usual})."

    @property
    def flag(self) -> str:
        """Its option of the command line, if it has one."""
        return str(self._more("flag"))

    @property
    def parameter(self) -> str:
        """What a command calls the value of that option."""
        return self.flag.strip("-").replace("-", "_")

    @property
    def env(self) -> str:
        """The variable of the environment that may give it."""
        return str(self._more("env"))

    @property
    def option_type(self) -> type:
        """What the value of the option is read as: text where there are several kinds."""
        kinds = {_plain(kind) for kind in _choices(self.info.annotation)}
        (only,) = kinds if len(kinds) == 1 else (str,)
        return only if only in (int, float, bool) else str

    @property
    def default(self) -> str:
        """The default, as TOML has it, in Markdown."""
        shown = str(self._more("shown"))
        usual = self.info.get_default(call_default_factory=True)
        return shown or ("none" if usual is None else f"`{_toml(usual)}`")

    @property
    def values(self) -> str:
        """What it may be, with its bounds, in words."""
        bounds = _bounds(self.info.metadata)
        kinds = [_in_words(kind, bounds) for kind in _choices(self.info.annotation)]
        if {"whole number", "number"} <= {k.removesuffix(bounds) for k in kinds}:
            kinds = [f"number{bounds}"]
        return " or ".join(kinds)

    def _more(self, name: str) -> Any:
        more = self.info.json_schema_extra
        return more.get(name, "") if isinstance(more, dict) else ""


def keys(config: type[BaseModel] = Config) -> Iterator[Key]:
    """All keys, by table.

    >>> [key.path for key in keys() if key.table == "wire"]
    ['wire.up', 'wire.down', 'wire.layers', 'wire.down_layers']
    """
    for table, info in config.model_fields.items():
        for name, field in fields_of(info.annotation).items():
            yield Key(table, name, field)


def flags(config: type[BaseModel] = Config) -> dict[str, Key]:
    """The keys that are options of the command line, by what commands call them."""
    return {key.parameter: key for key in keys(config) if key.flag}


def _choices(annotation: Any) -> list[Any]:
    """The kinds of values that an annotation allows, but for None."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in _choices(each)]
    return [] if annotation is NoneType else [annotation]


def _plain(kind: Any) -> Any:
    """A kind without its bounds; of a choice among words, text."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    return str if get_origin(kind) is Literal else kind


_KINDS = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}


def _in_words(kind: Any, bounds: str) -> str:
    if get_origin(kind) is Literal:
        words = [f'`"{word}"`' for word in get_args(kind)]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if get_origin(kind) is Annotated:
        plain, *more = get_args(kind)
        return _in_words(plain, _bounds(each for one in more for each in one.metadata))
    if kind in (int, float):
        return f"{_KINDS[kind]}{bounds}"
    return _KINDS.get(kind) or {list: "list", dict: "table"}.get(get_origin(kind) or kind, "")


def _bounds(metadata: Any) -> str:
    """Bounds in words, as in ", from 1"."""
    found = dict[str, float]()
    for each in metadata:
        found |= {name: getattr(each, name) for name in _BOUNDS if hasattr(each, name)}
    told = [f"{_BOUNDS[name]} {value:g}" for name, value in found.items()]
    return f" {', '.join(told)}" if told else ""


_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below", "multiple_of": "in steps of"}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
