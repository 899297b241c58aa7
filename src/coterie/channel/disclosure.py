"""The exposure ledger's stage: which vectors of single clients reached the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coterie.channel.exchange import Exchange, Phase
from coterie.channel.stage import Stage
from coterie.channel.state import ChannelState
from coterie.core.messages import Array, ClientId, Reply
from coterie.core.weights import Weights


@dataclass
class Disclosure(Stage):
    """Notes what was seen of single clients; ``exposed`` are the ways in which it was."""

    state: ChannelState
    moment: int = 1
    exposed: set[str] = field(default_factory=set)
    uncounted: dict[ClientId, Mapping[str, Array]] = field(default_factory=dict)

    def begin(self, phase: Phase) -> None:
        """Another round."""
        self.moment = phase.moment
        self.state.exposure.begin(phase.moment)

    def inward(self, exchange: Exchange) -> None:
        """Replies that do not count were here all the same."""
        bodies = {**exchange.left_out, **exchange.bodies}
        reported = set(exchange.reported)
        self.uncounted = {c: bodies[c]["arrays"] for c in sorted(bodies) if c not in reported}

    def saw(self, replies: Sequence[Reply], asked: str, protection: str) -> None:
        """Note which vectors of single clients reached the server, ``asked`` for as what."""
        seen = [(reply.client, reply.arrays) for reply in replies]
        late, self.uncounted = self.uncounted, {}
        for client, arrays in (*seen, *late.items()):
            if arrays:
                self.exposed.add(asked)
                self.state.exposure.single(client, self.moment, layers_of(arrays), protection)


def layers_of(arrays: Mapping[str, Array]) -> dict[str, tuple[str, ...]]:
    """The layers of each array; none for those that are no weights."""
    return {
        name: array.layout.layers if isinstance(array, Weights) else ()
        for name, array in arrays.items()
    }
