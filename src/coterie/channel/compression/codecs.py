"""Codecs: encode one array as bytes, and decode it.

``codec("qsgd:levels=7,bucket=512+zstd")`` makes a codec from its text; ``CODECS`` has them all. All
codecs except ``raw`` encode arrays of float32 only; other arrays (counts, labels, float64) are
encoded as by ``raw``. Random choices of a codec come from the seed passed to it, so the same call
gives the same bytes. Numbers are little-endian.

For d numbers of float32, and before ``zstd``, the exact length of a payload is:

=====================  ==========================================================================
``raw``                4d bytes
``fp16``, ``bf16``     2d bytes
``qsgd``               32·⌈d/bucket⌉ + d·(1 + ⌈log2(levels + 1)⌉) bits, in whole bytes
``topk``               32·k + min(d, k·⌈log2 d⌉) bits, in whole bytes, where k = ⌈share·d⌉; 32·d if
                       k = d
=====================  ==========================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from inspect import signature
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from coterie.errors import ConfigError, CoterieError, unknown
from coterie.registry import CODECS
from coterie.seeds import numpy_generator

Payload = bytes | memoryview
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_DTYPES: dict[str, tuple[torch.dtype, type[np.generic]]] = {
    "f4": (torch.float32, np.float32),
    "f2": (torch.float16, np.float16),
    "f8": (torch.float64, np.float64),
    "i8": (torch.int64, np.int64),
    "i4": (torch.int32, np.int32),
    "u1": (torch.uint8, np.uint8),
    "b1": (torch.bool, np.bool_),
}
TYPE_NAMES = {torch_type: name for name, (torch_type, _) in _DTYPES.items()}

_CHUNK = 1 << 15
"""Numbers processed at a time, so that the buffers stay in the cache. A multiple of 8."""


class Codec(Protocol):
    """Encodes arrays as bytes and decodes them."""

    @property
    def spec(self) -> str:
        """The canonical text, from which ``codec`` makes an equal codec."""
        ...

    @property
    def exact(self) -> bool:
        """Whether decoding restores an array bit for bit."""
        ...

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """Encode an array as bytes."""
        ...

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """Decode an array; CoterieError if the payload is invalid for this type and shape."""
        ...


class SizedCodec(Codec, Protocol):
    """A codec whose payload length depends only on the array's type and shape."""

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """The length of a payload in bytes."""
        ...


@lru_cache(maxsize=256)
def codec(text: str) -> Codec:
    """Make a codec from its text: a name, its parameters, and optionally ``+zstd``.

    >>> codec("qsgd").spec
    'qsgd:levels=7,bucket=512'
    >>> codec("topk:share=0.1+zstd:level=9").spec
    'topk:share=0.1+zstd:level=9'
    """
    first, *after = text.split("+")
    if first.partition(":")[0] == "zstd" or len(after) > 1:
        raise ConfigError(f"'{text}': zstd must come once, after another codec, as in 'raw+zstd'")
    plain: SizedCodec = _make(first)
    return _make(after[0], plain) if after else plain


@CODECS.register("raw", "numbers unchanged: 4 bytes for a float32")
class Raw:
    """Numbers unchanged, little-endian: four bytes for a float32.

    >>> raw = Raw()
    >>> bytes(raw.encode(torch.tensor([1.0]))).hex()
    '0000803f'
    >>> raw.decode(raw.encode(torch.tensor([1.0, 2.0])), "f4", [2])
    tensor([1., 2.])
    """

    spec = "raw"
    exact = True

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """The bytes of the array's memory."""
        return array.detach().contiguous().numpy().tobytes()

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The array with these bytes."""
        length = self.length(dtype, shape)
        if len(payload) != length:
            raise CoterieError(_WRONG_LENGTH.format(len(payload), self.spec, length))
        data = np.frombuffer(payload, np.uint8)
        return torch.from_numpy(data.copy().view(_DTYPES[dtype][1])).view(list(shape))

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """The length of a payload in bytes."""
        if dtype not in _DTYPES:
            raise CoterieError(unknown("type of array", dtype, _DTYPES))
        return _count(shape) * np.dtype(_DTYPES[dtype][1]).itemsize


class Lossy(ABC):
    """The base class of lossy codecs, which encode float32 and leave other types to ``Raw``."""

    @property
    def exact(self) -> bool:
        """False: decoded numbers differ from the original ones."""
        return False

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical text."""

    @abstractmethod
    def _length(self, count: int) -> int:
        """The length in bytes of a payload of so many numbers."""

    @abstractmethod
    def _pack(self, numbers: Floats, seed: int) -> Bytes:
        """Encode these numbers."""

    @abstractmethod
    def _unpack(self, data: Bytes, count: int) -> Floats:
        """Decode the numbers of a payload, whose length has been checked."""

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """Encode an array as bytes."""
        if array.dtype != torch.float32:
            return Raw().encode(array)
        return self._pack(array.detach().contiguous().view(-1).numpy(), seed).tobytes()

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """Decode an array."""
        if dtype != "f4":
            return Raw().decode(payload, dtype, shape)
        data = _checked(payload, self.length(dtype, shape), self.spec)
        return torch.from_numpy(self._unpack(data, _count(shape))).view(list(shape))

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """The length of a payload in bytes."""
        return self._length(_count(shape)) if dtype == "f4" else Raw().length(dtype, shape)


