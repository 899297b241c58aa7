"""The parts of a run that goes on, as its observers share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from coterie.channel.channel import Channel
from coterie.client.plan import Plan
from coterie.core.engine import Remote
from coterie.core.loop import Event, RunState
from coterie.core.messages import ClientId, Slot
from coterie.data.population import Population
from coterie.experiment.privacy import Guard
from coterie.results.evaluation import Scores, by_client, main_score, summarise
from coterie.results.rundir import RunDir
from coterie.seeds import numpy_generator, seed_for

if TYPE_CHECKING:
    from coterie.experiment.experiment import Experiment

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class RunSession:
    """What a run consists of while it goes on; ``remote`` is its engine, if clients are elsewhere.

    ``track`` is told of events that are no rounds.
    """

    experiment: Experiment
    plan: Plan
    run: RunState
    channel: Channel
    guard: Guard
    directory: RunDir | None = None
    remote: Remote | None = None
    track: Tell | None = None

    @property
    def population(self) -> Population:
        """The clients as they are known now: a real federation may have more than it began with."""
        return self.plan.population if self.remote is None else self.remote.population

    @property
    def members(self) -> list[ClientId]:
        """Who takes part."""
        return self.channel.state.members

    @property
    def judged_by(self) -> str:
        """The score that the run is judged by."""
        return main_score(self.plan.population.classes is None)

    def groups(self) -> list[Slot | None]:
        """Each client's group, in client order; newcomers have none before they come."""
        return [self.run.state.groups.get(c) for c in range(len(self.population.clients))]

    def left_out(self) -> Event:
        """Whose answers were not used since the round, or the stage, began, and why."""
        rejected = {str(c): why for c, why in sorted(self.channel.phase.rejected.items())}
        return {"rejected": rejected} if rejected else {}

    def sends(self, clients: Sequence[ClientId]) -> dict[ClientId, Mapping[str, Any]]:
        """What each of these would be sent now: the model that it is scored with."""
        return {c: self.experiment.method.sends(self.run.state, c) for c in clients}

    def scored_after(self, round: int) -> list[ClientId]:
        """The members that are scored after a round: all, or a sample of its own."""
        settings, members = self.experiment.settings, self.members
        asked = settings.evaluate_clients
        share = asked * len(members) if isinstance(asked, float) and asked <= 1 else asked
        count = max(1, int(share + 0.5))
        if count >= len(members):
            return members
        drawn = numpy_generator(seed_for(settings.seed, "evaluate", round))
        return sorted(int(c) for c in drawn.choice(members, count, replace=False))

    def scores(self, adapt_epochs: int = 0, clients: Sequence[ClientId] | None = None) -> Scores:
        """The scores of clients with the models that they would use now, or adapt them to."""
        sends = self.sends(self.members if clients is None else clients)
        return self.channel.score(sends, {"adapt_epochs": adapt_epochs} if adapt_epochs else {})

    def adapt_epochs(self) -> int:
        """For how many epochs a model is adapted before it is scored."""
        asked, method = self.experiment.settings.adapt_epochs, self.experiment.method
        epochs = self.experiment.schedule.epochs if asked is None else asked
        # A method that is judged by what adapting gives has its own way to do it.
        return max(1, epochs) if method.headline == "adapted" else epochs

    def scored(self, title: str, scores: Scores, summary: Mapping[str, Any]) -> Event:
        """What an event says of scores: their summary, and each client's own, in client order."""
        own = by_client(scores, self.judged_by, len(self.population.clients))
        return cast(Event, {title: summary, "client_scores": {title: own}})

    def received(self, scores: Scores, round: int) -> Event:
        """What a round's scores come to; the best round on validation data is noted."""
        summary, best = summarise(scores, self.judged_by), self.run.best
        value, highest = summary.get("val"), best.get("val")
        if value is not None and (highest is None or value > highest):
            self.run.best = {"val": value, "round": round, "received": summary}
        return self.scored("received", scores, summary)
