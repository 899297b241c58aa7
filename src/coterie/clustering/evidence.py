"""Evidence for groups of clients: whether there are any, and how many.

Every client is represented twice, by two disjoint halves of its data. A grouping of the first
halves is real to the extent that it predicts the second halves, and vice versa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import linkage as scipy_linkage

from coterie.clustering.arrays import Array, Labels, Real, one_thread, pair, table
from coterie.clustering.hierarchy import Dendrogram, canonical
from coterie.clustering.kmeans import Search
from coterie.errors import ConfigError

MOST_GROUPS = 50  # the largest number of groups tried, as more could not be interpreted
SAMPLE = 1000  # the most clients that are compared; the others join the nearest group
_COLUMNS = 4096  # in a block of a matrix product
_MANY = 200  # with more clients, numbers of groups far above the best one are not tried
ONE_GROUP = "no grouping predicts the clients' other halves better than one mean"
NO_SIGNAL = (
    "too little data to tell: what the two halves of a client's data show has no more in common "
    "than by chance"
)
TOO_FEW = "too little data to tell: fewer than two clients have enough samples for two halves"


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence for groups in two representations of every client.

    Attributes:
        labels: the group of each client, in canonical form: group 0 is the first client's.
        errors: for every number of groups, the mean squared error of predicting clients' halves
            by the means of their groups' other halves.
        deviations: for every number of groups, the standard error, paired over clients, of the
            difference between its error and the lowest.
        kappa: for every number of groups from 2, the reproducibility: Cohen's κ between the
            group of a client and the group that its other half is closest to.
        certainty: for each client, how much nearer its other half is to its own group than to
            the nearest other group, from −1 to 1; 1 if there is only one group. If it is below
            0, the other half is nearer to another group.
        why: one sentence that says why this number of groups was chosen.
        enough: whether there was enough data to tell.
        tree: Ward's tree of the means of both halves; None for more than a thousand clients.
    """

    labels: Labels
    errors: dict[int, float]
    deviations: dict[int, float]
    kappa: dict[int, float]
    certainty: Array
    why: str
    enough: bool = True
    tree: Dendrogram | None = None

    @property
    def groups(self) -> int:
        """The number of groups chosen."""
        return int(self.labels.max(initial=0)) + 1

    @property
    def explained(self) -> float:
        """The share of a single mean's error that the grouping removes."""
        return 1 - self.errors[self.groups] / self.errors[1] if self.errors.get(1) else 0.0

    @property
    def plausible(self) -> list[int]:
        """The numbers of groups whose error is within one standard error of the lowest."""
        lowest = min(self.errors.values(), default=0.0)
        return [k for k, error in self.errors.items() if error <= lowest + self.deviations[k]]

    @property
    def decisive(self) -> bool:
        """Whether fewer groups and more groups both predict the other halves clearly worse."""
        return self.plausible == [self.groups] and 1 < self.groups < max(self.errors)

    @property
    def between(self) -> list[int]:
        """The positions of the clients that are nearer to another group than to their own."""
        return [int(i) for i in np.flatnonzero(self.certainty < 0)]

    def to_notes(self) -> dict[str, Any]:
        """The evidence as plain JSON values, for a run's events."""
        return {
            "groups": self.groups,
            "labels": [int(g) for g in self.labels],
            "errors": {str(k): float(f"{v:.6g}") for k, v in self.errors.items()},
            "deviations": {str(k): float(f"{v:.6g}") for k, v in self.deviations.items()},
            "kappa": {str(k): round(v, 4) for k, v in self.kappa.items()},
            "certainty": [round(float(c), 4) for c in self.certainty],
            "explained": round(self.explained, 4),
            "decisive": self.decisive,
            "enough": self.enough,
            "why": self.why,
        }


def find_evidence(
    first: ArrayLike,
    second: ArrayLike,
    counts: ArrayLike,
    most: int | None = None,
    directions: bool = False,
) -> Evidence:
    """Find the groups that best predict each client's other half, and how certain they are.

    Clients, weighted by their numbers of samples in ``counts``, are grouped by k-means into every
    number of groups from 1 to ``most``. The smallest number whose held-out error is within one
    standard error, paired over clients, of the lowest is chosen. With ``directions``, every row is
    scaled to unit length first.

    >>> first = np.array([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0]])
    >>> second = np.array([[1.0, 0.1], [0.9, 0.0], [0.0, 0.9], [0.0, 1.0]])
    >>> find_evidence(first, second, [10, 10, 10, 10]).labels
    array([0, 0, 1, 1])
    """
    first_rows, second_rows = pair(first, second)
    if len(first_rows) != len(second_rows):
        raise ConfigError(
            f"{len(first_rows)} first halves cannot be compared with {len(second_rows)} second ones"
        )
    keys = [first_rows[i].tobytes() + second_rows[i].tobytes() for i in range(len(first_rows))]
    order = _order(keys, counts)
    stacked = np.concatenate([first_rows[order], second_rows[order]])
    if stacked.shape[1] > len(stacked) and len(first_rows) <= SAMPLE:
        stacked = from_products(_scaled(inner_products(stacked), directions))
    else:
        stacked = stacked.astype(np.float64)
        length = np.linalg.norm(stacked, axis=1, keepdims=True)
        stacked = stacked / np.where(length > 0, length, 1.0) if directions else stacked
    return _evidence(stacked, counts, order, most)


