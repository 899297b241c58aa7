"""PACFL: clients are grouped once, by the angles between the subspaces that their data span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client
from coterie.client.fit import decode
from coterie.compose import Assign, grouped
from coterie.errors import ConfigError, TrainingError
from coterie.federation import ClientId, Federation, Order, Scalar, Slot, Upload
from coterie.grouping import (
    basis,
    paired_angle_matrix,
    smallest_angle_matrix,
)
from coterie.method import Bound, Count, Method, Round, Setup, State, method
from coterie.methods.trees import Linkage, cut_tree, no_more, one_of
from coterie.weights import Weights

Matrix = np.ndarray[Any, Any]
_ROUNDING = float(np.finfo(np.float32).eps)  # of inputs and of what is sent: both are float32
_FINEST = 1e-4  # degrees: smaller angles between such vectors are rounding


@method
def pacfl(
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    p: Count = 3,
    measure: Literal["smallest", "sum"] = "smallest",
    linkage: Linkage = "average",
) -> Method:
    """Groups by the angles between the subspaces of clients' data, found once; FedAvg inside each.

    Rule: each client sends the first ``p`` left singular vectors of its data matrix (features ×
    samples, the training inputs as the model sees them, not centred). The server makes each set
    orthonormal, measures the angle between every two in degrees, clusters (agglomerative) and cuts
    the tree at ``threshold``. Each group's model starts at θ⁰; then FedAvg inside each group.
    Args:
        threshold: the height of the cut in degrees, 0 or more, or "auto": the cut with the best
            silhouette, one group when none is above 0.1, over clients and over groups. With few
            samples, and with "sum" of weak vectors, it may group alike clients by chance.
        clusters: the number of groups instead of a threshold, 1 to the number of clients.
        p: singular vectors of each client, 1 or more; a client whose data have a lower rank (or
            fewer samples) sends fewer.
        measure: "smallest", the smallest principal angle of two subspaces, arccos of the largest
            singular value of Q_iᵀQ_j; or "sum", Σ arccos|u_iᵀu_j| over pairs of like rank.
        linkage: "average" (of all pairs of clients, UPGMA), "single" or "complete".
    Server sees: each client's singular vectors, once; then means.
    Travels: one model down and one up; before the first round each client once sends p vectors of
    as many numbers as a sample has.
    Newcomers: send their vectors and join the group whose first members are at the smallest mean
    angle; nobody is clustered again.
    Departs: "auto" is ours. The vectors are those of all data, as in the paper; its published code
    takes them class by class and does not make them orthonormal. Where two clients sent different
    numbers of vectors, "sum" scales up the pairs that both have. Inputs that are all zero span
    nothing and are at right angles to all others.
    Reference: Vahidian et al., Efficient Distribution Similarity Identification in Clustered
    Federated Learning via Principal Angles Between Client Data Subspaces, AAAI 2023.
    """
    one_of("pacfl", threshold, clusters)

    def span(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        vectors = directions(inputs(client, "pacfl"), p)
        return Upload({"basis": torch.from_numpy(vectors.astype(np.float32))})

    def asked(fed: Federation, clients: Sequence[ClientId]) -> dict[ClientId, Tensor]:
        replies = fed.gather([Order(c, "span") for c in clients])
        return {r.client: r.arrays["basis"] for r in replies}  # type: ignore[misc]

    def start(fed: Federation, setup: Setup) -> State:
        bases = asked(fed, setup.clients)
        if not bases:
            raise TrainingError("pacfl: no client sent its vectors: nobody can be grouped")
        angles = proximity(bases.values(), measure)
        labels, notes = cut_tree(list(bases), angles, linkage, threshold, clusters)
        groups = dict(zip(bases, labels.tolist(), strict=True))
        models: dict[Slot, Weights] = dict.fromkeys(range(max(labels) + 1), setup.start)
        return State(models, groups, {"bases": bases}, notes)

    def admit(fed: Federation, state: State, info: Round) -> State:
        first, new = state.memory["bases"], asked(fed, info.cohort)
        if not new:
            return state
        angles = proximity([*first.values(), *new.values()], measure)[len(first) :, : len(first)]
        member = np.array([state.groups[c] for c in first])
        means = np.stack([angles[:, member == slot].mean(axis=1) for slot in state.models])
        slots = [list(state.models)[i] for i in means.argmin(axis=0)]
        return state.joined(dict(zip(new, slots, strict=True)))

    check = no_more("pacfl", "clusters", clusters)
    return grouped("pacfl", Assign(start, admit, tasks={"span": span}, sees="each", check=check))


def inputs(client: Client, label: str) -> Matrix:
    """A client's training inputs as its model sees them, each sample a row."""
    x = client.train.x
    if not (x.is_floating_point() or x.dtype == torch.uint8):
        raise ConfigError(
            f"method {label} compares inputs as quantities, but those of client {client.id} are "
            f"numbers of tokens ({x.dtype}): take a method that compares models, such as fedclust"
        )
    rows: Matrix = decode(x).reshape(len(x), -1).numpy()
    return rows


def directions(rows: Matrix, p: int) -> Matrix:
    """Up to ``p`` left singular vectors of the data matrix, as columns: no more than its rank.

    Beyond the rank there are none, only what rounding happens to leave. Data that are all zero
    have a column of zeros.

    >>> abs(directions(np.array([[0.0, 3.0, 0.0], [0.0, 4.0, 0.0]]), 3)).round(9).tolist()
    [[0.0], [1.0], [0.0]]
    """
    data = rows.T
    vectors = basis(data, min(p, *data.shape))
    values = np.linalg.norm(vectors.T @ data, axis=1)  # the singular values
    real = values > values[0] * max(data.shape) * _ROUNDING
    return vectors[:, real] if real.any() else np.zeros((len(data), 1))


def proximity(bases: Iterable[Tensor], measure: str) -> Matrix:
    """The angle in degrees between every two bases (features × vectors), however many each has."""
    sent = [b.double().numpy() for b in bases]
    made = [np.linalg.qr(b)[0] for b in sent]
    most = max(b.shape[1] for b in made)
    if measure == "smallest":
        # Columns of zeros make the shapes equal; they have no part in the largest cosine.
        found = smallest_angle_matrix([np.pad(b, [(0, 0), (0, most - b.shape[1])]) for b in made])
    else:
        total, pairs = np.zeros((2, len(made), len(made)))
        for k in range(most):
            have = [i for i, b in enumerate(made) if b.shape[1] > k]
            total[np.ix_(have, have)] += paired_angle_matrix([made[i][:, k : k + 1] for i in have])
            pairs[np.ix_(have, have)] += 1
        found = total * most / pairs
    empty = np.array([not b.any() for b in sent])
    found[empty[:, None] ^ empty] = 90.0 if measure == "smallest" else 90.0 * most
    return np.where(found < _FINEST, 0.0, found)
