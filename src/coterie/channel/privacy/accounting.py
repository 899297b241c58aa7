"""Privacy accounting: the (ε, δ) that rounds of noised sums cost, from a library's accountants.

A noise multiplier z is always the standard deviation of the noise on the *sum*, divided by the
clipping bound S of one client's change. The meaning of ε depends on how clients are sampled:

=========  ================================  ============  =====================================
sampling   neighbours                        sum moves by  ε from
=========  ================================  ============  =====================================
poisson    with and without one client       S             the privacy loss distribution, or RDP
fixed      one client replaced by another    2S            RDP: the library has no other for it
all        with and without one client       S             the exact formula
=========  ================================  ============  =====================================

With a cohort of fixed size, a client that is left out is replaced by another, so the sum moves by
2S, and the ε of Poisson sampling would be far too small. When all clients take part there is no
replacement: a client is left out by not adding its change to a sum with a fixed and public
denominator, as with Poisson sampling. T such rounds are exactly one Gaussian mechanism with
multiplier z/√T.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr

from coterie.errors import ConfigError, unknown

ADJACENCY = {
    "poisson": "add or remove one client",
    "fixed": "replace one client by another",
    "all": "add or remove one client",
}
ACCOUNTANTS = ("pld", "rdp")
_STEP = 5e-3  # of the grid of privacy losses, relative to a usual one: ε is at most 0.1 % high
_CELLS = 1e5  # the approximate maximum of cells in that grid, for one round
_LEAST, _MOST = 0.01, 1e6  # the range in which noise multipliers are searched
_NEAR = 2e-4  # the relative tolerance of that search


@dataclass(frozen=True)
class Sampling:
    """How a round's clients are chosen: each independently (``poisson``), a fixed number, or all.

    ``cohort`` is the number of clients in a round, for ``poisson`` the expected number.
    """

    kind: str
    clients: int
    cohort: int

    def __post_init__(self) -> None:
        if self.kind not in ADJACENCY:
            raise ConfigError(unknown("sampling", self.kind, ADJACENCY))
        if not 1 <= self.cohort <= self.clients:
            raise ConfigError(f"a cohort of {self.cohort} cannot be drawn from {self.clients}")
        if self.kind == "all" and self.cohort < self.clients:
            raise ConfigError(
                f"a cohort of {self.cohort} of {self.clients} clients is not all of them; "
                "use poisson or fixed sampling"
            )

    @property
    def rate(self) -> float:
        """The share of clients that take part in a round."""
        return self.cohort / self.clients

    @property
    def adjacency(self) -> str:
        """The change between neighbouring sets of clients, in words."""
        return ADJACENCY[self.kind]


@dataclass(frozen=True)
class Mechanism:
    """One round: the sum of sampled clients' clipped changes, with Gaussian noise z·S."""

    sampling: Sampling
    multiplier: float

    def __post_init__(self) -> None:
        if not 0 <= self.multiplier < math.inf:
            raise ConfigError(f"a noise multiplier must not be negative, not {self.multiplier:g}")


def sensible_delta(clients: int) -> float:
    """A δ well below 1/clients; above that, revealing one client at random would be allowed.

    >>> sensible_delta(1000)  # doctest: +ELLIPSIS
    0.0005011...
    """
    return float(clients**-1.1)


def reported(mechanism: Mechanism, accountant: str = "pld") -> str:
    """The accounting that :func:`epsilon` uses for a mechanism: ``pld``, ``rdp`` or ``exact``."""
    if accountant not in ACCOUNTANTS:
        raise ConfigError(unknown("accountant", accountant, ACCOUNTANTS))
    return {"poisson": accountant, "fixed": "rdp", "all": "exact"}[mechanism.sampling.kind]


def epsilon(mechanism: Mechanism, rounds: int, delta: float, accountant: str = "pld") -> float:
    """The ε that this number of rounds costs; infinite without noise."""
    _check_delta(delta)
    if rounds < 0:
        raise ConfigError(f"the number of rounds must not be negative, not {rounds}")
    return _epsilon(mechanism, rounds, delta, reported(mechanism, accountant))


def rounds_within(
    mechanism: Mechanism, epsilon: float, delta: float, most: int, accountant: str = "pld"
) -> int:
    """The largest number of rounds, up to ``most``, that costs no more than ``epsilon``."""
    _check_budget(epsilon, delta)
    used = reported(mechanism, accountant)

    def fits(rounds: int) -> bool:
        return _epsilon(mechanism, rounds, delta, used) <= epsilon

    fit, no_fit = 0, 1
    while no_fit <= most and fits(no_fit):  # doubling, since accounting for many rounds is slow
        fit, no_fit = no_fit, 2 * no_fit
    no_fit = min(no_fit, most + 1)
    while no_fit - fit > 1:
        middle = (fit + no_fit) // 2
        fit, no_fit = (middle, no_fit) if fits(middle) else (fit, middle)
    return fit


