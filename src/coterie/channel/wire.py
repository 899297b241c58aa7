"""The wire format: messages of a checksum, a JSON header and the bytes of the arrays.

A message is ``u32 header length | u32 checksum | header | payloads``. The header holds the body (a
tree in which arrays are replaced by their numbers) and each array's type, shape, length and codec,
so it describes itself and no pickle is needed. The checksum is a CRC-32 of everything else.

A header may come from a dishonest sender, so it is checked before any array is decoded. All arrays
of a message together may have eight numbers for each byte received, which is more than any plain
codec packs into one, plus, for ``topk`` and ``zstd``, as many as 64 models and 2^24.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from coterie.channel.compression.codecs import TYPE_NAMES, Codec, Payload, Raw, codec
from coterie.core.tree import Tree, pack, unpack
from coterie.core.weights import Layout
from coterie.errors import CoterieError, WireError

SMALL = 1 << 24  # the numbers that arrays other than models may hold
_START = 8  # bytes before the header
_PACKED, _MODELS = 8, 64  # numbers for each byte; models' worth of numbers beyond that
_ARRAYS, _AXES, _LONGEST = 10_000, 8, 1 << 40
NOT_MODELS = ("gradient", "direction")  # names of weights that have a model's size but are not one


@dataclass(frozen=True)
class Work:
    """The work that an answer took: measured seconds, and samples processed.

    Clocks use it. It accompanies the message and is not counted in its bytes.
    """

    seconds: float = 0.0
    samples: float = 0.0


@dataclass(frozen=True)
class Message:
    """A message whose arrays are kept separate, so that equal ones are moved only once."""

    header: bytes
    payloads: tuple[Payload, ...]
    work: Work = field(default=Work(), compare=False)

    @property
    def size(self) -> int:
        """The exact length in bytes."""
        return _START + len(self.header) + self.content

    @property
    def content(self) -> int:
        """The length of the arrays alone, in bytes."""
        return sum(len(p) for p in self.payloads)

    def to_bytes(self) -> bytes:
        """Encode the whole message as bytes."""
        length = len(self.header).to_bytes(4, "little")
        checksum = zlib.crc32(length)
        for part in (self.header, *self.payloads):
            checksum = zlib.crc32(part, checksum)
        return b"".join([length, checksum.to_bytes(4, "little"), self.header, *self.payloads])

    @staticmethod
    def from_bytes(data: Payload, work: Work | None = None) -> Message:
        """Decode a message; refused if a byte is wrong or missing."""
        view = memoryview(data)
        end = _START + int.from_bytes(view[:4], "little")
        if len(view) < _START or end > len(view):
            raise WireError(f"a message was cut short: only {len(view)} bytes of it arrived")
        if zlib.crc32(view[_START:], zlib.crc32(view[:4])) != int.from_bytes(view[4:8], "little"):
            raise WireError(f"a message of {len(view)} bytes is damaged: its checksum is wrong")
        header = bytes(view[_START:end])
        payloads = []
        try:
            _, arrays = _read_header(header)
        except CoterieError as error:
            raise WireError(str(error)) from None
        for array in arrays:
            payloads.append(view[end : end + array.length])
            end += array.length
        if end != len(view):
            raise WireError(f"a message of {len(view)} bytes should have {end}")
        return Message(header, tuple(payloads), work or Work())


def received(data: Payload, work: Work | None = None) -> Message | None:
    """Decode a message that came over a network.

    A message that was damaged on the way becomes one of the same length without a header, which
    ``Wire.unpack`` refuses.
    """
    try:
        return Message.from_bytes(data, work)
    except WireError:
        return Message(b"", (memoryview(data)[_START:],)) if len(data) >= _START else None


@dataclass(frozen=True)
class _Described:
    """A header's description of one array."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    spec: str = "raw"

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def _read_header(text: bytes) -> tuple[dict[str, Any], list[_Described]]:
    """A header, parsed and checked: the body of its message, and what it says of each array."""
    try:
        tree = json.loads(text)
        body, descriptions = tree["body"], tree["arrays"]
        if not isinstance(body, dict) or not isinstance(descriptions, list):
            raise TypeError("it has no body")
        if any(key.startswith("$") for key in body):  # signatures cover plain names only
            raise ValueError("its body has reserved names")
        if len(descriptions) > _ARRAYS:
            raise ValueError(f"it has {len(descriptions)} arrays")
        arrays = []
        for dtype, shape, length, *spec in descriptions:
            names, numbers = [dtype, *spec], [length, *shape]
            if not all(type(name) is str for name in names) or len(spec) > 1:
                raise TypeError("an array's type or codec is not a name")
            possible = all(type(n) is int and 0 <= n <= _LONGEST for n in numbers)
            if not possible or len(shape) > _AXES:
                raise ValueError("an array's shape or length is impossible")
            arrays.append(_Described(dtype, tuple(shape), length, *spec))
    except _INVALID as error:
        raise _invalid("header", error) from None
    return body, arrays


