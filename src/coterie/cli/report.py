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
        list[Path],
        typer.Argument(help="Run directories, or folders with several.", show_default=False),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            help="The file to write (default: report.html in the run or folder, or here)."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="The title of the report.")] = "",
    margin: Annotated[
        float | None,
        typer.Option(
            min=0, help="Differences of at most this many points count as equal (default: 0.5)."
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(help="A figure of your own, FILE.py:FUNCTION; may be repeated."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    force: Annotated[bool, typer.Option(help="Overwrite a file that is not a report.")] = False,
) -> None:
    """Write an HTML report with text, figures and tables about one or several runs."""
    from coterie.report.catalogue import load_figure
    from coterie.report.html import default_place, is_ours, write_report
    from coterie.report.tables import size
    from coterie.results.differences import MARGIN

    for name in figure or []:
        load_figure(name, "--figure")
    path = to or default_place(runs)
    if path.is_dir():
        path = path / "report.html"
    if path.exists() and not is_ours(path) and not force:
        raise ConfigError(
            f"{path} exists and is not a report: choose another file with --to, or overwrite it "
            "with --force"
        )
    equal = MARGIN if margin is None else margin / 100
    written = write_report(runs, path, title, margin=equal)
    file_size = size(written.stat().st_size, digits=1)
    out.print(
        f"[bold]report[/]  {escape(str(written))} ({file_size})", highlight=False, soft_wrap=True
    )
    if open_it and not webbrowser.open(written.resolve().as_uri()):
        out.print("could not open a browser: open the file yourself", highlight=False)
