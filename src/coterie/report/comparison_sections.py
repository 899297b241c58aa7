"""The tables on a page about several runs: the methods, whether differences are real, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from coterie.report import numbers
from coterie.report.answers import (
    FEW_SEEDS,
    Block,
    best,
    few_seeds,
    gainers,
    margin_in_words,
    one_sample,
)
from coterie.report.compared_runs import ComparedRuns, differing, flattened, saw_by
from coterie.report.comparison_tables import resting, sign_of
from coterie.report.figures.clients import scores_of
from coterie.report.figures.compared import KindOfRun, final, kinds_of
from coterie.report.figures.scores import AXES, curve
from coterie.report.palette import DARK
from coterie.report.reading import FINISHED, Reading, number
from coterie.report.rendering import HtmlCell, render
from coterie.report.tables import score, size
from coterie.report.words import MEANINGS, change, count, duration, grouping, saw_of, word
from coterie.report.words import value as with_unit
from coterie.results.differences import (
    BETTER,
    EQUAL,
    LEAST_SEEDS,
    OPEN,
    UNTESTED,
    WORSE,
    Difference,
    differences,
)
from coterie.results.rows import in_full
from coterie.results.seeds import BEST, HIGHEST
from coterie.results.titles import place_of

_VERDICTS = {
    EQUAL: "equal",
    OPEN: "not distinguished",
    UNTESTED: FEW_SEEDS,
    WORSE: "worse",
    BETTER: "better",
}
_AFTER = {EQUAL: " =", OPEN: " ~"}
_LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
_MOST_LEVELS = 3  # scores whose cost has a column
Row = Mapping[str, Any]


# --- which method ---------------------------------------------------------------------------------


def standings(found: ComparedRuns, id: str, level: int, link_of: Callable[[str], str]) -> Markup:
    """A row for each method and setting: its means, the highest of the usable methods marked.

    ``link_of`` makes the address of a run of its name.
    """
    lines = [line for block in found.blocks for line in _by_score(block)]
    columns = _columns(found)
    cells = [[show(line) for _, show in columns] for line in lines]
    shown = [i for i in range(len(columns)) if any(row[i] is not None for row in cells)]
    rows = [
        [
            _method_cell(_kind(found, line), str(line["method"]), link_of),
            *(HtmlCell(str(line[axis]), line[axis]) for axis in found.axes),
            *(row[i] or HtmlCell(None) for i in shown),
        ]
        for line, row in zip(lines, cells, strict=True)
    ]
    titles = ["method", *found.axes, *(columns[i][0] for i in shown)]
    return render(
        "compared/standings.html",
        id=id,
        level=level,
        caption=_caption(found, lines),
        columns=titles,
        rows=rows,
        numbers=1 + len(found.axes),
        meanings=[(title, MEANINGS[title]) for title in titles if title in MEANINGS],
    )


def _by_score(block: Block) -> list[Row]:
    known = [line for line in block.lines if line["score"] is not None]
    unknown = [line for line in block.lines if line["score"] is None]
    return [*sorted(known, key=lambda line: -line["score"]), *unknown]


def _kind(found: ComparedRuns, line: Row) -> KindOfRun:
    return found.kind_of_row[str(line["method"]), repr([line[axis] for axis in found.axes])]


def _method_cell(kind: KindOfRun, title: str, link_of: Callable[[str], str]) -> HtmlCell:
    """The method with the colour that it has in all pictures, linked to its only run."""
    colour = kind.style[0]
    link = link_of(kind.runs[0].name) if len(kind.runs) == 1 else None
    swatch = f"light-dark({colour}, {DARK.get(colour, colour)})"
    return HtmlCell(title, title, link=link, swatch=swatch, note=kind.reference)


def _columns(found: ComparedRuns) -> list[tuple[str, Callable[[Row], HtmlCell | None]]]:
    by = found.by
    several = any(line["seeds"] > 1 for block in found.blocks for line in block.lines)
    least = {id(line): one_sample([line], by) for block in found.blocks for line in block.lines}

    def text(key: str, show: Callable[[Any], str]) -> Callable[[Row], HtmlCell | None]:
        def cell(line: Row) -> HtmlCell | None:
            value = line.get(key)
            return None if value is None else HtmlCell(show(value), value)

        return cell

    def scored(key: str) -> Callable[[Row], HtmlCell | None]:
        return lambda line: _spread(line, key, by)

    def worst(line: Row) -> HtmlCell | None:
        cell, sample = _spread(line, "worst", by), least.get(id(line))
        return cell if cell is None or not sample else cell.hinted(sample)

    def gained(line: Row) -> HtmlCell | None:
        if line.get("better") is None:
            return None
        counts = " / ".join(f"{line[k]:.3g}" for k in ("better", "as_good", "worse_off"))
        return HtmlCell(counts, line["better"] - line["worse_off"]).hinted(gainers(line, by))

    seeds = [("seeds", text("seeds", str))] if several else []
    return [
        *seeds,
        ("received", scored("received")),
        ("adapted", scored("adapted")),
        ("to the best", lambda line: _to_the_best(line, by)),
        ("worst client", worst),
        ("newcomers", scored("newcomers")),
        ("over local", text("gain", lambda v: change(v, by).removesuffix(" points"))),
        ("better / same / worse", gained),
        ("groups", text("groups", lambda v: f"{v:.3g}")),
        ("agreement", text("agreement", lambda v: f"{v:.2f}")),
        ("bytes", text("bytes", lambda v: size(v, digits=1))),
        ("to within 1 point", text("near_bytes", lambda v: size(v, digits=1))),
        ("simulated time", text("clock_total", duration)),
        ("time", text("seconds", duration)),
        ("ε", text("epsilon", lambda v: f"{v:.3g}")),
        ("server saw", lambda line: HtmlCell(saw_of(line)) if saw_of(line) else None),
        ("status", lambda line: _status(found, line)),
    ]


def _status(found: ComparedRuns, line: Row) -> HtmlCell | None:
    runs = _kind(found, line).runs
    left = [r.status for r in runs if r.status != FINISHED]
    if not left:
        return None
    return HtmlCell(left[0] if len(left) == len(runs) else f"{len(left)} of {len(runs)} {left[0]}")


def _spread(line: Row, key: str, by: str) -> HtmlCell | None:
    """A mean with its deviation over seeds; green only where a test says that it is the best."""
    if line.get(key) is None:
        return None
    std, mark = line[f"{key}_std"], line[f"{key}_mark"]
    around = "" if std is None else f" ± {score(std, by)}"
    text = score(line[key], by) + around + sign_of(line, key) + _AFTER.get(mark, "")
    return HtmlCell(text, line[key], mark == BEST, highest=mark == HIGHEST)


def _to_the_best(line: Row, by: str) -> HtmlCell | None:
    gap = line["difference"]
    if gap is None:
        return None
    verdict = line["difference_verdict"]
    shown = change(gap, by).removesuffix(" points")
    return HtmlCell(f"{shown} {'' if verdict == UNTESTED else _VERDICTS[verdict]}".strip(), gap)


def _caption(found: ComparedRuns, lines: Sequence[Row]) -> str:
    accuracy = ", in %" * (found.by == "accuracy")
    most = max((line["seeds"] for line in lines), default=0)
    caption = f"Means over clients{' and seeds ± standard deviation' * (most > 1)}{accuracy}"
    marks = {line[f"{key}_mark"] for line in lines for key in ("received", "adapted", "worst")}
    if most < LEAST_SEEDS and len(lines) > 1:
        caption += f"; bold: the highest of the usable methods. {few_seeds(most)}"
    elif BEST in marks or HIGHEST in marks:
        caption += (
            "; bold: the highest of the usable methods, on green if all others are worse; = equal "
            f"to it within {margin_in_words(found.margin, found.by)}, ~ not distinguished from it "
            "(paired t-tests over seeds, Holm over all pairs, 5 %)"
        )
    adapting = [str(line["method"]) for line in lines if line.get("headline") == "adapted"]
    if adapting:
        names = ", ".join(dict.fromkeys(adapting))
        caption += f"; judged after adapting, including the worst client: {names}"
    return ". ".join([caption, *resting(lines, found.by, found.axes)])


def choices(found: ComparedRuns, id: str, level: int) -> Markup | None:
    """The methods that no other one beats in score, bytes and what the server sees."""
    answers = [answer for answer in found.answers if len(answer.choices) > 1]
    return render("compared/choices.html", id=id, level=level, answers=answers) if answers else None


# --- is it real -----------------------------------------------------------------------------------


def real(found: ComparedRuns, id: str, level: int) -> Markup | None:
    """The difference of each method to the best over seeds; with too few, over clients as well."""
    rows, over_clients = [], []
    for block in found.blocks:
        if not block.top or len(block.lines) < 2:
            continue
        for line in _by_score(block):
            if line["difference"] is not None:
                rows.append([_named(line, found), *_tested(line, found.by)])
        if not block.tested:
            over_clients += _over_clients(block, found)
    if not rows:
        return None
    most = max(block.most_seeds for block in found.blocks)
    return render(
        "compared/real.html",
        id=id,
        level=level,
        text=best(found.blocks[0]) if len(found.blocks) == 1 else "",
        few=few_seeds(most) if most < LEAST_SEEDS else "",
        half=margin_in_words(found.margin, found.by),
        word=word(found.by),
        rows=rows,
        clients=over_clients,
    )


def _named(line: Row, found: ComparedRuns) -> HtmlCell:
    return HtmlCell(place_of(str(line["method"]), {axis: line[axis] for axis in found.axes}))


def _tested(line: Row, by: str) -> list[HtmlCell]:
    low, high, p, needed = (
        line[key] for key in ("difference_low", "difference_high", "difference_p", "seeds_needed")
    )
    verdict = line["difference_verdict"]
    settled = verdict not in (UNTESTED, OPEN)
    return [
        HtmlCell(change(line["difference"], by), line["difference"]),
        HtmlCell(_interval(low, high, by), low),
        HtmlCell(None if p is None else f"{p:.2g}" if p >= 0.001 else "< 0.001", p),
        HtmlCell(_VERDICTS.get(verdict, verdict)),
        HtmlCell("settled" if settled else None if needed is None else f"about {needed}", needed),
    ]


def _interval(low: float | None, high: float | None, by: str) -> str | None:
    if low is None or high is None:
        return None
    return " to ".join(change(end, by).removesuffix(" points") for end in (low, high))


def _over_clients(block: Block, found: ComparedRuns) -> list[list[HtmlCell]]:
    """The differences to the best over the clients of the first seed."""
    scores: dict[str, dict[int, float]] = {}
    for line in block.lines:
        run = _kind(found, line).runs[0]
        if own := dict(scores_of(run, run.headline)):
            scores[str(line["method"])] = own
    top = str(block.top[0]["method"])
    if top not in scores:
        return []
    compared = differences(top, scores, found.margin)
    return [
        [_named(line, found), *_of_clients(compared[str(line["method"])], found.by)]
        for line in _by_score(block)
        if str(line["method"]) in compared
    ]


def _of_clients(difference: Difference, by: str) -> list[HtmlCell]:
    return [
        HtmlCell(change(difference.mean, by), difference.mean),
        HtmlCell(_interval(difference.low, difference.high, by), difference.low),
        HtmlCell(_VERDICTS.get(difference.verdict, difference.verdict)),
    ]


# --- what it cost, and why ------------------------------------------------------------------------


def reached(found: ComparedRuns, id: str, level: int) -> Markup | None:
    """What each method had spent when it first reached a score, for the highest round scores."""
    if found.by != "accuracy" or len(found.blocks) != 1:
        return None
    kinds = [kind for kind in found.kinds if kind.reference != "alone"]
    curves = {kind.title: [_curves(run) for run in kind.runs] for kind in kinds}
    tops = [max((y for _, y, *_ in own), default=0.0) for all in curves.values() for own in all]
    levels = [share for share in _LEVELS if any(top >= share for top in tops)][-_MOST_LEVELS:][::-1]
    if not levels:
        return None
    rows = []
    for kind in kinds:
        cells = [_when(curves[kind.title], share) for share in levels]
        rows.append([HtmlCell(kind.called), *cells])
    clocked = any(own[0][3] is not None for all in curves.values() for own in all if own)
    return render(
        "compared/reached.html",
        id=id,
        level=level,
        columns=["method", *(f"{100 * share:g} %" for share in levels)],
        rows=rows,
        clocked=clocked,
    )


Spent = tuple[float, float, float | None, float | None]  # round, score, bytes, seconds


def _curves(run: Reading) -> list[Spent]:
    """The score of each round with the bytes and the simulated seconds until then."""
    scored = [e for e in run.rounds if run.headline in e]
    points = curve(scored, run.headline, run.judged_by)
    if len(points) != len(scored):
        return []
    amounts = [[AXES[axis][0](e) for axis in ("bytes", "seconds")] for e in scored]
    return [(*point, moved, took) for point, (moved, took) in zip(points, amounts, strict=True)]


def _when(curves: Sequence[Sequence[Spent]], share: float) -> HtmlCell:
    """What was spent at the first round with this score, as means over the runs that reached it."""
    first = [next((each for each in own if each[1] >= share), None) for own in curves]
    there = [each for each in first if each is not None]
    if not there:
        return HtmlCell("not reached")
    round, _, moved, seconds = (
        None if None in values else sum(values) / len(values) for values in zip(*there, strict=True)
    )
    parts = [] if moved is None else [size(moved, digits=1)]
    parts += [] if seconds is None else [duration(seconds)]
    some = f" ({len(there)}/{len(first)})" if len(there) < len(first) else ""
    return HtmlCell(f"{', '.join(parts)}, round {round:.3g}{some}".removeprefix(", "), moved)


def rounds(found: ComparedRuns, id: str, level: int) -> Markup | None:
    """Which round's model to take: the last one, or the best on validation data."""
    rows = []
    for kind in found.kinds:
        run = kind.runs[0]
        kept = run.result.get("best_on_validation")
        scores = kept.get(run.headline) if isinstance(kept, Mapping) else None
        known = number(scores.get(run.judged_by)) if isinstance(scores, Mapping) else None
        if not kept or known is None:
            continue
        last = final(run)
        rows.append(
            [
                HtmlCell(kind.called),
                HtmlCell(len(run.rounds), len(run.rounds)),
                HtmlCell(with_unit(last, run.judged_by), last),
                HtmlCell(kept["round"], kept["round"]),
                HtmlCell(with_unit(known, run.judged_by), known),
            ]
        )
    if not rows:
        return None
    several = any(len(kind.runs) > 1 for kind in found.kinds)
    return render("compared/rounds.html", id=id, level=level, rows=rows, several=several)


