"""Codecs: how one array becomes bytes and comes back.

``codec("qsgd:levels=7,bucket=512+zstd")`` makes one from its text; ``CODECS`` has them all. Every
codec but ``raw`` acts on arrays of float32 only: others (counts, labels, float64) are few, and
travel as ``raw`` sends them. What a codec draws at random comes from the seed that it is given, so
that the same call makes the same bytes. Numbers are little-endian throughout.

With d numbers of float32, and before ``zstd``, a payload is exactly this long:

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
_NAMES = {torch_type: name for name, (torch_type, _) in _DTYPES.items()}

_CHUNK = 1 << 15
"""Numbers worked on at a time: what they need stays in the cache. A multiple of 8."""


class Codec(Protocol):
    """Turns an array into bytes and back."""

    @property
    def spec(self) -> str:
        """The canonical text from which ``codec`` makes an equal one."""
        ...

    @property
    def exact(self) -> bool:
        """Whether what is decoded is what was encoded, bit for bit."""
        ...

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """The bytes that travel."""
        ...

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The array that arrives; ``CoterieError`` if the payload cannot be one of that shape."""
        ...


class Measured(Codec, Protocol):
    """A codec whose payload has a length that follows from the array's type and shape."""

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """That length in bytes."""
        ...


def dtype_name(array: Tensor) -> str:
    """The two letters that stand for an array's type on the wire."""
    if array.dtype not in _NAMES:
        raise CoterieError(f"arrays of {array.dtype} cannot be sent; use float32 or int64")
    return _NAMES[array.dtype]


@lru_cache(maxsize=256)
def codec(text: str) -> Codec:
    """The codec that a text stands for: a name, its parameters, and perhaps ``+zstd``.

    >>> codec("qsgd").spec
    'qsgd:levels=7,bucket=512'
    >>> codec("topk:share=0.1+zstd:level=9").spec
    'topk:share=0.1+zstd:level=9'
    """
    first, *after = text.split("+")
    if first.partition(":")[0] == "zstd" or len(after) > 1:
        raise ConfigError(f"'{text}': zstd comes once and after another codec, as in 'raw+zstd'")
    plain: Measured = _made(first)
    return _made(after[0], plain) if after else plain


@CODECS.register("raw", "every number as it is: 4 bytes for a float32")
class Raw:
    """Every number as it is, little-endian: four bytes for a float32.

    >>> raw = Raw()
    >>> bytes(raw.encode(torch.tensor([1.0]))).hex()
    '0000803f'
    >>> raw.decode(raw.encode(torch.tensor([1.0, 2.0])), "f4", [2])
    tensor([1., 2.])
    """

    spec = "raw"
    exact = True

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """The array's memory."""
        return array.detach().contiguous().numpy().tobytes()

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The same numbers again."""
        data = _checked(payload, self.length(dtype, shape), self.spec)
        return torch.from_numpy(data.copy().view(_DTYPES[dtype][1])).view(list(shape))

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """So many bytes for each number."""
        if dtype not in _DTYPES:
            raise CoterieError(unknown("type of array", dtype, _DTYPES))
        return _count(shape) * np.dtype(_DTYPES[dtype][1]).itemsize


class Lossy(ABC):
    """A codec of float32 only: arrays of any other type go as ``Raw`` sends them."""

    @property
    def exact(self) -> bool:
        """Numbers change on the way."""
        return False

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical text."""

    @abstractmethod
    def _length(self, count: int) -> int:
        """The bytes of a payload of so many numbers."""

    @abstractmethod
    def _pack(self, numbers: Floats, seed: int) -> Bytes:
        """The payload of these numbers."""

    @abstractmethod
    def _unpack(self, data: Bytes, count: int) -> Floats:
        """The numbers in a payload whose length is right."""

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """The bytes that travel."""
        if array.dtype != torch.float32:
            return Raw().encode(array)
        return self._pack(array.detach().contiguous().view(-1).numpy(), seed).tobytes()

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The array that arrives."""
        if dtype != "f4":
            return Raw().decode(payload, dtype, shape)
        data = _checked(payload, self.length(dtype, shape), self.spec)
        return torch.from_numpy(self._unpack(data, _count(shape))).view(list(shape))

    def length(self, dtype: str, shape: Sequence[int]) -> int:
        """The length of a payload in bytes."""
        return self._length(_count(shape)) if dtype == "f4" else Raw().length(dtype, shape)


@dataclass(frozen=True)
class Half(Lossy):
    """Two bytes a number, rounded to the nearest and to even: ``fp16`` or ``bf16``.

    A number too large for the format is refused, for it would become infinite.

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


