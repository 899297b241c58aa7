"""Secure aggregation as a federation: means as ever, and the server learns sums only.

The client's task and its keys are the first exchange; sharing keys, masked inputs, the consistency
check and unmasking are one exchange each. Slots run side by side. Whoever drops out before its
masked input has arrived is in no sum, and its state stays as it was.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from coterie.channel.checks import printable
from coterie.channel.disclosure import Disclosure
from coterie.channel.exchange import Answer
from coterie.channel.policy import cohort_size
from coterie.channel.privacy.client import (
    GRAIN,
    about,
    agreed_name,
    negligible,
    place_name,
    unequal,
)
from coterie.channel.privacy.encoding import Form, Total, length
from coterie.channel.privacy.secagg import Session, Sum, TooFew
from coterie.channel.privacy.settings import Privacy
from coterie.channel.release import Plain, Release
from coterie.channel.tasks import SECURE
from coterie.core.messages import Chosen, ClientId, Mean, Mixing, Order, Reply, Slot, vector_of
from coterie.core.weights import Weights
from coterie.errors import Abandoned, ConfigError, TrainingError

if TYPE_CHECKING:
    from coterie.channel.channel import Channel

STEPS = ("keys", "shares", "survivors", "confirmations")  # what the server says after each exchange
_METRICS, _LONG = 1000, 100  # how many a client may have summed, and the letters of their names


@dataclass
class Secure(Release):
    """A federation in which ``reduce`` goes through the protocol and ``gather`` shows no vectors.

    ``run`` names the run and ``method`` the method, for refusals. ``skipped`` are the slots of the
    present round that were too small, and why. ``most`` is how many sums the method may ask for in
    a round: clients sign no more, and all of them must be of the same clients. ``agreement`` names
    what real clients were told of the run.
    """

    channel: Channel
    privacy: Privacy
    roster: Mapping[ClientId, bytes]
    run: str = ""
    method: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    most: int = 1
    agreement: str = ""
    _turn: _Turn = field(default_factory=lambda: _Turn())

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of."""
        return self.privacy.min_group

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        return Plain(self.channel).plain_means

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Another round; nothing was passed over in it yet."""
        self.skipped = {}

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Replies without vectors; clients refuse to send one that was not named as revealed."""
        replies = self.channel.exchange(orders)
        self.channel.stage(Disclosure).saw(replies, "each", "revealed by consent")
        return list(replies)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The weighted mean of each slot, from its sum alone."""
        if all(o.unmetered for o in orders):  # what a client would do by itself, with no message
            return Plain(self.channel).reduce(orders, into, by_examples)
        means = {}
        for slot, total in self.sums(orders, into, by_examples).items():
            if total.count:
                means[slot] = Mean(total.arrays, total.examples, total.clients, total.means)
        return means

    def sums(
        self,
        orders: Sequence[Order],
        into: Mixing,
        by_examples: bool = True,
        noise: Mapping[str, float] | None = None,
    ) -> dict[Slot, Total]:
        """The sum of each slot; ``noise`` is what clients are told to clip to and to add."""
        turn = self._begin(by_examples, {o.task for o in orders})
        orders = [o for o in orders if o.client not in turn.lost]
        rows = {} if isinstance(into, Chosen) else self._rows(orders, into)
        call = _Call(secrets.token_hex(16), rows, by_examples, noise)
        self._refuse_other_weights(call)
        told = {o.client: {"run": self.run, **call.tells(o.client, into)} for o in orders}
        answers = {a.client: a for a in self.channel.exchange(orders, told, adopt=False)}
        for answer in answers.values():
            if "slot" not in answer.beside:  # it takes part in no mean: its work is done
                self.channel.state.adopt(answer.client, answer.version, answer.held)
        running = self._begun(call, answers)
        replies = _blobs(
            running, [a for c, a in answers.items() if c not in self.channel.phase.rejected]
        )
        for step in STEPS:
            said = self._say(running, step, replies)
            if step == "survivors":
                said = self._keep_to_signed(running, said)
                asked = {c: slot for c, (slot, _) in rows.items()} or dict.fromkeys(told)
                turn.sign(asked, {slot: running[slot].sum.summed for slot in said})
            replies = _blobs(running, self._carry(call, step, running, said))
        found = {}
        for slot, values in self._say(running, "total", replies).items():
            run = running[slot]
            for client in run.sum.summed:
                answer = answers[client]
                self.channel.state.adopt(client, answer.version, answer.held)
            self._note(orders, slot, run, noise is not None)
            people = tuple(sorted(run.sum.summed))
            bits, delta_of = self.privacy.bits, run.delta_of
            found[slot] = Total(run.form, people, run.metrics, values, bits, delta_of)
        if not found and (rows or (orders and isinstance(into, Chosen))):
            why = "; ".join(self.skipped.values()) or "no client answered"
            raise (Abandoned if self.channel.phase.cohort else TrainingError)(why)
        return found

    # --- before -------------------------------------------------------------------------------

    def _rows(
        self, orders: Sequence[Order], into: Mapping[ClientId, Mapping[Slot, float]]
    ) -> dict[ClientId, tuple[Slot, float]]:
        """Each client's one slot and its weight there; what would show a client is refused."""
        found, slots = dict[ClientId, tuple[Slot, float]](), dict[Slot, dict[ClientId, float]]()
        for order in orders:
            row = {s: w for s, w in into.get(order.client, {}).items() if w > 0}
            if len(row) > 1:
                names = " and ".join(repr(s) for s in list(row)[:2])
                raise self._refusal(
                    f"slots that overlap: client {order.client} is in {names}",
                    "means of disjoint groups only can be had without showing more",
                )
            for slot, weight in row.items():
                found[order.client] = slot, weight
                slots.setdefault(slot, {})[order.client] = weight
        for slot, members in slots.items():
            self._refuse_small(slot, members)
            if self.agreement and (others := unequal(members)):
                raise self._refusal(
                    f"the mean of slot {slot!r} in which client {others[0]} counts otherwise than "
                    "others",
                    "real clients count alike, or by their samples",
                )
        return found

    def _refuse_small(self, slot: Slot, weights: Mapping[ClientId, float]) -> None:
        light = negligible(weights)
        if not light and len(weights) >= self.privacy.min_group:
            return
        heavy = sorted(set(weights) - set(light))
        who = ", ".join(map(str, heavy))
        rest = " (the others hardly count)" if light else ""
        # A group that is small in a part of the clients, as drawn, is passed over for the round.
        refuses = self.privacy.small_groups == "refuse" and self._everybody
        if light or refuses:
            raise self._refusal(
                f"the mean of slot {slot!r}, of client{'s' * (len(heavy) > 1)} {who} alone{rest}",
                f"privacy.min_group = {self.privacy.min_group}. Use larger cohorts or fewer "
                "groups, lower privacy.min_group, or leave such groups as they are with "
                "privacy.small_groups = skip",
            )

    @property
    def _everybody(self) -> bool:
        """Whether all clients take part in each round."""
        policy, clients = self.channel.terms.policy, len(self.clients)
        return policy.sampling != "poisson" and cohort_size(policy.cohort, clients) == clients

    def _begin(self, by_examples: bool, tasks: set[str]) -> _Turn:
        """What clients have signed in this round; a sum more than the method declares is refused.

        Clients would refuse it, too: with other weights or other members, sums of one round could
        be taken from each other.
        """
        if self._turn.round != self.channel.phase.round:
            self._turn = _Turn(self.channel.phase.round)
        turn = self._turn
        if turn.sums >= self.most:
            raise self._refusal(
                f"more than {self.most} sum{'s' * (self.most > 1)} in one round",
                "clients sign as many as it declares (Method.sums), and no more",
            )
        if turn.by_examples not in (None, by_examples):
            raise self._refusal(
                "sums of one round in which clients count by samples, and each alike",
                "one could be taken from the other. Give both the same weights",
            )
        if self.agreement and tasks & turn.tasks:  # simulations may look at one mean twice
            raise self._refusal(
                f"two sums for task '{min(tasks & turn.tasks)}' in one round",
                "clients carry out one order for each task in a round",
            )
        turn.by_examples = by_examples
        turn.tasks |= tasks
        return turn

    def _refuse_other_weights(self, call: _Call) -> None:
        """Refuse weights that are not those of the earlier sums of this round."""
        for client, (slot, _) in call.rows.items():
            weight = call.weights(slot).get(client, GRAIN)
            if self._turn.weights.setdefault(client, weight) != weight:
                raise self._refusal(
                    f"sums of one round in which client {client} has different weights",
                    "one could be taken from the other",
                )

    def _keep_to_signed(
        self, running: dict[Slot, _Running], said: dict[Slot, Any]
    ) -> dict[Slot, Any]:
        """Without the sums of other members than an earlier one of the round was of."""
        for slot in list(said):
            summed = frozenset(running[slot].sum.summed)
            if any(self._turn.signed.get(c, summed) != summed for c in summed):
                self.skipped[str(slot)] = (
                    f"slot {slot!r}: its clients have signed a sum of others in this round"
                )
                del said[slot], running[slot]
        return said

    def _refusal(self, what: str, why: str) -> ConfigError:
        return ConfigError(
            f"method {self.method} asks for {what}; secure aggregation refuses it: {why}"
        )

    # --- during -------------------------------------------------------------------------------

    def _begun(self, call: _Call, answers: Mapping[ClientId, Answer]) -> dict[Slot, _Running]:
        """A sum to be made for each slot that has enough members."""
        self.skipped, members = {}, dict[Slot, list[Answer]]()
        forms = self._forms(answers.values())
        for client in forms:
            members.setdefault(answers[client].beside["slot"], []).append(answers[client])
        running = {}
        for slot in sorted(members, key=lambda s: (str(type(s)), s)):
            found = self._alike(members[slot], forms)
            if len(found) < self.privacy.min_group:
                self.skipped[str(slot)] = (
                    f"slot {slot!r} has {len(found)} of the {self.privacy.min_group} clients that "
                    "a sum needs"
                )
                continue
            form = forms[found[0].client]
            metrics, delta_of = self._metrics(call, found), found[0].beside.get("since", {})
            run = Sum(
                self._session(call, slot),
                self.roster,
                call.length(form, metrics),
                about=about(call.asks(metrics), self._same(slot, found)),
            )
            running[slot] = _Running(run, form, metrics, delta_of)
        return running

    def _metrics(self, call: _Call, answers: Sequence[Answer]) -> tuple[str, ...]:
        """The metrics that are summed; real clients add only what all of them report."""
        named = [set(a.beside["metrics"]) for a in answers] if call.noise is None else []
        together = set.intersection if self.agreement else set.union
        return tuple(sorted(together(*named))) if named else ()

    def _forms(self, answers: Iterable[Answer]) -> dict[ClientId, Form]:
        """What the part of each client in a sum is made of; who tells nonsense is rejected."""
        found = {}
        for answer in answers:
            told = answer.beside
            if "slot" not in told:
                continue
            try:
                names, delta_of = told.get("metrics", []), told.get("since", {})
                if not isinstance(told["slot"], str | int) or not isinstance(delta_of, Mapping):
                    raise TrainingError("it names no slot of a sum")
                if not isinstance(names, list) or len(names) > _METRICS:
                    raise TrainingError("it names no metrics of a sum")
                if not all(isinstance(n, str) and len(n) <= _LONG for n in names):
                    raise TrainingError("it names no metrics of a sum")
                found[answer.client] = Form.from_tree(
                    told.get("form", ()), self.channel.wire.layout
                )
            except TrainingError as why:
                self.channel.phase.rejected[answer.client] = printable(why)
        return found

    def _alike(self, answers: Sequence[Answer], forms: Mapping[ClientId, Form]) -> Sequence[Answer]:
        """Those who would send the arrays that most would; a client of others' is left out."""
        counts = Counter(forms[a.client].parts for a in answers)
        usual = max(counts, key=lambda parts: counts[parts])
        odd = [a.client for a in answers if forms[a.client].parts != usual]
        if odd and self.channel.samples is None:
            like = next(a.client for a in answers if a.client not in odd)
            raise TrainingError(
                f"clients {like} and {odd[0]} would send different arrays into one sum"
            )
        for client in odd:
            self.channel.phase.rejected[client] = (
                "it would send other arrays into a sum than the others"
            )
        return [a for a in answers if a.client not in odd]

    def _same(self, slot: Slot, answers: Sequence[Answer]) -> str:
        """A digest of the order that all members of a slot got."""
        if not self.privacy.same_orders:
            return ""
        first, *others = answers
        odd = [a.client for a in others if a.content != first.content]
        if odd:
            raise self._refusal(
                f"one sum of clients that it sent different models or settings: in slot {slot!r}, "
                f"clients {first.client} and {odd[0]}",
                "a server could single a client out by that. privacy.same_orders = false allows it",
            )
        return first.content

    def _session(self, call: _Call, slot: Slot) -> Session:
        return Session(
            agreed_name(self.run, self.agreement),
            self.channel.phase.round,
            call.attempt,
            place_name(slot, call.by_examples, call.weights(slot)),
            self.privacy.threshold,
            self.privacy.neighbours,
            self.privacy.min_group,
        )

    def _say(
        self, running: dict[Slot, _Running], step: str, replies: Mapping[Slot, Any]
    ) -> dict[Slot, Any]:
        """What the server has to say to each slot; a slot that too few are left of is over."""
        said = {}
        for slot in list(running):
            try:
                said[slot] = getattr(running[slot].sum, step)(replies.get(slot, {}))
            except TooFew as why:
                told = [f"{why}", *running[slot].refusals[:1]]
                self.skipped[str(slot)] = f"slot {slot!r}: {'. '.join(told)}"
                del running[slot]
        return said

    def _carry(
        self,
        call: _Call,
        step: str,
        running: Mapping[Slot, _Running],
        said: Mapping[Slot, Mapping[ClientId, bytes]],
    ) -> list[Answer]:
        """One step of the protocol, as one exchange for all slots."""
        orders, told = [], {}
        for slot, messages in said.items():
            for client, blob in messages.items():
                orders.append(Order(client, SECURE, {"secure": _tensor(blob)}))
                told[client] = {"attempt": call.attempt, "step": step}
                if step == "shares":
                    told[client] |= call.asks(running[slot].metrics)
        answers = self.channel.exchange(orders, told) if orders else []
        for answer in answers:
            if "refused" in answer.beside:
                slot = next(s for s, messages in said.items() if answer.client in messages)
                running[slot].refusals.append(str(answer.beside["refused"]))
        return answers

    def _note(self, orders: Sequence[Order], slot: Slot, running: _Running, noised: bool) -> None:
        if running.form.size:
            self.channel.exposed.add("means")
            self.channel.state.exposure.sum(
                self.channel.phase.moment,
                orders[0].task,
                slot,
                running.sum.summed,
                running.form.layers,
                "secure, noised" if noised else "secure",
            )


