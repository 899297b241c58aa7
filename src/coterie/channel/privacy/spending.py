"""What noise costs: releases counted, ε of them, and what a method must do without."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.channel.privacy.accounting import Mechanism, Sampling, epsilon, reported, rounds_within
from coterie.channel.privacy.settings import Privacy
from coterie.core.messages import ClientId
from coterie.errors import ConfigError


@dataclass
class Spending:
    """What a run has spent: releases so far, and the present clipping bound.

    ``uploads`` are those of each client, where every client adds its own noise. ``form`` is what
    sums consist of, for a round in which nobody answers, and ``delta_of`` what they are changes of.
    """

    bound: float
    releases: int = 0
    uploads: dict[ClientId, int] = field(default_factory=dict)
    form: list[Any] = field(default_factory=list)
    delta_of: dict[str, str] = field(default_factory=lambda: {"model": "model"})

    def to_tree(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class Account:
    """The price of releases: a mechanism, and the δ at which its ε is told.

    ``budget`` is the ε that must not be exceeded, if there is one, ``noise`` the noise in units of
    the bound, ``adjacency`` the change of clients that ε is about.
    """

    mechanism: Mechanism
    delta: float
    budget: float | None = None
    most: int = 1
    noise: float = 0.0
    adjacency: str = ""

    def running(self, releases: int) -> float:
        """ε so far, by Rényi divergences: quick, and a little above what is reported."""
        return epsilon(self.mechanism, releases, self.delta, "rdp") if releases else 0.0

    def report(self, releases: int) -> dict[str, Any]:
        """ε as reported at the end, and what it means."""
        used = reported(self.mechanism)
        return {
            "epsilon": epsilon(self.mechanism, releases, self.delta) if releases else 0.0,
            "delta": self.delta,
            "releases": releases,
            "noise": self.noise or self.mechanism.multiplier,
            "accountant": used,
            "sampling": self.mechanism.sampling.kind,
            "adjacency": self.adjacency or self.mechanism.sampling.adjacency,
        }

    def fits(self, releases: int) -> bool:
        """Whether so many releases stay within the budget."""
        if self.budget is None:
            return True
        room = rounds_within(self.mechanism, self.budget, self.delta, max(releases, self.most))
        return releases <= room


def account_of(privacy: Privacy, sampling: Sampling, rounds: int) -> Account:
    """The account of a run; local noise is accounted with no help from the draw of clients.

    Two uploads of one client differ by up to twice the bound, so their noise counts half.
    """
    assert privacy.noise is not None
    assert privacy.delta is not None
    multiplier, adjacency = privacy.noise, sampling.adjacency
    if privacy.mechanism == "local":
        sampling = Sampling("all", sampling.clients, sampling.clients)
        multiplier, adjacency = multiplier / 2, "replace the data of one client"
    mechanism = Mechanism(sampling, multiplier)
    return Account(mechanism, privacy.delta, privacy.epsilon, rounds, privacy.noise, adjacency)


class Withheld(dict[str, float]):
    """Metrics that did not leave their client."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def __missing__(self, name: str) -> float:
        raise ConfigError(
            f"method {self.method} needs the number '{name}' of its clients, which no noise hides: "
            "with noise it does not leave a client. Choose another method"
        )