def calibrate(
    sampling: Sampling, epsilon: float, delta: float, rounds: int, accountant: str = "pld"
) -> float:
    """The smallest noise multiplier, to 0.1 %, that keeps the rounds within ``epsilon``."""
    _check_budget(epsilon, delta)
    if rounds < 1:
        raise ConfigError(f"noise is for at least 1 round, not {rounds}")

    def cost(multiplier: float) -> float:
        mechanism = Mechanism(sampling, multiplier)
        return _epsilon(mechanism, rounds, delta, reported(mechanism, accountant))

    enough = _where(cost, epsilon)
    while cost(enough) > epsilon:  # by less than the search's last step
        enough *= 1 + _NEAR
    return enough


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian mechanism (Balle and Wang 2018).

    The smallest ε with Φ(1/2z - εz) - e^ε·Φ(-1/2z - εz) ≤ δ.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2)
    4.38
    """
    _check_delta(delta)
    if multiplier == 0:
        return math.inf

    def exceeds(epsilon: float) -> bool:
        near = float(log_ndtr(0.5 / multiplier - epsilon * multiplier))
        far = epsilon + float(log_ndtr(-0.5 / multiplier - epsilon * multiplier))
        return near + _log_of_one_minus_exp(far - near) > math.log(delta)

    if not exceeds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


def _log_of_one_minus_exp(exponent: float) -> float:
    return math.log(-math.expm1(exponent)) if exponent < 0 else -math.inf


def _where(cost: Callable[[float], float], budget: float) -> float:
    """The noise multiplier at which the cost, which falls with it, is about the budget."""
    high = 1.0
    while cost(high) > budget:
        high *= 2
        if high > _MOST:
            raise ConfigError("no amount of noise meets this budget: raise epsilon or delta")
    low = high / 2
    while cost(low) <= budget:
        low, high = low / 2, low
        if low < _LEAST:
            raise ConfigError("this epsilon is so large that it protects nothing: lower it")

    def over(log_multiplier: float) -> float:  # on logarithms the cost is nearly a line
        return math.log(min(max(cost(math.exp(log_multiplier)), 1e-300), 1e300) / budget)

    return math.exp(brentq(over, math.log(low), math.log(high), xtol=_NEAR / 4))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta must be between 0 and 1, well below one in the number of clients, not {delta:g}"
        )


def _check_budget(epsilon: float, delta: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon must be above 0, not {epsilon:g}")
    _check_delta(delta)


@lru_cache(maxsize=4096)
def _epsilon(mechanism: Mechanism, rounds: int, delta: float, used: str) -> float:
    if rounds == 0:
        return 0.0
    if mechanism.multiplier == 0:
        return math.inf
    if used == "exact":
        return gaussian_epsilon(mechanism.multiplier / math.sqrt(rounds), delta)
    with _quietly():
        if used == "rdp":
            return _renyi(mechanism, rounds, delta)
        return float(_losses(mechanism).self_compose(rounds).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _losses(mechanism: Mechanism) -> Any:
    """The distribution of the privacy loss of one round, rounded pessimistically."""
    z, rate = mechanism.multiplier, mechanism.sampling.rate
    usual, most = rate / z, 0.5 / z**2 + 8 / z
    from_gaussian = _library().pld.privacy_loss_distribution.from_gaussian_mechanism
    return from_gaussian(
        standard_deviation=z,
        value_discretization_interval=max(_STEP * usual, most / _CELLS),
        sampling_prob=rate,
    )


def _renyi(mechanism: Mechanism, rounds: int, delta: float) -> float:
    library, sampling, z = _library(), mechanism.sampling, mechanism.multiplier
    relation = library.NeighboringRelation
    if sampling.kind == "fixed":
        # The library's multiplier is relative to the change by a replacement, which is 2S.
        neighbours, gaussian = relation.REPLACE_ONE, library.GaussianDpEvent(z / 2)
        event = library.SampledWithoutReplacementDpEvent(
            sampling.clients, sampling.cohort, gaussian
        )
    else:
        neighbours, gaussian = relation.ADD_OR_REMOVE_ONE, library.GaussianDpEvent(z)
        event = library.PoissonSampledDpEvent(sampling.rate, gaussian)
    accountant = library.rdp.RdpAccountant(neighboring_relation=neighbours)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


def _library() -> ModuleType:
    try:
        import_module("dp_accounting.pld")
        import_module("dp_accounting.rdp")
        return import_module("dp_accounting")
    except ImportError as error:
        raise ConfigError(
            "differential privacy needs the extra: pip install 'coterie[privacy]'"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the library's warnings about orders it leaves out; its figures are bounds anyway."""
    logger = logging.getLogger("absl")
    nothing: Callable[[logging.LogRecord], bool] = lambda record: False  # noqa: E731
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
