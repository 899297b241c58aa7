"""The result of ``find_groups``: on the terminal, as a card, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie.report import catalogue
from coterie.report.page import Block, document, picture_blocks, words
from coterie.report.rendering import bidirectional, render
from coterie.report.tables import size
from coterie.report.words import count, duration

if TYPE_CHECKING:
    from coterie.experiment.find_groups import FoundGroups

_NUMBERS = 8  # of groups, up to which the table goes at least
_ERROR = "error / one mean's"
_NAMED = 12  # clients of a group that a table names
_PICTURES = ("evidence", "client-map", "verdict", "similarity", "distances-by-layer", "labels")


@dataclass(frozen=True)
class TextTable:
    """A table in no format yet: a title, headings, and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_tables(result: FoundGroups) -> list[TextTable]:
    """All tables of a result that have rows."""
    tables = [
        groups_table(result),
        between_table(result),
        numbers_table(result),
        representations_table(result),
    ]
    return [table for table in tables if table.rows]


def groups_table(result: FoundGroups) -> TextTable:
    """Each group with its clients and their certainty."""
    rows = []
    for group, members in result.members.items():
        sure = [result.certainty[c] for c in members if c in result.certainty]
        mean = f"{sum(sure) / len(sure):.2f}" if sure else "–"
        named = _listed([result.names[c] for c in members])
        rows.append([str(group), str(len(members)), mean, f"{min(sure, default=0):.2f}", named])
    columns = ("group", "clients", "certainty, mean", "lowest", "who")
    return TextTable("Groups", columns, rows)


def between_table(result: FoundGroups) -> TextTable:
    """The clients that are closer to another group than to their own."""
    rows = [
        [result.names[c], str(result.groups[c]), f"{result.certainty[c]:.2f}"]
        for c in result.between
    ]
    return TextTable("Clients between two groups", ("client", "group", "certainty"), rows)


def numbers_table(result: FoundGroups) -> TextTable:
    """The numbers of groups that were compared, with their errors."""
    evidence = result.evidence
    error_of_one, chosen = evidence["errors"].get("1", 0.0), evidence["groups"]
    rows = []
    for k, error in evidence["errors"].items() if error_of_one else ():
        if int(k) > max(_NUMBERS, chosen + 2):
            break
        kappa = f"{evidence['kappa'][k]:.2f}" if k in evidence["kappa"] else "–"
        deviation = f"{evidence['deviations'][k] / error_of_one:.3f}"
        mark = " (chosen)" if int(k) == chosen else ""
        rows.append([f"{k}{mark}", f"{error / error_of_one:.3f}", deviation, kappa])
    columns = ("groups", _ERROR, "±", "κ")
    return TextTable("Held-out error by number of groups", columns, rows)


def representations_table(result: FoundGroups) -> TextTable:
    """What each representation finds, where all were compared."""
    rows = []
    for by, kind in result.representations.items():
        if "impossible" in kind:
            rows.append([by, "–", "–", "–", "–", kind["impossible"]])
            continue
        k = kind["groups"]
        kappa = f"{kind['kappa'][str(k)]:.2f}" if k > 1 else "–"
        note = "" if kind["enough"] else kind["why"].partition(":")[0]
        error = f"{1 - kind['explained']:.3f}"
        rows.append([by, str(k), error, kappa, f"{kind['agreement']:.2f}", note])
    columns = ["compared by", "groups", _ERROR, "κ", "agreement", "remark"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return TextTable("What each representation finds", columns, rows)


def cost_line(result: FoundGroups) -> str:
    """The cost of the result, in a sentence."""
    cost = result.cost
    rounds = (
        f"; for the trial {count(cost['rounds'], 'round')} of training, and a copy for each client "
        f"that trained for at least {result.trial.get('steps', 0)} steps"
        if cost["rounds"]
        else ""
    )
    return (
        f"{size(cost['bytes']['down'])} down, {size(cost['bytes']['up'])} up; "
        f"{cost['samples']:,} samples processed by all clients to compare them{rounds}; "
        f"{duration(cost['seconds'])}"
    )


def compared_by(result: FoundGroups) -> str:
    """What the clients were compared by, in a sentence."""
    evidence = result.evidence
    how = f"Clients were compared by {_BY[evidence['by']]}"
    how += f" after {evidence['steps']} local steps" if "steps" in evidence else ""
    if "fallback" in evidence:
        how += f"; by the final layer alone, {evidence['fallback']}"
    return f"{how}."


_BY = {
    "final-layer": "how the final layer changed",
    "model": "how the whole model changed",
    "gradient": "the gradient at the start",
    "labels": "the frequencies of their labels",
    "data": "the subspace of their inputs",
}


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# --- the terminal -------------------------------------------------------------------------------


def print_groups(out: Console, result: FoundGroups) -> None:
    """Print the verdict, the tables, the cost, and what was exposed."""
    out.print(f"[bold]{escape(result.verdict)}[/]", highlight=False, soft_wrap=True)
    for line in [
        *([result.meaning] if result.meaning else []),
        compared_by(result),
        *result.advice,
    ]:
        out.print(escape(line), highlight=False, soft_wrap=True)
    for table in text_tables(result):
        out.print(_as_rich(table))
    lines = {"cost": [cost_line(result)], "exposed": list(result.exposure)}
    for title, texts in lines.items():
        for number, line in enumerate(texts):
            head = " " * 7 if number else f"[bold]{title:>7}[/]"
            out.print(f"{head}  {escape(line)}", highlight=False, soft_wrap=True)


def _as_rich(table: TextTable) -> Table:
    shown = Table(title=escape(table.title), title_justify="left")
    for column in table.columns:
        left = column in ("client", "compared by", "who", "remark")
        shown.add_column(escape(column), justify="left" if left else "right")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown


# --- a notebook, and a page ---------------------------------------------------------------------


def card(result: FoundGroups) -> str:
    """The verdict and the groups as a small HTML card, without scripts."""
    table = groups_table(result)
    sentences = " ".join([result.meaning, compared_by(result), *result.advice]).strip()
    return render(
        "card/groups.html",
        verdict=result.verdict,
        sentences=sentences,
        cost=cost_line(result),
        columns=table.columns,
        rows=table.rows,
    )


def page(result: FoundGroups, title: str = "Groups of clients") -> str:
    """A self-contained page with the verdict, the tables and the pictures."""
    reading = result._read()
    problems: list[str] = []
    names = bidirectional(reading.names)
    drawn = [d for d in catalogue.pictures(reading, problems) if d.name in _PICTURES]
    drawn.sort(key=lambda d: _PICTURES.index(d.name))
    sentences = [result.verdict, *([result.meaning] if result.meaning else []), compared_by(result)]
    blocks = [Block("verdict", words([*sentences, *result.advice], "verdict", names))]
    blocks += [_table(f"table-{i}", table) for i, table in enumerate(text_tables(result))]
    blocks += picture_blocks(drawn, "", 2, names, problems)
    html = render("groups/cost.html", cost=cost_line(result), exposure=result.exposure)
    blocks.append(Block("cost", html))
    return document(title, blocks)


def _table(id: str, table: TextTable) -> Block:
    html = render(
        "table.html",
        id=id,
        title="",
        caption=table.title,
        columns=table.columns,
        rows=table.rows,
        sortable=False,
        numbers=None,
    )
    return Block(id, html)
