"""An engine that loses and repeats messages, to prove that nothing depends on luck."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from coterie.channel.wire import received
from coterie.core.engine import Answers, Engine, Request
from coterie.core.messages import ClientId

Fault = Callable[[ClientId, str], bool]


def never(client: ClientId, order: str) -> bool:
    """No fault."""
    return False


def damaged(data: bytes) -> bytes:
    """The same bytes but for one bit, in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class Faulty:
    """Wraps an engine. Each fault is asked with the client and the order's name.

    ``lose_order``: the client never gets it. ``lose_reply``: the client does the work but the
    answer is lost. ``repeat``: the client gets the order twice. ``damage``: a byte of the answer is
    changed on its way.
    """

    def __init__(
        self,
        engine: Engine,
        lose_order: Fault = never,
        lose_reply: Fault = never,
        repeat: Fault = never,
        damage: Fault = never,
    ) -> None:
        self.engine = engine
        self.lose_order, self.lose_reply, self.repeat = lose_order, lose_reply, repeat
        self.damage = damage

    @property
    def clients(self) -> Sequence[ClientId]:
        """Those of the engine."""
        return self.engine.clients

    @property
    def piggybacks(self) -> bool:
        """As the engine does."""
        return self.engine.piggybacks

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Carry these out, badly."""
        named = {r.client: json.loads(r.message.header)["body"]["order"] for r in requests}
        sent = [r for r in requests if not self.lose_order(r.client, named[r.client])]
        again = [r for r in sent if self.repeat(r.client, named[r.client])]
        if again:
            list(self.engine.exchange(again))
        for client, answer in self.engine.exchange(sent, until):
            if answer is not None and self.damage(client, named[client]):
                answer = received(damaged(answer.to_bytes()))
            yield client, None if self.lose_reply(client, named[client]) else answer
        for request in requests:
            if request not in sent:
                yield request.client, None

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
