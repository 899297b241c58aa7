"""The end of a run: closing scores, newcomers, and what the run comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from coterie.channel.clocks import Seconds
from coterie.channel.ledger import Bytes
from coterie.channel.policy import cohort_size
from coterie.core.events import ADMISSION
from coterie.core.loop import Event
from coterie.core.method import Round
from coterie.errors import TrainingError
from coterie.experiment.session import Session
from coterie.experiment.stopping import to_target
from coterie.results.evaluation import Scores, summarise
from coterie.results.findings import grouping_of, round_samples, warnings_of
from coterie.results.result import client_rows


@dataclass
class Closing:
    """Scores the clients once more, lets newcomers in, and sums the run up.

    ``completed`` is given the closing scores, for a last round that waits for its own. ``note``
    records an event, and ``farewell`` hands the models out in a real federation.
    """

    session: Session
    note: Callable[[Event], None]
    completed: Callable[[Scores], None]
    farewell: Callable[[dict[str, Any]], None] | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Do all of that."""
        session, run = self.session, self.session.run
        channel, directory = session.channel, session.directory
        channel.begin(max(0, run.done - 1), stage="final")
        if self.farewell is not None and directory is not None and directory.result.exists():
            # It was over when it was stopped: some clients may have left with their models.
            self.summary = directory.read_result("remove it to have it written again")
            self.farewell(self.summary)
            return
        received = session.scores()  # again, so that a finished run, resumed, counts the same bytes
        self.completed(received)
        epochs = session.adapt_epochs()
        adapted = session.scores(epochs) if epochs else received
        alone = self._alone() if session.experiment.settings.alone else {}
        if not received:
            raise TrainingError("no client could be scored: none of them answered")
        before = _Before(
            session.channel.state.ledger.total,
            session.channel.state.lasted,
            len(set(run.state.groups.values())),
            {"event": "closing", **session.left_out()},
        )
        newcomers, *scores = self._admit() if session.experiment.newcomers else ({}, {}, {})
        self.rows = client_rows(
            session.population,
            run.state,
            channel.state.ledger,
            session.judged_by,
            {**received, **scores[0]},
            {**adapted, **scores[1]},
            alone,
            session.experiment.newcomers,
        )
        self.summary = self._summary(received, adapted, before)
        if newcomers:
            self.summary["newcomers"] = newcomers
        if alone:
            self.summary["alone"] = summarise(alone, session.judged_by)
        if directory is not None:
            directory.write_table(self.rows)
            directory.write_exposure(channel.state.exposure.rows())
            directory.write_result(self.summary)
        if self.farewell is not None:
            self.farewell(self.summary)

    def _alone(self) -> Scores:
        """Every client trains alone for as many rounds as it had on average, and is scored."""
        members, settings = self.session.members, self.session.experiment.settings
        share = cohort_size(settings.cohort, len(members)) / len(members)
        turns = max(1, round(self.session.run.done * share))
        return self.session.channel.score({c: {} for c in members}, {"alone": turns})

    def _admit(self) -> tuple[dict[str, Any], Scores, Scores]:
        """Let the newcomers in and score them, as they come and after they have adapted."""
        session, run = self.session, self.session.run
        channel, newcomers = session.channel, session.experiment.newcomers
        admit, before = session.experiment.method.admit, channel.state.ledger.total
        assert admit is not None
        channel.begin(max(0, run.done - 1), stage="admit")
        info = Round(run.done, newcomers, session.experiment.public)
        run.state = admit(channel, run.state, info)
        came, rejected = [c for c in newcomers if c in run.state.groups], session.left_out()
        total, epochs = channel.state.ledger.total, session.experiment.settings.admit_epochs
        received = session.scores(clients=came)
        adapted = session.scores(epochs, came) if epochs else received
        found: dict[str, Any] = {
            "clients": came,
            "unanswered": [c for c in newcomers if c not in came],
            "groups": [run.state.groups[c] for c in came],
            "epochs": epochs,
            "received": summarise(received, session.judged_by),
            "adapted": summarise(adapted, session.judged_by),
            "bytes": asdict(total - before),
            **rejected,
        }
        self.note(cast(Event, {"round": run.done, "event": ADMISSION, **found}))
        return found, received, adapted

    def _summary(self, received: Scores, adapted: Scores, before: _Before) -> dict[str, Any]:
        """What the run comes to; bytes, seconds and groups as they were before newcomers came."""
        session, run = self.session, self.session.run
        method, settings = session.experiment.method, session.experiment.settings
        ledger = session.channel.state.ledger
        seconds = [e["seconds"] for e in (run.setup, *run.history) if "seconds" in e]
        found: dict[str, Any] = {
            "method": method.name,
            "rounds": run.done,
            "stopped": run.stopped if run.done < run.rounds else "",
            "judged_by": session.judged_by,
            "headline": method.headline,
            "received": summarise(received, session.judged_by),
            "adapted": summarise(adapted, session.judged_by),
            "best_on_validation": run.best,
            "bytes": {
                **asdict(before.moved),
                "unmetered": asdict(ledger.unmetered),
                "wasted": asdict(ledger.total_wasted),
                "kinds": {k: asdict(b) for k, b in sorted(ledger.kinds.items())},
            },
            "groups": before.groups,
            "sees": method.sees,
            "seconds": round(sum(sum(s.values()) for s in seconds), 3),
            "train_seconds": round(sum(s["train"] for s in seconds), 3),
            "lost": ledger.lost,
            "late": ledger.late,
            "abandoned": sum("abandoned" in e for e in run.history),
            "warnings": warnings_of([*run.events, before.event]),
            **({"grouping": grouping} if (grouping := self._grouping(before.groups)) else {}),
            "exposure": session.channel.state.exposure.summary(),
            **({"privacy": private} if (private := session.guard.summary()) else {}),
        }
        if session.channel.terms.clock is not None:
            found["clock"] = {**asdict(before.lasted), "total": before.lasted.total}
        if settings.target is not None:
            target, clients = settings.target, len(session.members)
            found |= to_target(run.history, method.headline, session.judged_by, target, clients)
        return found

    def _grouping(self, groups: int) -> dict[str, Any]:
        """How the run came to so many groups."""
        session = self.session
        counts = [len(session.population.clients[c].train) for c in session.members]
        whole = round_samples(counts, asdict(session.experiment.schedule))
        return grouping_of(session.run.events, groups, round_samples=whole)


@dataclass(frozen=True)
class _Before:
    """What the run had come to before newcomers came."""

    moved: Bytes
    lasted: Seconds
    groups: int
    event: Event
