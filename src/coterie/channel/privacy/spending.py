"""The privacy budget: counts releases, computes their ε, and withholds metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.channel.privacy.accounting import Mechanism, Sampling, epsilon, reported, rounds_within
from coterie.channel.privacy.settings import Privacy
from coterie.core.messages import ClientId
from coterie.errors import ConfigError


@dataclass
class Spending:
    """What a run has spent so far: its releases, and the current clipping bound.

    ``uploads`` counts each client's uploads, where clients add their own noise. ``form`` and
    ``delta_of`` are the form and the references of the last sums, for groups without participants.
    """

    bound: float
    releases: int = 0
    uploads: dict[ClientId, int] = field(default_factory=dict)
    form: list[Any] = field(default_factory=list)
    delta_of: dict[str, str] = field(default_factory=lambda: {"model": "model"})

    def to_tree(self) -> dict[str, Any]:
        """Convert to plain values for a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class Account:
    """Computes the privacy cost of releases: a mechanism, and the δ for which ε is reported.

    ``budget`` is the ε that must not be exceeded, if there is one; ``noise`` is the noise in units
    of the bound; ``adjacency`` names the change of clients that ε refers to.
    """

    mechanism: Mechanism
    delta: float
    budget: float | None = None
    most: int = 1
    noise: float = 0.0
    adjacency: str = ""

    def running(self, releases: int) -> float:
        """The ε so far, by Rényi divergences: fast, and slightly above the reported value."""
        return epsilon(self.mechanism, releases, self.delta, "rdp") if releases else 0.0

    def report(self, releases: int) -> dict[str, Any]:
        """The ε as reported at the end of a run, with what is needed to interpret it."""
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
        """Whether this number of releases stays within the budget."""
        if self.budget is None:
            return True
        room = rounds_within(self.mechanism, self.budget, self.delta, max(releases, self.most))
        return releases <= room


def account_of(privacy: Privacy, sampling: Sampling, rounds: int) -> Account:
    """The account of a run; for local noise, the sampling of clients is not taken into account.

    Two possible uploads of a client differ by up to twice the bound, so local noise counts half.
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
    """In place of metrics that did not leave their clients; using one is an error."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def __missing__(self, name: str) -> float:
        raise ConfigError(
            f"method {self.method} needs the metric '{name}' of its clients, but with noise no "
            "metric leaves a client, since metrics have none. Choose another method"
        )
