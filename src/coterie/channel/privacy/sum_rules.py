"""What a secure sum may be of, so that no two of them tell more than one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.channel.exchange import Answer
from coterie.channel.policy import Policy, cohort_size
from coterie.channel.privacy.client import negligible, unequal
from coterie.channel.privacy.settings import Privacy
from coterie.core.messages import ClientId, Order, Slot
from coterie.errors import ConfigError


@dataclass
class Turn:
    """The sums of one round so far: the members that each client has signed, and its weight.

    ``lost`` are clients that were asked for a sum and are in none; the others no longer sign a sum
    with them.
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
        """Record one more sum, which these clients of each slot are asked to sign.

        ``asked`` maps each client that was asked for the sum to its slot, or to None if it chooses
        the slot itself.
        """
        for clients in summed.values():
            members = frozenset(clients)
            self.signed |= dict.fromkeys(members, members)
        self.sums += bool(summed)
        signed = {*summed, None} if summed else set()
        self.lost |= {c for c, slot in asked.items() if slot in signed} - self.signed.keys()


@dataclass(frozen=True)
class SumRules:
    """Refuses sums by which single clients could be told apart, before anybody is asked.

    ``most`` is the number of sums that the method may ask for in a round. With ``real`` clients,
    who sign what they give, the rules are stricter.
    """

    privacy: Privacy
    policy: Policy
    clients: int
    method: str
    most: int
    real: bool

    def rows(
        self, orders: Sequence[Order], into: Mapping[ClientId, Mapping[Slot, float]]
    ) -> dict[ClientId, tuple[Slot, float]]:
        """Each client's slot and weight; slots that would reveal single clients are refused."""
        rows, slots = dict[ClientId, tuple[Slot, float]](), dict[Slot, dict[ClientId, float]]()
        for order in orders:
            row = {s: w for s, w in into.get(order.client, {}).items() if w > 0}
            if len(row) > 1:
                names = " and ".join(repr(s) for s in list(row)[:2])
                raise self.refusal(
                    f"slots that overlap: client {order.client} is in {names}",
                    "only means of disjoint groups reveal nothing else",
                )
            for slot, weight in row.items():
                rows[order.client] = slot, weight
                slots.setdefault(slot, {})[order.client] = weight
        for slot, members in slots.items():
            self._refuse_small(slot, members)
            if self.real and (others := unequal(members)):
                raise self.refusal(
                    f"the mean of slot {slot!r}, in which client {others[0]} has a different "
                    "weight than others",
                    "real clients count equally, or by their samples",
                )
        return rows

    def _refuse_small(self, slot: Slot, weights: Mapping[ClientId, float]) -> None:
        light = negligible(weights)
        if not light and len(weights) >= self.privacy.min_group:
            return
        heavy = sorted(set(weights) - set(light))
        who = ", ".join(map(str, heavy))
        rest = " (the others hardly count)" if light else ""
        # A group that is small only among the sampled clients is skipped for the round.
        refuses = self.privacy.small_groups == "refuse" and self._all_take_part
        if light or refuses:
            raise self.refusal(
                f"the mean of slot {slot!r}, of client{'s' * (len(heavy) > 1)} {who} alone{rest}",
                f"privacy.min_group = {self.privacy.min_group}. Use larger cohorts or fewer "
                "groups, lower privacy.min_group, or leave such groups as they are with "
                "privacy.small_groups = skip",
            )

    @property
    def _all_take_part(self) -> bool:
        """Whether all clients take part in each round."""
        everybody = cohort_size(self.policy.cohort, self.clients) == self.clients
        return self.policy.sampling != "poisson" and everybody

    def begin(self, turn: Turn, by_examples: bool, tasks: set[str]) -> None:
        """Begin a sum of this round; refuses more sums than the method declares.

        Clients would refuse them, too: sums of one round with other weights or other members could
        be subtracted from each other.
        """
        if turn.sums >= self.most:
            raise self.refusal(
                f"more than {self.most} sum{'s' * (self.most > 1)} in one round",
                "clients sign as many as it declares (Method.sums), and no more",
            )
        if turn.by_examples not in (None, by_examples):
            raise self.refusal(
                "sums of one round with weights by samples and with equal weights",
                "one could be subtracted from the other. Give both the same weights",
            )
        if self.real and tasks & turn.tasks:  # simulations may compute a mean twice
            raise self.refusal(
                f"two sums for task '{min(tasks & turn.tasks)}' in one round",
                "clients carry out one order for each task in a round",
            )
        turn.by_examples = by_examples
        turn.tasks |= tasks

    def refuse_other_weights(self, turn: Turn, weights: Mapping[ClientId, int]) -> None:
        """Refuse weights that differ from those of earlier sums of this round."""
        for client, weight in weights.items():
            if turn.weights.setdefault(client, weight) != weight:
                raise self.refusal(
                    f"sums of one round in which client {client} has different weights",
                    "one could be subtracted from the other",
                )

    def content(self, slot: Slot, answers: Sequence[Answer]) -> str:
        """A digest of the order that all members of a slot were sent."""
        if not self.privacy.same_orders:
            return ""
        first, *others = answers
        different = [a.client for a in others if a.content != first.content]
        if different:
            raise self.refusal(
                f"one sum of clients that it sent different models or settings: in slot {slot!r}, "
                f"clients {first.client} and {different[0]}",
                "a server could single out a client in this way. privacy.same_orders = false "
                "allows it",
            )
        return first.content

    def refusal(self, what: str, why: str) -> ConfigError:
        """The error that names what the method asks for."""
        return ConfigError(
            f"method {self.method} asks for {what}; secure aggregation refuses it: {why}"
        )
