"""What travels: a checksum, a JSON header and the arrays' bytes.

A message is ``u32 header length | u32 checksum | header | payloads``. The header holds the body (a
tree with numbered places for arrays) and each array's type, shape, length and codec, so it
describes itself and no pickle is needed. The checksum is a CRC-32 of everything else.

Whoever wrote a header may have lied: what it says is checked before any array is decoded. All
arrays of a message together may have eight numbers for each byte that came, more than any plain
codec packs into one, and beyond that, for ``topk`` and ``zstd``, as many as 64 models and 2^24.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from coterie.channel.compression.codecs import Codec, Payload, Raw, codec, dtype_name
from coterie.core.tree import Tree, pack, unpack
from coterie.core.weights import Layout
from coterie.errors import CoterieError, WireError

SMALL = 1 << 24  # numbers that an array may hold which is no model
_START = 8  # bytes before the header
_PACKED, _MODELS = 8, 64  # numbers that a byte may stand for; models that may be of hardly any
_ARRAYS, _AXES, _LONGEST = 10_000, 8, 1 << 40
NOT_MODELS = ("gradient", "direction")  # weights of this name are as large as a model, but none


@dataclass(frozen=True)
class Work:
    """What an answer cost its client: seconds as measured, and samples gone through.

    It is known beside the message, for a clock; no byte of it travels.
    """

    seconds: float = 0.0
    samples: float = 0.0


@dataclass(frozen=True)
class Message:
    """One message, its arrays still apart so that equal ones need to be moved only once."""

    header: bytes
    payloads: tuple[Payload, ...]
    work: Work = field(default=Work(), compare=False)

    @property
    def size(self) -> int:
        """Its exact length in bytes."""
        return _START + len(self.header) + self.content

    @property
    def content(self) -> int:
        """The bytes of its arrays alone."""
        return sum(len(p) for p in self.payloads)

    def to_bytes(self) -> bytes:
        """The message in one piece."""
        length = len(self.header).to_bytes(4, "little")
        checksum = zlib.crc32(length)
        for part in (self.header, *self.payloads):
            checksum = zlib.crc32(part, checksum)
        return b"".join([length, checksum.to_bytes(4, "little"), self.header, *self.payloads])

    @staticmethod
    def from_bytes(data: Payload, work: Work | None = None) -> Message:
        """A message from one piece; refused if a byte of it is wrong or missing."""
        view = memoryview(data)
        end = _START + int.from_bytes(view[:4], "little")
        if len(view) < _START or end > len(view):
            raise WireError(f"a message was cut short: there are {len(view)} bytes of it")
        if zlib.crc32(view[_START:], zlib.crc32(view[:4])) != int.from_bytes(view[4:8], "little"):
            raise WireError(f"a message of {len(view)} bytes is damaged: its checksum is wrong")
        header = bytes(view[_START:end])
        payloads = []
        try:
            described = _Header.of(header).arrays
        except CoterieError as error:
            raise WireError(str(error)) from None
        for array in described:
            payloads.append(view[end : end + array.length])
            end += array.length
        if end != len(view):
            raise WireError(f"a message of {len(view)} bytes should have {end}")
        return Message(header, tuple(payloads), work or Work())


def received(data: Payload, work: Work | None = None) -> Message | None:
    """A message that came over a network.

    One that was damaged on its way has its length still, but no header: reading it is refused.
    """
    try:
        return Message.from_bytes(data, work)
    except WireError:
        return Message(b"", (memoryview(data)[_START:],)) if len(data) >= _START else None


@dataclass(frozen=True)
class _Described:
    """What a header says of one array."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    spec: str = "raw"

    @staticmethod
    def of(said: Any) -> _Described:
        dtype, shape, length, *spec = said
        texts, numbers = [dtype, *spec], [length, *shape]
        if not all(type(text) is str for text in texts) or len(spec) > 1:
            raise TypeError("its type and codec are no names")
        if not all(type(n) is int and 0 <= n <= _LONGEST for n in numbers) or len(shape) > _AXES:
            raise ValueError("no array is of that size")
        return _Described(dtype, tuple(shape), length, *spec)

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Header:
    """A message's header, taken apart and made of what it should be made of."""

    body: dict[str, Any]
    arrays: tuple[_Described, ...]

    @staticmethod
    def of(text: bytes) -> _Header:
        with _making_sense("header"):
            tree = json.loads(text)
            body, arrays = tree["body"], tree["arrays"]
            if not isinstance(body, dict) or not isinstance(arrays, list):
                raise TypeError("it has no body")
            if any(key.startswith("$") for key in body):  # what it says must be what is signed
                raise ValueError("its body is not made of plain names")
            if len(arrays) > _ARRAYS:
                raise ValueError(f"it has {len(arrays)} arrays")
            return _Header(body, tuple(_Described.of(said) for said in arrays))

    def check(self, payloads: tuple[Payload, ...], most: int) -> None:
        """Refuse lengths that are not those of the payloads, and more numbers than there can be."""
        if len(payloads) != len(self.arrays):
            raise CoterieError(f"a message has {len(payloads)} arrays, not {len(self.arrays)}")
        for payload, array in zip(payloads, self.arrays, strict=True):
            if len(payload) != array.length:
                raise WireError(f"an array of {array.length} bytes came with {len(payload)}")
        # One that is decoded once for several places counts once.
        came = {id(p): len(p) for p in payloads}
        decoded = {(id(p), a): a.count for p, a in zip(payloads, self.arrays, strict=True)}
        left = most + _PACKED * sum(came.values())
        if sum(decoded.values()) > left:
            raise CoterieError(
                f"a message of {sum(came.values())} bytes of arrays says that these hold "
                f"{sum(decoded.values())} numbers, and {left} is the most that it may"
            )