def why_groups(found: ComparedRuns, id: str, level: int) -> Markup | None:
    """How each method found its groups, or why it stayed with one."""
    told = []
    for kind in found.kinds:
        for text in grouping(kind.runs[0]):
            told.append((kind.called, text))
    return render("compared/groups.html", id=id, level=level, told=told) if told else None


# --- each run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunColumn:
    """A column of the runs: its title, a run's value, and its format.

    A column that is not ``shared`` is left out where all runs have the same value, which is then
    among the settings.
    """

    title: str
    value: Callable[[Reading], Any]
    show: Callable[[Any, Reading], str]
    shared: bool = True


def _scored(title: str) -> Callable[[Reading], Any]:
    return lambda r: number(numbers.scored(r, title).get(r.judged_by))


def _worst(reading: Reading) -> float | None:
    return number(numbers.scored(reading, reading.headline).get("worst"))


def _newcomers(reading: Reading) -> float | None:
    scores = (reading.result.get("newcomers") or {}).get("adapted") or {}
    return number(scores.get(reading.judged_by))


def _bytes(reading: Reading) -> float | None:
    total = numbers.bytes_so_far(reading)
    return total.get("down", 0) + total.get("up", 0) if total else None


def _with_unit(value: float, reading: Reading) -> str:
    return with_unit(value, reading.judged_by)


