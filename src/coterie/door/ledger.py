"""The ledger: every byte that went through the door, by client, round and purpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.federation import ClientId
from coterie.tree import Tree


@dataclass(frozen=True)
class Bytes:
    """Bytes down to clients and up from them."""

    down: int = 0
    up: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.down + other.down, self.up + other.up)

    @property
    def total(self) -> int:
        """Both ways together."""
        return self.down + self.up


@dataclass
class Ledger:
    """Real encoded lengths, headers included.

    ``method`` is what the method costs; ``apart`` is what only a simulation or a report costs
    (scoring, and orders that a real client would give itself).
    """

    method: dict[ClientId, Bytes] = field(default_factory=lambda: defaultdict(Bytes))
    apart: Bytes = field(default_factory=Bytes)
    lost: int = 0

    def record(self, client: ClientId, moved: Bytes, apart: bool, answered: bool) -> None:
        """One order and its reply, if it came."""
        if apart:
            self.apart += moved
        else:
            self.method[client] += moved
        self.lost += not answered

    @property
    def total(self) -> Bytes:
        """What the method has cost so far, all clients together."""
        return sum(self.method.values(), Bytes())

    def to_tree(self) -> dict[str, Tree]:
        """For a checkpoint."""
        return {
            "method": {c: (b.down, b.up) for c, b in self.method.items()},
            "apart": (self.apart.down, self.apart.up),
            "lost": self.lost,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> Ledger:
        """From a checkpoint."""
        ledger = Ledger(apart=Bytes(*tree["apart"]), lost=tree["lost"])
        ledger.method.update({c: Bytes(*b) for c, b in tree["method"].items()})
        return ledger
