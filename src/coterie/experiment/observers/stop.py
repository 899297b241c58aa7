"""What ends a run before its last round."""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.channel.ledger import Bytes
from coterie.core.loop import Event, Observer
from coterie.core.method import Spent
from coterie.errors import Interrupted, TrainingError
from coterie.experiment.observers.checkpoint import Saving
from coterie.experiment.session import RunSession
from coterie.experiment.stopping import Stop, reason


@dataclass
class Stopping(Observer):
    """Ends the run once the method, privacy, a target or a budget says so.

    What has been spent is looked at only where it is ``limited``.
    """

    session: RunSession
    limited: bool = field(init=False)

    def __post_init__(self) -> None:
        session = self.session
        self.limited = session.experiment.settings.stop != Stop() or session.plan.privacy.on

    def started(self) -> None:
        """A run that is gone on with may be over already."""
        self.session.run.stopped = self.reason()

    def after(self, event: Event) -> None:
        """Whether a round follows this one."""
        self.session.run.stopped = self.reason()

    def reason(self) -> str:
        """Why no round comes after those of the history, if so."""
        run, settings = self.session.run, self.session.experiment.settings
        if run.state.over or not self.limited:
            return run.state.over
        if over := self.session.guard.over():
            return over
        spent = self.session.channel.state.spent()
        before = self._at_first() if run.history else spent
        if len(run.history) > 1:
            before = spent_after(run.history[-2])
        method = self.session.experiment.method
        return reason(
            settings.stop, run.history, method.headline, spent, before, method.keeps_budget
        )

    def _at_first(self) -> Spent:
        """What it cost to set the method up."""
        event = self.session.run.setup
        moved = Bytes.from_json(event.get("bytes")) + Bytes.from_json(event.get("wasted"))
        return Spent(moved.total, **{k: v or 0.0 for k, v in event.get("clock", {}).items()})


def spent_after(event: Event) -> Spent:
    """What the run had cost after the round of this event."""
    moved = Bytes.from_json(event["total_bytes"]) + Bytes.from_json(event["total_wasted"])
    clock = {k: v or 0.0 for k, v in event.get("clock", {}).items() if k.startswith("total_")}
    return Spent(moved.total, **{k.removeprefix("total_"): v for k, v in clock.items()})


@dataclass
class GiveUp(Observer):
    """Breaks a run off that abandons every round, or whose folder asks for that."""

    session: RunSession
    saving: Saving

    def after(self, event: Event) -> None:
        """What was saved stays, and what was done is saved."""
        run, most = self.session.run, self.session.experiment.settings.policy.abandoned
        tail = run.history[-most:]
        if len(tail) == most and all("abandoned" in e for e in tail):
            raise TrainingError(
                f"{len(tail)} rounds in a row were abandoned, the last because "
                f"{tail[-1]['abandoned']}. Begin again in a new folder with more time "
                "(run.deadline, run.real_deadline) or fewer reports (run.min_reports)"
            )
        directory = self.session.directory
        if directory is None or run.stopped or run.done == run.rounds:
            return
        if directory.stop_asked():
            self.saving.keep()
            raise Interrupted(f"stopped after round {run.done}, as asked in {directory.path}")
