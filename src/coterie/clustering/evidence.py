"""Are there groups, and how many: what one half of the clients' data says about the other half.

Every client is represented twice, from two disjoint halves of its data. A grouping of the first
halves is real to the extent that it predicts the second halves, and the other way round.
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

MOST_GROUPS = 50  # no more are looked for: nobody could read them
SAMPLE = 1000  # of more clients, so many are compared; the others go to the nearest group
_COLUMNS = 4096  # of one block of a matrix product
_MANY = 200  # clients; of more, numbers of groups far above the best one are not looked at
ONE_GROUP = "no grouping predicts the clients' other halves better than one mean"
NO_SIGNAL = (
    "too little data to tell: the two halves of a client have no more in common than nothing "
    "at all would have"
)
TOO_FEW = "too little data to tell: fewer than two clients have enough samples for two halves"


@dataclass(frozen=True, eq=False)
class Evidence:
    """What two representations of every client say about groups.

    Attributes:
        labels: the groups, canonical: group 0 is the first client's.
        errors: for every number of groups, the mean squared error with which a group's mean of
            one half predicts its members' other half.
        deviations: for every number of groups, the standard error, paired over clients, of the
            difference between its error and the lowest.
        kappa: for every number of groups from 2, the reproducibility: Cohen's κ between the
            group of a client and the group that its other half falls into.
        certainty: for each client, how much nearer its other half is to its own group than to
            the nearest other group, from −1 to 1; 1 for everybody in one group. Where it is
            below 0, the client sits between two groups.
        why: one sentence that says why this number of groups was chosen.
        enough: whether there was enough data to tell.
        tree: Ward's tree of the means of both halves; none of more than a thousand clients.
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
        """The share of one mean's error that the grouping removes."""
        return 1 - self.errors[self.groups] / self.errors[1] if self.errors.get(1) else 0.0

    @property
    def plausible(self) -> list[int]:
        """The numbers of groups whose error is within one standard error of the lowest."""
        lowest = min(self.errors.values(), default=0.0)
        return [k for k, error in self.errors.items() if error <= lowest + self.deviations[k]]

    @property
    def decisive(self) -> bool:
        """Whether fewer groups, and more, both predict the other halves clearly worse."""
        return self.plausible == [self.groups] and 1 < self.groups < max(self.errors)

    @property
    def between(self) -> list[int]:
        """The clients, by position, that are nearer to another group than to their own."""
        return [int(i) for i in np.flatnonzero(self.certainty < 0)]

    def to_notes(self) -> dict[str, Any]:
        """As plain JSON values, for a run's events."""
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
    """The groups that best predict each client's other half, and how sure they are.

    Clients are grouped by k-means for every number of groups up to ``most``, clients counting by
    ``counts``, their numbers of samples. The smallest number whose held-out error is within one
    standard error, paired over clients, of the lowest is chosen; one group is among the choices.
    With ``directions`` every row is divided by its length first.

    >>> first = np.array([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0]])
    >>> second = np.array([[1.0, 0.1], [0.9, 0.0], [0.0, 0.9], [0.0, 1.0]])
    >>> find_evidence(first, second, [10, 10, 10, 10]).labels
    array([0, 0, 1, 1])
    """
    one, two = pair(first, second)
    if len(one) != len(two):
        raise ConfigError(f"{len(one)} first halves cannot be compared with {len(two)} second ones")
    keys = [one[i].tobytes() + two[i].tobytes() for i in range(len(one))]
    order = _order(keys, counts)
    stacked = np.concatenate([one[order], two[order]])
    if stacked.shape[1] > len(stacked) and len(one) <= SAMPLE:
        stacked = from_products(_scaled(inner_products(stacked), directions))
    else:
        stacked = stacked.astype(np.float64)
        length = np.linalg.norm(stacked, axis=1, keepdims=True)
        stacked = stacked / np.where(length > 0, length, 1.0) if directions else stacked
    return _evidence(stacked, counts, order, most)


