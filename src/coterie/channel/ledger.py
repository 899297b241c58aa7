"""The ledger: every byte that went through the door, by client, round, kind and purpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.core.events import Way
from coterie.core.messages import ClientId
from coterie.core.tree import Tree


@dataclass(frozen=True)
class Bytes:
    """Bytes down to clients and up from them."""

    down: int = 0
    up: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.down + other.down, self.up + other.up)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.down - other.down, self.up - other.up)

    @property
    def total(self) -> int:
        """Both ways together."""
        return self.down + self.up

    def to_json(self) -> Way:
        """As events have it."""
        return {"down": self.down, "up": self.up}

    @staticmethod
    def from_json(way: Way | None) -> Bytes:
        """From an event."""
        return Bytes() if way is None else Bytes(way["down"], way["up"])


def _counts() -> dict[Any, Bytes]:
    return defaultdict(Bytes)


@dataclass
class Tally:
    """Real encoded lengths, headers included.

    ``method`` is what the method costs, by client; ``kinds`` the same by what it is for;
    ``wasted`` what went to and came from clients whose reports did not count, because they were
    lost, late or of an abandoned round; ``unmetered`` is what only a simulation or a report costs
    (scoring, and orders that a real client would give itself). ``entries``, of the present round
    only, are by client and kind together.
    """

    method: dict[ClientId, Bytes] = field(default_factory=_counts)
    kinds: dict[str, Bytes] = field(default_factory=_counts)
    wasted: dict[ClientId, Bytes] = field(default_factory=_counts)
    entries: dict[tuple[ClientId, str], Bytes] = field(default_factory=_counts)
    unmetered: Bytes = field(default_factory=Bytes)
    lost: int = 0
    late: int = 0

    @property
    def total(self) -> Bytes:
        """What the method has cost, all clients together."""
        return sum(self.method.values(), Bytes())

    @property
    def total_wasted(self) -> Bytes:
        """What was wasted, all clients together."""
        return sum(self.wasted.values(), Bytes())


@dataclass
class Ledger(Tally):
    """All since the start, and ``now`` the present round alone."""

    now: Tally = field(default_factory=Tally)

    def begin(self) -> None:
        """Another round begins."""
        self.now = Tally()

    def record(
        self, client: ClientId, moved: Bytes, kinds: Mapping[str, Bytes], unmetered: bool = False
    ) -> None:
        """An order and the reply that counts."""
        for tally in (self, self.now):
            if unmetered:
                tally.unmetered += moved
                continue
            tally.method[client] += moved
            for kind, bytes in kinds.items():
                tally.kinds[kind] += bytes
        for kind, bytes in kinds.items():
            self.now.entries[client, kind] += bytes

    def waste(
        self, client: ClientId, moved: Bytes, unmetered: bool = False, late: bool = False
    ) -> None:
        """An order whose reply never came, or came too late."""
        for tally in (self, self.now):
            if unmetered:
                tally.unmetered += moved
            else:
                tally.wasted[client] += moved
            tally.late += late
            tally.lost += not late

    def abandon(self) -> None:
        """The present round came to nothing: what it cost was wasted."""
        for client, moved in self.now.method.items():
            self.method[client] -= moved
            for tally in (self, self.now):
                tally.wasted[client] += moved
        for kind, moved in self.now.kinds.items():
            self.kinds[kind] -= moved
        self.now.method.clear()
        self.now.kinds.clear()
        self.now.entries.clear()

    def rows(self, round: int) -> list[dict[str, int | str]]:
        """The present round as a table: a row for each client and kind, and for what was wasted."""
        found = {**self.now.entries, **{(c, "wasted"): b for c, b in self.now.wasted.items()}}
        return [
            {"round": round, "client": c, "kind": kind, "down": b.down, "up": b.up}
            for (c, kind), b in sorted(found.items())
        ]

    def to_tree(self) -> dict[str, Tree]:
        """For a checkpoint."""
        return {
            "method": {c: (b.down, b.up) for c, b in self.method.items()},
            "kinds": {k: (b.down, b.up) for k, b in self.kinds.items()},
            "wasted": {c: (b.down, b.up) for c, b in self.wasted.items()},
            "unmetered": (self.unmetered.down, self.unmetered.up),
            "lost": self.lost,
            "late": self.late,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> Ledger:
        """From a checkpoint."""
        ledger = Ledger(unmetered=Bytes(*tree["unmetered"]), lost=tree["lost"], late=tree["late"])
        for name in ("method", "kinds", "wasted"):
            getattr(ledger, name).update({k: Bytes(*b) for k, b in tree[name].items()})
        return ledger
