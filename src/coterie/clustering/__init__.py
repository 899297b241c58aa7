"""Clustering of clients: distances between them, groups, and the evidence for the groups.

All functions are pure functions of arrays with one row (or basis, or block of probabilities) per
client, independent of models, rounds and messages. Group labels are always canonical: group 0 is
the group of client 0.
"""

from __future__ import annotations

from coterie.clustering.agreement import adjusted_rand
from coterie.clustering.angles import (
    basis,
    paired_angle_matrix,
    principal_angles,
    smallest_angle_matrix,
)
from coterie.clustering.arrays import one_thread
from coterie.clustering.bipartition import Bipartition, bipartition
from coterie.clustering.density import dbscan, hopkins
from coterie.clustering.distances import (
    cosine,
    euclidean,
    jensen_shannon,
    manhattan,
    min_max,
    scaled_l1,
)
from coterie.clustering.evidence import (
    SAMPLE,
    Evidence,
    find_evidence,
    find_evidence_in_products,
    too_few,
)
from coterie.clustering.hierarchy import (
    LINKAGES,
    Cut,
    Dendrogram,
    agglomerate,
    best_cut,
    canonical,
)
from coterie.clustering.kmeans import Streams, best_k, kmeans, kmeans_up_to
from coterie.clustering.mixing import MixingTerms, mixing_diagnostics
from coterie.clustering.one_shot import local_centres, nearest_seed, seed_centres
from coterie.clustering.reassignment import with_most

__all__ = [
    "LINKAGES",
    "SAMPLE",
    "Bipartition",
    "Cut",
    "Dendrogram",
    "Evidence",
    "MixingTerms",
    "Streams",
    "adjusted_rand",
    "agglomerate",
    "basis",
    "best_cut",
    "best_k",
    "bipartition",
    "canonical",
    "cosine",
    "dbscan",
    "euclidean",
    "find_evidence",
    "find_evidence_in_products",
    "hopkins",
    "jensen_shannon",
    "kmeans",
    "kmeans_up_to",
    "local_centres",
    "manhattan",
    "min_max",
    "mixing_diagnostics",
    "nearest_seed",
    "one_thread",
    "paired_angle_matrix",
    "principal_angles",
    "scaled_l1",
    "seed_centres",
    "smallest_angle_matrix",
    "too_few",
    "with_most",
]
