"""Jinja templates of the report and the live page: they hold the markup, and escape every value.

Python prepares plain values; the templates are in ``templates``. A name that a template uses and
that was not passed to it is an error.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_LONG = 30  # a row's name with more letters may take several lines
# Characters that are written from right to left, or change the direction of the text after them.
_BIDIRECTIONAL = ("R", "AL", "RLE", "RLO", "RLI", "LRE", "LRO", "LRI", "FSI", "PDF", "PDI")


def render(template: str, /, **values: Any) -> Markup:
    """A template from ``templates``, filled in with these values."""
    return Markup(_environment().get_template(template).render(values).strip())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("coterie.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "cell": _as_cell,
        "isolated": _split_at,
        "safe_json": safe_json,
        "to_dict": dict,
    }
    return environment


def bidirectional(names: Iterable[str]) -> list[str]:
    """The names that change the direction in which the text around them is written.

    >>> bidirectional(["ann", "\u202egpj.exe"]) == ["\u202egpj.exe"]
    True
    """
    return [n for n in names if any(unicodedata.bidirectional(c) in _BIDIRECTIONAL for c in n)]


def _split_at(text: str, names: Sequence[str]) -> list[tuple[str, bool]]:
    """The parts of a text, and whether each is one of these names.

    >>> _split_at("a < b", ["b"])
    [('a < ', False), ('b', True)]
    """
    present = sorted((n for n in set(names) if n and n in text), key=len, reverse=True)
    if not present:
        return [(text, False)]
    parts = re.split(f"({'|'.join(map(re.escape, present))})", text)
    return [(part, part in present) for part in parts if part]


def safe_json(text: str) -> Markup:
    r"""JSON text that can stand inside a script element: markup is written as JSON's own escapes.

    >>> print(safe_json('{"name":"</script>"}'))
    {"name":"\u003c/script\u003e"}
    """
    for character in "<>&\u2028\u2029":
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@dataclass(frozen=True)
class HtmlCell:
    """A cell of a table: its text, what it is sorted by, and whether it is the best of its column.

    ``sort`` is a number or text; rows without one come last. ``link`` is the address that the
    text leads to. ``best`` is shown to be, ``highest`` is not. ``swatch`` is the CSS colour of what
    the row is about, ``note`` follows the text, and ``hint`` explains the cell.
    """

    shown: Any
    sort: Any = None
    best: bool = False
    link: str | None = None
    highest: bool = False
    swatch: str = ""
    note: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """The text, or a dash where there is none."""
        return "–" if self.shown is None else str(self.shown)

    def hinted(self, hint: str) -> HtmlCell:
        """The same with an explanation."""
        return replace(self, hint=hint)

    def classes(self, is_first: bool, is_number: bool) -> str:
        """The style classes of the cell; the first one of a row names it."""
        long = is_first and len(str(self.sort or self.text)) > _LONG
        return " ".join(["number"] * is_number + ["best"] * self.best + ["long"] * long)


def _as_cell(value: Any) -> HtmlCell:
    return value if isinstance(value, HtmlCell) else HtmlCell(value)
