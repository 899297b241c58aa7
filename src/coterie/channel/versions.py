"""Versions of clients' states: a reply that counts makes the next one, a lost one changes nothing.

Every order names the version of client state that it expects. A client whose task changes its
state makes a new version, named after the order; the server adopts that version only when the
reply has arrived and counts. So a lost or late reply, a retry, an abandoned round or a resumed
server never lets a client run ahead. The client half is the store of its states.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.channel.exchange import Exchange
from coterie.channel.stage import Stage
from coterie.channel.state import ChannelState
from coterie.channel.tasks import kind_of


@dataclass
class Versions(Stage):
    """Names the version that each order expects, and adopts those of replies that count."""

    state: ChannelState

    def outward(self, exchange: Exchange) -> None:
        """Which version a client goes on from, and which others it must not forget."""
        for client, out in exchange.outgoing.items():
            kind = kind_of(out.order.task)
            if kind.protocol:
                continue
            expects = self.state.versions.get(client, "")
            # A round that is abandoned in a later exchange goes back to where it began.
            back = [*self.state.retained, *([exchange.phase.began] if kind.trains else [])]
            keep = {versions.get(client, "") for versions in back} - {"", expects}
            if expects:
                out.body["expects"] = expects
            if keep:
                out.body["keep"] = sorted(keep)

    def inward(self, exchange: Exchange) -> None:
        """Replies that count are adopted, unless a stage decides that later."""
        for client in exchange.reported if exchange.adopt else ():
            version = exchange.bodies[client].get("version")
            self.state.adopt(client, version, exchange.outgoing[client].held)
