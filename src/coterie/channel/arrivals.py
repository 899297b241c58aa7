"""What comes back of an exchange: messages are read, and what cannot be used is left out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, cast

from coterie.channel.checks import printable
from coterie.channel.compression.coding import decode
from coterie.channel.exchange import Answer, Exchange, Outgoing
from coterie.channel.messages import ReplyBody
from coterie.channel.piggyback import Piggyback
from coterie.channel.stack import Stages
from coterie.channel.state import ChannelState
from coterie.channel.tasks import kind_of
from coterie.channel.wire import Message, Wire, content_of
from coterie.core.messages import check_finite
from coterie.errors import (
    CoterieError,
    Diverged,
    RunDirError,
    TrainingError,
    WireError,
    error_named,
)


@dataclass(frozen=True)
class Arrivals:
    """Reads what clients answer, and says what becomes of an answer that cannot be used."""

    wire: Wire
    stages: Stages
    state: ChannelState

    def take(self, exchange: Exchange, out: Outgoing, message: Message | None) -> None:
        """Read what came, while others are still at work; a damaged message is as good as lost."""
        client = out.order.client
        if message is not None:
            exchange.arrived[client] = message
        if not out.spare and time.monotonic() > exchange.ends:
            exchange.late.add(client)
            return
        try:
            body = self._read(exchange, out, message)
        except Exception as why:
            if not self._goes_on_without(exchange, out, why):
                raise
        else:
            if not out.spare:
                exchange.bodies[client] = body

    def _goes_on_without(self, exchange: Exchange, out: Outgoing, why: Exception) -> bool:
        """Whether the exchange goes on without an answer that cannot be used.

        Among clients of others it does, whatever came: the answer is rejected.
        """
        client, phase = out.order.client, exchange.phase
        if isinstance(why, Diverged) and not (out.spare or kind_of(out.order.task).vital):
            exchange.diverged[client] = printable(why)
        elif phase.samples is not None and not isinstance(why, WireError):
            phase.rejected[client] = printable(str(why) or type(why).__name__)
            if isinstance(why, RunDirError):  # it lost its state: it goes on without
                self.state.versions.pop(client, None)
                self.state.held.pop(client, None)
        elif out.spare and isinstance(why, CoterieError):
            self.stages.of(Piggyback).missed(out, why)
        else:
            return isinstance(why, WireError)  # which means that it was lost
        return True

    def _read(self, exchange: Exchange, out: Outgoing, message: Message | None) -> ReplyBody:
        """The body of an answer, its arrays as the client meant them; its errors are raised."""
        if message is None:
            raise WireError("it was lost")
        for vet in self.stages.vet:
            vet(exchange, out, message)
        body = cast(ReplyBody, self.wire.unpack(message))
        if "error" in body:
            raise error_named(body["error"])(body["text"])
        if self.stages.compression is None:
            if "since" in body:
                raise TrainingError("it sends changes of models, where whole ones are sent")
            body["arrays"] = decode(body["arrays"], {}, self.wire.layout)
        else:
            body["arrays"] = self.stages.compression.arrays(out, body)
        check_finite(out.order.client, exchange.phase.round, out.order.task, body["arrays"])
        for read in self.stages.read:
            read(exchange, out, body)
        return body


def answers(exchange: Exchange) -> list[Answer]:
    """The replies that count, in client-id order."""
    contents: dict[tuple[Any, ...], str] = {}
    found = []
    for client in exchange.reported:
        body, out = exchange.bodies[client], exchange.outgoing[client]
        answer = Answer(
            client,
            body["examples"],
            body["arrays"],
            body["metrics"],
            body.get("beside", {}),
            body.get("of", {}),
            out.received,
            body.get("version"),
            out.held,
            _content(out.plain, contents) if client in exchange.told else "",
        )
        found.append(answer)
    return found


def _content(message: Message, memo: dict[tuple[Any, ...], str]) -> str:
    """A digest of what a client was asked; many are asked the same."""
    asked = json.loads(message.header)["body"]
    same = json.dumps([asked.get(k) for k in ("task", "config", "arrays")])
    key = same, tuple(map(id, message.payloads))
    if key not in memo:
        memo[key] = content_of(message)
    return memo[key]
