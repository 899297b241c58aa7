"""Progress of several runs: on a terminal, a bar for all and a line for each active run.

Elsewhere there is a line for each completed run; for a single run, or on request, a line for each
round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie.channel.ledger import Bytes
from coterie.core.events import Event
from coterie.errors import CoterieError, Interrupted
from coterie.report.progress import Board, Watch, lasting, progress
from coterie.report.tables import score, size
from coterie.results.watchers import Look

_NAME = 12  # the fewest columns for a name
_BAR = 40
_GAP = 2
_REFRESH = 4  # times a second


@contextmanager
def runs_progress(console: Console, quiet: bool = False, verbose: bool = False) -> Iterator[Look]:
    """A display of several runs; ``verbose`` prints each round where there is no terminal."""
    if quiet:
        yield Look()
        return
    with ExitStack() as stack:
        yield Screen(console, stack) if console.is_terminal else LineByLine(console, stack, verbose)


class LineByLine(Look):
    """Plain lines, for files and pipes."""

    def __init__(self, console: Console, stack: ExitStack, verbose: bool = False) -> None:
        self._console, self._stack, self._verbose = console, stack, verbose
        self._watches: dict[str, Watch] = {}
        self._last: dict[str, str] = {}
        self._runs = self._over = 0
        self._swept = False

    def expect(self, runs: int, at_once: int, swept: bool) -> None:
        """Announce the number of runs."""
        self._runs, self._swept = runs, swept

    def begin(self, name: str, rounds: int, judged_by: str) -> None:
        """A run has begun."""
        line: Watch = lambda _: None  # noqa: E731
        if self._runs < 2 or self._verbose:
            shown = progress(self._console, f"{name:{_NAME}}", rounds, judged_by)
            line = self._stack.enter_context(shown)
        unit = " %" if judged_by == "accuracy" else ""
        spent = 0.0

        def watch(event: Event) -> None:
            nonlocal spent
            line(event)
            spent += sum(event.get("seconds", {}).values())
            if event.get("received"):
                points = score(event["received"][judged_by], judged_by)
                groups = len({g for g in event.get("groups", ()) if g is not None})
                moved = Bytes.from_json(event.get("total_bytes")).total
                self._last[name] = (
                    f"received {points}{unit}, {groups} group{'s' * (groups != 1)}, "
                    f"{size(moved)}, {spent:.0f} s"
                )

        self._watches[name] = watch

    def round(self, name: str, event: Event) -> None:
        """A run has completed a round."""
        self._watches[name](event)

    def again(self, name: str, why: str) -> None:
        """A run was restarted in another process."""
        self._say(f"{name}: its process {why}; it continues in another process")

    def end(self, name: str, error: CoterieError | None) -> None:
        """A run has finished or failed."""
        self._over += 1
        if self._swept or self._runs > 1 or error is not None:
            came_to = self._last.get(name, "finished")
            if error is not None:
                came_to = f"{_fate(error)}: {error}"
            self._say(f"{self._over}/{self._runs}  {name}: {came_to}")

    def tick(self) -> None:
        """Do nothing: plain lines do not change between rounds."""

    def _say(self, text: str) -> None:
        self._console.out(text, highlight=False)


class Screen(Look):
    """A bar for all runs, and a line for each active run."""

    def __init__(
        self, console: Console, stack: ExitStack, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._stack, self._now = console, stack, now
        self._boards: dict[str, Board] = {}
        self._runs = self._over = self._failed = 0
        self._swept = False
        self._begun = now()
        self._live: Live | None = None

    def expect(self, runs: int, at_once: int, swept: bool) -> None:
        """Announce the number of runs."""
        self._runs, self._swept, self._begun = runs, swept, self._now()
        if not runs:
            return
        # A drawing thread must not exist when processes are forked: they would inherit its
        # locks. With several runs at a time there is somebody who ticks.
        live = Live(
            self,
            console=self._console,
            auto_refresh=at_once == 1,
            refresh_per_second=_REFRESH,
            redirect_stderr=at_once == 1,
            redirect_stdout=at_once == 1,
        )
        self._live = self._stack.enter_context(live)

    def begin(self, name: str, rounds: int, judged_by: str) -> None:
        """A run has begun."""
        self._boards[name] = Board("", rounds, judged_by)  # names have a column of their own
        self.tick()

    def round(self, name: str, event: Event) -> None:
        """A run has completed a round."""
        self._boards[name].take(event)

    def again(self, name: str, why: str) -> None:
        """A run was restarted in another process."""
        self._print(
            f"[yellow]note:[/] {escape(name)}: its process {why}; it continues in another process"
        )

    def end(self, name: str, error: CoterieError | None) -> None:
        """A run has finished or failed."""
        self._over += 1
        board = self._boards.pop(name, None)
        if error is not None:
            stopped = isinstance(error, Interrupted)
            self._failed += not stopped
            colour = "yellow" if stopped else "red"
            self._print(f"[{colour}]{escape(name)}[/] {_fate(error)}: {escape(str(error))}")
        elif board is not None and not self._swept:
            board.end()
            self._print(_named({name: board}, self._console.width))
        self.tick()

    def tick(self) -> None:
        """Draw the present state."""
        if self._live is not None:
            self._live.refresh()

    def _print(self, what: Any) -> None:
        self._console.print(what, highlight=False)

    @property
    def share(self) -> float:
        """The completed share of all runs, 0 to 1."""
        parts = [b.done / b.rounds for b in self._boards.values()]
        return (self._over + sum(parts)) / max(self._runs, 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._boards:
            yield _named(self._boards, options.max_width)
        if self._runs < 2:
            return
        passed, share = self._now() - self._begun, self.share
        left = f"{lasting(passed * (1 - share) / share)} left" if 0 < share < 1 else ""
        failed = f"[red]{self._failed} failed[/]" if self._failed else ""
        grid = Table.grid(padding=(0, _GAP), pad_edge=False)
        words = [
            f"[bold]{self._over}/{self._runs} runs[/]",
            failed,
            f"[dim]{lasting(passed)} passed[/]",
        ]
        grid.add_row(words[0], ProgressBar(1.0, share, width=_BAR), *filter(None, words[1:]), left)
        yield grid


def _fate(error: CoterieError) -> str:
    return "stopped" if isinstance(error, Interrupted) else "failed"


def _named(boards: Mapping[str, Board], width: int) -> Table:
    """A line for each run: its name, and as much else as fits."""
    most = min(max(_NAME, *map(len, boards)), width // 2)
    grid = Table.grid(padding=(0, _GAP), pad_edge=False)
    for name, board in boards.items():
        grid.add_row(Text(shortened(name, most), style="bold"), board.line(width - most - _GAP))
    return grid


def shortened(name: str, most: int) -> str:
    """A name cut in the middle to at most this many characters, since both ends identify runs.

    >>> shortened("fedavg, dirichlet alpha=0.1, seed 4", 20)
    'fedavg, di…1, seed 4'
    """
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[len(name) - end :]}"
