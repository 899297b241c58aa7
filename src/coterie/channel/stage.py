"""What a stage of the channel is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


class Stages:
    """All stages of a channel, and for each step those that take part in it, in order.

    Orders pass the stages from the first to the last, replies from the last to the first.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        back = stages[::-1]
        self.begin: list[Callable[[Phase], None]] = _overriding(stages, "begin")
        self.outward: list[Callable[[Exchange], None]] = _overriding(stages, "outward")
        self.vet: list[Callable[[Exchange, Outgoing, Message], None]] = _overriding(back, "vet")
        self.read: list[Callable[[Exchange, Outgoing, ReplyBody], None]] = _overriding(back, "read")
        self.inward: list[Callable[[Exchange], None]] = _overriding(back, "inward")

    def of(self, kind: type[S]) -> S:
        """The stage of this kind."""
        return next(stage for stage in self._stages if isinstance(stage, kind))


def _overriding(stages: Sequence[Stage], name: str) -> list[Any]:
    """This method of the stages that have one of their own."""
    return [
        getattr(stage, name)
        for stage in stages
        if getattr(type(stage), name) is not getattr(Stage, name)
    ]


S = TypeVar("S", bound=Stage)
