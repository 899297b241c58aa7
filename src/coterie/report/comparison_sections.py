"""The tables on a page about several runs: side by side, over seeds, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from coterie.channel.exposure import server_sees
from coterie.report import numbers
from coterie.report.comparison_tables import resting, sign_of
from coterie.report.figures.compared import alike
from coterie.report.reading import FINISHED, Reading, number
from coterie.report.rendering import HtmlCell, render
from coterie.report.run_sections import SEEN
from coterie.report.tables import score, size
from coterie.report.words import count, duration
from coterie.report.words import value as with_unit
from coterie.results.rows import in_full
from coterie.results.seeds import BEST, MARKED, TIE, means_of


@dataclass(frozen=True)
class RunColumn:
    """A column: its title, a run's value, its format, and whether the highest or lowest is best.

    ``best`` is None where neither is. A column that is not ``shared`` is left out where all runs
    have the same value, which is then among the settings.
    """

    title: str
    value: Callable[[Reading], Any]
    show: Callable[[Any, Reading], str]
    best: Callable[[Sequence[float]], float] | None = None
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


def _clock(reading: Reading) -> float | None:
    return number(numbers.clock(reading).get("total"))


def _sees(reading: Reading) -> str | None:
    exposure = reading.result.get("exposure") or reading.result.get("sees")
    return server_sees(reading.result) if exposure else None


def _as_score(value: float, reading: Reading) -> str:
    return score(value, reading.judged_by)


def _with_unit(value: float, reading: Reading) -> str:
    return with_unit(value, reading.judged_by)


def _as_is(value: Any, reading: Reading) -> str:
    return str(value)


COLUMNS = (
    RunColumn("method", lambda r: r.method, _as_is, shared=False),
    RunColumn("seed", lambda r: r.seed, _as_is, shared=False),
    RunColumn("received", _scored("received"), _as_score, max),
    RunColumn("adapted", _scored("adapted"), _as_score, max),
    RunColumn("worst client", _worst, _as_score, max),
    RunColumn("newcomers", _newcomers, _as_score, max),
    RunColumn("groups", lambda r: numbers.group_count(r) or None, _as_is),
    RunColumn("rounds", lambda r: len(r.rounds), _as_is, shared=False),
    RunColumn("bytes", _bytes, lambda v, r: size(v, digits=1)),
    RunColumn(
        "simulated time",
        lambda r: numbers.clock(r).get("total"),
        lambda v, r: duration(v),
        min,
    ),
    RunColumn(
        "ε", lambda r: number(numbers.privacy_loss(r).get("epsilon")), lambda v, r: f"{v:.3g}"
    ),
    RunColumn("server saw", _sees, lambda v, r: SEEN.get(v, v)),
    RunColumn("status", lambda r: None if r.status == FINISHED else r.status, _as_is),
)


def side_by_side(readings: Sequence[Reading], id: str) -> Markup:
    """A row for each run, with the best of each column marked; empty columns are left out."""
    values = [[column.value(r) for column in COLUMNS] for r in readings]
    judged = {r.judged_by for r in readings}
    kept = [i for i, column in enumerate(COLUMNS) if _worth(column, [row[i] for row in values])]
    if all(r.method in r.name for r in readings):
        kept = [i for i in kept if COLUMNS[i].title != "method"]
    rows, full = [], [in_full(r.rounds, r.judged_by) for r in readings]
    for place, (reading, row) in enumerate(zip(readings, values, strict=True)):
        link = f"#run-{place + 1}"
        cells = [HtmlCell(reading.name, reading.name, link=link)]
        for i in kept:
            column, value = COLUMNS[i], row[i]
            scored = column.show is _as_score
            comparable = [
                v[i]
                for v, other in zip(values, readings, strict=True)
                if v[i] is not None and (not scored or other.judged_by == reading.judged_by)
            ]
            best = (
                column.best is not None
                and len(set(comparable)) > 1
                and value == column.best(comparable)
            )
            show = _with_unit if scored and len(judged) > 1 else column.show
            key = _KEYS.get(column.title, column.title)
            sign = sign_of({**full[place], key: value}, key)
            cells.append(
                HtmlCell(None if value is None else show(value, reading) + sign, value, best)
            )
        rows.append(cells)
    accuracy = judged == {"accuracy"}
    caption = f"{len(readings)} runs; scores are means over clients{', in %' * accuracy}"
    if len(judged) > 1:
        caption += "; the best is marked among runs that are judged by the same score"
    adapting = [r.name for r in readings if r.headline == "adapted"]
    if adapting:
        caption += f"; judged after adapting, including the worst client: {', '.join(adapting)}"
    rows_in_full = [
        {"method": r.name, **row_in_full} for r, row_in_full in zip(readings, full, strict=True)
    ]
    caption = ". ".join([caption, *resting(rows_in_full, readings[0].judged_by)])
    titles = ["run", *(COLUMNS[i].title for i in kept)]
    return render(
        "table.html",
        id=id,
        title="",
        caption=caption,
        columns=titles,
        rows=rows,
        sortable=True,
        numbers=1 + (titles[1] == "method"),
    )


def _worth(column: RunColumn, values: Sequence[Any]) -> bool:
    known = [v for v in values if v is not None]
    return bool(known) and (column.shared or len({str(v) for v in values}) > 1)


def over_seeds(readings: Sequence[Reading], id: str, level: int) -> Markup | None:
    """Means over runs that differ only in their seed; None if there are none.

    Only runs whose configuration has a method and a seed count.
    """
    by, readings = alike([r for r in readings if "method" in r.config and r.seed is not None])
    if not readings:
        return None
    flat = [flattened(r.config) for r in readings]
    other = [k for k in _differing(flat) if k != "run.seed" and not k.startswith("method.")]
    titles = _distinct(
        _titles(readings, flat),
        [(r.seed, *map(t.get, other)) for r, t in zip(readings, flat, strict=True)],
    )
    rows = [
        {
            **{axis: tree.get(axis) for axis in other},
            "method": title,
            "seed": reading.seed,
            "received": _scored("received")(reading),
            "adapted": _scored("adapted")(reading),
            "newcomers": _newcomers(reading),
            "worst": _worst(reading),
            "groups": numbers.group_count(reading),
            "bytes": _bytes(reading),
            "clock_total": _clock(reading),
            **in_full(reading.rounds, by),
        }
        for title, reading, tree in zip(titles, readings, flat, strict=True)
        if reading.status == FINISHED
    ]
    means = means_of(rows, other)
    if all(line["seeds"] < 2 for line in means):
        return None
    scores = [key for key in MARKED if any(line[key] is not None for line in means)]
    columns = ["method", *other, "seeds", *(_WORDS.get(key, key) for key in scores)]
    cells = [
        [
            line["method"],
            *(str(line[axis]) for axis in other),
            HtmlCell(str(line["seeds"]), line["seeds"]),
            *(_spread(line, key, by) for key in scores),
            HtmlCell(f"{line['groups']:.3g}", line["groups"]),
            HtmlCell(size(line["bytes"] or 0, digits=1), line["bytes"]),
        ]
        for line in means
    ]
    caption = "Means over seeds ± standard deviation, the best of each column marked"
    if any(line[f"{key}_mark"] == TIE for line in means for key in scores):
        caption += "; = is not significantly worse than it (paired t-test, Holm, 5 %)"
    caption = ". ".join([caption, *resting(means, by, other)])
    return render(
        "table.html",
        id=id,
        title="Over seeds",
        level=level,
        caption=caption,
        columns=[*columns, "groups", "bytes"],
        rows=cells,
        sortable=True,
        numbers=1 + len(other),
    )


_WORDS = {"worst": "worst client"}
_KEYS = {title: key for key, title in _WORDS.items()}


def _spread(line: Mapping[str, Any], key: str, judged_by: str) -> HtmlCell:
    if line[key] is None:
        return HtmlCell(None)
    std, mark = line[f"{key}_std"], line[f"{key}_mark"]
    around = "" if std is None else f" ± {score(std, judged_by)}"
    equal = " =" if mark == TIE else ""
    text = score(line[key], judged_by) + around + sign_of(line, key) + equal
    return HtmlCell(text, line[key], mark == BEST)


def _titles(readings: Sequence[Reading], flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Methods, with the parameters by which runs of the same method differ."""
    titles = []
    for reading, tree in zip(readings, flat, strict=True):
        alike = [t for r, t in zip(readings, flat, strict=True) if r.method == reading.method]
        parameters = [
            k for k in _differing(alike) if k.startswith("method.") and tree.get(k) is not None
        ]
        titles.append(" ".join([reading.method, *(f"{k[7:]}={tree[k]}" for k in parameters)]))
    return titles


def _distinct(titles: Sequence[str], places: Sequence[Sequence[Any]]) -> list[str]:
    """Titles, with a number after later runs with the same title, seed and settings.

    >>> _distinct(["a", "a", "a"], [(1,), (2,), (1,)])
    ['a', 'a', 'a (2)']
    """
    counts: dict[str, int] = {}
    unique = []
    for title, setting in zip(titles, places, strict=True):
        key = repr((title, *setting))
        counts[key] = counts.get(key, 0) + 1
        unique.append(title if counts[key] == 1 else f"{title} ({counts[key]})")
    return unique


def _differing(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ."""
    keys = list(dict.fromkeys(key for tree in flat for key in tree))
    return [k for k in keys if any(tree.get(k) != flat[0].get(k) for tree in flat)]


def settings(readings: Sequence[Reading], id: str, level: int) -> Markup:
    """The settings that differ between runs in a table, those they share once."""
    flat = [flattened(r.config) for r in readings]
    other = _differing(flat)
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


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys.

    >>> flattened({"run": {"seed": 1, "stop": {}}, "x": [1]})
    {'run.seed': 1, 'run.stop': {}, 'x': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = value
    return flat
