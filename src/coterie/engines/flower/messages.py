"""Coterie's messages as Flower's, without the arrays that a client already has.

The header and the packet's other fields become a config record, each array a record of bytes under
its digest. Flower sends equal arrays of an exchange once. Of arrays that a client received earlier
in the same round, only the digests are sent again.
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
FORMAT = 1  # of the packets; those of another format are refused


@dataclass
class Digests:
    """The digests of arrays, each computed once."""

    _known: dict[int, tuple[Payload, str]] = field(default_factory=dict)

    def of(self, payload: Payload) -> str:
        """The SHA-256 of these bytes, as hexadecimal digits."""
        if id(payload) not in self._known:
            self._known[id(payload)] = (payload, hashlib.sha256(payload).hexdigest())
        return self._known[id(payload)][1]

    def clear(self) -> None:
        """Forget all digests."""
        self._known.clear()


@dataclass(frozen=True)
class Packet:
    """A message with its kind (such as order, question or answer) and the run it belongs to."""

    kind: str
    run: str
    message: Message
    told: Mapping[str, Any] = field(default_factory=dict)  # further plain values


def sealed(packet: Packet, digests: Digests, has: Collection[str] = ()) -> RecordDict:
    """Encode a packet for a receiver that ``has`` the arrays with these digests."""
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
    """Decode a packet; return it and the arrays that came with it.

    Raises WireError if it is not a valid packet, and KeyError with the digest of an array that
    was left out and that the receiver does not have.
    """
    try:
        head: dict[str, Any] = dict(content[HEAD])
        if head.pop("format") != FORMAT:
            raise WireError(
                "a message from another version of Coterie: install the server's version"
            )
        received: dict[str, Payload] = {}
        arrays: dict[str, Any] = dict(content[ARRAYS])
        for name, array in arrays.items():
            received[name] = array.data
            if hashlib.sha256(array.data).hexdigest() != name:
                raise WireError("an array does not have the digest that it was sent under")
        names: list[str] = list(head.pop("digests"))
        header = head.pop("header")
        work = Work(float(head.pop("seconds")), float(head.pop("samples")))
        kind, run = head.pop("kind"), head.pop("run")
        if not isinstance(header, bytes) or not all(
            isinstance(t, str) for t in (kind, run, *names)
        ):
            raise TypeError("its head has values of the wrong type")
    except WireError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WireError(f"this is not a message of Coterie: {error!r}") from None
    empty = hashlib.sha256(b"").hexdigest()
    known = {**has, **received, empty: b""}
    return Packet(kind, run, Message(header, tuple(known[n] for n in names), work), head), received
