"""A table in no format yet, and the same for the terminal, as Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coterie.run.pairing import BEST, TIE, UNTOLD


@dataclass(frozen=True)
class Column:
    """A title (lines of it, for narrow tables), a key of rows, how a value is shown."""

    title: str
    key: str
    show: Callable[[Any], str]
    best: bool = False  # whether the best of it is marked

    @property
    def name(self) -> str:
        """The title in one line."""
        return self.title.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class Cell:
    """A text, and whether it is the best of its column, or as good as that."""

    text: str
    mark: str = UNTOLD


@dataclass(frozen=True)
class Block:
    """The rows of one setting: a title, and cells a row."""

    title: str
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Sheet:
    """A table in no format yet. ``caption`` is what the rows need; ``notes`` stand below."""

    title: str
    columns: Sequence[Column]
    blocks: Sequence[Block]
    caption: str = ""
    notes: Sequence[str] = ()


def as_rich(sheet: Sheet) -> Table | Group:
    """For the terminal: the best in bold, ties with a sign; columns of all blocks are as wide."""
    rows = [row for block in sheet.blocks for row in block.rows]
    tied = [any(c[i].mark == TIE for _, c in rows) for i in range(len(sheet.columns))]
    wide = [
        max([*map(len, column.title.split("\n")), *(len(_tight(c[i])) + tied[i] for _, c in rows)])
        for i, column in enumerate(sheet.columns)
    ]
    name = max(map(len, ("method", *(name for name, _ in rows))))

    def table(lines: Sequence[tuple[str, Sequence[Cell]]], header: bool) -> Table:
        made = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
        made.show_header, made.title_justify, made.caption_justify = header, "left", "left"
        made.add_column("method", style="bold", no_wrap=True, min_width=name)
        for column, width in zip(sheet.columns, wide, strict=True):
            made.add_column(column.title, justify="right", no_wrap=True, min_width=width)
        for title, cells in lines:
            signs = ("=" if c.mark == TIE else " " * t for c, t in zip(cells, tied, strict=True))
            shown = [_marked(c, sign) for c, sign in zip(cells, signs, strict=True)]
            made.add_row(escape(title), *shown)
        return made

    first = table([] if sheet.blocks[0].title else rows, header=True)
    if not sheet.blocks[0].title:
        first.title, first.caption = escape(sheet.title), escape(sheet.caption) or None
        return first
    parts: list[Table | Text] = [Text(sheet.title, style="italic"), first]
    for block in sheet.blocks:
        parts += [Text(block.title, style="italic"), table(block.rows, header=False)]
    if sheet.caption:
        parts.append(Text(sheet.caption, style="dim italic"))
    return Group(*parts)


def _tight(cell: Cell) -> str:
    return cell.text.replace(" ± ", "±")


def _marked(cell: Cell, sign: str) -> str:
    text = escape(_tight(cell))
    return (f"[bold green]{text}[/]" if cell.mark == BEST else text) + sign


def as_markdown(sheet: Sheet) -> str:
    """As Markdown: a table for each block; the best in bold, ties with a sign."""
    lines = [_plain(sheet.title), ""]
    titles = ["method", *(column.name for column in sheet.columns)]
    for block in sheet.blocks:
        if block.title:
            lines += [f"**{_plain(block.title)}**", ""]
        lines.append(f"| {' | '.join(map(_plain, titles))} |")
        lines.append("|---|" + "---:|" * len(sheet.columns))
        for name, cells in block.rows:
            shown = [
                f"**{_plain(c.text)}**"
                if c.mark == BEST
                else _plain(c.text) + " =" * (c.mark == TIE)
                for c in cells
            ]
            lines.append(f"| {' | '.join([_plain(name), *shown])} |")
        lines.append("")
    lines += [f"- {_plain(note)}" for note in filter(None, (sheet.caption, *sheet.notes))]
    return "\n".join(lines).rstrip("\n") + "\n"


def _plain(text: str) -> str:
    """Text that means nothing in Markdown."""
    text = " ".join(text.split())
    for sign in "\\`*_|[]<>":
        text = text.replace(sign, f"\\{sign}")
    return text


_TEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "²": r"\textsuperscript{2}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "≤": r"$\leq$",
    "×": r"$\times$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{sign: f"\\{sign}" for sign in "_%&#${}"},
}


def tex(text: str) -> str:
    r"""Text that means nothing in LaTeX.

    >>> print(tex("50 % of a_b & 1 ± 2"))
    50 \% of a\_b \& 1 $\pm$ 2
    """
    return "".join(_TEX.get(sign, sign) for sign in " ".join(text.split()))


def as_latex(sheet: Sheet) -> str:
    """As LaTeX with booktabs: the best in bold, ties underlined."""
    width = len(sheet.columns) + 1
    titles = [r"method", *(tex(column.name) for column in sheet.columns)]
    lines = [
        f"% {' '.join(sheet.title.split())}",
        r"% It needs \usepackage{booktabs}.",
        r"\begin{tabular}{l" + "r" * len(sheet.columns) + "}",
        r"\toprule",
        " & ".join(titles) + r" \\",
    ]
    for block in sheet.blocks:
        lines.append(r"\midrule")
        if block.title:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\emph{{{tex(block.title)}}}}} \\")
        for name, cells in block.rows:
            lines.append(" & ".join([tex(name), *map(_tex_cell, cells)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [
        note.replace("= not significantly", "underlined: not significantly")
        for note in filter(None, (sheet.caption, *sheet.notes))
    ]
    return "\n".join([*lines, *(f"% {' '.join(note.split())}" for note in notes)]) + "\n"


def _tex_cell(cell: Cell) -> str:
    text = tex(cell.text)
    if cell.text.startswith("-"):
        text = f"$-${text[1:]}"
    if cell.mark == BEST:
        return rf"\textbf{{{text}}}"
    return rf"\underline{{{text}}}" if cell.mark == TIE else text


def as_html(sheet: Sheet) -> str:
    """As HTML, for a notebook."""
    titles = "".join(f"<th>{html.escape(c.name)}</th>" for c in sheet.columns)
    lines = [
        f"<p>{html.escape(sheet.title)}</p>",
        f"<table><thead><tr><th>method</th>{titles}</tr></thead><tbody>",
    ]
    for block in sheet.blocks:
        if block.title:
            across = f'<th colspan="{len(sheet.columns) + 1}" style="text-align:left">'
            lines.append(f"<tr>{across}<em>{html.escape(block.title)}</em></th></tr>")
        for name, cells in block.rows:
            shown = "".join(f'<td style="text-align:right">{_html_cell(c)}</td>' for c in cells)
            lines.append(f'<tr><th style="text-align:left">{html.escape(name)}</th>{shown}</tr>')
    lines.append("</tbody></table>")
    lines += [f"<p>{html.escape(n)}</p>" for n in filter(None, (sheet.caption, *sheet.notes))]
    return "\n".join(lines)


def _html_cell(cell: Cell) -> str:
    text = html.escape(cell.text)
    return f"<b>{text}</b>" if cell.mark == BEST else text + " =" * (cell.mark == TIE)