def find_evidence_in_products(
    products: ArrayLike, counts: ArrayLike, most: int | None = None
) -> Evidence:
    """The same from inner products: of all first halves and then all second halves, in order.

    It is for representations that are compared but never written out, such as subspaces.
    """
    matrix = table(products).astype(np.float64)
    clients = len(matrix) // 2
    if matrix.shape != (2 * clients, 2 * clients):
        raise ConfigError(f"inner products of two halves form a square, not {matrix.shape}")
    alike = np.sort(matrix.round(9) + 0.0, axis=1)  # the same for any order of the clients
    keys = [alike[i].tobytes() + alike[clients + i].tobytes() for i in range(clients)]
    order = _order(keys, counts)
    both = np.concatenate([order, clients + order])
    return _evidence(from_products(matrix[np.ix_(both, both)]), counts, order, most)


def _order(keys: list[bytes], counts: ArrayLike) -> Labels:
    """An order that depends only on what clients sent, not on how they are numbered."""
    weights = np.asarray(counts, np.float64)
    if weights.shape != (len(keys),) or not (weights > 0).all():
        raise ConfigError("evidence needs a positive number of samples for every client")
    return np.array(sorted(range(len(keys)), key=lambda i: (keys[i], weights[i])))


def _evidence(stacked: Array, counts: ArrayLike, order: Labels, most: int | None) -> Evidence:
    """Evidence from both halves of clients in this order; labels in the clients' own."""
    weights = np.asarray(counts, np.float64)[order]
    halves = stacked.reshape(2, len(order), -1)
    with one_thread():
        picked = _sample(len(order))
        comparison = _Comparison(halves[:, picked], weights[picked], most)
        chosen, why, enough = comparison.choose()
        labels, certainty = comparison.place(chosen, halves)
        tree = _ward(halves.mean(axis=0), order) if len(order) <= SAMPLE else None
    back = np.argsort(order)
    return Evidence(
        canonical(labels[back]),
        comparison.errors,
        comparison.deviations,
        comparison.kappa,
        certainty[back],
        why,
        enough,
        tree,
    )


def _ward(rows: Array, order: Labels) -> Dendrogram:
    """Ward's tree of these rows, its leaves numbered as the clients are."""
    clients = len(rows)
    if clients < 2:
        return Dendrogram(clients, np.empty((0, 4)))
    merges = scipy_linkage(rows, "ward")
    names = np.concatenate([order, np.arange(clients, 2 * clients)])
    merges[:, :2] = names[merges[:, :2].astype(int)]
    return Dendrogram(clients, merges)


def too_few(clients: int, why: str = TOO_FEW) -> Evidence:
    """One group of everybody, because nothing could be compared."""
    labels, certainty = np.zeros(clients, np.int64), np.ones(clients)
    return Evidence(labels, {}, {}, {}, certainty, why, enough=False)


def inner_products(rows: Real) -> Array:
    """All inner products of rows, in float64, a block of columns at a time."""
    products = np.zeros((len(rows), len(rows)))
    with one_thread():
        for start in range(0, rows.shape[1], _COLUMNS):
            block = rows[:, start : start + _COLUMNS].astype(np.float64)
            products += block @ block.T
    return products


def _scaled(products: Array, directions: bool) -> Array:
    """The inner products of rows divided by their lengths, if that is wanted."""
    if not directions:
        return products
    length = np.sqrt(products.diagonal())
    length = np.where(length > 0, length, 1.0)
    scaled: Array = products / length[:, None] / length
    return scaled


def from_products(products: ArrayLike) -> Array:
    """Rows whose inner products are these, for representations that are never written out."""
    values, vectors = np.linalg.eigh(np.asarray(products, np.float64))
    keep = values > values[-1] * len(values) * np.finfo(np.float64).eps
    rows: Array = vectors[:, keep] * np.sqrt(values[keep])
    return rows


