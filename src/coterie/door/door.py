"""The door: a federation over any engine, with exact bytes and transactional client state.

Every order names the version of client state that it expects. A client whose task changes its
state makes a new version, named after the order; the server adopts that version only when the
reply has arrived and counts. So a lost or late reply, a retry, an abandoned round or a resumed
server never lets a client run ahead.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.door.availability import Availability
from coterie.door.clock import Clock, Leg, Moment, Seconds
from coterie.door.coding import SENT, Coded, Coding, decode, encode, now_held, reference_of
from coterie.door.exposure import Exposure
from coterie.door.ledger import Bytes, Ledger
from coterie.door.outliers import at_fault, shortened, too_long, without_name
from coterie.door.policy import Policy, accept
from coterie.door.vetting import misfits, printable, vet, vet_message
from coterie.door.wire import SMALL, Decoded, Encoded, Message, Wire, content_of, without
from coterie.engines.base import Engine, Request
from coterie.errors import (
    Abandoned,
    CoterieError,
    Diverged,
    RunDirError,
    TrainingError,
    WireError,
    error_named,
)
from coterie.federation import (
    Array,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    check_finite,
    mix,
    vector_of,
)
from coterie.seeds import seed_for
from coterie.tree import Tree
from coterie.weights import Weights

SCORE = "$score"
FETCH = "$fetch"
SECURE = "$secure"  # a step of the secure-aggregation protocol
KEEP = "$keep"  # the run is over: the client keeps the model that it would use now
NO_WORK = (SCORE, FETCH, KEEP)  # beside the training: neither time nor deadlines go for it
HOUR = 3600.0  # seconds that clients of others have if no deadline was set
KEPT = 2  # checkpoints, and with them versions of client state, to fall back on
Held = dict[str, Weights]  # models by name, as a client decoded them


@dataclass(frozen=True)
class Terms:
    """What a door works by: codecs, seconds, and when a round's reports count.

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


@dataclass(frozen=True)
class Answer(Reply):
    """A reply as it came, for a stage of the door.

    ``beside`` is what the client's half of a stage put next to it; ``since`` what each array is a
    change of, as in an upload, and ``received`` what the client got. It counts once it is adopted:
    ``version`` and ``held`` are then the client's. ``content`` is a digest of what it was asked,
    where a stage wants to know.
    """

    beside: Mapping[str, Any] = field(default_factory=dict)
    since: Mapping[str, str] = field(default_factory=dict)
    received: Mapping[str, Array] = field(default_factory=dict)
    version: str | None = None
    held: Held = field(default_factory=dict)
    content: str = ""


@dataclass(frozen=True)
class Ride:
    """The scoring of a round that waits for an exchange to go with: what everybody would be sent.

    ``round`` is the one that is scored, as ``Door.round`` was then.
    """

    orders: Mapping[ClientId, Order] = field(default_factory=dict)
    round: int = 0


