"""Composing methods: grouping rules, local training, shared layers, and wrappers of methods."""

from coterie.compose.assign import Assign, alone, by_loss, everyone, true_groups
from coterie.compose.grouped import Pieces, combined, grouped
from coterie.compose.local import Local, keeping, minimise
from coterie.compose.robust import with_robust_aggregation
from coterie.compose.server_optimizer import with_server_optimizer
from coterie.compose.sharing import Sharing, all_but_last, all_layers, no_layer, only_last

__all__ = [
    "Assign",
    "Local",
    "Pieces",
    "Sharing",
    "all_but_last",
    "all_layers",
    "alone",
    "by_loss",
    "combined",
    "everyone",
    "grouped",
    "keeping",
    "minimise",
    "no_layer",
    "only_last",
    "true_groups",
    "with_robust_aggregation",
    "with_server_optimizer",
]
