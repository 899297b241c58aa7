"""Clocks: the simulated time of an exchange, divided into computation and communication.

A clock has no state: what it draws at random is derived from the run's seed, so that its results
depend neither on the order of calls nor on interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import Field, PlainValidator

from coterie.core.messages import ClientId
from coterie.errors import ConfigError
from coterie.registry import CLOCKS
from coterie.seeds import seed_for

MEGABIT = 10**6

Drawn = tuple[float, ...]  # a number for each client


@dataclass(frozen=True)
class Leg:
    """The facts about an order and its answer that a clock needs.

    ``down`` and ``up`` are the bytes of the two messages, ``content_down`` and ``content_up`` those
    of their arrays alone. Clients with the same ``stream`` receive the same broadcast. ``seconds``
    is the measured time of the client's work, ``samples`` the number of samples it processed, each
    pass counted.
    """

    client: ClientId
    down: int
    up: int
    content_down: int
    content_up: int
    stream: tuple[int, ...]
    seconds: float = 0.0
    samples: float = 0


@dataclass(frozen=True)
class Seconds:
    """Simulated time, divided into computation, communication and waiting.

    >>> (Seconds(2.0, 1.0) + Seconds(1.0, 0.5, 0.25)).total
    4.75
    """

    computation: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.computation + other.computation,
            self.communication + other.communication,
            self.waiting + other.waiting,
        )

    @property
    def total(self) -> float:
        """The sum of the three parts."""
        return self.computation + self.communication + self.waiting


@dataclass(frozen=True)
class Moment:
    """The number of a round and of an exchange in it, from which random draws are derived."""

    round: int
    exchange: int


class Clock(Protocol):
    """Computes when each client's answer arrives."""

    @property
    def reproducible(self) -> bool:
        """Whether the times are the same in every run, which measured times are not."""
        ...

    def finishes(self, legs: Sequence[Leg], moment: Moment) -> dict[ClientId, Seconds]:
        """The time from the start of the exchange to the arrival of each client's answer."""
        ...


@dataclass(frozen=True)
class Links:
    """A link and a speed for each client: rates in Mbit/s, latency in seconds per message.

    >>> clock = make_clock("links", {"rate_up": 2.0, "rate_down": 4.0}, 0, 1, 1)
    >>> leg = Leg(0, down=1_000_000, up=1_000_000, content_down=0, content_up=0, stream=())
    >>> clock.finishes([leg], Moment(0, 0))[0].communication
    6.0
    """

    rate_up: Drawn
    rate_down: Drawn
    latency: Drawn
    speed: Drawn
    samples_per_second: float | None  # None: use the measured seconds

    @property
    def reproducible(self) -> bool:
        """False if computation is measured, since measured seconds differ from run to run."""
        return self.samples_per_second is not None

    def finishes(self, legs: Sequence[Leg], moment: Moment) -> dict[ClientId, Seconds]:
        """The times of the clients, which do not depend on each other."""
        return {leg.client: Seconds(self._computing(leg), self._sending(leg)) for leg in legs}

    def _computing(self, leg: Leg) -> float:
        rate = self.samples_per_second
        return (leg.seconds if rate is None else leg.samples / rate) / self.speed[leg.client]

    def _sending(self, leg: Leg) -> float:
        latency = self.latency[leg.client] * ((leg.down > 0) + (leg.up > 0))
        down = 8 * leg.down / (MEGABIT * self.rate_down[leg.client])
        return latency + down + 8 * leg.up / (MEGABIT * self.rate_up[leg.client])


class System(NamedTuple):
    """A system of the paper on user-centric learning: T_ul/T_dl, T_min/T_dl and 1/(μT_dl)."""

    says: str
    rho: float
    t_min: float
    inverse_mu: float


SYSTEMS = {
    1: System("wireless, slow uplink, unreliable nodes", 4.0, 1.0, 1.0),
    2: System("wireless, fast uplink, reliable nodes", 2.0, 1.0, 0.0),
    3: System("wired, as fast up as down, reliable nodes", 1.0, 1.0, 0.0),
}


@dataclass(frozen=True)
class Wireless:
    """One channel shared by all clients: a round takes T_dl·(m + ρN) + T_min + H_N/μ.

    m is the length of all distinct downlink streams, measured in models, and N that of all uploads;
    a client that receives a stream waits for all streams. Uploads take turns in the order in which
    clients finish computing. The k-th has arrived once the k-th client has computed and k uploads
    are done, so the first k reports take as long as a round of k reports. Clients that compute
    nothing take no computing time. With ``draw``, each client's T_min + Exp(μ) is drawn; otherwise
    all take the expected maximum, with H_N over the clients that compute.
    """

    rho: float
    t_dl: float
    t_min: float
    inverse_mu: float
    draw: bool
    seed: int
    model_bytes: int

    @property
    def reproducible(self) -> bool:
        """Always true: nothing is measured."""
        return True

    def finishes(self, legs: Sequence[Leg], moment: Moment) -> dict[ClientId, Seconds]:
        """The clients' times, in the order in which they finish computing; ties by id."""
        streams: dict[tuple[int, ...], int] = {}
        for leg in legs:
            streams[leg.stream] = max(leg.content_down, streams.get(leg.stream, 0))
        download = sum(streams.values()) / self.model_bytes
        working = sum(leg.samples > 0 for leg in legs)
        starts = {leg.client: download if leg.content_down else 0.0 for leg in legs}
        computing = {leg.client: self._computing(leg, working, moment) for leg in legs}
        turns = sorted(
            legs, key=lambda g: (self.t_dl * starts[g.client] + computing[g.client], g.client)
        )
        times, sent = dict[ClientId, Seconds](), 0
        for leg in turns:
            sent += leg.content_up
            uploads = self.rho * (sent / self.model_bytes) if leg.content_up else 0.0
            channel = self.t_dl * (starts[leg.client] + uploads)
            times[leg.client] = Seconds(computing[leg.client], channel)
        return times

    def _computing(self, leg: Leg, working: int, moment: Moment) -> float:
        if not leg.samples:
            return 0.0
        if self.draw:
            name = f"computation.{moment.exchange}"
            drawn = uniform(seed_for(self.seed, "clock", moment.round, leg.client, name))
            delay = -math.log1p(-drawn)
        else:
            delay = sum(1 / n for n in range(1, working + 1))
        return self.t_dl * (self.t_min + self.inverse_mu * delay)


