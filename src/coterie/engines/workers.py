"""What engines with workers share: units that are dealt out, deaths among workers, what travels."""

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

TRIES = 3  # workers that may die of an order before it counts as lost
_WORK = struct.Struct("<dd")  # seconds and samples


@dataclass
class Unit:
    """Requests that one worker answers in one go, and how many workers died of them."""

    requests: list[Request]
    deaths: int = 0


class Queue:
    """Units that wait for a worker."""

    def __init__(self, dealt: Sequence[list[Request]]) -> None:
        self._units = deque(Unit(requests) for requests in dealt)

    def __bool__(self) -> bool:
        return bool(self._units)

    def take(self) -> Unit:
        """The next one."""
        return self._units.popleft()

    def put_back(self, unit: Unit) -> None:
        """Its worker was dead before it got the work: nobody died of that."""
        self._units.appendleft(unit)

    def died(self, unit: Unit) -> list[Request]:
        """A worker died of this unit: it comes again, or these requests are given up for lost."""
        if unit.deaths + 1 >= TRIES:
            return unit.requests
        # A batch is kept whole, for its bits depend on it, until it has killed twice.
        parts = [unit.requests] if unit.deaths == 0 else [[r] for r in unit.requests]
        self._units.extendleft(Unit(part, unit.deaths + 1) for part in reversed(parts))
        return []

    def overdue(self, taken: Iterable[Unit | None]) -> list[tuple[ClientId, None]]:
        """Time is up: what workers have in hand, and what nobody has taken, is lost."""
        waiting = [unit for unit in taken if unit is not None] + list(self._units)
        return [(request.client, None) for unit in waiting for request in unit.requests]


@dataclass(frozen=True)
class Travelling:
    """A method on its way: where it comes from, and what else the user named by its place."""

    source: Source
    places: Sequence[tuple[str, str, str]]


def travelling(plan: Plan) -> Plan:
    """The plan for a process that shares no memory: the method goes by name."""
    if plan.method.source is None:
        raise EngineError(
            f"method '{plan.method.name}' was not made by a @coterie.method factory, so it cannot "
            "be sent to other processes on this system. Use the loop engine (run.engine = "
            '"loop") or define it in a module'
        )
    travels = Travelling(plan.method.source, own_places())
    return replace(plan, method=travels)  # type: ignore[arg-type]


def arrived(plan: Plan) -> Plan:
    """The plan with its method, made again from its name if it came by that."""
    if hasattr(plan.method, "tasks"):
        return plan
    travels: Travelling = plan.method  # type: ignore[assignment]
    for registry, name, place in travels.places:
        registry_of(registry).know(name, place)
    return replace(plan, method=travels.source.make())


def framed(answer: Message) -> bytes:
    """A worker's answer in one piece: what it cost goes before the message."""
    return _WORK.pack(answer.work.seconds, answer.work.samples) + answer.to_bytes()


def unframed(frame: Payload) -> Message | None:
    """The answer again."""
    return received(memoryview(frame)[_WORK.size :], Work(*_WORK.unpack_from(frame)))


def check_workers(workers: int | None) -> None:
    """Refuse a number of workers that does nothing."""
    if workers is not None and workers < 1:
        raise ConfigError(f"run.workers = {workers}: give 1 or more")


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
