"""Scoring: evaluates models on the clients' own validation and test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coterie.channel.messages import ReplyBody
from coterie.channel.piggyback import ClientPiggyback
from coterie.channel.tasks import SCORE
from coterie.channel.wire import Message
from coterie.client.client import Client
from coterie.client.metrics import scores
from coterie.client.together import OutputsCall
from coterie.core.messages import ClientId, Upload
from coterie.core.weights import Weights
from coterie.data.population import Split

if TYPE_CHECKING:
    from coterie.client.runtime import ClientRuntime

Done = TypeVar("Done")


@dataclass(frozen=True)
class Scoring:
    """Carries out the orders to score, for several clients at a time."""

    runtime: ClientRuntime

    def answer(self, orders: Sequence[tuple[ClientId, Mapping[str, Any]]]) -> list[Message]:
        """Score clients; those that use the same weights share one pass over their data."""
        together = self.runtime.context.together
        tasks = [partial(self._guarded, id, self._model, id, body) for id, body in orders]
        models = [task() for task in tasks] if together is None else together.run(tasks)
        answers = {i: model for i, model in enumerate(models) if isinstance(model, Message)}
        ready = {i: model for i, model in enumerate(models) if not isinstance(model, Message)}
        answers |= self._score_together(ready)
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

    def _score_together(self, models: Mapping[int, tuple[Client, Weights]]) -> dict[int, Message]:
        """Score clients with their models; one that several use takes one pass over their data."""
        if not models:
            return {}
        first = next(iter(models.values()))[0]
        data = [self.runtime.plan.population.clients[client.id] for client, _ in models.values()]
        parts = [(c.val, c.test) for c in data]
        calls = [
            OutputsCall(model, torch.cat([val.x, test.x]))
            for (_, model), (val, test) in zip(models.values(), parts, strict=True)
        ]
        tables = self._guarded(first.id, self._tables, calls, parts)
        if isinstance(tables, Message):
            return dict.fromkeys(models, tables)
        return {
            index: self._guarded(client.id, self._reply, client, *tables[row])
            for row, (index, (client, _)) in enumerate(models.items())
        }

    def _tables(
        self, calls: Sequence[OutputsCall], parts: Sequence[tuple[Split, Split]]
    ) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
        """Each client's outputs on both splits, and the scores of them."""
        plan, outs = self.runtime.plan, self.runtime.context.outputs_of(calls)
        classes = plan.population.classes
        number = None if classes is None else len(classes)
        val = [out[: len(v)] for out, (v, _) in zip(outs, parts, strict=True)]
        test = [out[len(v) :] for out, (v, _) in zip(outs, parts, strict=True)]
        tables: list[tuple[dict[str, Tensor], dict[str, float]]] = [
            ({"val": v, "test": t}, {}) for v, t in zip(val, test, strict=True)
        ]
        for place, (split, out) in enumerate({"val": val, "test": test}.items()):
            labels = [pair[place].y for pair in parts]
            for table, values in zip(
                tables, scores(out, labels, plan.training.criterion, number), strict=True
            ):
                table[1].update({f"{split}_{name}": value for name, value in values.items()})
        return tables

    def _guarded(self, id: ClientId, work: Callable[..., Done], *arguments: Any) -> Done | Message:
        """What the work gives, or a message that says why it failed."""
        try:
            return work(*arguments)
        except Exception as error:
            return self.runtime.failure(id, SCORE, error)

    def _reply(
        self, client: Client, outputs: Mapping[str, Tensor], metrics: dict[str, float]
    ) -> Message:
        """The reply with one client's scores, those by metrics of one's own added."""
        plan = self.runtime.plan
        data = plan.population.clients[client.id]
        for split, out in outputs.items():
            y = getattr(data, split).y
            for name, metric in plan.training.metrics.items() if len(y) else ():
                metrics[f"{split}_{name}"] = float(metric(out, y))
        return self.runtime.reply(len(client.train), Upload(metrics=metrics))