@dataclass(frozen=True)
class _Running:
    """The protocol of one slot."""

    sum: Sum
    form: Form
    metrics: tuple[str, ...]
    delta_of: Mapping[str, str]
    refusals: list[str] = field(default_factory=list)  # why members would not go on


@dataclass
class _Turn:
    """The sums of one round so far: whose each client has signed, and how everybody counts.

    ``lost`` were asked for a sum and are in none: the others do not sign one with them any more.
    """

    round: int = -1
    sums: int = 0
    by_examples: bool | None = None
    signed: dict[ClientId, frozenset[ClientId]] = field(default_factory=dict)
    weights: dict[ClientId, int] = field(default_factory=dict)
    lost: set[ClientId] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)

    def sign(
        self,
        asked: Mapping[ClientId, Slot | None],
        summed: Mapping[Slot, Iterable[ClientId]],
    ) -> None:
        """One more sum, which these clients of each slot are asked to sign.

        ``asked`` has the slot of everybody who was to be in one, None where clients choose it.
        """
        for people in summed.values():
            members = frozenset(people)
            self.signed |= dict.fromkeys(members, members)
        self.sums += bool(summed)
        signed = {*summed, None} if summed else set()
        self.lost |= {c for c, slot in asked.items() if slot in signed} - self.signed.keys()


