"""The table of a comparison: its columns, its blocks, and the notes below.

With one run for each method, a row has its scores; in a sweep each row is a mean ± standard
deviation over seeds, in a block for each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.report.answers import (
    FEW_SEEDS,
    answers,
    few_seeds,
    lines_of,
    margin_in_words,
    one_sample,
)
from coterie.report.run_notes import tuning_notes, warning_notes
from coterie.report.scenario_tables import cost_of, paper_notes, published_accuracy
from coterie.report.table_formats import Fitted, Sheet, TableBlock, TableCell, TableColumn, as_rich
from coterie.report.tables import left_out, score, size
from coterie.results.comparison import Comparison
from coterie.results.differences import EQUAL, LEAST_SEEDS, OPEN, UNTESTED
from coterie.results.seeds import BEST, HIGHEST, MARKED, UNTOLD, reference
from coterie.results.titles import place_of, value_in_title

_NONE = "–"
_SAME = 1e-12  # differences that are only rounding
# Columns, the most important first: a narrow terminal omits the last ones.
_ORDER = (
    *("received", "seeds", "adapted", "worst", "bytes", "difference", "gain", "newcomers"),
    *(
        "newcomers_received",
        "paper",
        "groups",
        "target_round",
        "paper_rounds",
        "target_megabits",
        "paper_megabits",
    ),
    *("target_round_adapted", "target_megabits_adapted", "epsilon", "clock_total", "agreement"),
    *("gainers", "near_bytes", "target_bytes", "target_seconds", "rounds", "wasted", "seconds"),
    "sees",
    "clock_communication",
)
_TARGET = ("target_round", "target_bytes", "target_megabits", "target_seconds")
_PAPER = ("paper", "paper_rounds", "paper_megabits")
Row = Mapping[str, Any]


def sheet_of(comparison: Comparison) -> Sheet:
    """The table of a comparison, with the notes below it."""
    if not comparison.swept:
        papers = {row["method"]: comparison.papers.get(row["method"]) for row in comparison.rows}
        known = {method: about for method, about in papers.items() if about is not None}
        sheet = _single(comparison.rows, comparison.judged_by, known)
        notes = [
            *_answered(comparison),
            *_near(comparison),
            *resting(comparison.rows, comparison.judged_by),
            *_missing(comparison),
            *paper_notes(known),
        ]
    else:
        sheet = _swept(comparison)
        rested = resting(comparison.means, comparison.judged_by, comparison.axes)
        notes = [
            *_answered(comparison),
            *_near(comparison),
            *rested,
            *_seeds(comparison),
            *_missing(comparison),
            *paper_notes(comparison.papers),
        ]
    return replace(sheet, notes=[*notes, *tuning_notes(comparison), *warning_notes(comparison)])


def _answered(comparison: Comparison) -> list[str]:
    axes = comparison.axes if comparison.swept else ()
    return lines_of(answers(comparison.rows, axes, comparison.judged_by, comparison.margin))


def _sees(row: Row) -> str:
    """The most that the server saw; clients that were alone in a group are counted apart."""
    lone = row.get("exposed")
    return f"{row['sees_mostly']}+{lone}" if lone else str(row["sees"])


def _near(comparison: Comparison) -> list[str]:
    """The size of one test sample, where it is more than a point, and a column's meaning."""
    notes = []
    if any(row.get("near_bytes") for row in comparison.rows):
        notes.append("bytes to 1 point: until the score stayed within a point of its last")
    if any(row.get("exposed") for row in comparison.rows):
        notes.append(
            "server sees means+1: means, and as many clients that were alone in their group"
        )
    if text := one_sample(comparison.rows, comparison.judged_by):
        notes.append(text)
    return notes


def comparison(
    rows: Sequence[Row], judged_by: str, abouts: Mapping[str, Row] | None = None
) -> Fitted:
    """Methods side by side, the best of each column marked.

    ``abouts`` describes a scenario, by method, whose paper's figures then have a column.
    """
    return as_rich(_single(rows, judged_by, abouts or {}))


# --- one run a method ----------------------------------------------------------------------------


