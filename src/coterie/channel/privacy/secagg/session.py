"""A session, which is one attempt at one sum: its name, its thresholds, and the neighbours."""

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
    """One attempt at one sum, to which every key, mask, ciphertext and signature is bound.

    ``threshold`` is the share of members that must stay to the end; it is always more than half.
    With ``neighbours`` = k, each member shares masks and secrets only with the k members nearest to
    it on a circle, and the threshold applies to each such neighbourhood as well. The order of the
    circle is a hash of all signed keys, so no member can choose its neighbours. A server that
    leaves out members can still try several circles, so neighbourhoods should not be small. With 0,
    all members are neighbours. Fewer than ``least`` members are never summed, which clients check
    as well.

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
                "use an even number, or 0 for all clients"
            )
        if self.least < 2:
            raise ConfigError(
                f"a secure sum of at least {self.least} clients: use 2 or more, since a sum of one "
                "client hides nothing"
            )

    def context(self, *parts: str | int | bytes) -> bytes:
        """Encode the session and these parts as bytes, different for any other session or parts."""
        return self._start + b"".join(map(_tagged, parts))

    @cached_property
    def digest(self) -> bytes:
        """A digest of the session, of 32 bytes."""
        return hashlib.sha256(self._start).digest()

    @cached_property
    def _start(self) -> bytes:
        names = ("coterie secagg 1", self.run, self.round, self.attempt, self.slot)
        rules = (float(self.threshold).hex(), self.neighbours, self.least)
        return b"".join(_tagged(part) for part in (*names, *rules))

    def enough(self, count: int) -> int:
        """The number of ``count`` members that must stay: the threshold, and more than half."""
        share = Fraction(self.threshold).limit_denominator(10_000)  # 0.55 of 100 is 55, not 56
        return max(count // 2 + 1, math.ceil(share * count))


def _tagged(part: str | int | bytes) -> bytes:
    """Prefix a part with its type and length, so that different parts have different encodings."""
    if isinstance(part, bytes):
        kind, text = b"b", part
    elif isinstance(part, int):
        kind, text = b"i", str(part).encode()
    else:
        kind, text = b"s", part.encode()
    return kind + len(text).to_bytes(4, "big") + text


class Circle:
    """The members of an attempt and their neighbours, determined by their signed keys.

    Server and clients build it from the same keys, so they refuse the same things.
    """

    def __init__(self, session: Session, adverts: Mapping[int, bytes]) -> None:
        self.members = tuple(sorted(adverts))
        self.place = {client: at + 1 for at, client in enumerate(self.members)}
        bodies = b"".join(adverts[client] for client in self.members)
        self.transcript = hashlib.sha256(session.context("keys", *self.members, bodies)).digest()
        self.threshold = max(session.least, session.enough(len(self.members)))
        self._session = session
        self._complete = not 0 < session.neighbours < len(self.members) - 1
        self.holders = self._all_members() if self._complete else self._nearest()

    def _all_members(self) -> dict[int, tuple[int, ...]]:
        return dict.fromkeys(self.members, self.members)

    def _nearest(self) -> dict[int, tuple[int, ...]]:
        """The members at most k/2 places away on a circle whose order is a hash of all keys."""
        hashes = {
            c: hashlib.sha256(self._session.context("circle", self.transcript, c)).digest()
            for c in self.members
        }
        order = sorted(self.members, key=hashes.__getitem__)
        reach = self._session.neighbours // 2
        around = range(-reach, reach + 1)
        return {
            client: tuple(sorted(order[(at + step) % len(order)] for step in around))
            for at, client in enumerate(order)
        }

    def partners(self, client: int, among: Collection[int]) -> list[int]:
        """Those of ``among`` with which a client shares masks, in rising order."""
        return [other for other in self.holders[client] if other != client and other in among]

    def need(self, client: int) -> int:
        """The number of a client's holders needed to reconstruct its secrets."""
        return self._session.enough(len(self.holders[client]))

    def agreed(self, transcript: bytes, what: str, clients: Collection[int]) -> bytes:
        """The transcript extended by a set of clients that the server has named."""
        return hashlib.sha256(self._session.context(what, transcript, *sorted(clients))).digest()

    def shortfall(self, owners: Collection[int], there: Collection[int]) -> str | None:
        """Why the clients still there are too few to unmask the owners' values; None if not."""
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
        """Why the survivors' sum would reveal sums of subsets; None if it would not.

        Without the masks shared with lost clients, the survivors must still be connected.
        """
        if self._complete:
            return None
        first = min(survivors)
        reached, next_ones = {first}, [first]
        while next_ones:
            newly_reached = set(self.partners(next_ones.pop(), survivors)) - reached
            reached |= newly_reached
            next_ones.extend(newly_reached)
        if len(reached) == len(survivors):
            return None
        return f"the survivors' masks fall apart: {len(reached)} of {len(survivors)} hang together"