@dataclass(frozen=True)
class _Call:
    """One ``reduce``: who is in which slot with which weight, and what clients are to add."""

    attempt: str
    rows: Mapping[ClientId, tuple[Slot, float]]
    by_examples: bool
    noise: Mapping[str, float] | None

    @cached_property
    def _grain(self) -> int:
        return 1 if all(w == 1 for _, w in self.rows.values()) else GRAIN

    def weights(self, slot: Slot) -> dict[ClientId, int]:
        """How everybody in a slot counts, as whole numbers; empty if everybody counts 1."""
        if self._grain == 1:
            return {}
        return {c: round(w * GRAIN) for c, (s, w) in self.rows.items() if s == slot}

    def tells(self, client: ClientId, into: Mixing) -> dict[str, Any]:
        """What a client is told with its order: its slot, or the metric in which it names it."""
        told: dict[str, Any] = {"attempt": self.attempt, "by_examples": self.by_examples}
        if isinstance(into, Chosen):
            return {**told, "chosen": into.metric}
        if client not in self.rows:
            return told
        slot = self.rows[client][0]
        weights = self.weights(slot)
        return {**told, "slot": slot, **({"weights": weights} if weights else {})}

    def length(self, form: Form, metrics: Sequence[str]) -> int:
        """How many numbers everybody adds: with noise, the change and a bit."""
        return form.size + 1 if self.noise is not None else length(form, metrics)

    def asks(self, metrics: Sequence[str]) -> dict[str, Any]:
        """What a client must know in order to make its contribution."""
        told: dict[str, Any] = {"metrics": list(metrics)}
        return told if self.noise is None else {**told, "noise": dict(self.noise)}


def _tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def _blobs(
    running: Mapping[Slot, _Running], answers: Iterable[Answer]
) -> dict[Slot, dict[ClientId, bytes]]:
    """The clients' messages by slot; who refused to go on sent none."""
    found: dict[Slot, dict[ClientId, bytes]] = {slot: {} for slot in running}
    for answer in answers:
        slot = answer.beside.get("slot")
        if isinstance(slot, str | int) and slot in found and "secure" in answer.arrays:
            found[slot][answer.client] = vector_of(answer.arrays["secure"]).numpy().tobytes()
    return found
