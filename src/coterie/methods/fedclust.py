"""FedClust: clients are grouped once, by how a short training changes their final layer."""

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
from coterie.methods.by_evidence import EvidenceRule, TrialMode, by_evidence
from coterie.methods.tree_cuts import Linkage, cut_tree, no_more


@method
@exclusive("threshold", "clusters")
@exclusive("warmup_steps", "warmup_epochs")
def fedclust(
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    linkage: Linkage = "average",
    warmup_steps: Count | Literal["auto"] = "auto",
    warmup_epochs: Count | None = None,
    fallback: bool = True,
    start: Literal["one", "zero"] | None = None,
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups clients once, by their final layer after a short training; FedAvg inside each group.

    Family: clustered.
    Rule: every client trains the initial model θ⁰ for a short time and sends only its final layer.
    The server clusters these layers by L2 distance (agglomerative clustering) and cuts the tree at
    ``threshold``. Each group's model starts at θ⁰; then FedAvg inside each group. With "auto", each
    client trains θ⁰ on two halves of its data, for the same number of steps as all others. The
    evidence is the grouping whose mean directions, in which the final layer changes on one half,
    best predict the directions on the other half. A trial on validation data then decides whether
    clients train in groups, and in which: in the first round if the evidence is decisive, otherwise
    after some rounds with one model for all.
    Args:
        threshold: the height λ at which the tree is cut, 0 or more (inf is FedAvg, with 0 every
            client is alone), or "auto", which uses evidence and a trial instead.
        clusters: the number of groups instead of a threshold, 1 or more.
        linkage: how the distance between two groups is computed from the distances between their
            clients; only with a given threshold or number of groups.
        warmup_steps: steps of the short training, 1 or more, or "auto": the smallest of 25, 50,
            100, 200 and 300 at which the median client's loss has fallen below a fifth of its
            initial value. With a given threshold or number of groups, "auto" is 10 epochs.
        warmup_epochs: epochs of the short training instead of steps, 1 or more. Clients with many
            samples then train for longer and may be grouped by size.
        fallback: whether to ask for the change of the whole model when the final layer shows no
            groups.
        start: "one" trains one model for all before it makes groups. "zero" is the paper's order:
            groups start from θ⁰ (with "auto", the groups of the evidence, without a trial). When
            not given: "one" with "auto", "zero" otherwise.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" makes none, as with ``start`` "zero".
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's final layer, once (with "auto", those of two halves of its data, and
    the whole change if they show no groups); then means; in a trial each client's model.
    Travels: 1 model down, 1 up; before the first round θ⁰ down and a final layer up (with "auto"
    two, and a number of steps); in a trial at most one more model up, and the models of all a
    client's candidate groups down.
    Newcomers: do the same short training from θ⁰, send their final layer and join the group whose
    mean final layer is nearest; with "auto", the group whose mean direction is nearest.
    Departs: "auto" is not from the paper: the paper leaves the choice of λ open. A client whose
    first reply was lost is admitted like a newcomer the next time it is selected; with "auto", so
    is a client that has too few samples to halve. Without validation data there is no trial: the
    groups are those of the evidence, from θ⁰.
    Reference: Islam et al., FedClust: Tackling Data Heterogeneity in Federated Learning through
    Weight-Driven Client Clustering, ICPP 2024.
    """
    if threshold == "auto" and clusters is None:
        probe = Probe("final-layer", warmup_steps, warmup_epochs, fallback)
        tries: TrialMode = "off" if start == "zero" else trial
        return grouped("fedclust", by_evidence(EvidenceRule(probe, tries, trial_rounds)))
    if start == "one":
        raise ConfigError(
            "method fedclust: start = 'one' needs a trial, and with a given threshold or number of "
            "groups there is none: leave out either"
        )
    training: dict[str, Any] = {"epochs": warmup_epochs or 10, "steps": None}
    if warmup_epochs is None and warmup_steps != "auto":
        training = {"epochs": 1, "steps": warmup_steps}

    def warm_up(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        client.round = 0  # a newcomer warms up with the learning rate and batches of round 0
        received = arrays["model"].onto(client.base)
        fit = client.fit(received, stream="warm-up", **training)
        return Upload({"final": fit.weights.part(final_layer(fit.weights.layout))})

    def final_layers(
        fed: Federation, model: Weights, clients: Sequence[ClientId]
    ) -> tuple[list[ClientId], np.ndarray[Any, Any]]:
        """The clients that answered, and their final layers as rows."""
        payload = model.only(model.layout.shareable)
        replies = fed.gather([Order(c, "warm-up", {"model": payload}) for c in clients])
        rows = [r.arrays["final"].vector.numpy() for r in replies]  # type: ignore[union-attr]
        return [r.client for r in replies], np.stack(rows) if rows else np.empty((0, 0))

    def groups(fed: Federation, setup: Setup) -> State:
        answered, layers = final_layers(fed, setup.start, setup.clients)
        if not answered:
            raise TrainingError("fedclust: no client answered the warm-up, so none can be grouped")
        labels, notes = cut_tree(answered, euclidean(layers), linkage, threshold, clusters)
        group_of = {c: int(g) for c, g in zip(answered, labels, strict=True)}
        centres = np.stack([layers[labels == g].mean(0) for g in range(labels.max() + 1)])
        memory = {"start": setup.start, "centres": torch.from_numpy(centres)}
        return State(dict.fromkeys(range(len(centres)), setup.start), group_of, memory, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        answered, layers = final_layers(fed, state.memory["start"], info.cohort)
        if not answered:
            return state
        nearest = euclidean(layers, state.memory["centres"].numpy()).argmin(axis=1)
        return state.joined(dict(zip(answered, nearest.tolist(), strict=True)))

    check = no_more("fedclust", "clusters", clusters)
    tasks, shows = {"warm-up": warm_up}, {"warm-up": ()}
    return grouped(
        "fedclust", Assign(groups, admit, tasks=tasks, sees="each", check=check, shows=shows)
    )
