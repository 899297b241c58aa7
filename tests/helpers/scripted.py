"""A federation whose replies are written by hand, and an engine that notes what passes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.compose.probing import HALVES, array_name
from coterie.core.aggregate import mix
from coterie.core.messages import Order, Reply, Upload
from coterie.core.method import Setup
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop


@dataclass
class Scripted:
    """Answers by a script: an order gives an upload, or nothing where the reply is lost.

    ``asked`` holds every exchange: "gather" or "reduce", its orders by client, and the mixing.
    """

    script: Callable[[Order], Upload | None]
    clients: range
    examples: Mapping[int, int] = field(default_factory=dict)
    asked: list[tuple[str, dict[int, Order], Any]] = field(default_factory=list)
    min_group: int = 1
    plain_means: bool = True

    def gather(self, orders):
        return self._exchange("gather", orders, None)

    def reduce(self, orders, into, by_examples=True):
        return mix(self._exchange("reduce", orders, into), into, by_examples)

    def average(self, replies, into, by_examples=True):
        return mix(replies, into, by_examples)

    def _exchange(self, kind, orders, into):
        assert len({o.client for o in orders}) == len(orders)
        self.asked.append((kind, {o.client: o for o in orders}, into))
        uploads = {o.client: self.script(o) for o in orders}
        return [
            Reply(c, self.examples.get(c, 1), u.arrays, u.metrics)
            for c, u in sorted(uploads.items())
            if u is not None
        ]


@dataclass(frozen=True)
class Seen:
    """One order and its answer as they passed: the names of the tensors of each array, by array."""

    client: int
    order: str
    task: str
    config: Mapping[str, Any]
    down: Mapping[str, tuple[str, ...]]
    up: Mapping[str, tuple[str, ...]]
    sent: Mapping[str, Weights]
    metrics: Mapping[str, float]
    payload: tuple[int, int]  # bytes of arrays, down and up


class Spy(Loop):
    """The reference engine, noting every order and its answer."""

    def __init__(self, plan):
        super().__init__(plan)
        self.wire, self.seen = Wire(plan.start.layout), []

    def exchange(self, requests, until=None):
        asked = {r.client: r.message for r in requests}
        for client, answer in super().exchange(requests):
            order, reply = self.wire.unpack(asked[client]), self.wire.unpack(answer)
            if "error" not in reply and not order["task"].startswith("$"):
                self.seen.append(_noted(client, order, reply, asked[client], answer))
            yield client, answer

    def of(self, order):
        """What was asked under this name, by client."""
        return {s.client: s for s in self.seen if s.order == order}


def _noted(client, order, reply, asked, answer):
    down, up = (_tensors(body["arrays"]) for body in (order, reply))
    sizes = tuple(sum(len(p) for p in m.payloads) for m in (asked, answer))
    return Seen(
        client, order["order"], order["task"], order["config"], down, up,
        reply["arrays"], reply["metrics"], sizes,
    )  # fmt: skip


def _tensors(arrays):
    return {k: v.layout.names for k, v in arrays.items() if isinstance(v, Weights)}


def opened(made, folder, engine=Spy):
    """A channel to the clients of an experiment, its engine, and the plan."""
    plan = made.plan(folder)
    running = engine(plan)
    return Channel(running, Wire(plan.start.layout)), running, plan


def steps(enough, samples=1.0):
    """An answer to the question after how many steps a client has learnt enough; 0 is never."""
    return Upload(metrics={"enough": float(enough), "samples": samples})


def halves(first, second=None, count=2, validation=1, samples=1.0, by="model"):
    """An answer to a probe: a client's representation from each half of its data."""
    sides = (first, first if second is None else second)
    arrays = {array_name(by, n): side for n, side in zip(HALVES, sides, strict=True)}
    metrics = {"halves": count, "samples": samples, "validation": validation}
    return Upload(arrays, {k: float(v) for k, v in metrics.items()})


def setup(start, clients, **more):
    """What a method starts from, with nobody to draw further models."""
    return Setup(start, list(clients), 0, lambda i: start, **more)


def linears(*sizes):
    """The layout of a chain of linear layers, named 0, 1, ..."""
    return Layout.of(nn.Sequential(*[nn.Linear(a, b) for a, b in sizes]))


def weights(layout, *numbers):
    return Weights(layout, torch.tensor([float(n) for n in numbers]))