def _single(rows: Sequence[Row], judged_by: str, abouts: Mapping[str, Row]) -> Sheet:
    columns = [
        TableColumn("received", "received", lambda v: score(v, judged_by), True),
        TableColumn("adapted", "adapted", lambda v: score(v, judged_by), True),
        *_newcomers_columns(rows, judged_by, abouts),
        *_paper_column(abouts),
        TableColumn("worst\nclient", "worst", lambda v: score(v, judged_by), True),
        TableColumn("over\nlocal", "gain", lambda v: _signed(v, judged_by), True),
        *_gainers_column(rows),
        TableColumn("groups", "groups", str),
        TableColumn("agree-\nment", "agreement", _two_digits),
        *_ended_column(rows, abouts),
        TableColumn("bytes", "bytes", _size),
        *_near_column(rows),
        *_wire_columns(rows, abouts),
        TableColumn("time\ns", "seconds", _seconds),
        TableColumn("server\nsees", "sees", str),
    ]
    usable = [row for row in rows if not reference(row)]
    best = {
        c.key: max((r[c.key] for r in usable if r[c.key] is not None), default=None)
        for c in columns
        if c.best and sum(r[c.key] is not None for r in rows) > 1
    }
    lines = []
    for row in rows:
        known = {
            **row,
            "gainers": row,
            "sees": _sees(row),
            **dict.fromkeys(_PAPER, abouts.get(row["method"])),
        }
        values = [(column, known.get(column.key)) for column in columns]
        top = {} if reference(row) else best
        cells = [
            TableCell(c.show(value), _top(value, top.get(c.key)), sign_of(row, c.key))
            for c, value in values
        ]
        lines.append((str(row["method"]), cells))
    adapted = [row["method"] for row in rows if row.get("headline") == "adapted"]
    return Sheet(
        _title(judged_by),
        columns,
        [TableBlock("", lines)],
        _adapted(adapted),
        legend=[(HIGHEST, f"{_HIGHEST}. {few_seeds(1)}")] * bool(best),
        order=_ORDER,
    )


def _top(value: Any, best: float | None) -> str:
    return HIGHEST if None not in (value, best) and abs(value - best) <= _SAME else UNTOLD


def _title(judged_by: str) -> str:
    what = "Accuracy in %" if judged_by == "accuracy" else "R²"
    return f"{what} on each client's own test data, mean over clients"


def _adapted(methods: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(methods))
    return (
        f"{names}: judged after adapting, including its worst client and the gain over local"
        * bool(names)
    )


# --- a sweep -------------------------------------------------------------------------------------


def _swept(comparison: Comparison) -> Sheet:
    """A block for each setting, a row for each method: means over seeds."""
    rows, by = comparison.means, comparison.judged_by
    several = any(row["seeds"] > 1 for row in rows)
    uneven = len({row["seeds"] for row in rows}) > 1
    columns = [
        *([TableColumn("seeds", "seeds", str)] if uneven else []),
        TableColumn("received", "received", lambda v: score(v, by), True),
        *_difference_column(rows, by),
        TableColumn("adapted", "adapted", lambda v: score(v, by), True),
        *_newcomers_columns(rows, by, comparison.papers),
        *_paper_column(comparison.papers),
        TableColumn("worst\nclient", "worst", lambda v: score(v, by), True),
        *_gain_column(rows, by),
        *_gainers_column(rows),
        TableColumn("groups", "groups", _few),
        *_agreement_column(rows),
        *_ended_column(comparison.rows, comparison.papers),
        TableColumn("bytes", "bytes", _size),
        *_near_column(rows),
        *_wire_columns(rows, comparison.papers),
        TableColumn("time\ns", "seconds", _seconds),
    ]
    blocks: dict[str, list[tuple[str, Sequence[TableCell]]]] = {}
    most: dict[str, int] = {}
    for row in rows:
        block = repr([row[axis] for axis in comparison.axes])
        most[block] = max(most.get(block, 0), row["seeds"])
    for row in rows:
        settings = [_setting(axis, row[axis]) for axis in comparison.axes]
        fullest = most[repr([row[axis] for axis in comparison.axes])]
        lacks = f"{row['seeds']}/{fullest}" if row["seeds"] < fullest else str(fullest)
        paper_key = place_of(row["method"], {axis: row[axis] for axis in comparison.axes})
        values = {**row, "seeds": lacks, "of": row["seeds"], "gainers": row}
        values["difference"] = row if row["difference_low"] is not None else None
        values |= dict.fromkeys(_PAPER, comparison.papers.get(paper_key))
        cells = [_mean(values, column, by) for column in columns]
        blocks.setdefault(", ".join(settings), []).append((str(row["method"]), cells))
    what = "Accuracy in %" if by == "accuracy" else "R²"
    title = f"{what} on clients' own test data, ± deviation over seeds"
    adapted = [str(row["method"]) for row in rows if row.get("headline") == "adapted"]
    contested = [_contested(TableBlock(title, lines)) for title, lines in blocks.items()]
    return Sheet(
        title if several else _title(by),
        columns,
        contested,
        _adapted(adapted),
        legend=_legend(contested, comparison),
        order=_ORDER,
    )


