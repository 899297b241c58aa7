"""What happens in a run, written down as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coterie.core.loop import Event, Observer
from coterie.experiment.session import Session
from coterie.results.findings import news_of, warnings_of

Say = Callable[[str], None]


@dataclass
class Record(Observer):
    """Writes events, with what the method has to show of them, and says what is new in them.

    ``say`` is told in words what comes up about groups, and warnings.
    """

    session: Session
    say: Say | None = None

    def prepared(self, event: Event) -> None:
        """Setting the method up is an event if something moved, or if it has something to show."""
        state = self.session.channel.state
        moved = state.ledger.total + state.ledger.total_wasted
        if self.session.run.state.notes or moved.total or state.lasted.total:
            self.write(event)

    def write(self, event: Event) -> None:
        """Record an event."""
        session, run = self.session, self.session.run
        if run.state.notes:
            event["notes"] = dict(run.state.notes)
            run.state = replace(run.state, notes={})
        if session.directory is not None:
            session.directory.append(event)
        if session.track is not None and "event" in event:
            session.track(event)
        if self.say is None:
            return
        # A warning is said once, with the first event that gives rise to it.
        earlier = [e for e in run.events if e is not event]
        known = warnings_of(earlier, over=False)
        fresh = warnings_of([*earlier, event], over=False)[len(known) :]
        for text in (*news_of(event), *(f"warning: {text}" for text in fresh)):
            self.say(text)

    after = write  # a round is an event like any other