def find_evidence_in_products(
    products: ArrayLike, counts: ArrayLike, most: int | None = None
) -> Evidence:
    """Find evidence from the inner products of all first halves followed by all second halves.

    For representations that can be compared but have no coordinates, such as subspaces.
    """
    matrix = table(products).astype(np.float64)
    clients = len(matrix) // 2
    if matrix.shape != (2 * clients, 2 * clients):
        raise ConfigError(
            f"the inner products of two halves form a square matrix with an even number of rows, "
            f"not one of shape {matrix.shape}"
        )
    sorted_products = np.sort(
        matrix.round(9) + 0.0, axis=1
    )  # the same for any order of the clients
    keys = [
        sorted_products[i].tobytes() + sorted_products[clients + i].tobytes()
        for i in range(clients)
    ]
    order = _order(keys, counts)
    row_order = np.concatenate([order, clients + order])
    return _evidence(from_products(matrix[np.ix_(row_order, row_order)]), counts, order, most)


def _order(keys: list[bytes], counts: ArrayLike) -> Labels:
    """An order of the clients that depends only on what they sent, not on their numbering."""
    weights = np.asarray(counts, np.float64)
    if weights.shape != (len(keys),) or not (weights > 0).all():
        raise ConfigError(
            "the evidence for groups needs a positive number of samples for every client"
        )
    return np.array(sorted(range(len(keys)), key=lambda i: (keys[i], weights[i])))


def _evidence(stacked: Array, counts: ArrayLike, order: Labels, most: int | None) -> Evidence:
    """Evidence from the stacked halves of the clients, sorted by ``order``; labels unsorted."""
    weights = np.asarray(counts, np.float64)[order]
    halves = stacked.reshape(2, len(order), -1)
    with one_thread():
        sample = _sample(len(order))
        comparison = _Comparison(halves[:, sample], weights[sample], most)
        chosen, why, enough = comparison.choose()
        labels, certainty = comparison.place(chosen, halves)
        tree = _ward(halves.mean(axis=0), order) if len(order) <= SAMPLE else None
    positions = np.argsort(order)
    return Evidence(
        canonical(labels[positions]),
        comparison.errors,
        comparison.deviations,
        comparison.kappa,
        certainty[positions],
        why,
        enough,
        tree,
    )


def _ward(rows: Array, order: Labels) -> Dendrogram:
    """Ward's tree of the rows, with the leaves numbered like the clients."""
    clients = len(rows)
    if clients < 2:
        return Dendrogram(clients, np.empty((0, 4)))
    merges = scipy_linkage(rows, "ward")
    names = np.concatenate([order, np.arange(clients, 2 * clients)])
    merges[:, :2] = names[merges[:, :2].astype(int)]
    return Dendrogram(clients, merges)


def too_few(clients: int, why: str = TOO_FEW) -> Evidence:
    """A single group, because there was too little to compare."""
    labels, certainty = np.zeros(clients, np.int64), np.ones(clients)
    return Evidence(labels, {}, {}, {}, certainty, why, enough=False)


def inner_products(rows: Real) -> Array:
    """All inner products of the rows in float64, computed a block of columns at a time."""
    products = np.zeros((len(rows), len(rows)))
    with one_thread():
        for start in range(0, rows.shape[1], _COLUMNS):
            block = rows[:, start : start + _COLUMNS].astype(np.float64)
            products += block @ block.T
    return products


def _scaled(products: Array, directions: bool) -> Array:
    """With ``directions``, the inner products of the rows scaled to unit length."""
    if not directions:
        return products
    length = np.sqrt(products.diagonal())
    length = np.where(length > 0, length, 1.0)
    scaled: Array = products / length[:, None] / length
    return scaled


def from_products(products: ArrayLike) -> Array:
    """Rows with the given inner products, for representations without coordinates."""
    values, vectors = np.linalg.eigh(np.asarray(products, np.float64))
    keep = values > values[-1] * len(values) * np.finfo(np.float64).eps
    rows: Array = vectors[:, keep] * np.sqrt(values[keep])
    return rows


