"""Measures of how much the clients' labels differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from coterie.data.population import Population
from coterie.data.raw import Array
from coterie.errors import DataError


def label_table(population: Population) -> Array:
    """The number of training samples of each client and class: (clients, classes)."""
    if population.classes is None:
        raise DataError("a regression population has no classes to count")
    classes = len(population.classes)
    return np.stack(
        [np.bincount(client.train.y.numpy(), minlength=classes) for client in population.clients]
    )


def pairwise_kl(table: Array, smoothing: float = 1e-3) -> float:
    """The mean symmetric Kullback-Leibler divergence over all pairs of clients, in nats.

    For a pair, it is (KL(p, q) + KL(q, p)) / 2, as in DC-PFL. A class without samples would make
    it infinite, so each client's distribution p is first mixed with the uniform distribution:
    (1 - smoothing) p + smoothing / classes. It is zero for a single client.

    >>> round(pairwise_kl(np.array([[3, 1], [1, 3]]), smoothing=0), 6)  # ln(3) / 2
    0.549306
    """
    clients = len(table)
    if clients < 2:
        return 0.0
    total = sum(float(row.sum()) for row in _later_pairs(table, smoothing))
    return 2 * total / (clients * (clients - 1))


def kl_matrix(table: Array, smoothing: float = 1e-3) -> Array:
    """The symmetric divergence of every two clients, as a matrix with a zero diagonal.

    >>> kl_matrix(np.array([[3, 1], [1, 3], [3, 1]]), smoothing=0).round(6).tolist()
    [[0.0, 0.549306, 0.0], [0.549306, 0.0, 0.549306], [0.0, 0.549306, 0.0]]
    """
    divergences: Array = np.zeros((len(table), len(table)))
    for i, row in enumerate(_later_pairs(table, smoothing)):
        divergences[i, i + 1 :] = divergences[i + 1 :, i] = row
    return divergences


def _later_pairs(table: Array, smoothing: float) -> Iterator[Array]:
    """For each client, its divergences from the clients after it."""
    p = (1 - smoothing) * _proportions(table) + smoothing / table.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(p)
        for i in range(len(p)):
            terms = (p[i] - p[i + 1 :]) * (logs[i] - logs[i + 1 :])
            # 0 · log 0 counts as 0.
            yield np.where(p[i] == p[i + 1 :], 0.0, terms).sum(axis=1) / 2


def emd_to_population(table: Array) -> Array:
    """Each client's distance from the whole population: sum over classes of |p_i(c) - p(c)|.

    Federated learning papers call this the earth mover's distance (Zhao et al., 2018); it is the
    L1 distance, between 0 and 2. p is the distribution of all clients' samples together.

    >>> emd_to_population(np.array([[4, 0], [2, 2]])).tolist()
    [0.5, 0.5]
    """
    overall = table.sum(axis=0) / table.sum()
    distance: Array = np.abs(_proportions(table) - overall).sum(axis=1)
    return distance


def describe(population: Population) -> dict[str, Any]:
    """Summarise a population: sizes, classes per client, label differences and true groups.

    ``samples`` counts all of a client's data; the figures about labels are for training splits, and
    None for regression.
    """
    sizes = [len(c.train) + len(c.val) + len(c.test) for c in population.clients]
    summary: dict[str, Any] = {
        "clients": len(population.clients),
        "samples": _spread(sizes),
        "classes_per_client": None,
        "kl": None,
        "mean_emd": None,
        "groups": None,
    }
    if population.classes is not None:
        table = label_table(population)
        summary["classes_per_client"] = _spread((table > 0).sum(axis=1))
        summary["kl"] = pairwise_kl(table)
        summary["mean_emd"] = float(emd_to_population(table).mean())
    if population.groups is not None:
        summary["groups"] = dict(sorted(Counter(population.groups).items()))
    return summary


def _proportions(table: Array) -> Array:
    totals = table.sum(axis=1, keepdims=True)
    if (totals == 0).any():
        raise DataError(f"client {int(np.argmin(totals))} has no samples to compare")
    proportions: Array = table / totals
    return proportions


def _spread(values: Any) -> dict[str, float]:
    return {
        "min": int(np.min(values)),
        "median": float(np.median(values)),
        "max": int(np.max(values)),
    }
