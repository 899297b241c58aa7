"""What an engine is: something that carries requests to clients and brings their answers back."""

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

    One that is ``spare`` is not worth waiting for: once all others have been answered, an engine
    may give it up for lost when it likes.
    """

    client: ClientId
    message: Message
    together: bool = False
    spare: bool = False


Answers = Generator[tuple[ClientId, "Message | None"], None, None]


class Engine(Protocol):
    """Carries requests to clients. Answers come in any order; a lost one comes as None.

    What has not come when ``time.monotonic()`` passes ``until`` is not waited for. An engine whose
    exchanges are dear, whatever they carry, ``piggybacks``: scores go with the next round's orders.
    """

    @property
    def piggybacks(self) -> bool:
        """Whether scores should wait for an exchange that is made anyway."""
        ...

    @property
    def clients(self) -> Sequence[ClientId]:
        """Whom it can reach."""
        ...

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Carry these out."""
        ...

    def close(self) -> None:
        """End everything it started."""
        ...


class Remote(Engine, Protocol):
    """Carries requests to clients on machines of others, which come and go."""

    @property
    def population(self) -> Population:
        """What is known of the clients: how many samples each has, and of what kind."""
        ...

    @property
    def agreement(self) -> str:
        """A name for what all clients were told of the run."""
        ...

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """How many training samples each client says it has."""
        ...

    @property
    def spared(self) -> int:
        """Bytes of arrays that did not travel, for their clients had them."""
        ...

    def present(self) -> set[ClientId]:
        """Who can be reached now."""
        ...

    def begin(self, round: int) -> None:
        """Another round: what clients got in the one before is not taken for known."""
        ...

    def doubt(self, clients: Collection[ClientId]) -> None:
        """Their answers could not be used: before the next round they are asked anew."""
        ...

    def turn_away(self, clients: Collection[ClientId], why: str) -> None:
        """These cannot be members, for this reason."""
        ...

    def arrivals(self, members: Sequence[ClientId], least: int, closed: str) -> list[ClientId]:
        """Wait until so many of the members are there; who else is there now, and ready.

        Nobody else is let in if it is ``closed``, for this reason.
        """
        ...