@contextmanager
def _making_sense(part: str) -> Iterator[None]:
    """What goes wrong in here is the fault of whoever made the message."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise CoterieError(f"a message whose {part} makes no sense ({why})") from None


Choice = tuple[Codec, int]  # how one array is encoded, and the seed of that
Encoded = dict[tuple[int, str], tuple[Tensor, Payload]]
Decoded = dict[tuple[int, str, tuple[int, ...]], tuple[Payload, Tensor]]


@dataclass(frozen=True)
class Wire:
    """Packs and unpacks messages for one model.

    An array that goes to many clients is encoded, and decoded, once for all of them when the
    caller passes a dict to remember it in for as long as the exchange lasts.
    """

    layout: Layout
    plain: Codec = field(default_factory=Raw)

    def pack(
        self,
        body: Mapping[str, Tree],
        encoded: Encoded | None = None,
        choices: Mapping[int, Choice] | None = None,
    ) -> Message:
        """A message with this body; ``choices`` say how tensors, by identity, are encoded."""
        packed, tensors = pack(body, self.layout)
        memory: Encoded = {} if encoded is None else encoded
        payloads, arrays = [], list[list[Any]]()
        for tensor in tensors:
            chosen, seed = (choices or {}).get(id(tensor), (self.plain, 0))
            key = id(tensor), chosen.spec
            if key not in memory:
                memory[key] = (tensor, chosen.encode(tensor, seed))
            payloads.append(memory[key][1])
            told = [] if chosen.spec == "raw" else [chosen.spec]
            arrays.append([dtype_name(tensor), list(tensor.shape), len(payloads[-1]), *told])
        header = json.dumps({"body": packed, "arrays": arrays}, separators=(",", ":"))
        return Message(header.encode(), tuple(payloads))

    def unpack(self, message: Message, decoded: Decoded | None = None) -> dict[str, Any]:
        """The body of a message."""
        if not message.header:
            raise WireError(f"a message of {message.size} bytes was damaged on its way")
        header = _Header.of(message.header)
        header.check(message.payloads, _MODELS * self.layout.size + SMALL)
        memory = {} if decoded is None else decoded
        tensors = []
        for payload, array in zip(message.payloads, header.arrays, strict=True):
            # Python shares short bytes objects, so their identity is not enough.
            key = (id(payload), array.dtype + array.spec, array.shape)
            if key not in memory:
                made = codec(array.spec).decode(payload, array.dtype, array.shape)
                memory[key] = (payload, made)
            tensors.append(memory[key][1])
        with _making_sense("body"):
            body: dict[str, Any] = unpack(header.body, tensors, self.layout)
            if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
                raise TypeError("it says nothing by name")
        return body

    def kinds(self, message: Message) -> dict[str, int]:
        """A message's bytes by what they are for; together they are its size.

        ``model/<layer>`` are weights. A codec that packs layers together has its bytes shared out
        by their numbers of weights. Other arrays go by their names, ``losses`` are the numbers
        beside them, ``header`` is the rest.
        """
        header, found = _Header.of(message.header), dict[str, int]()
        body, lengths = header.body, [array.length for array in header.arrays]

        def add(name: str, packed: Any) -> None:
            if "change" in packed or "plain" in packed:
                for part in [*packed.get("change", []), *packed.get("plain", [])]:
                    add(name, part)
            elif "$weights" in packed and name not in NOT_MODELS:
                part = self.layout.only(packed["of"]) if "of" in packed else self.layout
                for layer, share in shared_out(lengths[packed["$weights"]], part).items():
                    found[f"model/{layer}"] = found.get(f"model/{layer}", 0) + share
            else:
                number = packed["$weights" if "$weights" in packed else "$tensor"]
                found[name] = found.get(name, 0) + lengths[number]

        with _making_sense("body"):
            for name, packed in body.get("arrays", {}).items():
                add(name, packed)
        if metrics := body.get("metrics"):
            found["losses"] = len(json.dumps(metrics, separators=(",", ":")))
        found["header"] = message.size - sum(found.values())
        return found


def without(message: Message, field: str) -> Message:
    """The same message without a field of its body that holds no arrays."""
    if not message.header:  # it was damaged
        return message
    header = json.loads(message.header)
    header["body"].pop(field, None)
    return replace(message, header=json.dumps(header, separators=(",", ":")).encode())


def digest_of(message: Message) -> str:
    """A short name for an order with all that it says; which versions to keep is no part of it."""
    return _digest(message, lambda key: key != "keep")


def content_of(message: Message) -> str:
    """A short name for what an order asks for: its task, config and arrays, whoever gets it."""
    return _digest(message, lambda key: key in ("task", "config", "arrays"))


def _digest(message: Message, counts: Callable[[str], bool]) -> str:
    header = json.loads(message.header)
    body = {key: said for key, said in header["body"].items() if counts(key)}
    digest = hashlib.sha256(json.dumps([body, header["arrays"]]).encode())
    for payload in message.payloads:
        digest.update(payload)
    return digest.hexdigest()


def shared_out(length: int, layout: Layout) -> dict[str, int]:
    """A payload's bytes by layer, in proportion to their weights; they add up exactly.

    >>> from torch import nn
    >>> shared_out(53, Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    {'0': 36, '1': 17}
    """
    sizes: dict[str, int] = {}
    for entry in layout.entries:
        sizes[entry.layer] = sizes.get(entry.layer, 0) + entry.size
    found, passed, given = {}, 0, 0
    for layer, size in sizes.items():
        passed += size
        until = length * passed // max(layout.size, 1)
        found[layer], given = until - given, until
    return found
