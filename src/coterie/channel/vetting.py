"""Answers that cannot be used are left out: senseless ones, and updates unlike the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.channel.checks import misfits, vet, vet_message
from coterie.channel.exchange import Exchange, Outgoing, Terms
from coterie.channel.messages import ReplyBody
from coterie.channel.outliers import at_fault, shortened, too_long, without_name
from coterie.channel.stage import Stage
from coterie.channel.tasks import kind_of
from coterie.channel.wire import SMALL, Message, Wire
from coterie.core.messages import check_finite
from coterie.errors import Diverged, TrainingError


@dataclass
class Vetting(Stage):
    """Refuses what makes no sense; of clients of others, whatever an honest one would not send."""

    wire: Wire

    def vet(self, exchange: Exchange, out: Outgoing, message: Message) -> None:
        """What could hurt is not even read."""
        if exchange.phase.samples is not None:
            vet_message(message, 4 * self.wire.layout.size + SMALL)
            self.wire.kinds(message)  # which is how its bytes are booked

    def read(self, exchange: Exchange, out: Outgoing, body: ReplyBody) -> None:
        """Numbers must be finite, and possible."""
        client, samples = out.order.client, exchange.phase.samples
        check_finite(client, exchange.phase.round, out.order.task, body["arrays"])
        if samples is None:
            return
        vet(body, samples.get(client, 0), kind_of(out.order.task).together)
        if not all(
            isinstance(said, Mapping) for said in (body.get("beside", {}), body.get("of", {}))
        ):
            raise TrainingError("what is beside its arrays has no names")

    def inward(self, exchange: Exchange) -> None:
        """Arrays must be made like those of the others who were asked the same."""
        # Members of different secure sums send arrays of different lengths, as is right.
        if (
            exchange.phase.samples is None
            or exchange.told
            or not exchange.orders
            or exchange.kind.protocol
        ):
            return
        for client, why in misfits(exchange.orders, exchange.bodies).items():
            exchange.phase.rejected[client] = why
            del exchange.bodies[client]


@dataclass
class Outliers(Stage):
    """Takes updates out that are not finite or far longer than the others', or shortens them."""

    terms: Terms

    def inward(self, exchange: Exchange) -> None:
        """Judge the updates by each other."""
        terms, bodies = self.terms, exchange.bodies
        if exchange.diverged:
            self._leave_out_diverged(exchange)
        if terms.outliers == "off" or terms.alone:
            return
        orders, received = exchange.orders, exchange.received
        sent = {c: b["arrays"] for c, b in bodies.items() if kind_of(orders[c].task).trains}
        if terms.outliers == "clip":
            for client, arrays in shortened(orders, received, sent).items():
                bodies[client] = {**bodies[client], "arrays": arrays}
            return
        counts = {c: int(b["examples"]) for c, b in bodies.items()}
        found = too_long(orders, received, sent, counts)
        exchange.phase.rejected |= found
        exchange.left_out = {client: bodies.pop(client) for client in found}

    def _leave_out_diverged(self, exchange: Exchange) -> None:
        """Reject updates that are not finite; in a simulation, end where no client is to blame."""
        phase, diverged, faults = exchange.phase, exchange.diverged, {}
        if not self.terms.alone:
            faults = at_fault(exchange.orders, exchange.received, diverged, exchange.bodies)
        if phase.samples is None and faults:
            moment, first = phase.moment, min(faults)
            when = f"round {moment}" if moment else "before round 1"
            left = f", as round {moment - 1} left it" if moment > 1 else ""
            raise Diverged(
                f"{when}: the updates of {len(diverged)} of {len(exchange.bodies) + len(diverged)} "
                f"clients cannot be used: {without_name(diverged[first])}. No client is to blame "
                f"({faults[first]}): it is the model that they were sent{left}, or the settings"
            )
        alone = self.terms.outliers == "off" or len(phase.cohort) == 1
        if phase.samples is None and alone:
            raise Diverged(diverged[min(diverged)])
        for client, why in diverged.items():
            phase.rejected[client] = why
            if client in faults:
                blamed = f"{faults[client]}, so it is the model or the settings"
                phase.rejected[client] = f"{why}. It is not to blame: {blamed}"
