"""The round loop: a federated run on one page.

A round selects its cohort, lets the method do its part, and is then looked at by observers: they
account for it, evaluate, record, save and stop. A real federation has another engine and one more
observer; the loop is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coterie.core.events import Best
from coterie.core.events import Event as Event
from coterie.core.federation import Federation
from coterie.core.messages import ClientId
from coterie.core.method import Budget, Method, Public, Round, Setup, Spent, State
from coterie.errors import Abandoned, CoterieError, TrainingError


@dataclass
class RunState:
    """Where a run stands: what the method remembers, how far it is, and what has happened.

    ``done`` counts finished rounds and is −1 before the method has been set up. ``setup`` is the
    event of that, ``history`` has an event a round. ``best`` is the best round on validation data,
    ``stopped`` says why no further round follows, if so.
    """

    rounds: int
    state: State = field(default_factory=State)
    done: int = -1
    stopped: str = ""
    best: Best = field(default_factory=Best)
    setup: Event = field(default_factory=Event)
    history: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """The events so far: what was before the first round, and the rounds."""
        return [e for e in (self.setup, *self.history) if e]


class Observer:
    """Looks at a run between its rounds. Each does one thing, and overrides what it needs."""

    def prepared(self, event: Event) -> None:
        """The method has been set up, for the first time in this run."""

    def started(self) -> None:
        """The first round of this session follows, unless it is stopped now."""

    def before(self, number: int) -> None:
        """The round of this number, from 0, is about to select its cohort."""

    def after(self, event: Event) -> None:
        """A round is over; ``event`` is what is recorded of it."""

    def ended(self) -> None:
        """No round follows."""


class Remembers(Protocol):
    """What a federation remembers of its clients."""

    def spent(self) -> Spent:
        """What the run has cost so far."""
        ...

    def go_back(self) -> None:
        """The present round came to nothing: all is as it was when it began."""
        ...


class RoundFederation(Federation, Protocol):
    """A federation that knows about rounds."""

    @property
    def state(self) -> Remembers:
        """What it remembers."""
        ...

    def open(self, number: int) -> Sequence[ClientId]:
        """Begin a round; gives its cohort."""
        ...

    def begin(self, round: int, stage: str = "") -> None:
        """Begin something outside of rounds."""
        ...

    def tolerates(self, error: Exception) -> bool:
        """Whether an error may come of what other people's clients sent."""
        ...


def run_rounds(
    method: Method,
    federation: RoundFederation,
    run: RunState,
    observers: Sequence[Observer],
    public: Public | None,
    budget: Budget,
) -> None:
    """All rounds that are left of a run."""
    for observer in observers:
        observer.started()
    while run.done < run.rounds and not run.stopped:
        number = run.done
        for observer in observers:
            observer.before(number)
        began, spent = time.perf_counter(), federation.state.spent()
        cohort = federation.open(number)
        event: Event = {"round": number + 1, "cohort": list(cohort)}
        try:
            info = Round(number, cohort, public, spent, budget)
            run.state = method.round(federation, run.state, info)
        except Exception as why:
            # What other people's clients sent must not end the run: this round is given up.
            if not isinstance(why, Abandoned) and not federation.tolerates(why):
                raise
            federation.state.go_back()
            event["abandoned"] = str(why) if isinstance(why, Abandoned) else failure(why)
        event["seconds"] = {"train": round(time.perf_counter() - began, 4)}
        run.history.append(event)
        run.done = number + 1
        for observer in observers:
            observer.after(event)
    for observer in observers:
        observer.ended()


def set_up(
    method: Method,
    federation: RoundFederation,
    run: RunState,
    observers: Sequence[Observer],
    setup: Setup,
) -> None:
    """Let the method prepare itself, before the first round."""
    federation.begin(0, stage="init")
    began = time.perf_counter()
    try:
        run.state = method.init(federation, setup)
    except Exception as why:
        if isinstance(why, CoterieError) or not federation.tolerates(why):
            raise
        raise TrainingError(
            f"{failure(why)}. A client may have sent an unusable answer: start coterie serve again"
        ) from why
    run.done = 0
    run.setup = {"round": 0, "event": "init"}
    run.setup["seconds"] = {"train": round(time.perf_counter() - began, 4)}
    for observer in observers:
        observer.prepared(run.setup)


def failure(why: Exception) -> str:
    """An error of the server's own part of a round, in words."""
    return f"the server's part failed with {type(why).__name__}: {why}"
