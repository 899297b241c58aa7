"""What the federation remembers between exchanges. It has one owner, and is saved by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.channel.clocks import Seconds
from coterie.channel.exposure import Exposure
from coterie.channel.ledger import Ledger, Tally
from coterie.channel.privacy.spending import Spending
from coterie.core.messages import ClientId
from coterie.core.method import Spent
from coterie.core.tree import Tree
from coterie.core.weights import Weights

KEPT = 2  # checkpoints, and with them versions of client state, to fall back on
Held = dict[str, Weights]  # models by name, as a client decoded them
Known = tuple[dict[ClientId, str], dict[ClientId, Held]]  # versions and models of clients


@dataclass
class ChannelState:
    """What the server knows of its clients, and what they have cost.

    ``versions`` names each client's state, ``retained`` those of the last savings, ``held`` the
    models that clients hold. ``lasted`` are the seconds of the clock, ``round_lasted`` those of the
    present round. ``spending`` is what noise has cost, ``selected`` the cohort that was selected
    during the last round, ``unscored`` the round, from 1, whose scores are still to come. Members
    are those who take part. ``began`` are the versions and the models of clients as the present
    round began.
    """

    ledger: Ledger = field(default_factory=Ledger)
    exposure: Exposure = field(default_factory=Exposure)
    versions: dict[ClientId, str] = field(default_factory=dict)
    retained: list[dict[ClientId, str]] = field(default_factory=list)
    held: dict[ClientId, Held] = field(default_factory=dict)
    lasted: Seconds = field(default_factory=Seconds)
    round_lasted: Seconds = field(default_factory=Seconds)
    spending: Spending = field(default_factory=lambda: Spending(0.0))
    members: list[ClientId] = field(default_factory=list)
    selected: list[ClientId] | None = None
    unscored: int = 0
    began: tuple[dict[ClientId, str], dict[ClientId, Held]] = field(
        default_factory=lambda: ({}, {})
    )

    def begin(self, moment: int) -> None:
        """A round begins, from 1, or something outside of rounds: a new page of both ledgers."""
        self.ledger.now, self.exposure.round = Tally(), moment
        self.round_lasted, self.began = Seconds(), (dict(self.versions), dict(self.held))

    def spent(self) -> Spent:
        """What the run has cost: bytes both ways, wasted ones too, and seconds."""
        moved = self.ledger.total + self.ledger.total_wasted
        return Spent(moved.total, **asdict(self.lasted))

    def go_back(self) -> None:
        """The present round came to nothing: clients go on from where they were before it."""
        self.versions, self.held = dict(self.began[0]), dict(self.began[1])
        self.ledger.abandon()
        self.exposure.abandon()

    def version_of(self, client: ClientId, in_round: bool) -> tuple[str, list[str]]:
        """The version of a client's state that it goes on from, and others that it must not forget.

        Those are of the last savings and, ``in_round``, of its beginning: a round that is abandoned
        in a later exchange goes back there.
        """
        expects = self.versions.get(client, "")
        back = [*self.retained, *([self.began[0]] if in_round else [])]
        return expects, sorted({versions.get(client, "") for versions in back} - {"", expects})

    def adopt(self, client: ClientId, version: str | None, held: Held) -> None:
        """A reply counts: the client's state is now this version, and it holds these models."""
        if version is not None:
            self.versions[client] = version
            if held:
                self.held[client] = {**self.held.get(client, {}), **held}

    def retain(self) -> None:
        """The present versions were saved: clients keep those of the last two savings."""
        self.retained = [*self.retained, dict(self.versions)][-KEPT:]

    def since_saved(self) -> dict[ClientId, str]:
        """The versions that the last saving did not name."""
        last = self.retained[-1] if self.retained else {}
        return {c: v for c, v in self.versions.items() if last.get(c) != v}

    def add(self, seconds: Seconds) -> None:
        """Let the clock go on."""
        self.lasted, self.round_lasted = self.lasted + seconds, self.round_lasted + seconds

    def to_tree(self) -> dict[str, Tree]:
        """For a checkpoint."""
        return {
            "ledger": self.ledger.to_tree(),
            "exposure": self.exposure.to_tree(),
            "versions": dict(self.versions),
            "retained": self.retained[1 - KEPT :],
            "held": folded(self.held),
            "lasted": _tuple(self.lasted),
            "round_lasted": _tuple(self.round_lasted),
            "spending": self.spending.to_tree(),
            "members": list(self.members),
            "selected": self.selected,
            "unscored": self.unscored,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> ChannelState:
        """From a checkpoint. Its versions were saved with it, so clients keep them."""
        versions = dict(tree["versions"])
        return ChannelState(
            ledger=Ledger.from_tree(tree["ledger"]),
            exposure=Exposure.from_tree(tree["exposure"]),
            versions=versions,
            # Orders name what clients keep: as often as without a crash, or bytes would be others.
            retained=[*map(dict, tree["retained"]), dict(versions)],
            held=unfolded(tree["held"]),
            lasted=Seconds(*tree["lasted"]),
            round_lasted=Seconds(*tree["round_lasted"]),
            spending=Spending(**tree["spending"]),
            members=list(tree["members"]),
            selected=tree["selected"],
            unscored=int(tree["unscored"]),
        )


def _tuple(seconds: Seconds) -> tuple[float, float, float]:
    return seconds.computation, seconds.communication, seconds.waiting


def folded(held: Mapping[ClientId, Held]) -> dict[str, Any]:
    """Models that clients hold, each written once however many hold it."""
    models: dict[int, Weights] = {}
    places = {c: {n: id(w) for n, w in own.items()} for c, own in held.items()}
    for own in held.values():
        models |= {id(w): w for w in own.values()}
    numbers = {key: number for number, key in enumerate(models)}
    return {
        "models": list(models.values()),
        "places": {c: {n: numbers[k] for n, k in own.items()} for c, own in places.items()},
    }


def unfolded(tree: Mapping[str, Any]) -> dict[ClientId, Held]:
    """The models that clients hold again."""
    return {c: {n: tree["models"][k] for n, k in own.items()} for c, own in tree["places"].items()}
