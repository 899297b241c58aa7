"""The command ``coterie report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from coterie.errors import ConfigError

out = Console()


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or folders of them.", show_default=False)
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="The file (default: report.html in the run or folder, or here)."),
    ] = None,
    title: Annotated[str, typer.Option(help="What the report is called.")] = "",
    figure: Annotated[
        list[str] | None,
        typer.Option(help="A picture of your own, FILE.py:FUNCTION; may be repeated."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    force: Annotated[bool, typer.Option(help="Write over a file that is no report.")] = False,
) -> None:
    """Write one HTML file about runs: words, pictures, tables; several runs side by side."""
    from coterie.report.catalogue import load_figure
    from coterie.report.html import default_place, is_ours, write_report
    from coterie.report.tables import size

    for text in figure or []:
        load_figure(text, "--figure")
    place = to or default_place(runs)
    if place.is_dir():
        place = place / "report.html"
    if place.exists() and not is_ours(place) and not force:
        raise ConfigError(
            f"{place} is there already and is no report: choose another file with --to, or write "
            "over it with --force"
        )
    written = write_report(runs, place, title)
    weight = size(written.stat().st_size, digits=1)
    out.print(
        f"[bold]report[/]  {escape(str(written))} ({weight})", highlight=False, soft_wrap=True
    )
    if open_it and not webbrowser.open(written.resolve().as_uri()):
        out.print("no browser could be opened: open the file yourself", highlight=False)