def _contested(block: TableBlock) -> TableBlock:
    """The same without marks of the highest where only one method has a value."""
    rows = [cells for _, cells in block.rows]
    alone = [sum(cell.text != _NONE for cell in column) < 2 for column in zip(*rows, strict=True)]
    cleared = [
        (
            name,
            [
                replace(c, mark=UNTOLD) if lone and c.mark in (BEST, HIGHEST) else c
                for c, lone in zip(cells, alone, strict=True)
            ],
        )
        for name, cells in block.rows
    ]
    return TableBlock(block.title, cleared)


_HIGHEST = "the highest of the usable methods"


def _legend(blocks: Sequence[TableBlock], comparison: Comparison) -> list[tuple[str, str]]:
    """The meaning of the marks that occur."""
    marks = {c.mark for block in blocks for _, cells in block.rows for c in cells}
    half = margin_in_words(comparison.margin, comparison.judged_by)
    most = max((line["seeds"] for line in comparison.means), default=0)
    tests = "paired t-tests over seeds, Holm over all pairs, 5 %"
    meanings = {
        HIGHEST: _HIGHEST if most >= LEAST_SEEDS else f"{_HIGHEST}. {few_seeds(most)}",
        BEST: f"the best of the usable methods: all others are worse ({tests})",
        EQUAL: f"equal to it: the interval lies within {half}",
        OPEN: f"not distinguished from it ({tests})",
        UNTESTED: f"{FEW_SEEDS}: fewer than {_LEAST} in common with it",
    }
    return [(mark, words) for mark, words in meanings.items() if mark in marks]


_LEAST = "five" if LEAST_SEEDS == 5 else str(LEAST_SEEDS)


def _setting(axis: str, value: Any) -> str:
    return (
        f"{axis} {value_in_title(value)}"
        if axis in ("partition", "shift")
        else f"{axis} = {value_in_title(value)}"
    )


def _mean(row: Row, column: TableColumn, judged_by: str) -> TableCell:
    text = column.show(row[column.key]) if row.get(column.key) is not None else _NONE
    if column.key in _TARGET and 0 < row["target_reached"] < row["of"]:
        text += f" ({row['target_reached']}/{row['of']})"  # the mean of those that reached it
    if column.key == "difference":
        return TableCell(text, row["score_mark"] if text != _NONE else UNTOLD)
    if column.key not in MARKED:
        return TableCell(text)
    spread = row[f"{column.key}_std"]
    if spread is not None and column.key != "gain":  # its spread is that of a difference
        text += f" ± {score(spread, judged_by)}"
    return TableCell(text, row[f"{column.key}_mark"], sign_of(row, column.key))