@CODECS.register("fp16", "half precision, 2 bytes a number; refuses numbers beyond 65504")
def _fp16() -> Half:
    return Half("fp16")


@CODECS.register("bf16", "the upper half of a float32, 2 bytes a number: its range, 3 digits")
def _bf16() -> Half:
    return Half("bf16")


def _all_is_0(bucket: object) -> object:
    """Of buckets: "all" is one for the whole array, which 0 stands for."""
    return 0 if bucket == "all" else bucket


@CODECS.register(
    "qsgd", "unbiased rounding to `levels` (7) parts of the norm of every `bucket` (512 numbers)"
)
@dataclass(frozen=True)
class Quantised(Lossy):
    """QSGD: every number becomes a multiple of its bucket's norm over ``levels``, at random.

    With N the L2 norm of the bucket, x_j lies between two neighbours among the 2·levels + 1 numbers
    N·ξ/levels, ξ = -levels … levels, and goes to either so that the mean is x_j (the chance is a
    multiple of 2^-24). A number that is such a multiple already stays what it is. Bytes: the norms
    as float32, then the codes ξ + levels, packed (see ``pack``).

    N is the float32 on the wire, not the exact norm, in both directions: any N that is no smaller
    than the largest number keeps the mean, and rounding is monotone, so this one is not smaller.

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
        """The bits of a number: its sign and its level."""
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
        room, dice = np.empty(_CHUNK), np.empty(_CHUNK, np.float32)
        for span, buckets in _tiles(len(numbers), self.bucket):
            tile = numbers[span].reshape(buckets.stop - buckets.start, -1)
            place, die = room[: tile.size].reshape(tile.shape), dice[: tile.size]
            # In float64 x·levels is exact, so that a number on a level is found to lie there.
            np.multiply(tile, float(self.levels), out=place, dtype=np.float64)
            place /= divisors[buckets]
            place += self.levels
            # A float32 die is below 1 by 2^-24 or more: the sum cannot be rounded up to a level.
            draw.random(out=die, dtype=np.float32)
            place += die.reshape(tile.shape)
            codes[span] = place.reshape(-1)  # none is negative, so cutting the fraction is floor
        return np.concatenate([norms.view(np.uint8), pack(codes, self.width)])

    def _norms(self, numbers: Floats) -> Floats:
        squares = np.zeros(self._buckets(len(numbers)))
        room = np.empty(_CHUNK)
        for span, buckets in _tiles(len(numbers), self.bucket):
            tile = room[: span.stop - span.start]
            tile[:] = numbers[span]
            rows = tile.reshape(buckets.stop - buckets.start, -1)
            squares[buckets] += np.einsum("ij,ij->i", rows, rows)
        if not np.isfinite(squares).all():
            raise CoterieError(_NOT_FINITE.format(self.spec))
        with np.errstate(over="ignore"):
            norms = np.sqrt(squares).astype(np.float32)
        if not np.isfinite(norms).all():
            raise CoterieError(
                f"numbers whose norm is {math.sqrt(squares.max()):g}, which float32 cannot hold, "
                f"cannot be sent as {self.spec}; use smaller buckets or raw"
            )
        return norms

    def _unpack(self, data: Bytes, count: int) -> Floats:
        middle = 4 * self._buckets(count)
        norms = data[:middle].copy().view(np.float32)
        codes = unpack(data[middle:], count, self.width)
        if not (np.isfinite(norms).all() and (norms >= 0).all()):
            raise CoterieError(f"a damaged payload of {self.spec}: a norm is negative or no number")
        if count and codes.max() > 2 * self.levels:
            raise CoterieError(f"a damaged payload of {self.spec}: a level is beyond the last")
        steps = (norms.astype(np.float64) / self.levels)[:, None]
        numbers, room = np.empty(count, np.float32), np.empty(_CHUNK)
        for span, buckets in _tiles(count, self.bucket):
            place = room[: span.stop - span.start]
            np.subtract(codes[span], float(self.levels), out=place, dtype=np.float64)
            rows = place.reshape(buckets.stop - buckets.start, -1)
            rows *= steps[buckets]
            numbers[span] = place
        return numbers


@CODECS.register(
    "topk", "the `share` (0.01) of the numbers that are largest in magnitude, the others as 0"
)
@dataclass(frozen=True)
class Largest(Lossy):
    """``topk``: the ⌈share·d⌉ numbers of largest magnitude as they are; the others arrive as 0.

    Of equal magnitudes the first are taken. Bytes: the values as float32 in order of place, then
    where they stand, in whichever is shorter: a bit for every number, or the packed places of
    ⌈log2 d⌉ bits (see ``pack``). Which it is follows from d, so that nothing needs to say it.

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
        """Only if nothing is left out."""
        return self.share == 1

    def kept(self, count: int) -> int:
        """How many of so many numbers travel."""
        return math.ceil(Fraction(repr(self.share)) * count)  # as written: 0.07·100 is 7, not 8

    def _bits_of_place(self, count: int) -> int:
        """The bits of a packed place; 0 if a bit for every number is shorter, or none is needed."""
        width = max(count - 1, 0).bit_length()
        return width if self.kept(count) * width < count and self.kept(count) < count else 0

    def _length(self, count: int) -> int:
        kept, width = self.kept(count), self._bits_of_place(count)
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
        places, width = np.flatnonzero(chosen), self._bits_of_place(count)
        where = pack(places, width) if width else np.packbits(chosen, bitorder="little")
        return np.concatenate([numbers[places].view(np.uint8), where])

    def _unpack(self, data: Bytes, count: int) -> Floats:
        kept, width = self.kept(count), self._bits_of_place(count)
        values = data[: 4 * kept].copy().view(np.float32)
        if kept == count:
            return values
        if width:
            places = unpack(data[4 * kept :], kept, width).astype(np.int64)
        else:
            places = np.flatnonzero(np.unpackbits(data[4 * kept :], count=count, bitorder="little"))
        if len(places) != kept or (np.diff(places, append=count) <= 0).any():
            raise CoterieError(f"a damaged payload of {self.spec}: its places are out of order")
        numbers = np.zeros(count, np.float32)
        numbers[places] = values
        return numbers


