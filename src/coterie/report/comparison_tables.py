"""The table of a comparison: its columns, its blocks, and what has to be said below.

One run a method is a row of scores; of a sweep each row is a mean ± standard deviation over seeds,
in a block for each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from coterie.report.sheets import Block, Cell, Column, Sheet, as_rich
from coterie.report.tables import figure_of, left_out, paper_notes, score, size
from coterie.run.comparison import Comparison
from coterie.run.pairing import BEST, LEAST_SEEDS, MARKED, UNTOLD
from coterie.run.sweep import place_of, shown

_NONE = "–"
Row = Mapping[str, Any]


def sheet_of(made: Comparison) -> Sheet:
    """The table of a comparison, with all that has to be said below it."""
    if not made.swept:
        papers = {row["method"]: made.papers.get(row["method"]) for row in made.rows}
        told = {method: about for method, about in papers.items() if about is not None}
        sheet = _single(made.rows, made.judged_by, told)
        notes = [*_missing(made), *paper_notes(list(told.values()))]
    else:
        sheet = _swept(made)
        notes = [*_seeds(made), *_missing(made), *paper_notes(list(made.papers.values()))]
    return Sheet(sheet.title, sheet.columns, sheet.blocks, sheet.caption, notes)


def comparison(
    rows: Sequence[Row], judged_by: str, abouts: Mapping[str, Row] | None = None
) -> Table | Group:
    """Methods side by side, the best of each column in bold.

    ``abouts`` tells of a scenario, by method: the paper's figures then have a column.
    """
    return as_rich(_single(rows, judged_by, abouts or {}))


# --- one run a method ----------------------------------------------------------------------------


def _single(rows: Sequence[Row], judged_by: str, abouts: Mapping[str, Row]) -> Sheet:
    columns = [
        Column("received", "received", lambda v: score(v, judged_by), True),
        Column("adapted", "adapted", lambda v: score(v, judged_by), True),
        *_newcomers_column(rows, judged_by),
        *_paper_column(abouts),
        Column("worst\nclient", "worst", lambda v: score(v, judged_by), True),
        Column("over\nlocal", "gain", lambda v: _signed(v, judged_by), True),
        Column("better\noff", "better", str),
        Column("groups", "groups", str),
        Column("agree-\nment", "agreement", _two_digits),
        *_ended_column(rows),
        Column("bytes", "bytes", _size),
        *_wire_columns(rows),
        Column("time\ns", "seconds", _seconds),
        Column("server\nsees", "sees", str),
    ]
    best = {
        c.key: max((r[c.key] for r in rows if r[c.key] is not None), default=None)
        for c in columns
        if c.best
    }
    lines = []
    for row in rows:
        better = _NONE if row["better"] is None else f"{row['better']}/{row['compared']}"
        own = {**row, "better": better, "paper": abouts.get(row["method"])}
        cells = [
            Cell(
                c.show(own[c.key]),
                BEST if c.best and own[c.key] is not None and own[c.key] == best[c.key] else UNTOLD,
            )
            for c in columns
        ]
        lines.append((str(row["method"]), cells))
    adapted = [row["method"] for row in rows if row.get("headline") == "adapted"]
    return Sheet(_title(judged_by), columns, [Block("", lines)], _adapted(adapted))


def _title(judged_by: str) -> str:
    what = "Accuracy in %" if judged_by == "accuracy" else "R²"
    return f"{what} on each client's own test data, mean over clients"


def _adapted(methods: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(methods))
    return f"{names}: judged after adapting, by its worst client and over local too" * bool(names)


# --- a sweep -------------------------------------------------------------------------------------


def _swept(made: Comparison) -> Sheet:
    """A block for each setting, a row for each method: means over seeds."""
    rows, by = made.means, made.judged_by
    several = any(row["seeds"] > 1 for row in rows)
    uneven = len({row["seeds"] for row in rows}) > 1
    columns = [
        *([Column("seeds", "seeds", str)] if uneven else []),
        Column("received", "received", lambda v: score(v, by), True),
        Column("adapted", "adapted", lambda v: score(v, by), True),
        *_newcomers_column(rows, by),
        *_paper_column(made.papers),
        Column("worst\nclient", "worst", lambda v: score(v, by), True),
        *_gain_column(rows, by),
        Column("groups", "groups", _few),
        *_agreement_column(rows),
        *_ended_column(made.rows),
        Column("bytes", "bytes", _size),
        *_wire_columns(rows),
        Column("time\ns", "seconds", _seconds),
    ]
    blocks: dict[str, list[tuple[str, Sequence[Cell]]]] = {}
    for row in rows:
        told = [_setting(axis, row[axis]) for axis in made.axes]
        place = place_of(row["method"], {axis: row[axis] for axis in made.axes})
        own = {**row, "paper": made.papers.get(place)}
        cells = [_mean(own, column, by) for column in columns]
        blocks.setdefault(", ".join(told), []).append((str(row["method"]), cells))
    what = "Accuracy in %" if by == "accuracy" else "R²"
    title = f"{what} on clients' own test data, ± deviation over seeds"
    adapted = [str(row["method"]) for row in rows if row.get("headline") == "adapted"]
    found = [Block(title, lines) for title, lines in blocks.items()]
    return Sheet(title if several else _title(by), columns, found, _adapted(adapted))


def _setting(axis: str, value: Any) -> str:
    return (
        f"{axis} {shown(value)}" if axis in ("partition", "shift") else f"{axis} = {shown(value)}"
    )


def _mean(row: Row, column: Column, judged_by: str) -> Cell:
    text = column.show(row[column.key]) if row.get(column.key) is not None else _NONE
    if column.key not in MARKED:
        return Cell(text)
    spread = row[f"{column.key}_std"]
    if spread is not None and column.key != "gain":  # its spread is that of a difference
        text += f" ± {score(spread, judged_by)}"
    return Cell(text, row[f"{column.key}_mark"])


def _seeds(made: Comparison) -> list[str]:
    """Over how many seeds, and what the marks say."""
    counts = sorted({row["seeds"] for row in made.means})
    of = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    numbers = ", ".join(map(str, made.seeds))
    notes = [f"over {of} seed{'s' * (counts[-1] > 1)} ({numbers}), the same for all methods"]
    if counts[-1] < LEAST_SEEDS:
        few = "five" if LEAST_SEEDS == 5 else str(LEAST_SEEDS)
        notes.append(
            f"the best mean stands out; with fewer than {few} seeds nothing is said about ties"
        )
    else:
        notes.append(
            "the best mean stands out; = not significantly worse than it (paired t-test over "
            "seeds, 5 %, Holm)"
        )
    if len(counts) > 1:
        notes.append("methods that lack seeds are compared on the seeds that both have")
    return notes


def _missing(made: Comparison) -> list[str]:
    lines = left_out(made.left_out)
    lines += [f"failed: {name} ({error})" for name, error in made.failed.items()]
    return lines + [f"stopped: {name} ({reason})" for name, reason in made.stopped.items()]


# --- columns -------------------------------------------------------------------------------------


def _signed(value: float | None, judged_by: str) -> str:
    if value is None:
        return _NONE
    return f"{100 * value:+.1f}" if judged_by == "accuracy" else f"{value:+.3f}"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _two_digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _few(value: float) -> str:
    """A mean of whole numbers."""
    return f"{value:.1f}".removesuffix(".0")


def _size(value: float | None) -> str:
    return _NONE if value is None else size(value, digits=1)


def _ended_column(rows: Sequence[Row]) -> list[Column]:
    """How many rounds it took, where some ended early."""
    stopped = any(row.get("stopped") for row in rows)
    return [Column("rounds", "rounds", _few)] if stopped else []


def _gain_column(rows: Sequence[Row], judged_by: str) -> list[Column]:
    if all(row.get("gain") is None for row in rows):
        return []
    return [Column("over\nlocal", "gain", lambda v: _signed(v, judged_by), True)]


def _agreement_column(rows: Sequence[Row]) -> list[Column]:
    if all(row.get("agreement") is None for row in rows):
        return []
    return [Column("agree-\nment", "agreement", _two_digits)]


def _wire_columns(rows: Sequence[Row]) -> list[Column]:
    """What was wasted, the clock's seconds and the way to the target, where there are any."""
    columns = [
        Column("wasted", "wasted", _size),
        Column("clock\ncomm. s", "clock_communication", _seconds),
        Column("clock\ntotal s", "clock_total", _seconds),
        Column("rounds\nto target", "target_round", lambda v: _NONE if v is None else _few(v)),
        Column("bytes\nto target", "target_bytes", _size),
        Column("s to\ntarget", "target_seconds", _seconds),
        Column("ε", "epsilon", lambda v: _NONE if v is None else f"{v:.3g}"),
    ]
    there = {key for row in rows for key in row if key != "wasted" or row[key]}
    return [column for column in columns if column.key in there]


def _newcomers_column(rows: Sequence[Row], judged_by: str) -> list[Column]:
    """The adapted score of those who joined at the end, if anybody did."""
    if all(row.get("newcomers") is None for row in rows):
        return []
    return [Column("new-\ncomers", "newcomers", lambda v: score(v, judged_by), True)]


def _paper_column(abouts: Mapping[str, Row]) -> list[Column]:
    """The column of published figures, if there are any."""
    if all(about["figure"] is None for about in abouts.values()):
        return []
    return [Column("paper", "paper", lambda about: _NONE if about is None else figure_of(about))]
