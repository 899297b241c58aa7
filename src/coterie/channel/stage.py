"""What a stage of the channel is."""

from __future__ import annotations

from coterie.channel.exchange import Exchange, Outgoing, Phase
from coterie.channel.messages import ReplyBody
from coterie.channel.wire import Message


class Stage:
    """One concern of the channel: its server half. It overrides what it needs.

    A client half, where there is one, is in the same module; the two know only each other.
    """

    def begin(self, phase: Phase) -> None:
        """A round, or something outside of rounds, begins."""

    def outward(self, exchange: Exchange) -> None:
        """Orders are about to be sent."""

    def vet(self, exchange: Exchange, out: Outgoing, message: Message) -> None:
        """A message came; it may be refused before it is read."""

    def read(self, exchange: Exchange, out: Outgoing, body: ReplyBody) -> None:
        """This is what it says."""

    def inward(self, exchange: Exchange) -> None:
        """All that comes has come."""