@CODECS.register(
    "zstd",
    "after any other, as in qsgd+zstd: its bytes compressed without loss, at `level` (3)",
)
@dataclass(frozen=True)
class Compressed:
    """Another codec's bytes in one Zstandard frame, with its checksum.

    The frame must say that it holds just as many bytes as the other codec needs for the shape: a
    small frame that unfolds into a huge one is refused before any memory is taken.
    """

    inner: Measured
    level: Annotated[int, Field(ge=1, le=22)] = 3

    @property
    def spec(self) -> str:
        """Both texts."""
        return f"{self.inner.spec}+zstd" + (f":level={self.level}" if self.level != 3 else "")

    @property
    def exact(self) -> bool:
        """As exact as what is compressed."""
        return self.inner.exact

    def encode(self, array: Tensor, seed: int = 0) -> Payload:
        """The frame."""
        frame = zstandard.ZstdCompressor(level=self.level, write_checksum=True)
        return frame.compress(self.inner.encode(array, seed))

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The array in the frame."""
        expected = self.inner.length(dtype, shape)
        try:
            stated = zstandard.get_frame_parameters(payload).content_size
            if stated != expected:
                raise CoterieError(_WRONG_LENGTH.format(stated, self.spec, expected))
            opened = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CoterieError(f"a damaged payload of {self.spec}: {error}") from error
        return self.inner.decode(opened, dtype, shape)


def pack(codes: NDArray[np.integer[Any]], width: int) -> Bytes:
    """Whole numbers below 2^width in exactly that many bits each, filled up to a byte at the end.

    First the lowest byte of every number, then the next, as long as there are eight bits; then the
    bits that remain (all of them if ``width`` is below 8), one number after the other, the lowest
    bit first.

    >>> pack(np.array([1, 2, 3]), 4).tobytes().hex()
    '2103'
    """
    planes = codes.view(np.uint8).reshape(len(codes), codes.itemsize)
    whole, rest = divmod(width, 8)
    parts = [planes[:, byte] for byte in range(whole)]
    return np.concatenate([*parts, _squeezed(planes[:, whole], rest)] if rest else parts)


def unpack(data: Bytes, count: int, width: int) -> NDArray[np.unsignedinteger[Any]]:
    """The numbers that ``pack`` made these bytes of.

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
    """The bytes of so many numbers of ``width`` bits."""
    return (count * width + 7) // 8


