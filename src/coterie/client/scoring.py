"""Scoring: evaluates models on the clients' own validation and test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coterie.channel.messages import ReplyBody
from coterie.channel.piggyback import ClientPiggyback
from coterie.channel.tasks import SCORE
from coterie.channel.wire import Message
from coterie.client.client import Client
from coterie.client.fit import outputs
from coterie.client.metrics import scores
from coterie.core.messages import ClientId, Upload
from coterie.core.weights import Weights

if TYPE_CHECKING:
    from coterie.client.runtime import ClientRuntime

Done = TypeVar("Done")


@dataclass(frozen=True)
class Scoring:
    """Carries out the orders to score, for several clients at a time."""

    runtime: ClientRuntime

    def answer(self, orders: Sequence[tuple[ClientId, Mapping[str, Any]]]) -> list[Message]:
        """Score clients; those that use the same weights share one pass over their data."""
        answers: dict[int, Message] = {}
        by_model: dict[int, list[tuple[int, Client, Weights]]] = {}
        for index, (id, body) in enumerate(orders):
            prepared = self._guarded(id, self._model, id, body)
            if isinstance(prepared, Message):
                answers[index] = prepared
            else:
                address = prepared[1].vector.data_ptr()
                by_model.setdefault(address, []).append((index, *prepared))
        for clients in by_model.values():
            answers |= self._score_together(clients)
        return [answers[index] for index in range(len(orders))]

    def beside(self, id: ClientId, body: Mapping[str, Any]) -> ReplyBody:
        """Scores that an order asks for beside its task, of the client as it is before it."""
        piggyback = ClientPiggyback()
        (answer,) = self.answer([(id, piggyback.asked(body))])
        return piggyback.answered(self.runtime.wire.unpack(answer))

    def _model(self, id: ClientId, body: Mapping[str, Any]) -> tuple[Client, Weights]:
        """A client and the model to score: the one received, a fine-tuned one, or a local one."""
        runtime, config = self.runtime, body["config"]
        client, alone = runtime.client(id, body), int(config.get("alone", 0))
        arrays = runtime.compression.received(client, body["arrays"])
        offers = sum(isinstance(array, Weights) for array in arrays.values())
        runtime.privacy.begin_score(id, body, offers)
        method = runtime.plan.method
        model = client.base if alone else method.assemble(client, arrays)
        for round in range(alone):  # the same as method `local`
            client.round = round
            model = client.fit(model).weights
        epochs = int(config.get("adapt_epochs", 0))
        if epochs:
            adapt = None if alone else method.adapt
            model = (adapt or Client.adapt)(client, model, epochs)
        return client, model

    def _score_together(self, clients: Sequence[tuple[int, Client, Weights]]) -> dict[int, Message]:
        """Score clients that use the same model, in one pass."""
        runtime, (_, first, model) = self.runtime, clients[0]
        data = [runtime.plan.population.clients[client.id] for _, client, _ in clients]
        parts = [s for d in data for s in (d.val, d.test)]

        def forward() -> Tensor:
            return outputs(runtime.context.model, model, torch.cat([s.x for s in parts]))

        out = self._guarded(first.id, forward)
        if isinstance(out, Message):
            return {index: out for index, _, _ in clients}
        pieces = iter(torch.split(out, [len(s) for s in parts]))
        return {
            index: self._guarded(
                client.id, self._reply, client, {"val": next(pieces), "test": next(pieces)}
            )
            for index, client, _ in clients
        }

    def _guarded(self, id: ClientId, work: Callable[..., Done], *arguments: Any) -> Done | Message:
        """What the work gives, or a message that says why it failed."""
        try:
            return work(*arguments)
        except Exception as error:
            return self.runtime.failure(id, SCORE, error)

    def _reply(self, client: Client, outputs: Mapping[str, Tensor]) -> Message:
        """The reply with one client's scores, from its model's outputs on each split."""
        plan, metrics = self.runtime.plan, dict[str, float]()
        data, classes = plan.population.clients[client.id], plan.population.classes
        for split, out in outputs.items():
            y = getattr(data, split).y
            values = scores(
                out, y, plan.training.criterion, None if classes is None else len(classes)
            )
            if len(y):
                values |= {name: float(f(out, y)) for name, f in plan.training.metrics.items()}
            metrics |= {f"{split}_{name}": value for name, value in values.items()}
        return self.runtime.reply(len(client.train), Upload(metrics=metrics))
