"""Availability: when each client is on, from a file or from a model of day and night.

Like clocks, these are values: a question is answered from the file, or from derived seeds, and
the order of the questions changes nothing. Time is in simulated seconds since the run began.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from coterie.channel.clocks import Drawn, Positive, ShareSpread, drawn_between, uniform
from coterie.core.messages import ClientId
from coterie.errors import ConfigError, DataError
from coterie.registry import AVAILABILITIES
from coterie.seeds import seed_for

DAY = 86_400.0
MONTH = 30 * DAY
MOST_SLOTS = 5000  # that anybody looks ahead


class Availability(Protocol):
    """Says when clients are on. A stretch includes its start and not its end."""

    def on(self, client: ClientId, time: float) -> bool:
        """Whether the client can be reached."""
        ...

    def until(self, client: ClientId, time: float) -> float:
        """The end of the present stretch, infinite if never; the time itself if it is off."""
        ...

    def share(self, client: ClientId) -> float:
        """Which share of the time the client is on, in the long run."""
        ...

    def next_change(self, time: float) -> float:
        """The next moment at which anybody's state may change; infinite if there is none."""
        ...


@dataclass(frozen=True)
class Trace:
    """On-times as given, repeated every ``period`` (infinite: never; then all are off for good).

    ``edges`` are each client's times of going on, off, on, off and so forth.
    """

    edges: tuple[tuple[float, ...], ...]
    period: float = math.inf

    def on(self, client: ClientId, time: float) -> bool:
        """After an odd number of edges."""
        return self._passed(client, time) % 2 == 1

    def until(self, client: ClientId, time: float) -> float:
        """The next edge, unless the next period goes on where this one ends."""
        passed, edges, lap = self._passed(client, time), self.edges[client], self._lap(time)
        if passed % 2 == 0:
            return time
        if passed < len(edges) - 1 or not self._goes_round(edges):
            return self._at(lap, edges[passed])
        return math.inf if len(edges) == 2 else self._at(lap + 1, edges[1])

    def share(self, client: ClientId) -> float:
        """Of the period; of the time to the last edge of all if there is none."""
        edges = self.edges[client]
        whole = self.period if math.isfinite(self.period) else max(e[-1] for e in self.edges)
        return sum(off - on for on, off in zip(edges[::2], edges[1::2], strict=True)) / whole

    def next_change(self, time: float) -> float:
        """The first edge of anybody after this moment."""
        if not self._changes:
            return math.inf
        lap = self._lap(time)
        passed = bisect_right(self._changes, time, key=lambda edge: self._at(lap, edge))
        if passed < len(self._changes):
            return self._at(lap, self._changes[passed])
        return math.inf if math.isinf(self.period) else self._at(lap + 1, self._changes[0])

    @cached_property
    def _changes(self) -> list[float]:
        """All edges at which a state changes: not those at which a stretch goes round."""
        found = set[float]()
        for edges in self.edges:
            found |= set(edges[1:-1] if self._goes_round(edges) else edges)
        return sorted(found)

    def _goes_round(self, edges: tuple[float, ...]) -> bool:
        return edges[0] == 0 and edges[-1] == self.period

    def _passed(self, client: ClientId, time: float) -> int:
        lap = self._lap(time)
        return bisect_right(self.edges[client], time, key=lambda edge: self._at(lap, edge))

    def _lap(self, time: float) -> int:
        return 0 if math.isinf(self.period) else steps_in(time, self.period)

    def _at(self, lap: int, edge: float) -> float:
        """An edge's moment. A period's end and the next one's start are the same to the bit."""
        if lap == 0:
            return edge
        return (lap + 1) * self.period if edge == self.period else lap * self.period + edge


@dataclass(frozen=True)
class Diurnal:
    """On by chance in each slot of time, with a probability that swings once a day.

    It is between the client's ``low`` and ``high``, a cosine with its top at the client's own
    ``peak`` (a share of the day), taken at the middle of the slot.
    """

    low: Drawn
    high: Drawn
    peak: Drawn
    day: float
    slot: float
    seed: int

    def on(self, client: ClientId, time: float) -> bool:
        """As drawn for the present slot."""
        return self._drawn(client, steps_in(time, self.slot))

    def until(self, client: ClientId, time: float) -> float:
        """The first slot that is off; one of thirty days, or many slots, is taken as endless."""
        if self.low[client] == 1:
            return math.inf
        slot = first = steps_in(time, self.slot)
        while self._drawn(client, slot):
            slot += 1
            if (slot - first) * self.slot >= MONTH or slot - first >= MOST_SLOTS:
                return math.inf
        return time if slot == first else slot * self.slot

    def share(self, client: ClientId) -> float:
        """A cosine is as often above its mean as below."""
        return (self.low[client] + self.high[client]) / 2

    def next_change(self, time: float) -> float:
        """The next slot."""
        return (steps_in(time, self.slot) + 1) * self.slot

    def probability(self, client: ClientId, slot: int) -> float:
        """How likely the client is on in a slot."""
        turn = (slot + 0.5) * self.slot / self.day - self.peak[client]
        low, high = self.low[client], self.high[client]
        return low + (high - low) * (1 + math.cos(2 * math.pi * turn)) / 2

    def _drawn(self, client: ClientId, slot: int) -> bool:
        name = seed_for(self.seed, "availability", slot, client, "slot")
        return uniform(name) < self.probability(client, slot)


