"""The frame of all messages, with fixed lengths and byte order, bound to a session and a client.

``version u8 | step u8 | digest of the session, 32 bytes | client u32 | body``, big-endian. The
client is the sender of an upload and the receiver of a download. Uploads end with an Ed25519
signature. Lists begin with their length as u32; clients are u32 in rising order. So each message
has only one encoding, whose length does not depend on random values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from itertools import pairwise

from coterie.channel.privacy.secagg.session import Session
from coterie.errors import CoterieError

VERSION = 1
SIGNATURE = 64

Blob = bytes | bytearray | memoryview


class Rejected(CoterieError):
    """A message of secure aggregation is invalid, or comes at the wrong step."""


class TooFew(CoterieError):
    """Too few clients are left for a secure sum; the attempt ends, and nothing is revealed."""


class Step(IntEnum):
    """The numbers of the messages: odd for uploads, even for downloads."""

    ADVERTISE = 1
    KEYS = 2
    SHARE = 3
    SHARES = 4
    MASK = 5
    SURVIVORS = 6
    CONFIRM = 7
    CONFIRMATIONS = 8
    UNMASK = 9
    OVER = 10


def header(session: Session, step: Step, client: int) -> bytes:
    """The header of a message."""
    return bytes([VERSION, step]) + session.digest + u32(client)


def u32(number: int) -> bytes:
    """Encode a number as four bytes."""
    return number.to_bytes(4, "big")


def prefixed(content: bytes) -> bytes:
    """Prefix bytes with their length."""
    return u32(len(content)) + content


def listed(clients: Iterable[int]) -> bytes:
    """Encode a list of clients."""
    ordered = sorted(clients)
    return u32(len(ordered)) + b"".join(map(u32, ordered))


def statement(session: Session, step: Step, sender: int, transcript: bytes, *body: Blob) -> bytes:
    """What a sender signs: its id, the step, the body, and a transcript of what it was sent."""
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return session.context("signed", int(step), sender, transcript, digest.digest())


class Reader:
    """Parses a message, and refuses one that is too short or too long."""

    def __init__(self, what: str, blob: Blob) -> None:
        self._what = what
        self._rest = memoryview(blob)

    def refusal(self, why: str) -> Rejected:
        """The error for this message."""
        return Rejected(f"secure aggregation: the message ({self._what}) is refused: {why}")

    def view(self, count: int) -> memoryview:
        """The next bytes, without a copy."""
        if count > len(self._rest):
            raise self.refusal(f"it is {count - len(self._rest)} bytes too short")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return bytes(self.view(count))

    def number(self, size: int = 4) -> int:
        """The next bytes as a number."""
        return int.from_bytes(self.view(size), "big")

    def count(self, size: int) -> int:
        """The length of a list whose entries have this size."""
        count = self.number()
        if count * size > len(self._rest):
            raise self.refusal(f"a list of {count} entries does not fit into it")
        return count

    def clients(self) -> tuple[int, ...]:
        """A list of clients."""
        return tuple(self.table(0))

    def rising(self, clients: tuple[int, ...]) -> None:
        """Refuse clients that are out of order or named twice."""
        if any(a >= b for a, b in pairwise(clients)):
            raise self.refusal("its clients are not in rising order")

    def table(self, size: int) -> dict[int, bytes]:
        """A list of clients, with ``size`` bytes for each."""
        rows = [(self.number(), self.take(size)) for _ in range(self.count(4 + size))]
        self.rising(tuple(client for client, _ in rows))
        return dict(rows)

    def done(self) -> None:
        """Refuse a message that has bytes left."""
        if self._rest:
            raise self.refusal(f"it is {len(self._rest)} bytes too long")


def opened(session: Session, step: Step, client: int, blob: Blob) -> Reader:
    """Check that a message's header has this step, session and client; return the rest."""
    reader = Reader(f"client {client}, {step.name.lower()}", blob)
    if (version := reader.number(1)) != VERSION:
        raise reader.refusal(f"it is of version {version}, not {VERSION}")
    if (number := reader.number(1)) != step:
        raise reader.refusal(f"it is of step {number}, not {int(step)}")
    if reader.take(len(session.digest)) != session.digest:
        raise reader.refusal("it belongs to another session")
    if (owner := reader.number()) != client:
        raise reader.refusal(f"it belongs to client {owner}")
    return reader
