"""Secure aggregation in the channel: computes means of which the server learns only the sums.

The first exchange runs the clients' task and collects their keys. Sharing keys, masked inputs, the
consistency check and unmasking take one exchange each. Slots are processed in parallel. A client
that drops out before its masked input has arrived is in no sum, and its state does not change.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from coterie.channel.channel import Channel, Plain, Release
from coterie.channel.checks import printable
from coterie.channel.exchange import Answer
from coterie.channel.privacy.client import (
    GRAIN,
    about,
    agreed_name,
    place_name,
)
from coterie.channel.privacy.encoding import Form, Total, length
from coterie.channel.privacy.secagg import Session, Sum, TooFew
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.sum_rules import SumRules, Turn
from coterie.channel.tasks import SECURE
from coterie.core.messages import Chosen, ClientId, Mean, Mixing, Order, Reply, Slot, vector_of
from coterie.core.weights import Weights
from coterie.errors import Abandoned, TrainingError

STEPS = ("keys", "shares", "survivors", "confirmations")  # the server's messages, in order
_METRICS, _LONG = 1000, 100  # the most metrics of a client, and the longest names


@dataclass
class Secure(Release):
    """A release in which ``reduce`` uses the protocol and ``gather`` returns no vectors.

    ``run`` and ``method`` name the run and the method, for messages. ``skipped`` are the slots of
    the current round that were too small, and why. ``most`` is the number of sums that the method
    may ask for in a round; clients sign no more, and all must be over the same clients.
    ``agreement`` is a digest of the terms that real clients were told.
    """

    channel: Channel
    privacy: Privacy
    roster: Mapping[ClientId, bytes]
    run: str = ""
    method: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    most: int = 1
    agreement: str = ""
    _turn: Turn = field(default_factory=Turn)

    @property
    def min_group(self) -> int:
        """The smallest number of clients in a mean."""
        return self.privacy.min_group

    @property
    def plain_means(self) -> bool:
        """Whether a mean is exactly the weighted mean of what clients sent."""
        return Plain(self.channel).plain_means

    @property
    def _rules(self) -> SumRules:
        """What sums may be of."""
        policy, clients = self.channel.terms.policy, len(self.clients)
        real = bool(self.agreement)
        return SumRules(self.privacy, policy, clients, self.method, self.most, real)

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Begin a round, in which no slot has been skipped yet."""
        self.skipped = {}

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Replies without vectors; clients refuse to send arrays they have not agreed to reveal."""
        replies = self.channel.exchange(orders)
        self.channel.records.saw(replies, "each", "revealed by consent")
        return list(replies)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The weighted mean of each slot, computed from its sum alone."""
        if all(o.unmetered for o in orders):  # a real client would do this without any message
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
        """The sum of each slot; ``noise`` tells clients how to clip and how much noise to add."""
        if self._turn.round != self.channel.phase.round:
            self._turn = Turn(self.channel.phase.round)
        turn, rules = self._turn, self._rules
        rules.begin(turn, by_examples, {o.task for o in orders})
        orders = [o for o in orders if o.client not in turn.lost]
        rows = {} if isinstance(into, Chosen) else rules.rows(orders, into)
        call = _Call(secrets.token_hex(16), rows, by_examples, noise)
        weights = {c: call.weights(slot).get(c, GRAIN) for c, (slot, _) in rows.items()}
        rules.refuse_other_weights(turn, weights)
        told = {o.client: {"run": self.run, **call.tells(o.client, into)} for o in orders}
        answers = {a.client: a for a in self.channel.exchange(orders, told, adopt=False)}
        for answer in answers.values():
            if "slot" not in answer.beside:  # the client takes part in no mean
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
        totals = {}
        for slot, values in self._say(running, "total", replies).items():
            run = running[slot]
            for client in run.sum.summed:
                answer = answers[client]
                self.channel.state.adopt(client, answer.version, answer.held)
            self._note(orders, slot, run, noise is not None)
            summed = tuple(sorted(run.sum.summed))
            bits, delta_of = self.privacy.bits, run.delta_of
            totals[slot] = Total(run.form, summed, run.metrics, values, bits, delta_of)
        if not totals and (rows or (orders and isinstance(into, Chosen))):
            why = "; ".join(self.skipped.values()) or "no client answered"
            raise (Abandoned if self.channel.phase.cohort else TrainingError)(why)
        return totals

    def _keep_to_signed(
        self, running: dict[Slot, _Running], said: dict[Slot, Any]
    ) -> dict[Slot, Any]:
        """Drop sums whose members differ from those of an earlier sum of this round."""
        for slot in list(said):
            summed = frozenset(running[slot].sum.summed)
            if any(self._turn.signed.get(c, summed) != summed for c in summed):
                self.skipped[str(slot)] = (
                    f"slot {slot!r}: its clients have signed a sum over other clients in this round"
                )
                del said[slot], running[slot]
        return said

    # --- during -------------------------------------------------------------------------------

    def _begun(self, call: _Call, answers: Mapping[ClientId, Answer]) -> dict[Slot, _Running]:
        """Begin the protocol for each slot that has enough members."""
        self.skipped, members = {}, dict[Slot, list[Answer]]()
        forms = self._forms(answers.values())
        for client in forms:
            members.setdefault(answers[client].beside["slot"], []).append(answers[client])
        running = {}
        for slot in sorted(members, key=lambda s: (str(type(s)), s)):
            alike = self._alike(members[slot], forms)
            if len(alike) < self.privacy.min_group:
                self.skipped[str(slot)] = (
                    f"slot {slot!r} has {len(alike)} of the {self.privacy.min_group} clients that "
                    "a sum needs"
                )
                continue
            form = forms[alike[0].client]
            metrics, delta_of = self._metrics(call, alike), alike[0].beside.get("since", {})
            run = Sum(
                self._session(call, slot),
                self.roster,
                call.length(form, metrics),
                about=about(call.asks(metrics), self._rules.content(slot, alike)),
            )
            running[slot] = _Running(run, form, metrics, delta_of)
        return running

    def _metrics(self, call: _Call, answers: Sequence[Answer]) -> tuple[str, ...]:
        """The metrics to sum; real clients only sum metrics that all of them report."""
        named = [set(a.beside["metrics"]) for a in answers] if call.noise is None else []
        together = set.intersection if self.agreement else set.union
        return tuple(sorted(together(*named))) if named else ()

    def _forms(self, answers: Iterable[Answer]) -> dict[ClientId, Form]:
        """The form of each client's contribution; clients with an invalid one are rejected."""
        forms = {}
        for answer in answers:
            fields = answer.beside
            if "slot" not in fields:
                continue
            try:
                names, delta_of = fields.get("metrics", []), fields.get("since", {})
                if not isinstance(fields["slot"], str | int) or not isinstance(delta_of, Mapping):
                    raise TrainingError("it names no slot of a sum")
                if not isinstance(names, list) or len(names) > _METRICS:
                    raise TrainingError("it names no metrics of a sum")
                if not all(isinstance(n, str) and len(n) <= _LONG for n in names):
                    raise TrainingError("it names no metrics of a sum")
                forms[answer.client] = Form.from_tree(
                    fields.get("form", ()), self.channel.wire.layout
                )
            except TrainingError as why:
                self.channel.phase.rejected[answer.client] = printable(why)
        return forms

    def _alike(self, answers: Sequence[Answer], forms: Mapping[ClientId, Form]) -> Sequence[Answer]:
        """The clients with the most common form; clients with another form are rejected."""
        counts = Counter(forms[a.client].parts for a in answers)
        usual = max(counts, key=lambda parts: counts[parts])
        different = [a.client for a in answers if forms[a.client].parts != usual]
        if different and self.channel.samples is None:
            like = next(a.client for a in answers if a.client not in different)
            raise TrainingError(
                f"clients {like} and {different[0]} would send different arrays into one sum"
            )
        for client in different:
            self.channel.phase.rejected[client] = (
                "it would send other arrays into a sum than the others"
            )
        return [a for a in answers if a.client not in different]

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
        """The server's next messages for each slot; slots with too few clients left are ended."""
        messages = {}
        for slot in list(running):
            try:
                messages[slot] = getattr(running[slot].sum, step)(replies.get(slot, {}))
            except TooFew as why:
                reasons = [f"{why}", *running[slot].refusals[:1]]
                self.skipped[str(slot)] = f"slot {slot!r}: {'. '.join(reasons)}"
                del running[slot]
        return messages

    def _carry(
        self,
        call: _Call,
        step: str,
        running: Mapping[Slot, _Running],
        said: Mapping[Slot, Mapping[ClientId, bytes]],
    ) -> list[Answer]:
        """Carry out one step of the protocol as one exchange for all slots."""
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
    """The protocol of one slot, while it runs."""

    sum: Sum
    form: Form
    metrics: tuple[str, ...]
    delta_of: Mapping[str, str]
    refusals: list[str] = field(default_factory=list)  # the reasons of members that refused