def steps_in(time: float, step: float) -> int:
    """How many whole steps have passed, such that steps · step ≤ time < (steps + 1) · step.

    To the bit: who asks again at the moment that an answer named is then a step further.

    >>> steps_in(1199.9, 600.0), steps_in(1200.0, 600.0)
    (1, 2)
    """
    steps = int(time // step)
    while (steps + 1) * step <= time:  # the product is rounded, the quotient is not
        steps += 1
    return steps


def make_availability(
    name: str, parameters: Mapping[str, Any], seed: int, clients: int
) -> Availability | None:
    """The availability of this name, None for "always"."""
    made: Availability | None = AVAILABILITIES.make(name, parameters, seed=seed, clients=clients)
    return made


@AVAILABILITIES.register("always", "every client is on all the time")
def _always() -> None:
    """Nothing to ask."""


@AVAILABILITIES.register(
    "trace", "on-times of each client from a CSV file of client,start,end: file, period"
)
def _trace(clients: int, file: str, period: Positive | None = None) -> Trace:
    return read_trace(Path(file), clients, math.inf if period is None else period)


@AVAILABILITIES.register(
    "diurnal",
    "clients come and go by chance, more of them on at their time of day: low (0.2), high (0.8), "
    "day (86400 s), slot (600 s), zones (0: any phase)",
)
def _diurnal(
    seed: int,
    clients: int,
    low: ShareSpread = (0.2, 0.2),
    high: ShareSpread = (0.8, 0.8),
    day: Positive = DAY,
    slot: Positive = 600.0,
    zones: Annotated[int, Field(ge=0)] = 0,
) -> Diurnal:
    if low[1] > high[0] or high[0] == 0:
        raise ConfigError(
            f"availability 'diurnal': low = {low[1]:g} and high = {high[0]:g}: high must be above "
            "0 and not below low"
        )
    if slot > day / 2:
        raise ConfigError(
            f"availability 'diurnal': slot = {slot:g} is more than half a day of {day:g} seconds: "
            "give shorter slots"
        )
    peak = drawn_between((0.0, 1.0), seed, "availability", "peak", clients)
    return Diurnal(
        drawn_between(low, seed, "availability", "low", clients),
        drawn_between(high, seed, "availability", "high", clients),
        tuple(math.floor(p * zones) / zones for p in peak) if zones else peak,
        day,
        slot,
        seed,
    )


def read_trace(path: Path, clients: int, period: float = math.inf) -> Trace:
    """A trace from a CSV file with the columns client, start and end, in any order of rows.

    Stretches that touch are one; those that overlap are refused, for the file then says two things.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [word.strip() for word in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the availability trace {path} cannot be read: {error}") from None
    if header != ["client", "start", "end"]:
        raise DataError(f"{path}, line 1: the header must be client,start,end")
    stretches: dict[ClientId, list[tuple[float, float, int]]] = {c: [] for c in range(clients)}
    for line, row in rows:
        client, start, end = _stretch(f"{path}, line {line}", row, clients, period)
        stretches[client].append((start, end, line))
    missing = [c for c, found in stretches.items() if not found]
    if missing:
        raise DataError(
            f"{path} has no line for client {missing[0]} ({len(missing)} of {clients} clients are "
            "missing): give each client at least one stretch"
        )
    return Trace(tuple(_edges(path, c, sorted(s)) for c, s in stretches.items()), period)


def _stretch(
    place: str, row: list[str], clients: int, period: float
) -> tuple[ClientId, float, float]:
    try:
        client, start, end = int(row[0]), float(row[1]), float(row[2])
        if len(row) != 3 or not math.isfinite(start + end):
            raise ValueError
    except (ValueError, IndexError):
        raise DataError(
            f"{place}: '{','.join(row)}' is not a client's number and two times in seconds"
        ) from None
    if not 0 <= client < clients:
        raise DataError(f"{place}: there is no client {client}; clients are 0 to {clients - 1}")
    if start < 0:
        raise DataError(f"{place}: starts at {start:g}, before the run: times begin at 0")
    if end <= start:
        raise DataError(f"{place}: ends at {end:g}, not after its start at {start:g}")
    if end > period:
        raise DataError(
            f"{place}: ends at {end:g}, after the period of {period:g} seconds: divide the stretch"
        )
    return client, start, end


def _edges(
    path: Path, client: ClientId, stretches: list[tuple[float, float, int]]
) -> tuple[float, ...]:
    edges: list[float] = []
    before = 0
    for start, end, line in stretches:
        if edges and start < edges[-1]:
            raise DataError(
                f"{path}, line {line}: client {client} is on from {start:g}, but line {before} has "
                f"it on until {edges[-1]:g}: make one stretch of the two"
            )
        edges = [*edges[:-1], end] if edges and start == edges[-1] else [*edges, start, end]
        before = line
    return tuple(edges)
