"""Pictures of runs and of what methods did, as plotly figures.

Those of methods take events as they are written to ``events.jsonl``, plain dicts and lists; those
of whole runs a ``Reading``. What cannot be drawn is a ``ConfigError`` that says why.
"""

from coterie.report.figures.following import followed
from coterie.report.figures.groups import groups_over_rounds
from coterie.report.figures.matrices import label_shares, mixing_matrix, similarity_matrix
from coterie.report.figures.methods import (
    hopkins_and_layers,
    layer_intervals,
    loss_and_trials,
    silhouette,
    steps_by_round,
)
from coterie.report.figures.streams import alluvial
from coterie.report.figures.style import plain, untitled
from coterie.report.figures.trees import dendrogram, split_levels

__all__ = [
    "alluvial",
    "dendrogram",
    "followed",
    "groups_over_rounds",
    "hopkins_and_layers",
    "label_shares",
    "layer_intervals",
    "loss_and_trials",
    "mixing_matrix",
    "plain",
    "silhouette",
    "similarity_matrix",
    "split_levels",
    "steps_by_round",
    "untitled",
]
