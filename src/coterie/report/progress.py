"""Progress of a run: a bar on a terminal, a plain line for each round elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie.core.events import Event
from coterie.report.tables import round_line, score, size

Watch = Callable[[Event], None]

_LOOK_BACK = 20  # rounds that the time left is estimated from
_LEAST_BAR = 8  # columns: a shorter bar is useless
_REFRESH = 4  # times a second: only the time changes between rounds
_GAP = 2  # columns between two parts

# The parts, the most important first: a narrow terminal omits the last ones.
_FIRST = (
    *("round", "received", "left", "bytes", "abandoned", "groups", "title", "adapted", "lost"),
    "passed",
)
_SHOWN = (
    *("title", "bar", "round", "received", "adapted", "groups", "bytes", "lost", "abandoned"),
    *("passed", "left"),
)


@contextmanager
def progress(
    console: Console,
    title: str,
    rounds: int,
    judged_by: str,
    quiet: bool = False,
    *,
    done: int = 0,
    may_end: bool = False,
) -> Iterator[Watch]:
    """A function to call with each round's event.

    ``done`` is the number of earlier rounds; ``may_end`` says that a budget or a rule may end the
    run earlier, so that the time left is an upper bound.
    """
    if quiet:
        yield lambda event: None
        return
    if not console.is_terminal:

        def line(event: Event) -> None:
            console.out(f"{title}  {round_line(event, rounds, judged_by)}", highlight=False)

        yield line
        return
    board = Board(title.strip(), rounds, judged_by, done, may_end)
    with Live(board, console=console, refresh_per_second=_REFRESH) as live:

        def move(event: Event) -> None:
            board.take(event)
            live.refresh()

        try:
            yield move
        finally:
            board.end()


def saying(console: Console, title: str, quiet: bool = False) -> Callable[[str], None]:
    """A function to call with messages between rounds: it prints a line, above any bar.

    It prints warnings even where progress is not wanted.
    """

    def say(text: str) -> None:
        warning = text.startswith("warning: ")
        if quiet and not warning:
            return
        if not console.is_terminal:
            console.out(f"{title}  {text}", highlight=False)
            return
        first, _, rest = text.partition(": ")
        style = "yellow" if warning else "bold"
        console.print(Text.assemble((f"{first}:", style), f" {rest}"), soft_wrap=True)

    return say


@dataclass
class Board:
    """The line that a terminal shows about a run, as much of it as fits."""

    title: str
    rounds: int
    judged_by: str
    done: int = 0
    may_end: bool = False
    now: Callable[[], float] = time.monotonic
    abandoned: int = 0
    lost: int = 0
    parts: dict[str, Text] = field(default_factory=dict)
    ended: float | None = None
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LOOK_BACK + 1))

    def __post_init__(self) -> None:
        self.begun = self.now()

    def take(self, event: Event) -> None:
        """Show a completed round, or a round again with scores that came later."""
        now, number = self.now(), event["round"]
        again = bool(self._seen) and number <= self.done
        if not self._seen:
            # The time before the first round says nothing about the rounds.
            self._seen.append((number - 1, now - sum(event["seconds"].values())))
        if not again:
            self._seen.append((number, now))
            self.abandoned += "abandoned" in event
            self.lost += event.get("lost", 0) + event.get("late", 0)
        self.done = max(self.done, number)
        for name, scores in (
            ("received", event.get("received")),
            ("adapted", event.get("adapted")),
        ):
            if scores and self.judged_by in scores:
                self.parts[name] = self._scored(name, scores[self.judged_by])
        groups = len({g for g in event["groups"] if g is not None})
        if groups:
            self.parts["groups"] = Text(f"{groups} group{'s' * (groups > 1)}")
        moved = event["total_bytes"]
        self.parts["bytes"] = Text(size(moved["down"] + moved["up"]))
        if self.abandoned:
            self.parts["abandoned"] = Text(f"{self.abandoned} abandoned", style="yellow")
        if self.lost:
            self.parts["lost"] = Text(f"{self.lost} lost", style="yellow")

    def _scored(self, name: str, value: float | None) -> Text:
        unit = " %" if self.judged_by == "accuracy" else " R²"
        return Text.assemble(f"{name} ", (f"{score(value, self.judged_by)}{unit}", "bold"))

    def end(self) -> None:
        """There are no more rounds."""
        self.ended = self.now()

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end, from the last rounds; None before there are any."""
        if len(self._seen) < 2:
            return None
        (first, then), (last, at) = self._seen[0], self._seen[-1]
        whole = (at - then) / max(last - first, 1) * (self.rounds - self.done)
        return max(0.0, whole - (self.now() - at))

    def line(self, width: int) -> Table:
        """The parts that fit into this number of columns."""
        number = f"{self.done:>{len(str(self.rounds))}}/{self.rounds}"
        parts = {"title": Text(self.title, style="bold"), "round": Text(number), **self.parts}
        if self.ended is None:
            left = self.left
            most = "≤ " if self.may_end else ""
            if left is not None and self.done < self.rounds:
                parts["left"] = Text(f"{most}{lasting(left)} left")
            parts["passed"] = Text(f"{lasting(self.now() - self.begun)} passed", style="dim")
        else:
            parts["left"] = Text(f"in {lasting(self.ended - self.begun)}")
        kept, room = dict[str, Text | ProgressBar](), width
        for name in [n for n in _FIRST if n in parts]:
            needs = parts[name].cell_len + _GAP * bool(kept)
            if needs > room:
                break  # nor what matters less: a line loses only its last parts
            kept[name], room = parts[name], room - needs
        if room >= _LEAST_BAR + _GAP and "title" in kept:
            kept["bar"] = ProgressBar(self.rounds, self.done, width=min(room - _GAP, 40))
        grid = Table.grid(padding=(0, _GAP), pad_edge=False)
        shown = [kept[name] for name in _SHOWN if name in kept]
        for _ in shown:
            grid.add_column(no_wrap=True)
        grid.add_row(*shown)
        return grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.line(options.max_width)


def lasting(seconds: float) -> str:
    """A number of seconds in words.

    >>> lasting(8.4), lasting(75), lasting(3 * 3600 + 62), lasting(200_000)
    ('8 s', '1:15', '3:01:02', '2 d 7 h')
    """
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole} s"
