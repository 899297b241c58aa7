"""Groups from a matrix of distances, by cutting a tree: shared by FedClust, PACFL and others."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from coterie.clustering import Cut, Dendrogram, agglomerate, best_cut
from coterie.compose.local import Check
from coterie.core.messages import ClientId
from coterie.core.method import Setup, matrix
from coterie.errors import ConfigError

Labels = np.ndarray[Any, Any]
Linkage = Literal["average", "single", "complete", "ward"]


def cut_tree(
    clients: Collection[ClientId],
    distances: np.ndarray[Any, Any],
    linkage: Linkage,
    threshold: float | Literal["auto"],
    clusters: int | None = None,
    least_similarity: float | None = None,
) -> tuple[Labels, dict[str, Any]]:
    """Groups from cutting a tree: at a height, into ``clusters`` groups, or at the best silhouette.

    With ``least_similarity`` (the lowest possible similarity), the threshold is a similarity, which
    is 1 − the height. Also returns the notes to record, with a warning if the threshold leaves all
    clients together or each alone.
    """
    tree = agglomerate(distances, linkage)
    best = best_cut(distances, tree)
    labels, why = best.labels, chosen_because(best)
    height: float | None = best.height
    warning: dict[str, Any] = {}
    if clusters is not None:
        labels, height = tree.cut_count(min(clusters, len(clients))), None
        why = "the number of groups was given"
    elif threshold != "auto":
        height = threshold if least_similarity is None else 1 - threshold
        labels, why = tree.cut(height), "the threshold was given"
        if text := without_effect(tree, threshold, least_similarity):
            warning = {"warning": {"threshold": text}}
    return labels, {
        "clients": list(clients),
        "distances": matrix(distances),
        "dendrogram": tree.to_list(),
        "threshold": height,
        "why": why,
        # Keys are text, as they are when a resumed run reads the events back.
        "silhouette": {str(k): score for k, score in best.scores.items()},
        **warning,
    }


def without_effect(
    tree: Dendrogram, threshold: float, least_similarity: float | None = None
) -> str:
    """A warning if all merges of the tree lie on one side of the threshold; "" otherwise.

    Both ends of the scale are taken as intended: all clients together, or every client alone.

    >>> tree = Dendrogram(3, np.array([[0, 1, 0.25, 2], [2, 3, 0.5, 3]]))
    >>> without_effect(tree, 4.0)
    'threshold = 4 has no effect: the last groups merge at 0.5, so all clients are in one ...'
    >>> without_effect(tree, 0.3), without_effect(tree, math.inf)
    ('', '')
    """
    if len(tree.merges) < 2:
        return ""  # two clients are together or apart, and either may be meant
    as_similarity = least_similarity is not None
    height = 1 - threshold if as_similarity else threshold
    first, last = float(tree.merges[:, 2].min()), float(tree.merges[:, 2].max())
    if height >= last:
        if math.isinf(height) or (least_similarity is not None and threshold <= least_similarity):
            return ""
        at, change = (1 - last, "raise") if as_similarity else (last, "lower")
        return (
            f"threshold = {threshold:g} has no effect: the last groups merge at {at:.4g}, so all "
            f"clients are in one group; {change} it, or leave it out"
        )
    if 0 < height < first:
        at, change = (1 - first, "lower") if as_similarity else (first, "raise")
        return (
            f"threshold = {threshold:g} has no effect: the first clients merge at {at:.4g}, so "
            f"every client is alone in its group; {change} it, or leave it out"
        )
    return ""


def chosen_because(best: Cut) -> str:
    """Why the automatic cut is where it is.

    A cut counts only if its mean silhouette is above 0.1 both over clients (which figures show) and
    over groups. So if a cut has a higher silhouette over clients than the chosen one, its
    silhouette over groups was too low.
    """
    if not best.scores:
        return "one group: no cut has a silhouette, as fewer than three clients differ"
    groups, highest = len(set(best.labels)), max(best.scores, key=lambda k: best.scores[k])
    score = best.scores[highest]
    too_low = f"{score:.3f}, but 0.1 or less as a mean over groups"
    if groups == 1 and score > 0.1:
        return f"one group: the best cut, into {highest} groups, has silhouette {too_low}"
    if groups == 1:
        return (
            f"one group: no silhouette is above 0.1, the best is {score:.3f} with {highest} groups"
        )
    chosen = f"silhouette {best.silhouette:.3f} with {groups} groups, the best"
    if score > best.silhouette + 1e-9:  # otherwise it is a tie
        return f"{chosen} that counts: {highest} have {too_low}"
    return f"{chosen} of all cuts"


def no_more(name: str, word: str, count: int | None) -> Check:
    """A check that refuses more groups than there are clients."""

    def check(setup: Setup) -> None:
        if count is not None and count > len(setup.clients):
            raise ConfigError(
                f"method {name}: {word} = {count} groups for {len(setup.clients)} clients: "
                "choose fewer"
            )

    return check
