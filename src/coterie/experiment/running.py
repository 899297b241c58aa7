"""A run put together from its parts, or taken up where its last checkpoint left it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from coterie.channel.channel import Channel
from coterie.channel.exposure import Exposure
from coterie.channel.policy import Selection
from coterie.channel.privacy.spending import Spending
from coterie.channel.state import ChannelState
from coterie.channel.wire import Wire
from coterie.client.plan import Plan
from coterie.client.store import Store
from coterie.core.engine import Engine, Remote
from coterie.core.events import INIT, Best
from coterie.core.loop import Event, Observer, RunState, run_rounds, set_up
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.checkpoint import Checkpoints
from coterie.experiment.closing import Closing
from coterie.experiment.membership import Membership
from coterie.experiment.observers import (
    Account,
    Evaluate,
    GiveUp,
    Guarding,
    Piggyback,
    Progress,
    Record,
    Saving,
    Say,
    Stopping,
)
from coterie.experiment.privacy import Guard
from coterie.experiment.resuming import sound
from coterie.experiment.session import RunSession, Tell
from coterie.experiment.trouble import Trouble
from coterie.results.evaluation import Scores
from coterie.results.rundir import RunDir, rounds_of

if TYPE_CHECKING:
    from coterie.experiment.experiment import Experiment


@dataclass
class Memory:
    """What a run remembers: its own state, that of the channel, and where both are saved."""

    run: RunState
    channel: ChannelState
    checkpoints: Checkpoints | None = None
    store: Store | None = None  # None, if clients keep their states elsewhere


def remembered(
    experiment: Experiment,
    plan: Plan,
    directory: RunDir | None,
    elsewhere: bool,
    resume: bool = False,
    discard: bool = False,
    say: Say | None = None,
) -> Memory:
    """A new run, or the newest good checkpoint; one stopped before its first begins anew.

    ``discard`` accepts that history is lost which cannot be read any more.
    """
    settings, layout, privacy = experiment.settings, plan.start.layout, plan.privacy
    exposure = Exposure(
        layers=layout.only(layout.shareable).layers,
        members=len(experiment.members),
        least=privacy.min_group,
        reveals=privacy.reveal,
        secure=privacy.secure,
    )
    channel = ChannelState(
        exposure=exposure, spending=Spending(privacy.clip), members=experiment.members
    )
    memory = Memory(RunState(settings.rounds), channel)
    if not elsewhere:
        memory.store = Store(plan.folder, layout)
    if directory is None:
        return memory
    fingerprint = experiment.fingerprint(plan.start, plan.training.batch_clients)
    memory.checkpoints = Checkpoints(directory.checkpoints, fingerprint)
    if not resume:
        return memory
    if not memory.checkpoints:
        if rounds_of(directory.read_events()):
            raise RunDirError(
                f"{directory.path} has finished rounds but no checkpoint any more: it "
                "cannot be resumed. Start the run again in a new folder"
            )
        directory.rewind(-1)
        return memory
    last = sound(directory, memory.checkpoints, layout, memory.store, discard, say)[-1]
    if last.rounds > settings.rounds:
        raise ConfigError(
            f"run.rounds = {settings.rounds}, but {last.rounds} rounds are done already"
        )
    memory.checkpoints.set_aside(last.rounds)
    memory.channel = ChannelState.from_tree(last.channel)
    events = directory.rewind(last.rounds, last.lines)
    if discard:
        memory.checkpoints.mark(last.rounds, directory.marks())
    memory.run.state, memory.run.done, memory.run.best = (
        last.state,
        last.rounds,
        cast(Best, last.best),
    )
    memory.run.history = rounds_of(events)
    memory.run.setup = next((e for e in events if e.get("event") == INIT), Event())
    return memory


class Running:
    """A run that goes on: the loop, its observers, and the closing."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        memory: Memory,
        directory: RunDir | None,
        engine: Engine,
        guard: Guard,
        elsewhere: bool,
        watch: Tell | None = None,
        track: Tell | None = None,
        say: Say | None = None,
    ) -> None:
        settings, terms = experiment.settings, experiment.terms(plan.start)
        remote = cast(Remote, engine) if elsewhere else None
        wire = Wire(plan.start.layout, terms.coding.downwards.plain)
        samples = None if remote is None else remote.samples
        channel = Channel(engine, wire, terms, memory.channel, samples)
        channel.selection = Selection(
            settings.policy, terms.availability, settings.seed, memory.channel
        )
        self.session = RunSession(
            experiment, plan, memory.run, channel, guard, directory, remote, track
        )
        self.record = Record(self.session, say)
        every = settings.checkpoint_every
        if elsewhere and plan.privacy.secure:  # a round that clients have signed is always saved
            every = 1
        self.saving = Saving(self.session, memory.checkpoints, every, memory.store)
        self.piggyback = Piggyback(self.session, closing=elsewhere)
        self.stopping = Stopping(self.session)
        tells = [tell for tell in (track, watch) if tell is not None]  # who watches may end the run
        self.progress = Progress(self.session, tells, waiting(memory))
        self.membership = None
        if remote is not None:
            self.membership = Membership(self.session, remote, self.record, self.saving)
            channel.selection.present = remote.present
            channel.selection.nobody = self.membership.welcome
        guard.around(channel, "" if remote is None else remote.agreement)

    @property
    def observers(self) -> list[Observer]:
        """Who looks at each round, in order: only those that have something to do in this run."""
        session, channel = self.session, self.session.channel
        listed: list[tuple[bool, Observer | None]] = [
            (channel.piggybacks, self.piggyback),
            (True, self.membership),
            (True, Account(session)),
            (session.plan.privacy.on, Guarding(session)),
            (True, Evaluate(session, self.stopping.reason, closing=self.piggyback.closing)),
            (True, Trouble(session)),
            (True, self.record),
            (True, self.stopping),
            (session.directory is not None, self.saving),
            (bool(self.progress.tells), self.progress),
            (True, GiveUp(session, self.saving)),
        ]
        return [observer for needed, observer in listed if needed and observer is not None]

    def all(self) -> Closing:
        """All rounds that are left, then the closing evaluation."""
        experiment, run, observers = self.session.experiment, self.session.run, self.observers
        method, channel = experiment.method, self.session.channel
        if run.done < 0:
            start = self.session.plan.start
            set_up(method, channel, run, observers, experiment.setup(start))
        budget = experiment.settings.stop.budget
        run_rounds(method, channel, run, observers, experiment.public, budget)
        farewell = None if self.membership is None else self.membership.farewell
        closing = Closing(self.session, self.record.write, self._completed, farewell)
        closing.run()
        return closing

    def _completed(self, scores: Scores) -> None:
        """A last round that waits for scores has the closing ones."""
        if self.session.channel.state.unscored:
            self.piggyback.complete(scores, {}, self.session.run.history[-1:])
            self.progress.tell()


def waiting(memory: Memory) -> list[Event]:
    """The last round, if its scores are still to come."""
    return memory.run.history[-1:] if memory.channel.unscored else []
