"""Who is there and in time: availability, the clock, and the deadlines of rounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from coterie.channel.clocks import Leg, Moment, Seconds
from coterie.channel.exchange import Exchange, Outgoing, Phase, Stage, Terms
from coterie.channel.policy import accept
from coterie.channel.state import ChannelState
from coterie.channel.tasks import kind_of
from coterie.channel.wire import Message
from coterie.core.messages import ClientId


@dataclass
class Timing(Stage):
    """Lets the clock go on, and says whose replies come too late.

    ``ends`` is when the round is over on the wall clock; ``waited`` are the simulated seconds for
    which its deadline did not run.
    """

    terms: Terms
    state: ChannelState
    ends: float = math.inf
    waited: float = 0.0
    began: float = 0.0

    def begin(self, phase: Phase) -> None:
        """A round's deadlines run from here."""
        self.waited = 0.0
        real = phase.real_deadline(self.terms.policy)
        self.ends = time.monotonic() + real if real is not None and phase.cohort else math.inf

    def wait(self, seconds: float) -> None:
        """Let the clock go on before anybody is asked: no deadline runs yet."""
        self.state.add(Seconds(waiting=seconds))
        self.waited += seconds

    def outward(self, exchange: Exchange) -> None:
        """In a round, a client that is off gets no order; every exchange has its end."""
        phase, available = exchange.phase, self.terms.availability
        if available is not None and phase.cohort:
            now = self.state.lasted.total
            for client, out in list(exchange.outgoing.items()):
                if kind_of(out.order.task).trains and not available.on(client, now):
                    del exchange.outgoing[client]
        self.began = time.monotonic()
        hurried = exchange.counts and not exchange.unhurried
        exchange.ends = self.ends if hurried else math.inf
        real = phase.real_deadline(self.terms.policy)
        if real is not None and (
            (exchange.counts and exchange.kind.protocol)
            or (not hurried and phase.samples is not None)  # nobody waits for ever for others
        ):
            exchange.ends = self.began + real

    def inward(self, exchange: Exchange) -> None:
        """Let the clock go on by this exchange, and find those whose replies come too late."""
        clock, phase = self.terms.clock, exchange.phase
        if not exchange.counts or exchange.unhurried:  # it does not use up the round's time
            self.ends += time.monotonic() - self.began
        if clock is None or not exchange.orders or not exchange.kind.trains:
            return
        requests = [out for out in exchange.outgoing.values() if not out.spare]
        legs = [
            _leg(out, exchange.arrived[c])
            for out in requests
            if (c := out.order.client) in exchange.bodies
        ]
        round = phase.round if phase.cohort else -1  # what comes before round 1 has its own draws
        finishes = clock.finishes(legs, Moment(round, phase.exchanges - 1))
        lost = [o.order.client for o in requests if o.order.client not in exchange.bodies]
        finishes |= dict.fromkeys(lost, Seconds(waiting=math.inf))
        found = accept(finishes, *self._limits(exchange, finishes))
        self.state.add(found.lasted)
        if exchange.unhurried:
            self.waited += found.lasted.total
        exchange.late |= exchange.bodies.keys() - set(found.reported)

    def _limits(
        self, exchange: Exchange, finishes: dict[ClientId, Seconds]
    ) -> tuple[int | None, float | None, dict[ClientId, float] | None]:
        """How many reports are enough, the seconds left, and when each client goes off."""
        phase, policy, available = exchange.phase, self.terms.policy, self.terms.availability
        enough, left, gone = None, None, None
        if not phase.cohort:
            return enough, left, gone
        if policy.deadline is not None and not exchange.unhurried:
            # Each step of a protocol has the time anew: who is late with its work must not
            # leave the others none to unmask in.
            spent = self.state.round_lasted.total - self.waited
            left = policy.deadline - (0.0 if exchange.kind.protocol else spent)
        ours = exchange.orders.keys() <= set(phase.cohort)
        if ours and not exchange.unhurried and len(exchange.orders) > phase.enough:
            enough = phase.enough
        if available is not None:
            now = self.state.lasted.total
            gone = {c: available.until(c, now) - now for c in finishes}
        return enough, left, gone


def _leg(out: Outgoing, answer: Message) -> Leg:
    """An order and its answer, as a clock sees them; what is unmetered travels nowhere."""
    sent, work, client = out.message, answer.work, out.order.client
    if out.order.unmetered:
        return Leg(client, 0, 0, 0, 0, (), work.seconds, work.samples)
    return Leg(
        client,
        sent.size,
        answer.size,
        sent.content,
        answer.content,
        tuple(id(p) for p in sent.payloads),
        work.seconds,
        work.samples,
    )
