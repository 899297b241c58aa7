"""An experiment: everything that determines a result, checked before the run begins."""

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
from coterie.client.stacked import size_of_stacks, why_not_stacked
from coterie.core.engine import Engine, Remote
from coterie.core.events import Event, Summary
from coterie.core.messages import ClientId
from coterie.core.method import Method, Public, Setup
from coterie.core.schema import (
    AvailabilitySection,
    ClockSection,
    Evaluation,
    EvaluationSection,
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
from coterie.experiment.privacy import Guard, calibrated, check_outliers, check_privacy, check_steps
from coterie.experiment.running import Running, remembered, waiting
from coterie.experiment.stopping import Stop
from coterie.experiment.user_code import check_digests, digests_of
from coterie.models import initialise
from coterie.registry import ENGINES
from coterie.results.evaluation import main_score
from coterie.results.provenance import about, data_record, session, size_of
from coterie.results.result import Result
from coterie.results.rundir import RunDir, rounds_of
from coterie.seeds import numpy_generator, seed_for

if TYPE_CHECKING:
    from coterie.tracking import Tracking


@ENGINES.register("loop", "one client after the other in this process; the reference")
def _loop(plan: Plan, settings: Settings) -> Engine:
    return Loop(plan)


@ENGINES.register("pool", "worker processes, one for each core")
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
class Settings(RunSection, Evaluation):
    """The settings of a run: ``[run]``, evaluation, wire, clock, availability, stop and privacy.

    ``clock`` and ``availability`` are a name and its parameters.
    """

    evaluate_every: int = as_in(EvaluationSection, "every")
    evaluate_clients: int | float = as_in(EvaluationSection, "clients")
    wire: Coding = field(default_factory=Coding)
    clock: Mapping[str, Any] = field(default_factory=ClockSection().model_dump)
    availability: Mapping[str, Any] = field(default_factory=AvailabilitySection().model_dump)
    stop: Stop = field(default_factory=Stop)
    privacy: Privacy = field(default_factory=Privacy)

    @cached_property
    def policy(self) -> Policy:
        """The part of the settings that decides who takes part in a round and how long it lasts."""
        policy = part(Policy, self)
        if self.sampling != "auto":
            return policy
        return replace(policy, sampling="poisson" if self.privacy.does("central") else "fixed")


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a result: clients, model, method, schedule and settings."""

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
    absent: tuple[ClientId, ...] = ()  # in a real federation: joins later

    def fresh(self, number: int) -> nn.Module:
        """A newly initialised module with frozen layers; all clients start from number 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.settings.seed, "init", stream=str(number)))
            module = self.model()
            freeze(module, self.freeze)
            initialise(module, self.init)
            return module

    def plan(self, folder: Path) -> Plan:
        """The checked plan that client runtimes work by."""
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
            raise ConfigError("stop.seconds needs a clock: choose one, as in clock.name = links")
        if self.settings.stop.validates and not any(len(c.val) for c in self.population.clients):
            raise ConfigError(
                "stop.target and stop.patience need validation data, and no client has any: set "
                "data.val_fraction above 0"
            )
        self._check_targets()
        return plan

    def check_privacy(self, layout: Layout) -> None:
        """Refuse privacy settings that conflict with the run; real clients check them, too."""
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
        check_steps(self.privacy, self.method, self.schedule.steps)

    def client_plan(self, folder: Path) -> Plan:
        """The same plan, unchecked, for a client that received the experiment from the server."""
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

    def stacking(self, plan: Plan, recorded: int | None = None, say: Say | None = None) -> Plan:
        """The plan with the number of clients that train as one stacked model.

        ``recorded`` is that of the run's earlier sessions, which "auto" uses again. The number
        depends on the model, the loss and the cohort alone: never on a clock, the machine or the
        number of workers.
        """
        asked, batch_size = self.settings.batch_clients, self.schedule.batch_size
        people = cohort_size(self.settings.policy.cohort, len(self.members))
        decided = recorded if asked == "auto" else None
        if decided is not None:
            size = decided
        elif asked == "auto":
            size = size_of_stacks(plan.start.layout.size, batch_size, people)
        else:
            size = min(asked, people)
        if size > 1 and decided is None and (reason := self._why_not_stacked(plan)):
            size = 1
            if say is not None:
                say(f"clients train one by one: {reason}")
        return replace(plan, training=replace(plan.training, batch_clients=size))

    def _why_not_stacked(self, plan: Plan) -> str:
        model = FlatModel(copy.deepcopy(plan.module), plan.device, plan.bn)
        sample = [c.train for c in self.population.clients if len(c.train)][:3]
        return why_not_stacked(model, plan.start, sample, self.criterion, self.schedule)

    @cached_property
    def privacy(self) -> Privacy:
        """The privacy settings, with the noise calibrated to the budget."""
        settings = self.settings
        return calibrated(settings.privacy, settings.policy, len(self.members), settings.rounds)

    def _check_codecs(self) -> None:
        """Refuse lossy codecs if the method needs exact numbers."""
        wire, reason = self.settings.wire, self.method.needs_exact
        for key, side in (("up", wire.upwards), ("down", wire.downwards)):
            if reason and not side.exact:
                lossy = [c.spec for c in (side.default, *side.layers.values()) if not c.exact]
                raise ConfigError(
                    f"method {self.method.name} {reason}; '{lossy[0]}' of wire.{key} is lossy. "
                    "Use raw or raw+zstd, or another method"
                )

    def _check_targets(self) -> None:
        """Refuse targets above 1, and stop rules without any scores to look at."""
        targets = {
            "stop.target": self.settings.stop.target,
            "evaluation.target": self.settings.target,
        }
        for key, target in targets.items():
            if target is not None and target > 1:
                raise ConfigError(f"{key} = {target:g}: scores are at most 1; give 0.8 for 80 %")
        if self.settings.stop.validates and not self.settings.evaluate_every:
            raise ConfigError(
                "stop.target and stop.patience need scores, and evaluation.every = 0 takes none "
                "before the end: set it to 1 or more"
            )

    def terms(self, start: Weights) -> Terms:
        """The checked terms of the channel: codecs, clock, availability and round policy."""
        settings, clients = self.settings, len(self.population.clients)
        settings.wire.check(start.layout)
        tables = [dict(settings.clock), dict(settings.availability)]
        names = [n.pop("name") for n in tables]
        clock = make_clock(names[0], tables[0], settings.seed, clients, max(1, size_of(start)))
        available = make_availability(names[1], tables[1], settings.seed, clients)
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
        """What the method knows when it is set up."""

        def fresh(number: int) -> Weights:
            weights = Weights.from_tensors(start.layout, self.fresh(number).state_dict())
            if torch.equal(weights.parameters, start.parameters):
                raise ConfigError(
                    "the model cannot be initialised again: each time it has the same weights. "
                    "Pass a function that creates the module, not the module"
                )
            frozen = [e.name for e in start.layout.entries if e.kind == "frozen"]
            return start.only(frozen).onto(weights) if frozen else weights

        groups = self.population.groups
        groups_by_client = None if groups is None else dict(enumerate(groups))
        group_column = (
            {}
            if groups_by_client is None
            else {"group": {c: str(g) for c, g in groups_by_client.items()}}
        )
        names = {c: client.name for c, client in enumerate(self.population.clients)}
        refuses_small_groups = self.privacy.secure and self.privacy.small_groups == "refuse"
        return Setup(
            start,
            self.members,
            self.settings.seed,
            fresh,
            groups_by_client,
            self.public,
            self.schedule,
            self.settings.stop.budget,
            {c: n for c, n in names.items() if n or c not in self.absent},
            {**group_column, **self.population.metadata},
            self.privacy.min_group if refuses_small_groups else 1,
        )

    @property
    def newcomers(self) -> list[ClientId]:
        """The clients that are held out until the end, drawn from their own seed."""
        clients, count = len(self.population.clients), self.settings.holdout
        if count >= clients:
            raise ConfigError(
                f"run.holdout = {count} leaves none of {clients} clients to train: hold out fewer"
            )
        generator = numpy_generator(seed_for(self.settings.seed, "holdout"))
        return sorted(int(c) for c in generator.choice(clients, count, replace=False))

    @property
    def members(self) -> list[ClientId]:
        """The clients that train: all but newcomers and absent clients."""
        outside = {*self.newcomers, *self.absent}
        return [c for c in range(len(self.population.clients)) if c not in outside]

    @cached_property
    def public(self) -> Public | None:
        """The server's public samples, with a model to run on them."""
        return public_of(self.population, self.fresh(0), self.bn, self.settings.device)

    def fingerprint(self, start: Weights, batch_clients: int = 1) -> str:
        """A digest of everything that determines the result, except engine and number of rounds.

        ``batch_clients`` is the number of clients that train as one stacked model.
        """
        digest = hashlib.sha256(start.vector.numpy().tobytes())
        for client in self.population.clients:
            for split in (client.train, client.val, client.test):
                for tensor in (split.x, split.y):
                    if 0 in tensor.stride():  # data of a client elsewhere: a count without content
                        digest.update(str(tuple(tensor.shape)).encode())
                    else:
                        digest.update(memoryview(tensor.contiguous().numpy()))  # type: ignore[arg-type]
        source = self.method.source
        parts = [
            self.method.name,
            source and source.parameters,
            {k: v for k, v in asdict(self.schedule).items() if (k, v) != ("precision", "float32")},
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
        if batch_clients != 1:
            parts.append(f"stacks of {batch_clients}")
        if self.init != "torch":  # older runs have fingerprints without init
            parts.append(self.init)
        if self.settings.outliers != "reject":  # likewise
            parts.append(self.settings.outliers)
        digest.update(json.dumps(parts, default=str).encode())
        return digest.hexdigest()

    def _trace(self) -> str:
        """The digest of the availability trace, if there is one."""
        file = self.settings.availability.get("file")
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def check_engine(settings: Settings) -> None:
    """Refuse an unknown engine, and settings of Ray for another engine."""
    ENGINES.find(settings.engine)
    if settings.engine == "ray":
        return
    defaults = Settings()
    for key in ("address", "cpus_per_worker", "gpus_per_worker"):
        if (value := getattr(settings, key)) != getattr(defaults, key):
            raise ConfigError(
                f"run.{key} = {value!r} is for Ray, but the engine is '{settings.engine}': add "
                "--engine ray, or leave it out"
            )


def public_of(population: Population, module: nn.Module, bn: str, device: str) -> Public | None:
    """The public samples of a population, with this module to run on them."""
    if population.public is None:
        return None
    flat = FlatModel(module, device, bn)
    return Public(population.public, lambda weights, x: outputs(flat, weights, x))


def freeze(module: nn.Module, layers: tuple[str, ...]) -> None:
    """Freeze these layers: they are neither trained nor sent."""
    if layers:
        names = set(Layout.of(module).only(layers).names)
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.requires_grad_(False)


def reinitialised(module: nn.Module) -> nn.Module:
    """A copy of a module with new weights, for the parts that have ``reset_parameters``."""
    fresh = copy.deepcopy(module)
    for submodule in fresh.modules():
        reset = getattr(submodule, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def cohort(settings: Settings, round: int, members: Sequence[ClientId]) -> list[ClientId]:
    """The clients of a round if all are available, drawn from their own seed."""
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
    """Run an experiment, or resume it from the last checkpoint in its directory.

    With ``remote`` the clients are on other machines and keep their own states. ``watch`` receives
    the events of rounds, ``track`` all events, and ``say`` messages about evidence for groups, the
    verdict of a trial, and warnings. ``discard_damaged`` accepts that a resume loses history that
    cannot be read; without it, that raises LostHistory.
    """
    check_engine(experiment.settings)
    with ExitStack() as stack:
        if track is not None:
            stack.enter_context(track)
        stack.enter_context(one_thread())
        scratch = tempfile.TemporaryDirectory(prefix="coterie-") if directory is None else None
        run = RunDir(directory) if directory is not None else None
        folder = Path(scratch.name) if scratch is not None else run.clients  # type: ignore[union-attr]
        # Refuse a wrong model or method before anything is written.
        plan = experiment.plan(folder)
        settings, elsewhere = experiment.settings, remote is not None
        if not elsewhere:
            recorded = run.recorded("batch_clients") if run is not None and resume else None
            plan = experiment.stacking(plan, recorded, say)
        guard = Guard(plan, settings.policy, experiment.members, settings.rounds)
        if run is not None:
            (RunDir.open if resume else RunDir.create)(run.path)
            run.lock()
            stack.callback(run.unlock)
            if resume:
                check_digests(run.read_code(), experiment.config)
            if remote is None:  # a server has already looked
                run.stop_asked()  # forget a request to an earlier session
            if resume and plan.privacy.on and remote is None:
                plan.roster.check()
        memory = remembered(experiment, plan, run, elsewhere, resume, discard_damaged, say)
        if run is not None:
            run.write_config(experiment.config)
            run.write_code(digests_of(experiment.config))
            run.write_data(data_record(experiment.population, elsewhere))
            run.append_session(session(experiment, max(0, memory.run.done), plan))
        if plan.privacy.on and remote is None:
            plan.roster.prepare()
        make_engine = ENGINES.find(experiment.settings.engine)
        try:
            engine = make_engine(plan, experiment.settings) if remote is None else remote(plan)
        except (ConfigError, EngineError):
            if run is not None and remote is None and not resume:
                run.discard()  # nothing has run: leave the folder to the corrected command
            raise
        stack.callback(engine.close)
        if track is not None:
            # Rounds that wait for their scores are tracked once they have them.
            complete = memory.run.history[: len(memory.run.history) - len(waiting(memory))]
            judged_by = main_score(experiment.population.classes is None)
            track.begin(about(experiment, judged_by, directory, complete))
        listeners = watch, None if track is None else track.event, say
        try:
            running = Running(experiment, plan, memory, run, engine, guard, elsewhere, *listeners)
            closing = running.all()
        except ConfigError:
            if (
                run is not None
                and remote is None
                and not resume
                and not rounds_of(run.read_events())
            ):
                run.discard()  # nothing has run: leave the folder to the corrected command
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