def _squeezed(codes: Bytes, width: int) -> Bytes:
    """Eight numbers of a byte each are a word of 64 bits; their bits move together in three steps.

    Each step joins neighbours: pairs, then fours, then eights. It is the same few operations on
    every word, whatever the width.
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
    """The three steps back."""
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
    """So many ones at the low end of every lane of 16·joined bits of a word."""
    return np.uint64(sum(((1 << bits) - 1) << lane for lane in range(0, 64, 16 * joined)))


def _tiles(count: int, bucket: int) -> Iterator[tuple[slice, slice]]:
    """Spans that fit the cache, each of some equal buckets or part of one, and which these are."""
    bucket = bucket or max(count, 1)
    together = _CHUNK // bucket  # whole buckets in a span; 0 if one is too large for it
    even = count // bucket * bucket if together else 0
    for start in range(0, even, together * bucket or 1):
        stop = min(start + together * bucket, even)
        yield slice(start, stop), slice(start // bucket, stop // bucket)
    for number in range(even // bucket, -(-count // bucket)):
        end = min((number + 1) * bucket, count)
        for start in range(number * bucket, end, _CHUNK):
            yield slice(start, min(start + _CHUNK, end)), slice(number, number + 1)


_WRONG_LENGTH = "a payload holds {} bytes; {} of this shape takes {}. It was cut short or damaged"
_NOT_FINITE = "numbers that are infinite or not a number cannot be sent as {}; training diverged"


def _count(shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise CoterieError(f"a damaged message: no array has the shape {list(shape)}")
    return math.prod(shape)


def _checked(payload: Payload, length: int, spec: str) -> Bytes:
    """The bytes of a payload, if they are as many as there must be."""
    if len(payload) != length:
        raise CoterieError(_WRONG_LENGTH.format(len(payload), spec, length))
    return np.frombuffer(payload, np.uint8)


def _made(text: str, *inner: Codec) -> Any:
    """The codec that one part of a text names, with the parameters that it gives."""
    name, given = CODECS.split(text.strip())
    after = [each for each in CODECS if "inner" in signature(CODECS[each]).parameters]
    makes = CODECS.find(name) if CODECS.knows(name) else None
    if makes is None or ("inner" in signature(makes).parameters) != bool(inner):
        known = after if inner else [each for each in CODECS if each not in after]
        raise ConfigError(unknown("codec after '+'" if inner else "codec", name, known))
    values: dict[str, Any] = {}
    for item in given.split(",") if text.strip() != name else []:
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
