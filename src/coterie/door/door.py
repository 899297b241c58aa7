"""The door: a federation over any engine, with exact bytes and transactional client state.

Every order names the version of client state that it expects. A client whose task changes its
state makes a new version, named after the order; the server adopts that version only when the
reply has arrived. So a lost reply, a retry or a resumed server never lets a client run ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from coterie.door.ledger import Bytes, Ledger
from coterie.door.wire import Encoded, Wire
from coterie.engines.base import Engine, Request
from coterie.errors import CoterieError, TrainingError, error_named
from coterie.federation import (
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    check_finite,
    mix,
)
from coterie.tree import Tree
from coterie.weights import Weights

SCORE = "$score"
FETCH = "$fetch"
KEPT = 2  # checkpoints, and with them versions of client state, to fall back on


@dataclass
class Door:
    """The server's federation: ``gather`` and ``reduce`` over an engine."""

    engine: Engine
    wire: Wire
    ledger: Ledger = field(default_factory=Ledger)
    versions: dict[ClientId, str] = field(default_factory=dict)
    retained: list[dict[ClientId, str]] = field(default_factory=list)
    exposed: set[str] = field(default_factory=set)
    round: int = 0
    _stage: str = ""
    _exchanges: int = 0

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.engine.clients

    def begin(self, round: int, stage: str = "") -> None:
        """Another round, or a stage outside of rounds: orders from now on carry its name."""
        self.round, self._stage, self._exchanges = round, stage or str(round + 1), 0

    def retain(self) -> None:
        """The present versions were saved: clients keep those of the last two savings."""
        self.retained = [*self.retained, dict(self.versions)][-KEPT:]

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        replies = self._exchange(orders)
        if any(r.arrays for r in replies):
            self.exposed.add("each")
        return replies

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        replies = self._exchange(orders)
        if any(r.arrays for r in replies):
            self.exposed.add("means")
        return mix(replies, into, by_examples)

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        return mix(replies, into, by_examples)

    def score(
        self, sends: Mapping[ClientId, Mapping[str, Any]], config: Mapping[str, Any]
    ) -> dict[ClientId, dict[str, float]]:
        """Let clients score the model that they would use now; bytes are counted apart."""
        orders = [Order(c, SCORE, arrays, config, apart=True) for c, arrays in sends.items()]
        return {r.client: dict(r.metrics) for r in self._exchange(orders)}

    def fetch(self, client: ClientId, sends: Mapping[str, Any]) -> Weights:
        """The whole model that one client would use now, for export."""
        replies = self._exchange([Order(client, FETCH, sends, apart=True)])
        if not replies:
            raise TrainingError(f"client {client} did not answer")
        model = replies[0].arrays["model"]
        assert isinstance(model, Weights)
        return model

    def _exchange(self, orders: Sequence[Order]) -> list[Reply]:
        if len({o.client for o in orders}) != len(orders):
            raise CoterieError("a client can have one order in an exchange; ask again for more")
        by_client = {o.client: o for o in orders}
        name = f"{self._stage}.{self._exchanges}"
        self._exchanges += 1
        encoded: Encoded = {}
        requests = [self._request(o, name, encoded) for o in orders]
        sent = {r.client: r.message.size for r in requests}
        replies = []
        with closing(self.engine.exchange(requests)) as answers:
            for client, message in answers:
                order = by_client.pop(client)
                moved = Bytes(sent[client], message.size if message else 0)
                self.ledger.record(client, moved, order.apart, message is not None)
                if message is not None:
                    replies.append(self._reply(client, order, self.wire.unpack(message)))
        return sorted(replies, key=lambda r: r.client)

    def _request(self, order: Order, name: str, encoded: Encoded) -> Request:
        body: dict[str, Tree] = {
            "order": name,
            "round": self.round,
            "task": order.task,
            "arrays": dict(order.arrays),
            "config": dict(order.config),
        }
        expects = self.versions.get(order.client, "")
        keep = {r.get(order.client, "") for r in self.retained} - {"", expects}
        if expects:
            body["expects"] = expects
        if keep:
            body["keep"] = sorted(keep)
        return Request(order.client, self.wire.pack(body, encoded), together=order.task == SCORE)

    def _reply(self, client: ClientId, order: Order, body: Mapping[str, Any]) -> Reply:
        if "error" in body:
            raise error_named(body["error"])(body["text"])
        check_finite(client, self.round, order.task, body["arrays"])
        if "version" in body:
            self.versions[client] = body["version"]
        return Reply(client, body["examples"], body["arrays"], body["metrics"])
