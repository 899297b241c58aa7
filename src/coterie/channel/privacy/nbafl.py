"""NbAFL, noising before aggregation (Wei et al. 2020): its clipping, uplink and downlink noise.

All clients take part in every round. One sample of one client is protected. The sensitivity 2C/m is
the paper's: it holds if a client's model is the mean of models of its single samples, each clipped
to C, as the paper assumes. Training by SGD does not guarantee that, so a run reports this ε as
NbAFL's own and never as that of client-level differential privacy.

A client uploads L models that others may see, each with noise σ_U. The server publishes T means,
which already contain the clients' noise, σ_U/√N, and adds the rest:
σ_D² = (cT·2C/(mN)/ε)² - σ_U²/N.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError


def clip_weights(vector: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """Scale a model (not its change) to a norm of at most ``clip``: w / max(1, ‖w‖/C).

    >>> clip_weights(np.array([3.0, 4.0]), 1.0)
    array([0.6, 0.8])
    """
    _positive("clip", clip)
    return vector / max(1.0, float(np.linalg.norm(vector)) / clip)


def uplink_sigma(
    clip: float, least_samples: int, epsilon: float, delta: float, exposures: int
) -> float:
    """The standard deviation of the clients' noise: c·L·Δs/ε with Δs = 2C/m.

    ``least_samples`` is m, the samples of the smallest client; ``exposures`` is L, the number of
    times that a client's upload is seen. L such uploads are together one Gaussian mechanism with
    multiplier c√L/ε, which is at least c/ε.
    """
    _positive("exposures", exposures)
    return _constant(epsilon, delta) * exposures * _sensitivity(clip, least_samples) / epsilon


def downlink_sigma(
    clip: float,
    least_samples: int,
    epsilon: float,
    delta: float,
    rounds: int,
    exposures: int,
    clients: int,
) -> float:
    """The standard deviation of the server's noise: 2cC·√(T²-L²N)/(mNε) if T > L√N, else 0."""
    for name, value in {"rounds": rounds, "exposures": exposures, "clients": clients}.items():
        _positive(name, value)
    constant, sensitivity = _constant(epsilon, delta), _sensitivity(clip, least_samples)
    missing = rounds**2 - exposures**2 * clients
    if missing <= 0:
        return 0.0
    return constant * sensitivity * math.sqrt(missing) / (clients * epsilon)


def _sensitivity(clip: float, least_samples: int) -> float:
    _positive("clip", clip)
    _positive("least_samples", least_samples)
    return 2 * clip / least_samples


def _constant(epsilon: float, delta: float) -> float:
    """The constant c of the Gaussian mechanism, √(2 ln(1.25/δ)), which is valid for ε < 1."""
    if not 0 < epsilon < 1:
        raise ConfigError(
            f"NbAFL's noise is private only for epsilon between 0 and 1, not {epsilon:g}: lower "
            "epsilon, or use client-level differential privacy, which has no such limit"
        )
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be between 0 and 1, not {delta:g}")
    return math.sqrt(2 * math.log(1.25 / delta))


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"NbAFL needs a positive {name}, not {value:g}")
