"""The ledger of communication: all bytes sent, by client, round and kind."""

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
        """The bytes of both directions together."""
        return self.down + self.up

    def to_json(self) -> Way:
        """Convert to the form that events use."""
        return {"down": self.down, "up": self.up}

    @staticmethod
    def from_json(way: Way | None) -> Bytes:
        """Read from the form that events use."""
        return Bytes() if way is None else Bytes(way["down"], way["up"])


@dataclass
class Tally:
    """Counts of bytes: the real lengths of the encoded messages, headers included.

    ``method`` is what the method costs, by client, and ``total`` their sum; ``kinds`` is the same
    by kind of content.
    ``wasted`` is what was sent to and from clients whose reports did not count, because they were
    lost, late, or part of an abandoned round; ``total_wasted`` is the sum. ``unmetered`` is what
    only a simulation or a report needs (scoring, and orders that a real client would give itself).
    ``entries`` are by client and kind, for the current round only.
    """

    method: dict[ClientId, Bytes] = field(default_factory=lambda: defaultdict(Bytes))
    kinds: dict[str, Bytes] = field(default_factory=lambda: defaultdict(Bytes))
    wasted: dict[ClientId, Bytes] = field(default_factory=lambda: defaultdict(Bytes))
    entries: dict[tuple[ClientId, str], Bytes] = field(default_factory=lambda: defaultdict(Bytes))
    total: Bytes = field(default_factory=Bytes)
    total_wasted: Bytes = field(default_factory=Bytes)
    unmetered: Bytes = field(default_factory=Bytes)
    lost: int = 0
    late: int = 0


@dataclass
class Ledger(Tally):
    """The bytes since the start of the run; ``now`` counts those of the current round."""

    now: Tally = field(default_factory=Tally)

    def record(
        self, client: ClientId, moved: Bytes, kinds: Mapping[str, Bytes], unmetered: bool = False
    ) -> None:
        """Count an order and its accepted reply."""
        for tally in (self, self.now):
            if unmetered:
                tally.unmetered += moved
                continue
            tally.method[client] += moved
            tally.total += moved
            for kind, bytes in kinds.items():
                tally.kinds[kind] += bytes
        for kind, bytes in kinds.items():
            self.now.entries[client, kind] += bytes

    def waste(
        self, client: ClientId, moved: Bytes, unmetered: bool = False, late: bool = False
    ) -> None:
        """Count an order whose reply was lost or came too late."""
        for tally in (self, self.now):
            if unmetered:
                tally.unmetered += moved
            else:
                tally.wasted[client] += moved
                tally.total_wasted += moved
            tally.late += late
            tally.lost += not late

    def abandon(self) -> None:
        """Count the bytes of the current round as wasted, since it was abandoned."""
        for client, moved in self.now.method.items():
            self.method[client] -= moved
            for tally in (self, self.now):
                tally.wasted[client] += moved
        for kind, moved in self.now.kinds.items():
            self.kinds[kind] -= moved
        abandoned, self.now.total = self.now.total, Bytes()
        self.total -= abandoned
        for tally in (self, self.now):
            tally.total_wasted += abandoned
        self.now.method.clear()
        self.now.kinds.clear()
        self.now.entries.clear()

    def rows(self, round: int) -> list[dict[str, int | str]]:
        """The current round as a table: a row for each client and kind, ``wasted`` included."""
        entries = {**self.now.entries, **{(c, "wasted"): b for c, b in self.now.wasted.items()}}
        return [
            {"round": round, "client": c, "kind": kind, "down": b.down, "up": b.up}
            for (c, kind), b in sorted(entries.items())
        ]

    def to_tree(self) -> dict[str, Tree]:
        """Convert to plain values for a checkpoint: columns, which are quick to write."""
        return {
            "method": _columns(self.method),
            "kinds": _columns(self.kinds),
            "wasted": _columns(self.wasted),
            "unmetered": (self.unmetered.down, self.unmetered.up),
            "lost": self.lost,
            "late": self.late,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> Ledger:
        """Restore a ledger from a checkpoint."""
        ledger = Ledger(unmetered=Bytes(*tree["unmetered"]), lost=tree["lost"], late=tree["late"])
        for name in ("method", "kinds", "wasted"):
            rows = zip(*tree[name], strict=True)
            getattr(ledger, name).update({key: Bytes(down, up) for key, down, up in rows})
        ledger.total = sum(ledger.method.values(), Bytes())
        ledger.total_wasted = sum(ledger.wasted.values(), Bytes())
        return ledger


def _columns(table: Mapping[Any, Bytes]) -> list[list[Any]]:
    """The keys of a table, and the bytes down and up, as a list each."""
    moved = table.values()
    return [list(table), [b.down for b in moved], [b.up for b in moved]]
