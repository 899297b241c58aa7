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
        if self.session.directory is not None:
            self.session.directory.append_ledger(state.ledger.rows(0))

    def after(self, event: Event) -> None:
        """What this round cost: bytes by client and kind, those wasted, and seconds."""
        session, state = self.session, self.session.channel.state
        ledger, now = state.ledger, state.ledger.now
        event["groups"] = session.groups()
        event["bytes"] = now.total.to_json()
        event["total_bytes"] = ledger.total.to_json()
        event["wasted"] = now.total_wasted.to_json()
        event["total_wasted"] = ledger.total_wasted.to_json()
        event["kinds"] = {k: [b.down, b.up] for k, b in sorted(now.kinds.items())}
        event["client_bytes"] = {str(c): [b.down, b.up] for c, b in sorted(now.method.items())}
        event["lost"], event["late"] = now.lost, now.late
        if session.channel.terms.clock is not None:
            lasted = {**asdict(state.round_lasted), "total": state.lasted.total}
            event["clock"] = lasted | {f"total_{k}": v for k, v in asdict(state.lasted).items()}
        event |= session.left_out()
        if session.directory is not None:
            session.directory.append_ledger(ledger.rows(event["round"]))


@dataclass
class Guarding(Observer):
    """Begins each round of a run with privacy, and adds to its event what was spent."""

    session: Session

    def before(self, number: int) -> None:
        """Privacy is spent for the models of this round."""
        self.session.guard.begin(self.session.run.state.models)

    def after(self, event: Event) -> None:
        """What has been spent, and what was withheld."""
        event |= self.session.guard.event()
