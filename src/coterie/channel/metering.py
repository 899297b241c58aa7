"""The ledger's stage: every byte of an exchange is booked, by what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.channel.exchange import Exchange, Outgoing, Phase
from coterie.channel.ledger import Bytes
from coterie.channel.stage import Stage
from coterie.channel.state import ChannelState
from coterie.channel.wire import Message, Wire, without


@dataclass
class Metering(Stage):
    """Books orders and replies: those that count, those that were wasted, and what is unmetered."""

    wire: Wire
    state: ChannelState

    def begin(self, phase: Phase) -> None:
        """A new page of the ledger."""
        self.state.ledger.begin()

    def inward(self, exchange: Exchange) -> None:
        """Book every order, in client-id order."""
        kinds: dict[bytes, dict[str, int]] = {}
        for client in sorted(exchange.outgoing.keys() | exchange.orders.keys()):
            out, message = exchange.outgoing.get(client), exchange.arrived.get(client)
            if out is not None and out.spare:
                self._unmetered(client, out.message.size, message.size if message else 0)
            else:
                self._book(exchange, client, out, message, kinds)

    def _unmetered(self, client: int, down: int, up: int) -> None:
        self.state.ledger.record(client, Bytes(down, up), {}, unmetered=True)

    def _book(
        self,
        exchange: Exchange,
        client: int,
        out: Outgoing | None,
        message: Message | None,
        memory: dict[bytes, dict[str, int]],
    ) -> None:
        counts = client in exchange.bodies and client not in exchange.late
        if out is not None and out.score is not None:  # no part of what the method costs
            whole = message
            message = without(whole, "scored") if whole is not None and counts else whole
            back = whole.size - message.size if whole is not None and message is not None else 0
            self._unmetered(client, out.message.size - out.plain.size, back)
        down, up = out.plain.size if out else 0, message.size if message else 0
        unmetered = exchange.orders[client].unmetered
        if not counts:
            late = client in exchange.late
            self.state.ledger.waste(client, Bytes(down, up), unmetered, late)
            return
        kinds = {}
        if not unmetered:
            assert out is not None
            assert message is not None
            if out.plain.header not in memory:  # many clients get the same one
                memory[out.plain.header] = self.wire.kinds(out.plain)
            ways = memory[out.plain.header], self.wire.kinds(message)
            kinds = {k: Bytes(ways[0].get(k, 0), ways[1].get(k, 0)) for k in ways[0] | ways[1]}
        self.state.ledger.record(client, Bytes(down, up), kinds, unmetered)