@dataclass(frozen=True)
class Half(Lossy):
    """``fp16`` or ``bf16``: two bytes per number, rounded to the nearest, ties to even.

    A number that is too large for the format is refused, because it would become infinite.

    >>> bytes(codec("bf16").encode(torch.tensor([1.0, -2.0]))).hex()
    '803f00c0'
    """

    name: str

    @property
    def spec(self) -> str:
        """The name."""
        return self.name

    @property
    def _kind(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16}[self.name]

    def _length(self, count: int) -> int:
        return 2 * count

    def _pack(self, numbers: Floats, seed: int) -> Bytes:
        exact = torch.from_numpy(numbers)
        rounded = exact.to(self._kind)
        lost = rounded.isinf() & exact.isfinite()
        if lost.any():
            raise CoterieError(
                f"{exact[lost][0].item():g} is too large for {self.name}, which ends at "
                f"{torch.finfo(self._kind).max:g}; use {'bf16' if self.name == 'fp16' else 'raw'}"
            )
        return rounded.view(torch.int16).numpy().view(np.uint8)

    def _unpack(self, data: Bytes, count: int) -> Floats:
        halves = torch.from_numpy(data.copy().view(np.int16)).view(self._kind)
        numbers: Floats = halves.float().numpy()
        return numbers


@CODECS.register("fp16", "half precision, 2 bytes per number; refuses numbers above 65504")
def _fp16() -> Half:
    return Half("fp16")


@CODECS.register("bf16", "the upper half of a float32, 2 bytes per number: same range, 3 digits")
def _bf16() -> Half:
    return Half("bf16")


def _all_is_0(bucket: object) -> object:
    """Read a bucket size: "all" means one bucket for the whole array, stored as 0."""
    return 0 if bucket == "all" else bucket


