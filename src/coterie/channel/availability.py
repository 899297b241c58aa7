"""Availability: when each client is on, from a file or from a model of day and night.

Like clocks, these have no state: results come from the file or from derived seeds, and do not
depend on the order of calls. Time is in simulated seconds since the run began.
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
MOST_SLOTS = 5000  # slots to look ahead


class Availability(Protocol):
    """Determines when clients are on. An interval includes its start but not its end."""

    def on(self, client: ClientId, time: float) -> bool:
        """Whether the client can be reached."""
        ...

    def until(self, client: ClientId, time: float) -> float:
        """When the client goes off next: infinite if never, the given time if it is off now."""
        ...

    def share(self, client: ClientId) -> float:
        """The share of time for which the client is on, in the long run."""
        ...

    def next_change(self, time: float) -> float:
        """The next time at which any client may go on or off; infinite if there is none."""
        ...


@dataclass(frozen=True)
class Trace:
    """Given intervals, repeated every ``period``; if that is infinite, all are off at the end.

    ``edges`` are the times at which each client goes on and off, alternately.
    """

    edges: tuple[tuple[float, ...], ...]
    period: float = math.inf

    def on(self, client: ClientId, time: float) -> bool:
        """Whether the number of edges up to this time is odd."""
        return self._passed(client, time) % 2 == 1

    def until(self, client: ClientId, time: float) -> float:
        """The next edge, unless the interval continues into the next period."""
        passed, edges, lap = self._passed(client, time), self.edges[client], self._lap(time)
        if passed % 2 == 0:
            return time
        if passed < len(edges) - 1 or not self._wraps(edges):
            return self._at(lap, edges[passed])
        return math.inf if len(edges) == 2 else self._at(lap + 1, edges[1])

    def share(self, client: ClientId) -> float:
        """The share of the period or, without one, of the time until the last edge."""
        edges = self.edges[client]
        duration = self.period if math.isfinite(self.period) else max(e[-1] for e in self.edges)
        return sum(off - on for on, off in zip(edges[::2], edges[1::2], strict=True)) / duration

    def next_change(self, time: float) -> float:
        """The first edge of any client after this time."""
        if not self._changes:
            return math.inf
        lap = self._lap(time)
        passed = bisect_right(self._changes, time, key=lambda edge: self._at(lap, edge))
        if passed < len(self._changes):
            return self._at(lap, self._changes[passed])
        return math.inf if math.isinf(self.period) else self._at(lap + 1, self._changes[0])

    @cached_property
    def _changes(self) -> list[float]:
        """All edges, except the ends of a period at which a client stays on."""
        changes = set[float]()
        for edges in self.edges:
            changes |= set(edges[1:-1] if self._wraps(edges) else edges)
        return sorted(changes)

    def _wraps(self, edges: tuple[float, ...]) -> bool:
        return edges[0] == 0 and edges[-1] == self.period

    def _passed(self, client: ClientId, time: float) -> int:
        lap = self._lap(time)
        return bisect_right(self.edges[client], time, key=lambda edge: self._at(lap, edge))

    def _lap(self, time: float) -> int:
        return 0 if math.isinf(self.period) else steps_in(time, self.period)

    def _at(self, lap: int, edge: float) -> float:
        """The time of an edge; a period ends at exactly the time at which the next one starts."""
        if lap == 0:
            return edge
        return (lap + 1) * self.period if edge == self.period else lap * self.period + edge


@dataclass(frozen=True)
class Diurnal:
    """Clients are on at random in each time slot, with a probability that follows the day.

    The probability is a cosine between the client's ``low`` and ``high`` with its maximum at the
    client's ``peak`` (a fraction of the day), taken at the middle of the slot.
    """

    low: Drawn
    high: Drawn
    peak: Drawn
    day: float
    slot: float
    seed: int

    def on(self, client: ClientId, time: float) -> bool:
        """Whether the client is on in the slot of this time, as drawn."""
        return self._drawn(client, steps_in(time, self.slot))

    def until(self, client: ClientId, time: float) -> float:
        """The start of the next slot that is off; infinite if none comes within thirty days."""
        if self.low[client] == 1:
            return math.inf
        slot = first = steps_in(time, self.slot)
        while self._drawn(client, slot):
            slot += 1
            if (slot - first) * self.slot >= MONTH or slot - first >= MOST_SLOTS:
                return math.inf
        return time if slot == first else slot * self.slot

    def share(self, client: ClientId) -> float:
        """The mean of the cosine."""
        return (self.low[client] + self.high[client]) / 2

    def next_change(self, time: float) -> float:
        """The start of the next slot."""
        return (steps_in(time, self.slot) + 1) * self.slot

    def probability(self, client: ClientId, slot: int) -> float:
        """The probability that the client is on in a slot."""
        turn = (slot + 0.5) * self.slot / self.day - self.peak[client]
        low, high = self.low[client], self.high[client]
        return low + (high - low) * (1 + math.cos(2 * math.pi * turn)) / 2

    def _drawn(self, client: ClientId, slot: int) -> bool:
        seed = seed_for(self.seed, "availability", slot, client, "slot")
        return uniform(seed) < self.probability(client, slot)


def steps_in(time: float, step: float) -> int:
    """The number of completed steps, such that steps · step ≤ time < (steps + 1) · step.

    This holds exactly in floating point, so that at the time ``(steps + 1) · step`` the result is
    one more.

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
    """The availability with this name; None for "always"."""
    availability: Availability | None = AVAILABILITIES.make(
        name, parameters, seed=seed, clients=clients
    )
    return availability


