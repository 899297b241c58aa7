"""The messages that both sides use: what a member advertises, and what it signs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.channel.privacy.secagg import crypto
from coterie.channel.privacy.secagg.frames import SIGNATURE, Blob, Step, header, opened, statement
from coterie.channel.privacy.secagg.session import Session
from coterie.channel.privacy.secagg.shamir import SHARE_BYTES

ADVERT = 3 * crypto.KEY
BOX = crypto.NONCE + 2 * SHARE_BYTES + crypto.TAG
"""The length of two encrypted shares: of the mask key, and of the self mask's seed."""


@dataclass(frozen=True)
class Advert:
    """A member's public keys for encrypting shares and for sharing masks, and its commitment."""

    sealing: bytes
    masking: bytes
    commitment: bytes

    @staticmethod
    def of(body: bytes) -> Advert:
        """Decode an advert from its 96 bytes."""
        return Advert(body[:32], body[32:64], body[64:])

    def body(self) -> bytes:
        """Encode the advert as 96 bytes."""
        return self.sealing + self.masking + self.commitment

    def strong(self) -> bool:
        """Whether both keys are strong enough for shared secrets."""
        return crypto.strong(self.sealing) and crypto.strong(self.masking)


def commitment(session: Session, client: int, seed: bytes) -> bytes:
    """A commitment to a seed, by which a reconstructed seed is checked later."""
    return hashlib.sha256(session.context("commitment", client, seed)).digest()


def box_purpose(session: Session, sender: int, receiver: int, transcript: bytes) -> bytes:
    """The context that a box's key and content are bound to, different for each direction."""
    return session.context("shares", sender, receiver, transcript)


def sent(
    session: Session, step: Step, sender: int, identity: bytes, transcript: bytes, body: bytes
) -> bytes:
    """Encode and sign a message from a member to the server."""
    signature = crypto.signed(identity, statement(session, step, sender, transcript, body))
    return header(session, step, sender) + body + signature


def genuine(
    session: Session,
    step: Step,
    sender: int,
    roster: Mapping[int, bytes],
    transcript: bytes,
    body: Blob,
    signature: bytes,
) -> bool:
    """Whether the sender signed this body together with this transcript."""
    signed = statement(session, step, sender, transcript, body)
    return sender in roster and crypto.verifies(roster[sender], signature, signed)


def received(
    session: Session,
    step: Step,
    sender: int,
    roster: Mapping[int, bytes],
    transcript: bytes,
    blob: Blob,
    size: int,
) -> memoryview:
    """Check a message from a member and return its body, which must have this size."""
    reader = opened(session, step, sender, blob)
    body, signature = reader.view(size), reader.take(SIGNATURE)
    reader.done()
    if not genuine(session, step, sender, roster, transcript, body, signature):
        raise reader.refusal("its signature is not the sender's, or not of what it was told")
    return body
