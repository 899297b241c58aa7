"""What the server records of an exchange: bytes, vectors that it saw, and versions of states.

These stages see the replies last, once it is known which of them count.

Every order names the version of client state that it expects. A client whose task changes its
state makes a new version, named after the order; the server adopts that version only when the
reply has arrived and counts. So a lost or late reply, a retry, an abandoned round or a resumed
server never lets a client run ahead. The client half is the store of its states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coterie.channel.exchange import Exchange, Outgoing, Terms
from coterie.channel.ledger import Bytes
from coterie.channel.stage import Stage
from coterie.channel.state import ChannelState
from coterie.channel.tasks import kind_of
from coterie.channel.wire import Message, Wire, without
from coterie.core.messages import Array, ClientId, Reply
from coterie.core.weights import Weights
from coterie.errors import Abandoned


@dataclass
class Disclosure(Stage):
    """Notes what was seen of single clients; ``exposed`` are the ways in which it was."""

    state: ChannelState
    exposed: set[str] = field(default_factory=set)
    uncounted: dict[ClientId, Mapping[str, Array]] = field(default_factory=dict)

    def inward(self, exchange: Exchange) -> None:
        """Replies that do not count were here all the same."""
        bodies = {**exchange.left_out, **exchange.bodies}
        reported = set(exchange.reported)
        self.uncounted = {c: bodies[c]["arrays"] for c in sorted(bodies) if c not in reported}

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


@dataclass
class Metering(Stage):
    """Books orders and replies: those that count, those that were wasted, and what is unmetered."""

    wire: Wire
    state: ChannelState

    def inward(self, exchange: Exchange) -> None:
        """Book every order, in client-id order."""
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
        """Book what scoring adds to an exchange, which is no part of what the method costs."""
        down, up = out.message.size, message.size if message else 0
        if not out.spare:
            down -= out.plain.size
            method = without(message, "scored") if message is not None and counts else message
            up, message = up - (method.size if method else 0), method
        self.state.ledger.record(out.order.client, Bytes(down, up), {}, unmetered=True)
        return message


@dataclass
class Versions(Stage):
    """Names the version that each order expects, and adopts those of replies that count."""

    state: ChannelState

    def outward(self, exchange: Exchange) -> None:
        """Which version a client goes on from, and which others it must not forget."""
        for client, out in exchange.outgoing.items():
            kind = kind_of(out.order.task)
            if kind.protocol:
                continue
            expects = self.state.versions.get(client, "")
            # A round that is abandoned in a later exchange goes back to where it began.
            back = [*self.state.retained, *([exchange.phase.began] if kind.trains else [])]
            keep = {versions.get(client, "") for versions in back} - {"", expects}
            if expects:
                out.body["expects"] = expects
            if keep:
                out.body["keep"] = sorted(keep)

    def inward(self, exchange: Exchange) -> None:
        """Replies that count are adopted, unless a stage decides that later."""
        for client in exchange.reported if exchange.adopt else ():
            version = exchange.bodies[client].get("version")
            self.state.adopt(client, version, exchange.outgoing[client].held)


@dataclass
class Reports(Stage):
    """Gives a round up that too few report in."""

    terms: Terms

    def inward(self, exchange: Exchange) -> None:
        """Whether enough replies count."""
        phase = exchange.phase
        if not exchange.counts:
            return
        # With noise, what one client's data made of its update must not decide over the round.
        reported = len(exchange.reported) + len(exchange.diverged) * self.terms.alone
        # A few who are asked by themselves, as newcomers are, do not decide over the round.
        asked = phase.enough if phase.least == 1 else phase.least
        if reported >= phase.least or len(exchange.orders) < asked:
            return
        out = [c for c in exchange.orders if c in phase.rejected]
        late = len(exchange.late)
        raise Abandoned(
            f"{reported} of {len(exchange.orders)} clients reported"
            f"{f', {late} were late' if late else ''}"
            f"{f', {len(out)} were left out ({phase.rejected[out[0]]})' if out else ''}"
            f", but at least {phase.least} must"
        )
