"""Scores over clients: the mean, the weighted mean, the worst, the spread."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coterie.core.messages import ClientId

Scores = Mapping[ClientId, Mapping[str, float]]


def main_score(regression: bool) -> str:
    """The name of the score that a run is judged by; higher is better."""
    return "r2" if regression else "accuracy"


def by_client(scores: Scores, judged_by: str, clients: int) -> list[float | None]:
    """The score of each client on its own test data, in client order; None if it has none.

    >>> by_client({1: {"test_accuracy": 0.5, "test_count": 4.0}}, "accuracy", 3)
    [None, 0.5, None]
    """
    of_clients = (scores.get(c, {}) for c in range(clients))
    values = (s.get(f"test_{judged_by}") if s.get("test_count") else None for s in of_clients)
    return [None if score is None else round(score, 4) for score in values]


def summarise(scores: Scores, judged_by: str) -> dict[str, float]:
    """A summary of the clients' scores.

    It has means over clients, unweighted and weighted by test counts; the worst score and its
    client; the 10th, 50th and 90th percentile; the standard deviation; and the mean score on
    validation data, for choosing a round.

    >>> two = {0: {"test_accuracy": 1.0, "test_count": 10.0, "test_loss": 0.1},
    ...        1: {"test_accuracy": 0.5, "test_count": 30.0, "test_loss": 0.3}}
    >>> mean = summarise(two, "accuracy")
    >>> mean["accuracy"], mean["weighted_accuracy"], mean["worst"], mean["worst_client"]
    (0.75, 0.625, 0.5, 1)
    """
    score = f"test_{judged_by}"
    tested = {c: s for c, s in sorted(scores.items()) if s.get("test_count", 0) > 0 and score in s}
    if not tested:
        return {}
    names = list(tested)
    values = np.array([tested[c][score] for c in names])
    counts = np.array([tested[c]["test_count"] for c in names])
    summary: dict[str, float] = {
        judged_by: float(values.mean()),
        f"weighted_{judged_by}": float((values * counts).sum() / counts.sum()),
        "worst": float(values.min()),
        "worst_client": names[int(values.argmin())],
        **{f"p{p}": float(np.percentile(values, p)) for p in (10, 50, 90)},
        "std": float(values.std()),
    }
    done = {score, "test_count"}
    others = {k for s in tested.values() for k in s if k.startswith("test_")} - done
    for key in sorted(others):
        of_clients = [s[key] for s in tested.values() if key in s]
        summary[key.removeprefix("test_")] = float(np.mean(of_clients))
    val_key = f"val_{judged_by}"
    validated = [s[val_key] for s in tested.values() if s.get("val_count", 0) > 0 and val_key in s]
    if validated:
        summary["val"] = float(np.mean(validated))
    return summary
