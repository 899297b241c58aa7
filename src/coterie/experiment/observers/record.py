"""The event of a round: what the round cost is added to it, it is written down, and told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from coterie.core.loop import Event, Observer
from coterie.experiment.session import RunSession, Tell
from coterie.results.findings import news_of, warnings_of

Say = Callable[[str], None]


@dataclass
class Account(Observer):
    """Adds to each event what the round cost, and writes its bytes to the ledger's file."""

    session: RunSession

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

    session: RunSession

    def before(self, number: int) -> None:
        """Privacy is spent for the models of this round."""
        self.session.guard.begin(self.session.run.state.models)

    def after(self, event: Event) -> None:
        """What has been spent, and what was withheld."""
        event |= self.session.guard.event()


@dataclass
class Record(Observer):
    """Writes events, with what the method has to show of them, and says what is new in them.

    ``say`` is told in words what comes up about groups, and warnings.
    """

    session: RunSession
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


@dataclass
class Progress(Observer):
    """Tells whoever follows a run of each round that has its scores; others are ``waiting``."""

    session: RunSession
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
