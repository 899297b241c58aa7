"""Answers of other people's clients that make no sense are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.channel.checks import misfits, vet, vet_message
from coterie.channel.exchange import Exchange, Outgoing, Stage
from coterie.channel.messages import ReplyBody
from coterie.channel.tasks import kind_of
from coterie.channel.wire import SMALL, Message, Wire
from coterie.errors import TrainingError


@dataclass
class Vetting(Stage):
    """Refuses whatever an honest client would not send."""

    wire: Wire

    def vet(self, exchange: Exchange, out: Outgoing, message: Message) -> None:
        """What could hurt is not even read."""
        vet_message(message, 4 * self.wire.layout.size + SMALL)
        self.wire.kinds(message)  # which is how its bytes are booked

    def read(self, exchange: Exchange, out: Outgoing, body: ReplyBody) -> None:
        """Numbers must be possible."""
        samples = exchange.phase.samples or {}
        vet(body, samples.get(out.order.client, 0), kind_of(out.order.task).together)
        if not all(
            isinstance(said, Mapping) for said in (body.get("beside", {}), body.get("of", {}))
        ):
            raise TrainingError("what is beside its arrays has no names")

    def inward(self, exchange: Exchange) -> None:
        """Arrays must be made like those of the others who were asked the same."""
        # Members of different secure sums send arrays of different lengths, as is right.
        if exchange.told or not exchange.orders or exchange.kind.protocol:
            return
        for client, why in misfits(exchange.orders, exchange.bodies).items():
            exchange.phase.rejected[client] = why
            del exchange.bodies[client]
