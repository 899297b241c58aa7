"""An experiment: everything that decides a result, checked before anything is run."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from coterie.channel.availability import make_availability
from coterie.channel.clocks import make_clock
from coterie.channel.compression.coding import Coding
from coterie.channel.exchange import Terms
from coterie.channel.policy import Policy, cohort_size, select
from coterie.channel.policy import check as check_policy
from coterie.channel.privacy.settings import Privacy
from coterie.client.fit import Criterion, FlatModel, outputs
from coterie.client.plan import Metric, Plan, Training
from coterie.client.stacked import LARGEST, why_not_stacked
from coterie.core.engine import Engine, Remote
from coterie.core.events import Event, Summary
from coterie.core.messages import ClientId
from coterie.core.method import Method, Public, Setup
from coterie.core.schema import (
    AvailabilitySection,
    ClockSection,
    EvaluationSection,
    Measured,
    RunSection,
    Schedule,
    as_in,
    part,
    section,
)
from coterie.core.weights import Layout, Weights
from coterie.data.population import Population
from coterie.engines.base import one_thread
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import ConfigError, EngineError
from coterie.experiment.privacy import Guard, calibrated, check_outliers, check_privacy
from coterie.experiment.running import Running, remembered, waiting
from coterie.experiment.stopping import Stop
from coterie.experiment.user_code import check_digests, digests_of
from coterie.models import initialise
from coterie.registry import ENGINES
from coterie.results.evaluation import headline
from coterie.results.provenance import about, described, session, size_of
from coterie.results.result import Result
from coterie.results.rundir import RunDir, rounds_of
from coterie.seeds import numpy_generator, seed_for

if TYPE_CHECKING:
    from coterie.tracking import Tracking


@ENGINES.register("loop", "one client after the other, in this process: the reference")
def _loop(plan: Plan, settings: Settings) -> Engine:
    return Loop(plan)


@ENGINES.register("pool", "worker processes, one a core")
def _pool(plan: Plan, settings: Settings) -> Engine:
    return Pool(plan, settings.workers)


@ENGINES.register("ray", "workers of a Ray cluster")
def _ray(plan: Plan, settings: Settings) -> Engine:
    from coterie.engines.ray import RayEngine  # Ray is an extra

    return RayEngine(
        plan,
        settings.workers,
        settings.address,
        settings.cpus_per_worker,
        settings.gpus_per_worker,
    )


Watch = Callable[[Event], None]
Say = Callable[[str], None]


@section("run")
class Settings(RunSection, Measured):
    """How a run goes: ``[run]``, and the tables of what is measured, sent, simulated and hidden.

    ``clock`` and ``availability`` are a name and its parameters.
    """

    evaluate_every: int = as_in(EvaluationSection, "every")
    wire: Coding = field(default_factory=Coding)
    clock: Mapping[str, Any] = field(default_factory=ClockSection().model_dump)
    availability: Mapping[str, Any] = field(default_factory=AvailabilitySection().model_dump)
    stop: Stop = field(default_factory=Stop)
    privacy: Privacy = field(default_factory=Privacy)

    @property
    def policy(self) -> Policy:
        """How rounds are held, alone: what a checkpoint's fingerprint names."""
        found = part(Policy, self)
        if self.sampling != "auto":
            return found
        return replace(found, sampling="poisson" if self.privacy.does("central") else "fixed")


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
    init: str = "torch"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[ClientId, ...] = ()  # of a real federation: not there when it begins

    def fresh(self, number: int) -> nn.Module:
        """A newly initialised module, some layers frozen; everybody starts from number 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.settings.seed, "init", stream=str(number)))
            module = self.model()
            freeze(module, self.freeze)
            initialise(module, self.init)
            return module

    def plan(self, folder: Path) -> Plan:
        """What the clients' side needs to know; refused if nobody trains, or nobody can join."""
        if self.newcomers and self.method.admit is None:
            raise ConfigError(
                f"method {self.method.name} has no way to admit newcomers: leave out --holdout, "
                "or choose another method"
            )
        plan = self.client_plan(folder)
        start, layout = plan.start, plan.start.layout
        if not layout.trainable:
            raise ConfigError("every layer is frozen: there is nothing to train")
        if self.method.check is not None:
            self.method.check(self.setup(start))
        self._check_codecs()
        self.check_privacy(layout)
        check_outliers(self.settings.outliers, self.privacy, self.method)
        self.terms(start)
        if self.settings.stop.seconds is not None and self.settings.clock["name"] == "none":
            raise ConfigError(
                "stop.seconds are seconds of the clock, and there is none: choose one, as in "
                "clock.name = links"
            )
        if self.settings.stop.validates and not any(len(c.val) for c in self.population.clients):
            raise ConfigError(
                "stop.target and stop.patience look at validation data, and no client has any: set "
                "data.val_fraction above 0"
            )
        self._check_targets()
        return plan

    def check_privacy(self, layout: Layout) -> None:
        """Refuse settings under which clients would not be hidden; clients elsewhere do, too."""
        check_privacy(
            self.privacy,
            self.method,
            self.settings.wire,
            self.settings.policy,
            self.settings.availability["name"] == "always",
            layout,
            len(self.members),
            self.settings.clock["name"],
            self.schedule.optimizer,
        )

    def client_plan(self, folder: Path) -> Plan:
        """The same, unchecked: for a client that was told the experiment."""
        module = self.fresh(0)
        layout = Layout.of(module, self.bn)
        start = Weights.from_tensors(layout, self.start or module.state_dict())
        return Plan(
            self.population,
            module,
            start,
            self.method,
            Training(self.criterion, self.schedule, self.metrics),
            self.settings.seed,
            folder,
            self.bn,
            self.settings.device,
            self.settings.wire,
            self.privacy,
        )

    def stack_size(self, plan: Plan) -> tuple[int, str]:
        """How many clients train as one stacked model, and why it is 1 where more were asked for.

        It depends on the model, the loss and the cohort alone: never on a clock, the machine or
        the number of workers.
        """
        asked = self.settings.batch_clients
        if asked == 1:
            return 1, ""
        people = cohort_size(self.settings.policy.cohort, len(self.members))
        size = min(people, max(2, people // 4), LARGEST) if asked == "auto" else min(asked, people)
        model = FlatModel(copy.deepcopy(plan.module), plan.device, plan.bn)
        sample = [c.train for c in self.population.clients if len(c.train)][:3]
        reason = why_not_stacked(model, plan.start, sample, self.criterion, self.schedule)
        if reason:
            return 1, f"clients train one by one: {reason}"
        return size, ""

    @cached_property
    def privacy(self) -> Privacy:
        """What is asked of privacy, the noise that a budget needs worked out."""
        settings = self.settings
        return calibrated(settings.privacy, settings.policy, len(self.members), settings.rounds)

    def _check_codecs(self) -> None:
        """Refuse lossy codecs where the method cannot have them."""
        wire, reason = self.settings.wire, self.method.needs_exact
        for key, side in (("up", wire.upwards), ("down", wire.downwards)):
            if reason and not side.exact:
                lossy = [c.spec for c in (side.default, *side.layers.values()) if not c.exact]
                raise ConfigError(
                    f"method {self.method.name} {reason}; '{lossy[0]}' of wire.{key} loses digits. "
                    "Take raw or raw+zstd, or another method"
                )

    def _check_targets(self) -> None:
        """Refuse scores that nobody reaches, and rules that would never look."""
        targets = {
            "stop.target": self.settings.stop.target,
            "evaluation.target": self.settings.target,
        }
        for key, target in targets.items():
            if target is not None and target > 1:
                raise ConfigError(f"{key} = {target:g}: scores go up to 1; give 0.8 for 80 %")
        if self.settings.stop.validates and not self.settings.evaluate_every:
            raise ConfigError(
                "stop.target and stop.patience look at scores, and evaluation.every = 0 takes none "
                "before the end: set it to 1 or more"
            )

    def terms(self, start: Weights) -> Terms:
        """What the door works by; refused if it does not fit."""
        settings, everybody = self.settings, len(self.population.clients)
        settings.wire.check(start.layout)
        named = [dict(settings.clock), dict(settings.availability)]
        names = [n.pop("name") for n in named]
        clock = make_clock(names[0], named[0], settings.seed, everybody, max(1, size_of(start)))
        available = make_availability(names[1], named[1], settings.seed, everybody)
        check_policy(settings.policy, len(self.members), clock, available)
        return Terms(
            settings.wire,
            clock,
            settings.policy,
            available,
            start,
            settings.seed,
            settings.outliers,
            settings.privacy.noised,
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
        true = {} if known is None else {"group": {c: str(g) for c, g in known.items()}}
        names = {c: client.name for c, client in enumerate(self.population.clients)}
        refuses = self.privacy.secure and self.privacy.small_groups == "refuse"
        return Setup(
            start,
            self.members,
            self.settings.seed,
            fresh,
            known,
            self.public,
            self.schedule,
            self.settings.stop.budget,
            {c: n for c, n in names.items() if n or c not in self.absent},
            {**true, **self.population.metadata},
            self.privacy.min_group if refuses else 1,
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
        outside = {*self.newcomers, *self.absent}
        return [c for c in range(len(self.population.clients)) if c not in outside]

    @cached_property
    def public(self) -> Public | None:
        """The server's own samples, with a model to run on them."""
        return public_of(self.population, self.fresh(0), self.bn, self.settings.device)

    def fingerprint(self, start: Weights) -> str:
        """A name for all that decides the result, whatever the engine and number of rounds."""
        digest = hashlib.sha256(start.vector.numpy().tobytes())
        for client in self.population.clients:
            for split in (client.train, client.val, client.test):
                for tensor in (split.x, split.y):
                    if 0 in tensor.stride():  # of a client elsewhere: so many samples, no content
                        digest.update(str(tuple(tensor.shape)).encode())
                    else:
                        digest.update(memoryview(tensor.contiguous().numpy()))  # type: ignore[arg-type]
        source = self.method.source
        parts = [
            self.method.name,
            source and source.parameters,
            asdict(self.schedule),
            self.settings.seed,
            asdict(self.settings.policy),
            asdict(self.settings.wire),
            dict(self.settings.clock),
            dict(self.settings.availability),
            self._trace(),
            asdict(self.settings.stop.budget) if self.method.keeps_budget else None,
            asdict(self.privacy) if self.privacy.on else None,
            self.settings.holdout,
            self.bn,
            start.layout.entries,
            getattr(getattr(self.criterion, "func", self.criterion), "__qualname__", ""),
            repr(self.fresh(0)),
        ]
        if self.settings.batch_clients != 1:
            parts.append(f"batch_clients {self.settings.batch_clients}")
        if self.init != "torch":  # the names of older runs, which have no init, stay as they are
            parts.append(self.init)
        if self.settings.outliers != "reject":  # likewise
            parts.append(self.settings.outliers)
        digest.update(json.dumps(parts, default=str).encode())
        return digest.hexdigest()

    def _trace(self) -> str:
        """The content of the file that availability is read from, if there is one."""
        file = self.settings.availability.get("file")
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def check_engine(settings: Settings) -> None:
    """Refuse an engine that there is not, and settings that another one has."""
    ENGINES.find(settings.engine)
    if settings.engine == "ray":
        return
    usual = Settings()
    for key in ("address", "cpus_per_worker", "gpus_per_worker"):
        if (value := getattr(settings, key)) != getattr(usual, key):
            raise ConfigError(
                f"run.{key} = {value!r} is for Ray, and the engine is '{settings.engine}': add "
                "--engine ray, or leave it out"
            )


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
    for each in fresh.modules():
        reset = getattr(each, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def cohort(settings: Settings, round: int, members: Sequence[ClientId]) -> list[ClientId]:
    """Who takes part in a round when everybody is on, drawn from a seed of its own."""
    return select(settings.policy, settings.seed, round, members)


def execute(
    experiment: Experiment,
    directory: Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    remote: Callable[[Plan], Remote] | None = None,
    track: Tracking | None = None,
    say: Say | None = None,
    discard_damaged: bool = False,
) -> Result:
    """Run an experiment, or continue it where its directory's last checkpoint left it.

    With ``remote`` its clients are elsewhere, and keep their states themselves. ``watch`` is told
    of rounds, ``track`` of all events, ``say`` in words of what comes up: evidence for groups, the
    verdict of a trial, warnings. ``discard_damaged`` accepts that a resume loses history which
    cannot be read any more: without it, that is a LostHistory.
    """
    check_engine(experiment.settings)
    with ExitStack() as stack:
        if track is not None:
            stack.enter_context(track)
        stack.enter_context(one_thread())
        scratch = tempfile.TemporaryDirectory(prefix="coterie-") if directory is None else None
        run = RunDir(directory) if directory is not None else None
        folder = Path(scratch.name) if scratch is not None else run.clients  # type: ignore[union-attr]
        # What is wrong with the model or the method shows before anything is written.
        plan = experiment.plan(folder)
        settings, elsewhere = experiment.settings, remote is not None
        if not elsewhere:
            stacked, reason = experiment.stack_size(plan)
            plan = replace(plan, training=replace(plan.training, batch_clients=stacked))
            if reason and say is not None:
                say(reason)
        guard = Guard(plan, settings.policy, experiment.members, settings.rounds)
        if run is not None:
            (RunDir.open if resume else RunDir.create)(run.path)
            run.lock()
            stack.callback(run.unlock)
            if resume:
                check_digests(run.read_code(), experiment.config)
            if remote is None:  # who serves has begun before, and looked then
                run.stop_asked()  # of a session before this one
            if resume and plan.privacy.on and remote is None:
                plan.roster.check()
        memory = remembered(experiment, plan, run, elsewhere, resume, discard_damaged, say)
        if run is not None:
            run.write_config(experiment.config)
            run.write_code(digests_of(experiment.config))
            run.write_data(described(experiment.population, elsewhere))
            run.append_session(session(experiment, max(0, memory.run.done), plan))
        if plan.privacy.on and remote is None:
            plan.roster.prepare()
        make = ENGINES.find(experiment.settings.engine)
        try:
            engine = make(plan, experiment.settings) if remote is None else remote(plan)
        except (ConfigError, EngineError):
            if run is not None and remote is None and not resume:
                run.discard()  # nothing was begun: the corrected command may have the folder
            raise
        stack.callback(engine.close)
        if track is not None:
            # Rounds whose scores are to come are told of when these are there.
            told = memory.run.history[: len(memory.run.history) - len(waiting(memory))]
            judged_by = headline(experiment.population.classes is None)
            track.begin(about(experiment, judged_by, directory, told))
        told_to = watch, None if track is None else track.event, say
        try:
            running = Running(experiment, plan, memory, run, engine, guard, elsewhere, *told_to)
            closing = running.all()
        except ConfigError:
            if (
                run is not None
                and remote is None
                and not resume
                and not rounds_of(run.read_events())
            ):
                run.discard()  # the method refused: let the corrected command have the folder
            raise
        if track is not None:
            track.finish(closing.summary)
        return Result(
            history=memory.run.history,
            clients=closing.rows,
            summary=cast(Summary, closing.summary),
            state=memory.run.state,
            plan=plan,
            versions=dict(memory.channel.versions),
            rounds=memory.run.done,
            held=dict(memory.channel.held),
            begun=memory.run.setup,
            newcomers=experiment.newcomers,
            directory=directory,
            scratch=scratch,
        )


def with_settings(experiment: Experiment, **changes: Any) -> Experiment:
    """The same experiment with other settings."""
    return replace(experiment, settings=replace(experiment.settings, **changes))