class _Comparison:
    """Held-out errors for every number of groups, for clients in a fixed order."""

    def __init__(self, halves: Array, counts: Array, most: int | None) -> None:
        self.halves, self.counts = halves, counts
        self.share = counts / counts.sum()
        clients = len(counts)
        limit = min(clients, MOST_GROUPS if most is None else most)
        self.searches = [Search(half, limit, counts) for half in halves]
        limit = min(limit, *(search.distinct for search in self.searches))
        self._groups_of_half = dict[tuple[int, int], tuple[Labels, Array]]()
        self.residuals, self.errors = dict[int, Array](), dict[int, float]()
        self.lowest = 1
        for k in range(1, limit + 1):
            self.residuals[k] = self._residuals(k)
            self.errors[k] = float(self.share @ self.residuals[k])
            if self.errors[k] < self.errors[self.lowest]:
                self.lowest = k
            if clients > _MANY and k >= 10 + 2 * self.lowest:
                break
        self.deviations = {k: self._deviation(k) for k in self.residuals}
        self.kappa = {k: self._kappa(k) for k in self.residuals if k > 1}

    def choose(self) -> tuple[int, str, bool]:
        """The number of groups, the sentence that says why, and whether there was enough data."""
        if len(self.counts) < 2:
            return 1, TOO_FEW, False
        errors, lowest = self.errors, self.lowest
        tolerance = 1e-12 * max(errors[1], 1e-300)  # differences due to rounding do not count
        chosen = min(
            k
            for k, error in errors.items()
            if error <= errors[lowest] + self.deviations[k] + tolerance
        )
        if chosen > 1:
            sentence = (
                f"{chosen} groups predict the clients' other halves with "
                f"{errors[chosen] / errors[1]:.0%} of one mean's error "
                f"(reproducibility κ {self.kappa[chosen]:.2f})"
            )
            if chosen != lowest:
                sentence += f"; {lowest} groups are no better by more than one standard error"
            return chosen, sentence, True
        around_zero = np.einsum("hij,hij->i", self.halves, self.halves) / 2
        gain = around_zero - self.residuals[1]
        if float(self.share @ gain) <= self._standard_error(gain):
            return 1, NO_SIGNAL, False
        return 1, ONE_GROUP, True

    def place(self, k: int, halves: Array) -> tuple[Labels, Array]:
        """Each client's group among ``k`` groups of the means of both halves, and its certainty.

        ``halves`` may cover more clients than were compared.
        """
        search = Search(self.halves.mean(axis=0), k, self.counts)
        labels, centres = search.groups(min(k, search.distinct))
        if halves.shape[1] > len(labels):
            labels = _squares(halves.mean(axis=0), centres).argmin(axis=1)
        if len(centres) == 1:
            return labels, np.ones(halves.shape[1])
        certainty = np.zeros(halves.shape[1])
        for rows in halves:
            squares = _squares(rows, centres)
            clients = np.arange(len(squares))
            to_own_group = squares[clients, labels]
            squares[clients, labels] = np.inf
            to_nearest_other = squares.min(axis=1)
            largest = np.maximum(np.maximum(to_own_group, to_nearest_other), 1e-300)
            certainty += (to_nearest_other - to_own_group) / largest / 2
        return labels, certainty

    def _groups(self, half: int, k: int) -> tuple[Labels, Array]:
        """The groups of one half, and their means; computed once."""
        if (half, k) not in self._groups_of_half:
            self._groups_of_half[half, k] = self.searches[half].groups(k)
        return self._groups_of_half[half, k]

    def _residuals(self, k: int) -> Array:
        """Each client's squared error of predicting one half by its group's mean of the other."""
        total = np.zeros(len(self.counts))
        for half, other in ((0, 1), (1, 0)):
            labels, centres = self._groups(half, k)
            differences = self.halves[other] - centres[labels]
            total += np.einsum("ij,ij->i", differences, differences) / 2
        return total

    def _kappa(self, k: int) -> float:
        values = []
        for half, other in ((0, 1), (1, 0)):
            labels, centres = self._groups(half, k)
            values.append(cohen_kappa(labels, _squares(self.halves[other], centres).argmin(axis=1)))
        return sum(values) / 2

    def _deviation(self, k: int) -> float:
        return self._standard_error(self.residuals[k] - self.residuals[self.lowest])

    def _standard_error(self, values: Array) -> float:
        """The standard error of the mean of clients' values, weighted by numbers of samples."""
        squares = float((self.share**2).sum())
        differences = values - self.share @ values
        return math.sqrt(float(self.share**2 @ differences**2) / max(1 - squares, 1e-12))


def cohen_kappa(labels: ArrayLike, other_labels: ArrayLike) -> float:
    """Cohen's κ, the agreement of two labellings beyond chance: 1 if equal, 0 if by chance.

    >>> cohen_kappa([0, 0, 1, 1], [0, 0, 1, 1]), cohen_kappa([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    left, right = np.asarray(labels), np.asarray(other_labels)
    agreement = float((left == right).mean())
    groups = np.union1d(left, right)
    chance = float(sum((left == g).mean() * (right == g).mean() for g in groups))
    # κ is not defined if both labellings have the same single group.
    return 1.0 if chance == 1.0 else (agreement - chance) / (1 - chance)


def _squares(rows: Array, centres: Array) -> Array:
    """Squared distances from every row to every centre."""
    products: Array = rows @ centres.T
    norms = np.einsum("ij,ij->i", rows, rows)[:, None] + np.einsum("ij,ij->i", centres, centres)
    squares: Array = np.maximum(norms - 2 * products, 0.0)
    return squares


def _sample(clients: int) -> Labels:
    """The positions of the clients to compare, spread evenly over their order."""
    if clients <= SAMPLE:
        return np.arange(clients)
    return np.linspace(0, clients - 1, SAMPLE).round().astype(np.int64)
