"""Small experiments that tests are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import coterie
from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.client import Schedule
from coterie.core.engine import Engine
from coterie.core.method import Method, Round, State
from coterie.data import ClientData, Population, RawData, Split, build_population, load
from coterie.engines.loop import Loop
from coterie.experiment.experiment import Experiment, Settings, cohort
from coterie.experiment.stopping import Stop as Ending
from coterie.methods import make
from coterie.models import make_model

# Every method's contract row: a factory with the parameters that tests use.
ROWS = {
    "local": coterie.local,
    "fedavg": coterie.fedavg,
    "fedprox": lambda: coterie.fedprox(mu=0.5),
    "fedper": lambda: coterie.fedper(k=1),
    "ifca": lambda: coterie.ifca(k=2),
    "oracle": coterie.oracle,
    "known-groups": lambda: coterie.known_groups(groups=["north"] * 4 + ["south"] * 2),
    "group-evidence": lambda: coterie.group_evidence(seeds=2, steps=5, trial="always"),
    "fedclust": lambda: coterie.fedclust(clusters=2, warmup_epochs=1),
    "dc-pfl": lambda: coterie.dc_pfl(start=1, alpha=2, share=0.9, gamma=0.9),
    "fedtsdp": lambda: coterie.fedtsdp(hopkins=0.4, eps_outputs=0.001, shrink=0.7, public_batch=20),
    "user-centric": lambda: coterie.user_centric(streams=2),
    "user-centric all": coterie.user_centric,
    "fedavg layer-wise": lambda: coterie.layer_wise(coterie.fedavg(), 2, share=0.95, start=1),
    "fednova": coterie.fednova,
    "scaffold": coterie.scaffold,
    "scaffold n": lambda: coterie.scaffold(weights="n"),
    "moon": coterie.moon,
    "feddyn": coterie.feddyn,
    "fedrep": lambda: coterie.fedrep(head_epochs=2),
    "lg-fedavg": lambda: coterie.lg_fedavg(g=1),
    "ditto": coterie.ditto,
    "pfedme": lambda: coterie.pfedme(inner_steps=2, beta=0.5),
    "per-fedavg": lambda: coterie.per_fedavg(order="hessian-free", beta=0.1),
    "apfl": coterie.apfl,
    "fedfomo": lambda: coterie.fedfomo(m=2),
    "cfl": lambda: coterie.cfl(eps1=0.42, eps2=0.55, relative=False),
    "fl-hc": lambda: coterie.fl_hc(rounds=1, clusters=2),
    "pacfl": lambda: coterie.pacfl(clusters=2),
    "clusterfl": lambda: coterie.clusterfl(k=2, every=2),
    "flis": lambda: coterie.flis(threshold=0.99),
    "adaptive": lambda: coterie.adaptive(threshold=0.3, every=2),
    "k-fed": lambda: coterie.k_fed(k=4),
    "ifca+ditto": lambda: make("ifca+ditto", {"k": 2}),
    "cfl+fedrep+fedadam": lambda: make(
        "cfl+fedrep+fedadam", {"eps1": 0.42, "eps2": 0.55, "relative": False, "head_epochs": 1}
    ),
    "ditto layer-wise": lambda: coterie.layer_wise(coterie.ditto(), 2, share=0.95, start=1),
    "fedavgm": coterie.fedavgm,
    "fedadam": coterie.fedadam,
    "fedyogi": coterie.fedyogi,
    "median": coterie.median,
    "trimmed-mean": lambda: coterie.trimmed_mean(share=0.2),
    "krum": coterie.krum,
    "adaptive-tau": lambda: coterie.adaptive_tau(tau_max=5, sample=8),
    "ifca+adaptive-tau": lambda: make("ifca+adaptive-tau", {"k": 2, "tau_max": 4}),
    "ifca layer-wise": lambda: coterie.layer_wise(coterie.ifca(k=2), 2, share=0.95, start=1),
}
# What a method's row needs to be trained with, where it is not the usual.
SCHEDULES: dict[str, dict[str, Any]] = {"scaffold": {"momentum": 0.0}}
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"stop": Ending(bytes=1e12)} for name in ("adaptive-tau", "ifca+adaptive-tau")
}


@cache
def _read() -> RawData:
    return load("digits")


def _images() -> RawData:
    """The digits, read from their text file once; arrays of one's own."""
    return replace(_read(), x=_read().x.copy(), y=_read().y.copy())


