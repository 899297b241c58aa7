"""The interface of engines, which deliver requests to clients and return their answers."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coterie.core.messages import ClientId

if TYPE_CHECKING:
    from coterie.channel.wire import Message
    from coterie.data.population import Population


@dataclass(frozen=True)
class Request:
    """A message for one client; requests marked ``together`` may be answered as one batch.

    A request that is ``spare`` is not worth waiting for: once all others have been answered, an
    engine may count it as lost at any time.
    """

    client: ClientId
    message: Message
    together: bool = False
    spare: bool = False


Answers = Generator[tuple[ClientId, "Message | None"], None, None]


class Engine(Protocol):
    """Delivers requests to clients. Answers come in any order; a lost answer is None.

    An engine stops waiting when ``time.monotonic()`` passes ``until``. An engine for which every
    exchange is expensive ``piggybacks``: scores are asked for with the next round's orders.
    """

    @property
    def piggybacks(self) -> bool:
        """Whether scores should wait for the next exchange instead of having one of their own."""
        ...

    @property
    def clients(self) -> Sequence[ClientId]:
        """The clients that it can reach."""
        ...

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Deliver the requests, and yield the answers."""
        ...

    def close(self) -> None:
        """Stop everything that it started."""
        ...


class Remote(Engine, Protocol):
    """Delivers requests to clients on other people's machines, which can connect and disconnect."""

    @property
    def population(self) -> Population:
        """What is known about clients' data: their kind, and each client's number of samples."""
        ...

    @property
    def agreement(self) -> str:
        """A digest of the terms of the run that all clients were sent."""
        ...

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """The number of training samples that each client reports."""
        ...

    @property
    def spared(self) -> int:
        """Bytes of arrays that were not sent because their clients had them already."""
        ...

    def present(self) -> set[ClientId]:
        """The clients that can be reached now."""
        ...

    def begin(self, round: int) -> None:
        """Begin a round; do not assume that clients still have the arrays of the previous one."""
        ...

    def doubt(self, clients: Collection[ClientId]) -> None:
        """Ask these clients again before the next round, because their answers were unusable."""
        ...

    def turn_away(self, clients: Collection[ClientId], why: str) -> None:
        """Refuse these clients as members, for this reason."""
        ...

    def arrivals(self, members: Sequence[ClientId], least: int, closed: str) -> list[ClientId]:
        """Wait for at least ``least`` members; return the other clients that are ready to join.

        If ``closed`` is not empty, it is the reason why no other client can join.
        """
        ...
