"""What of the clients' replies a method gets to see: the outermost stage of the channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.core.aggregate import mix
from coterie.core.messages import ClientId, Mean, Mixing, Order, Reply, Slot
from coterie.core.weights import Weights

if TYPE_CHECKING:
    from coterie.channel.channel import Channel


class Release:
    """Makes replies and means of exchanges; with privacy, only what may be shown.

    Here is what most of them have in common; a release overrides what it does otherwise.
    """

    channel: Channel

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.channel.clients

    @property
    def min_group(self) -> int:
        """The fewest clients that a mean may be of."""
        return 1

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        return False

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Another round, with these models."""

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself."""
        raise NotImplementedError

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The means of replies that were shown: nothing more is learned."""
        return mix(replies, into, by_examples)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means."""
        raise NotImplementedError


@dataclass
class Plain(Release):
    """Shows everything that came, and notes in the exposure ledger that it did."""

    channel: Channel

    @property
    def plain_means(self) -> bool:
        """Whether a mean is the plain mean of just what clients sent."""
        terms = self.channel.terms
        return terms.coding.upwards.exact and terms.outliers != "clip"

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, in client-id order; lost ones are missing."""
        replies = self.channel.exchange(orders)
        self.channel.stages.disclosure.saw(replies, "each", "none")
        return list(replies)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Only weighted means, one per slot; a slot that nobody answered is absent."""
        replies = self.channel.exchange(orders)
        self.channel.stages.disclosure.saw(replies, "means", "none, averaged on arrival")
        means = mix(replies, into, by_examples)
        for mean in means.values():
            if len(mean.clients) == 1:  # such a mean is what that client sent
                one = [r for r in replies if r.client == mean.clients[0]]
                self.channel.stages.disclosure.saw(one, "means", "none, a mean of one")
        return means
