"""Scores of rounds: taken at once, or with the next round's orders where exchanges are dear."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coterie.channel.piggyback import Piggyback as Stage
from coterie.channel.piggyback import scoring
from coterie.core.loop import Event, Observer
from coterie.core.messages import ClientId
from coterie.experiment.session import RunSession
from coterie.results.evaluation import Scores, summarise
from coterie.results.rundir import SCORES


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
        last = number == self.session.run.rounds
        scored, adapted = self._due(number, last)
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

    def _due(self, number: int, last: bool) -> tuple[bool, bool]:
        """Whether a round, counted from 1, is scored, and whether with adapted models, too."""
        settings = self.session.experiment.settings
        every, adapts = settings.evaluate_every, settings.adapt_every
        scored = last or bool(every and number % every == 0)
        # A rule that looks at the adapted score needs it whenever a round is scored.
        looked = settings.stop.validates or settings.target is not None
        judged = looked and self.session.experiment.method.headline == "adapted"
        return scored, bool(adapts and number % adapts == 0) or (judged and scored)

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
