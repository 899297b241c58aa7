"""What travels: a JSON header and the arrays' bytes.

A message is ``u32 header length | header | payloads``. The header holds the body (a tree with
numbered places for arrays) and each array's type and shape, so it describes itself and no pickle
is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coterie.door.codec import Codec, Payload, Raw, dtype_name
from coterie.errors import CoterieError
from coterie.tree import Tree, pack, unpack
from coterie.weights import Layout


@dataclass(frozen=True)
class Message:
    """One message, its arrays still apart so that equal ones need to be moved only once."""

    header: bytes
    payloads: tuple[Payload, ...]

    @property
    def size(self) -> int:
        """Its exact length in bytes."""
        return 4 + len(self.header) + sum(len(p) for p in self.payloads)

    def to_bytes(self) -> bytes:
        """The message in one piece."""
        return b"".join([len(self.header).to_bytes(4, "little"), self.header, *self.payloads])

    @staticmethod
    def from_bytes(data: Payload) -> Message:
        """A message from one piece."""
        view = memoryview(data)
        end = 4 + int.from_bytes(view[:4], "little")
        header = bytes(view[4:end])
        payloads = []
        for _, _, length in json.loads(header)["arrays"]:
            payloads.append(view[end : end + length])
            end += length
        if end != len(view):
            raise CoterieError(f"a message of {len(view)} bytes should have {end}")
        return Message(header, tuple(payloads))


Encoded = dict[int, tuple[Tensor, Payload]]
Decoded = dict[tuple[int, str, tuple[int, ...]], tuple[Payload, Tensor]]


@dataclass(frozen=True)
class Wire:
    """Packs and unpacks messages for one model.

    An array that goes to many clients is encoded, and decoded, once for all of them when the
    caller passes a dict to remember it in for as long as the exchange lasts.
    """

    layout: Layout
    codec: Codec = field(default_factory=Raw)

    def pack(self, body: Mapping[str, Tree], encoded: Encoded | None = None) -> Message:
        """A message with this body."""
        packed, tensors = pack(body, self.layout)
        payloads = tuple(self._encode(t, {} if encoded is None else encoded) for t in tensors)
        arrays = [
            [dtype_name(t), list(t.shape), len(p)] for t, p in zip(tensors, payloads, strict=True)
        ]
        header = json.dumps({"body": packed, "arrays": arrays}, separators=(",", ":"))
        return Message(header.encode(), payloads)

    def unpack(self, message: Message, decoded: Decoded | None = None) -> dict[str, Any]:
        """The body of a message."""
        header = json.loads(message.header)
        memory = {} if decoded is None else decoded
        tensors = [
            self._decode(payload, dtype, shape, memory)
            for payload, (dtype, shape, _) in zip(message.payloads, header["arrays"], strict=True)
        ]
        body: dict[str, Any] = unpack(header["body"], tensors, self.layout)
        return body

    def _encode(self, tensor: Tensor, memory: Encoded) -> Payload:
        if id(tensor) not in memory:
            memory[id(tensor)] = (tensor, self.codec.encode(tensor))
        return memory[id(tensor)][1]

    def _decode(self, payload: Payload, dtype: str, shape: list[int], memory: Decoded) -> Tensor:
        key = (id(payload), dtype, tuple(shape))  # Python shares very short bytes objects
        if key not in memory:
            memory[key] = (payload, self.codec.decode(payload, dtype, shape))
        return memory[key][1]
