"""Lists of methods, models and other pieces, without importing any of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from coterie.registry import Registry, first_paragraph

# The families of methods, in display order.
FAMILIES = ("global", "personalised", "clustered", "pieces", "other")
Row = Mapping[str, str]


def rows_of(registry: Registry[Any]) -> dict[str, Row]:
    """The pieces of Coterie, and those of installed packages, which are not imported."""
    entries = dict(registry.index)
    for name, point in registry.installed.items():
        entries.setdefault(name, {"about": f"of an installed package: {point.value}"})
    return entries


def listing(title: str, rows: Mapping[str, Row]) -> Table:
    """A table of names with parameters and descriptions."""
    table = Table(title=title)
    table.add_column("name", style="bold")
    table.add_column("parameters")
    table.add_column("what it is")
    for name, row in rows.items():
        table.add_row(escape(name), escape(row.get("parameters", "")), escape(row["about"]))
    return table


def plain_listing(title: str, items: Mapping[str, str]) -> Table:
    """A table of names with descriptions."""
    table = Table(title=title, title_justify="left")
    table.add_column("name", style="bold")
    table.add_column("what it is")
    for name, about in items.items():
        table.add_row(escape(name), escape(about))
    return table


def method_listing(rows: Mapping[str, Row]) -> Table:
    """All methods by family, in one or two lines each."""
    table = Table(title="Methods", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("sees", no_wrap=True)
    table.add_column("what it is")
    for family in FAMILIES:
        members = {n: row for n, row in rows.items() if row.get("family", "other") == family}
        if not members:
            continue
        table.add_row(f"[cyan]{family}[/]", "", "")
        for name, row in members.items():
            about = coloured(_first_sentence(row["about"]))
            table.add_row(f"  {escape(name)}", row.get("sees", "–"), about)
    table.caption = (
        "sees: what the server looks at, single replies (each; not with --secure) or means. "
        "Parameters, rule and reference: coterie methods NAME"
    )
    table.caption_justify = "left"
    return table


def _first_sentence(text: str) -> str:
    """The first sentence of a description, without what stands in brackets.

    >>> _first_sentence("FedAvg of updates (Reisizadeh, 2020). More follows.")
    'FedAvg of updates.'
    """
    first = re.split(r"(?<=[a-z0-9)`])\.\s", text)[0].rstrip(".")
    return re.sub(r"\s*\([^)]*\)", "", first) + "."


def coloured(text: str) -> str:
    """Text with its code in colour."""
    return re.sub(r"``(.+?)``", r"[cyan]\1[/]", escape(text))


def parameters_of(factory: Callable[..., Any], skip: Sequence[str] = ()) -> str:
    """The parameters of a factory with their defaults, on one line."""
    shown = []
    for p in inspect.signature(factory).parameters.values():
        if p.name in skip or p.kind is p.VAR_KEYWORD:
            continue
        shown.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return ", ".join(shown)


def row_of(factory: Callable[..., Any], skip: Sequence[str] = ()) -> Row:
    """A row of a list, from a factory's signature and docstring."""
    about = first_paragraph(inspect.getdoc(factory) or "")
    return {"parameters": parameters_of(factory, skip), "about": about}
