"""k-FED: clients are grouped in a single exchange, by the centres of their data."""

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
Centres = tuple[Matrix, Matrix]  # centres, and the number of points of each


@method
def k_fed(k: Count, local: Count | None = None) -> Method:
    """Groups by a clustering of all clients' data in a single exchange; FedAvg inside each group.

    Family: clustered.
    Rule: each client clusters its training inputs (as the model gets them, projected on their first
    k' singular vectors) by k'-means and sends the centres, each with its number of points. The
    server starts with one client's centres, repeatedly adds the centre farthest from those chosen
    until there are ``k``, and assigns every centre to the nearest of them: k clusters of the data.
    A client joins the group of the cluster that holds most of its points (the lowest-numbered one
    in a tie). Models start at θ⁰; then FedAvg inside each group.
    Args:
        k: the number of clusters of the data, 1 or more, at most the sum of all clients' k'; 1 is
            FedAvg to the bit. A cluster that holds most points of no client has no model.
        local: k', the number of centres of each client, 1 to k; √k, rounded, when not given. A
            client with fewer distinct points sends as many centres as it has points.
    Server sees: each client's centres and their numbers of points, once; then means.
    Travels: one model down and one up; before the first round each client once sends k' centres,
    each as long as a sample, and k' counts.
    Newcomers: send their centres, which are assigned in the same way, and join the group that holds
    most of their points among the groups that have a model.
    Departs: nothing is random. The server starts with the client that sent the most centres or, in
    a tie, the one whose centres are farthest apart (the paper starts with any client), and k'-means
    starts farthest-first. The last steps of the paper's local clustering (Lloyd's algorithm, from
    the points that are three times nearer to one centre than to all others) are left out.
    Reference: Dennis et al., Heterogeneity for the Win: One-Shot Federated Clustering, ICML 2021.
    """
    each = round(k**0.5) if local is None else local
    if each > k:
        raise ConfigError(f"method k-fed: local = {each} is more than k = {k}")

    def centre(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        labels, centres = local_centres(inputs(client, "method k-fed"), each)
        payload = torch.from_numpy(centres.astype(np.float32))
        return Upload({"centres": payload, "points": torch.from_numpy(np.bincount(labels))})

    def centres_of(fed: Federation, clients: Sequence[ClientId]) -> dict[ClientId, Centres]:
        replies = fed.gather([Order(c, "centre") for c in clients])
        return {
            r.client: (r.arrays["centres"].numpy(), r.arrays["points"].numpy())  # type: ignore[union-attr]
            for r in replies
        }

    def start(fed: Federation, setup: Setup) -> State:
        sent = centres_of(fed, setup.clients)
        if not sent:
            raise TrainingError("k-fed: no client sent its centres, so none can be grouped")
        seeds = seed_centres([centres for centres, _ in sent.values()], k)
        groups = {c: group_of(*theirs, seeds, range(len(seeds))) for c, theirs in sent.items()}
        notes = {
            "clients": list(sent),
            "clusters": len(seeds),
            "assigned": [nearest_seed(centres, seeds).tolist() for centres, _ in sent.values()],
            "points": [points.tolist() for _, points in sent.values()],
        }
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(groups.values())), setup.start)
        return State(models, groups, {"seeds": torch.from_numpy(seeds)}, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        seeds, sent = state.memory["seeds"].numpy(), centres_of(fed, info.cohort)
        slots = [int(slot) for slot in state.models]
        return state.joined({c: group_of(*theirs, seeds, slots) for c, theirs in sent.items()})

    def check(setup: Setup) -> None:
        if k > each * len(setup.clients):
            raise ConfigError(
                f"method k-fed: {len(setup.clients)} clients with {each} centres each cannot form "
                f"k = {k} clusters: choose a smaller k or a larger local"
            )

    return grouped(
        "k-fed", Assign(start, admit, tasks={"centre": centre}, sees="each", check=check)
    )


def group_of(centres: Matrix, points: Matrix, seeds: Matrix, groups: Sequence[int]) -> int:
    """The group, among these, that holds most of a client's points.

    If none of them holds any, the other groups are ignored: each centre is assigned to the nearest
    of these.
    """
    held = np.bincount(nearest_seed(centres, seeds), points, len(seeds))[list(groups)]
    if not held.any():
        held = np.bincount(nearest_seed(centres, seeds[list(groups)]), points, len(groups))
    return groups[int(held.argmax())]
