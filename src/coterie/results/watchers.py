"""The interface of displays that follow several runs."""

from __future__ import annotations

from coterie.core.events import Event
from coterie.errors import CoterieError


class Look:
    """A display that follows several runs; this base class shows nothing."""

    def expect(self, runs: int, at_once: int, swept: bool) -> None:
        """``runs`` runs follow, ``at_once`` at a time; ``swept`` if they are a sweep."""

    def begin(self, name: str, rounds: int, judged_by: str) -> None:
        """A run has begun."""

    def round(self, name: str, event: Event) -> None:
        """A round of a run has ended."""

    def again(self, name: str, why: str) -> None:
        """The process of a run has died; the run continues in another one."""

    def end(self, name: str, error: CoterieError | None) -> None:
        """A run has finished, or failed with this error."""

    def tick(self) -> None:
        """Some time has passed."""
