"""What the engines with workers share: the queue of work, retries, and what is sent to workers."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message, Work, received
from coterie.client.plan import Plan
from coterie.core.engine import Request
from coterie.core.messages import ClientId
from coterie.core.method import Source
from coterie.errors import ConfigError, EngineError
from coterie.registry import own_places, registry_of

TRIES = 3  # workers that an order may kill before it counts as lost
_WORK = struct.Struct("<dd")  # seconds and samples


@dataclass
class Unit:
    """Requests that one worker answers together, and how many workers have died doing so."""

    requests: list[Request]
    deaths: int = 0


class Queue:
    """Units that wait for a worker."""

    def __init__(self, units: Sequence[list[Request]]) -> None:
        self._units = deque(Unit(requests) for requests in units)

    def __bool__(self) -> bool:
        return bool(self._units)

    def take(self) -> Unit:
        """Remove and return the next unit."""
        return self._units.popleft()

    def put_back(self, unit: Unit) -> None:
        """Return a unit whose worker was dead before it got the work; it counts no death."""
        self._units.appendleft(unit)

    def died(self, unit: Unit) -> list[Request]:
        """Queue a unit again whose worker died, or return its requests as lost."""
        if unit.deaths + 1 >= TRIES:
            return unit.requests
        # A batch is split only after two deaths, because results depend on what it contains.
        parts = [unit.requests] if unit.deaths == 0 else [[r] for r in unit.requests]
        self._units.extendleft(Unit(part, unit.deaths + 1) for part in reversed(parts))
        return []

    def overdue(self, running: Iterable[Unit | None]) -> list[tuple[ClientId, None]]:
        """The deadline has passed: the units that are running, or still queued, are lost."""
        unfinished = [unit for unit in running if unit is not None] + list(self._units)
        return [(request.client, None) for unit in unfinished for request in unit.requests]


@dataclass(frozen=True)
class MethodByName:
    """A method as it is sent to a worker: its source, and the other functions the user named."""

    source: Source
    places: Sequence[tuple[str, str, str]]


def portable(plan: Plan) -> Plan:
    """The plan for a process that shares no memory: the method is sent by name."""
    if plan.method.source is None:
        raise EngineError(
            f"method '{plan.method.name}' was not made by a @coterie.method factory, so it cannot "
            "be sent to other processes on this system. Use the loop engine (run.engine = "
            '"loop") or define it in a module'
        )
    by_name = MethodByName(plan.method.source, own_places())
    return replace(plan, method=by_name)  # type: ignore[arg-type]


def with_method(plan: Plan) -> Plan:
    """The plan with its method, which is made from its name if it was sent by name."""
    if hasattr(plan.method, "tasks"):
        return plan
    by_name: MethodByName = plan.method  # type: ignore[assignment]
    for registry, name, place in by_name.places:
        registry_of(registry).know(name, place)
    return replace(plan, method=by_name.source.make())


def framed(answer: Message) -> bytes:
    """Encode a worker's answer as bytes: the work it took, then the message."""
    return _WORK.pack(answer.work.seconds, answer.work.samples) + answer.to_bytes()


def unframed(frame: Payload) -> Message | None:
    """Decode what ``framed`` encoded."""
    return received(memoryview(frame)[_WORK.size :], Work(*_WORK.unpack_from(frame)))


def check_workers(workers: int | None) -> None:
    """Refuse a number of workers below one."""
    if workers is not None and workers < 1:
        raise ConfigError(f"run.workers = {workers}: it must be 1 or more")


def available_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
