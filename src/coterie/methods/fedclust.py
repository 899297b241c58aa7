"""FedClust: clients are grouped once, by the final layer that a short training gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from coterie.client import Client
from coterie.compose import Assign, grouped
from coterie.errors import TrainingError
from coterie.federation import ClientId, Federation, Order, Scalar, Upload
from coterie.grouping import euclidean
from coterie.method import Bound, Count, Method, Round, Setup, State, method
from coterie.methods.evidenced import Evidenced, Try, by_evidence
from coterie.methods.trees import Linkage, cut_tree, no_more, one_of
from coterie.probing import Probe, final_layer
from coterie.weights import Weights


@method
def fedclust(
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    linkage: Linkage = "average",
    warmup_steps: Count | Literal["auto"] = "auto",
    warmup_epochs: Count | None = None,
    fallback: bool = True,
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the final layer after a short training, found once; FedAvg inside each.

    Rule: all clients train θ⁰ for ``warmup_epochs`` and send their final layer only; the server
    clusters these by L2 distance (agglomerative) and cuts the tree at ``threshold``. Each group's
    model starts at θ⁰; then FedAvg inside each group.
    Args:
        threshold: the height λ of the cut, 0 or more (inf is FedAvg, 0 is every client alone), or
            "auto": the cut with the best silhouette, one group when none is above 0.1, as a mean
            over clients and as a mean over groups.
        clusters: the number of groups instead of a threshold, 1 or more.
        linkage: how the distance of two groups comes from those of their clients.
        warmup_epochs: epochs of the first training, 1 or more. With too few the final layers hold
            more noise than difference, and "auto" may group clients by chance.
    Server sees: each client's final layer, once; then means.
    Travels: 1 model down, 1 up; before the first round θ⁰ down and a final layer up.
    Newcomers: warm up from θ⁰ alike, send their final layer and join the group whose mean warm-up
    layer is nearest.
    Departs: "auto" is ours (the paper leaves the choice of λ open). A client whose first reply was
    lost is admitted like a newcomer when its turn comes. Two clients have no silhouette: "auto"
    keeps them together.
    Reference: Islam et al., FedClust: Tackling Data Heterogeneity in Federated Learning through
    Weight-Driven Client Clustering, ICPP 2024.
    """
    one_of("fedclust", threshold, clusters)
    if threshold == "auto" and clusters is None:
        probe = Probe("final-layer", warmup_steps, warmup_epochs, fallback)
        return grouped("fedclust", by_evidence(Evidenced(probe, trial, trial_rounds)))

    def warm_up(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        client.round = 0  # a newcomer warms up as everybody did: same learning rate, same stream
        start = arrays["model"].onto(client.base)
        fit = client.fit(start, stream="warm-up", epochs=warmup_epochs or 10)
        return Upload({"final": fit.weights.part(final_layer(fit.weights.layout))})

    def final_layers(
        fed: Federation, start: Weights, clients: Sequence[ClientId]
    ) -> tuple[list[ClientId], np.ndarray[Any, Any]]:
        """Who answered, and their final layers as rows."""
        whole = start.only(start.layout.shareable)
        replies = fed.gather([Order(c, "warm-up", {"model": whole}) for c in clients])
        rows = [r.arrays["final"].vector.numpy() for r in replies]  # type: ignore[union-attr]
        return [r.client for r in replies], np.stack(rows) if rows else np.empty((0, 0))

    def start(fed: Federation, setup: Setup) -> State:
        people, rows = final_layers(fed, setup.start, setup.clients)
        if not people:
            raise TrainingError("fedclust: no client answered the warm-up: nobody can be grouped")
        labels, notes = cut_tree(people, euclidean(rows), linkage, threshold, clusters)
        groups = {c: int(g) for c, g in zip(people, labels, strict=True)}
        centres = np.stack([rows[labels == g].mean(0) for g in range(labels.max() + 1)])
        memory = {"start": setup.start, "centres": torch.from_numpy(centres)}
        return State(dict.fromkeys(range(len(centres)), setup.start), groups, memory, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        people, rows = final_layers(fed, state.memory["start"], info.cohort)
        if not people:
            return state
        nearest = euclidean(rows, state.memory["centres"].numpy()).argmin(axis=1)
        return state.joined(dict(zip(people, nearest.tolist(), strict=True)))

    check = no_more("fedclust", "clusters", clusters)
    rule = Assign(start, admit, tasks={"warm-up": warm_up}, sees="each", check=check)
    return grouped("fedclust", rule)
