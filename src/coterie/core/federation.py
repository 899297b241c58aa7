"""The server's only way to its clients: orders out, replies or weighted means back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coterie.core.messages import ClientId, Mean, Mixing, Order, Reply, Slot


class Federation(Protocol):
    """The server's only door to its clients."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        ...

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of: 1 unless single clients are hidden."""
        ...

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent.

        With lossy codecs, noise, robust means or layers at rest it is not.
        """
        ...

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        ...

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        ...

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        ...
