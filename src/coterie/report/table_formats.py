"""A table in no format yet, and its forms for the terminal, Markdown, LaTeX and HTML.

They are written by hand: pandas is an extra, and its ``to_markdown`` and ``to_latex`` have neither
blocks of rows nor marks of the best, so that most of this would remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coterie.report.rendering import render
from coterie.results.differences import EQUAL, OPEN, UNTESTED
from coterie.results.seeds import BEST, HIGHEST, UNTOLD

_AFTER = {EQUAL: "=", OPEN: "~", UNTESTED: "?"}
_SIGNS = {BEST: "*", HIGHEST: "^", **_AFTER}  # visible without colours, too
_WORDS = {BEST: "bold", HIGHEST: "italic", **_AFTER}  # in Markdown and HTML
_TEX_WORDS = {**_WORDS, EQUAL: "underlined"}


@dataclass(frozen=True)
class TableColumn:
    """A title (in lines, for narrow tables), a key of rows, and the format of a value."""

    title: str
    key: str
    show: Callable[[Any], str]
    best: bool = False  # whether the best of it is marked

    @property
    def name(self) -> str:
        """The title in one line."""
        return self.title.replace("-\n", "").replace("/\n", "/").replace("\n", " ")


@dataclass(frozen=True)
class TableCell:
    """A text, and whether it is the best of its column, or may be.

    ``sign`` follows the text and is explained in a note.
    """

    text: str
    mark: str = UNTOLD
    sign: str = ""


@dataclass(frozen=True)
class TableBlock:
    """The rows of one setting: a title, and the cells of each row."""

    title: str
    rows: Sequence[tuple[str, Sequence[TableCell]]]


@dataclass(frozen=True)
class Sheet:
    """A table in no format yet. ``caption`` explains its rows; ``notes`` stand below.

    ``legend`` explains the marks, ``order`` has the keys of columns, the most important first;
    columns that do not fit are in the file ``kept``.
    """

    title: str
    columns: Sequence[TableColumn]
    blocks: Sequence[TableBlock]
    caption: str = ""
    notes: Sequence[str] = ()
    legend: Sequence[tuple[str, str]] = ()
    order: Sequence[str] = ()
    kept: str = "comparison.csv"


def notes_of(sheet: Sheet, words: Mapping[str, str] = _SIGNS) -> list[str]:
    """The notes below: the meaning of the marks, in the words of a format, and all others."""
    meanings = _meanings(sheet, words)
    return ["; ".join(meanings), *sheet.notes] if meanings else list(sheet.notes)


def _meanings(sheet: Sheet, words: Mapping[str, str]) -> list[str]:
    return [f"{words[mark]}{':' * words[mark].isalpha()} {text}" for mark, text in sheet.legend]


def as_rich(sheet: Sheet) -> Fitted:
    """The table for a terminal: marks are signs, the best is bold."""
    return Fitted(sheet)


class Fitted:
    """A table that leaves out columns that do not fit, and names them."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._rows = [row for block in sheet.blocks for row in block.rows]
        every = range(len(sheet.columns))
        self._signed = [max((len(_signs(c[i])) for _, c in self._rows), default=0) for i in every]
        self._wide = [
            max(
                *map(len, column.title.split("\n")),
                *(len(_tight(c[i])) + self._signed[i] for _, c in self._rows),
            )
            for i, column in enumerate(sheet.columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet = self.sheet
        name = max(map(len, ("method", *(name for name, _ in self._rows))))
        name = min(
            name, max(len("method"), options.max_width // 2)
        )  # longer names take several lines
        shown = self._fitting(options.max_width - name)
        yield Text(sheet.title, style="italic")
        if not sheet.blocks[0].title:
            yield self._table(self._rows, name, shown, header=True)
        else:
            yield self._table([], name, shown, header=True)
            for block in sheet.blocks:
                yield Text(block.title, style="italic")
                yield self._table(block.rows, name, shown, header=False)
        if sheet.caption:
            yield Text(sheet.caption, style="dim italic")
        missing = [c.name for i, c in enumerate(sheet.columns) if i not in shown]
        if missing:
            yield Text(f"no room for: {', '.join(missing)} (they are in {sheet.kept})", style="dim")

    def _fitting(self, room: int) -> list[int]:
        """The positions of the columns that fit: the least important are left out first."""
        order = list(self.sheet.order)
        places = sorted(
            range(len(self.sheet.columns)),
            key=lambda i: order.index(k) if (k := self.sheet.columns[i].key) in order else 99,
        )
        while len(places) > 1 and sum(self._wide[i] + _GAP for i in places) > room:
            places.pop()
        return sorted(places)

    def _table(
        self,
        rows: Sequence[tuple[str, Sequence[TableCell]]],
        name: int,
        shown: list[int],
        header: bool,
    ) -> Table:
        table = Table(box=None, padding=(0, _GAP), collapse_padding=True, pad_edge=False)
        table.show_header = header
        table.add_column("method", style="bold", overflow="fold", min_width=name, max_width=name)
        for i in shown:
            table.add_column(
                self.sheet.columns[i].title,
                justify="right",
                no_wrap=True,
                min_width=self._wide[i],
            )
        for title, cells in rows:
            table.add_row(escape(title), *(_marked(cells[i], self._signed[i]) for i in shown))
        return table


_GAP = 1  # between columns


def _tight(cell: TableCell) -> str:
    return cell.text.replace(" ± ", "±")


def _signs(cell: TableCell) -> str:
    return cell.sign + _SIGNS.get(cell.mark, "")


def _marked(cell: TableCell, signed: int) -> str:
    text = escape(_tight(cell))
    style = {BEST: "bold green", HIGHEST: "bold"}.get(cell.mark)
    text = f"[{style}]{text}[/]" if style else text
    return text + _signs(cell).ljust(signed)


def as_markdown(sheet: Sheet) -> str:
    """The table as Markdown, one for each block: the best in bold, ties with a sign."""
    lines = [_plain(sheet.title), ""]
    titles = ["method", *(column.name for column in sheet.columns)]
    for block in sheet.blocks:
        if block.title:
            lines += [f"**{_plain(block.title)}**", ""]
        lines.append(f"| {' | '.join(map(_plain, titles))} |")
        lines.append("|---|" + "---:|" * len(sheet.columns))
        for name, cells in block.rows:
            stars = [{BEST: "**", HIGHEST: "*"}.get(c.mark, "") for c in cells]
            shown = [
                f"{star}{_plain(c.text)}{star}{_after(c)}"
                for star, c in zip(stars, cells, strict=True)
            ]
            lines.append(f"| {' | '.join([_plain(name), *shown])} |")
        lines.append("")
    notes = filter(None, (sheet.caption, *notes_of(sheet, _WORDS)))
    lines += [f"- {_plain(note)}" for note in notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def _after(cell: TableCell) -> str:
    """The signs after a text."""
    return cell.sign + (f" {_AFTER[cell.mark]}" if cell.mark in _AFTER else "")


def _plain(text: str) -> str:
    """Text escaped for Markdown."""
    text = " ".join(text.split())
    for sign in "\\`*_|[]<>":
        text = text.replace(sign, f"\\{sign}")
    return text


_TEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
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
    r"""Text escaped for LaTeX.

    >>> print(tex("50 % of a_b & 1 ± 2"))
    50 \% of a\_b \& 1 $\pm$ 2
    """
    return "".join(_TEX.get(sign, sign) for sign in " ".join(text.split()))


def as_latex(sheet: Sheet) -> str:
    """The table as LaTeX with booktabs: the best in bold, the highest in italics.

    The meaning of the marks is text below the table; what else stands below it are comments.
    """
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
    if meanings := "; ".join(_meanings(sheet, _TEX_WORDS)):
        lines.append(rf"\par\smallskip{{\footnotesize {tex(meanings)}\par}}")
    notes = filter(None, (sheet.caption, *sheet.notes))
    return "\n".join([*lines, *(f"% {' '.join(note.split())}" for note in notes)]) + "\n"


def _tex_cell(cell: TableCell) -> str:
    text = tex(cell.text)
    if cell.text.startswith("-"):
        text = f"$-${text[1:]}"
    marked = {
        BEST: rf"\textbf{{{text}}}",
        HIGHEST: rf"\emph{{{text}}}",
        EQUAL: rf"\underline{{{text}}}",
        OPEN: rf"{text}$\sim$",
        UNTESTED: f"{text}?",
    }
    return marked.get(cell.mark, text) + tex(cell.sign)


def as_html(sheet: Sheet) -> str:
    """The table as HTML, for a notebook."""
    notes = filter(None, (sheet.caption, *notes_of(sheet, _WORDS)))
    tags = {BEST: "b", HIGHEST: "i"}
    return render("comparison.html", sheet=sheet, tags=tags, after=_after, notes=notes)
