"""The round loop: an experiment is run, evaluated, recorded, checkpointed and resumed here."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.client.fit import Criterion, FlatModel, Schedule, outputs
from coterie.data.population import Population
from coterie.door.door import KEPT, Door
from coterie.door.ledger import Bytes, Ledger
from coterie.door.wire import Wire
from coterie.engines.base import Engine, one_thread
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.engines.site import Metric, Plan
from coterie.engines.store import Store
from coterie.errors import ConfigError, RunDirError, TrainingError, unknown
from coterie.federation import ClientId, Slot
from coterie.method import Method, Public, Round, Setup, State
from coterie.run.checkpoint import Checkpoint, Checkpoints
from coterie.run.evaluation import Scores, headline, summarise
from coterie.run.result import Result, client_rows
from coterie.run.rundir import RunDir, rounds_of
from coterie.seeds import numpy_generator, seed_for
from coterie.weights import Layout, Weights

ENGINES: dict[str, Callable[[Plan, int | None], Engine]] = {
    "loop": lambda plan, workers: Loop(plan),
    "pool": Pool,
}
Watch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """How long, with whom, on what, and what is measured.

    ``cohort`` is a number of clients, or a fraction of them when it is at most 1 and not an int.
    Scores of the model received are taken every ``evaluate_every`` rounds, those of the adapted
    model every ``adapt_every`` (0: at the end only) after ``adapt_epochs`` of training (None: as
    many as a round's). ``alone`` also trains every client alone, for its gain. ``holdout`` clients
    stay outside while the others train; they are admitted at the end and adapt what they receive
    for ``admit_epochs``.
    """

    rounds: int = 20
    cohort: int | float = 1.0
    seed: int = 0
    engine: str = "pool"
    workers: int | None = None
    device: str = "cpu"
    evaluate_every: int = 1
    adapt_every: int = 0
    adapt_epochs: int | None = None
    alone: bool = False
    checkpoint_every: int = 1
    holdout: int = 0
    admit_epochs: int = 5


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a result: clients, model, method, schedule and seed."""

    population: Population
    model: Callable[[], nn.Module]
    method: Method
    criterion: Criterion
    schedule: Schedule = field(default_factory=Schedule)
    settings: Settings = field(default_factory=Settings)
    start: Mapping[str, torch.Tensor] | None = None
    freeze: tuple[str, ...] = ()
    bn: str = "shared"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def fresh(self, number: int) -> nn.Module:
        """A newly initialised module; number 0 is the one that everybody starts from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.settings.seed, "init", stream=str(number)))
            return self.model()

    def plan(self, folder: Path) -> Plan:
        """What the clients' side needs to know; refused if nobody trains, or nobody can join."""
        if self.newcomers and self.method.admit is None:
            raise ConfigError(
                f"method {self.method.name} has no way to admit newcomers: leave out --holdout, "
                "or choose another method"
            )
        module = self.fresh(0)
        freeze(module, self.freeze)
        layout = Layout.of(module, self.bn)
        if not layout.trainable:
            raise ConfigError("every layer is frozen: there is nothing to train")
        start = Weights.from_tensors(layout, self.start or module.state_dict())
        if self.method.check is not None:
            self.method.check(self.setup(start))
        return Plan(
            self.population,
            module,
            start,
            self.method,
            self.criterion,
            self.schedule,
            self.settings.seed,
            folder,
            self.bn,
            self.settings.device,
            self.metrics,
        )

    def setup(self, start: Weights) -> Setup:
        """What the method starts from."""

        def fresh(number: int) -> Weights:
            drawn = Weights.from_tensors(start.layout, self.fresh(number).state_dict())
            if torch.equal(drawn.parameters, start.parameters):
                raise ConfigError(
                    "the model cannot be drawn anew: each try gives the same weights. Pass a "
                    "function that makes the module, not the module"
                )
            frozen = [e.name for e in start.layout.entries if e.kind == "frozen"]
            return start.only(frozen).onto(drawn) if frozen else drawn

        groups = self.population.groups
        known = None if groups is None else dict(enumerate(groups))
        return Setup(
            start, self.members, self.settings.seed, fresh, known, self.public, self.schedule
        )

    @property
    def newcomers(self) -> list[ClientId]:
        """Who is held out until the end, drawn from a seed of its own."""
        clients, count = len(self.population.clients), self.settings.holdout
        if count >= clients:
            raise ConfigError(
                f"run.holdout = {count} leaves nobody of {clients} clients to train: hold out fewer"
            )
        generator = numpy_generator(seed_for(self.settings.seed, "holdout"))
        return sorted(int(c) for c in generator.choice(clients, count, replace=False))

    @property
    def members(self) -> list[ClientId]:
        """Who trains: everybody but the newcomers."""
        outside = set(self.newcomers)
        return [c for c in range(len(self.population.clients)) if c not in outside]

    @cached_property
    def public(self) -> Public | None:
        """The server's own samples, with a model to run on them."""
        module = self.fresh(0)
        freeze(module, self.freeze)
        return public_of(self.population, module, self.bn, self.settings.device)

    def fingerprint(self, start: Weights) -> str:
        """A name for all that decides the result, whatever the engine and number of rounds."""
        digest = hashlib.sha256(start.vector.numpy().tobytes())
        for client in self.population.clients:
            for split in (client.train, client.val, client.test):
                for tensor in (split.x, split.y):
                    digest.update(memoryview(tensor.contiguous().numpy()))  # type: ignore[arg-type]
        source = self.method.source
        parts = [
            self.method.name,
            source and source.parameters,
            asdict(self.schedule),
            self.settings.seed,
            self.settings.cohort,
            self.settings.holdout,
            self.bn,
            start.layout.entries,
            getattr(getattr(self.criterion, "func", self.criterion), "__qualname__", ""),
            repr(self.fresh(0)),
        ]
        digest.update(json.dumps(parts, default=str).encode())
        return digest.hexdigest()


def public_of(population: Population, module: nn.Module, bn: str, device: str) -> Public | None:
    """The public samples of a population, and this module to run on them."""
    if population.public is None:
        return None
    flat = FlatModel(module, device, bn)
    return Public(population.public, lambda weights, x: outputs(flat, weights, x))


def freeze(module: nn.Module, layers: tuple[str, ...]) -> None:
    """Stop training these layers; they are then not sent either."""
    if layers:
        names = set(Layout.of(module).only(layers).names)
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.requires_grad_(False)


def reinitialised(module: nn.Module) -> nn.Module:
    """A copy of a module with newly drawn weights, where its parts know how to draw them."""
    fresh = copy.deepcopy(module)
    for part in fresh.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def cohort_size(asked: int | float, clients: int) -> int:
    """How many clients take part in a round.

    >>> cohort_size(0.1, 100), cohort_size(10, 100), cohort_size(1.0, 20)
    (10, 10, 20)
    """
    count = round(asked * clients) if isinstance(asked, float) and asked <= 1 else int(asked)
    if not 1 <= count <= clients:
        raise ConfigError(
            f"run.cohort = {asked} makes {count} of {clients} clients; give a number from 1 to "
            f"{clients} or a fraction up to 1.0"
        )
    return count


def cohort(settings: Settings, round: int, members: Sequence[ClientId]) -> list[ClientId]:
    """Who takes part in a round, drawn from a seed of its own."""
    generator = numpy_generator(seed_for(settings.seed, "cohort", round))
    count = cohort_size(settings.cohort, len(members))
    return sorted(int(members[i]) for i in generator.choice(len(members), count, replace=False))


def execute(
    experiment: Experiment,
    directory: Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment, or continue it where its directory's last checkpoint left it."""
    if experiment.settings.engine not in ENGINES:
        raise ConfigError(unknown("engine", experiment.settings.engine, ENGINES))
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        scratch = tempfile.TemporaryDirectory(prefix="coterie-") if directory is None else None
        run = RunDir(directory) if directory is not None else None
        folder = Path(scratch.name) if scratch is not None else run.clients  # type: ignore[union-attr]
        # What is wrong with the model or the method shows before anything is written.
        plan = experiment.plan(folder)
        live = _Live(experiment, plan, run, watch)
        if run is not None:
            (RunDir.open if resume else RunDir.create)(run.path)
            run.lock()
            stack.callback(run.unlock)
            live.begin(resume)
            run.write_config(experiment.config)
        engine = ENGINES[experiment.settings.engine](plan, experiment.settings.workers)
        stack.callback(engine.close)
        try:
            live.run(engine)
        except ConfigError:
            if run is not None and not resume and not live.history:
                run.discard()  # the method refused: let the corrected command have the folder
            raise
        return Result(
            history=live.history,
            clients=live.rows,
            summary=live.summary,
            state=live.state,
            plan=plan,
            versions=dict(live.door.versions),
            rounds=experiment.settings.rounds,
            begun=live.begun,
            newcomers=experiment.newcomers,
            directory=directory,
            scratch=scratch,
        )


class _Live:
    """A run while it is going on."""

    def __init__(
        self, experiment: Experiment, plan: Plan, run: RunDir | None, watch: Watch | None
    ) -> None:
        self.experiment, self.settings = experiment, experiment.settings
        self.plan, self.run_dir, self.watch = plan, run, watch
        self.layout = plan.start.layout
        self.ids, self.newcomers = experiment.members, experiment.newcomers
        cohort_size(self.settings.cohort, len(self.ids))
        self.judged_by = headline(plan.population.classes is None)
        self.store = Store(plan.folder, self.layout)
        self.checkpoints = (
            None
            if run is None
            else Checkpoints(run.checkpoints, experiment.fingerprint(plan.start))
        )
        self.state = State()
        self.done = -1  # rounds finished; −1 before the method has been set up
        self.ledger, self.versions = Ledger(), dict[ClientId, str]()
        self.retained: list[dict[ClientId, str]] = []
        self.best: dict[str, Any] = {}
        self.begun: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def begin(self, resume: bool) -> None:
        """Take up the newest good checkpoint; a run stopped before its first one begins anew."""
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
        good = self._whole(self.checkpoints.load(self.layout))
        last = good[-1]
        if last.rounds > self.settings.rounds:
            raise ConfigError(
                f"run.rounds = {self.settings.rounds}, but {last.rounds} rounds are done already"
            )
        self.checkpoints.forget_after(last.rounds)
        self.state, self.done, self.best = last.state, last.rounds, dict(last.best)
        self.ledger = Ledger.from_tree(last.door["ledger"])
        self.versions = dict(last.door["versions"])
        self.retained = [dict(c.door["versions"]) for c in good[-KEPT:]]
        events = self.run_dir.rewind(self.done)
        self.history = rounds_of(events)
        self.begun = next((e for e in events if e.get("event") == "init"), {})

    def _whole(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Those up to the newest whose versions of client state are all there and sound."""
        while True:
            try:
                for client, version in checkpoints[-1].door["versions"].items():
                    self.store.read(client, version)
                return checkpoints
            except RunDirError:
                if len(checkpoints) == 1:
                    raise
                checkpoints = checkpoints[:-1]

    def run(self, engine: Engine) -> None:
        """All rounds that are left, then the closing evaluation."""
        self.door = Door(engine, Wire(self.layout), self.ledger, self.versions, self.retained)
        if self.done < 0:
            self._init()
        for number in range(self.done, self.settings.rounds):
            self._round(number)
        self._finish()

    def _init(self) -> None:
        self.door.begin(0, stage="init")
        setup = self.experiment.setup(self.plan.start)
        self.state = self.experiment.method.init(self.door, setup)
        self.done = 0
        self.begun = {
            "round": 0,
            "event": "init",
            "groups": self._groups(),
            "bytes": asdict(self.ledger.total),
        }
        if self.state.notes or self.ledger.total.total:
            self._note(self.begun)
        self._save(0)

    def _groups(self) -> list[Slot | None]:
        """Each client's group, in client order; newcomers have none before they come."""
        return [self.state.groups.get(c) for c in range(len(self.plan.population.clients))]

    def _note(self, event: dict[str, Any]) -> None:
        """Record an event, with what the method has to show of it."""
        if self.state.notes:
            event["notes"] = dict(self.state.notes)
            self.state = replace(self.state, notes={})
        if self.run_dir is not None:
            self.run_dir.append(event)

    def _round(self, number: int) -> None:
        began, before, lost = time.perf_counter(), self.ledger.total, self.ledger.lost
        people = cohort(self.settings, number, self.ids)
        self.door.begin(number)
        info = Round(number, people, self.experiment.public)
        self.state = self.experiment.method.round(self.door, self.state, info)
        trained = time.perf_counter()
        total = self.ledger.total
        event: dict[str, Any] = {
            "round": number + 1,
            "cohort": people,
            "groups": self._groups(),
            "bytes": asdict(Bytes(total.down - before.down, total.up - before.up)),
            "total_bytes": asdict(total),
            "lost": self.ledger.lost - lost,
        }
        event |= self._evaluate(number)
        event["seconds"] = {
            "train": round(trained - began, 4),
            "score": round(time.perf_counter() - trained, 4),
        }
        self._note(event)
        self.history.append(event)
        if (number + 1) % self.settings.checkpoint_every == 0 or self._last(number):
            self._save(number + 1)
        if self.watch is not None:
            self.watch(event)

    def _last(self, number: int) -> bool:
        return number + 1 == self.settings.rounds

    def _evaluate(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        every, adapt = self.settings.evaluate_every, self.settings.adapt_every
        if self._last(number) or (every and (number + 1) % every == 0):
            found["received"] = summarise(self._scores(), self.judged_by)
            value = found["received"].get("val")
            if value is not None and value > self.best.get("val", -float("inf")):
                self.best = {"val": value, "round": number + 1, "received": found["received"]}
        if adapt and (number + 1) % adapt == 0:
            found["adapted"] = summarise(self._scores(self._adapt_epochs), self.judged_by)
        return found

    @property
    def _adapt_epochs(self) -> int:
        asked = self.settings.adapt_epochs
        epochs = self.experiment.schedule.epochs if asked is None else asked
        # A method that is judged by what adapting gives has its own way to do it.
        return max(1, epochs) if self.experiment.method.headline == "adapted" else epochs

    def _scores(self, adapt_epochs: int = 0, clients: Sequence[ClientId] | None = None) -> Scores:
        people = self.ids if clients is None else clients
        sends = {c: self.experiment.method.sends(self.state, c) for c in people}
        return self.door.score(sends, {"adapt_epochs": adapt_epochs} if adapt_epochs else {})

    def _alone(self) -> Scores:
        """Every client trains alone for as many rounds as it had on average, and is scored."""
        share = cohort_size(self.settings.cohort, len(self.ids)) / len(self.ids)
        turns = max(1, round(self.settings.rounds * share))
        return self.door.score({c: {} for c in self.ids}, {"alone": turns})

    def _finish(self) -> None:
        self.door.begin(self.settings.rounds - 1, stage="final")
        received = self._scores()  # again, so that a finished run, resumed, counts the same bytes
        adapted = self._scores(self._adapt_epochs) if self._adapt_epochs else received
        alone = self._alone() if self.settings.alone else {}
        if not received:
            raise TrainingError("no client could be scored: none of them answered")
        total = self.ledger.total
        groups = len(set(self.state.groups.values()))
        newcomers, *scores = self._admit() if self.newcomers else ({}, {}, {})
        received_by_all = {**received, **scores[0]}, {**adapted, **scores[1]}
        self.rows = client_rows(
            self.plan.population,
            self.state,
            self.ledger,
            self.judged_by,
            *received_by_all,
            alone,
            self.newcomers,
        )
        self.summary = {
            "method": self.experiment.method.name,
            "rounds": self.settings.rounds,
            "judged_by": self.judged_by,
            "headline": self.experiment.method.headline,
            "received": summarise(received, self.judged_by),
            "adapted": summarise(adapted, self.judged_by),
            "best_on_validation": self.best,
            "bytes": {**asdict(total), "apart": asdict(self.ledger.apart)},
            "groups": groups,
            "sees": self.experiment.method.sees,
            "seconds": round(sum(sum(e["seconds"].values()) for e in self.history), 3),
            "train_seconds": round(sum(e["seconds"]["train"] for e in self.history), 3),
            "lost": self.ledger.lost,
        }
        if newcomers:
            self.summary["newcomers"] = newcomers
        if alone:
            self.summary["alone"] = summarise(alone, self.judged_by)
        if self.run_dir is not None:
            self.run_dir.write_table(self.rows)
            self.run_dir.write_result(self.summary)

    def _admit(self) -> tuple[dict[str, Any], Scores, Scores]:
        """Let the newcomers in and score them, as they come and after they have adapted."""
        admit, before = self.experiment.method.admit, self.ledger.total
        assert admit is not None
        self.door.begin(self.settings.rounds - 1, stage="admit")
        info = Round(self.settings.rounds, self.newcomers, self.experiment.public)
        self.state = admit(self.door, self.state, info)
        came = [c for c in self.newcomers if c in self.state.groups]
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
            "bytes": asdict(Bytes(total.down - before.down, total.up - before.up)),
        }
        self._note({"round": self.settings.rounds, "event": "admission", **found})
        return found, received, adapted

    def _save(self, rounds: int) -> None:
        if self.checkpoints is None or self.run_dir is None:
            return
        self.run_dir.sync()
        last = self.retained[-1] if self.retained else {}
        self.store.flush({c: v for c, v in self.door.versions.items() if last.get(c) != v})
        door = {"ledger": self.ledger.to_tree(), "versions": dict(self.door.versions)}
        self.checkpoints.save(Checkpoint(rounds, self.state, door, self.best), self.layout)
        self.door.retain()
        self.retained = self.door.retained


def with_settings(experiment: Experiment, **changes: Any) -> Experiment:
    """The same experiment with other settings."""
    return replace(experiment, settings=replace(experiment.settings, **changes))
