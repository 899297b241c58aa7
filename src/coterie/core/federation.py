"""The federation: the server sends orders, and receives replies or weighted means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coterie.core.messages import ClientId, Mean, Mixing, Order, Reply, Slot


class Federation(Protocol):
    """The server's only access to its clients."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients of the federation."""
        ...

    @property
    def min_group(self) -> int:
        """The minimum number of clients in a mean: 1 unless single clients are hidden."""
        ...

    @property
    def plain_means(self) -> bool:
        """Whether means are exact, plain means of the clients' arrays.

        They are not with lossy codecs, noise, robust means or layers that are not exchanged.
        """
        ...

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Return the single replies, ordered by client id; lost ones are missing."""
        ...

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Return only weighted means, one per slot; slots without replies are missing."""
        ...

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Return the means of replies that were gathered before."""
        ...
