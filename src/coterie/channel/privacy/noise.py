"""Clipping and noise for differential privacy.

Changes are integers on a grid of step 2^-bits, so sums are exact and the noise is discrete. That
avoids the leak of floating-point Gaussians through their lowest bits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.channel.privacy.entropy import Random
from coterie.errors import ConfigError, TrainingError

Whole = NDArray[np.int64]
Words = NDArray[np.uint64]
Real = NDArray[np.float64]

KEY_BYTES = 32
LEAST_SIGMA, MOST_SIGMA = 0.5, 2.0**40
_PROPOSALS = 2**19  # drawn at a time, so that noise for a large model needs little memory
FINE = 1e-12  # how far the sum of the clients' discrete shares may be from Gaussian
_LARGEST = 2.0**62  # on the grid: half of the range of int64


def stream(key: bytes) -> Random:
    """Random bytes expanded from a key by AES-256-CTR; use each key for one stream only.

    >>> one, other = stream(bytes(32)), stream(bytes(32))
    >>> one(5) + one(3) == other(8)
    True
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise ConfigError(
            "differential privacy needs the extra: pip install 'coterie[privacy]'"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"a key for noise must have {KEY_BYTES} bytes, not {len(key)}")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return lambda count: encryptor.update(bytes(count))


def discrete_gaussian(sigma: float, count: int, random: Random) -> Whole:
    """Draw integers with probability proportional to exp(-x²/2σ²).

    The algorithm is that of Canonne, Kamath and Steinke (2020): a discrete Laplace draw is accepted
    with the probability that makes it Gaussian. Only these probabilities are rounded, to double
    precision. One key is drawn from ``random``; for σ = 0 none is drawn, and the result is zeros.

    >>> discrete_gaussian(0, 3, bytes)
    array([0, 0, 0])
    """
    if sigma == 0:
        return np.zeros(count, np.int64)
    if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
        raise ConfigError(
            f"noise of standard deviation {sigma:g} grid steps cannot be drawn; it must be from "
            f"{LEAST_SIGMA} to 2^40: change the bits of the grid, the clipping bound or the noise"
        )
    bits = stream(random(KEY_BYTES))
    drawn = np.empty(count, np.int64)
    done = 0
    while done < count:
        # At least about 4 of 10 proposals are accepted.
        kept = _kept(sigma, min(_PROPOSALS, int(2.5 * (count - done)) + 64), bits)[: count - done]
        drawn[done : done + len(kept)] = kept
        done += len(kept)
    return drawn


def _kept(sigma: float, proposals: int, bits: Random) -> Whole:
    """The accepted ones among this number of draws from the discrete Laplace of scale ⌊σ⌋ + 1."""
    scale = math.floor(sigma) + 1
    # |y| = low + scale * high has probability proportional to exp(-|y| / scale): low is uniform
    # and kept with exp(-low / scale), high is geometric with ratio 1/e.
    low = _below(scale, _words(bits, proposals))
    low = low[_unit(bits, len(low)) < np.exp(-low / scale)]
    high = np.floor(-np.log(_unit(bits, len(low)))).astype(np.int64)
    size = low + scale * high
    negative = (_words(bits, len(size)) & np.uint64(1)).astype(np.bool_)
    once = ~(negative & (size == 0))  # otherwise 0 would be drawn twice as often, as +0 and -0
    size, negative = size[once], negative[once]
    off = (size - sigma * (sigma / scale)) / sigma
    accepted = _unit(bits, len(size)) < np.exp(-0.5 * off * off)
    kept: Whole = np.where(negative, -size, size)[accepted]
    return kept


def _words(bits: Random, count: int) -> Words:
    return np.frombuffer(bits(8 * count), dtype="<u8").astype(np.uint64, copy=False)


def _unit(bits: Random, count: int) -> Real:
    """Uniform on (0, 1], in steps of 2^-64 near 0, so that tails are not cut off at 2^-53."""
    return (_words(bits, count).astype(np.float64) + 0.5) * 2.0**-64