def _seeds(comparison: Comparison) -> list[str]:
    """The number of seeds, and what they do not allow to conclude."""
    counts = sorted({row["seeds"] for row in comparison.means})
    methods = len({row["method"] for row in comparison.means})
    of = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    numbers = ", ".join(map(str, comparison.seeds))
    if counts[-1] == 1:
        shown_seeds = (
            f"seeds {numbers}, one each" if len(comparison.seeds) > 1 else f"seed {numbers}"
        )
        return [f"{shown_seeds}: {FEW_SEEDS} which differences are real (--seeds 5)"]
    same = ", the same for all methods" if len(counts) == 1 and methods > 1 else ""
    notes = [f"over {of} seeds ({numbers}){same}"]
    if counts[-1] < LEAST_SEEDS and methods > 1:
        notes.append(f"{FEW_SEEDS} which differences are real: {_LEAST} are needed")
    if len(counts) > 1:
        apart = any(row["shared_seeds"] is None for row in comparison.means)
        notes.append(
            "methods with missing seeds have means of the others (as 4/5); the best is "
            "chosen on the seeds that all have"
            + " (where fewer than two are left: on all of each)" * apart
            + ", and each is tested against it on the seeds that both have"
        )
    if any(0 < row.get("target_reached", row["seeds"]) < row["seeds"] for row in comparison.means):
        notes.append("to target, as in 2 (1/3): the mean of the one of three seeds that reached it")
    return notes


def _missing(comparison: Comparison) -> list[str]:
    lines = left_out(comparison.left_out)
    lines += [f"failed: {name} ({error})" for name, error in comparison.failed.items()]
    return lines + [f"stopped: {name} ({reason})" for name, reason in comparison.stopped.items()]


# --- layers at rest ------------------------------------------------------------------------------

_DAGGER = "†"
_WITH_OWN = ("received", "adapted", "worst", "gain")  # scores of models with clients' own layers


def sign_of(row: Row, key: str) -> str:
    """A dagger after a score of a round in which layers were skipped."""
    return _DAGGER * bool(row.get("rested") and key in _WITH_OWN and row.get(key) is not None)


def resting(rows: Sequence[Row], judged_by: str, axes: Sequence[str] = ()) -> list[str]:
    """The meaning of the dagger, with the scores of the last round in which all layers were due."""
    full_rounds = []
    for row in rows:
        if not row.get("rested"):
            continue
        name = ", ".join([str(row["method"]), *(_setting(axis, row[axis]) for axis in axes)])
        full = [
            f"{score(row[f'full_{key}'], judged_by)} {key}"
            for key in ("received", "adapted")
            if row.get(f"full_{key}") is not None
        ]
        round = f" in round {row['full_round']}" if row.get("full_round") else ""
        scored = f"{name} {' and '.join(full)}{round}"
        full_rounds.append(scored if full else f"none of {name} was scored")
    if not full_rounds:
        return []
    return [
        f"{_DAGGER} scored in a round in which layers were skipped, so with clients' own layers; "
        f"the last full round had: {'; '.join(full_rounds)}"
    ]


# --- columns -------------------------------------------------------------------------------------


def _signed(value: float | None, judged_by: str) -> str:
    if value is None:
        return _NONE
    text = f"{100 * value:+.1f}" if judged_by == "accuracy" else f"{value:+.3f}"
    return text if float(text) else text.replace("-", "+")  # rounding must not turn 0 into a loss


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _two_digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _few(value: float) -> str:
    """A mean of whole numbers."""
    return f"{value:.1f}".removesuffix(".0")


def _size(value: float | None) -> str:
    return _NONE if value is None else size(value, digits=1)


def _ended_column(rows: Sequence[Row], abouts: Mapping[str, Row]) -> list[TableColumn]:
    """The number of rounds, where some runs ended early or the paper reports its own."""
    published = _costs(abouts)
    whole_runs = "rounds" in published and published["target"] is None
    paper = [TableColumn("paper's\nrounds", "paper_rounds", lambda a: cost_of(a, "rounds"))]
    stopped = any(row.get("stopped") for row in rows) or whole_runs
    return [TableColumn("rounds", "rounds", _few)] * stopped + paper * whole_runs


def _gainers_column(rows: Sequence[Row]) -> list[TableColumn]:
    """The clients that are better off than alone, as good, and worse off."""
    if all(row.get("worse_off") is None for row in rows):
        return []
    return [TableColumn("better/\nsame/worse", "gainers", _gainers)]


def _gainers(row: Row) -> str:
    counts = [row.get(key) for key in ("better", "as_good", "worse_off")]
    return _NONE if None in counts else "/".join(_few(n) for n in counts if n is not None)


