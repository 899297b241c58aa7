"""A site carries out orders for the clients whose data it holds. Every engine uses this one."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from coterie.client.client import Bench, Client, Staged
from coterie.client.fit import Criterion, FlatModel, Schedule, outputs
from coterie.client.metrics import scores
from coterie.data.population import Population
from coterie.door.door import FETCH, SCORE
from coterie.door.wire import Decoded, Message, Wire
from coterie.engines.store import Store
from coterie.errors import CoterieError
from coterie.federation import ClientId, Upload
from coterie.method import Method
from coterie.weights import Weights

Metric = Callable[[Tensor, Tensor], float]
Done = TypeVar("Done")


@dataclass(frozen=True)
class Plan:
    """All that a site needs to know of a run."""

    population: Population
    module: nn.Module
    start: Weights
    method: Method
    criterion: Criterion
    schedule: Schedule
    seed: int
    folder: Path
    bn: str = "shared"
    device: str = "cpu"
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def train_sizes(self) -> dict[ClientId, int]:
        """Training samples of each client."""
        return {i: len(c.train) for i, c in enumerate(self.population.clients)}

    @property
    def held_sizes(self) -> dict[ClientId, int]:
        """Validation and test samples of each client."""
        return {i: len(c.val) + len(c.test) for i, c in enumerate(self.population.clients)}


class Site:
    """One resident model, and the clients that take turns at it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        model = FlatModel(copy.deepcopy(plan.module), plan.device, plan.bn)
        start = Weights(model.layout, plan.start.vector)
        self.bench = Bench(model, start, plan.criterion, plan.schedule, plan.seed)
        self.wire = Wire(model.layout)
        self.store = Store(plan.folder, model.layout)
        self._decoded: Decoded = {}

    def forget(self) -> None:
        """The exchange is over: its arrays are no longer needed."""
        self._decoded.clear()

    def answer(self, requests: Sequence[tuple[ClientId, Message]]) -> list[Message]:
        """Carry out a unit of work; what a client does wrong is an answer too."""
        bodies = [
            (client, self.wire.unpack(message, self._decoded)) for client, message in requests
        ]
        if bodies[0][1]["task"] == SCORE:
            return self._score_all(bodies)
        return [self._guarded(client, body, self._carry_out) for client, body in bodies]

    def _guarded(
        self,
        client: ClientId,
        body: Mapping[str, Any],
        work: Callable[[ClientId, Mapping[str, Any]], Done],
    ) -> Done | Message:
        """What the work gives, or a message that says why it failed."""
        try:
            return work(client, body)
        except CoterieError as error:
            return self.wire.pack({"error": type(error).__name__, "text": str(error)})
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = (
                f"client {client}: task '{body['task']}' failed with {type(error).__name__}: "
                f"{error} (at {frame.filename}:{frame.lineno})"
            )
            return self.wire.pack({"error": "TrainingError", "text": text})

    def _client(self, id: ClientId, body: Mapping[str, Any]) -> Client:
        data = self.plan.population.clients[id]
        state = Staged(self.store.read(id, body.get("expects", "")))
        return Client(id, data.train, data.val, state, body["round"], self.bench)

    def _carry_out(self, id: ClientId, body: Mapping[str, Any]) -> Message:
        stored = self.store.answered(id, body["order"])
        if stored is not None:
            return stored
        client = self._client(id, body)
        if body["task"] == FETCH:
            model = self.plan.method.assemble(client, body["arrays"])
            return self._reply(client, Upload({"model": model}))
        task = self.plan.method.tasks.get(body["task"])
        if task is None:
            raise CoterieError(f"method '{self.plan.method.name}' has no task '{body['task']}'")
        upload = task(client, body["arrays"], body["config"])
        assert isinstance(client.state, Staged)
        if not client.state.changed:
            return self._reply(client, upload)
        version, expects = body["order"], body.get("expects", "")
        reply = self._reply(client, upload, version)
        self.store.write(id, version, client.state, reply)
        self.store.keep(id, [version, expects, *body.get("keep", [])], newest=version)
        return reply

    def _reply(self, client: Client, upload: Upload, version: str = "") -> Message:
        body: dict[str, Any] = {
            "examples": len(client.train),
            "arrays": dict(upload.arrays),
            "metrics": {k: float(v) for k, v in upload.metrics.items()},
        }
        return self.wire.pack(body | ({"version": version} if version else {}))

    def _score_all(self, bodies: Sequence[tuple[ClientId, Mapping[str, Any]]]) -> list[Message]:
        """Score clients; those that use the very same model share one pass over their data."""
        answers: dict[int, Message] = {}
        sharing: dict[int, list[tuple[int, Client, Weights]]] = {}
        for place, (id, body) in enumerate(bodies):
            prepared = self._guarded(id, body, self._to_score)
            if isinstance(prepared, Message):
                answers[place] = prepared
            else:
                same_vector = prepared[1].vector.data_ptr()
                sharing.setdefault(same_vector, []).append((place, *prepared))
        for sharers in sharing.values():
            answers |= self._score(sharers)
        return [answers[place] for place in range(len(bodies))]

    def _to_score(self, id: ClientId, body: Mapping[str, Any]) -> tuple[Client, Weights]:
        """A client and the model it is scored with: as received, adapted, or trained alone."""
        client, config = self._client(id, body), body["config"]
        alone = bool(config.get("alone", False))
        model = client.base if alone else self.plan.method.assemble(client, body["arrays"])
        epochs = int(config.get("adapt_epochs", 0))
        if epochs:
            stream = "alone" if alone else "adapt"
            model = client.fit(model, stream=stream, epochs=epochs, steps=None).weights
        return client, model

    def _score(self, sharers: Sequence[tuple[int, Client, Weights]]) -> dict[int, Message]:
        data = [self.plan.population.clients[client.id] for _, client, _ in sharers]
        parts = [s for d in data for s in (d.val, d.test)]
        out = outputs(self.bench.model, sharers[0][2], torch.cat([s.x for s in parts]))
        pieces = iter(torch.split(out, [len(s) for s in parts]))
        answers = {}
        for place, client, _ in sharers:
            held = {"val": next(pieces), "test": next(pieces)}
            body = {"task": SCORE, "held": held}
            answers[place] = self._guarded(client.id, body, partial(self._scored, client))
        return answers

    def _scored(self, client: Client, id: ClientId, body: Mapping[str, Any]) -> Message:
        data, metrics = self.plan.population.clients[id], dict[str, float]()
        for name, out in body["held"].items():
            found = self._scores(out, getattr(data, name).y)
            metrics |= {f"{name}_{k}": v for k, v in found.items()}
        return self._reply(client, Upload(metrics=metrics))

    def _scores(self, out: Tensor, y: Tensor) -> dict[str, float]:
        population = self.plan.population
        classes = None if population.classes is None else len(population.classes)
        found = scores(out, y, self.plan.criterion, classes)
        if len(y):
            found |= {name: float(f(out, y)) for name, f in self.plan.metrics.items()}
        return found
