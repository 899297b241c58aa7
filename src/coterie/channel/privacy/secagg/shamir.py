"""Shamir's secret sharing for secrets of 32 bytes, over a prime field just large enough for them.

A secret is the value at 0 of a random polynomial of degree threshold - 1; a share is its value at
the holder's point, its place. Any ``threshold`` shares determine the polynomial; fewer reveal
nothing.
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
    """Split a secret into a share for each place; places are distinct and at least 1.

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
    """The Lagrange coefficients of the shares at these places, for the value at 0.

    They are cached, since many secrets are shared among the same holders.
    """
    coefficients = []
    for mine in places:
        above = below = 1
        for other in places:
            if other != mine:
                above = above * other % PRIME
                below = below * (other - mine) % PRIME
        coefficients.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(coefficients)


def combine(shares: Mapping[int, int]) -> bytes | None:
    """Reconstruct a secret from ``threshold`` shares; None if they do not belong to a secret."""
    factors = weights(tuple(shares))
    value = sum(w * share for w, share in zip(factors, shares.values(), strict=True)) % PRIME
    return value.to_bytes(32, "big") if value < 1 << 256 else None


def rebuild(
    shares: Mapping[int, int], threshold: int, fits: Callable[[bytes], bool]
) -> tuple[bytes, tuple[int, ...]] | None:
    """Reconstruct the secret that ``fits``, although some shares may be wrong.

    Returns the secret and the places used. The first ``threshold`` shares are tried first, then
    other choices if there are more shares.
    """
    for places in _choices(tuple(shares), threshold):
        secret = combine({place: shares[place] for place in places})
        if secret is not None and fits(secret):
            return secret, places
    return None


def _choices(places: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Choices of ``count`` places: first consecutive ones, then shuffled ones.

    The former leave out each single place at least once, the latter several wrong ones at a time.
    The shuffles need not be secret, only varied.
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
