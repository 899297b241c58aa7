"""Methods that divide clients into groups, a model for each."""

from __future__ import annotations

from coterie.compose.assign import by_loss, true_groups
from coterie.compose.grouped import grouped
from coterie.core.method import Count, Method, method


@method
def ifca(k: Count) -> Method:
    """Each client joins the model that fits its training data best.

    Family: clustered.
    Rule: the server sends k models; a client takes the one with the lowest training loss, trains
    it and names it; each model becomes the mean, by n_i, of those who chose it. A model that
    nobody chose stays. Models start from distinct random weights, the first from θ⁰.
    Args:
        k: the number of models, 1 or more; 1 is FedAvg to the bit.
    Server sees: means, and each client's choice.
    Travels: k models down, 1 up.
    Newcomers: get all k models and join the one with the lowest loss on their training data.
    Departs: weighted by n_i (the paper's analysis takes equal sizes). A client is scored on the
    model it chose when it last trained; one that never trained chooses by training loss.
    Reference: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.
    """
    return grouped("ifca", by_loss(k))


@method
def oracle() -> Method:
    """The scenario's true groups, a model for each: the upper bound of clustering.

    Family: clustered.
    Rule: FedAvg inside each true group.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: join their true group; whoever's group the scenario does not know is refused.
    Departs: no paper; needs a scenario that knows its groups.
    Reference: none.
    """
    return grouped("oracle", true_groups())
