"""How a message of ours travels as one of Flower's, and what need not travel again.

The header and what it is about go in a config record, each array as bytes under its digest. Flower
moves equal arrays of an exchange once. Those that a client got earlier in the same round are not
sent to it again: it is told their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message, Work
from coterie.errors import WireError

HEAD, ARRAYS = "head", "arrays"
FORMAT = 1  # of these packets; another one is refused by name


@dataclass
class Digests:
    """The digests of arrays, each computed once while it lives."""

    _known: dict[int, tuple[Payload, str]] = field(default_factory=dict)

    def of(self, payload: Payload) -> str:
        """A name for these bytes."""
        if id(payload) not in self._known:
            self._known[id(payload)] = (payload, hashlib.sha256(payload).hexdigest())
        return self._known[id(payload)][1]

    def clear(self) -> None:
        """Forget them all."""
        self._known.clear()


@dataclass(frozen=True)
class Packet:
    """A message with what it is: an order, a question, or an answer, in which run."""

    kind: str
    run: str
    message: Message
    told: Mapping[str, Any] = field(default_factory=dict)  # plain values beside it


def sealed(packet: Packet, digests: Digests, has: Collection[str] = ()) -> RecordDict:
    """The parcel for a receiver that ``has`` the arrays of these digests."""
    message = packet.message
    names = [digests.of(p) for p in message.payloads]
    head: dict[str, Any] = {
        "format": FORMAT,
        "kind": packet.kind,
        "run": packet.run,
        "header": message.header,
        "digests": names,
        "seconds": float(message.work.seconds),
        "samples": float(message.work.samples),
        **packet.told,
    }
    arrays = {}
    for name, payload in zip(names, message.payloads, strict=True):
        if len(payload) and name not in has:
            arrays[name] = Array("uint8", (len(payload),), "coterie", bytes(payload))
    return RecordDict({HEAD: ConfigRecord(head), ARRAYS: ArrayRecord(arrays)})


def opened(content: RecordDict, has: Mapping[str, Payload]) -> tuple[Packet, dict[str, Payload]]:
    """The parcel and the arrays that came in it; WireError if it is none of ours.

    An array that the receiver should have, and has not, is a KeyError with its digest.
    """
    try:
        head: dict[str, Any] = dict(content[HEAD])
        if head.pop("format") != FORMAT:
            raise WireError("a message of another version of Coterie: install the server's version")
        came: dict[str, Payload] = {}
        arrays: dict[str, Any] = dict(content[ARRAYS])
        for name, array in arrays.items():
            came[name] = array.data
            if hashlib.sha256(array.data).hexdigest() != name:
                raise WireError("an array is not what its digest says")
        names: list[str] = list(head.pop("digests"))
        header = head.pop("header")
        work = Work(float(head.pop("seconds")), float(head.pop("samples")))
        kind, run = head.pop("kind"), head.pop("run")
        if not isinstance(header, bytes) or not all(
            isinstance(t, str) for t in (kind, run, *names)
        ):
            raise TypeError("its head is made otherwise")
    except WireError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WireError(f"a message that is none of Coterie's: {error!r}") from None
    empty = hashlib.sha256(b"").hexdigest()
    found = {**has, **came, empty: b""}
    return Packet(kind, run, Message(header, tuple(found[n] for n in names), work), head), came