def _near_column(rows: Sequence[Row]) -> list[TableColumn]:
    """The bytes until the score stayed within a point of its last."""
    if all(row.get("near_bytes") is None for row in rows):
        return []
    return [TableColumn("bytes to\n1 point", "near_bytes", _size)]


def _difference_column(rows: Sequence[Row], judged_by: str) -> list[TableColumn]:
    """The difference to the best with its interval, where there are enough seeds for one."""
    if all(row["difference_low"] is None for row in rows):
        return []

    def shown(row: Row) -> str:
        ends = (row["difference"], row["difference_low"], row["difference_high"])
        mean, low, high = (_signed(value, judged_by) for value in ends)
        return f"{mean} [{low}, {high}]"

    return [TableColumn("to the best\n[95 %]", "difference", shown)]


def _gain_column(rows: Sequence[Row], judged_by: str) -> list[TableColumn]:
    if all(row.get("gain") is None for row in rows):
        return []
    return [TableColumn("over\nlocal", "gain", lambda v: _signed(v, judged_by), True)]


def _agreement_column(rows: Sequence[Row]) -> list[TableColumn]:
    if all(row.get("agreement") is None for row in rows):
        return []
    return [TableColumn("agree-\nment", "agreement", _two_digits)]


def _wire_columns(rows: Sequence[Row], abouts: Mapping[str, Row]) -> list[TableColumn]:
    """Wasted bytes, the clock's seconds and the cost to the target, where there are any.

    Where a paper has a target, its rounds or megabits stand beside the run's.
    """
    columns = [
        TableColumn("wasted", "wasted", _size),
        TableColumn("clock\ncomm. s", "clock_communication", _seconds),
        TableColumn("clock\ntotal s", "clock_total", _seconds),
        TableColumn("rounds\nto target", "target_round", _few_or_none),
        TableColumn("… of\nadapted", "target_round_adapted", _few_or_none),
        TableColumn("paper's\nrounds", "paper_rounds", lambda a: cost_of(a, "rounds")),
        TableColumn("bytes\nto target", "target_bytes", _size),
        TableColumn("Mbit\nto target", "target_megabits", _five_digits),
        TableColumn("… of\nadapted", "target_megabits_adapted", _five_digits),
        TableColumn("paper's\nMbit", "paper_megabits", lambda a: cost_of(a, "megabits")),
        TableColumn("s to\ntarget", "target_seconds", _seconds),
        TableColumn("ε", "epsilon", lambda v: _NONE if v is None else f"{v:.3g}"),
    ]
    keys = {key for row in rows for key in row if key != "wasted" or row[key]}
    published = _costs(abouts)
    if published.get("target") is not None:
        keys |= {f"paper_{cost}" for cost in published}
    if "megabits" not in published:
        keys -= {"target_megabits", "target_megabits_adapted"}
    return [column for column in columns if column.key in keys]


def _costs(abouts: Mapping[str, Row]) -> dict[str, Any]:
    """The target of a scenario, and the costs that the paper has for some method."""
    return {k: v for about in abouts.values() for k, v in (about.get("to_target") or {}).items()}


def _few_or_none(value: float | None) -> str:
    return _NONE if value is None else _few(value)


def _five_digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.5g}"


def _newcomers_columns(
    rows: Sequence[Row], judged_by: str, abouts: Mapping[str, Row]
) -> list[TableColumn]:
    """The newcomers' adapted score, if there are newcomers.

    Their received score, too, where a paper's figure is comparable with it.
    """
    if all(row.get("newcomers") is None for row in rows):
        return []
    columns = [TableColumn("new-\ncomers", "newcomers", lambda v: score(v, judged_by), True)]
    if any(about["newcomers"] and about["score"] == "received" for about in abouts.values()):
        title = "… as\nreceived"
        columns.append(TableColumn(title, "newcomers_received", lambda v: score(v, judged_by)))
    return columns


def _paper_column(abouts: Mapping[str, Row]) -> list[TableColumn]:
    """The column of published figures, if there are any."""
    if all(about["figure"] is None for about in abouts.values()):
        return []
    return [
        TableColumn(
            "paper", "paper", lambda about: _NONE if about is None else published_accuracy(about)
        )
    ]
