"""The answer to the question about groups: on the terminal, as a card, and as a page."""

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
from coterie.report.words import count, seconds

if TYPE_CHECKING:
    from coterie.experiment.find_groups import FoundGroups

_NUMBERS = 8  # of groups, that the table has at least
_ERROR = "error / one mean's"
_NAMED = 12  # clients of a group that a table names
_PICTURES = ("evidence", "client-map", "verdict", "similarity", "distances-by-layer", "labels")


@dataclass(frozen=True)
class Sheet:
    """A table, wherever it is shown: a title, headings, and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheets(found: FoundGroups) -> list[Sheet]:
    """All tables of an answer that have rows."""
    made = [groups_sheet(found), between_sheet(found), numbers_sheet(found), kinds_sheet(found)]
    return [sheet for sheet in made if sheet.rows]


def groups_sheet(found: FoundGroups) -> Sheet:
    """Each group with its clients, and how certain it is."""
    rows = []
    for group, members in found.members.items():
        sure = [found.certainty[c] for c in members if c in found.certainty]
        mean = f"{sum(sure) / len(sure):.2f}" if sure else "–"
        named = _listed([found.names[c] for c in members])
        rows.append([str(group), str(len(members)), mean, f"{min(sure, default=0):.2f}", named])
    columns = ("group", "clients", "certainty, mean", "lowest", "who")
    return Sheet("Groups", columns, rows)


def between_sheet(found: FoundGroups) -> Sheet:
    """The clients that are nearer to another group than to their own."""
    rows = [
        [found.names[c], str(found.groups[c]), f"{found.certainty[c]:.2f}"] for c in found.between
    ]
    return Sheet("Clients between two groups", ("client", "group", "certainty"), rows)


def numbers_sheet(found: FoundGroups) -> Sheet:
    """The numbers of groups that were compared, with their errors."""
    told = found.evidence
    one, chosen = told["errors"].get("1", 0.0), told["groups"]
    rows = []
    for k, error in told["errors"].items() if one else ():
        if int(k) > max(_NUMBERS, chosen + 2):
            break
        kappa = f"{told['kappa'][k]:.2f}" if k in told["kappa"] else "–"
        deviation = f"{told['deviations'][k] / one:.3f}"
        mark = " (chosen)" if int(k) == chosen else ""
        rows.append([f"{k}{mark}", f"{error / one:.3f}", deviation, kappa])
    columns = ("groups", _ERROR, "±", "κ")
    return Sheet("Held-out error by number of groups", columns, rows)


def kinds_sheet(found: FoundGroups) -> Sheet:
    """What each representation finds, where all were compared."""
    rows = []
    for by, told in found.representations.items():
        if "impossible" in told:
            rows.append([by, "–", "–", "–", "–", told["impossible"]])
            continue
        k = told["groups"]
        kappa = f"{told['kappa'][str(k)]:.2f}" if k > 1 else "–"
        note = "" if told["enough"] else told["why"].partition(":")[0]
        error = f"{1 - told['explained']:.3f}"
        rows.append([by, str(k), error, kappa, f"{told['agreement']:.2f}", note])
    columns = ["compared by", "groups", _ERROR, "κ", "agreement", "remark"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Sheet("What each representation finds", columns, rows)


def cost_line(found: FoundGroups) -> str:
    """What the answer took."""
    cost = found.cost
    rounds = (
        f"; for the trial {count(cost['rounds'], 'round')} of training, and a copy for each client "
        f"that trained for at least {found.trial.get('steps', 0)} steps"
        if cost["rounds"]
        else ""
    )
    return (
        f"{size(cost['bytes']['down'])} down, {size(cost['bytes']['up'])} up; "
        f"{cost['samples']:,} samples gone through by all clients to compare them{rounds}; "
        f"{seconds(cost['seconds'])}"
    )


def compared_by(found: FoundGroups) -> str:
    """What clients were compared by, in a sentence."""
    told = found.evidence
    how = f"Clients were compared by {_BY[told['by']]}"
    how += f" after {told['steps']} local steps" if "steps" in told else ""
    if "fallback" in told:
        how += f"; by the final layer alone, {told['fallback']}"
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


def print_groups(out: Console, found: FoundGroups) -> None:
    """The verdict, the tables, what it cost, and what was exposed."""
    out.print(f"[bold]{escape(found.verdict)}[/]", highlight=False, soft_wrap=True)
    for line in [*([found.meaning] if found.meaning else []), compared_by(found), *found.advice]:
        out.print(escape(line), highlight=False, soft_wrap=True)
    for sheet in sheets(found):
        out.print(_as_rich(sheet))
    lines = {"cost": [cost_line(found)], "exposed": list(found.exposure)}
    for title, texts in lines.items():
        for number, line in enumerate(texts):
            head = " " * 7 if number else f"[bold]{title:>7}[/]"
            out.print(f"{head}  {escape(line)}", highlight=False, soft_wrap=True)


def _as_rich(sheet: Sheet) -> Table:
    shown = Table(title=escape(sheet.title), title_justify="left")
    for column in sheet.columns:
        left = column in ("client", "compared by", "who", "remark")
        shown.add_column(escape(column), justify="left" if left else "right")
    for row in sheet.rows:
        shown.add_row(*map(escape, row))
    return shown


# --- a notebook, and a page ---------------------------------------------------------------------


def card(found: FoundGroups) -> str:
    """The verdict and the groups as a small card of HTML, without scripts."""
    sheet = groups_sheet(found)
    sentences = " ".join([found.meaning, compared_by(found), *found.advice]).strip()
    return render(
        "card/groups.html",
        verdict=found.verdict,
        sentences=sentences,
        cost=cost_line(found),
        columns=sheet.columns,
        rows=sheet.rows,
    )


def page(found: FoundGroups, title: str = "Groups of clients") -> str:
    """A self-contained page with the verdict, the tables and the pictures."""
    reading = found._read()
    problems: list[str] = []
    names = bidirectional(reading.names)
    drawn = [d for d in catalogue.pictures(reading, problems) if d.name in _PICTURES]
    drawn.sort(key=lambda d: _PICTURES.index(d.name))
    said = [found.verdict, *([found.meaning] if found.meaning else []), compared_by(found)]
    blocks = [Block("verdict", words([*said, *found.advice], "verdict", names))]
    blocks += [_table(f"table-{i}", sheet) for i, sheet in enumerate(sheets(found))]
    blocks += picture_blocks(drawn, "", 2, names, problems)
    html = render("groups/cost.html", cost=cost_line(found), exposure=found.exposure)
    blocks.append(Block("cost", html))
    return document(title, blocks)


def _table(id: str, sheet: Sheet) -> Block:
    html = render(
        "table.html",
        id=id,
        title="",
        caption=sheet.title,
        columns=sheet.columns,
        rows=sheet.rows,
        sortable=False,
        numbers=None,
    )
    return Block(id, html)
