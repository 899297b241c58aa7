"""Scores over clients: the mean, the weighted mean, the worst, the spread."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coterie.core.messages import ClientId

Scores = Mapping[ClientId, Mapping[str, float]]


def headline(regression: bool) -> str:
    """The score that a run is judged by; higher is better."""
    return "r2" if regression else "accuracy"


def by_client(scores: Scores, judged_by: str, clients: int) -> list[float | None]:
    """Each client's own score on test data, in client order; None for those without one.

    >>> by_client({1: {"test_accuracy": 0.5, "test_count": 4.0}}, "accuracy", 3)
    [None, 0.5, None]
    """
    own = (scores.get(c, {}) for c in range(clients))
    told = (s.get(f"test_{judged_by}") if s.get("test_count") else None for s in own)
    return [None if score is None else round(score, 4) for score in told]


def summarise(scores: Scores, judged_by: str) -> dict[str, float]:
    """What a round reports of its clients' scores.

    Means over clients, unweighted and by test counts; the worst client and who it is, the 10th,
    50th and 90th percentile, the standard deviation; the same score on validation data, for
    choosing a round.

    >>> two = {0: {"test_accuracy": 1.0, "test_count": 10.0, "test_loss": 0.1},
    ...        1: {"test_accuracy": 0.5, "test_count": 30.0, "test_loss": 0.3}}
    >>> found = summarise(two, "accuracy")
    >>> found["accuracy"], found["weighted_accuracy"], found["worst"], found["worst_client"]
    (0.75, 0.625, 0.5, 1)
    """
    own = f"test_{judged_by}"
    held = {c: s for c, s in sorted(scores.items()) if s.get("test_count", 0) > 0 and own in s}
    if not held:
        return {}
    names = list(held)
    values = np.array([held[c][own] for c in names])
    counts = np.array([held[c]["test_count"] for c in names])
    found: dict[str, float] = {
        judged_by: float(values.mean()),
        f"weighted_{judged_by}": float((values * counts).sum() / counts.sum()),
        "worst": float(values.min()),
        "worst_client": names[int(values.argmin())],
        **{f"p{p}": float(np.percentile(values, p)) for p in (10, 50, 90)},
        "std": float(values.std()),
    }
    taken = {own, "test_count"}
    others = {k for s in held.values() for k in s if k.startswith("test_")} - taken
    for key in sorted(others):
        told = [s[key] for s in held.values() if key in s]
        found[key.removeprefix("test_")] = float(np.mean(told))
    mine = f"val_{judged_by}"
    checked = [s[mine] for s in held.values() if s.get("val_count", 0) > 0 and mine in s]
    if checked:
        found["val"] = float(np.mean(checked))
    return found
