"""Pictures of runs and of what methods did, as plotly figures.

Pictures of a method take the events of ``events.jsonl``, plain dicts and lists; pictures of whole
runs take a ``Reading``. Where there is nothing to draw, they raise a ``ConfigError`` that says why.
The modules below draw sketches, which pages use directly; the functions here turn them into
figures.
"""

from coterie.report.figures import by_layer, groups, matrices, methods, mixing, streams, trees
from coterie.report.figures import divergence as _divergence
from coterie.report.figures import evidence as _evidence
from coterie.report.figures.following import followed
from coterie.report.figures.sketch import in_plotly
from coterie.report.figures.style import plain
from coterie.report.figures.trees import split_levels

alluvial = in_plotly(streams.alluvial)
client_map = in_plotly(_evidence.client_map)
dendrogram = in_plotly(trees.dendrogram)
distances_by_layer = in_plotly(by_layer.distances_by_layer)
labels_and_models = in_plotly(_divergence.divergence)
evidence_by_number = in_plotly(_evidence.evidence)
groups_over_rounds = in_plotly(groups.groups_over_rounds)
hopkins_and_layers = in_plotly(methods.hopkins_and_layers)
label_shares = in_plotly(matrices.label_shares)
layer_intervals = in_plotly(methods.layer_intervals)
loss_and_trials = in_plotly(methods.loss_and_trials)
mixing_matrix = in_plotly(matrices.mixing_matrix)
mixing_terms = in_plotly(mixing.mixing_terms)
silhouette = in_plotly(methods.silhouette)
similarity_matrix = in_plotly(matrices.similarity_matrix)
steps_by_round = in_plotly(methods.steps_by_round)

__all__ = [
    "alluvial",
    "client_map",
    "dendrogram",
    "distances_by_layer",
    "evidence_by_number",
    "followed",
    "groups_over_rounds",
    "hopkins_and_layers",
    "label_shares",
    "labels_and_models",
    "layer_intervals",
    "loss_and_trials",
    "mixing_matrix",
    "mixing_terms",
    "plain",
    "silhouette",
    "similarity_matrix",
    "split_levels",
    "steps_by_round",
]
