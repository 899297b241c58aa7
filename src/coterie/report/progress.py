"""Progress while a run goes on: a bar on a terminal, a plain line a round elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from coterie.report.tables import round_line, score, size

Watch = Callable[[dict[str, Any]], None]


@contextmanager
def progress(
    console: Console, title: str, rounds: int, judged_by: str, quiet: bool = False
) -> Iterator[Watch]:
    """Something to call with each round's event."""
    if quiet:
        yield lambda event: None
        return
    if not console.is_terminal:

        def line(event: dict[str, Any]) -> None:
            console.out(f"{title}  {round_line(event, rounds, judged_by)}", highlight=False)

        yield line
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task(title, total=rounds, note="", rate="")

        def move(event: dict[str, Any]) -> None:
            received = event.get("received")
            total = event["total_bytes"]
            note = f"received {score(received[judged_by], judged_by)}" if received else ""
            if event["round"] > 1 and not bar.tasks[0].completed:
                bar.reset(task, completed=event["round"] - 1)  # resumed: rounds done before
            speed = 1 / max(sum(event["seconds"].values()), 1e-9)
            bar.update(
                task,
                completed=event["round"],
                note=f"{note}  {size(total['down'] + total['up'])}",
                rate=f"{speed:.1f} rounds/s",
            )

        yield move
