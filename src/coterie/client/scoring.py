"""Scores of clients: on their own validation and test data, several clients in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.channel.tasks import SCORE
from coterie.channel.wire import Message
from coterie.client.client import Client
from coterie.client.fit import outputs
from coterie.client.metrics import scores
from coterie.core.messages import ClientId, Upload
from coterie.core.weights import Weights

if TYPE_CHECKING:
    from coterie.client.runtime import ClientRuntime

_ORDER = {"task": SCORE}


@dataclass(frozen=True)
class Scoring:
    """Carries out the orders to score."""

    runtime: ClientRuntime

    def answer(self, orders: Sequence[tuple[ClientId, Mapping[str, Any]]]) -> list[Message]:
        """Score clients; those that use the very same model share one pass over their data."""
        answers: dict[int, Message] = {}
        sharing: dict[int, list[tuple[int, Client, Weights]]] = {}
        for place, (id, body) in enumerate(orders):
            prepared = self.runtime.guarded(id, body, self._model, id, body)
            if isinstance(prepared, Message):
                answers[place] = prepared
            else:
                same_vector = prepared[1].vector.data_ptr()
                sharing.setdefault(same_vector, []).append((place, *prepared))
        for sharers in sharing.values():
            answers |= self._together(sharers)
        return [answers[place] for place in range(len(orders))]

    def _model(self, id: ClientId, body: Mapping[str, Any]) -> tuple[Client, Weights]:
        """A client and the model it is scored with: as received, adapted, or trained alone."""
        runtime, config = self.runtime, body["config"]
        client, alone = runtime.client(id, body), int(config.get("alone", 0))
        arrays = runtime.compression.received(client, body["arrays"])
        offers = sum(isinstance(array, Weights) for array in arrays.values())
        runtime.privacy.begin_score(id, body, offers)
        method = runtime.plan.method
        model = client.base if alone else method.assemble(client, arrays)
        for round in range(alone):  # as method `local` would
            client.round = round
            model = client.fit(model).weights
        epochs = int(config.get("adapt_epochs", 0))
        if epochs:
            own = None if alone else method.adapt
            model = (own or Client.adapt)(client, model, epochs)
        return client, model

    def _together(self, sharers: Sequence[tuple[int, Client, Weights]]) -> dict[int, Message]:
        """The scores of clients that use one model."""
        runtime, (_, first, model) = self.runtime, sharers[0]
        data = [runtime.plan.population.clients[client.id] for _, client, _ in sharers]
        parts = [s for d in data for s in (d.val, d.test)]

        def forward() -> Tensor:
            return outputs(runtime.context.model, model, torch.cat([s.x for s in parts]))

        out = runtime.guarded(first.id, _ORDER, forward)
        if isinstance(out, Message):
            return {place: out for place, _, _ in sharers}
        pieces = iter(torch.split(out, [len(s) for s in parts]))
        return {
            place: runtime.guarded(
                client.id, _ORDER, self._scored, client, {"val": next(pieces), "test": next(pieces)}
            )
            for place, client, _ in sharers
        }

    def _scored(self, client: Client, held: Mapping[str, Tensor]) -> Message:
        """The scores of one client, from its model's outputs."""
        plan, metrics = self.runtime.plan, dict[str, float]()
        data, classes = plan.population.clients[client.id], plan.population.classes
        for name, out in held.items():
            y = getattr(data, name).y
            found = scores(
                out, y, plan.training.criterion, None if classes is None else len(classes)
            )
            if len(y):
                found |= {name: float(f(out, y)) for name, f in plan.training.metrics.items()}
            metrics |= {f"{name}_{k}": v for k, v in found.items()}
        return self.runtime.reply(len(client.train), Upload(metrics=metrics))
