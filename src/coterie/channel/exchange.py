"""One exchange, orders on their way out and replies on their way back, and its stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.channel.availability import Availability
from coterie.channel.clocks import Clock
from coterie.channel.compression.coding import Coded, Coding
from coterie.channel.messages import ReplyBody
from coterie.channel.policy import Policy
from coterie.channel.state import Held
from coterie.channel.tasks import Kind, kind_of
from coterie.channel.wire import Encoded, Message
from coterie.core.messages import Array, ClientId, Order, Reply
from coterie.core.tree import Tree
from coterie.core.weights import Weights

_NOTHING = Message(b"", ())
HOUR = 3600.0  # seconds that clients of others have if no deadline was set


@dataclass(frozen=True)
class Terms:
    """What a channel works by: codecs, seconds, and when a round's reports count.

    ``start`` is θ⁰, the first thing that a model down can be a change of. ``outliers`` is what
    becomes of updates unlike the others (``run.outliers``); with ``alone`` each is judged by
    itself, as noise asks for: then nobody's update may decide about another's.
    """

    coding: Coding = field(default_factory=Coding)
    clock: Clock | None = None
    policy: Policy = field(default_factory=Policy)
    availability: Availability | None = None
    start: Weights | None = None
    seed: int = 0
    outliers: str = "reject"
    alone: bool = False

    @property
    def timed(self) -> bool:
        """Whether replies may come too late, or clients be away."""
        waits = self.policy.real_deadline is not None
        return waits or self.clock is not None or self.availability is not None


@dataclass
class Phase:
    """What goes on: a round of a cohort, or something outside of rounds, by its name.

    In a round ``enough`` reports are waited for, and with fewer than ``least`` it is abandoned.
    ``rejected`` are the clients whose answers were not used, and why. ``samples`` are how many each
    client has, if they are not ours.
    """

    round: int = 0
    name: str = ""
    cohort: Sequence[ClientId] = ()
    enough: int = 0
    least: int = 0
    exchanges: int = 0
    rejected: dict[ClientId, str] = field(default_factory=dict)
    samples: Mapping[ClientId, int] | None = None

    @property
    def moment(self) -> int:
        """The round as people count, from 1; 0 before the first."""
        return 0 if self.name == "init" else self.round + 1

    def real_deadline(self, policy: Policy) -> float | None:
        """Seconds that an exchange may take; among clients of others there always is an end."""
        asked = policy.real_deadline
        return HOUR if asked is None and self.samples is not None else asked


@dataclass
class Outgoing:
    """An order on its way to a client, and what the client makes of its arrays.

    Unless a stage codes them, arrays travel as they are.
    ``score`` is scoring that goes with it. Each of its arrays is in ``shared``, with the name of
    the order's array that it is the same as, if any.
    ``message`` is what is sent, ``plain`` the same without the scoring. One that is ``spare`` is
    not worth waiting for.
    """

    order: Order
    round: int
    coded: Coded = field(init=False)
    received: Mapping[str, Array] = field(init=False)
    held: Held = field(default_factory=dict)
    score: Outgoing | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    plain: Message = _NOTHING
    message: Message = _NOTHING
    spare: bool = False

    def __post_init__(self) -> None:
        self.coded, self.received = Coded(dict(self.order.arrays)), self.order.arrays


@dataclass(frozen=True)
class Answer(Reply):
    """A reply as it came, for a stage of the channel.

    ``beside`` is what the client's half of a stage put next to it; ``delta_of`` what each array is
    a change of, as in an upload, ``received`` what the client got. It counts once it is adopted:
    ``version`` and ``held`` are then the client's. ``content`` is a digest of what it was asked,
    where a stage wants to know.
    """

    beside: Mapping[str, Any] = field(default_factory=dict)
    delta_of: Mapping[str, str] = field(default_factory=dict)
    received: Mapping[str, Array] = field(default_factory=dict)
    version: str | None = None
    held: Held = field(default_factory=dict)
    content: str = ""


@dataclass
class Exchange:
    """Orders and their replies; each stage does its part on the way out and on the way back.

    ``told`` is what a stage tells its half at each client. What came is in ``arrived``, what it
    says in ``bodies``: those that are ``diverged`` or ``left_out`` are taken out of these, and
    those that are ``late`` do not count. ``ends`` is when nothing is waited for any more.
    """

    phase: Phase
    orders: Mapping[ClientId, Order]
    told: Mapping[ClientId, Mapping[str, Tree]] = field(default_factory=dict)
    adopt: bool = True
    outgoing: dict[ClientId, Outgoing] = field(default_factory=dict)
    encoded: Encoded = field(default_factory=dict)
    arrived: dict[ClientId, Message] = field(default_factory=dict)
    bodies: dict[ClientId, ReplyBody] = field(default_factory=dict)
    diverged: dict[ClientId, str] = field(default_factory=dict)
    left_out: dict[ClientId, ReplyBody] = field(default_factory=dict)
    late: set[ClientId] = field(default_factory=set)
    ends: float = math.inf

    @property
    def name(self) -> str:
        """The name of its orders, which none before them had."""
        return f"{self.phase.name}.{self.phase.exchanges - 1}"

    @property
    def until(self) -> float | None:
        """When nothing is waited for any more, if ever."""
        return None if math.isinf(self.ends) else self.ends

    @property
    def kind(self) -> Kind:
        """The kind of its orders: they are all of one kind."""
        return kind_of(next((order.task for order in self.orders.values()), ""))

    @property
    def counts(self) -> bool:
        """Whether it is a round's: its reports decide over the round, and the clock goes on."""
        return bool(self.phase.cohort and self.orders and self.kind.trains)

    @property
    def unhurried(self) -> bool:
        """Whether it is beside a round's training, so that the deadlines do not run for it."""
        return any(order.unhurried for order in self.orders.values())

    @property
    def received(self) -> dict[ClientId, Mapping[str, Array]]:
        """What each client made of the arrays that it was sent."""
        return {client: out.received for client, out in self.outgoing.items()}

    @property
    def reported(self) -> list[ClientId]:
        """Those whose replies count, in client-id order."""
        return [c for c in sorted(self.orders) if c in self.bodies and c not in self.late]


class Stage:
    """One concern of the channel: its server half. It overrides what it needs.

    A client half, where there is one, is in the same module; the two know only each other.
    """

    def begin(self, phase: Phase) -> None:
        """A round, or something outside of rounds, begins."""

    def outward(self, exchange: Exchange) -> None:
        """Orders are about to be sent."""

    def vet(self, exchange: Exchange, out: Outgoing, message: Message) -> None:
        """A message came; it may be refused before it is read."""

    def read(self, exchange: Exchange, out: Outgoing, body: ReplyBody) -> None:
        """This is what it says."""

    def inward(self, exchange: Exchange) -> None:
        """All that comes has come."""
