"""Masks: streams of uniform numbers modulo 2^64, which are added to a vector or subtracted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from coterie.channel.privacy.secagg.crypto import Keystream, agreed, derived
from coterie.channel.privacy.secagg.session import Session

Ring = NDArray[np.uint64]
Mask = tuple[bytes, int]
"""The key of a mask, and 1 to add it or -1 to subtract it."""

CHUNK = 1 << 16
"""Numbers masked at a time (512 KB), so that this part of the vector stays in the cache."""
_VALUE = 8
_PER_BLOCK = 2  # numbers in a block of AES


def self_mask(session: Session, client: int, seed: bytes) -> bytes:
    """The key of a client's self mask."""
    return derived(seed, session.context("self mask", client))


def pair_mask(
    session: Session, mine: int, secret: bytes, other: int, public: bytes
) -> bytes | None:
    """The key of the mask that two clients share; None if a public key is weak."""
    low, high = min(mine, other), max(mine, other)
    return agreed(secret, public, session.context("pair mask", low, high))


def sign(mine: int, other: int) -> int:
    """1 if a client adds the mask that it shares with another, -1 if it subtracts it."""
    return 1 if mine < other else -1


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def apply(vector: Ring, masks: Sequence[Mask], threads: int = 1) -> None:
    """Add these masks to the vector in place, or subtract them, modulo 2^64.

    Each thread processes one part of the vector with all masks, which is possible because a
    keystream can start at any block. AES and NumPy release Python's lock in the meantime.
    """
    chunks = -(-len(vector) // CHUNK)
    step = max(1, -(-chunks // threads)) * CHUNK
    starts = range(0, len(vector), step)
    if len(starts) < 2:
        return _apply(vector, masks, 0)
    with ThreadPoolExecutor(len(starts)) as pool:
        list(pool.map(lambda at: _apply(vector[at : at + step], masks, at), starts))
    return None


def _apply(part: Ring, masks: Sequence[Mask], start: int) -> None:
    """Apply the masks to one part of a vector, which begins at index ``start``."""
    streams = [(Keystream(key, start // _PER_BLOCK), way) for key, way in masks]
    room = min(CHUNK, len(part)) * _VALUE
    buffer, zeros = bytearray(room + Keystream.SPARE), memoryview(bytes(room))
    for at in range(0, len(part), CHUNK):
        piece = part[at : at + CHUNK]
        drawn = np.frombuffer(buffer, dtype="<u8", count=len(piece))
        for stream, way in streams:
            stream.into(buffer, zeros[: len(piece) * _VALUE])
            (np.add if way > 0 else np.subtract)(piece, drawn, out=piece)
