"""What one attempt at one sum is called, how many must stay, and who masks with whom."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from coterie.errors import ConfigError


@dataclass(frozen=True)
class Session:
    """What every key, mask, ciphertext and signature is bound to.

    ``threshold`` is the share of the members that must stay to the end, and always more than half.
    With ``neighbours`` = k, each member masks with, and deals its shares to, only the k members
    nearest to it on a circle, and the threshold is taken of each such neighbourhood as well; the
    circle's order is a hash of all signed keys, so that no member picks its neighbours; a server
    that leaves members out can still try several circles, so neighbourhoods should not be small.
    0 means everybody. Fewer than ``least`` members are never summed: clients hold to it, too.

    >>> Session("run", 3, "a", "0").enough(100), Session("run", 3, "a", "0").enough(2)
    (67, 2)
    """

    run: str
    round: int
    attempt: str
    slot: str
    threshold: float = 2 / 3
    neighbours: int = 0
    least: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                f"the threshold of secure aggregation is {self.threshold}; "
                "use a share of the clients between 0.5 and 1"
            )
        if self.neighbours < 0 or self.neighbours % 2:
            raise ConfigError(
                f"secure aggregation with {self.neighbours} neighbours: "
                "use an even number, or 0 for everybody"
            )
        if self.least < 2:
            raise ConfigError(
                f"a secure sum of at least {self.least}: use 2 or more, one client is no sum"
            )

    def context(self, *parts: str | int | bytes) -> bytes:
        """The session and these parts as bytes, unlike those of any other session or parts."""
        return self._start + b"".join(map(_tagged, parts))

    @cached_property
    def digest(self) -> bytes:
        """The session in 32 bytes."""
        return hashlib.sha256(self._start).digest()

    @cached_property
    def _start(self) -> bytes:
        names = ("coterie secagg 1", self.run, self.round, self.attempt, self.slot)
        rules = (float(self.threshold).hex(), self.neighbours, self.least)
        return b"".join(_tagged(part) for part in (*names, *rules))

    def enough(self, count: int) -> int:
        """How many of so many must be there: the threshold, and always more than half."""
        share = Fraction(self.threshold).limit_denominator(10_000)  # 0.55 of 100 is 55, not 56
        return max(count // 2 + 1, math.ceil(share * count))


def _tagged(part: str | int | bytes) -> bytes:
    """A part with its kind and length before it, so that parts cannot run into each other."""
    if isinstance(part, bytes):
        kind, text = b"b", part
    elif isinstance(part, int):
        kind, text = b"i", str(part).encode()
    else:
        kind, text = b"s", part.encode()
    return kind + len(text).to_bytes(4, "big") + text


class Circle:
    """The members of an attempt as their signed keys tell, and who masks with whom.

    Both halves make it from the same keys, so both refuse the same.
    """

    def __init__(self, session: Session, adverts: Mapping[int, bytes]) -> None:
        self.members = tuple(sorted(adverts))
        self.place = {client: at + 1 for at, client in enumerate(self.members)}
        bodies = b"".join(adverts[client] for client in self.members)
        self.transcript = hashlib.sha256(session.context("keys", *self.members, bodies)).digest()
        self.threshold = max(session.least, session.enough(len(self.members)))
        self._session = session
        self._complete = not 0 < session.neighbours < len(self.members) - 1
        self.holders = self._everybody() if self._complete else self._nearest()

    def _everybody(self) -> dict[int, tuple[int, ...]]:
        return dict.fromkeys(self.members, self.members)

    def _nearest(self) -> dict[int, tuple[int, ...]]:
        """Those at most k/2 places away on a circle whose order is a hash of all keys."""
        drawn = {
            c: hashlib.sha256(self._session.context("circle", self.transcript, c)).digest()
            for c in self.members
        }
        order = sorted(self.members, key=drawn.__getitem__)
        reach = self._session.neighbours // 2
        around = range(-reach, reach + 1)
        return {
            client: tuple(sorted(order[(at + step) % len(order)] for step in around))
            for at, client in enumerate(order)
        }

    def partners(self, client: int, among: Collection[int]) -> list[int]:
        """With whom of these a client shares masks, in rising order: its holders but itself."""
        return [other for other in self.holders[client] if other != client and other in among]

    def need(self, client: int) -> int:
        """How many of a client's holders it takes to rebuild its secrets."""
        return self._session.enough(len(self.holders[client]))

    def agreed(self, transcript: bytes, what: str, clients: Collection[int]) -> bytes:
        """The transcript after the server has also said who these clients are."""
        return hashlib.sha256(self._session.context(what, transcript, *sorted(clients))).digest()

    def shortfall(self, owners: Collection[int], there: Collection[int]) -> str | None:
        """Why those who are there are too few to unmask what the owners masked, if they are."""
        if len(there) < self.threshold:
            return f"{len(there)} of {len(self.members)} clients are left, {self.threshold} needed"
        if self._complete:
            return None
        alive = set(there)
        for owner in owners:
            left = len(alive.intersection(self.holders[owner]))
            if left < self.need(owner):
                return f"{left} neighbours of client {owner} are left, {self.need(owner)} needed"
        return None

    def parted(self, survivors: Collection[int]) -> str | None:
        """Why the survivors' sum would show sums of a part of them, if it would.

        Without the masks that they share with the lost, the survivors' masks must still link all.
        """
        if self._complete:
            return None
        first = min(survivors)
        reached, next_ones = {first}, [first]
        while next_ones:
            found = set(self.partners(next_ones.pop(), survivors)) - reached
            reached |= found
            next_ones.extend(found)
        if len(reached) == len(survivors):
            return None
        return f"the survivors' masks fall apart: {len(reached)} of {len(survivors)} hang together"
