"""The plan of a run: everything that the client side needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from coterie.channel.compression.coding import Coding
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.identity import Roster
from coterie.channel.privacy.settings import Privacy
from coterie.client.fit import Criterion
from coterie.core.messages import ClientId
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data.population import Population

if TYPE_CHECKING:
    from coterie.core.method import Method

Metric = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Training:
    """The clients' loss, their training schedule, and further metrics for scoring.

    ``batch_clients`` is the number of clients that train as one stacked model.
    """

    criterion: Criterion
    schedule: Schedule
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    batch_clients: int = 1


@dataclass(frozen=True)
class ClientSecrets:
    """The secrets of a real client; empty in a simulation.

    ``salts`` are secrets that enter the clients' random streams, ``record`` is the file with what a
    client has signed, and ``agreement`` is a digest of the terms that it was told.
    """

    salts: Mapping[ClientId, str] = field(default_factory=dict)
    record: Path | None = None
    agreement: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything that clients need to know of a run; ``folder`` holds their states."""

    population: Population
    module: nn.Module
    start: Weights
    method: Method
    training: Training
    seed: int
    folder: Path
    bn: str = "shared"
    device: str = "cpu"
    coding: Coding = field(default_factory=Coding)
    privacy: Privacy = field(default_factory=Privacy)
    secrets: ClientSecrets = field(default_factory=ClientSecrets)

    @property
    def roster(self) -> Roster:
        """The clients' public signature keys."""
        entropy = Entropy(self.privacy.randomness, self.seed)
        return Roster(entropy, self.folder, range(len(self.population.clients)))

    @property
    def train_sizes(self) -> dict[ClientId, int]:
        """The number of training samples of each client."""
        return {i: train for i, (train, _, _) in enumerate(self.population.sizes)}

    @property
    def held_sizes(self) -> dict[ClientId, int]:
        """The number of validation and test samples of each client."""
        return {i: val + test for i, (_, val, test) in enumerate(self.population.sizes)}
