"""Rounds are told of as they are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.core.loop import Event, Observer
from coterie.experiment.session import Session, Tell


@dataclass
class Progress(Observer):
    """Tells whoever follows a run of each round that has its scores; others are ``waiting``."""

    session: Session
    tells: Sequence[Tell] = ()
    waiting: list[Event] = field(default_factory=list)

    def started(self) -> None:
        """A round that waited for its scores as the run was stopped was not told of."""
        self.tell()

    def after(self, event: Event) -> None:
        """A round, and the one before it if that waited for scores."""
        self.waiting.append(event)
        self.tell()

    def ended(self) -> None:
        """The last round, if it waited for scores."""
        self.tell()

    def tell(self) -> None:
        """Tell of all rounds that are complete; who is told may end the run."""
        unscored = self.session.channel.state.unscored
        ready = [e for e in self.waiting if e["round"] != unscored]
        self.waiting = [e for e in self.waiting if e["round"] == unscored]
        for event in ready:
            for tell in self.tells:
                tell(event)
