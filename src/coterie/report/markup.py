"""Markup for the report and the live page: whatever is not markup already is escaped."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_LONG = 30  # a name with more letters may take several lines
# Of characters that are written from the right, or turn the direction of what follows them.
_TURNING = ("R", "AL", "RLE", "RLO", "RLI", "LRE", "LRO", "LRI", "FSI", "PDF", "PDI")
_VOID = ("meta", "br", "hr", "input", "col", "link")


class Markup(str):
    """Text that is HTML, and goes into a page as it is."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element: children that are no ``Markup`` are text and escaped, lists are joined.

    Attributes: ``class_`` is ``class``, ``data_value`` is ``data-value``; True has no value, None
    and False are left out.

    >>> print(tag("p", "a < b", tag("br"), None, class_="note", hidden=True, id=None))
    <p class="note" hidden>a &lt; b<br></p>
    """
    inside = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{inside}>")
    return Markup(f"<{name}{inside}>{joined(*children)}</{name}>")


def joined(*children: Any) -> Markup:
    """Children one after the other, as in ``tag``."""
    return Markup("".join(_texts(children)))


def turning(names: Iterable[str]) -> list[str]:
    """Those names that change the direction in which the text around them is written.

    >>> turning(["ann", "\u202egpj.exe"]) == ["\u202egpj.exe"]
    True
    """
    return [n for n in names if any(unicodedata.bidirectional(c) in _TURNING for c in n)]


def isolated(text: str, names: Sequence[str]) -> Markup:
    """Text in which these names do not touch the direction of what is around them.

    >>> print(isolated("a < b", ["b"]))
    a &lt; <bdi>b</bdi>
    """
    found = sorted((n for n in set(names) if n and n in text), key=len, reverse=True)
    if not found:
        return joined(text)
    parts = re.split(f"({'|'.join(map(re.escape, found))})", text)
    return joined([tag("bdi", part) if part in found else part for part in parts])


def _texts(children: Iterable[Any]) -> Iterable[str]:
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str) or not isinstance(child, Iterable):
            yield escape(str(child))
        else:
            yield from _texts(child)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def json_text(tree: Any) -> str:
    """A tree as JSON that may stand inside a script element.

    >>> print(json_text({"name": "</script><!--"}))
    {"name":"\\u003c/script\\u003e\\u003c!--"}
    """
    return safe_json(json.dumps(tree, separators=(",", ":"), ensure_ascii=False, default=str))


def safe_json(text: str) -> str:
    """The same for JSON text: its markup characters are written as JSON's own escapes."""
    for character in "<>&\u2028\u2029":
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def json_script(id: str, text: str) -> Markup:
    """JSON text as data of a page."""
    return tag("script", Markup(safe_json(text)), type="application/json", id=id)


class Cell:
    """A cell of a table: what is shown, what it is sorted by, and whether it stands out.

    ``sort`` is a number or text; numbers that are missing go last.
    """

    def __init__(self, shown: Any, sort: Any = None, best: bool = False) -> None:
        self.shown, self.sort, self.best = shown, sort, best


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    sortable: bool = False,
    numbers: int | None = 1,
    hidden_caption: bool = False,
    id: str | None = None,
) -> Markup:
    """A table in a region that scrolls: the first cell of a row names it.

    Columns from ``numbers`` on are set as numbers, none of them if it is None. ``sortable`` makes
    buttons of the headings.
    """
    first = len(columns) if numbers is None else numbers
    heads = []
    for place, title in enumerate(columns):
        inside: Any = tag("button", title, type="button", class_="sort") if sortable else title
        kind = "number" if place >= first else None
        heads.append(tag("th", inside, scope="col", class_=kind))
    body = []
    for row in rows:
        cells = [_cell(cell, place, place >= first) for place, cell in enumerate(row)]
        body.append(tag("tr", cells))
    inner = tag(
        "table",
        tag("caption", caption, class_="quiet" if hidden_caption else None),
        tag("thead", tag("tr", heads)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", inner, class_="scroll", role="group", tabindex="0", aria_label=caption, id=id)


def _cell(cell: Any, place: int, number: bool) -> Markup:
    known = cell if isinstance(cell, Cell) else Cell(cell)
    shown = "–" if known.shown is None else known.shown
    if known.best:
        shown = joined(tag("strong", shown), tag("span", " (best)", class_="unseen"))
    name = "td" if place else "th"
    long = not place and len(str(known.sort or shown)) > _LONG
    kinds = " ".join(["number"] * number + ["best"] * known.best + ["long"] * long) or None
    scope = None if place else "row"
    return tag(name, shown, scope=scope, class_=kinds, data_sort=known.sort)
