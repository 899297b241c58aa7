"""The round loop: a run goes on here, is scored, recorded, checkpointed and resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, cast

from coterie.data.population import Population
from coterie.door.clock import Seconds
from coterie.door.door import KEEP, KEPT, Door, Held
from coterie.door.exposure import Exposure
from coterie.door.ledger import Bytes, Ledger
from coterie.door.policy import cohort_size, least, ready, select, selecting
from coterie.door.wire import Wire
from coterie.engines.base import Engine, Remote
from coterie.engines.site import Plan
from coterie.engines.store import Store
from coterie.errors import (
    Abandoned,
    ConfigError,
    CoterieError,
    EngineError,
    Interrupted,
    RunDirError,
    TrainingError,
)
from coterie.federation import ClientId, Order, Slot
from coterie.method import Round, Spent, State
from coterie.run.checkpoint import Checkpoint, Checkpoints, folded, unfolded
from coterie.run.ending import reason, to_target
from coterie.run.evaluation import Scores, by_client, headline, summarise
from coterie.run.findings import grouping_of, news_of, round_samples, warnings_of
from coterie.run.privacy import Guard
from coterie.run.result import client_rows
from coterie.run.resuming import sound
from coterie.run.rundir import SCORES, RunDir, rounds_of

if TYPE_CHECKING:
    from coterie.run.experiment import Experiment, Say, Watch

_FAREWELL = 90.0  # seconds for clients that are away to come for their models


class Live:
    """A run while it is going on."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        run: RunDir | None,
        watch: Watch | None,
        elsewhere: bool = False,
    ) -> None:
        self.experiment, self.settings = experiment, experiment.settings
        self.plan, self.run_dir, self.watch = plan, run, watch
        self.track: Watch | None = None  # told of events that are no rounds, too
        self.say: Say | None = None  # told in words what comes up about groups, and warnings
        self.layout = plan.start.layout
        self.ids, self.newcomers = experiment.members, experiment.newcomers
        self.terms, self.policy = experiment.terms(plan.start), self.settings.policy
        self.guard = Guard(plan, self.policy, self.ids, self.settings.rounds)
        self.exposure = self._exposure()
        self.next: list[ClientId] | None = None  # selected while the round before goes on
        self.held: dict[ClientId, Held] = {}
        self.lasted = Seconds()
        self.stopped = ""
        self.judged_by = headline(plan.population.classes is None)
        self.store = None if elsewhere else Store(plan.folder, self.layout)
        self.remote: Remote | None = None  # set when the run begins
        self.checkpoints = (
            None
            if run is None
            else Checkpoints(run.checkpoints, experiment.fingerprint(plan.start))
        )
        self.state = State()
        self.done = -1  # rounds finished; −1 before the method has been set up
        self.ledger, self.versions = Ledger(), dict[ClientId, str]()
        self.retained: list[dict[ClientId, str]] = []
        self.unscored = 0  # the round whose scores ride on the next one's first order, from 1
        self.best: dict[str, Any] = {}
        self.begun: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def _exposure(self) -> Exposure:
        """A ledger of what the server sees, which knows what "every client" and "all" mean."""
        shared, privacy = self.layout.only(self.layout.shareable), self.plan.privacy
        return Exposure(
            layers=shared.layers,
            members=len(self.ids),
            least=privacy.min_group,
            reveals=privacy.reveal,
            secure=privacy.secure,
        )

    def begin(self, resume: bool, discard: bool = False) -> None:
        """Take up the newest good checkpoint; a run stopped before its first one begins anew.

        ``discard`` accepts that history is lost which cannot be read any more.
        """
        if not resume or self.checkpoints is None or self.run_dir is None:
            return
        if not self.checkpoints:
            if rounds_of(self.run_dir.read_events()):
                raise RunDirError(
                    f"{self.run_dir.path} has finished rounds but no checkpoint any more: it "
                    "cannot be resumed. Start the run again in a new folder"
                )
            self.run_dir.rewind(-1)
            return
        good = sound(self.run_dir, self.checkpoints, self.layout, self.store, discard, self.say)
        last = good[-1]
        if last.rounds > self.settings.rounds:
            raise ConfigError(
                f"run.rounds = {self.settings.rounds}, but {last.rounds} rounds are done already"
            )
        self.checkpoints.set_aside(last.rounds)
        self.state, self.done, self.best = last.state, last.rounds, dict(last.best)
        self.ledger = Ledger.from_tree(last.door["ledger"])
        self.versions = dict(last.door["versions"])
        self.held = unfolded(last.door["held"])
        self.lasted, self.next = Seconds(*last.door["lasted"]), last.door["next"]
        self.unscored = int(last.door.get("unscored", 0))
        self.ids = list(last.door.get("members", self.ids))
        self.exposure = Exposure.from_tree(last.door["exposure"])
        self.guard.restore(last.door["privacy"])
        # Orders name what clients keep: as often as without a crash, or bytes would be others.
        before = last.door.get("retained", [c.door["versions"] for c in good[-KEPT:-1]])
        self.retained = [*map(dict, before), dict(self.versions)]
        events = self.run_dir.rewind(self.done, last.lines)
        if discard:
            self.checkpoints.mark(self.done, self.run_dir.marks())
        self.history = rounds_of(events)
        self.begun = next((e for e in events if e.get("event") == "init"), {})

    def run(self, engine: Engine) -> None:
        """All rounds that are left, then the closing evaluation."""
        wire = Wire(self.layout, self.terms.coding.downwards.plain)
        self.door = Door(
            engine,
            wire,
            self.ledger,
            self.versions,
            self.retained,
            self.terms,
            self.held,
            self.lasted,
        )
        self.door.exposure = self.exposure
        if self.store is None:
            self.remote = cast(Remote, engine)
            self.door.samples = self.remote.samples
        agreement = "" if self.remote is None else self.remote.agreement
        self.federation = self.guard.around(self.door, agreement)
        if self.done < 0:
            self._init()
        if self.settings.stop.validates:  # it may be new since the run was stopped
            self._catch_up()
        self.stopped = self._reason()
        while self.done < self.settings.rounds and not self.stopped:
            self._round(self.done)
        if self.remote is None:
            self._catch_up()
        self._finish()

    def _spent(self, event: Mapping[str, Any] | None = None) -> Spent:
        """What the run had cost after the round of this event, or has cost now."""
        if event is None:
            moved, lasted = self.ledger.total + self.ledger.total_wasted, asdict(self.door.lasted)
            return Spent(moved.total, **lasted)
        bytes = sum(event["total_bytes"].values()) + sum(event["total_wasted"].values())
        clock = {k: v for k, v in event.get("clock", {}).items() if k.startswith("total_")}
        return Spent(bytes, **{k.removeprefix("total_"): v for k, v in clock.items()})

    def _reason(self, *present: dict[str, Any]) -> str:
        """Why no round comes after those of the history, and the present one, if so."""
        if over := self.state.over or self.guard.over():
            return over
        history = [*self.history, *present]
        before = self.spent_at_first if history else self._spent()
        if len(history) > 1:
            before = self._spent(history[-2])
        method = self.experiment.method
        return reason(
            self.settings.stop,
            history,
            method.headline,
            self._spent(),
            before,
            method.keeps_budget,
        )

    @property
    def spent_at_first(self) -> Spent:
        """What it cost to set the method up."""
        event, bytes = self.begun, 0
        for kind in ("bytes", "wasted"):
            bytes += sum(event.get(kind, {}).values())
        return Spent(bytes, **event.get("clock", {}))

    def _init(self) -> None:
        self.door.begin(0, stage="init")
        began = time.perf_counter()
        setup = self.experiment.setup(self.plan.start)
        try:
            self.state = self.experiment.method.init(self.federation, setup)
        except Exception as why:
            if isinstance(why, CoterieError) or not self._forgives(why):
                raise
            raise TrainingError(
                f"{_failed(why)}. A client may have answered what cannot be used: serve it again"
            ) from why
        self.done = 0
        self.begun = {
            "round": 0,
            "event": "init",
            "groups": self._groups(),
            "bytes": asdict(self.ledger.total),
            "wasted": asdict(self.ledger.total_wasted),
            "kinds": {k: [b.down, b.up] for k, b in sorted(self.ledger.kinds.items())},
            "seconds": {"train": round(time.perf_counter() - began, 4)},
        }
        self.begun |= self._left_out()
        if self.terms.clock is not None:
            self.begun["clock"] = asdict(self.door.lasted)
        moved = self.ledger.total + self.ledger.total_wasted
        if self.state.notes or moved.total or self.door.lasted.total:
            self._note(self.begun)
        self._book(0)
        self._save(0)

    def _groups(self) -> list[Slot | None]:
        """Each client's group, in client order; newcomers have none before they come."""
        return [self.state.groups.get(c) for c in range(len(self._population.clients))]

    @property
    def _population(self) -> Population:
        """The clients as they are known now: a real federation may have more than it began with."""
        return self.plan.population if self.remote is None else self.remote.population

    def _book(self, round: int) -> None:
        """Write the present round's bytes to the ledger's file."""
        if self.run_dir is not None:
            self.run_dir.append_ledger(self.ledger.rows(round))

    def _note(self, event: dict[str, Any]) -> None:
        """Record an event, with what the method has to show of it."""
        if self.state.notes:
            event["notes"] = dict(self.state.notes)
            self.state = replace(self.state, notes={})
        if self.run_dir is not None:
            self.run_dir.append(event)
        if self.track is not None and "event" in event:
            self.track(event)
        self._speak(event)

    def _speak(self, event: dict[str, Any]) -> None:
        """Say what an event has to say, and what it warns of that no earlier one did."""
        if self.say is None:
            return
        earlier = [e for e in self._events if e is not event]
        known = warnings_of(earlier, over=False)
        fresh = warnings_of([*earlier, event], over=False)[len(known) :]
        for text in (*news_of(event), *(f"warning: {text}" for text in fresh)):
            self.say(text)

    @property
    def _events(self) -> list[dict[str, Any]]:
        """The events so far: what was before the first round, and the rounds."""
        return [e for e in (self.begun, *self.history) if e]

    @property
    def _seconds(self) -> list[dict[str, float]]:
        """What the beginning took, unless an older version began the run, and every round."""
        return [e["seconds"] for e in self._events if "seconds" in e]

    def _round(self, number: int) -> None:
        # Whom the last round is scored for, and with what: as it left them.
        riding = self._sends(self.ids) if self.unscored else {}
        self._welcome(number)
        began, spent, memory = time.perf_counter(), self._spent(), self.door.memory()
        spared = 0 if self.remote is None else self.remote.spared
        people = self._begin(number)
        self._ride(riding)
        info = Round(number, people, self.experiment.public, spent, self.settings.stop.budget)
        event: dict[str, Any] = {"round": number + 1, "cohort": people}
        try:
            self.guard.begin(self.state.models)
            self.state = self.experiment.method.round(self.federation, self.state, info)
        except Exception as why:
            # What others' clients may have sent must not end the run: it is a round for nothing.
            if not isinstance(why, Abandoned) and not self._forgives(why):
                raise
            self.door.go_back(memory)
            event["abandoned"] = str(why) if isinstance(why, Abandoned) else _failed(why)
        complete = self._alight()
        trained = time.perf_counter()
        event |= {"groups": self._groups(), **self._traffic(), **self.guard.event()}
        if self.remote is not None:
            event["spared"] = self.remote.spared - spared
        if self.door.rejected and self.remote is not None:
            self.remote.doubt(self.door.rejected)
        event |= self._left_out()
        self._book(number + 1)
        if self._may_wait(number, event):
            self.unscored = number + 1
        elif "abandoned" not in event or self._last(number):
            event |= self._evaluate(number)
        event["exchanges"] = self.door.exchanges
        event["seconds"] = {
            "train": round(trained - began, 4),
            "score": round(time.perf_counter() - trained, 4),
        }
        self._note(event)
        self.history.append(event)
        self.done = number + 1
        self.stopped = self._reason()
        if self._saves or self._last(number) or self.stopped:
            self._save(self.done)
        self._show([*complete, *([] if self.unscored else [event])])
        self._give_up()
        self._heed()

    def _left_out(self) -> dict[str, Any]:
        """Whose answers were not used since the round, or the stage, began, and why."""
        told = {str(c): why for c, why in sorted(self.door.rejected.items())}
        return {"rejected": told} if told else {}

    def _heed(self) -> None:
        """End here if a file in the run's folder asks for that; what is done is saved first."""
        if self.run_dir is None or self.stopped or self.done == self.settings.rounds:
            return
        if self.run_dir.stop_asked():
            self._keep()
            raise Interrupted(f"stopped after round {self.done}, as asked in {self.run_dir.path}")

    def _keep(self) -> None:
        """Save what is done, if it is not saved."""
        if not self._saves:
            self._save(self.done)

    @property
    def _saves(self) -> bool:
        """Whether the round just done is saved: a round that clients have signed always is."""
        signed = self.remote is not None and self.plan.privacy.secure
        return signed or self.done % self.settings.checkpoint_every == 0

    def _forgives(self, why: Exception) -> bool:
        """Whether an error may come of what clients of others sent."""
        return self.remote is not None and not isinstance(why, EngineError | RunDirError)

    def _show(self, events: Sequence[dict[str, Any]]) -> None:
        """Tell who watches of rounds that are complete."""
        for event in events:
            for tell in (self.track, self.watch):  # who watches may end the run
                if tell is not None:
                    tell(event)

    # --- scores that ride on the next round's orders ---------------------------------------------

    def _may_wait(self, number: int, event: dict[str, Any]) -> bool:
        """Whether the scores of this round can ride on the next one's first order."""
        return (
            self.door.engine.rides
            and "abandoned" not in event
            and self._is_scored(number)
            # There must be another order; at the end of a real federation, the closing scores do.
            and (self.remote is not None or not (self._last(number) or self._reason(event)))
            and not self._is_adapted(number)  # which takes an exchange anyway
            and not self.settings.stop.validates  # the scores say whether there is a next round
            # Where seconds are simulated, an order must weigh what the method alone makes of it.
            and self.terms.clock is None
            and self.terms.availability is None
            # Clients sign, and noise is drawn by, all that an order says: it says nothing else.
            and not self.plan.privacy.on
        )

    def _ride(self, sends: Mapping[ClientId, Mapping[str, Any]]) -> None:
        """Let the next exchange score the last round too."""
        if self.unscored:
            self.door.ride(sends, {}, self.unscored - 1)

    def _alight(self) -> list[dict[str, Any]]:
        """Complete the last round with the scores that rode along; nothing, if it had its own."""
        if not self.unscored:
            return []
        return self._complete(*self.door.alight())

    def _complete(self, scores: Scores, failed: Mapping[ClientId, str]) -> list[dict[str, Any]]:
        """Give the round that waits for scores these."""
        found: dict[str, Any] = {}
        if scores:
            found |= self._told("received", scores, self._judged(scores, self.unscored))
        if failed:
            found["failed_scores"] = {str(c): failed[c] for c in sorted(failed)}
        if found and self.run_dir is not None:
            self.run_dir.append({"round": self.unscored, "event": SCORES, **found})
        complete = [e for e in self.history[-1:] if e["round"] == self.unscored]
        for event in complete:  # one; none if the run's events were removed
            event |= found
        self.unscored = 0
        return complete

    def _catch_up(self) -> None:
        """Score the last round by itself if no order comes for that to ride on."""
        if self.unscored:
            self.door.begin(self.unscored - 1, stage=f"{self.unscored}.{SCORES}")
            self._ride(self._sends(self.ids))
            self._show(self._alight())

    def _begin(self, number: int) -> list[ClientId]:
        """Begin a round with those selected during the last one; meanwhile select the next."""
        policy, available = self.policy, self.terms.availability
        now, hides = self.door.lasted.total, 0.0
        people, waits = self.next, 0.0
        if people is None:
            waits = ready(policy, self.ids, available, now) - now
            people = self._select(number, now + waits)
            while self.remote is not None and not people:  # all left since: wait for them
                self._welcome(number)
                people = self._select(number, now + waits)
        elif self.history:
            lasted = self.history[-1].get("clock", {})
            hides = sum(lasted.get(f.name, 0.0) for f in fields(Seconds))
        enough = len(people)
        if policy.sampling != "poisson":
            enough = min(cohort_size(policy.cohort, len(self.ids)), enough)
        self.door.begin(number, "", people, enough, least(policy, len(self.ids)))
        self.door.wait(waits + selecting(policy, hides))
        self.next = self._following(number + 1)
        return people

    def _following(self, number: int) -> list[ClientId] | None:
        """Who is on now and asked in the next round; None, if too few are: then it waits."""
        policy, available, now = self.policy, self.terms.availability, self.door.lasted.total
        if sum(available is None or available.on(c, now) for c in self.ids) < least(
            policy, len(self.ids)
        ):
            return None
        return self._select(number, now)

    def _select(self, number: int, now: float) -> list[ClientId]:
        """A round's clients, of those that are there."""
        there = None if self.remote is None else self.remote.present()
        available, seed = self.terms.availability, self.settings.seed
        return select(self.policy, seed, number, self.ids, available, now, there)

    def _welcome(self, number: int) -> None:
        """Before a round of a real federation: wait for enough clients, and let new ones in."""
        if self.remote is None:
            return
        self.remote.begin(number)
        admit, closed = self.experiment.method.admit, ""
        if admit is None:
            closed = f"method {self.experiment.method.name} has no way to admit newcomers"
        elif self.plan.privacy.on:  # a budget, or a roster of keys, is of those who began
            closed = "with privacy, it is for those who began it"
        try:
            fresh = self.remote.arrivals(self.ids, least(self.policy, len(self.ids)), closed)
        except Interrupted:  # somebody asked for that while it waited
            self._keep()
            raise
        self.next = None  # who left since is not asked, and who is back is: choose now
        if not fresh or admit is None:
            return
        self.door.begin(max(0, number - 1), stage=f"{number}.admit")
        info = Round(number, fresh, self.experiment.public)
        try:
            self.state = admit(self.federation, self.state, info)
        except Exception as why:
            if not self._forgives(why):
                raise
            self.remote.turn_away(fresh, _failed(why))
            return
        came = [c for c in fresh if c in self.state.groups]
        self.ids = sorted({*self.ids, *came})
        groups = [self.state.groups[c] for c in came]
        self._book(number + 1)
        event = {"round": number + 1, "event": "arrival", "clients": came, "groups": groups}
        self._note({**event, **self._left_out()})

    def _leave(self) -> None:
        """A real federation is over: every client keeps the model that it would use now.

        Who is away gets a while to come back for it.
        """
        assert self.remote is not None
        kept, ends = set(self.summary.get("kept", [])), time.monotonic() + _FAREWELL
        while left := [c for c in self.ids if c not in kept]:
            orders = [
                Order(c, KEEP, sends, self._last_words(c), apart=True)
                for c, sends in self._sends(left).items()
            ]
            kept |= {answer.client for answer in self.door.exchange(orders)}
            self.summary["kept"] = sorted(kept)
            if self.run_dir is not None:
                self.run_dir.write_result(self.summary)
            if time.monotonic() > ends:
                break
            if kept < set(self.ids):
                self.remote.arrivals(self.ids, 0, "it is over")
                time.sleep(1)

    def _last_words(self, client: ClientId) -> dict[str, Any]:
        return {"rounds": self.done, "group": str(self.state.groups.get(client, ""))}

    def _traffic(self) -> dict[str, Any]:
        """What the present round cost: bytes by client and kind, those wasted, and seconds."""
        now, lasted = self.ledger.now, self.door.round_lasted
        found: dict[str, Any] = {
            "bytes": asdict(now.total),
            "total_bytes": asdict(self.ledger.total),
            "wasted": asdict(now.total_wasted),
            "total_wasted": asdict(self.ledger.total_wasted),
            "kinds": {k: [b.down, b.up] for k, b in sorted(now.kinds.items())},
            "client_bytes": {str(c): [b.down, b.up] for c, b in sorted(now.method.items())},
            "lost": now.lost,
            "late": now.late,
        }
        if self.terms.clock is not None:
            totals = {f"total_{k}": v for k, v in asdict(self.door.lasted).items()}
            found["clock"] = {**asdict(lasted), "total": self.door.lasted.total, **totals}
        return found

    def _give_up(self) -> None:
        """End a run that abandons every round; what was saved stays."""
        tail = self.history[-self.policy.abandoned :]
        if len(tail) == self.policy.abandoned and all("abandoned" in e for e in tail):
            raise TrainingError(
                f"{len(tail)} rounds in a row were abandoned, the last because "
                f"{tail[-1]['abandoned']}. Begin again in a new folder with more time "
                "(run.deadline, run.real_deadline) or fewer reports (run.min_reports)"
            )

    def _last(self, number: int) -> bool:
        return number + 1 == self.settings.rounds

    def _is_scored(self, number: int) -> bool:
        every = self.settings.evaluate_every
        return self._last(number) or bool(every and (number + 1) % every == 0)

    def _is_adapted(self, number: int) -> bool:
        # A rule that looks at the adapted score needs it whenever a round is scored.
        looked = self.settings.stop.validates or self.settings.target is not None
        judged = looked and self.experiment.method.headline == "adapted"
        adapt = self.settings.adapt_every
        return bool(adapt and (number + 1) % adapt == 0) or (judged and self._is_scored(number))

    def _evaluate(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._is_scored(number):
            scores = self._scores()
            found |= self._told("received", scores, self._judged(scores, number + 1))
        if self._is_adapted(number):
            scores = self._scores(self._adapt_epochs)
            adapted = self._told("adapted", scores, summarise(scores, self.judged_by))
            apiece = {**found.get("client_scores", {}), **adapted["client_scores"]}
            found |= {**adapted, "client_scores": apiece}
        return found

    def _told(self, title: str, scores: Scores, summary: Mapping[str, Any]) -> dict[str, Any]:
        """What an event says of scores: their summary, and each client's own, in client order."""
        own = by_client(scores, self.judged_by, len(self._population.clients))
        return {title: summary, "client_scores": {title: own}}

    def _judged(self, scores: Scores, round: int) -> dict[str, Any]:
        """What a round's scores come to; the best round on validation data is noted."""
        received = summarise(scores, self.judged_by)
        value = received.get("val")
        if value is not None and value > self.best.get("val", -float("inf")):
            self.best = {"val": value, "round": round, "received": received}
        return received

    @property
    def _adapt_epochs(self) -> int:
        asked = self.settings.adapt_epochs
        epochs = self.experiment.schedule.epochs if asked is None else asked
        # A method that is judged by what adapting gives has its own way to do it.
        return max(1, epochs) if self.experiment.method.headline == "adapted" else epochs

    def _scores(self, adapt_epochs: int = 0, clients: Sequence[ClientId] | None = None) -> Scores:
        sends = self._sends(self.ids if clients is None else clients)
        return self.door.score(sends, {"adapt_epochs": adapt_epochs} if adapt_epochs else {})

    def _sends(self, people: Sequence[ClientId]) -> dict[ClientId, Mapping[str, Any]]:
        """What each of these would be sent now: the model that it is scored with."""
        return {c: self.experiment.method.sends(self.state, c) for c in people}

    def _alone(self) -> Scores:
        """Every client trains alone for as many rounds as it had on average, and is scored."""
        share = cohort_size(self.settings.cohort, len(self.ids)) / len(self.ids)
        turns = max(1, round(self.done * share))
        return self.door.score({c: {} for c in self.ids}, {"alone": turns})

    def _finish(self) -> None:
        self.door.begin(max(0, self.done - 1), stage="final")
        if self.remote is not None and self.run_dir is not None and self.run_dir.result.exists():
            # It was over when it was stopped: some clients may have left with their models.
            self.summary = self.run_dir.read_result("remove it to have it written again")
            self._leave()
            return
        received = self._scores()  # again, so that a finished run, resumed, counts the same bytes
        if self.unscored:
            self._show(self._complete(received, {}))
        adapted = self._scores(self._adapt_epochs) if self._adapt_epochs else received
        alone = self._alone() if self.settings.alone else {}
        if not received:
            raise TrainingError("no client could be scored: none of them answered")
        closing = {"event": "closing", **self._left_out()}
        total, lasted = self.ledger.total, self.door.lasted
        groups = len(set(self.state.groups.values()))
        newcomers, *scores = self._admit() if self.newcomers else ({}, {}, {})
        received_by_all = {**received, **scores[0]}, {**adapted, **scores[1]}
        self.rows = client_rows(
            self._population,
            self.state,
            self.ledger,
            self.judged_by,
            *received_by_all,
            alone,
            self.newcomers,
        )
        self.summary = self._summary(received, adapted, total, lasted, groups, closing)
        if newcomers:
            self.summary["newcomers"] = newcomers
        if alone:
            self.summary["alone"] = summarise(alone, self.judged_by)
        if self.run_dir is not None:
            self.run_dir.write_table(self.rows)
            self.run_dir.write_exposure(self.exposure.rows())
            self.run_dir.write_result(self.summary)
        if self.remote is not None:
            self._leave()

    def _summary(
        self,
        received: Scores,
        adapted: Scores,
        total: Bytes,
        lasted: Seconds,
        groups: int,
        closing: dict[str, Any],
    ) -> dict[str, Any]:
        """What the run comes to; bytes, seconds and groups as they were before newcomers came."""
        found: dict[str, Any] = {
            "method": self.experiment.method.name,
            "rounds": self.done,
            "stopped": self.stopped if self.done < self.settings.rounds else "",
            "judged_by": self.judged_by,
            "headline": self.experiment.method.headline,
            "received": summarise(received, self.judged_by),
            "adapted": summarise(adapted, self.judged_by),
            "best_on_validation": self.best,
            "bytes": {
                **asdict(total),
                "apart": asdict(self.ledger.apart),
                "wasted": asdict(self.ledger.total_wasted),
                "kinds": {k: asdict(b) for k, b in sorted(self.ledger.kinds.items())},
            },
            "groups": groups,
            "sees": self.experiment.method.sees,
            "seconds": round(sum(sum(s.values()) for s in self._seconds), 3),
            "train_seconds": round(sum(s["train"] for s in self._seconds), 3),
            "lost": self.ledger.lost,
            "late": self.ledger.late,
            "abandoned": sum("abandoned" in e for e in self.history),
            "warnings": warnings_of([*self._events, closing]),
            **({"grouping": grouping} if (grouping := self._grouping(groups)) else {}),
            "exposure": self.exposure.summary(),
            **({"privacy": private} if (private := self.guard.summary()) else {}),
        }
        if self.terms.clock is not None:
            found["clock"] = {**asdict(lasted), "total": lasted.total}
        if self.settings.target is not None:
            found |= to_target(
                self.history,
                self.experiment.method.headline,
                self.judged_by,
                self.settings.target,
                len(self.ids),
            )
        return found

    def _grouping(self, groups: int) -> dict[str, Any]:
        """How the run came to so many groups."""
        counts = [len(self._population.clients[c].train) for c in self.ids]
        whole = round_samples(counts, asdict(self.experiment.schedule))
        return grouping_of(self._events, groups, round_samples=whole)

    def _admit(self) -> tuple[dict[str, Any], Scores, Scores]:
        """Let the newcomers in and score them, as they come and after they have adapted."""
        admit, before = self.experiment.method.admit, self.ledger.total
        assert admit is not None
        self.door.begin(max(0, self.done - 1), stage="admit")
        info = Round(self.done, self.newcomers, self.experiment.public)
        self.state = admit(self.federation, self.state, info)
        came, rejected = [c for c in self.newcomers if c in self.state.groups], self._left_out()
        total, epochs = self.ledger.total, self.settings.admit_epochs
        received = self._scores(clients=came)
        adapted = self._scores(epochs, came) if epochs else received
        found: dict[str, Any] = {
            "clients": came,
            "unanswered": [c for c in self.newcomers if c not in came],
            "groups": [self.state.groups[c] for c in came],
            "epochs": epochs,
            "received": summarise(received, self.judged_by),
            "adapted": summarise(adapted, self.judged_by),
            "bytes": asdict(total - before),
            **rejected,
        }
        self._note({"round": self.done, "event": "admission", **found})
        return found, received, adapted

    def _save(self, rounds: int) -> None:
        if self.checkpoints is None or self.run_dir is None:
            return
        self.run_dir.sync()
        last = self.retained[-1] if self.retained else {}
        if self.store is not None:
            self.store.flush({c: v for c, v in self.door.versions.items() if last.get(c) != v})
        lasted = self.door.lasted
        door = {
            "ledger": self.ledger.to_tree(),
            "versions": dict(self.door.versions),
            "retained": self.retained[1 - KEPT :],
            "held": folded(self.door.held),
            "lasted": (lasted.computation, lasted.communication, lasted.waiting),
            "next": self.next,
            "unscored": self.unscored,
            **({} if self.remote is None else {"members": list(self.ids)}),
            "exposure": self.exposure.to_tree(),
            "privacy": self.guard.to_tree(),
        }
        lines = self.run_dir.marks()
        self.checkpoints.save(Checkpoint(rounds, self.state, door, self.best, lines), self.layout)
        self.door.retain()
        self.retained = self.door.retained


def _failed(why: Exception) -> str:
    return f"the server's part failed with {type(why).__name__}: {why}"
