"""The result of a run: history, scores, groups and models."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from coterie.channel.channel import Channel
from coterie.channel.exchange import Terms
from coterie.channel.ledger import Bytes, Ledger
from coterie.channel.privacy.settings import Privacy
from coterie.channel.state import ChannelState, Held
from coterie.channel.wire import Wire
from coterie.client.fit import FlatModel, outputs
from coterie.client.plan import Plan
from coterie.core.events import Event, Summary
from coterie.core.messages import ClientId, Slot
from coterie.core.method import State
from coterie.core.weights import Weights
from coterie.data.population import Population
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.results.evaluation import Scores
from coterie.results.notebook import Notebook, reading_of

if TYPE_CHECKING:
    from coterie.report.reading import Reading


@dataclass(frozen=True, repr=False)
class Result(Notebook):
    """A finished run: its history, its clients, and their models.

    ``history`` has an entry for each round, ``clients`` a row for each client, and ``summary`` the
    final scores; ``begun`` is the event before the first round, with what the method found then;
    ``newcomers`` are the clients that were held out. A notebook shows the result as a card; see
    also ``to_dataframe()`` and ``figure("groups")``.
    """

    history: Sequence[Event]
    clients: Sequence[Mapping[str, Any]]
    summary: Summary
    state: State
    plan: Plan
    versions: Mapping[ClientId, str]
    rounds: int
    held: Mapping[ClientId, Held] = field(default_factory=dict)
    begun: Event = field(default_factory=Event)
    newcomers: Sequence[ClientId] = ()
    directory: Path | None = None
    scratch: tempfile.TemporaryDirectory[str] | None = None

    def _read(self) -> Reading:
        return reading_of(self)

    @property
    def accuracy(self) -> float:
        """The mean score of the last model that clients received (R² for a regression)."""
        if not self.summary["received"]:
            raise ConfigError("no client has test data: set test_fraction above 0")
        score = self.summary["received"][self.summary["judged_by"]]
        return float("nan" if score is None else score)

    @property
    def groups(self) -> dict[ClientId, Slot]:
        """The final group of each client."""
        return dict(self.state.groups)

    def weights(self, client: ClientId) -> Weights:
        """The weights of the model that a client would use now."""
        clients = range(len(self.plan.population.clients))
        if client not in clients:
            raise ConfigError(f"there is no client {client}; they are 0 to {len(clients) - 1}")
        if client in self.newcomers and client not in self.state.groups:
            raise ConfigError(
                f"client {client} was held out, and the checkpoint is from before it joined: its "
                "model is not in the run directory. Let it join with: coterie admit"
            )
        # Fetch the model as the final scores did, through the codec for downloads.
        plan = replace(self.plan, privacy=Privacy())  # the client asks for its own model
        wire = Wire(plan.start.layout, plan.coding.downwards.plain)
        terms = Terms(plan.coding, start=plan.start, seed=plan.seed)
        state = ChannelState(versions=dict(self.versions), held=dict(self.held))
        channel = Channel(Loop(replace(plan, device="cpu")), wire, terms=terms, state=state)
        channel.begin(max(0, self.rounds - 1), stage="final")
        return channel.fetch(client, plan.method.sends(self.state, client))

    def model(self, client: ClientId) -> nn.Module:
        """The model that a client would use now, as a module."""
        flat = FlatModel(copy.deepcopy(self.plan.module), bn=self.plan.bn)
        flat.load(self.weights(client))
        return flat.module.eval()

    def predict(self, client: ClientId, x: Tensor) -> Tensor:
        """The outputs of a client's model for ``x`` (raw, as in the data set)."""
        flat = FlatModel(copy.deepcopy(self.plan.module), bn=self.plan.bn)
        return outputs(flat, self.weights(client), x)


def client_rows(
    population: Population,
    state: State,
    ledger: Ledger,
    judged_by: str,
    received: Scores,
    adapted: Scores,
    alone: Scores,
    newcomers: Collection[ClientId] = (),
) -> list[dict[str, Any]]:
    """The table of clients; if there are ``newcomers``, a column marks them."""
    by_title = {"received": received, "adapted": adapted, "alone": alone}
    columns = {
        title: sorted({k for s in scores.values() for k in s if k.startswith("test_")})
        for title, scores in by_title.items()
    }
    rows = []
    for id, client in enumerate(population.clients):
        bytes_moved = ledger.method.get(id, Bytes())
        row: dict[str, Any] = {
            "client": id,
            "name": client.name,
            "group": state.groups.get(id, ""),
            "true_group": "" if population.groups is None else population.groups[id],
            **({"newcomer": int(id in newcomers)} if newcomers else {}),
            "train": len(client.train),
            "val": len(client.val),
            "test": len(client.test),
            "bytes_down": bytes_moved.down,
            "bytes_up": bytes_moved.up,
        }
        for title, scores in by_title.items():
            for key in columns[title]:
                row[f"{title}_{key.removeprefix('test_')}"] = scores.get(id, {}).get(key, "")
        if alone:
            row["gain"] = _gain(received.get(id, {}), alone.get(id, {}), f"test_{judged_by}")
        rows.append(row)
    return rows


def _gain(received: Mapping[str, float], alone: Mapping[str, float], key: str) -> float | str:
    return received[key] - alone[key] if key in received and key in alone else ""
