"""Clustered methods with a fixed number of models: IFCA, and the true groups of a scenario."""

from __future__ import annotations

from coterie.compose.assign import by_loss, true_groups
from coterie.compose.grouped import grouped
from coterie.core.method import Count, Method, method


@method
def ifca(k: Count) -> Method:
    """Each client joins the model that fits its training data best.

    Family: clustered.
    Rule: the server sends k models; a client chooses the one with the lowest training loss, trains
    it and sends it back with its choice. Each model becomes the mean, weighted by n_i, of the
    updates of the clients that chose it; a model that no client chose stays as it is. The models
    start from different random weights, the first from θ⁰.
    Args:
        k: the number of models, 1 or more; 1 is FedAvg to the bit.
    Server sees: means, and each client's choice.
    Travels: k models down, 1 up.
    Newcomers: get all k models and join the one with the lowest loss on their training data.
    Departs: means are weighted by n_i (the paper's analysis assumes equal sizes). A client is
    scored on the model that it chose when it last trained; one that has never trained chooses by
    its training loss.
    Reference: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.
    """
    return grouped("ifca", by_loss(k))


@method
def oracle() -> Method:
    """The scenario's true groups, with a model for each: the upper bound of clustering.

    Family: clustered.
    Rule: FedAvg inside each true group.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: join their true group; clients whose group the scenario does not know are refused.
    Departs: there is no paper. The method needs a scenario that knows its groups.
    Reference: none.
    """
    return grouped("oracle", true_groups())