def _below(limit: int, words: Words) -> Whole:
    """Uniform on 0 … limit-1; the few words that would favour small numbers are dropped."""
    whole = (2**64 // limit) * limit
    if whole < 2**64:
        words = words[words < np.uint64(whole)]
    return (words % np.uint64(limit)).astype(np.int64)


def clipped(change: Real, bound: float, bits: int) -> tuple[Whole, float]:
    """Scale a change to at most ``bound`` and round it to the grid 2^-bits; also return its norm.

    The bound holds for the rounded change, which is what the noise hides. Rounding may add √d/2
    grid steps to the norm, so these are subtracted from the bound first, as is the possible
    floating-point error of the norm.

    >>> clipped(np.array([3.0, 4.0]), 10.0, bits=1)
    (array([6, 8]), 5.0)
    """
    values = np.asarray(change, np.float64)
    largest = float(np.max(np.abs(values), initial=0.0))
    if not math.isfinite(largest):
        raise TrainingError(
            "a change that is not finite cannot be clipped: lower the learning rate"
        )
    count = values.size
    slack = math.sqrt(count) * 2.0 ** -(bits + 1)
    within = bound * (1 - (count + 16) * 2.0**-52) - slack
    if not within > 0:
        raise ConfigError(
            f"a clipping bound of {bound:g} is lost in rounding {count} numbers to a grid of "
            f"2^-{bits}; raise the bound above {slack:.3g} or the bits of the grid"
        )
    if bound * 2.0**bits >= _LARGEST:
        raise ConfigError(
            f"a clipping bound of {bound:g} does not fit a grid of 2^-{bits}; use fewer bits"
        )
    # Divide by the largest first, so that no square overflows or underflows.
    norm = largest * float(np.linalg.norm(values / largest)) if largest else 0.0
    scale = min(1.0, within / norm) if norm else 1.0
    return np.rint(values * scale * 2.0**bits).astype(np.int64), norm


def next_bound(bound: float, share_below: float, target: float, rate: float = 0.2) -> float:
    """Move the bound towards the ``target`` quantile of the norms (Andrew et al. 2021).

    >>> next_bound(2.0, share_below=0.5, target=0.5)
    2.0
    """
    return bound * math.exp(-rate * (share_below - target))


def centred(norm: float, bound: float) -> float:
    """Whether a client's norm is within the bound, as ±1/2, which changes a sum by 1/2.

    Replacing the client by another changes the sum by 1, twice as much, just as a clipped change
    then counts for two bounds. So :func:`split_noise` holds for either adjacency.
    """
    return 0.5 if norm <= bound else -0.5


def share_below(total: float, cohort: float) -> float:
    """The share of norms within the bound, from a cohort's noised sum of centred bits."""
    return total / cohort + 0.5


def usual_count_sigma(cohort: float) -> float:
    """The noise on the sum of bits used by Andrew et al. (2021): a twentieth of the cohort."""
    return cohort / 20


def split_noise(multiplier: float, count_sigma: float) -> float:
    """The noise multiplier for the changes such that changes and bits together have ``multiplier``.

    Two Gaussian mechanisms on the same clients are equivalent to one whose z⁻² is the sum of
    theirs: z⁻² = z_Δ⁻² + (2·count_sigma)⁻², since the sensitivity of the bits is 1/2.
    """
    if multiplier == 0:
        return 0.0
    if not 0 < multiplier < 2 * count_sigma:
        raise ConfigError(
            f"a noise multiplier of {multiplier:g} leaves nothing for the changes, because the "
            f"count of clients within the bound has noise {count_sigma:g}, which must be above "
            "half the multiplier: use a larger cohort, more noise on the count, or a fixed bound"
        )
    return float((multiplier**-2 - (2 * count_sigma) ** -2) ** -0.5)


def enough_on_grid(sigma: float, sharers: int) -> float:
    """The distance τ, per number, of a sum of discrete Gaussians from a discrete Gaussian.

    Kairouz, Liu and Steinke (2021): τ = 10·Σ exp(-2π²σᵢ²·k/(k+1)) for k = 1 … n-1, where σᵢ is
    each client's share, σ/√n, in grid steps. For d numbers, ε² increases by τd/2.

    >>> enough_on_grid(40.0, sharers=100) < 1e-12
    True
    """
    if sharers < 1 or not sigma >= 0:
        raise ConfigError(f"noise {sigma:g} cannot be shared by {sharers} clients")
    k = np.arange(1, sharers)
    return float(10 * np.exp(-2 * np.pi**2 * (sigma**2 / sharers) * k / (k + 1)).sum())


def fine_on_grid(sigma: float, sharers: int, numbers: int) -> bool:
    """Whether noise that clients share is nearly Gaussian on the grid, in all numbers together.

    >>> fine_on_grid(40.0, sharers=100, numbers=1000), fine_on_grid(5.0, sharers=100, numbers=1000)
    (True, False)
    """
    return numbers * enough_on_grid(sigma, sharers) <= FINE