@dataclass
class Door:
    """The server's federation: ``gather`` and ``reduce`` over an engine."""

    engine: Engine
    wire: Wire
    ledger: Ledger = field(default_factory=Ledger)
    versions: dict[ClientId, str] = field(default_factory=dict)
    retained: list[dict[ClientId, str]] = field(default_factory=list)
    terms: Terms = field(default_factory=Terms)
    held: dict[ClientId, Held] = field(default_factory=dict)
    lasted: Seconds = field(default_factory=Seconds)
    exposed: set[str] = field(default_factory=set)
    exposure: Exposure = field(default_factory=Exposure)
    round: int = 0
    cohort: Sequence[ClientId] = ()
    enough: int = 0
    least: int = 0
    round_lasted: Seconds = field(default_factory=Seconds)
    samples: Mapping[ClientId, int] | None = None  # of clients that are not ours
    rejected: dict[ClientId, str] = field(default_factory=dict)
    _stage: str = ""
    _exchanges: int = 0
    _waited: float = 0.0
    _ends: float = math.inf
    _began: dict[ClientId, str] = field(default_factory=dict)
    _late: list[Answer] = field(default_factory=list)
    _ride: Ride | None = None
    _scores: dict[ClientId, dict[str, float]] = field(default_factory=dict)
    _failed: dict[ClientId, str] = field(default_factory=dict)

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.engine.clients

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of."""
        return 1

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        return self.terms.coding.upwards.exact and self.terms.outliers != "clip"

    def begin(
        self,
        round: int,
        stage: str = "",
        cohort: Sequence[ClientId] = (),
        enough: int = 0,
        least: int = 0,
    ) -> None:
        """Another round, or a stage outside of rounds: orders from now on carry its name.

        In a round of a ``cohort`` the policy holds: ``enough`` reports are waited for, and with
        fewer than ``least`` the round is abandoned.
        """
        self.round, self._stage, self._exchanges = round, stage or str(round + 1), 0
        self.cohort, self.enough, self.least = cohort, enough, least
        self.rejected = {}
        self._began = dict(self.versions) if cohort else {}
        self.round_lasted, self._waited = Seconds(), 0.0
        real = self._real_deadline
        self._ends = time.monotonic() + real if real is not None and cohort else math.inf
        self.ledger.begin()
        self.exposure.begin(self.moment)

    @property
    def _real_deadline(self) -> float | None:
        """Seconds that an exchange may take; among clients of others there always is an end."""
        asked = self.terms.policy.real_deadline
        return HOUR if asked is None and self.samples is not None else asked

    def retain(self) -> None:
        """The present versions were saved: clients keep those of the last two savings."""
        self.retained = [*self.retained, dict(self.versions)][-KEPT:]

    def wait(self, seconds: float) -> None:
        """Let the clock go on before anybody is asked: no deadline runs yet."""
        self._lasts(Seconds(waiting=seconds))
        self._waited += seconds

    def memory(self) -> tuple[dict[ClientId, str], dict[ClientId, Held]]:
        """What the server knows of clients' states, to go back to."""
        return dict(self.versions), dict(self.held)

    def go_back(self, memory: tuple[dict[ClientId, str], dict[ClientId, Held]]) -> None:
        """The present round came to nothing: clients go on from where they were before it."""
        for mine, before in ((self.versions, memory[0]), (self.held, memory[1])):
            mine.clear()
            mine.update(before)  # type: ignore[arg-type]
        self.ledger.abandon()
        self.exposure.abandon()

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        replies = self.exchange(orders)
        self.saw(replies, "each", "none")
        return list(replies)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        replies = self.exchange(orders)
        self.saw(replies, "means", "none, averaged on arrival")
        means = mix(replies, into, by_examples)
        for mean in means.values():
            if len(mean.clients) == 1:  # such a mean is what that client sent
                one = [r for r in replies if r.client == mean.clients[0]]
                self.saw(one, "means", "none, a mean of one")
        return means

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        return mix(replies, into, by_examples)

    def score(
        self, sends: Mapping[ClientId, Mapping[str, Any]], config: Mapping[str, Any]
    ) -> dict[ClientId, dict[str, float]]:
        """Let clients score the model that they would use now; bytes are counted apart."""
        orders = _scoring(sends, config)
        return {r.client: dict(r.metrics) for r in self.exchange(list(orders.values()))}

    def ride(
        self,
        sends: Mapping[ClientId, Mapping[str, Any]],
        config: Mapping[str, Any],
        round: int,
    ) -> None:
        """The same, but with the next exchange, for an earlier ``round``; see ``alight``.

        A client that has an order in that exchange scores before it works, and answers both in one
        message; the others are asked by the way. Neither they nor their scores decide over the
        round, and the method's bytes are what they would be.
        """
        self._ride = Ride(_scoring(sends, config), round)

    def alight(self) -> tuple[dict[ClientId, dict[str, float]], dict[ClientId, str]]:
        """The scores that rode along, and why others failed; lost ones are in neither.

        If there was no exchange to go with, they have one for themselves now.
        """
        if self._ride is not None:
            self.exchange([])
        found = self._scores, self._failed
        self._scores, self._failed = {}, {}
        return found

    @property
    def exchanges(self) -> int:
        """How many there were since the round, or the stage, began."""
        return self._exchanges

    def fetch(self, client: ClientId, sends: Mapping[str, Any]) -> Weights:
        """The whole model that one client would use now, for export."""
        replies = self.exchange([Order(client, FETCH, sends, apart=True)])
        if not replies:
            raise TrainingError(f"client {client} did not answer")
        model = replies[0].arrays["model"]
        assert isinstance(model, Weights)
        return model

    @property
    def stage(self) -> str:
        """What goes on: "init", "admit", "final", or the round's number."""
        return self._stage

    @property
    def moment(self) -> int:
        """The round as people count, from 1; 0 before the first."""
        return 0 if self._stage == "init" else self.round + 1

    def saw(self, replies: Sequence[Reply], asked: str, protection: str) -> None:
        """Note which vectors of single clients reached the server."""
        late, self._late = self._late, []  # they do not count, but they were here
        for reply in (*replies, *late):
            if reply.arrays:
                self.exposed.add(asked)
                self.exposure.single(reply.client, self.moment, layers_of(reply.arrays), protection)

    # --- one exchange ---------------------------------------------------------------------------

    def exchange(
        self,
        orders: Sequence[Order],
        beside: Mapping[ClientId, Mapping[str, Tree]] | None = None,
        adopt: bool = True,
    ) -> list[Answer]:
        """Orders out, answers back, in client-id order; lost and late ones are missing.

        ``beside`` is what a stage tells its half on the client. Without ``adopt`` the clients'
        states stay as they were until the answers that count are adopted.
        """
        if len({o.client for o in orders}) != len(orders):
            raise CoterieError("a client can have one order in an exchange; ask again for more")
        name = f"{self._stage}.{self._exchanges}"
        self._exchanges += 1
        ride, self._ride = self._ride or Ride(), None
        sheet = _Sheet(self, name, beside or {}, ride)
        requests = [sheet.request(o) for o in orders if self._there(o)]
        by_client = {o.client: o for o in orders}
        spare = {c: o for c, o in ride.orders.items() if c not in by_client}
        asked = [*requests, *(sheet.request(o) for o in spare.values())]
        arrived: dict[ClientId, Message] = {}
        bodies: dict[ClientId, Mapping[str, Any]] = {}
        diverged: dict[ClientId, str] = {}
        apart = not self.cohort or not orders or orders[0].task in NO_WORK or _unhurried(orders)
        ends = math.inf if apart else self._ends
        real, began = self._real_deadline, time.monotonic()
        if real is not None and (
            (self.cohort and orders and orders[0].task == SECURE)
            or (apart and self.samples is not None)  # nobody waits for ever for others' machines
        ):
            ends = began + real
        until, late = None if math.isinf(ends) else ends, set[ClientId]()
        with closing(self.engine.exchange(asked, until)) as arriving:
            for client, message in arriving:
                if client in spare:
                    self._by_the_way(sheet, spare[client], message)
                    continue
                if message is not None:
                    arrived[client] = message
                if time.monotonic() > ends:
                    late.add(client)
                elif message is not None:
                    # One that was damaged is as good as lost. They are read as they come, while
                    # others are still at work.
                    with suppress(WireError), self._forgiving(client):
                        try:
                            bodies[client] = sheet.read(client, by_client[client], message)
                        except Diverged as error:
                            if by_client[client].task in (FETCH, KEEP):
                                raise
                            diverged[client] = printable(error)
        if apart:
            self._ends += time.monotonic() - began
        # Members of different secure sums send arrays of different lengths, as is right.
        if self.samples is not None and not beside and orders and orders[0].task != SECURE:
            for client, why in misfits(by_client, bodies).items():
                self.rejected[client] = why
                del bodies[client]
        left_out = self._judge(sheet, by_client, bodies, diverged)
        for client, body in bodies.items():
            self._take(client, body.get("scored", {}))
        late |= self._time(orders, requests, {c: arrived[c] for c in bodies})
        answers, self._late = [], []
        for order in sorted(orders, key=lambda o: o.client):
            client, counts = order.client, order.client in bodies and order.client not in late
            self._record(sheet, order, arrived.get(client), counts, client in late)
            if counts:
                answers.append(sheet.answer(client, bodies[client]))
            elif client in bodies:
                self._late.append(sheet.answer(client, bodies[client]))
            elif client in left_out:
                self._late.append(sheet.answer(client, left_out[client]))
        if adopt:
            for answer in answers:
                self.adopt(answer)
        # With noise, what one client's data made of its update must not decide over the round.
        self._enough(orders, len(answers) + len(diverged) * self.terms.alone, late)
        return answers

    def _judge(
        self,
        sheet: _Sheet,
        orders: Mapping[ClientId, Order],
        bodies: dict[ClientId, Mapping[str, Any]],
        diverged: Mapping[ClientId, str],
    ) -> dict[ClientId, Mapping[str, Any]]:
        """Take outliers out of what has come, or shorten them; gives the bodies taken out."""
        terms = self.terms
        if diverged:
            self._leave_out_diverged(sheet, orders, bodies, diverged)
        if terms.outliers == "off" or terms.alone:
            return {}
        sent = {c: b["arrays"] for c, b in bodies.items() if orders[c].task not in NO_WORK}
        if terms.outliers == "clip":
            for client, arrays in shortened(orders, sheet.received, sent).items():
                bodies[client] = {**bodies[client], "arrays": arrays}
            return {}
        counts = {c: int(b["examples"]) for c, b in bodies.items()}
        found = too_long(orders, sheet.received, sent, counts)
        self.rejected |= found
        return {client: bodies.pop(client) for client in found}

    def _leave_out_diverged(
        self,
        sheet: _Sheet,
        orders: Mapping[ClientId, Order],
        bodies: Mapping[ClientId, Any],
        diverged: Mapping[ClientId, str],
    ) -> None:
        """Reject updates that are not finite; in a simulation, end where no client is to blame."""
        faults = {}
        if not self.terms.alone:
            faults = at_fault(orders, sheet.received, diverged, bodies)
        if self.samples is None and faults:
            when = f"round {self.moment}" if self.moment else "before round 1"
            left = f", as round {self.moment - 1} left it" if self.moment > 1 else ""
            first = min(faults)
            raise Diverged(
                f"{when}: the updates of {len(diverged)} of {len(bodies) + len(diverged)} clients "
                f"cannot be used: {without_name(diverged[first])}. No client is to blame "
                f"({faults[first]}): it is the model that they were sent{left}, or the settings"
            )
        if self.samples is None and (self.terms.outliers == "off" or len(self.cohort) == 1):
            raise Diverged(diverged[min(diverged)])
        for client, why in diverged.items():
            self.rejected[client] = why
            if client in faults:
                blamed = f"{faults[client]}, so it is the model or the settings"
                self.rejected[client] = f"{why}. It is not to blame: {blamed}"

    @contextmanager
    def _forgiving(self, client: ClientId) -> Iterator[None]:
        """Among clients of others, an answer that cannot be used is rejected, whatever it is."""
        try:
            yield
        except WireError:
            raise
        except Exception as error:
            if self.samples is None:
                raise
            self.rejected[client] = printable(str(error) or type(error).__name__)
            if isinstance(error, RunDirError):  # it lost its state: it goes on without
                self.versions.pop(client, None)
                self.held.pop(client, None)

    def adopt(self, answer: Answer) -> None:
        """An answer that counts: the client's state is now what it made of it."""
        if answer.version is not None:
            self.versions[answer.client] = answer.version
            if answer.held:
                self.held[answer.client] = {**self.held.get(answer.client, {}), **answer.held}

    def _record(
        self, sheet: _Sheet, order: Order, message: Message | None, counts: bool, late: bool
    ) -> None:
        sent = sheet.sent.get(order.client)
        if order.client in sheet.riding:  # what rode along is no part of what the method costs
            extra, whole = sheet.riding[order.client], message
            message = without(whole, "scored") if whole is not None and counts else whole
            back = whole.size - message.size if whole is not None and message is not None else 0
            self.ledger.record(order.client, Bytes(extra, back), {}, apart=True)
        moved = Bytes(sent.size if sent else 0, message.size if message else 0)
        if not counts:
            self.ledger.waste(order.client, moved, order.apart, late)
            return
        assert sent is not None
        assert message is not None
        kinds = {}
        if not order.apart:
            down, up = sheet.kinds(sent), self.wire.kinds(message)
            kinds = {k: Bytes(down.get(k, 0), up.get(k, 0)) for k in {**down, **up}}
        self.ledger.record(order.client, moved, kinds, order.apart)

    def _by_the_way(self, sheet: _Sheet, order: Order, message: Message | None) -> None:
        """What came of scores that were asked for beside a round's orders."""
        moved = Bytes(sheet.sent[order.client].size, message.size if message else 0)
        self.ledger.record(order.client, moved, {}, apart=True)
        try:
            if message is None:
                raise WireError("it was lost")
            with self._forgiving(order.client):
                self._take(order.client, sheet.read(order.client, order, message))
        except WireError:
            self.ledger.lost += 1  # of the run: the present round has lost nothing by it
        except CoterieError as why:
            self._take(order.client, {"text": str(why)})

    def _take(self, client: ClientId, scored: Mapping[str, Any]) -> None:
        """Scores, or why there are none; a round goes on without."""
        if "metrics" in scored:
            self._scores[client] = dict(scored["metrics"])
        elif scored:
            self._failed[client] = printable(scored.get("text", ""))

    # --- who is there, and in time --------------------------------------------------------------

    def _there(self, order: Order) -> bool:
        """Whether an order reaches its client: in a round, one that is off gets none."""
        available = self.terms.availability
        if available is None or not self.cohort or order.task in NO_WORK:
            return True
        return available.on(order.client, self.lasted.total)

    def _time(
        self,
        orders: Sequence[Order],
        requests: Sequence[Request],
        answers: Mapping[ClientId, Message],
    ) -> set[ClientId]:
        """Let the clock go on by this exchange; gives those whose answers come too late."""
        clock = self.terms.clock
        if clock is None or not orders or orders[0].task in NO_WORK:
            return set()
        apart = {o.client for o in orders if o.apart}
        legs = [
            _leg(r, answers[r.client], r.client in apart) for r in requests if r.client in answers
        ]
        round = self.round if self.cohort else -1  # what comes before round 1 has its own draws
        finishes = clock.finishes(legs, Moment(round, self._exchanges - 1))
        lost = [r.client for r in requests if r.client not in answers]
        finishes |= dict.fromkeys(lost, Seconds(waiting=math.inf))
        left, enough, gone = None, None, None
        policy, available = self.terms.policy, self.terms.availability
        unhurried = _unhurried(orders)
        if self.cohort:
            if policy.deadline is not None and not unhurried:
                # Each step of a protocol has the time anew: who is late with its work must not
                # leave the others none to unmask in.
                spent = 0.0 if orders[0].task == SECURE else self.round_lasted.total - self._waited
                left = policy.deadline - spent
            ours = {o.client for o in orders} <= set(self.cohort)
            if ours and not unhurried and len(orders) > self.enough:
                enough = self.enough
            if available is not None:
                now = self.lasted.total
                gone = {c: available.until(c, now) - now for c in finishes}
        found = accept(finishes, enough, left, gone)
        self._lasts(found.lasted)
        if unhurried:
            self._waited += found.lasted.total
        return set(answers) - set(found.reported)

    def _lasts(self, seconds: Seconds) -> None:
        self.lasted, self.round_lasted = self.lasted + seconds, self.round_lasted + seconds

    def _enough(self, orders: Sequence[Order], reported: int, late: set[ClientId]) -> None:
        """Give a round up that too few report in."""
        if not self.cohort or not orders or orders[0].task in NO_WORK:
            return
        # A few who are asked by themselves, as newcomers are, do not decide over the round.
        asked = self.enough if self.least == 1 else self.least
        if reported < self.least and len(orders) >= asked:
            out = [o.client for o in orders if o.client in self.rejected]
            raise Abandoned(
                f"{reported} of {len(orders)} clients reported"
                f"{f', {len(late)} were late' if late else ''}"
                f"{f', {len(out)} were left out ({self.rejected[out[0]]})' if out else ''}"
                f", and it takes {self.least}"
            )


