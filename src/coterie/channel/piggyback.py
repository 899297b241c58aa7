"""Scoring that goes with the orders of another exchange: one message each way, not two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.channel.checks import printable
from coterie.channel.exchange import Exchange, Outgoing, Stage, Terms
from coterie.channel.messages import ReplyBody, ScoreBody
from coterie.channel.state import ChannelState
from coterie.channel.tasks import SCORE
from coterie.core.messages import Array, ClientId, Order, Scalar, vector_of
from coterie.core.weights import Weights
from coterie.errors import CoterieError, WireError

ADMIT = "admit"  # how the phases end in which newcomers are let in
Scores = dict[ClientId, dict[str, float]]
Sends = Mapping[ClientId, Mapping[str, Array]]


def scoring(sends: Sends, config: Mapping[str, Scalar]) -> dict[ClientId, Order]:
    """An order for each client to score what it would be sent."""
    return {c: Order(c, SCORE, arrays, config, unmetered=True) for c, arrays in sends.items()}


@dataclass
class Piggyback(Stage):
    """Lets the next exchange score an earlier round, too.

    A client that has an order in that exchange scores before it works, and answers both in one
    message; the others are asked besides. Neither they nor their scores decide over the round, and
    the method's bytes are what they would be.
    """

    terms: Terms
    state: ChannelState
    orders: Mapping[ClientId, Order] = field(default_factory=dict)
    round: int = 0
    scores: Scores = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)

    def attach(self, orders: Mapping[ClientId, Order], round: int) -> None:
        """Let these go with the next exchange; ``round`` is the one that is scored."""
        self.orders, self.round = orders, round

    def collect(self) -> tuple[Scores, dict[ClientId, str]]:
        """The scores that came, and why others failed; lost ones are in neither."""
        scores, failed = self.scores, self.failed
        self.scores, self.failed = {}, {}
        return scores, failed

    def outward(self, exchange: Exchange) -> None:
        """Add the scoring to the orders of those that have one, and orders for the others."""
        if not self.orders or exchange.phase.name.endswith(ADMIT):
            return
        for client, order in self.orders.items():
            if client not in exchange.orders:
                exchange.outgoing[client] = Outgoing(order, self.round, spare=True)
            elif client in exchange.outgoing:
                out = exchange.outgoing[client]
                out.shared = self._shared(order, out.order)
                own = {n: a for n, a in order.arrays.items() if not out.shared[n]}
                out.score = Outgoing(replace(order, arrays=own), self.round)
        self.orders = {}

    def _shared(self, score: Order, order: Order) -> dict[str, str]:
        """The order's array that each one to be scored is: such a one is named, not repeated.

        A lossy codec draws the model to be scored by itself, so it is not the one of the order.
        """
        exact = self.terms.coding.downwards.exact
        return {
            name: next((n for n, a in order.arrays.items() if exact and _is(a, array)), "")
            for name, array in score.arrays.items()
        }

    def read(self, exchange: Exchange, out: Outgoing, body: ReplyBody) -> None:
        """Scores that came by themselves."""
        if out.spare:
            self._take(out.order.client, body)

    def missed(self, out: Outgoing, why: CoterieError) -> None:
        """Scores that were asked for by themselves, and did not come."""
        if isinstance(why, WireError):
            self.state.ledger.lost += 1  # of the run: the present round has lost nothing by it
        else:
            self._take(out.order.client, {"text": str(why)})

    def inward(self, exchange: Exchange) -> None:
        """Scores that came with replies."""
        for client, body in exchange.bodies.items():
            self._take(client, body.get("scored", {}))

    def _take(self, client: ClientId, scored: Mapping[str, Any]) -> None:
        """Scores, or why there are none; a round goes on without."""
        if "metrics" in scored:
            self.scores[client] = dict(scored["metrics"])
        elif scored:
            self.failed[client] = printable(scored.get("text", ""))


class ClientPiggyback:
    """The client's half: scores before it works, and puts the scores beside its reply.

    A failure there is told, and does not keep the client from its task.
    """

    def asked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The order to score that is in an order."""
        score: ScoreBody = body["score"]
        arrays = {
            n: body["arrays"][a["as"]] if isinstance(a, Mapping) and "as" in a else a
            for n, a in score["arrays"].items()
        }
        return {"task": SCORE, "expects": body.get("expects", ""), **score, "arrays": arrays}

    def answered(self, found: Mapping[str, Any]) -> ReplyBody:
        """What the reply says of the scores."""
        return {"scored": {k: found[k] for k in ("metrics", "error", "text") if k in found}}


def _is(a: Array, b: Array) -> bool:
    """Whether two arrays are one: the same tensor, by the same layout."""
    layouts = [w.layout if isinstance(w, Weights) else None for w in (a, b)]
    return vector_of(a) is vector_of(b) and layouts[0] == layouts[1]
