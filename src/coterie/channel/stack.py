"""The stages of the channel, in the order in which they see an order on its way out.

Replies pass them the other way round. What of the replies a method then gets to see is for the
release that is outermost of all: everything, or with privacy only what may be shown
(``release.Plain``, ``secure``, ``central``, ``local``).

| stage | on the way out | on the way back | client half |
|---|---|---|---|
| Reports | | a round that too few report in is given up | |
| Piggyback | adds scoring to orders | takes the scores | ClientPiggyback |
| Versions | names the client state expected | adopts that of replies that count | store |
| Metering | | books the bytes | |
| Disclosure | | notes whose vectors came | |
| Timing | who is there; when the exchange ends | the clock goes on; who is late | |
| Outliers | | leaves out what is unlike the others | |
| Vetting | | refuses what makes no sense | finite uploads only |
| Compression | codes arrays | decodes arrays | ClientCompression |
"""

from __future__ import annotations

from coterie.channel.compression.stage import Compression
from coterie.channel.disclosure import Disclosure
from coterie.channel.exchange import Terms
from coterie.channel.metering import Metering
from coterie.channel.piggyback import Piggyback
from coterie.channel.stage import Stages
from coterie.channel.state import ChannelState
from coterie.channel.timing import Reports, Timing
from coterie.channel.versions import Versions
from coterie.channel.vetting import Outliers, Vetting
from coterie.channel.wire import Wire


def stages(wire: Wire, terms: Terms, state: ChannelState) -> Stages:
    """All stages, outermost first."""
    return Stages(
        [
            Reports(terms),
            Piggyback(terms, state),
            Versions(state),
            Metering(wire, state),
            Disclosure(state),
            Timing(terms, state),
            Outliers(terms),
            Vetting(wire),
            Compression(wire, terms, state),
        ]
    )