@dataclass
class _Sheet:
    """One exchange: what was sent to whom, and how it is read."""

    door: Door
    name: str
    beside: Mapping[ClientId, Mapping[str, Tree]] = field(default_factory=dict)
    ride: Ride = field(default_factory=Ride)
    sent: dict[ClientId, Message] = field(default_factory=dict)
    riding: dict[ClientId, int] = field(default_factory=dict)  # bytes on top of what is sent
    held: dict[ClientId, Held] = field(default_factory=dict)
    received: dict[ClientId, Mapping[str, Array]] = field(default_factory=dict)
    _encoded: Encoded = field(default_factory=dict)
    _decoded: Decoded = field(default_factory=dict)
    _coded: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _kinds: dict[bytes, dict[str, int]] = field(default_factory=dict)
    _contents: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def request(self, order: Order) -> Request:
        """The order as a message, with the scoring that rides on it, if any."""
        door, rider = self.door, self.ride.orders.get(order.client)
        spare = rider is order
        round = self.ride.round if spare else door.round
        coded, received, held = self._arrays(order, round)
        arrays, choices = coded.arrays, coded.choices
        self.received[order.client] = received
        if held:
            self.held[order.client] = held
        body: dict[str, Tree] = {
            "order": self.name,
            "round": round,
            "task": order.task,
            "arrays": arrays,
            "config": dict(order.config),
        }
        if order.client in self.beside:
            body["beside"] = dict(self.beside[order.client])
        # A step of a protocol knows nothing of the client's state.
        expects = "" if order.task == SECURE else door.versions.get(order.client, "")
        # A round that is abandoned in a later exchange goes back to where it began.
        back = [*door.retained, *([] if order.task in NO_WORK else [door._began])]
        back = [] if order.task == SECURE else back
        keep = {versions.get(order.client, "") for versions in back} - {"", expects}
        if expects:
            body["expects"] = expects
        if keep:
            body["keep"] = sorted(keep)
        message = door.wire.pack(body, self._encoded, choices)
        self.sent[order.client] = message
        if rider is not None and not spare:
            body["score"], more = self._rider(rider, order)
            message = door.wire.pack(body, self._encoded, {**choices, **more})
            self.riding[order.client] = message.size - self.sent[order.client].size
        return Request(order.client, message, together=order.task == SCORE, spare=spare)

    def _rider(self, rider: Order, order: Order) -> tuple[dict[str, Tree], dict[int, Any]]:
        """Scoring as a part of another order; what that order has already is named, not repeated.

        A lossy codec draws the model to be scored by itself, so it is not the one of the order.
        """
        same, exact = dict[str, str](), self.door.terms.coding.downwards.exact
        for name, array in rider.arrays.items() if exact else ():
            there = [n for n, a in order.arrays.items() if _is(a, array)]
            same |= {name: there[0]} if there else {}
        own = {n: a for n, a in rider.arrays.items() if n not in same}
        coded, _, _ = self._arrays(replace(rider, arrays=own), self.ride.round)
        arrays = {n: {"as": same[n]} if n in same else coded.arrays[n] for n in rider.arrays}
        score = {"round": self.ride.round, "arrays": arrays, "config": dict(rider.config)}
        return score, coded.choices

    def _arrays(self, order: Order, round: int) -> tuple[Coded, Mapping[str, Array], Held]:
        """What travels of an order's arrays, what the client makes of it, what it then holds."""
        side, start = self.door.terms.coding.downwards, self.door.terms.start
        if side.plainly or start is None:
            return Coded(dict(order.arrays)), order.arrays, {}
        held = self.door.held.get(order.client, {})
        models = (
            [] if side.exact else [n for n, a in order.arrays.items() if isinstance(a, Weights)]
        )
        references = {name: reference_of(held.get, name, start) for name in models}
        # Whatever is scored, fetched or kept after a round is the same model.
        stream = "score" if order.task in NO_WORK else self.name
        seed = seed_for(self.door.terms.seed, "codec", round, stream=stream)
        key = (
            seed,
            tuple((n, id(a)) for n, a in order.arrays.items()),
            tuple(map(id, references.values())),
        )
        if key not in self._coded:
            coded = encode(
                side,
                order.arrays,
                references,
                lambda stream: seed_for(seed, stream),
                self.door.wire.layout,
            )
            arrives = self.door.wire.unpack(
                self.door.wire.pack({"arrays": coded.arrays}, self._encoded, coded.choices),
                self._decoded,
            )["arrays"]
            found = decode(arrives, references, self.door.wire.layout)
            now = {} if side.exact else now_held(found, references)
            # What the memo's keys are made of must live as long as the memo.
            self._coded[key] = coded, found, now, (dict(order.arrays), references)
        coded, found, now, _ = self._coded[key]
        return coded, found, now

    def read(self, client: ClientId, order: Order, message: Message) -> dict[str, Any]:
        """The body of an answer, its arrays as the client meant them; its errors are raised."""
        if self.door.samples is not None:
            vet_message(message, 4 * self.door.wire.layout.size + SMALL)
            self.door.wire.kinds(message)  # which is how its bytes are booked
        body = self.door.wire.unpack(message)
        if "error" in body:
            raise error_named(body["error"])(body["text"])
        received = self.received[client]
        since = body.get("since", {})
        references: dict[str, Array | None] = {}
        for name, of in since.items():
            key, start = f"{SENT}.{name}", self.door.terms.start
            if of == SENT:
                references[name] = self.door.held.get(client, {}).get(key, start)
            else:
                references[name] = received[of] if of else None
        body["arrays"] = decode(body["arrays"], references, self.door.wire.layout)
        check_finite(client, self.door.round, order.task, body["arrays"])
        if self.door.samples is not None:
            vet(body, self.door.samples.get(client, 0), order.task == SCORE)
            if not all(isinstance(body.get(key, {}), Mapping) for key in ("beside", "of")):
                raise TrainingError("what is beside its arrays has no names")
        for name, of in since.items():
            if of == SENT:
                whole = body["arrays"][name].onto(references[name])
                self.held[client] = {**self.held.get(client, {}), f"{SENT}.{name}": whole}
        return body

    def answer(self, client: ClientId, body: Mapping[str, Any]) -> Answer:
        """What came of one order."""
        return Answer(
            client,
            body["examples"],
            body["arrays"],
            body["metrics"],
            body.get("beside", {}),
            body.get("of", {}),
            self.received[client],
            body.get("version"),
            self.held.get(client, {}),
            self._content(client),
        )

    def _content(self, client: ClientId) -> str:
        """A digest of what a client was asked, if there is a stage; many are asked the same."""
        if client not in self.beside:
            return ""
        message = self.sent[client]
        asked = json.loads(message.header)["body"]
        key = (
            json.dumps([asked.get(k) for k in ("task", "config", "arrays")]),
            tuple(map(id, message.payloads)),
        )
        if key not in self._contents:
            self._contents[key] = content_of(message)
        return self._contents[key]

    def kinds(self, message: Message) -> dict[str, int]:
        """The kinds of a message; many clients get the same one."""
        if message.header not in self._kinds:
            self._kinds[message.header] = self.door.wire.kinds(message)
        return self._kinds[message.header]