@AVAILABILITIES.register("always", "every client is on all the time")
def _always() -> None:
    """No availability to simulate."""


@AVAILABILITIES.register(
    "trace", "when each client is on, from a CSV file of client,start,end: file, period"
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
            f"availability 'diurnal': low = {low[1]:g} and high = {high[0]:g}, but high must be "
            "above 0 and at least low"
        )
    if slot > day / 2:
        raise ConfigError(
            f"availability 'diurnal': slot = {slot:g} is more than half of day = {day:g}: use "
            "shorter slots"
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
    """Read a trace from a CSV file with the columns client, start and end, rows in any order.

    Intervals that touch are joined. Intervals of a client that overlap are refused.
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
    intervals: dict[ClientId, list[tuple[float, float, int]]] = {c: [] for c in range(clients)}
    for line, row in rows:
        client, start, end = _interval(f"{path}, line {line}", row, clients, period)
        intervals[client].append((start, end, line))
    missing = [c for c, of_client in intervals.items() if not of_client]
    if missing:
        raise DataError(
            f"{path} has no line for client {missing[0]} ({len(missing)} of {clients} clients are "
            "missing): give each client at least one interval"
        )
    return Trace(tuple(_edges(path, c, sorted(i)) for c, i in intervals.items()), period)


def _interval(
    where: str, row: list[str], clients: int, period: float
) -> tuple[ClientId, float, float]:
    try:
        client, start, end = int(row[0]), float(row[1]), float(row[2])
        if len(row) != 3 or not math.isfinite(start + end):
            raise ValueError
    except (ValueError, IndexError):
        raise DataError(
            f"{where}: '{','.join(row)}' is not a client's number and two times in seconds"
        ) from None
    if not 0 <= client < clients:
        raise DataError(f"{where}: there is no client {client}; clients are 0 to {clients - 1}")
    if start < 0:
        raise DataError(f"{where}: starts at {start:g}, before the run: times start at 0")
    if end <= start:
        raise DataError(f"{where}: ends at {end:g}, not after its start at {start:g}")
    if end > period:
        raise DataError(
            f"{where}: ends at {end:g}, after the period of {period:g} seconds: split the interval"
        )
    return client, start, end


def _edges(
    path: Path, client: ClientId, intervals: list[tuple[float, float, int]]
) -> tuple[float, ...]:
    edges: list[float] = []
    before = 0
    for start, end, line in intervals:
        if edges and start < edges[-1]:
            raise DataError(
                f"{path}, line {line}: client {client} is on from {start:g}, but line {before} has "
                f"it on until {edges[-1]:g}: merge the two intervals"
            )
        edges = [*edges[:-1], end] if edges and start == edges[-1] else [*edges, start, end]
        before = line
    return tuple(edges)
