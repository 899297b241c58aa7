"""The server's side of secure aggregation: one sum over the members of one slot."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from coterie.channel.privacy.secagg import crypto, masks, shamir
from coterie.channel.privacy.secagg.frames import (
    SIGNATURE,
    Blob,
    Rejected,
    Step,
    TooFew,
    header,
    listed,
    u32,
)
from coterie.channel.privacy.secagg.messages import ADVERT, BOX, Advert, commitment, received
from coterie.channel.privacy.secagg.session import Circle, Session
from coterie.channel.privacy.secagg.shamir import SHARE_BYTES
from coterie.errors import ConfigError

Blobs = dict[int, bytes]


class Sum:
    """The server in one attempt; its five steps come in this order and once each.

    Every method but the last takes what members sent, and returns what goes to each of those who
    are still there. Who sent nothing is lost from there on; so is who sent what is refused, and
    ``rejected`` tells why. With too few left the attempt ends as ``TooFew``.

    Args:
        session: The attempt, as the members know it.
        roster: The Ed25519 public keys of all clients.
        length: How many numbers each member's vector has.
        least: Fewer are never summed, whatever the session allows.
        about: What the values are, as members were told: who was told otherwise is refused, and
            refuses to unmask.
    """

    def __init__(
        self,
        session: Session,
        roster: Mapping[int, bytes],
        length: int,
        least: int = 2,
        about: bytes = b"",
    ) -> None:
        crypto.require()
        if length < 1:
            raise ConfigError(f"a secure sum of vectors of {length} numbers: there must be some")
        self._session, self._roster, self._length = session, roster, length
        self._least = max(least, session.least)
        self._due = Step.ADVERTISE
        self._there: tuple[int, ...] = ()
        self._shared: tuple[int, ...] = ()
        self._transcript, self._about = session.digest, hashlib.sha256(about).digest()
        self.summed: tuple[int, ...] = ()
        self.rejected: dict[int, str] = {}

    def keys(self, adverts: Mapping[int, bytes]) -> Blobs:
        """Send the keys of all members to all members."""
        self._begin(Step.ADVERTISE)
        self._there = tuple(sorted(adverts))
        signatures = {}
        self._adverts: Blobs = {}
        for client, body in self._opened(Step.ADVERTISE, adverts, lambda _: ADVERT).items():
            if not Advert.of(bytes(body)).strong():
                self.rejected[client] = f"client {client} advertised weak keys"
                continue
            self._adverts[client] = bytes(body)
            signatures[client] = bytes(adverts[client][-SIGNATURE:])
        if len(self._adverts) < self._least:
            raise self._too_few(f"{len(self._adverts)} clients are there, {self._least} needed")
        self._circle = Circle(self._session, self._adverts)
        self._transcript = self._circle.transcript
        self._carry_on(Step.SHARE, self._adverts, ())
        entries = [u32(c) + self._adverts[c] + signatures[c] for c in self._there]
        return self._to_all(Step.KEYS, u32(len(entries)) + b"".join(entries))

    def shares(self, replies: Mapping[int, bytes]) -> Blobs:
        """Send each member the set of members that have shared, and the shares made for it."""
        self._begin(Step.SHARE)
        circle = self._circle

        def size(client: int) -> int:
            return BOX * (len(circle.holders[client]) - 1)

        bodies = self._opened(Step.SHARE, replies, size)
        self._carry_on(Step.MASK, bodies, bodies)
        self._shared = self._there
        self._transcript += self._about
        self._agree("shared")
        dealt: dict[int, list[bytes]] = {client: [] for client in self._shared}
        for dealer in self._shared:  # in rising order, as receivers expect
            for at, other in enumerate(circle.partners(dealer, circle.place)):
                if other in dealt:
                    dealt[other].append(bytes(bodies[dealer][at * BOX : (at + 1) * BOX]))
        who = listed(self._shared)
        return {c: self._to(Step.SHARES, c, who, *boxes) for c, boxes in dealt.items()}

    def survivors(self, masked: Mapping[int, bytes]) -> Blobs:
        """Send the set of survivors, whose masked values have arrived and are in the sum."""
        self._begin(Step.MASK)
        bodies = self._opened(Step.MASK, masked, lambda _: 8 * self._length)
        self._carry_on(Step.CONFIRM, bodies, self._shared)
        if parted := self._circle.parted(self._there):
            raise self._too_few(parted)
        self._total = np.zeros(self._length, np.uint64)
        for body in bodies.values():
            self._total += np.frombuffer(body, dtype="<u8")
        self.summed = self._there
        self._agree("survivors")
        return self._to_all(Step.SURVIVORS, listed(self.summed))

    def confirmations(self, replies: Mapping[int, bytes]) -> Blobs:
        """Send the signatures of all members that confirmed the survivors to all of these."""
        self._begin(Step.CONFIRM)
        bodies = self._opened(Step.CONFIRM, replies, lambda _: 0)
        self._carry_on(Step.UNMASK, bodies, self._shared)
        entries = [u32(c) + bytes(replies[c][-SIGNATURE:]) for c in self._there]
        return self._to_all(Step.CONFIRMATIONS, u32(len(entries)) + b"".join(entries))

    def total(self, replies: Mapping[int, bytes]) -> NDArray[np.uint64]:
        """The exact sum of the values of ``summed``, modulo 2^64."""
        self._begin(Step.UNMASK)
        bodies = self._opened(Step.UNMASK, replies, lambda c: SHARE_BYTES * len(self._dealers(c)))
        self._carry_on(Step.OVER, bodies, self._shared)
        secrets = self._rebuilt(self._shares_by_dealer(bodies))
        masks.apply(self._total, self._masks(secrets), masks.cores())
        return self._total

    def _begin(self, step: Step) -> None:
        if self._due != step:
            raise Rejected(
                f"secure aggregation: the server has replies to '{step.name.lower()}', but is at "
                f"'{self._due.name.lower()}'; each step comes once and in order"
            )
        self._due = Step.OVER

    def _carry_on(self, due: Step, there: Iterable[int], owners: Iterable[int]) -> None:
        """Continue with the members still there, if these can unmask the owners' values."""
        self._there = tuple(sorted(there))
        short = self._circle.shortfall(tuple(owners), self._there)
        if len(self._there) < self._least:
            short = f"{len(self._there)} clients are left, {self._least} needed"
        if short:
            raise self._too_few(short)
        self._due = due

    def _too_few(self, why: str) -> TooFew:
        names = "; ".join(self.rejected.values())
        return TooFew(
            f"secure aggregation (round {self._session.round + 1}, slot {self._session.slot}) "
            f"ended without a sum: {why}" + (f". Refused were: {names}" if names else "")
        )

    def _agree(self, what: str) -> None:
        self._transcript = self._circle.agreed(self._transcript, what, self._there)

    def _to(self, step: Step, client: int, *parts: bytes) -> bytes:
        return b"".join((header(self._session, step, client), *parts))

    def _to_all(self, step: Step, body: bytes) -> Blobs:
        return {client: self._to(step, client, body) for client in self._there}

    def _opened(
        self, step: Step, blobs: Mapping[int, Blob], size: Callable[[int], int]
    ) -> dict[int, memoryview]:
        """The checked messages of the members still there; a refused member drops out."""

        def read(client: int) -> memoryview | str:
            try:
                return received(
                    self._session,
                    step,
                    client,
                    self._roster,
                    self._transcript,
                    blobs[client],
                    size(client),
                )
            except Rejected as why:
                return str(why)

        here = [client for client in self._there if client in blobs]
        if step == Step.MASK and self._length > masks.CHUNK:  # hashing lets other threads run
            with ThreadPoolExecutor(masks.cores()) as pool:
                found = dict(zip(here, pool.map(read, here), strict=True))
        else:
            found = {client: read(client) for client in here}
        self.rejected |= {c: why for c, why in found.items() if isinstance(why, str)}
        return {c: body for c, body in found.items() if not isinstance(body, str)}

    def _dealers(self, holder: int) -> list[int]:
        """The members whose shares a member holds, in the order in which it sends them."""
        shared = set(self._shared)
        return [dealer for dealer in self._circle.holders[holder] if dealer in shared]

    def _shares_by_dealer(self, bodies: Mapping[int, memoryview]) -> dict[int, dict[int, int]]:
        """The shares of each dealer's secret that were returned, by the holder's place."""
        found: dict[int, dict[int, int]] = {dealer: {} for dealer in self._shared}
        for holder, body in bodies.items():
            for at, dealer in enumerate(self._dealers(holder)):
                share = body[at * SHARE_BYTES : (at + 1) * SHARE_BYTES]
                found[dealer][self._circle.place[holder]] = int.from_bytes(share, "big")
        return found

    def _rebuilt(self, shares: Mapping[int, Mapping[int, int]]) -> Blobs:
        """Reconstruct the survivors' seeds and the lost members' mask keys, checked by adverts."""
        found = {}
        trusted: tuple[int, ...] = ()  # places that have given right shares come first
        for dealer, parts in shares.items():
            ordered = {p: parts[p] for p in (*trusted, *parts) if p in parts}
            made = shamir.rebuild(ordered, self._circle.need(dealer), self._fits(dealer))
            if made is None:
                raise self._too_few(
                    f"the secret of client {dealer} cannot be rebuilt, for it or those who hold "
                    "its shares gave wrong ones"
                )
            found[dealer], trusted = made
        return found

    def _fits(self, dealer: int) -> Callable[[bytes], bool]:
        """Whether a rebuilt secret is what its owner advertised at the start."""
        advert = Advert.of(self._adverts[dealer])
        if dealer in self.summed:
            return lambda seed: commitment(self._session, dealer, seed) == advert.commitment
        return lambda key: crypto.public_key(key) == advert.masking

    def _masks(self, secrets: Mapping[int, bytes]) -> list[masks.Mask]:
        """The masks to remove: the survivors' self masks, and their masks with lost members."""
        session, found = self._session, []
        kept = set(self.summed)
        for client, secret in secrets.items():
            if client in kept:
                found.append((masks.self_mask(session, client, secret), -1))
                continue
            for other in self._circle.partners(client, kept):
                public = Advert.of(self._adverts[other]).masking
                key = masks.pair_mask(session, client, secret, other, public)
                if key is None:  # refused at the start
                    raise Rejected(f"secure aggregation: the keys of client {other} are weak")
                found.append((key, -masks.sign(other, client)))
        return found