def _as_is(value: Any, reading: Reading) -> str:
    return str(value)


COLUMNS = (
    RunColumn("method", lambda r: r.method, _as_is, shared=False),
    RunColumn("seed", lambda r: r.seed, _as_is, shared=False),
    RunColumn("received", _scored("received"), _with_unit),
    RunColumn("adapted", _scored("adapted"), _with_unit),
    RunColumn("worst client", _worst, _with_unit),
    RunColumn("newcomers", _newcomers, _with_unit),
    RunColumn("groups", lambda r: numbers.group_count(r) or None, _as_is),
    RunColumn("rounds", lambda r: len(r.rounds), _as_is, shared=False),
    RunColumn("bytes", _bytes, lambda v, r: size(v, digits=1)),
    RunColumn("simulated time", lambda r: numbers.clock(r).get("total"), lambda v, r: duration(v)),
    RunColumn(
        "ε", lambda r: number(numbers.privacy_loss(r).get("epsilon")), lambda v, r: f"{v:.3g}"
    ),
    RunColumn("server saw", lambda r: saw_of(saw_by(r)) or None, _as_is),
    RunColumn("status", lambda r: None if r.status == FINISHED else r.status, _as_is),
)


def each_run(
    readings: Sequence[Reading], id: str, level: int, link_of: Callable[[str], str]
) -> Markup | None:
    """A row for each run; None if each is a row of the methods. Empty columns are left out."""
    alike = len({r.judged_by for r in readings}) == 1
    if alike and all(len(kind.runs) == 1 for kind in kinds_of(readings)):
        return None
    values = [[column.value(r) for column in COLUMNS] for r in readings]
    kept = [i for i, column in enumerate(COLUMNS) if _worth(column, [row[i] for row in values])]
    if all(r.method in r.name for r in readings):
        kept = [i for i in kept if COLUMNS[i].title != "method"]
    rows, full = [], [in_full(r.rounds, r.judged_by) for r in readings]
    for place, (reading, row) in enumerate(zip(readings, values, strict=True)):
        cells = [HtmlCell(reading.name, reading.name, link=link_of(reading.name))]
        for i in kept:
            column, value = COLUMNS[i], row[i]
            key = {"worst client": "worst"}.get(column.title, column.title)
            sign = sign_of({**full[place], key: value}, key)
            shown = None if value is None else column.show(value, reading) + sign
            cells.append(HtmlCell(shown, value))
        rows.append(cells)
    titles = ["run", *(COLUMNS[i].title for i in kept)]
    return render(
        "compared/runs.html",
        id=id,
        level=level,
        title=f"Each of {count(len(readings), 'run')}",
        columns=titles,
        rows=rows,
        numbers=1 + (titles[1] == "method"),
    )


def _worth(column: RunColumn, values: Sequence[Any]) -> bool:
    known = [v for v in values if v is not None]
    return bool(known) and (column.shared or len({str(v) for v in values}) > 1)


# --- settings -------------------------------------------------------------------------------------


def settings(readings: Sequence[Reading], id: str, level: int) -> Markup:
    """The settings that differ between runs in a table, those they share once."""
    flat = [flattened(r.config) for r in readings]
    other = differing(flat)
    same = [key for key in flat[0] if key not in other]
    rows = [
        [key, *(None if tree.get(key) is None else str(tree[key]) for tree in flat)]
        for key in other
    ]
    shared = [[key, str(flat[0][key])] for key in same if flat[0].get(key) is not None]
    return render(
        "compared/settings.html",
        id=id,
        level=level,
        names=[r.name for r in readings],
        differing=rows,
        shared=shared,
        shared_count=count(len(shared), "setting"),
    )
