"""The end of a run: final scores, newcomers, and the summary."""

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
from coterie.experiment.session import RunSession
from coterie.experiment.stopping import to_target
from coterie.experiment.trouble import adapting_harms, never_grouped
from coterie.results.evaluation import Scores, summarise
from coterie.results.findings import grouping_of, round_samples, warnings_of
from coterie.results.result import client_rows


@dataclass
class Closing:
    """Scores the clients, admits newcomers, and writes the summary of the run.

    ``completed`` receives the final scores, for a last round that still waits for its scores.
    ``note`` records an event, and ``farewell`` sends the models to clients of a real federation.
    """

    session: RunSession
    note: Callable[[Event], None]
    completed: Callable[[Scores], None]
    farewell: Callable[[dict[str, Any]], None] | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Close the run, or read its summary if it was closed before."""
        session, run = self.session, self.session.run
        channel, directory = session.channel, session.directory
        channel.begin(max(0, run.done - 1), stage="final")
        if self.farewell is not None and directory is not None and directory.result.exists():
            # The run was closed before: some clients may have left with their models.
            self.summary = directory.read_result("remove it to have it written again")
            self.farewell(self.summary)
            return
        received = session.scores()  # also if known: a resumed run must count the same bytes
        self.completed(received)
        epochs = session.adapt_epochs()
        adapted = session.scores(epochs) if epochs else received
        alone = self._alone() if session.experiment.settings.alone else {}
        if not received:
            raise TrainingError("no client could be scored: none answered")
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
        """The scores of clients that trained alone, for as many rounds as each had on average."""
        members, settings = self.session.members, self.session.experiment.settings
        share = cohort_size(settings.cohort, len(members)) / len(members)
        rounds = max(1, round(self.session.run.done * share))
        return self.session.channel.score({c: {} for c in members}, {"alone": rounds})

    def _admit(self) -> tuple[dict[str, Any], Scores, Scores]:
        """Admit the newcomers and score them, before and after they adapt the model."""
        session, run = self.session, self.session.run
        channel, newcomers = session.channel, session.experiment.newcomers
        admit, before = session.experiment.method.admit, channel.state.ledger.total
        assert admit is not None
        channel.begin(max(0, run.done - 1), stage="admit")
        round_info = Round(run.done, newcomers, session.experiment.public)
        run.state = admit(channel, run.state, round_info)
        admitted, left_out = [c for c in newcomers if c in run.state.groups], session.left_out()
        total, epochs = channel.state.ledger.total, session.experiment.settings.admit_epochs
        received = session.scores(clients=admitted)
        adapted = session.scores(epochs, admitted) if epochs else received
        summary: dict[str, Any] = {
            "clients": admitted,
            "unanswered": [c for c in newcomers if c not in admitted],
            "groups": [run.state.groups[c] for c in admitted],
            "epochs": epochs,
            "received": summarise(received, session.judged_by),
            "adapted": summarise(adapted, session.judged_by),
            "bytes": asdict(total - before),
            **left_out,
        }
        self.note(cast(Event, {"round": run.done, "event": ADMISSION, **summary}))
        return summary, received, adapted

    def _summary(self, received: Scores, adapted: Scores, before: _Before) -> dict[str, Any]:
        """The summary of the run; bytes, seconds and groups are those before newcomers joined."""
        session, run = self.session, self.session.run
        method, settings = session.experiment.method, session.experiment.settings
        ledger = session.channel.state.ledger
        seconds = [e["seconds"] for e in (run.setup, *run.history) if "seconds" in e]
        summary: dict[str, Any] = {
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
            "warnings": [
                *warnings_of([*run.events, before.event]),
                *([one] if (one := never_grouped(session)) else []),
                *([worse] if (worse := self._adapting_harms(received, adapted)) else []),
            ],
            **({"grouping": grouping} if (grouping := self._grouping(before.groups)) else {}),
            "exposure": session.channel.state.exposure.summary(),
            **({"privacy": privacy} if (privacy := session.guard.summary()) else {}),
        }
        if session.channel.terms.clock is not None:
            summary["clock"] = {**asdict(before.lasted), "total": before.lasted.total}
        if settings.target is not None:
            target, clients = settings.target, len(session.members)
            summary |= to_target(run.history, method.headline, session.judged_by, target, clients)
        return summary

    def _adapting_harms(self, received: Scores, adapted: Scores) -> str:
        """A warning if adapting made models worse."""
        session = self.session
        return adapting_harms(received, adapted, session.judged_by, session.adapt_epochs())

    def _grouping(self, groups: int) -> dict[str, Any]:
        """The evidence for the number of groups, as ``result.json`` has it."""
        session = self.session
        counts = [len(session.population.clients[c].train) for c in session.members]
        samples = round_samples(counts, asdict(session.experiment.schedule))
        return grouping_of(session.run.events, groups, round_samples=samples)


@dataclass(frozen=True)
class _Before:
    """Totals of the run before newcomers joined."""

    moved: Bytes
    lasted: Seconds
    groups: int
    event: Event