@dataclass(frozen=True)
class _Call:
    """One call of ``reduce``: each client's slot and weight, and what clients are to add."""

    attempt: str
    rows: Mapping[ClientId, tuple[Slot, float]]
    by_examples: bool
    noise: Mapping[str, float] | None

    @cached_property
    def _grain(self) -> int:
        return 1 if all(w == 1 for _, w in self.rows.values()) else GRAIN

    def weights(self, slot: Slot) -> dict[ClientId, int]:
        """The integer weights of the clients in a slot; empty if all weights are 1."""
        if self._grain == 1:
            return {}
        return {c: round(w * GRAIN) for c, (s, w) in self.rows.items() if s == slot}

    def tells(self, client: ClientId, into: Mixing) -> dict[str, Any]:
        """The fields of a client's order: its slot, or the metric by which it chooses one."""
        fields: dict[str, Any] = {"attempt": self.attempt, "by_examples": self.by_examples}
        if isinstance(into, Chosen):
            return {**fields, "chosen": into.metric}
        if client not in self.rows:
            return fields
        slot = self.rows[client][0]
        weights = self.weights(slot)
        return {**fields, "slot": slot, **({"weights": weights} if weights else {})}

    def length(self, form: Form, metrics: Sequence[str]) -> int:
        """The length of a contribution; with noise, it is the change and a bit."""
        return form.size + 1 if self.noise is not None else length(form, metrics)

    def asks(self, metrics: Sequence[str]) -> dict[str, Any]:
        """What a client needs to know to make its contribution."""
        fields: dict[str, Any] = {"metrics": list(metrics)}
        return fields if self.noise is None else {**fields, "noise": dict(self.noise)}


def _tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def _blobs(
    running: Mapping[Slot, _Running], answers: Iterable[Answer]
) -> dict[Slot, dict[ClientId, bytes]]:
    """The clients' messages by slot; clients that refused to continue sent none."""
    blobs: dict[Slot, dict[ClientId, bytes]] = {slot: {} for slot in running}
    for answer in answers:
        slot = answer.beside.get("slot")
        if isinstance(slot, str | int) and slot in blobs and "secure" in answer.arrays:
            blobs[slot][answer.client] = vector_of(answer.arrays["secure"]).numpy().tobytes()
    return blobs