# The errors from reading a body or a header that is not what it should be.
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


def _invalid(part: str, error: Exception) -> CoterieError:
    """The error of a message that cannot be read."""
    why = f"{type(error).__name__}: {str(error)[:200]}"
    return CoterieError(f"a message has an invalid {part} ({why})")


Choice = tuple[Codec, int]  # the codec of an array, and the seed for encoding it
Encoded = dict[tuple[int, str], tuple[Tensor, Payload]]
Decoded = dict[tuple[int, str, tuple[int, ...]], tuple[Payload, Tensor]]


@dataclass(frozen=True)
class Wire:
    """Packs and unpacks messages for one model.

    An array that is sent to many clients is encoded, and decoded, only once if the caller passes a
    dict that serves as a cache for the exchange.
    """

    layout: Layout
    plain: Codec = field(default_factory=Raw)

    def pack(
        self,
        body: Mapping[str, Tree],
        encoded: Encoded | None = None,
        choices: Mapping[int, Choice] | None = None,
    ) -> Message:
        """Encode a body as a message; ``choices`` give codecs for tensors, by ``id``."""
        tensors: list[Tensor] = []
        packed = pack(body, self.layout, tensors)
        cache: Encoded = {} if encoded is None else encoded
        payloads, arrays = [], list[list[Any]]()
        for tensor in tensors:
            chosen, seed = (choices or {}).get(id(tensor), (self.plain, 0))
            key = id(tensor), chosen.spec
            if key not in cache:
                cache[key] = (tensor, chosen.encode(tensor, seed))
            payloads.append(cache[key][1])
            spec = [] if chosen.spec == "raw" else [chosen.spec]
            if tensor.dtype not in TYPE_NAMES:
                raise CoterieError(f"arrays of {tensor.dtype} cannot be sent; use float32 or int64")
            arrays.append([TYPE_NAMES[tensor.dtype], list(tensor.shape), len(payloads[-1]), *spec])
        header = json.dumps({"body": packed, "arrays": arrays}, separators=(",", ":"))
        return Message(header.encode(), tuple(payloads))

    def unpack(self, message: Message, decoded: Decoded | None = None) -> dict[str, Any]:
        """Decode the body of a message."""
        if not message.header:
            raise WireError(f"a message of {message.size} bytes was damaged on its way")
        packed, arrays = _read_header(message.header)
        payloads = message.payloads
        if len(payloads) != len(arrays):
            raise CoterieError(f"a message has {len(payloads)} arrays, not {len(arrays)}")
        for payload, array in zip(payloads, arrays, strict=True):
            if len(payload) != array.length:
                raise WireError(f"an array of {array.length} bytes came with {len(payload)}")
        # An array that is decoded once and used several times counts once.
        came = sum({id(p): len(p) for p in payloads}.values())
        claims = {(id(p), a): a.count for p, a in zip(payloads, arrays, strict=True)}
        claimed, allowed = sum(claims.values()), _MODELS * self.layout.size + SMALL + _PACKED * came
        if claimed > allowed:
            raise CoterieError(
                f"the header of a message with {came} bytes of arrays claims {claimed} numbers; at "
                f"most {allowed} are allowed"
            )
        cache = {} if decoded is None else decoded
        tensors = []
        for payload, array in zip(payloads, arrays, strict=True):
            # Python shares short bytes objects, so their identity is not enough.
            key = (id(payload), array.dtype + array.spec, array.shape)
            if key not in cache:
                tensor = codec(array.spec).decode(payload, array.dtype, array.shape)
                cache[key] = (payload, tensor)
            tensors.append(cache[key][1])
        try:
            body: dict[str, Any] = unpack(packed, tensors, self.layout)
            if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
                raise TypeError("it is not a mapping with names")
        except _INVALID as error:
            raise _invalid("body", error) from None
        return body

    def kinds(self, message: Message) -> dict[str, int]:
        """A message's bytes by kind; they add up to its size.

        ``model/<layer>`` are weights. If a codec packs several layers together, its bytes are
        divided in proportion to their numbers of weights. Other arrays count under their names,
        metrics as ``losses``, and the rest as ``header``.
        """
        body, arrays = _read_header(message.header)
        lengths, sizes = [array.length for array in arrays], dict[str, int]()

        try:
            for name, packed in body.get("arrays", {}).items():
                divided = "change" in packed or "plain" in packed
                parts = [*packed.get("change", []), *packed.get("plain", [])]
                for part in parts if divided else [packed]:
                    number = part["$weights" if "$weights" in part else "$tensor"]
                    shares = {name: lengths[number]}
                    if "$weights" in part and name not in NOT_MODELS:
                        layout = self.layout.only(part["of"]) if "of" in part else self.layout
                        of_layers = shared_out(lengths[number], layout)
                        shares = {f"model/{layer}": share for layer, share in of_layers.items()}
                    for kind, share in shares.items():
                        sizes[kind] = sizes.get(kind, 0) + share
        except _INVALID as error:
            raise _invalid("body", error) from None
        if metrics := body.get("metrics"):
            sizes["losses"] = len(json.dumps(metrics, separators=(",", ":")))
        sizes["header"] = message.size - sum(sizes.values())
        return sizes


