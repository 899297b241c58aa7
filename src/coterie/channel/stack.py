"""The stages of the channel, in the order in which they see an order on its way out.

Replies pass them the other way round. What of the replies a method then gets to see is for the
release that is outermost of all: everything, or with privacy only what may be shown
(``channel.Plain``, and in ``privacy`` secure sums, central noise and local noise).

| stage | on the way out | on the way back | client half |
|---|---|---|---|
| Records | | bytes, vectors seen, new client states; a round of too few is given up | Store |
| Piggyback | adds scoring to orders | takes the scores | ClientPiggyback |
| Timing | who is there; when the exchange ends | the clock goes on; who is late | |
| Outliers | | leaves out what is unlike the others | finite uploads only |
| Vetting | | refuses what makes no sense | |
| Compression | codes arrays | decodes arrays | ClientCompression |

A stage that has nothing to do in a run is left out: Piggyback where scores do not wait for other
exchanges, Timing where nobody is away or late, Vetting where no client is somebody else's,
Compression without a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from coterie.channel.compression.stage import Compression
from coterie.channel.exchange import Exchange, Outgoing, Phase, Stage, Terms
from coterie.channel.messages import ReplyBody
from coterie.channel.outliers import Outliers
from coterie.channel.piggyback import Piggyback
from coterie.channel.records import Records
from coterie.channel.state import ChannelState
from coterie.channel.timing import Timing
from coterie.channel.vetting import Vetting
from coterie.channel.wire import Message, Wire

S = TypeVar("S", bound=Stage)


class Stages:
    """The stages of a channel, and for each step those that take part in it, in order.

    Orders pass the stages from the first to the last, replies from the last to the first.
    ``records`` and ``compression`` are also used by name.
    """

    def __init__(
        self, wire: Wire, terms: Terms, state: ChannelState, piggybacks: bool, elsewhere: bool
    ) -> None:
        self.records = Records(wire, terms, state)
        self.compression: Compression | None = None
        if not terms.coding.plainly:
            self.compression = Compression(wire, terms, state)
        listed: list[tuple[bool, Stage | None]] = [
            (True, self.records),
            (piggybacks, Piggyback(terms, state)),
            (elsewhere or terms.timed, Timing(terms, state)),
            (True, Outliers(terms)),
            (elsewhere, Vetting(wire)),
            (True, self.compression),
        ]
        self._stages = [stage for needed, stage in listed if needed and stage is not None]
        back = self._stages[::-1]
        self.begin: list[Callable[[Phase], None]] = _overriding(self._stages, "begin")
        self.outward: list[Callable[[Exchange], None]] = _overriding(self._stages, "outward")
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
