"""What is done about a run between its rounds, each observer one thing, in the order of a round.

``running`` lists those that have something to do in a run. A real federation has one more, in
``membership``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from coterie.channel.ledger import Bytes
from coterie.channel.piggyback import Piggyback as Stage
from coterie.channel.piggyback import scoring
from coterie.client.store import Store
from coterie.core.loop import Event, Observer
from coterie.core.messages import ClientId
from coterie.core.method import Spent
from coterie.errors import Interrupted, TrainingError
from coterie.experiment.checkpoint import Checkpoint, Checkpoints
from coterie.experiment.session import RunSession, Tell
from coterie.experiment.stopping import Stop, reason
from coterie.results.evaluation import Scores, summarise
from coterie.results.findings import news_of, warnings_of
from coterie.results.rundir import SCORES

Say = Callable[[str], None]


@dataclass
class Piggyback(Observer):
    """Lets a round's orders ask for the scores of the round before, too, if these wait for it.

    With ``closing`` those of the last round wait for the scores at the end of the run.
    """

    session: RunSession
    closing: bool = False

    def started(self) -> None:
        """A rule that ends the run by scores may be new since it was stopped."""
        if self.session.experiment.settings.stop.validates:
            self._catch_up()

    def before(self, number: int) -> None:
        """The next exchange asks for the scores of the last round, as it left the clients."""
        if unscored := self.session.channel.state.unscored:
            sends = self.session.sends(self.session.scored_after(unscored))
            self.session.channel.stage(Stage).attach(scoring(sends, {}), unscored - 1)

    def after(self, event: Event) -> None:
        """The scores that came with this round complete the last one."""
        if self.session.channel.state.unscored:
            self._collect(self.session.run.history[-2:-1])

    def ended(self) -> None:
        """No order comes that the scores of the last round could go with."""
        if not self.closing:
            self._catch_up()

    def _catch_up(self) -> None:
        channel = self.session.channel
        if unscored := channel.state.unscored:
            channel.begin(unscored - 1, stage=f"{unscored}.{SCORES}")
            self.before(unscored)
            self._collect(self.session.run.history[-1:])

    def _collect(self, waiting: list[Event]) -> None:
        """Give a round the scores that came; without an exchange to go with, they get their own."""
        stage = self.session.channel.stage(Stage)
        if stage.orders:
            self.session.channel.exchange([])
        self.complete(*stage.collect(), waiting)

    def complete(
        self, scores: Scores, failed: Mapping[ClientId, str], waiting: list[Event]
    ) -> None:
        """Give the round that waits for scores these."""
        found: Event = {}
        round = self.session.channel.state.unscored
        if scores:
            found |= self.session.received(scores, round)
        if failed:
            found["failed_scores"] = {str(c): failed[c] for c in sorted(failed)}
        if found and self.session.directory is not None:
            self.session.directory.append({"round": round, "event": SCORES, **found})
        for event in waiting:  # one; none if the run's events were removed
            if event["round"] == round:
                event |= found
        self.session.channel.state.unscored = 0


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
class Evaluate(Observer):
    """Scores the clients after a round, if it is due, or lets them wait for the next one.

    ``ends`` says why no round follows the present one, if so; with ``closing`` the scores of the
    last round wait for those at the end of the run.
    """

    session: RunSession
    ends: Callable[[], str]
    closing: bool = False
    waits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.waits = may_wait(self.session)

    def after(self, event: Event) -> None:
        """Score this round."""
        began, number = time.perf_counter(), event["round"]
        settings, last = self.session.experiment.settings, number == self.session.run.rounds
        every, adapts = settings.evaluate_every, settings.adapt_every
        scored = last or bool(every and number % every == 0)
        # A rule that looks at the adapted score needs it whenever a round is scored.
        looked = settings.stop.validates or settings.target is not None
        judged = looked and self.session.experiment.method.headline == "adapted"
        adapted = bool(adapts and number % adapts == 0) or (judged and scored)
        # There must be another order; or the closing scores, which are of the same models.
        # Adapting takes an exchange anyway.
        if "abandoned" not in event and scored and not adapted and self.waits and self._goes_on():
            self.session.channel.state.unscored = number
        elif "abandoned" not in event or last:
            if scored:
                scores = self.session.scores(clients=self.session.scored_after(number))
                event |= self.session.received(scores, number)
            if adapted:
                self._adapted(event)
        event["exchanges"] = self.session.channel.phase.exchanges
        event["seconds"]["score"] = round(time.perf_counter() - began, 4)

    def _adapted(self, event: Event) -> None:
        sample = self.session.scored_after(event["round"])
        scores = self.session.scores(self.session.adapt_epochs(), sample)
        adapted = self.session.scored("adapted", scores, summarise(scores, self.session.judged_by))
        both = {**event.get("client_scores", {}), **adapted["client_scores"]}
        event |= {**adapted, "client_scores": both}

    def _goes_on(self) -> bool:
        """Whether an exchange follows that the scores of the present round can go with."""
        run = self.session.run
        return self.closing or not (run.done == run.rounds or self.ends())


def may_wait(session: RunSession) -> bool:
    """Whether scores of a round can go with the next one's first order, in this run."""
    terms = session.channel.terms
    return (
        session.channel.engine.piggybacks
        # The scores say whether there is a next round.
        and not session.experiment.settings.stop.validates
        # Where seconds are simulated, an order must weigh what the method alone makes of it.
        and terms.clock is None
        and terms.availability is None
        # Clients sign, and noise is drawn by, all that an order says: it says nothing else.
        and not session.plan.privacy.on
    )


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
        self.tell(event)

    def ended(self) -> None:
        """The last round, if it waited for scores."""
        self.tell()

    def tell(self, *more: Event) -> None:
        """Tell of all rounds that are complete; who is told may end the run."""
        unscored, events = self.session.channel.state.unscored, [*self.waiting, *more]
        self.waiting = [e for e in events if e["round"] == unscored]
        for event in events:
            if event["round"] != unscored:
                for tell in self.tells:
                    tell(event)


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
