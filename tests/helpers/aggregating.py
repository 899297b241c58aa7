"""Secure aggregation played in one process: members, the server, and whoever meddles between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.secagg import Member, Rejected, Session, Sum
from coterie.channel.privacy.secagg.crypto import public_identity
from coterie.channel.privacy.secagg.frames import Step

SESSION = Session("run", 3, "first", "0")
MESSAGES = tuple(Step)[:9]
"""All nine, as they are sent: members' and the server's in turn."""

Meddle = Callable[[Step, int, bytes], bytes | None]


stream = Entropy().stream
"""Bytes that follow from names, and never the same twice."""


def identity(client: int) -> bytes:
    return hashlib.sha256(f"identity of {client}".encode()).digest()


ROSTER = {client: public_identity(identity(client)) for client in range(64)}


def vectors(clients, length=5, seed=0) -> dict[int, np.ndarray]:
    """Numbers of the whole ring, so that sums wrap."""
    rng = np.random.default_rng(seed)
    return {c: rng.integers(0, 2**64, length, dtype=np.uint64) for c in clients}


def plain(values: Mapping[int, np.ndarray], clients) -> np.ndarray:
    """The sum without any secrecy, by Python's whole numbers."""
    rows = [values[c].tolist() for c in clients]
    sums = [sum(column) % 2**64 for column in zip(*rows, strict=True)]
    return np.array(sums, dtype=np.uint64)


@dataclass
class Play:
    """One attempt: ``pending`` are the messages of the step ``at``, sent but not yet delivered.

    ``lost`` says who is gone before sending which step, ``meddle`` what becomes of each message on
    its way (None: it never arrives).
    """

    session: Session
    values: Mapping[int, np.ndarray]
    seed: object = 0
    meddle: Meddle = lambda step, client, blob: blob
    lost: Mapping[Step, Any] = field(default_factory=dict)
    reopen: bool = False
    least: int = 2

    def __post_init__(self) -> None:
        self.draws = {c: stream(self.seed, c) for c in self.values}
        self.members = {
            c: Member(self.session, c, identity(c), ROSTER, self.draws[c]) for c in self.values
        }
        length = len(next(iter(self.values.values())))
        self.sum = Sum(self.session, ROSTER, length, self.least)
        self.said: dict[tuple[Step, int], bytes] = {}
        self.refused: dict[int, str] = {}
        self.total: np.ndarray | None = None
        self.at = Step.ADVERTISE
        self.pending = self._answers(dict.fromkeys(self.members, b""))

    def to(self, step: Step) -> Play:
        """Go on until this step's messages are sent."""
        while self.at < step:
            self.advance()
        return self

    def end(self) -> Play:
        """Go on to the end; ``total`` is the sum."""
        self.to(Step.UNMASK).advance()
        return self

    def advance(self) -> None:
        """Deliver what is pending, and let the receivers answer."""
        here = {c: self.meddle(self.at, c, blob) for c, blob in self.pending.items()}
        here = {c: blob for c, blob in here.items() if blob is not None}
        after = Step(self.at + 1)
        if self.at == Step.UNMASK:
            self.total = self.sum.total(here)
        elif self.at % 2:  # from members to the server
            self.at, self.pending = after, getattr(self.sum, after.name.lower())(here)
        else:
            self.at, self.pending = after, {}
            self.pending = self._answers(here)
        self.said |= {(self.at, c): blob for c, blob in self.pending.items()}

    def _answers(self, told: Mapping[int, bytes]) -> dict[int, bytes]:
        """What those who are not lost before this step say to what they were told."""
        answers = {}
        for client in told.keys() - set(self.lost.get(self.at, ())):
            try:
                answers[client] = self._answer(client, told[client])
            except Rejected as why:
                self.refused[client] = str(why)
        return answers

    def _answer(self, client: int, told: bytes) -> bytes:
        if self.reopen:
            kept = self.members[client].to_bytes()
            self.members[client] = Member.from_bytes(kept, ROSTER, self.draws[client])
        member = self.members[client]
        if self.at == Step.ADVERTISE:
            return member.advertise()
        if self.at == Step.MASK:
            return member.mask(told, self.values[client])
        return getattr(member, self.at.name.lower())(told)
