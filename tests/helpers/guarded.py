"""Experiments driven round by round behind their guard, as a run does it; and who looks on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.channel.channel import Channel
from coterie.channel.policy import counts
from coterie.channel.privacy.client_sums import ClientSums
from coterie.channel.privacy.settings import Privacy
from coterie.channel.wire import Wire
from coterie.core.aggregate import mix
from coterie.core.messages import Chosen, Mean, Mixing, Reply, Slot, vector_of
from coterie.core.method import Method, Round
from coterie.data import Population, build_population, load
from coterie.engines.loop import Loop
from coterie.errors import Abandoned
from coterie.experiment.experiment import Experiment, cohort
from coterie.experiment.privacy import Guard
from support import experiment, models

SECURE = Privacy(secure=True)
EXCHANGES = 5  # of one sum: the task with its keys, shares, masked values, confirmation, unmasking


def uneven(clients: int = 6, groups: int = 2, samples: int = 360, seed: int = 1) -> Population:
    """Digits over clients of very different sizes; groups see their images rotated."""
    return build_population(
        load("digits"),
        clients=clients,
        partition="quantity",
        partition_params={"alpha": 2.0},
        shift="rotation",
        shift_params={"groups": groups},
        samples=samples,
        seed=seed,
    )


def secured(method: Method, privacy: Privacy = SECURE, **changes: Any) -> Experiment:
    """A quick experiment under secure aggregation."""
    settings = {"privacy": privacy, **changes.pop("settings", {})}
    people = changes.pop("population", None) or uneven()
    if method.same_steps:
        changes["schedule"] = {"steps": 4, **changes.get("schedule", {})}
    return experiment(method, people, settings=settings, **changes)


class Driven:
    """Rounds by hand, with no evaluation, abandoned as in a run."""

    def __init__(
        self,
        made: Experiment,
        folder: Path,
        engine: Callable[..., Any] = Loop,
        around: Callable[[Any], Any] = lambda fed: fed,
    ) -> None:
        self.made, self.plan = made, made.plan(folder)
        self.plan.roster.prepare()
        self.engine, terms = engine(self.plan), made.terms(self.plan.start)
        wire = Wire(self.plan.start.layout, terms.coding.downwards.plain)
        self.channel = Channel(self.engine, wire, terms=terms)
        policy, rounds = made.settings.policy, made.settings.rounds
        self.guard = Guard(self.plan, policy, made.members, rounds)
        self.fed = around(self.guard.around(self.channel))
        self.channel.begin(0, stage="init")
        self.state = made.method.init(self.fed, made.setup(self.plan.start))
        self.abandoned: dict[int, str] = {}
        self.withheld: dict[int, dict[str, str]] = {}

    def round(self, number: int) -> None:
        """One round, counted from 0."""
        settings = self.made.settings
        people = cohort(settings, number, self.made.members)
        enough = counts(settings.policy, len(self.made.members)).least
        self.channel.begin(number, "", people, len(people), enough)
        info = Round(number, people, self.made.public, budget=settings.stop.budget)
        try:
            self.guard.begin(self.state.models)
            state = self.made.method.round(self.fed, self.state, info)
            self.state = replace(state, notes={})
        except Abandoned as why:
            self.channel.state.go_back()
            self.abandoned[number] = str(why)
        self.withheld[number] = self.guard.event().get("withheld", {})

    def all(self) -> Driven:
        """Every round."""
        for number in range(self.made.settings.rounds):
            self.round(number)
        return self

    @property
    def models(self) -> list[Any]:
        """The model that each client would use now, asked for by its owner: no guard is there."""
        plan = replace(self.plan, privacy=Privacy())
        channel = Channel(Loop(plan), self.channel.wire, terms=self.channel.terms)
        channel.state.versions.update(self.channel.state.versions)
        return models(self.made, self.state, channel)

    def close(self) -> None:
        """End what the engine started."""
        self.engine.close()


@dataclass
class Witness:
    """A federation that also knows what each client put into a sum, and compares.

    ``means`` are the pairs of secure and plain means of the very same uploads, call by call.
    """

    fed: Any
    uploads: dict[int, Reply]
    means: list[tuple[dict[Any, Mean], dict[Any, Mean]]] = field(default_factory=list)

    @property
    def clients(self):
        return self.fed.clients

    def gather(self, orders):
        return self.fed.gather(orders)

    def average(self, replies, into, by_examples=True):
        return self.fed.average(replies, into, by_examples)

    def reduce(self, orders, into, by_examples=True):
        self.uploads.clear()
        found = self.fed.reduce(orders, into, by_examples)
        there = {c for mean in found.values() for c in mean.clients}
        replies = [r for r in self.uploads.values() if r.client in there]
        plain = as_in_sums(replies, into, by_examples)
        self.means.append((found, plain))
        return found


def witness(monkeypatch) -> Callable[[Any], Witness]:
    """Something to put around a federation, after which uploads are seen where they are made."""
    uploads: dict[int, Reply] = {}
    advertise = ClientSums.advertise

    def seen(self, client, examples, upload, received, body):
        uploads[client] = Reply(client, examples, dict(upload.arrays), dict(upload.metrics))
        return advertise(self, client, examples, upload, received, body)

    monkeypatch.setattr(ClientSums, "advertise", seen)
    return lambda fed: Witness(fed, uploads)


def as_in_sums(replies: Sequence[Reply], into: Mixing, by_examples: bool) -> dict[Slot, Mean]:
    """The plain means of these replies, but for metrics, which count as the arrays do."""
    means = mix(replies, into, by_examples)
    for slot, mean in means.items():
        there = [r for r in replies if r.client in mean.clients]
        metrics = {}
        for name in mean.metrics:
            rows = [
                (
                    (1.0 if isinstance(into, Chosen) else into[r.client][slot])
                    * (r.examples if by_examples else 1),
                    r.metrics[name],
                )
                for r in there
                if name in r.metrics
            ]
            metrics[name] = sum(w * value for w, value in rows) / sum(w for w, _ in rows)
        means[slot] = replace(mean, metrics=metrics)
    return means


def close(found: Mean, plain: Mean, bits: int) -> None:
    """The same mean, but for half a step of the grid and the rounding of both to float32."""
    step = 2.0**-bits
    assert found.clients == plain.clients
    assert found.examples == plain.examples
    assert found.metrics.keys() == plain.metrics.keys()
    for name, value in plain.metrics.items():
        assert abs(found.metrics[name] - value) <= step / 2 + 1e-12 * abs(value)
    assert found.arrays.keys() == plain.arrays.keys()
    for name, array in plain.arrays.items():
        a, b = (vector_of(x).double().numpy() for x in (found.arrays[name], array))
        assert (np.abs(a - b) <= step / 2 + np.abs(b) * 2.0**-23).all()