def make_clock(
    name: str, parameters: Mapping[str, Any], seed: int, clients: int, model_bytes: int
) -> Clock | None:
    """The clock with this name; None for "none".

    >>> make_clock("wirless", {}, 0, 1, 1)
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown clock 'wirless'; did you mean 'wireless'? ...
    """
    clock: Clock | None = CLOCKS.make(
        name, parameters, seed=seed, clients=clients, model_bytes=model_bytes
    )
    return clock


def uniform(seed: int) -> float:
    """A number in [0, 1) from a derived seed, which is a hash and so needs no generator.

    >>> uniform(0), uniform(2**62)
    (0.0, 0.5)
    """
    return (seed >> 10) / 2**53


def drawn_between(spread: tuple[float, float], seed: int, what: str, name: str, n: int) -> Drawn:
    """A number for each of n clients, drawn uniformly between two bounds."""
    low, high = spread
    if low == high:
        return (low,) * n
    shares = (uniform(seed_for(seed, what, client=c, stream=name)) for c in range(n))
    return tuple(low + (high - low) * share for share in shares)


def _spread(above: float, at: bool, most: float = math.inf) -> PlainValidator:
    """Validates a number, or [low, high] to draw from, within bounds."""
    limits = f"{'at least' if at else 'above'} {above:g}" + (
        f" and at most {most:g}" if math.isfinite(most) else ""
    )

    def bounds(value: Any) -> tuple[float, float]:
        pair = list(value) if isinstance(value, list | tuple) else [value, value]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in pair)
        if len(pair) != 2 or not numbers or not all(math.isfinite(v) for v in pair):
            raise ValueError(f"must be a number or [low, high], {limits}")
        if not all((v >= above if at else v > above) and v <= most for v in pair):
            raise ValueError(f"must be {limits}")
        if pair[0] > pair[1]:
            raise ValueError("the first of [low, high] must not be above the second")
        return float(pair[0]), float(pair[1])

    return PlainValidator(bounds)


PositiveSpread = Annotated[tuple[float, float], _spread(0, at=False)]
NonNegativeSpread = Annotated[tuple[float, float], _spread(0, at=True)]
ShareSpread = Annotated[tuple[float, float], _spread(0, at=True, most=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@CLOCKS.register("none", "no simulated time")
def _none() -> None:
    """No clock."""


@CLOCKS.register(
    "links",
    "a link and a speed for each client: rate_up, rate_down (2 Mbit/s), latency (0 s), speed (1), "
    "each a number or [low, high]; compute (samples, or measured), samples_per_second (1000)",
)
def _links(
    seed: int,
    clients: int,
    rate_up: PositiveSpread = (2.0, 2.0),
    rate_down: PositiveSpread = (2.0, 2.0),
    latency: NonNegativeSpread = (0.0, 0.0),
    speed: PositiveSpread = (1.0, 1.0),
    compute: Literal["samples", "measured"] = "samples",
    samples_per_second: Positive = 1000.0,
) -> Links:
    def each(name: str, spread: tuple[float, float]) -> Drawn:
        return drawn_between(spread, seed, "clock", name, clients)

    return Links(
        each("rate_up", rate_up),
        each("rate_down", rate_down),
        each("latency", latency),
        each("speed", speed),
        samples_per_second if compute == "samples" else None,
    )


@CLOCKS.register(
    "wireless",
    "one shared channel with broadcast downloads and uploads in turn: system (1, 2, 3) or rho, "
    "t_min, inverse_mu; t_dl (1 s), draw (false)",
)
def _wireless(
    seed: int,
    model_bytes: int,
    rho: NonNegative | None = None,
    t_dl: Positive = 1.0,
    t_min: NonNegative | None = None,
    inverse_mu: NonNegative | None = None,
    draw: bool = False,
    system: Literal[1, 2, 3] | None = None,
) -> Wireless:
    single = {"rho": rho, "t_min": t_min, "inverse_mu": inverse_mu}
    twice = [k for k, v in single.items() if v is not None]
    if system is not None and twice:
        raise ConfigError(
            f"clock 'wireless': system = {system} also sets {twice[0]}: set only one of the two"
        )
    chosen = SYSTEMS[system or 1]
    return Wireless(
        chosen.rho if rho is None else rho,
        t_dl,
        chosen.t_min if t_min is None else t_min,
        chosen.inverse_mu if inverse_mu is None else inverse_mu,
        draw,
        seed,
        model_bytes,
    )
