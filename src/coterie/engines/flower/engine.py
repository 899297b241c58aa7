"""The Flower engine: clients are nodes of a Flower grid, each with its own data and disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from flwr.app import Message as Envelope
from flwr.serverapp import Grid

from coterie.channel.checks import printable
from coterie.core.engine import Answers, Request
from coterie.core.messages import ClientId
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.engines.flower.runtime import UNREACHABLE
from coterie.errors import EngineError, WireError

ORDER = "order"
MISSING = "missing"  # a client lacks arrays that it should have, since it was restarted
LIFE = 12 * 3600.0  # seconds that an order waits for its client when no deadline is set
_SPARE = 10.0  # seconds to wait for answers that can be spared, once the others have come
_RECONNECTIONS = 20
_POLL = 0.25  # seconds between two requests for answers
Tell = Callable[[str], None]
T = TypeVar("T")


class Connection(Protocol):
    """A connection to a grid, which can be restored after the SuperLink was lost."""

    @property
    def grid(self) -> Grid:
        """The grid of the present connection."""
        ...

    def reconnect(self) -> None:
        """Restore the connection to a grid that does not answer, with a new Flower run."""
        ...


class Flower:
    """Sends orders to clients over a Flower grid.

    A client that is not connected when an exchange begins counts as lost at once, so a client that
    has left delays no round; it takes part again when it comes back. If the SuperLink is lost, the
    unanswered orders are sent again, and clients that had answered them send the same answer.
    """

    piggybacks = True

    def __init__(
        self, connection: Connection, nodes: Mapping[ClientId, int], run: str, tell: Tell
    ) -> None:
        self.nodes = dict(nodes)
        self.run = run
        self.spared = 0  # bytes that did not have to be sent again
        self._connection, self._tell = connection, tell
        self._digests, self._stage = Digests(), ""
        self._has: dict[ClientId, set[str]] = {}

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients that have a node."""
        return sorted(self.nodes)

    def present(self) -> set[ClientId]:
        """The clients that are connected now."""
        connected = set(self._persistently(lambda grid: grid.get_node_ids()))
        return {client for client, node in self.nodes.items() if node in connected}

    def begin(self, round: int) -> None:
        """Begin a round; clients are no longer assumed to hold arrays of the previous one."""
        self._stage = str(round)
        self._has.clear()
        self._digests.clear()

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Send these requests to their clients; an answer that is invalid or late is lost."""
        stage = {"stage": self._stage}
        packets = {r.client: Packet(ORDER, self.run, r.message, stage) for r in requests}
        spare = frozenset(r.client for r in requests if r.spare)
        for client, packet in self.ask(packets, until, spare):
            valid = packet is not None and self.agreed(client, packet, ORDER)
            yield client, packet.message if packet is not None and valid else None

    def agreed(self, client: ClientId, packet: Packet, kind: str) -> bool:
        """Whether a client's packet is an answer of this kind."""
        return packet.kind == kind

    def ask(
        self,
        packets: Mapping[ClientId, Packet],
        until: float | None = None,
        spare: Collection[ClientId] = (),
    ) -> Iterator[tuple[ClientId, Packet | None]]:
        """Send each client its packet, and yield the answers as they arrive.

        When answers are missing only from ``spare`` clients, these get ``_SPARE`` seconds more.
        """
        present = self.present()
        for client in packets.keys() - present:
            yield client, None
        waiting: dict[str, ClientId] = {}
        unsent = sorted(packets.keys() & present)
        open_, resent, reconnections = set(unsent), set[ClientId](), 0
        while unsent or waiting:
            if spare and open_ <= set(spare):
                until, spare = min(until or math.inf, time.monotonic() + _SPARE), ()
            if until is not None and time.monotonic() > until:
                break
            try:
                self._send(unsent, packets, waiting, until, spare)
                envelopes = self._pull(waiting)
            except UNREACHABLE:  # all messages under way were lost with the SuperLink
                reconnections += 1
                if reconnections > _RECONNECTIONS:
                    raise EngineError(
                        f"the SuperLink was lost {reconnections} times during one exchange: see "
                        "its log"
                    ) from None
                self._connection.reconnect()
                for client in waiting.values():  # whether they got their arrays is not known
                    self._has.pop(client, None)
                unsent, waiting = sorted({*unsent, *waiting.values()}), {}
                continue
            for envelope in envelopes:
                name = envelope.metadata.reply_to_message_id
                if name not in waiting:  # a duplicate
                    continue
                client = waiting.pop(name)
                packet = self._read(client, envelope)
                if packet is not None and packet.kind == MISSING:
                    self._has.pop(client, None)
                    if client not in resent:  # this time in full, so nothing can be missing again
                        resent.add(client)
                        unsent.append(client)
                        continue
                    packet = None
                open_.discard(client)
                yield client, packet
            if waiting and not envelopes:
                time.sleep(_POLL)
        yield from ((client, None) for client in sorted(open_))

    def _pull(self, waiting: dict[str, ClientId]) -> list[Envelope]:
        """The answers that have arrived, without those that Flower itself cannot read."""
        if not waiting:
            return []
        try:
            return list(self._connection.grid.pull_messages(list(waiting)))
        except UNREACHABLE:
            raise
        except Exception:
            envelopes: list[Envelope] = []
        for name in list(waiting):
            try:
                envelopes += self._connection.grid.pull_messages([name])
            except UNREACHABLE:
                raise
            except Exception as error:
                client = waiting.pop(name)  # counts as lost at the end of the exchange
                reason = type(error).__name__
                self._tell(f"client {client} sent a message that cannot be read: {reason}")
        return envelopes

    def _send(
        self,
        unsent: list[ClientId],
        packets: Mapping[ClientId, Packet],
        waiting: dict[str, ClientId],
        until: float | None,
        spare: Collection[ClientId],
    ) -> None:
        """Send these clients their packets, and remove each from ``unsent`` once that is done."""
        while unsent:
            client = unsent[0]
            # A message expires with its deadline, so that stragglers skip orders of past rounds.
            life = LIFE if until is None else max(1.0, until - time.monotonic())
            life = min(life, 6 * _SPARE) if client in spare else life
            has, packet = self._has.get(client, set()), packets[client]
            content = sealed(packet, self._digests, has)
            envelope = Envelope(content, self.nodes[client], "query", ttl=life)
            accepted = [name for name in self._connection.grid.push_messages([envelope]) if name]
            unsent.remove(client)
            for name in accepted:  # one name, or none if the message was not accepted
                waiting[name] = client
                if packet.kind != ORDER:  # clients keep the arrays of orders only
                    continue
                names = {self._digests.of(p): len(p) for p in packet.message.payloads}
                self.spared += sum(size for name, size in names.items() if name in has)
                self._has[client] = has | names.keys()

    def _read(self, client: ClientId, envelope: Envelope) -> Packet | None:
        """Decode a client's answer; None if it is invalid."""
        if envelope.has_error():
            self._has.pop(client, None)
            self._tell(f"client {client} did not answer: {printable(envelope.error.reason)}")
            return None
        if envelope.metadata.src_node_id != self.nodes[client]:
            self._tell(f"client {client}: an answer in its name came from another node")
            return None
        with suppress(KeyError):  # an array is left out, which only the server may do
            try:
                packet, _ = opened(envelope.content, {})
            except WireError as error:
                self._tell(f"client {client}: {printable(error)}")
                return None
            if packet.run in (self.run, "") or packet.kind != ORDER:
                return packet
        return None

    def _persistently(self, call: Callable[[Grid], T]) -> T:
        """Call this with the grid, reconnecting until it succeeds."""
        while True:
            try:
                return call(self._connection.grid)
            except UNREACHABLE:
                self._connection.reconnect()

    def close(self) -> None:
        """Nothing to do: the caller that made the connection closes it."""
