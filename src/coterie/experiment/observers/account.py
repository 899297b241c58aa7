"""What rounds cost: bytes, seconds and privacy."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from coterie.core.loop import Event, Observer
from coterie.experiment.session import Session


@dataclass
class Account(Observer):
    """Adds to each event what the round cost, and writes its bytes to the ledger's file."""

    session: Session

    def prepared(self, event: Event) -> None:
        """What setting the method up cost."""
        state = self.session.channel.state
        event["groups"] = self.session.groups()
        event["bytes"] = state.ledger.total.to_json()
        event["wasted"] = state.ledger.total_wasted.to_json()
        event["kinds"] = {k: [b.down, b.up] for k, b in sorted(state.ledger.kinds.items())}
        event |= self.session.left_out()
        if self.session.channel.terms.clock is not None:
            event["clock"] = asdict(state.lasted)
        self._write(0)

    def before(self, number: int) -> None:
        """Privacy is spent for the models of this round."""
        self.session.guard.begin(self.session.run.state.models)

    def after(self, event: Event) -> None:
        """What this round cost."""
        event["groups"] = self.session.groups()
        event |= self.session.traffic()
        event |= self.session.guard.event()
        event |= self.session.left_out()
        self._write(event["round"])

    def _write(self, round: int) -> None:
        if self.session.directory is not None:
            self.session.directory.append_ledger(self.session.channel.state.ledger.rows(round))