def without(message: Message, field: str) -> Message:
    """Remove from a message a field of its body that holds no arrays."""
    if not message.header:  # it was damaged on its way
        return message
    header = json.loads(message.header)
    header["body"].pop(field, None)
    return replace(message, header=json.dumps(header, separators=(",", ":")).encode())


def digest_of(message: Message) -> str:
    """A digest of an order, except for the versions of state that it says to keep."""
    return _digest(message, lambda key: key != "keep")


def content_of(message: Message) -> str:
    """A digest of what an order asks for: its task, config and arrays, but not its client."""
    return _digest(message, lambda key: key in ("task", "config", "arrays"))


def _digest(message: Message, includes: Callable[[str], bool]) -> str:
    header = json.loads(message.header)
    body = {key: value for key, value in header["body"].items() if includes(key)}
    digest = hashlib.sha256(json.dumps([body, header["arrays"]]).encode())
    for payload in message.payloads:
        digest.update(payload)
    return digest.hexdigest()


def shared_out(length: int, layout: Layout) -> dict[str, int]:
    """Divide a payload's bytes among the layers by their numbers of weights; they add up exactly.

    >>> from torch import nn
    >>> shared_out(53, Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    {'0': 36, '1': 17}
    """
    sizes: dict[str, int] = {}
    for entry in layout.entries:
        sizes[entry.layer] = sizes.get(entry.layer, 0) + entry.size
    shares, weights, start = {}, 0, 0
    for layer, size in sizes.items():
        weights += size
        end = length * weights // max(layout.size, 1)
        shares[layer], start = end - start, end
    return shares
