"""The channel: the server's federation, over any engine.

What a method asks for goes out as orders and comes back as replies or means; the stages in between
are listed in ``stack``. This module has the exchange itself (``Channel``), the reading of replies
(``Arrivals``) and what of them the method gets to see (``Release``).
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

from coterie.channel.checks import printable
from coterie.channel.compression.coding import decode
from coterie.channel.exchange import Answer, Exchange, Outgoing, Phase, Terms
from coterie.channel.exposure import OF_ONE_ALONE
from coterie.channel.messages import OrderBody, ReplyBody
from coterie.channel.piggyback import Piggyback, Scores, Sends, scoring
from coterie.channel.policy import Selection
from coterie.channel.records import Records
from coterie.channel.stack import S, Stages
from coterie.channel.state import ChannelState
from coterie.channel.tasks import FETCH, kind_of
from coterie.channel.timing import Timing
from coterie.channel.wire import Message, Wire, content_of
from coterie.core.aggregate import mix
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
    check_finite,
)
from coterie.core.tree import Tree
from coterie.core.weights import Weights
from coterie.errors import (
    CoterieError,
    Diverged,
    EngineError,
    RunDirError,
    TrainingError,
    WireError,
    error_named,
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

    @property
    def records(self) -> Records:
        """The stage that records what came."""
        return self.stages.records

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
        return self.records.exposed

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
        self.phase.samples = self.samples
        self.state.begin(self.phase.moment)
        for begin in self.stages.begin:
            begin(self.phase)

    def open(self, number: int) -> Sequence[ClientId]:
        """Begin a round with those selected for it; meanwhile select the next."""
        assert self.selection is not None
        cohort = self.selection.cohort(number)
        self.begin(number, "", cohort.clients, cohort.enough, cohort.least)
        if cohort.waits:
            self.stage(Timing).wait(cohort.waits)
        if self.selection.ahead:
            self.state.selected = self.selection.following(number + 1)
        return cohort.clients

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
        order, kind, choices = out.order, kind_of(out.order.task), out.coded.choices
        body: OrderBody = {
            "order": exchange.name,
            "round": out.round,
            "task": order.task,
            "arrays": out.coded.arrays,
            "config": dict(order.config),
        }
        if order.client in exchange.told:
            body["beside"] = dict(exchange.told[order.client])
        if not kind.protocol:  # which version of its state it goes on from, which others it keeps
            in_round = kind.trains and bool(exchange.phase.cohort)
            expects, keep = self.state.version_of(order.client, in_round)
            body |= {"expects": expects} if expects else {}
            body |= {"keep": keep} if keep else {}
        out.message = out.plain = self.wire.pack(body, exchange.encoded, choices)
        if out.score is not None:
            score, own = out.score, out.score.coded.arrays
            arrays = {n: {"as": of} if of else own[n] for n, of in out.shared.items()}
            config = dict(score.order.config)
            body["score"] = {"round": score.round, "arrays": arrays, "config": config}
            choices = {**choices, **score.coded.choices}
            out.message = self.wire.pack(body, exchange.encoded, choices)
        return Request(order.client, out.message, kind.together, out.spare)


# --- what comes back ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """Reads what clients answer, and says what becomes of an answer that cannot be used."""

    wire: Wire
    stages: Stages
    state: ChannelState

    def take(self, exchange: Exchange, out: Outgoing, message: Message | None) -> None:
        """Read what came, while others are still at work; a damaged message is as good as lost."""
        client = out.order.client
        if message is not None:
            exchange.arrived[client] = message
        if not out.spare and time.monotonic() > exchange.ends:
            exchange.late.add(client)
            return
        try:
            if message is None:
                raise WireError("it was lost")
            for vet in self.stages.vet:
                vet(exchange, out, message)
            body = cast(ReplyBody, self.wire.unpack(message))
            if "error" in body:
                raise error_named(body["error"])(body["text"])
            if self.stages.compression is not None:
                body["arrays"] = self.stages.compression.arrays(out, body)
            elif "since" in body:
                raise TrainingError("it sends changes of models, where whole ones are sent")
            else:
                body["arrays"] = decode(body["arrays"], {}, self.wire.layout)
            check_finite(client, exchange.phase.round, out.order.task, body["arrays"])
            for read in self.stages.read:
                read(exchange, out, body)
        except Exception as why:
            if not self._goes_on_without(exchange, out, why):
                raise
        else:
            if not out.spare:
                exchange.bodies[client] = body

    def _goes_on_without(self, exchange: Exchange, out: Outgoing, why: Exception) -> bool:
        """Whether the exchange goes on without an answer that cannot be used.

        Among clients of others it does, whatever came: the answer is rejected.
        """
        client, phase = out.order.client, exchange.phase
        if isinstance(why, Diverged) and not (out.spare or kind_of(out.order.task).vital):
            exchange.diverged[client] = printable(why)
        elif phase.samples is not None and not isinstance(why, WireError):
            phase.rejected[client] = printable(str(why) or type(why).__name__)
            if isinstance(why, RunDirError):  # it lost its state: it goes on without
                self.state.versions.pop(client, None)
                self.state.held.pop(client, None)
        elif out.spare and isinstance(why, CoterieError):
            self.stages.of(Piggyback).missed(out, why)
        else:
            return isinstance(why, WireError)  # which means that it was lost
        return True


def answers(exchange: Exchange) -> list[Answer]:
    """The replies that count, in client-id order."""
    contents: dict[tuple[Any, ...], str] = {}
    found = []
    for client in exchange.reported:
        body, out = exchange.bodies[client], exchange.outgoing[client]
        answer = Answer(
            client,
            body["examples"],
            body["arrays"],
            body["metrics"],
            body.get("beside", {}),
            body.get("of", {}),
            out.received,
            body.get("version"),
            out.held,
            _content(out.plain, contents) if client in exchange.told else "",
        )
        found.append(answer)
    return found


def _content(message: Message, memo: dict[tuple[Any, ...], str]) -> str:
    """A digest of what a client was asked; many are asked the same."""
    asked = json.loads(message.header)["body"]
    same = json.dumps([asked.get(k) for k in ("task", "config", "arrays")])
    key = same, tuple(map(id, message.payloads))
    if key not in memo:
        memo[key] = content_of(message)
    return memo[key]


# --- what a method gets to see of it ------------------------------------------------------------


class Release(ABC):
    """Makes replies and means of exchanges; with privacy, only what may be shown.

    Here is what most of them have in common; a release overrides what it does otherwise.
    """

    channel: Channel

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.channel.clients

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of."""
        return 1

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        return False

    def begin(self, models: Mapping[Slot, Weights]) -> None:  # noqa: B027 - most have nothing to do
        """Another round, with these models."""

    @abstractmethod
    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself."""

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The means of replies that were shown: nothing more is learned."""
        return mix(replies, into, by_examples)

    @abstractmethod
    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means."""


@dataclass
class Plain(Release):
    """Shows everything that came, and notes in the exposure ledger that it did."""

    channel: Channel

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        terms = self.channel.terms
        return terms.coding.upwards.exact and terms.outliers != "clip"

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        replies = self.channel.exchange(orders)
        self.channel.records.saw(replies, "each", "none")
        return list(replies)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        replies = self.channel.exchange(orders)
        self.channel.records.saw(replies, "means", "none, averaged on arrival")
        means = mix(replies, into, by_examples)
        for mean in means.values():
            if len(mean.clients) == 1:  # such a mean is what that client sent
                one = [r for r in replies if r.client == mean.clients[0]]
                self.channel.records.saw(one, "means", OF_ONE_ALONE)
        return means