@CODECS.register(
    "qsgd", "unbiased rounding to `levels` (7) parts of the norm of each `bucket` (512 numbers)"
)
@dataclass(frozen=True)
class Quantised(Lossy):
    """QSGD: rounds each number at random to a multiple of its bucket's norm over ``levels``.

    With N the L2 norm of the bucket, x_j lies between two neighbours among the 2·levels + 1 numbers
    N·ξ/levels, ξ = -levels … levels. It is rounded to one of them at random, such that the mean is
    x_j (with probabilities that are multiples of 2^-24). A number that is already such a multiple
    stays unchanged. Bytes: the norms as float32, then the codes ξ + levels, packed (see ``pack``).

    N is the norm rounded to float32, for both encoding and decoding. Rounding is unbiased for any N
    that is not smaller than the largest number; since rounding is monotone, this one is not.

    >>> grid = codec("qsgd:levels=7")
    >>> bytes(grid.encode(torch.tensor([2.0, -3.0, 6.0]))).hex()  # N = 7; codes 9, 4, 13
    '0000e040490d'
    """

    levels: Annotated[int, Field(ge=1, lt=1 << 15)] = 7
    bucket: Annotated[int, Field(ge=0), BeforeValidator(_all_is_0)] = 512

    @property
    def spec(self) -> str:
        """The name and both parameters."""
        return f"qsgd:levels={self.levels},bucket={self.bucket or 'all'}"

    @property
    def width(self) -> int:
        """The bits per number: its sign and its level."""
        return 1 + self.levels.bit_length()

    def _length(self, count: int) -> int:
        return 4 * self._buckets(count) + packed_length(count, self.width)

    def _buckets(self, count: int) -> int:
        return -(-count // (self.bucket or max(count, 1)))

    def _pack(self, numbers: Floats, seed: int) -> Bytes:
        norms = self._norms(numbers)
        divisors = np.where(norms > 0, norms, 1).astype(np.float64)[:, None]
        draw = numpy_generator(seed)
        kind = np.uint8 if self.width <= 8 else np.uint16
        codes: NDArray[np.unsignedinteger[Any]] = np.empty(len(numbers), kind)
        buffer, uniform = np.empty(_CHUNK), np.empty(_CHUNK, np.float32)
        for span, buckets in _tiles(len(numbers), self.bucket):
            tile = numbers[span].reshape(buckets.stop - buckets.start, -1)
            position, random = buffer[: tile.size].reshape(tile.shape), uniform[: tile.size]
            # In float64 x·levels is exact, so that numbers on a level are recognised as such.
            np.multiply(tile, float(self.levels), out=position, dtype=np.float64)
            position /= divisors[buckets]
            position += self.levels
            # A float32 draw is at most 1 - 2^-24, so the sum cannot be rounded up to a level.
            draw.random(out=random, dtype=np.float32)
            position += random.reshape(tile.shape)
            codes[span] = position.reshape(-1)  # not negative, so truncation is floor
        return np.concatenate([norms.view(np.uint8), pack(codes, self.width)])

    def _norms(self, numbers: Floats) -> Floats:
        squares = np.zeros(self._buckets(len(numbers)))
        buffer = np.empty(_CHUNK)
        for span, buckets in _tiles(len(numbers), self.bucket):
            tile = buffer[: span.stop - span.start]
            tile[:] = numbers[span]
            rows = tile.reshape(buckets.stop - buckets.start, -1)
            squares[buckets] += np.einsum("ij,ij->i", rows, rows)
        if not np.isfinite(squares).all():
            raise CoterieError(_NOT_FINITE.format(self.spec))
        with np.errstate(over="ignore"):
            norms = np.sqrt(squares).astype(np.float32)
        if not np.isfinite(norms).all():
            raise CoterieError(
                f"numbers whose norm is {math.sqrt(squares.max()):g}, too large for float32, "
                f"cannot be sent as {self.spec}; use smaller buckets or raw"
            )
        return norms

    def _unpack(self, data: Bytes, count: int) -> Floats:
        middle = 4 * self._buckets(count)
        norms = data[:middle].copy().view(np.float32)
        codes = unpack(data[middle:], count, self.width)
        if not (np.isfinite(norms).all() and (norms >= 0).all()):
            raise CoterieError(
                f"a damaged payload of {self.spec}: a norm is negative or not a number"
            )
        if count and codes.max() > 2 * self.levels:
            raise CoterieError(f"a damaged payload of {self.spec}: a level is too large")
        steps = (norms.astype(np.float64) / self.levels)[:, None]
        numbers, buffer = np.empty(count, np.float32), np.empty(_CHUNK)
        for span, buckets in _tiles(count, self.bucket):
            values = buffer[: span.stop - span.start]
            np.subtract(codes[span], float(self.levels), out=values, dtype=np.float64)
            rows = values.reshape(buckets.stop - buckets.start, -1)
            rows *= steps[buckets]
            numbers[span] = values
        return numbers


@CODECS.register(
    "topk", "the `share` (0.01) of numbers with the largest magnitude; the others become 0"
)
@dataclass(frozen=True)
class Largest(Lossy):
    """``topk``: the ⌈share·d⌉ numbers of largest magnitude, unchanged; the others become 0.

    Of equal magnitudes the first are taken. Bytes: the values as float32, in the order of their
    indices, then the indices in the shorter of two forms: a bit for every number, or packed indices
    of ⌈log2 d⌉ bits (see ``pack``). The form follows from d and is not stored.

    >>> two = codec("topk:share=0.5")
    >>> two.decode(two.encode(torch.tensor([1.0, -4.0, 0.5, 3.0])), "f4", [4])
    tensor([ 0., -4.,  0.,  3.])
    """

    share: Annotated[float, Field(gt=0, le=1)] = 0.01

    @property
    def spec(self) -> str:
        """The name and the share."""
        return f"topk:share={self.share!r}"

    @property
    def exact(self) -> bool:
        """Whether all numbers are kept."""
        return self.share == 1

    def kept(self, count: int) -> int:
        """How many of ``count`` numbers are kept."""
        return math.ceil(Fraction(repr(self.share)) * count)  # decimal, so that 0.07·100 is 7

    def _index_bits(self, count: int) -> int:
        """The bits of a packed index; 0 if a bit for every number is shorter, or none is needed."""
        width = max(count - 1, 0).bit_length()
        return width if self.kept(count) * width < count and self.kept(count) < count else 0

    def _length(self, count: int) -> int:
        kept, width = self.kept(count), self._index_bits(count)
        if kept == count:
            return 4 * kept
        return 4 * kept + (packed_length(kept, width) if width else packed_length(count, 1))

    def _pack(self, numbers: Floats, seed: int) -> Bytes:
        count, kept = len(numbers), self.kept(len(numbers))
        if kept == count:
            return numbers.view(np.uint8)
        if not np.isfinite(numbers).all():
            raise CoterieError(_NOT_FINITE.format(self.spec))
        size = np.abs(numbers)
        least = np.partition(size, count - kept)[count - kept]
        chosen = size > least
        ties = np.flatnonzero(size == least)
        chosen[ties[: kept - np.count_nonzero(chosen)]] = True
        indices, width = np.flatnonzero(chosen), self._index_bits(count)
        packed = pack(indices, width) if width else np.packbits(chosen, bitorder="little")
        return np.concatenate([numbers[indices].view(np.uint8), packed])

    def _unpack(self, data: Bytes, count: int) -> Floats:
        kept, width = self.kept(count), self._index_bits(count)
        values = data[: 4 * kept].copy().view(np.float32)
        if kept == count:
            return values
        if width:
            indices = unpack(data[4 * kept :], kept, width).astype(np.int64)
        else:
            bits = np.unpackbits(data[4 * kept :], count=count, bitorder="little")
            indices = np.flatnonzero(bits)
        if len(indices) != kept or (np.diff(indices, append=count) <= 0).any():
            raise CoterieError(f"a damaged payload of {self.spec}: its indices are out of order")
        numbers = np.zeros(count, np.float32)
        numbers[indices] = values
        return numbers


@CODECS.register(
    "zstd",
    "after another codec, as in qsgd+zstd: lossless compression of its bytes, at `level` (3)",
)
@dataclass(frozen=True)
class Compressed:
    """``zstd``: another codec's bytes, compressed as one Zstandard frame with a checksum.

    The frame must declare exactly the length that the other codec needs for the shape. So a small
    frame that would decompress to a huge one is refused before any memory is allocated.
    """

    inner: SizedCodec
    level: Annotated[int, Field(ge=1, le=22)] = 3

    @property
    def spec(self) -> str:
        """The text of the other codec, followed by this one's."""
        return f"{self.inner.spec}+zstd" + (f":level={self.level}" if self.level != 3 else "")

    @property
    def exact(self) -> bool:
        """Whether the other codec is exact."""
        return self.inner.exact

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """Encode with the other codec and compress the result."""
        frame = zstandard.ZstdCompressor(level=self.level, write_checksum=True)
        return frame.compress(self.inner.encode(array, seed))

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """Decompress the frame and decode it with the other codec."""
        expected = self.inner.length(dtype, shape)
        try:
            stated = zstandard.get_frame_parameters(payload).content_size
            if stated != expected:
                raise CoterieError(_WRONG_LENGTH.format(stated, self.spec, expected))
            inner = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CoterieError(f"a damaged payload of {self.spec}: {error}") from error
        return self.inner.decode(inner, dtype, shape)


def pack(codes: NDArray[np.integer[Any]], width: int) -> Bytes:
    """Pack whole numbers below 2^width with ``width`` bits each, padded to a whole byte at the end.

    The lowest bytes of all numbers come first, then the next bytes, and so on for all whole bytes;
    then the remaining bits (all of them if ``width`` is below 8), number after number, the lowest
    bit first.

    >>> pack(np.array([1, 2, 3]), 4).tobytes().hex()
    '2103'
    """
    planes = codes.view(np.uint8).reshape(len(codes), codes.itemsize)
    whole, rest = divmod(width, 8)
    parts = [planes[:, byte] for byte in range(whole)]
    return np.concatenate([*parts, _squeezed(planes[:, whole], rest)] if rest else parts)


def unpack(data: Bytes, count: int, width: int) -> NDArray[np.unsignedinteger[Any]]:
    """Unpack what ``pack`` has packed.

    >>> unpack(np.array([0x21, 0x03], np.uint8), 3, 4)
    array([1, 2, 3], dtype=uint8)
    """
    whole, rest = divmod(width, 8)
    parts = [data[byte * count : (byte + 1) * count] for byte in range(whole)]
    if rest:
        parts.append(_spread(data[whole * count :], count, rest))
    if len(parts) == 1:
        return parts[0]
    kinds = {2: np.uint16, 3: np.uint32, 4: np.uint32}
    codes: NDArray[np.unsignedinteger[Any]] = np.zeros(count, kinds.get(len(parts), np.uint64))
    planes = codes.view(np.uint8).reshape(count, codes.itemsize)
    for byte, part in enumerate(parts):
        planes[:, byte] = part
    return codes


def packed_length(count: int, width: int) -> int:
    """The length in bytes of ``count`` packed numbers of ``width`` bits."""
    return (count * width + 7) // 8


def _squeezed(codes: Bytes, width: int) -> Bytes:
    """Pack numbers of fewer than eight bits.

    Eight numbers of a byte each form a word of 64 bits, whose bits are moved together in three
    steps: pairs, then fours, then eights. The operations are the same for every word and width.
    """
    packed = np.empty((-(-len(codes) // 8), width), np.uint8)
    for start in range(0, len(codes), _CHUNK):
        part = codes[start : start + _CHUNK]
        full = np.zeros(-(-len(part) // 8) * 8, np.uint8)
        full[: len(part)] = part
        words = full.view(np.uint64)
        for joined in (1, 2, 4):
            low = _lanes(joined * width, joined)
            gap, shift = np.uint64(joined * (8 - width)), np.uint64(joined * width)
            words = (words & low) | ((words >> gap) & (low << shift))
        packed[start // 8 :][: len(words)] = words.view(np.uint8).reshape(-1, 8)[:, :width]
    return packed.reshape(-1)[: packed_length(len(codes), width)]


def _spread(data: Bytes, count: int, width: int) -> Bytes:
    """Reverse the three steps of ``_squeezed``."""
    padded = np.zeros((-(-count // 8), width), np.uint8)
    padded.reshape(-1)[: len(data)] = data
    codes = np.empty((len(padded), 8), np.uint8)
    for start in range(0, len(padded), _CHUNK // 8):
        part = padded[start : start + _CHUNK // 8]
        full = np.zeros((len(part), 8), np.uint8)
        full[:, :width] = part
        words = full.view(np.uint64)
        for joined in (4, 2, 1):
            low = _lanes(joined * width, joined)
            gap, shift = np.uint64(joined * (8 - width)), np.uint64(joined * width)
            words = (words & low) | ((words & (low << shift)) << gap)
        codes[start : start + len(part)] = words.view(np.uint8)
    return codes.reshape(-1)[:count]


@lru_cache
def _lanes(bits: int, joined: int) -> np.uint64:
    """A word with ``bits`` ones at the low end of each group of 16·joined bits."""
    return np.uint64(sum(((1 << bits) - 1) << lane for lane in range(0, 64, 16 * joined)))


def _tiles(count: int, bucket: int) -> Iterator[tuple[slice, slice]]:
    """Spans that fit into the cache, each with the buckets it consists of, or is a part of."""
    bucket = bucket or max(count, 1)
    together = _CHUNK // bucket  # whole buckets in a span; 0 if a bucket is larger than a span
    even = count // bucket * bucket if together else 0
    for start in range(0, even, together * bucket or 1):
        stop = min(start + together * bucket, even)
        yield slice(start, stop), slice(start // bucket, stop // bucket)
    for number in range(even // bucket, -(-count // bucket)):
        end = min((number + 1) * bucket, count)
        for start in range(number * bucket, end, _CHUNK):
            yield slice(start, min(start + _CHUNK, end)), slice(number, number + 1)


_WRONG_LENGTH = "a payload has {} bytes, but {} needs {} for this shape: it was cut or damaged"
_NOT_FINITE = "NaN and infinite numbers cannot be sent as {}; training diverged"


def _count(shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise CoterieError(f"a damaged message: no array has the shape {list(shape)}")
    return math.prod(shape)


def _checked(payload: Payload, length: int, spec: str) -> Bytes:
    """The bytes of a payload, whose length is checked."""
    if len(payload) != length:
        raise CoterieError(_WRONG_LENGTH.format(len(payload), spec, length))
    return np.frombuffer(payload, np.uint8)


def _make(text: str, *inner: Codec) -> Any:
    """Make a codec from one part of a text, with its parameters."""
    name, parameters = CODECS.split(text.strip())
    after = [other for other in CODECS if "inner" in signature(CODECS[other]).parameters]
    factory = CODECS.find(name) if CODECS.knows(name) else None
    if factory is None or ("inner" in signature(factory).parameters) != bool(inner):
        known = after if inner else [other for other in CODECS if other not in after]
        raise ConfigError(unknown("codec after '+'" if inner else "codec", name, known))
    values: dict[str, Any] = {}
    for item in parameters.split(",") if text.strip() != name else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if key in values:
            raise ConfigError(f"codec '{name}': {key} is given twice")
        values[key] = _number(value)
    return CODECS.make(name, values, **({"inner": inner[0]} if inner else {}))


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
