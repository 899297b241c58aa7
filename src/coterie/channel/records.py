"""What the server records of an exchange: bytes, vectors that it saw, and versions of states.

Every order names the version of client state that it expects. A client whose task changes its
state makes a new version, named after the order; the server adopts that version only when the
reply has arrived and counts. So a lost or late reply, a retry, an abandoned round or a resumed
server never lets a client run ahead. The client half is the store of its states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coterie.channel.exchange import Exchange, Outgoing, Stage, Terms
from coterie.channel.ledger import Bytes
from coterie.channel.state import ChannelState
from coterie.channel.wire import Message, Wire, without
from coterie.core.messages import Array, ClientId, Reply
from coterie.core.weights import Weights
from coterie.errors import Abandoned


@dataclass
class Records(Stage):
    """Sees the replies last, once it is known which of them count, and records what happened.

    ``exposed`` are the ways in which vectors of single clients were seen: "each", or for their
    "means". A round that too few report in is given up.
    """

    wire: Wire
    terms: Terms
    state: ChannelState
    exposed: set[str] = field(default_factory=set)
    uncounted: dict[ClientId, Mapping[str, Array]] = field(default_factory=dict)

    def inward(self, exchange: Exchange) -> None:
        """Count the bytes, and adopt the new states of clients whose replies count."""
        bodies, reported = {**exchange.left_out, **exchange.bodies}, exchange.reported
        # Replies that do not count were here all the same.
        self.uncounted = {c: bodies[c]["arrays"] for c in sorted(bodies.keys() - set(reported))}
        self._count_bytes(exchange)
        for client in reported if exchange.adopt else ():  # or else a release decides that later
            version = exchange.bodies[client].get("version")
            self.state.adopt(client, version, exchange.outgoing[client].held)
        if exchange.counts:
            phase = exchange.phase
            # With noise, what one client's data made of its update must not decide over the round.
            enough = len(reported) + len(exchange.diverged) * self.terms.alone >= phase.least
            # A few who are asked by themselves, as newcomers are, do not decide over the round.
            asked = phase.enough if phase.least == 1 else phase.least
            if not enough and len(exchange.orders) >= asked:
                raise self._too_few(exchange)

    def saw(self, replies: Sequence[Reply], asked: str, protection: str) -> None:
        """Note which vectors of single clients reached the server, ``asked`` for as what."""
        seen = [(reply.client, reply.arrays) for reply in replies]
        late, self.uncounted = self.uncounted, {}
        exposure = self.state.exposure
        for client, arrays in (*seen, *late.items()):
            if arrays:
                layers = {
                    name: array.layout.layers if isinstance(array, Weights) else ()
                    for name, array in arrays.items()
                }
                self.exposed.add(asked)
                exposure.single(client, exposure.round, layers, protection)

    def _count_bytes(self, exchange: Exchange) -> None:
        """Enter every order in the ledger, in client-id order."""
        known: dict[bytes, dict[str, int]] = {}
        for client in sorted(exchange.outgoing.keys() | exchange.orders.keys()):
            out, message = exchange.outgoing.get(client), exchange.arrived.get(client)
            late, counts = client in exchange.late, client in exchange.bodies
            if out is not None and (out.spare or out.score is not None):
                message = self._without_scores(out, message, counts and not late)
                if out.spare:
                    continue
            down, up = out.plain.size if out else 0, message.size if message else 0
            unmetered = exchange.orders[client].unmetered
            if late or not counts:
                self.state.ledger.waste(client, Bytes(down, up), unmetered, late)
                continue
            kinds = {}
            if not unmetered:
                assert out is not None
                assert message is not None
                if out.plain.header not in known:  # many clients get the same one
                    known[out.plain.header] = self.wire.kinds(out.plain)
                ways = known[out.plain.header], self.wire.kinds(message)
                kinds = {k: Bytes(ways[0].get(k, 0), ways[1].get(k, 0)) for k in ways[0] | ways[1]}
            self.state.ledger.record(client, Bytes(down, up), kinds, unmetered)

    def _without_scores(
        self, out: Outgoing, message: Message | None, counts: bool
    ) -> Message | None:
        """Count what scoring adds to an exchange, which is no part of what the method costs."""
        down, up = out.message.size, message.size if message else 0
        if not out.spare:
            down -= out.plain.size
            method = without(message, "scored") if message is not None and counts else message
            up, message = up - (method.size if method else 0), method
        self.state.ledger.record(out.order.client, Bytes(down, up), {}, unmetered=True)
        return message

    def _too_few(self, exchange: Exchange) -> Abandoned:
        """The error that gives a round up."""
        phase, late = exchange.phase, len(exchange.late)
        out = [c for c in exchange.orders if c in phase.rejected]
        return Abandoned(
            f"{len(exchange.reported) + len(exchange.diverged) * self.terms.alone} of "
            f"{len(exchange.orders)} clients reported"
            f"{f', {late} were late' if late else ''}"
            f"{f', {len(out)} were left out ({phase.rejected[out[0]]})' if out else ''}"
            f", but at least {phase.least} must"
        )