def digits(clients: int = 6, groups: int = 2, samples: int = 360, seed: int = 0) -> Population:
    """Handwritten digits over a few clients; groups see their images rotated."""
    return build_population(
        _images(),
        clients=clients,
        partition="iid",
        partition_params={},
        shift="rotation",
        shift_params={"groups": groups},
        samples=samples,
        public=60,
        seed=seed,
    )


def experiment(method: Method, population: Population | None = None, **changes: Any) -> Experiment:
    """A quick experiment on digits with a small network that has dropout.

    Clients train one by one: laws between methods and engines hold to the bit there.
    """
    people = population or digits()
    schedule = {"epochs": 1, "batch_size": 8, "lr": 0.1, "momentum": 0.5}
    schedule |= SCHEDULES.get(method.name, {}) | changes.pop("schedule", {})
    settings = {"rounds": 3, "engine": "loop", "batch_clients": 1} | SETTINGS.get(method.name, {})
    settings |= changes.pop("settings", {})
    network = changes.pop(
        "model",
        lambda: make_model("mlp", people.shape, people.targets, hidden=(12,), dropout=0.2),
    )
    return Experiment(
        population=people,
        model=network,
        method=method,
        criterion=changes.pop("criterion", nn.functional.cross_entropy),
        schedule=Schedule(**schedule),
        settings=Settings(**settings),
        **changes,
    )


def drive(
    experiment: Experiment, folder: Path, engine: Any = None, rounds: int | None = None
) -> tuple[State, Channel, Engine]:
    """Rounds by hand, with no evaluation: the state, the channel and the engine afterwards.

    ``engine`` makes the engine from a plan; the caller closes what needs closing.
    """
    plan = experiment.plan(folder)
    running = engine(plan) if engine else Loop(plan)
    terms = experiment.terms(plan.start)
    wire = Wire(plan.start.layout, terms.coding.downwards.plain)
    channel = Channel(running, wire, terms=terms)
    channel.begin(0, stage="init")
    state = experiment.method.init(channel, experiment.setup(plan.start))
    for number in range(rounds or experiment.settings.rounds):
        channel.begin(number)
        people = cohort(experiment.settings, number, experiment.members)
        budget = experiment.settings.stop.budget
        info = Round(number, people, experiment.public, budget=budget)
        state = replace(experiment.method.round(channel, state, info), notes={})
    return state, channel, running


def models(experiment: Experiment, state: State, channel: Channel) -> list[Tensor]:
    """The model that each client would use now."""
    channel.begin(999, stage="look")
    return [channel.fetch(c, experiment.method.sends(state, c)).vector for c in channel.clients]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of models are equal to the bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Stop(Exception):
    """A run is broken off here."""


def stop_after(round: int) -> Any:
    """Something to watch a run with that breaks it off after this round."""

    def watch(event: dict[str, Any]) -> None:
        if event["round"] == round:
            raise Stop

    return watch


# --- quadratics: each client's loss is the mean of (θ − y)², its optimum the mean of its y ------


class Constant(nn.Module):
    """A model whose answer to everything is its one parameter."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x))


def quadratics(targets: list[list[float]]) -> Population:
    """A client a list: its training targets are these numbers, held-out data repeat the first."""
    people = []
    for numbers in targets:
        y = torch.tensor(numbers)
        train = Split(torch.zeros(len(y), 1), y)
        one = Split(torch.zeros(1, 1), y[:1])
        people.append(ClientData(train, one, one))
    return Population(tuple(people), "table", (1,), None, 1)


def on_quadratics(
    method: Method, targets: list[list[float]], start: float = 0.0, **changes: Any
) -> Experiment:
    """Full-batch gradient descent on quadratics, lr 0.1: θ ← θ − 0.2(θ − ȳ)."""
    population = changes.pop("population", None) or quadratics(targets)
    schedule = {"batch_size": 1000, "lr": 0.1, "momentum": 0.0} | changes.pop("schedule", {})
    return experiment(
        method,
        population,
        model=lambda: Constant(start),
        criterion=nn.functional.mse_loss,
        schedule=schedule,
        **changes,
    )


def with_groups(population: Population, groups: list[int]) -> Population:
    """The same population with known groups."""
    return replace(population, groups=tuple(groups))
