"""The client's side of secure aggregation: one member in one attempt at one sum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.channel.privacy.secagg import crypto, masks, shamir
from coterie.channel.privacy.secagg.frames import SIGNATURE, Reader, Rejected, Step, opened
from coterie.channel.privacy.secagg.member_state import Kept, Secrets
from coterie.channel.privacy.secagg.messages import ADVERT, BOX, Advert, box_purpose, genuine, sent
from coterie.channel.privacy.secagg.session import Circle, Session
from coterie.channel.privacy.secagg.shamir import SHARE_BYTES
from coterie.errors import ConfigError

_FOLLOWS = {
    Step.ADVERTISE: Step.SHARE,
    Step.SHARE: Step.MASK,
    Step.MASK: Step.CONFIRM,
    Step.CONFIRM: Step.UNMASK,
    Step.UNMASK: Step.OVER,
}


class Member:
    """A client in one attempt; its five steps come in this order and once each.

    Every step but the first takes the server's answer to the one before, and returns what goes to
    the server. A message that is not what it should be is ``Rejected``, and ends the attempt:
    nothing is answered after it. Secrets are wiped when their last step is over. Whoever keeps a
    member as bytes must never go back to earlier ones: two answers to one step could tell what
    each alone hides.

    Args:
        session: The attempt, as the server and all other members know it.
        client: Who this is.
        identity: Its Ed25519 private seed, 32 bytes.
        roster: The Ed25519 public keys of all clients.
        random: So many random bytes, of the operating system unless this is a simulation.
    """

    def __init__(
        self,
        session: Session,
        client: int,
        identity: bytes,
        roster: Mapping[int, bytes],
        random: crypto.Random,
    ) -> None:
        if roster.get(client) != crypto.public_identity(identity):
            raise ConfigError(
                f"the identity of client {client} does not belong to its public key in the roster"
            )
        self._kept = Kept(session, client, identity)
        self._roster, self._random = roster, random

    @property
    def run(self) -> str:
        """The name of the run that this sum belongs to, including what was agreed for it."""
        return self._kept.session.run

    @property
    def members(self) -> int:
        """The number of clients that take part, according to the keys received."""
        return len(self._kept.adverts)

    @property
    def shared(self) -> tuple[int, ...]:
        """The clients that may be in the sum, which have shared their keys."""
        return self._kept.shared

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients over which this member has confirmed the sum."""
        return self._kept.survivors

    def advertise(self) -> bytes:
        """Draw fresh keys, and send them with a commitment to the seed of the self mask."""
        self._begin(Step.ADVERTISE)
        kept = self._kept
        kept.secrets = Secrets(*(self._random(crypto.KEY) for _ in range(3)))
        body = kept.secrets.advert(kept.session, kept.client).body()
        return self._answer(Step.ADVERTISE, kept.session.digest, body)

    def share(self, keys: bytes) -> bytes:
        """Send shares of the mask key and of the seed, encrypted for each neighbour."""
        self._begin(Step.SHARE)
        reader = self._opened(Step.KEYS, keys)
        self._kept.adverts = self._read_adverts(reader)
        circle = self._circle()
        if len(circle.members) < circle.threshold:
            raise reader.refusal(f"it has only {len(circle.members)} members")
        dealt = self._dealt(circle)
        self._kept.held[self._kept.client] = dealt.pop(self._kept.client)
        boxes = [self._box(circle, other, shares, reader) for other, shares in dealt.items()]
        return self._answer(Step.SHARE, circle.transcript, b"".join(boxes))

    def mask(
        self,
        shares: bytes,
        values: NDArray[Any] | Callable[[], NDArray[Any]],
        about: bytes = b"",
    ) -> bytes:
        """The values, 64-bit integers, hidden by the self mask and a mask with each neighbour.

        ``about`` says what they are; all must have been told the same, or nothing is unmasked. If
        ``values`` is a function, it is called once the shares have been found to be in order.
        """
        row = None if callable(values) else _row(values)
        self._begin(Step.MASK)
        reader = self._opened(Step.SHARES, shares)
        circle = self._circle()
        self._kept.shared = self._read_shared(reader, circle)
        self._kept.held |= self._read_boxes(reader, circle)
        row = _row(values()) if callable(values) else row
        vector = np.ascontiguousarray(row).view(np.uint64).astype("<u8", copy=True)
        masks.apply(vector, self._masks(circle, reader))
        self._kept.secrets, self._kept.about = Secrets(), hashlib.sha256(about).digest()
        return self._answer(Step.MASK, self._told(circle), vector.tobytes())

    def confirm(self, survivors: bytes) -> bytes:
        """Sign exactly this set of survivors; no other set is signed later."""
        self._begin(Step.CONFIRM)
        reader = self._opened(Step.SURVIVORS, survivors)
        found = reader.clients()
        reader.done()
        if self._kept.client not in found:
            raise reader.refusal("this client gave its values, but is not among the survivors")
        if not set(found) <= set(self._kept.shared):
            raise reader.refusal("some survivors never shared their keys")
        circle = self._circle()
        if short := circle.shortfall(self._kept.shared, found) or circle.parted(found):
            raise reader.refusal(short)
        self._kept.survivors = found
        return self._answer(Step.CONFIRM, self._final(circle), b"")

    def unmask(self, confirmations: bytes) -> bytes:
        """Send one share for each neighbour: of a survivor's seed or a lost member's mask key."""
        self._begin(Step.UNMASK)
        reader = self._opened(Step.CONFIRMATIONS, confirmations)
        circle = self._circle()
        self._check_confirmations(reader, circle)
        survivors, held = set(self._kept.survivors), self._kept.held
        self._kept.held = {}
        body = [
            held[dealer][SHARE_BYTES:] if dealer in survivors else held[dealer][:SHARE_BYTES]
            for dealer in sorted(held)
        ]
        return self._answer(Step.UNMASK, self._final(circle), b"".join(body))

    def to_bytes(self) -> bytes:
        """Encode the member's state between two steps; it contains its secrets."""
        return self._kept.to_bytes()

    @staticmethod
    def from_bytes(data: bytes, roster: Mapping[int, bytes], random: crypto.Random) -> Member:
        """Restore a member from its state."""
        kept = Kept.from_bytes(data)
        member = Member(kept.session, kept.client, kept.identity, roster, random)
        member._kept = kept
        return member

    def _begin(self, step: Step) -> None:
        """Refuse a step that is not due; each step accepts only one message, valid or not."""
        if self._kept.due != step:
            raise Rejected(
                f"secure aggregation: client {self._kept.client} was asked to {step.name.lower()}, "
                f"but is at '{self._kept.due.name.lower()}'; each step comes once and in order"
            )
        self._kept.due = Step.OVER

    def _answer(self, step: Step, transcript: bytes, body: bytes) -> bytes:
        kept = self._kept
        kept.due = _FOLLOWS[step]
        return sent(kept.session, step, kept.client, kept.identity, transcript, body)

    def _opened(self, step: Step, blob: bytes) -> Reader:
        return opened(self._kept.session, step, self._kept.client, blob)

    def _circle(self) -> Circle:
        return Circle(self._kept.session, self._kept.adverts)

    def _told(self, circle: Circle) -> bytes:
        """The context of the values: the keys, the members that shared, and their meaning."""
        return circle.agreed(circle.transcript + self._kept.about, "shared", self._kept.shared)

    def _final(self, circle: Circle) -> bytes:
        """The context that is signed at the end: the keys, the members that shared, survivors."""
        return circle.agreed(self._told(circle), "survivors", self._kept.survivors)

    def _signed(self, step: Step, client: int, transcript: bytes, body: bytes, by: bytes) -> bool:
        return genuine(self._kept.session, step, client, self._roster, transcript, body, by)

    def _read_adverts(self, reader: Reader) -> dict[int, bytes]:
        """Read the keys of all members, each signed by its owner, including this client's own."""
        found = reader.table(ADVERT + SIGNATURE)
        reader.done()
        session, mine = self._kept.session, self._kept.client
        for client, entry in found.items():
            body, signature = entry[:ADVERT], entry[ADVERT:]
            if not self._signed(Step.ADVERTISE, client, session.digest, body, signature):
                raise reader.refusal(f"the keys of client {client} are not signed by it")
        adverts = {client: entry[:ADVERT] for client, entry in found.items()}
        if adverts.get(mine) != self._kept.secrets.advert(session, mine).body():
            raise reader.refusal("this client's own keys are missing, or differ from what it sent")
        return adverts

    def _dealt(self, circle: Circle) -> dict[int, bytes]:
        """For each holder, its share of the mask key, followed by its share of the seed."""
        mine, secrets = self._kept.client, self._kept.secrets
        holders, need = circle.holders[mine], circle.need(mine)
        places = [circle.place[holder] for holder in holders]
        key, seed = (
            shamir.split(secret, need, places, self._random)
            for secret in (secrets.masking, secrets.seed)
        )
        return {
            holder: b"".join(part[place].to_bytes(SHARE_BYTES, "big") for part in (key, seed))
            for holder, place in zip(holders, places, strict=True)
        }

    def _box(self, circle: Circle, other: int, shares: bytes, reader: Reader) -> bytes:
        purpose = box_purpose(self._kept.session, self._kept.client, other, circle.transcript)
        key = self._box_key(other, purpose, reader)
        return crypto.sealed(key, self._random(crypto.NONCE), shares, purpose)

    def _box_key(self, other: int, purpose: bytes, reader: Reader) -> bytes:
        public = Advert.of(self._kept.adverts[other]).sealing
        key = crypto.agreed(self._kept.secrets.sealing, public, purpose)
        if key is None:
            raise reader.refusal(f"the keys of client {other} are weak")
        return key

    def _read_shared(self, reader: Reader, circle: Circle) -> tuple[int, ...]:
        """Read the set of members that have shared: large enough, and including this one."""
        found = reader.clients()
        if self._kept.client not in found:
            raise reader.refusal("this client shared its keys, but is not among those who did")
        if not set(found) <= set(circle.members):
            raise reader.refusal("some who shared keys never advertised any")
        if short := circle.shortfall(found, found):
            raise reader.refusal(short)
        return found

    def _read_boxes(self, reader: Reader, circle: Circle) -> dict[int, bytes]:
        """Read the shares that each neighbour made for this client."""
        found, mine = {}, self._kept.client
        for dealer in circle.partners(mine, set(self._kept.shared)):
            purpose = box_purpose(self._kept.session, dealer, mine, circle.transcript)
            key = self._box_key(dealer, purpose, reader)
            shares = crypto.unsealed(key, reader.take(BOX), purpose)
            if shares is None:
                raise reader.refusal(
                    f"the shares of client {dealer} were changed, or are not for this client"
                )
            found[dealer] = shares
        reader.done()
        return found

    def _masks(self, circle: Circle, reader: Reader) -> list[masks.Mask]:
        session, mine, secrets = self._kept.session, self._kept.client, self._kept.secrets
        found = [(masks.self_mask(session, mine, secrets.seed), 1)]
        for other in circle.partners(mine, set(self._kept.shared)):
            public = Advert.of(self._kept.adverts[other]).masking
            key = masks.pair_mask(session, mine, secrets.masking, other, public)
            if key is None:
                raise reader.refusal(f"the keys of client {other} are weak")
            found.append((key, masks.sign(mine, other)))
        return found

    def _check_confirmations(self, reader: Reader, circle: Circle) -> None:
        """Refuse unless enough survivors signed the same set as this client."""
        signatures = reader.table(SIGNATURE)
        reader.done()
        if len(signatures) < circle.threshold:
            raise reader.refusal(f"only {len(signatures)} confirm, {circle.threshold} needed")
        final, survivors = self._final(circle), set(self._kept.survivors)
        for client, by in signatures.items():
            if client not in survivors or not self._signed(Step.CONFIRM, client, final, b"", by):
                raise reader.refusal(f"client {client} did not confirm the same survivors")


def _row(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype not in (np.dtype(np.int64), np.dtype(np.uint64)) or values.ndim != 1:
        raise ValueError(f"mask() takes one row of int64 or uint64, not of {values.dtype}")
    return values
