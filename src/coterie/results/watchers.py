"""Who is told of runs while they are at work."""

from __future__ import annotations

from coterie.core.events import Event
from coterie.errors import CoterieError


class Look:
    """Who is told of runs while they are at work; this one by itself does nothing about it."""

    def expect(self, runs: int, at_once: int, swept: bool) -> None:
        """So many runs follow, so many at a time; whether they are a sweep's."""

    def begin(self, name: str, rounds: int, judged_by: str) -> None:
        """A run begins."""

    def round(self, name: str, event: Event) -> None:
        """A round of it has ended."""

    def again(self, name: str, why: str) -> None:
        """Its process died; it goes on in another one."""

    def end(self, name: str, error: CoterieError | None) -> None:
        """It is finished, or failed with this."""

    def tick(self) -> None:
        """Some time has passed."""
