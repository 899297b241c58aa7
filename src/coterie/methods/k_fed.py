"""k-FED: clients are grouped in one exchange, by the centres of their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from coterie.client import Client
from coterie.clustering import local_centres, nearest_seed, seed_centres
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import inputs
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Scalar, Slot, Upload
from coterie.core.method import Count, Method, Round, Setup, State, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError, TrainingError

Matrix = np.ndarray[Any, Any]
Seen = tuple[Matrix, Matrix]  # centres, and how many points each has


@method
def k_fed(k: Count, local: Count | None = None) -> Method:
    """Groups by a clustering of all clients' data in one exchange; FedAvg inside each group.

    Family: clustered.
    Rule: each client clusters its training inputs (as the model sees them, projected on their
    first k' singular vectors) by k'-means and sends the centres, each with its number of points.
    The server takes one client's centres, adds the centre farthest from those taken until there
    are ``k``, and assigns every centre to the nearest: k clusters of the data. A client joins the
    group of the cluster that holds most of its points (ties: the lowest). Models start at θ⁰; then
    FedAvg inside each group.
    Args:
        k: clusters of the data, 1 or more, no more than all clients' k' together; 1 is FedAvg to
            the bit. A cluster that holds the most points of no client has no model.
        local: k', centres of each client, 1 to k; √k, rounded, when not given. A client of fewer
            distinct points sends as many centres.
    Server sees: each client's centres and their numbers of points, once; then means.
    Travels: one model down and one up; before the first round each client once sends k' centres of
    as many numbers as a sample has, and k' counts.
    Newcomers: send their centres, which are assigned likewise, and join the group that holds most
    of their points among those that have a model.
    Departs: the server begins with the client that sent most centres, of several the one whose
    centres are farthest apart (the paper: with any); k'-means starts farthest-first: nothing is
    random. The last steps of the paper's local clustering, Lloyd's from the points three times
    nearer to one centre than to all others, are left out.
    Reference: Dennis et al., Heterogeneity for the Win: One-Shot Federated Clustering, ICML 2021.
    """
    each = round(k**0.5) if local is None else local
    if each > k:
        raise ConfigError(f"method k-fed: local = {each} is more than k = {k}")

    def centre(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        labels, centres = local_centres(inputs(client, "method k-fed"), each)
        sent = torch.from_numpy(centres.astype(np.float32))
        return Upload({"centres": sent, "points": torch.from_numpy(np.bincount(labels))})

    def asked(fed: Federation, clients: Sequence[ClientId]) -> dict[ClientId, Seen]:
        replies = fed.gather([Order(c, "centre") for c in clients])
        return {
            r.client: (r.arrays["centres"].numpy(), r.arrays["points"].numpy())  # type: ignore[union-attr]
            for r in replies
        }

    def start(fed: Federation, setup: Setup) -> State:
        seen = asked(fed, setup.clients)
        if not seen:
            raise TrainingError("k-fed: no client sent its centres: nobody can be grouped")
        seeds = seed_centres([centres for centres, _ in seen.values()], k)
        groups = {c: home(*own, seeds, range(len(seeds))) for c, own in seen.items()}
        notes = {
            "clients": list(seen),
            "clusters": len(seeds),
            "assigned": [nearest_seed(centres, seeds).tolist() for centres, _ in seen.values()],
            "points": [points.tolist() for _, points in seen.values()],
        }
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(groups.values())), setup.start)
        return State(models, groups, {"seeds": torch.from_numpy(seeds)}, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        seeds, seen = state.memory["seeds"].numpy(), asked(fed, info.cohort)
        slots = [int(slot) for slot in state.models]
        return state.joined({c: home(*own, seeds, slots) for c, own in seen.items()})

    def check(setup: Setup) -> None:
        if k > each * len(setup.clients):
            raise ConfigError(
                f"method k-fed: {len(setup.clients)} clients with {each} centres each cannot form "
                f"k = {k} clusters: take a smaller k or a larger local"
            )

    return grouped(
        "k-fed", Assign(start, admit, tasks={"centre": centre}, sees="each", check=check)
    )


def home(centres: Matrix, points: Matrix, seeds: Matrix, groups: Sequence[int]) -> int:
    """Of these groups, the one that holds most of a client's points.

    If none holds any, the others do not count: each centre is assigned to the nearest of these.
    """
    held = np.bincount(nearest_seed(centres, seeds), points, len(seeds))[list(groups)]
    if not held.any():
        held = np.bincount(nearest_seed(centres, seeds[list(groups)]), points, len(groups))
    return groups[int(held.argmax())]
