"""Codecs: how one array becomes bytes and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.errors import CoterieError

Payload = bytes | memoryview

_DTYPES: dict[str, tuple[torch.dtype, type[np.generic]]] = {
    "f4": (torch.float32, np.float32),
    "f8": (torch.float64, np.float64),
    "i8": (torch.int64, np.int64),
    "i4": (torch.int32, np.int32),
    "u1": (torch.uint8, np.uint8),
    "b1": (torch.bool, np.bool_),
}
_NAMES = {torch_type: name for name, (torch_type, _) in _DTYPES.items()}


class Codec(Protocol):
    """Turns an array into bytes and back."""

    def encode(self, array: Tensor) -> Payload:
        """The bytes that travel."""
        ...

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The array that arrives."""
        ...


def dtype_name(array: Tensor) -> str:
    """The two letters that stand for an array's type on the wire."""
    if array.dtype not in _NAMES:
        raise CoterieError(f"arrays of {array.dtype} cannot be sent; use float32 or int64")
    return _NAMES[array.dtype]


class Raw:
    """Every number as it is, little-endian: four bytes for a float32.

    >>> raw = Raw()
    >>> bytes(raw.encode(torch.tensor([1.0]))).hex()
    '0000803f'
    >>> raw.decode(raw.encode(torch.tensor([1.0, 2.0])), "f4", [2])
    tensor([1., 2.])
    """

    def encode(self, array: Tensor) -> Payload:
        """The array's memory."""
        return array.detach().contiguous().numpy().tobytes()

    def decode(self, payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
        """The same numbers again."""
        numbers: np.ndarray = np.frombuffer(payload, dtype=_DTYPES[dtype][1]).copy()
        return torch.from_numpy(numbers).view(list(shape))
