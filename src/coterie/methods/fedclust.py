"""FedClust: clients are grouped once, by the final layer that a short training gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from coterie.client import Client
from coterie.clustering import euclidean
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import Probe, final_layer
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Scalar, Upload
from coterie.core.method import Bound, Count, Method, Round, Setup, State, exclusive, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError, TrainingError
from coterie.methods.by_evidence import Evidenced, Try, by_evidence
from coterie.methods.tree_cuts import Linkage, cut_tree, no_more


@method
@exclusive("threshold", "clusters")
def fedclust(
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    linkage: Linkage = "average",
    warmup_steps: Count | Literal["auto"] = "auto",
    warmup_epochs: Count | None = None,
    fallback: bool = True,
    start: Literal["one", "zero"] | None = None,
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the final layer after a short training, found once; FedAvg inside each.

    Family: clustered.
    Rule: all clients train θ⁰ for a while and send their final layer only; the server clusters
    these by L2 distance (agglomerative) and cuts the tree at ``threshold``. Each group's model
    starts at θ⁰; then FedAvg inside each group. With "auto" everybody trains twice, on two halves
    of its data and for the same number of steps. The groups of directions in which the layers
    changed that best predict the clients' other halves are the evidence. A trial on validation data
    then decides whether clients train in groups, and in which: in the first round where the
    evidence is decided, after some rounds of one model for all where it is not.
    Args:
        threshold: the height λ of the cut, 0 or more (inf is FedAvg, 0 is every client alone), or
            "auto": evidence and trial.
        clusters: the number of groups instead of a threshold, 1 or more.
        linkage: how the distance of two groups comes from those of their clients; with a given
            threshold or number of groups only.
        warmup_steps: steps of the first training, 1 or more, or "auto": the smallest of 25, 50,
            100, 200 and 300 at which the median client's loss is below a fifth of its start. With a
            given threshold or number of groups "auto" is 10 epochs.
        warmup_epochs: epochs of the first training instead of steps, 1 or more. Clients with many
            samples then go further, and may be grouped by size.
        fallback: whether the whole change is asked for when the final layer tells nothing.
        start: "one", one model before the groups, or "zero", the paper's order: groups from θ⁰
            (with "auto" those that the evidence finds, without a trial). When not given: "one" with
            "auto", "zero" otherwise.
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", as with
            ``start`` "zero".
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's final layer, once (with "auto" those of two halves, and the whole
    change where they tell nothing); then means; in a trial each client's model.
    Travels: 1 model down, 1 up; before the first round θ⁰ down and a final layer up (with "auto"
    two, and a number); in a trial at most one more model up and those of all a client's groups
    down.
    Newcomers: warm up from θ⁰ alike, send their final layer and join the group whose mean warm-up
    layer is nearest; with "auto", whose mean direction is.
    Departs: "auto" is ours (the paper leaves the choice of λ open). A client whose first reply was
    lost is admitted like a newcomer when its turn comes, and so is, with "auto", one that has too
    few samples for two halves. Without validation data there is no trial: the groups are those of
    the evidence, from θ⁰.
    Reference: Islam et al., FedClust: Tackling Data Heterogeneity in Federated Learning through
    Weight-Driven Client Clustering, ICPP 2024.
    """
    if threshold == "auto" and clusters is None:
        probe = Probe("final-layer", warmup_steps, warmup_epochs, fallback)
        tries: Try = "off" if start == "zero" else trial
        return grouped("fedclust", by_evidence(Evidenced(probe, tries, trial_rounds)))
    if start == "one":
        raise ConfigError(
            "method fedclust: start = 'one' needs a trial, and a given threshold or number of "
            "groups has none: leave one of them out"
        )
    training: dict[str, Any] = {"epochs": warmup_epochs or 10, "steps": None}
    if warmup_epochs is None and warmup_steps != "auto":
        training = {"epochs": 1, "steps": warmup_steps}

    def warm_up(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        client.round = 0  # a newcomer warms up as everybody did: same learning rate, same stream
        begin = arrays["model"].onto(client.base)
        fit = client.fit(begin, stream="warm-up", **training)
        return Upload({"final": fit.weights.part(final_layer(fit.weights.layout))})

    def final_layers(
        fed: Federation, model: Weights, clients: Sequence[ClientId]
    ) -> tuple[list[ClientId], np.ndarray[Any, Any]]:
        """Who answered, and their final layers as rows."""
        whole = model.only(model.layout.shareable)
        replies = fed.gather([Order(c, "warm-up", {"model": whole}) for c in clients])
        rows = [r.arrays["final"].vector.numpy() for r in replies]  # type: ignore[union-attr]
        return [r.client for r in replies], np.stack(rows) if rows else np.empty((0, 0))

    def groups(fed: Federation, setup: Setup) -> State:
        people, rows = final_layers(fed, setup.start, setup.clients)
        if not people:
            raise TrainingError("fedclust: no client answered the warm-up: nobody can be grouped")
        labels, notes = cut_tree(people, euclidean(rows), linkage, threshold, clusters)
        places = {c: int(g) for c, g in zip(people, labels, strict=True)}
        centres = np.stack([rows[labels == g].mean(0) for g in range(labels.max() + 1)])
        memory = {"start": setup.start, "centres": torch.from_numpy(centres)}
        return State(dict.fromkeys(range(len(centres)), setup.start), places, memory, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        people, rows = final_layers(fed, state.memory["start"], info.cohort)
        if not people:
            return state
        nearest = euclidean(rows, state.memory["centres"].numpy()).argmin(axis=1)
        return state.joined(dict(zip(people, nearest.tolist(), strict=True)))

    check = no_more("fedclust", "clusters", clusters)
    tasks, shows = {"warm-up": warm_up}, {"warm-up": ()}
    return grouped(
        "fedclust", Assign(groups, admit, tasks=tasks, sees="each", check=check, shows=shows)
    )
