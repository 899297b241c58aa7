"""Objects that introduce themselves: a few lines of text, and small HTML cards for notebooks.

Nothing here shows data or weights: only counts, names, parameters and scores.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from coterie.data import label_table
from coterie.data.population import Population
from coterie.lazy import named
from coterie.registry import first_paragraph
from coterie.report.numbers import bytes_so_far, group_count, privacy_loss, score_with_unit, scored
from coterie.report.palette import colour_of
from coterie.report.reading import FINISHED, RUNNING, Reading
from coterie.report.rendering import render
from coterie.report.tables import size

if TYPE_CHECKING:
    from coterie.core.method import Method
    from coterie.results.comparison import Comparison

_MOST = 8  # methods, or notes, that a text lists
_ROWS = 30  # clients, or methods, that a picture shows
_WIDTH, _HEIGHT = 320, 14  # of a row of a picture, in pixels


# --- runs ----------------------------------------------------------------------------------------


def run_lines(reading: Reading) -> list[str]:
    """A run in a few lines: the method, what was reached, what it cost, and where it is."""
    rounds = len(reading.rounds)
    about = [reading.method, f"{rounds} round{'s' * (rounds != 1)}"]
    if reading.status != FINISHED:
        about[1] = f"{reading.status} after {rounds} of {reading.planned} rounds"
    if reading.names:
        about.append(f"{len(reading.names)} clients")
    groups = group_count(reading)
    if groups > 1:
        about.append(f"{groups} groups")
    if reading.seed is not None:
        about.append(f"seed {reading.seed}")
    lines, by = [", ".join(about)], reading.judged_by
    scores = []
    for title in ("received", "adapted"):
        if found := scored(reading, title):
            worst = found.get("worst")
            text = f"{title} {by if by != 'r2' else 'R²'} {score_with_unit(found.get(by), by)}"
            scores.append(text + (f" (worst client {score_with_unit(worst, by)})" if worst else ""))
    lines += [", ".join(scores)] if scores else []
    cost = []
    if total := bytes_so_far(reading):
        cost.append(f"{size(total.get('down', 0))} down, {size(total.get('up', 0))} up")
    if noise := privacy_loss(reading):
        cost.append(f"ε ≤ {noise['epsilon']:.3g}")
    if reading.path is not None:
        cost.append(f"in {reading.path}")
    lines += ["; ".join(cost)] if cost else []
    warnings = [] if reading.status == RUNNING else reading.warnings
    return [*lines, *(f"warning: {_short(text)}" for text in warnings[:3])]


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# --- comparisons ---------------------------------------------------------------------------------


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison in a few lines: its methods by score, and what is missing."""
    by = comparison.judged_by
    rows = comparison.means if comparison.swept else comparison.rows
    methods = len({row["method"] for row in rows})
    about = f"{methods} method{'s' * (methods != 1)}, {len(comparison.rows)} runs"
    if len(comparison.seeds) > 1:
        about += f", {len(comparison.seeds)} seeds"
    known = [row for row in rows if row.get("received") is not None]
    ranked = sorted(known, key=lambda row: -row["received"])
    lines = [f"{about}; received {'R²' if by == 'r2' else by}:"]
    for row in ranked[:_MOST]:
        setting = "".join(f", {axis} = {row[axis]}" for axis in comparison.axes)
        lines.append(f"{score_with_unit(row['received'], by)}  {row['method']}{setting}")
    if len(ranked) > _MOST:
        lines.append(f"and {len(ranked) - _MOST} more")
    for word in ("left_out", "failed", "stopped"):
        if names := list(getattr(comparison, word)):
            lines.append(f"{word.replace('_', ' ')}: {_short(', '.join(names))}")
    if comparison.directory is not None:
        lines.append(f"in {comparison.directory}")
    return lines


def comparison_picture(comparison: Comparison) -> Markup:
    """Each method's received score as a dot, with one small dot for each run."""
    by = comparison.judged_by
    runs: dict[str, list[float]] = {}
    for row in comparison.rows:
        if row.get("received") is not None:
            label = ", ".join([str(row["method"]), *(f"{a} {row[a]}" for a in comparison.axes)])
            runs.setdefault(label, []).append(float(row["received"]))
    values = [value for scores in runs.values() for value in scores]
    if not values:
        return Markup("")
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def across(value: float) -> float:
        return round(8 + (_WIDTH - 16) * (value - low) / span, 1)

    rows = [
        {
            "label": label,
            "dots": [across(v) for v in scores] if len(scores) > 1 else [],
            "mean": across(sum(scores) / len(scores)),
            "text": score_with_unit(sum(scores) / len(scores), by),
        }
        for label, scores in list(runs.items())[:_ROWS]
    ]
    ends = f"{score_with_unit(low, by)} to {score_with_unit(high, by)}"
    return render("card/dots.html", rows=rows, ends=ends, width=_WIDTH, height=_HEIGHT)


# --- methods -------------------------------------------------------------------------------------


def method_card(method: Method) -> Markup:
    """A method as an HTML card: its parameters, what the server sees, and its rule."""
    rows = [("parameters", _parameters(method) or "none"), ("server sees", method.sees)]
    rows.append(("judged by", f"the {method.headline} score"))
    about = ""
    if method.source is not None:
        try:
            factory = named(f"{method.source.module}:{method.source.factory}")
            about = first_paragraph(inspect.getdoc(factory) or "")
        except (ImportError, AttributeError):  # it was defined in a function, or a deleted file
            about = ""
    return render("card/object.html", title=method.name, about=about, rows=rows, picture="")


def _parameters(method: Method) -> str:
    parameters: Mapping[str, Any] = method.source.parameters if method.source else {}
    return ", ".join(f"{key} = {reprlib.repr(value)}" for key, value in parameters.items())


# --- populations ---------------------------------------------------------------------------------


def population_card(population: Population) -> Markup:
    """Clients and their data as an HTML card: counts, and each client's share of labels."""
    first, *others = population.lines
    rows = [("", line) for line in others]
    picture = _label_bars(population)
    return render("card/object.html", title=first, about="", rows=rows, picture=picture)


def _label_bars(population: Population) -> Markup:
    """One bar for each client: its training samples by label (a plain bar for numbers)."""
    counts: Sequence[Sequence[int]]
    classes: Sequence[str]
    if population.classes is None:
        counts, classes = [[len(c.train)] for c in population.clients], ("samples",)
    else:
        table = label_table(population)
        counts, classes = table.tolist(), population.classes
    counts = counts[:_ROWS]
    most = max((sum(row) for row in counts), default=0) or 1
    rows = []
    for client, row in enumerate(counts):
        start, parts = 0.0, []
        for label, count in enumerate(row):
            wide = (_WIDTH - 16) * count / most
            if count:
                words = f"{classes[label]}: {int(count)}"
                parts.append((round(start, 1), round(wide, 1), colour_of(label), words))
            start += wide
        name = population.clients[client].name or str(client)
        words = ", ".join(part[-1] for part in parts)
        rows.append({"label": name, "parts": parts, "text": str(int(sum(row))), "words": words})
    more, labelled = len(population.clients) - len(rows), population.classes is not None
    sizes = {"width": _WIDTH, "height": _HEIGHT}
    return render("card/bars.html", rows=rows, more=more, labelled=labelled, **sizes)
