"""The state of a member between two steps, and its encoding as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from coterie.channel.privacy.secagg import crypto
from coterie.channel.privacy.secagg.frames import VERSION, Reader, Step, listed, prefixed, u32
from coterie.channel.privacy.secagg.messages import ADVERT, Advert, commitment
from coterie.channel.privacy.secagg.session import Session
from coterie.channel.privacy.secagg.shamir import SHARE_BYTES
from coterie.errors import CoterieError

_NUMBERS = struct.Struct(">qdII")
_NOTHING = bytes(crypto.KEY)


@dataclass(frozen=True)
class Secrets:
    """The two X25519 keys and the seed of the self mask; zeros before and after their use."""

    sealing: bytes = _NOTHING
    masking: bytes = _NOTHING
    seed: bytes = _NOTHING

    def advert(self, session: Session, client: int) -> Advert:
        """The public part of the secrets."""
        return Advert(
            crypto.public_key(self.sealing),
            crypto.public_key(self.masking),
            commitment(session, client, self.seed),
        )


@dataclass
class Kept:
    """The state of a member between two steps.

    ``held`` has, for each dealer, the member's shares of the dealer's mask key and of its seed.
    ``about`` is a digest of the meaning of the values, as the member was told.
    """

    session: Session
    client: int
    identity: bytes
    due: Step = Step.ADVERTISE
    secrets: Secrets = Secrets()
    adverts: dict[int, bytes] = field(default_factory=dict)
    shared: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    about: bytes = bytes(32)
    held: dict[int, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Encode the state; the result must be kept as secret as the keys in it."""
        secrets = self.secrets
        return b"".join(
            (
                bytes([VERSION]),
                _session_bytes(self.session),
                u32(self.client),
                self.identity,
                bytes([self.due]),
                secrets.sealing + secrets.masking + secrets.seed,
                _table(self.adverts),
                listed(self.shared),
                listed(self.survivors),
                self.about,
                _table(self.held),
            )
        )

    @staticmethod
    def from_bytes(data: bytes) -> Kept:
        """Decode a state."""
        reader = Reader("a member's memory", data)
        if (version := reader.number(1)) != VERSION:
            raise reader.refusal(f"it is of version {version}, not {VERSION}")
        session, client = _session(reader), reader.number()
        identity, due = reader.take(crypto.KEY), reader.number(1)
        if due not in set(Step):
            raise reader.refusal(f"it waits for step {due}, and there is none")
        secrets = Secrets(*(reader.take(crypto.KEY) for _ in range(3)))
        adverts = reader.table(ADVERT)
        shared, survivors = reader.clients(), reader.clients()
        about, held = reader.take(32), reader.table(2 * SHARE_BYTES)
        reader.done()
        rest = adverts, shared, survivors, about, held
        return Kept(session, client, identity, Step(due), secrets, *rest)


def _table(rows: dict[int, bytes]) -> bytes:
    return u32(len(rows)) + b"".join(u32(client) + rows[client] for client in sorted(rows))


def _session_bytes(session: Session) -> bytes:
    names = (session.run, session.attempt, session.slot)
    numbers = (session.round, session.threshold, session.neighbours, session.least)
    return _NUMBERS.pack(*numbers) + b"".join(prefixed(name.encode()) for name in names)


def _session(reader: Reader) -> Session:
    round_, threshold, neighbours, least = _NUMBERS.unpack(reader.take(_NUMBERS.size))
    try:
        run, attempt, slot = (reader.take(reader.count(1)).decode() for _ in range(3))
        return Session(run, round_, attempt, slot, threshold, neighbours, least)
    except (UnicodeDecodeError, CoterieError) as why:
        raise reader.refusal(f"its session is damaged: {why}") from why