class _Comparison:
    """Held-out errors for every number of groups, of clients in a fixed order."""

    def __init__(self, halves: Array, counts: Array, most: int | None) -> None:
        self.halves, self.counts = halves, counts
        self.share = counts / counts.sum()
        clients = len(counts)
        limit = min(clients, MOST_GROUPS if most is None else most)
        self.searches = [Search(half, limit, counts) for half in halves]
        limit = min(limit, *(search.distinct for search in self.searches))
        self._found = dict[tuple[int, int], tuple[Labels, Array]]()
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
        tolerance = 1e-12 * max(errors[1], 1e-300)  # equal to rounding is equal
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
        nothing = np.einsum("hij,hij->i", self.halves, self.halves) / 2
        gain = nothing - self.residuals[1]
        if float(self.share @ gain) <= self._standard_error(gain):
            return 1, NO_SIGNAL, False
        return 1, ONE_GROUP, True

    def place(self, k: int, halves: Array) -> tuple[Labels, Array]:
        """Everybody's group, of ``k`` groups of the mean of both halves, and certainty.

        ``halves`` may be of more clients than were compared.
        """
        middle = Search(self.halves.mean(axis=0), k, self.counts)
        labels, centres = middle.groups(min(k, middle.distinct))
        if halves.shape[1] > len(labels):
            labels = _squares(halves.mean(axis=0), centres).argmin(axis=1)
        if len(centres) == 1:
            return labels, np.ones(halves.shape[1])
        certainty = np.zeros(halves.shape[1])
        for half in halves:
            away = _squares(half, centres)
            rows = np.arange(len(away))
            near = away[rows, labels]
            away[rows, labels] = np.inf
            other = away.min(axis=1)
            largest = np.maximum(np.maximum(near, other), 1e-300)
            certainty += (other - near) / largest / 2
        return labels, certainty

    def _groups(self, half: int, k: int) -> tuple[Labels, Array]:
        """The groups of one half, and their means."""
        if (half, k) not in self._found:
            self._found[half, k] = self.searches[half].groups(k)
        return self._found[half, k]

    def _residuals(self, k: int) -> Array:
        """Each client's squared error, when its group's mean of one half predicts the other."""
        total = np.zeros(len(self.counts))
        for this, other in ((0, 1), (1, 0)):
            labels, centres = self._groups(this, k)
            gaps = self.halves[other] - centres[labels]
            total += np.einsum("ij,ij->i", gaps, gaps) / 2
        return total

    def _kappa(self, k: int) -> float:
        values = []
        for this, other in ((0, 1), (1, 0)):
            labels, centres = self._groups(this, k)
            values.append(cohen_kappa(labels, _squares(self.halves[other], centres).argmin(axis=1)))
        return sum(values) / 2

    def _deviation(self, k: int) -> float:
        return self._standard_error(self.residuals[k] - self.residuals[self.lowest])

    def _standard_error(self, values: Array) -> float:
        """The standard error of the mean of clients' values, weighted by their samples."""
        squares = float((self.share**2).sum())
        gaps = values - self.share @ values
        return math.sqrt(float(self.share**2 @ gaps**2) / max(1 - squares, 1e-12))


def cohen_kappa(one: ArrayLike, two: ArrayLike) -> float:
    """Agreement of two labellings beyond chance: 1 if they are equal, 0 if no more than chance.

    >>> cohen_kappa([0, 0, 1, 1], [0, 0, 1, 1]), cohen_kappa([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    left, right = np.asarray(one), np.asarray(two)
    agreement = float((left == right).mean())
    groups = np.union1d(left, right)
    chance = float(sum((left == g).mean() * (right == g).mean() for g in groups))
    # Where there is one group only, κ is not defined.
    return 1.0 if chance == 1.0 else (agreement - chance) / (1 - chance)


def _squares(rows: Array, centres: Array) -> Array:
    """Squared distances from rows to centres."""
    products: Array = rows @ centres.T
    norms = np.einsum("ij,ij->i", rows, rows)[:, None] + np.einsum("ij,ij->i", centres, centres)
    squares: Array = np.maximum(norms - 2 * products, 0.0)
    return squares


def _sample(clients: int) -> Labels:
    """Which of the clients are compared, spread evenly over their order."""
    if clients <= SAMPLE:
        return np.arange(clients)
    return np.linspace(0, clients - 1, SAMPLE).round().astype(np.int64)
