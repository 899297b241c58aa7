"""Checkpoints as a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.client.store import Store
from coterie.core.loop import Event, Observer
from coterie.experiment.checkpoint import Checkpoint, Checkpoints
from coterie.experiment.session import RunSession


@dataclass
class Saving(Observer):
    """Saves the run ``every`` so many rounds and at its end; ``store`` has clients' states."""

    session: RunSession
    checkpoints: Checkpoints | None
    every: int
    store: Store | None = None

    def prepared(self, event: Event) -> None:
        """From here a run can be gone on with."""
        self.save()

    def after(self, event: Event) -> None:
        """Save this round, if it is due."""
        run = self.session.run
        if self._due() or run.done == run.rounds or run.stopped:
            self.save()

    def keep(self) -> None:
        """Save what is done, if it is not saved."""
        if not self._due():
            self.save()

    def _due(self) -> bool:
        return self.session.run.done % self.every == 0

    def save(self) -> None:
        """Write a checkpoint."""
        session, run, state = self.session, self.session.run, self.session.channel.state
        if self.checkpoints is None or session.directory is None:
            return
        session.directory.sync()
        if self.store is not None:
            self.store.flush(state.since_saved())
        marks = session.directory.marks()
        saved = Checkpoint(run.done, run.state, state.to_tree(), run.best, marks)
        self.checkpoints.save(saved, session.plan.start.layout)
        state.retain()
