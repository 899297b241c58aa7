"""What ``--dry-run`` prints of a run, a comparison or a federation, without leaving a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from coterie.cli.options import out, show

if TYPE_CHECKING:
    from coterie.experiment.compare.entries import PlannedRun, Populations
    from coterie.experiment.experiment import Experiment
    from coterie.experiment.forecast import Forecast, Range

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what it will take (bytes, seconds, memory, exposure) and exit; write nothing.",
    ),
]

_SEES = {
    "nothing": "nothing of single clients",
    "means": "means over clients, and single updates only where a mean has one client",
    "each": "single clients' vectors",
}


def tell_run(experiment: Experiment, as_json: bool = False) -> None:
    """Print the forecast of one run."""
    from coterie.experiment.forecast import forecast

    found = forecast(experiment)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    for title, text in lines_of(found):
        out.print(f"{title:>9}  {escape(text)}", highlight=False, soft_wrap=True)


def lines_of(found: Forecast) -> list[tuple[str, str]]:
    """A forecast in titled lines."""
    from coterie.report.tables import size

    train, val, test = found.samples
    lines = [
        ("method", f"{found.method}, {found.rounds} rounds"),
        ("clients", f"{found.clients}, {found.cohort} in a round"),
        ("samples", f"{train:,} for training, {val:,} for validation, {test:,} for testing"),
        ("model", f"{found.model} with {found.parameters:,} parameters"),
        ("bytes", f"{_span(found.down)} down, {_span(found.up)} up"),
    ]
    lines += [("", f"a range, since {cause}") for cause in found.causes]
    lines.append(("seconds", f"about {_seconds(found.seconds)}, timed on this machine just now"))
    lines.append(("memory", f"about {size(found.memory, digits=1)}"))
    if found.epsilon is not None:
        lines.append(("privacy", f"ε at most {found.epsilon:.3g}"))
    lines.append(("exposed", f"the server sees {_SEES.get(found.sees, found.sees)}"))
    lines += [("", f"after the first rounds: {text}") for text in found.exposed]
    lines.append(("", "nothing was written"))
    return lines


def _span(span: Range) -> str:
    from coterie.report.tables import size

    if span.exact:
        return f"{span.low:,} B ({size(span.low)})"
    return f"{span.low:,} to {span.high:,} B ({size(span.low)} to {size(span.high)})"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def tell_comparison(
    entries: Sequence[PlannedRun], clients: Populations, at_once: int, tuned: int = 0
) -> None:
    """Print the forecast of all runs: one for each row, times its seeds, and their sum.

    ``tuned`` is the number of combinations that are tried for each row, if settings are tuned.
    """
    from coterie.experiment.forecast import forecast
    from coterie.report.tables import size

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("row", "runs", "bytes a run", "seconds a run", "server sees"):
        table.add_column(title, justify="left" if title == "row" else "right")
    rows: dict[str, list[PlannedRun]] = {}
    for entry in entries:
        rows.setdefault(entry.row, []).append(entry)
    seconds, low, high, memory, runs = 0.0, 0, 0, 0, 0
    causes: dict[str, None] = {}
    for row, same in rows.items():
        found = forecast(same[0].experiment(clients))
        count = len(same) + max(0, tuned - 1)
        moved = found.down + found.up
        text = size(moved.low) if moved.exact else f"{size(moved.low)} to {size(moved.high)}"
        table.add_row(escape(row), str(count), text, _seconds(found.seconds), found.sees)
        seconds, runs = seconds + count * found.seconds, runs + count
        low, high = low + count * moved.low, high + count * moved.high
        memory = max(memory, found.memory)
        causes |= dict.fromkeys(found.causes)
    show(table)
    for cause in causes:
        out.print(f"a range, since {escape(cause)}", highlight=False, soft_wrap=True)
    out.print(
        f"{runs} runs, {at_once} at a time: about {_seconds(seconds / at_once)} and "
        f"{size(low)} to {size(high)}; memory about {size(memory * at_once, digits=1)}. "
        "Nothing was written",
        highlight=False,
        soft_wrap=True,
    )
