"""Shamir's shares of 32 secret bytes, over the smallest prime field that holds them all.

A secret is the value at 0 of a random polynomial of degree threshold - 1; a share is its value at
the holder's place. Any ``threshold`` shares give the polynomial back, and fewer tell nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

PRIME = 2**256 + 297
SHARE_BYTES = 33
_DRAWN = 48  # bytes for one element: 128 bits more than needed, so that the remainder is uniform
_SHUFFLES = 200


def split(
    secret: bytes, threshold: int, places: Sequence[int], random: Callable[[int], bytes]
) -> dict[int, int]:
    """A share for each place; places are distinct and at least 1.

    >>> shares = split(bytes(31) + b"!", 2, [1, 2, 3], lambda count: bytes(count - 1) + bytes([5]))
    >>> shares
    {1: 38, 2: 43, 3: 48}
    """
    drawn = random(_DRAWN * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[at : at + _DRAWN], "big") % PRIME
        for at in range(0, len(drawn), _DRAWN)
    ]
    return {place: _value(coefficients, place, int.from_bytes(secret, "big")) for place in places}


def _value(coefficients: Sequence[int], place: int, constant: int) -> int:
    """The polynomial at a place, by Horner's rule; the highest coefficient comes first."""
    value = 0
    for coefficient in coefficients:
        value = (value + coefficient) * place % PRIME
    return (value + constant) % PRIME


@lru_cache(maxsize=1024)
def weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """By how much each place's share counts for the value at 0: Lagrange's weights.

    Secrets whose shares the same holders give have the same, so they are kept.
    """
    found = []
    for mine in places:
        above = below = 1
        for other in places:
            if other != mine:
                above = above * other % PRIME
                below = below * (other - mine) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)


def combine(shares: Mapping[int, int]) -> bytes | None:
    """The secret of exactly as many shares as the threshold; None if they are of no secret."""
    counts = weights(tuple(shares))
    value = sum(w * share for w, share in zip(counts, shares.values(), strict=True)) % PRIME
    return value.to_bytes(32, "big") if value < 1 << 256 else None


def rebuild(
    shares: Mapping[int, int], threshold: int, fits: Callable[[bytes], bool]
) -> tuple[bytes, tuple[int, ...]] | None:
    """The secret that ``fits``, and the places that gave it, though some shares may be wrong.

    The first ``threshold`` shares are tried first, then others while there are more than enough.
    """
    for places in _choices(tuple(shares), threshold):
        secret = combine({place: shares[place] for place in places})
        if secret is not None and fits(secret):
            return secret, places
    return None


def _choices(places: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Ways to choose so many places: neighbouring ones round the circle, then shuffled ones.

    The former leave out every single place once, the latter several wrong ones at a time. The
    shuffles need no secrecy, only variety.
    """
    if len(places) < count:
        return
    yield places[:count]
    if len(places) == count:
        return
    for start in range(1, len(places)):
        yield (places[start:] + places[:start])[:count]
    for order in islice(_shuffles(places), _SHUFFLES):
        yield order[:count]


def _shuffles(places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    turn = 0
    while True:
        keys = {p: hashlib.sha256(f"{turn}/{p}".encode()).digest() for p in places}
        yield tuple(sorted(places, key=keys.__getitem__))
        turn += 1
