"""NbAFL, noising before aggregation (Wei et al. 2020): its clipping and its two noises.

Everybody takes part in every round. What is protected is one sample of one client, and the
sensitivity 2C/m is the paper's: it holds where a client's model is the mean of models of its
single samples, each clipped to C, as the paper supposes. Training by SGD does not promise that,
so a run reports this ε as NbAFL's own, never as one of client-level differential privacy.

Up, a client shows L models to whoever listens, each with noise σ_U. Down, T means are shown; the
clients' noise is in them already, σ_U/√N, and the server adds what is missing:
σ_D² = (cT·2C/(mN)/ε)² - σ_U²/N.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError


def clip_weights(vector: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """A model, not its change, scaled to a norm of at most ``clip``: w / max(1, ‖w‖/C).

    >>> clip_weights(np.array([3.0, 4.0]), 1.0)
    array([0.6, 0.8])
    """
    _positive("clip", clip)
    return vector / max(1.0, float(np.linalg.norm(vector)) / clip)


def uplink_sigma(
    clip: float, least_samples: int, epsilon: float, delta: float, exposures: int
) -> float:
    """The noise on each number that a client sends: c·L·Δs/ε with Δs = 2C/m.

    ``least_samples`` m is of the smallest client; ``exposures`` L how often a client's upload is
    seen. L such answers are together one Gaussian with c√L/ε for its multiplier, at least c/ε.
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
    """The noise that the server adds to the mean: 2cC·√(T²-L²N)/(mNε) if T > L√N, else none."""
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
    """The c of the Gaussian mechanism, √(2 ln(1.25/δ)), where it is true."""
    if not 0 < epsilon < 1:
        raise ConfigError(
            f"NbAFL's noise is private for an epsilon between 0 and 1 only, not {epsilon:g}: "
            "choose a smaller one, or client-level differential privacy, which has no such limit"
        )
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be between 0 and 1, not {delta:g}")
    return math.sqrt(2 * math.log(1.25 / delta))


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"NbAFL needs a positive {name}, not {value:g}")
