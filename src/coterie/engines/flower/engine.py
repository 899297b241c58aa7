"""The engine over a Flower grid: clients are nodes elsewhere, each with its own data and disk."""

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
from coterie.engines.flower.runtime import AWAY
from coterie.errors import EngineError, WireError

ORDER = "order"
MISSING = "missing"  # a client lost what it should have: it was started anew
LIFE = 12 * 3600.0  # seconds that an order waits for its client when no deadline is set
_SPARE = 10.0  # seconds for answers that nobody needs, once the others are there
_MENDS = 20
_LOOK = 0.25  # seconds between two looks for answers
Tell = Callable[[str], None]
T = TypeVar("T")


class Line(Protocol):
    """A way to a grid that comes back after the SuperLink was away."""

    @property
    def grid(self) -> Grid:
        """The grid as it is now."""
        ...

    def mend(self) -> None:
        """The grid does not answer: see to it that there is one again, under a run of its own."""
        ...


class Flower:
    """Carries orders to clients over a grid.

    A client that is not there when an exchange begins counts as lost at once; so one that has left
    holds nobody up, and is a member again when it comes back. If the SuperLink is lost, what was
    on its way is sent again: clients that have answered answer the same once more.
    """

    piggybacks = True

    def __init__(self, line: Line, nodes: Mapping[ClientId, int], run: str, tell: Tell) -> None:
        self.nodes = dict(nodes)
        self.run = run
        self.spared = 0  # bytes that did not have to travel again
        self._line, self._tell = line, tell
        self._digests, self._stage = Digests(), ""
        self._has: dict[ClientId, set[str]] = {}

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who has a node."""
        return sorted(self.nodes)

    def present(self) -> set[ClientId]:
        """Who is connected now."""
        there = set(self._calmly(lambda grid: grid.get_node_ids()))
        return {client for client, node in self.nodes.items() if node in there}

    def begin(self, round: int) -> None:
        """Another round: what clients got in the one before is not taken for known."""
        self._stage = str(round)
        self._has.clear()
        self._digests.clear()

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Carry these out; an answer that is none, or not in time, is lost."""
        stage = {"stage": self._stage}
        packets = {r.client: Packet(ORDER, self.run, r.message, stage) for r in requests}
        spare = frozenset(r.client for r in requests if r.spare)
        for client, packet in self.ask(packets, until, spare):
            counts = packet is not None and self.agreed(client, packet, ORDER)
            yield client, packet.message if packet is not None and counts else None

    def agreed(self, client: ClientId, packet: Packet, kind: str) -> bool:
        """Whether a packet is the answer that was asked for."""
        return packet.kind == kind

    def ask(
        self,
        packets: Mapping[ClientId, Packet],
        until: float | None = None,
        spare: Collection[ClientId] = (),
    ) -> Iterator[tuple[ClientId, Packet | None]]:
        """Send each client its packet; what comes back, as it comes.

        When only those are left that are ``spare``, they get a little time, and no more.
        """
        there = self.present()
        for client in packets.keys() - there:
            yield client, None
        waiting: dict[str, ClientId] = {}
        unsent = sorted(packets.keys() & there)
        open_, missed, mended = set(unsent), set[ClientId](), 0
        while unsent or waiting:
            if spare and open_ <= set(spare):
                until, spare = min(until or math.inf, time.monotonic() + _SPARE), ()
            if until is not None and time.monotonic() > until:
                break
            try:
                self._send(unsent, packets, waiting, until, spare)
                came = self._pull(waiting)
            except AWAY:  # with the SuperLink went all that was under way
                mended += 1
                if mended > _MENDS:
                    raise EngineError(
                        f"the SuperLink was lost {mended} times over one exchange: see its log"
                    ) from None
                self._line.mend()
                for client in waiting.values():  # nobody knows what reached it
                    self._has.pop(client, None)
                unsent, waiting = sorted({*unsent, *waiting.values()}), {}
                continue
            for envelope in came:
                name = envelope.metadata.reply_to_message_id
                if name not in waiting:  # it came twice
                    continue
                client = waiting.pop(name)
                packet = self._read(client, envelope)
                if packet is not None and packet.kind == MISSING:
                    self._has.pop(client, None)
                    if client not in missed:  # sent in full, it cannot miss anything again
                        missed.add(client)
                        unsent.append(client)
                        continue
                    packet = None
                open_.discard(client)
                yield client, packet
            if waiting and not came:
                time.sleep(_LOOK)
        yield from ((client, None) for client in sorted(open_))

    def _pull(self, waiting: dict[str, ClientId]) -> list[Envelope]:
        """What has come; an answer that Flower itself cannot read is one that did not come."""
        if not waiting:
            return []
        try:
            return list(self._line.grid.pull_messages(list(waiting)))
        except AWAY:
            raise
        except Exception:
            came: list[Envelope] = []
        for name in list(waiting):
            try:
                came += self._line.grid.pull_messages([name])
            except AWAY:
                raise
            except Exception as error:
                client = waiting.pop(name)  # it stays open: at the end it is lost
                self._tell(f"client {client} sent what cannot be read: {type(error).__name__}")
        return came

    def _send(
        self,
        unsent: list[ClientId],
        packets: Mapping[ClientId, Packet],
        waiting: dict[str, ClientId],
        until: float | None,
        spare: Collection[ClientId],
    ) -> None:
        """Send these clients their packets; each that was sent is ``unsent`` no more."""
        while unsent:
            client = unsent[0]
            # No message outlives its deadline: a straggler must not work at yesterday's order.
            life = LIFE if until is None else max(1.0, until - time.monotonic())
            life = min(life, 6 * _SPARE) if client in spare else life
            has, packet = self._has.get(client, set()), packets[client]
            content = sealed(packet, self._digests, has)
            envelope = Envelope(content, self.nodes[client], "query", ttl=life)
            taken = [name for name in self._line.grid.push_messages([envelope]) if name]
            unsent.remove(client)
            for name in taken:  # one, or none if it was not taken
                waiting[name] = client
                if packet.kind != ORDER:  # nothing else is kept for later
                    continue
                names = {self._digests.of(p): len(p) for p in packet.message.payloads}
                self.spared += sum(size for name, size in names.items() if name in has)
                self._has[client] = has | names.keys()

    def _read(self, client: ClientId, envelope: Envelope) -> Packet | None:
        """What came from a client, if it is fit to be looked at."""
        if envelope.has_error():
            self._has.pop(client, None)
            self._tell(f"client {client} did not answer: {printable(envelope.error.reason)}")
            return None
        if envelope.metadata.src_node_id != self.nodes[client]:
            self._tell(f"client {client}: an answer in its name came from another node")
            return None
        with suppress(KeyError):  # nobody spares the server anything
            try:
                packet, _ = opened(envelope.content, {})
            except WireError as error:
                self._tell(f"client {client}: {printable(error)}")
                return None
            if packet.run in (self.run, "") or packet.kind != ORDER:
                return packet
        return None

    def _calmly(self, work: Callable[[Grid], T]) -> T:
        """Do this with the grid, if need be with the next one."""
        while True:
            try:
                return work(self._line.grid)
            except AWAY:
                self._line.mend()

    def close(self) -> None:
        """The line belongs to whoever made it."""
