"""PACFL: clients are grouped once, by the angles between the subspaces that their data span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client
from coterie.clustering import (
    paired_angle_matrix,
    smallest_angle_matrix,
)
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import Probe, directions, inputs
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Scalar, Slot, Upload
from coterie.core.method import Bound, Count, Method, Round, Setup, State, exclusive, method
from coterie.core.weights import Weights
from coterie.errors import TrainingError
from coterie.methods.by_evidence import EvidenceRule, TrialMode, by_evidence
from coterie.methods.tree_cuts import Linkage, cut_tree, no_more

Matrix = np.ndarray[Any, Any]
_FINEST = 1e-4  # degrees; smaller angles between such vectors are rounding errors


@method
@exclusive("threshold", "clusters")
def pacfl(
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    p: Count = 3,
    measure: Literal["smallest", "sum"] = "smallest",
    linkage: Linkage = "average",
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the angles between subspaces of the clients' data, found once; FedAvg inside each.

    Family: clustered.
    Rule: each client sends the first ``p`` left singular vectors of its data matrix (features ×
    samples; the training inputs as the model gets them, not centred). The server orthonormalises
    each set, computes the angle in degrees between every two, clusters the clients (agglomerative
    clustering) and cuts the tree at ``threshold``. Each group's model starts at θ⁰; then FedAvg
    inside each group. With "auto", each client sends the vectors of two halves of its data. The
    evidence is the grouping whose mean projections (onto the subspaces) of one half best predict
    the projections of the other. All clients first train one model; a trial on validation data
    decides whether the groups are used, and they continue from this model.
    Args:
        threshold: the height of the cut in degrees, 0 or more, or "auto", which uses evidence and a
            trial instead. Differences in the labels alone, such as exchanged classes, do not show
            in the angles between inputs.
        clusters: the number of groups instead of a threshold, 1 to the number of clients.
        p: singular vectors of each client, 1 or more; a client whose data have a lower rank (or
            fewer samples) sends fewer.
        measure: "smallest", the smallest principal angle between two subspaces, arccos of the
            largest singular value of Q_iᵀQ_j; or "sum", Σ arccos|u_iᵀu_j| over pairs of the same
            rank.
        linkage: "average" (of all pairs of clients, UPGMA), "single", "complete" or "ward"; like
            ``measure``, only with a given threshold or number of groups.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the groups of the evidence, from θ⁰.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's singular vectors, once; then means; in a trial each client's model.
    Travels: one model down and one up; before the first round each client once sends p vectors,
    each as long as a sample (with "auto" twice as many); in a trial at most one more model up, and
    the models of all a client's candidate groups down.
    Newcomers: send their vectors and join the group whose first members are at the smallest mean
    angle (with "auto", the group whose mean projection is nearest); existing groups do not change.
    Departs: "auto" is not from the paper. The vectors are those of all data, as in the paper; its
    published code uses vectors of each class and does not orthonormalise them. If two clients sent
    different numbers of vectors, "sum" is scaled up from the pairs that both have. Inputs that are
    all zero span nothing and count as orthogonal to all others.
    Reference: Vahidian et al., Efficient Distribution Similarity Identification in Clustered
    Federated Learning via Principal Angles Between Client Data Subspaces, AAAI 2023.
    """
    if threshold == "auto" and clusters is None:
        how = EvidenceRule(Probe("data", vectors=p), trial, trial_rounds)
        return grouped("pacfl", by_evidence(how))

    def span(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        vectors = directions(inputs(client, "method pacfl"), p)
        return Upload({"basis": torch.from_numpy(vectors.astype(np.float32))})

    def vectors_of(fed: Federation, clients: Sequence[ClientId]) -> dict[ClientId, Tensor]:
        replies = fed.gather([Order(c, "span") for c in clients])
        return {r.client: r.arrays["basis"] for r in replies}  # type: ignore[misc]

    def start(fed: Federation, setup: Setup) -> State:
        bases = vectors_of(fed, setup.clients)
        if not bases:
            raise TrainingError("pacfl: no client sent its vectors, so none can be grouped")
        angles = proximity(bases.values(), measure)
        labels, notes = cut_tree(list(bases), angles, linkage, threshold, clusters)
        groups = dict(zip(bases, labels.tolist(), strict=True))
        models: dict[Slot, Weights] = dict.fromkeys(range(max(labels) + 1), setup.start)
        return State(models, groups, {"bases": bases}, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        first, new = state.memory["bases"], vectors_of(fed, info.cohort)
        if not new:
            return state
        angles = proximity([*first.values(), *new.values()], measure)[len(first) :, : len(first)]
        member = np.array([state.groups[c] for c in first])
        means = np.stack([angles[:, member == slot].mean(axis=1) for slot in state.models])
        slots = [list(state.models)[i] for i in means.argmin(axis=0)]
        return state.joined(dict(zip(new, slots, strict=True)))

    check = no_more("pacfl", "clusters", clusters)
    return grouped("pacfl", Assign(start, admit, tasks={"span": span}, sees="each", check=check))


def proximity(bases: Iterable[Tensor], measure: str) -> Matrix:
    """The angle in degrees between every two bases (features × any number of vectors)."""
    sent = [b.double().numpy() for b in bases]
    qs = [np.linalg.qr(b)[0] for b in sent]
    most = max(b.shape[1] for b in qs)
    if measure == "smallest":
        # Columns of zeros make the shapes equal and do not affect the largest cosine.
        angles = smallest_angle_matrix([np.pad(b, [(0, 0), (0, most - b.shape[1])]) for b in qs])
    else:
        total, pairs = np.zeros((2, len(qs), len(qs)))
        for k in range(most):
            have = [i for i, b in enumerate(qs) if b.shape[1] > k]
            total[np.ix_(have, have)] += paired_angle_matrix([qs[i][:, k : k + 1] for i in have])
            pairs[np.ix_(have, have)] += 1
        angles = total * most / pairs
    empty = np.array([not b.any() for b in sent])
    angles[empty[:, None] ^ empty] = 90.0 if measure == "smallest" else 90.0 * most
    return np.where(angles < _FINEST, 0.0, angles)