def _scoring(
    sends: Mapping[ClientId, Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[ClientId, Order]:
    """An order for each client to score what it would be sent."""
    return {c: Order(c, SCORE, arrays, config, apart=True) for c, arrays in sends.items()}


def _is(a: Array, b: Array) -> bool:
    """Whether two arrays are one: the same tensor, by the same layout."""
    layouts = [w.layout if isinstance(w, Weights) else None for w in (a, b)]
    return vector_of(a) is vector_of(b) and layouts[0] == layouts[1]


def layers_of(arrays: Mapping[str, Array]) -> dict[str, tuple[str, ...]]:
    """The layers of each array; none for those that are no weights."""
    return {
        name: array.layout.layers if isinstance(array, Weights) else ()
        for name, array in arrays.items()
    }


def _unhurried(orders: Sequence[Order]) -> bool:
    return any(o.unhurried for o in orders)


def _leg(request: Request, answer: Message, apart: bool) -> Leg:
    """An order and its answer, as a clock sees them; what is apart travels nowhere."""
    sent, work = request.message, answer.work
    if apart:
        return Leg(request.client, 0, 0, 0, 0, (), work.seconds, work.samples)
    return Leg(
        request.client,
        sent.size,
        answer.size,
        sent.content,
        answer.content,
        tuple(id(p) for p in sent.payloads),
        work.seconds,
        work.samples,
    )
