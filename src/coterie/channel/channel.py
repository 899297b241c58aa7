"""The channel: the server's federation, over any engine.

What a method asks for goes out as orders and comes back as replies or means; the stages in between
are listed in ``stack``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from coterie.channel.arrivals import Arrivals, answers
from coterie.channel.exchange import Answer, Exchange, Outgoing, Phase, Terms
from coterie.channel.messages import OrderBody
from coterie.channel.piggyback import Scores, Sends, scoring
from coterie.channel.policy import Selection
from coterie.channel.release import Plain, Release
from coterie.channel.stack import S, Stages
from coterie.channel.state import ChannelState
from coterie.channel.tasks import FETCH, kind_of
from coterie.channel.timing import Timing
from coterie.channel.wire import Wire
from coterie.core.engine import Engine, Request
from coterie.core.messages import (
    Array,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Scalar,
    Slot,
)
from coterie.core.tree import Tree
from coterie.core.weights import Weights
from coterie.errors import (
    CoterieError,
    EngineError,
    RunDirError,
    TrainingError,
)

Told = Mapping[ClientId, Mapping[str, Tree]]


@dataclass
class Channel:
    """The server's way to its clients: ``gather`` and ``reduce`` over an engine.

    ``samples`` are how many each client has, if clients are not ours; ``selection`` draws the
    cohorts of a run's rounds, ``release`` decides what of the replies a method gets to see.
    """

    engine: Engine
    wire: Wire
    terms: Terms = field(default_factory=Terms)
    state: ChannelState = field(default_factory=ChannelState)
    samples: Mapping[ClientId, int] | None = None
    selection: Selection | None = None
    phase: Phase = field(default_factory=Phase)
    release: Release = field(init=False)
    stages: Stages = field(init=False)
    arrivals: Arrivals = field(init=False)
    piggybacks: bool = field(init=False)

    def __post_init__(self) -> None:
        self.release = Plain(self)
        self.piggybacks = self.engine.piggybacks or self.state.unscored > 0
        elsewhere = self.samples is not None
        self.stages = Stages(self.wire, self.terms, self.state, self.piggybacks, elsewhere)
        self.arrivals = Arrivals(self.wire, self.stages, self.state)

    def stage(self, kind: type[S]) -> S:
        """The stage of this kind."""
        return self.stages.of(kind)

    # --- what a method may use ------------------------------------------------------------------

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.engine.clients

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of."""
        return self.release.min_group

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        return self.release.plain_means

    @property
    def exposed(self) -> set[str]:
        """In which ways vectors of single clients were seen: "each", or for their "means"."""
        return self.stages.disclosure.exposed

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        return self.release.gather(orders)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        return self.release.reduce(orders, into, by_examples)

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        return self.release.average(replies, into, by_examples)

    # --- rounds, and what is beside them --------------------------------------------------------

    def begin(
        self,
        round: int,
        stage: str = "",
        cohort: Sequence[ClientId] = (),
        enough: int = 0,
        least: int = 0,
    ) -> None:
        """Another round, or something outside of rounds: orders from now on carry its name.

        In a round of a ``cohort`` the policy holds: ``enough`` reports are waited for, and with
        fewer than ``least`` the round is abandoned.
        """
        self.phase = Phase(round, stage or str(round + 1), cohort, enough, least)
        self.phase.began = dict(self.state.versions) if cohort else {}
        self.phase.samples = self.samples
        self.state.begin(self.phase.moment)
        for begin in self.stages.begin:
            begin(self.phase)

    def open(self, number: int) -> Sequence[ClientId]:
        """Begin a round with those selected for it; meanwhile select the next."""
        assert self.selection is not None
        cohort, waits = self.selection.cohort(number)
        self.begin(number, "", cohort, *self.selection.reports(cohort))
        if waits:
            self.stage(Timing).wait(waits)
        if self.selection.ahead:
            self.state.selected = self.selection.following(number + 1)
        return cohort

    def tolerates(self, error: Exception) -> bool:
        """Whether an error may come of what other people's clients sent."""
        return self.samples is not None and not isinstance(error, EngineError | RunDirError)

    def score(self, sends: Sends, config: Mapping[str, Scalar]) -> Scores:
        """Let clients score the model that they would use now; the bytes are unmetered."""
        orders = list(scoring(sends, config).values())
        return {reply.client: dict(reply.metrics) for reply in self.exchange(orders)}

    def fetch(self, client: ClientId, sends: Mapping[str, Array]) -> Weights:
        """The whole model that one client would use now, for export."""
        replies = self.exchange([Order(client, FETCH, sends, unmetered=True)])
        if not replies:
            raise TrainingError(f"client {client} did not answer")
        model = replies[0].arrays["model"]
        assert isinstance(model, Weights)
        return model

    # --- one exchange ---------------------------------------------------------------------------

    def exchange(
        self, orders: Sequence[Order], told: Told | None = None, adopt: bool = True
    ) -> list[Answer]:
        """Orders out, answers back, in client-id order; lost and late ones are missing.

        ``told`` is what a stage tells its half on each client. Without ``adopt`` the clients'
        states stay as they were until the answers that count are adopted.
        """
        exchange, requests = self.prepare(orders, told or {}, adopt)
        with closing(self.engine.exchange(requests, exchange.until)) as arriving:
            for client, message in arriving:
                self.arrivals.take(exchange, exchange.outgoing[client], message)
        for inward in self.stages.inward:
            inward(exchange)
        return answers(exchange)

    def prepare(
        self, orders: Sequence[Order], told: Told, adopt: bool = True
    ) -> tuple[Exchange, list[Request]]:
        """An exchange that is ready to begin, and what is sent."""
        phase, by_client = self.phase, {o.client: o for o in orders}
        if len(by_client) != len(orders):
            raise CoterieError("a client can have one order in an exchange; ask again for more")
        phase.samples = self.samples
        exchange = Exchange(phase, by_client, told, adopt)
        exchange.outgoing = {o.client: Outgoing(o, phase.round) for o in orders}
        phase.exchanges += 1
        for outward in self.stages.outward:
            outward(exchange)
        return exchange, [self._request(exchange, out) for out in exchange.outgoing.values()]

    def _request(self, exchange: Exchange, out: Outgoing) -> Request:
        """The order as a message, with the scoring that goes with it, if any."""
        order, choices = out.order, out.coded.choices
        body: OrderBody = {
            "order": exchange.name,
            "round": out.round,
            "task": order.task,
            "arrays": out.coded.arrays,
            "config": dict(order.config),
        }
        if order.client in exchange.told:
            body["beside"] = dict(exchange.told[order.client])
        body |= out.body
        out.message = out.plain = self.wire.pack(body, exchange.encoded, choices)
        if out.score is not None:
            score, own = out.score, out.score.coded.arrays
            arrays = {n: {"as": of} if of else own[n] for n, of in out.shared.items()}
            config = dict(score.order.config)
            body["score"] = {"round": score.round, "arrays": arrays, "config": config}
            choices = {**choices, **score.coded.choices}
            out.message = self.wire.pack(body, exchange.encoded, choices)
        return Request(order.client, out.message, kind_of(order.task).together, out.spare)
