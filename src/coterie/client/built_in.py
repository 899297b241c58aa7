"""Tasks that every client knows, beside those of the method and scoring."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coterie.channel.wire import Message, Work
from coterie.client.client import Client
from coterie.core.messages import Array, Upload
from coterie.errors import CoterieError, WireError

if TYPE_CHECKING:
    from coterie.client.runtime import ClientRuntime, ReadOrder


@dataclass(frozen=True)
class BuiltIn:
    """Carries out the steps of secure sums, and hands out or keeps the model of a client."""

    runtime: ClientRuntime

    def step(self, asked: ReadOrder, began: float) -> Message:
        """One step of a secure sum."""
        runtime = self.runtime
        sent, beside = runtime.sums.step(asked.id, asked.body)
        if runtime.keeper is not None and "refused" in beside:
            runtime.tell(f"refused to go on with a sum: {beside['refused']}")
        reply = runtime.reply(0, sent, more={"beside": beside})
        return replace(reply, work=Work(time.perf_counter() - began))

    def fetch(self, client: Client, arrays: Mapping[str, Array]) -> Message:
        """The model that the client would use now, for export."""
        runtime = self.runtime
        if runtime.keeper is not None:
            raise WireError("a client does not hand out its personal model")
        runtime.privacy.may_fetch(client.id)
        model = runtime.plan.method.assemble(client, arrays)
        return runtime.reply(len(client.train), Upload({"model": model}))

    def keep(
        self, client: Client, arrays: Mapping[str, Array], about: Mapping[str, Any]
    ) -> Message:
        """The run is over: the client keeps the model that it would use now."""
        runtime = self.runtime
        if runtime.keeper is None:
            raise CoterieError(f"client {client.id} has no place to keep a model in")
        runtime.keeper(client.id, runtime.plan.method.assemble(client, arrays), about)
        return runtime.reply(0, Upload())
