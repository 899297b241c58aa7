"""Methods that divide clients into groups, a model for each."""

from __future__ import annotations

from coterie.client import erm
from coterie.compose import by_loss, grouped, minimise, true_groups
from coterie.errors import ConfigError
from coterie.method import Method, method


@method
def ifca(k: int) -> Method:
    """Each client joins the model that fits its training data best.

    Rule: the server sends k models; a client takes the one with the lowest training loss, trains
    it and names it; each model becomes the mean, by n_i, of those who chose it. A model that
    nobody chose stays. Models start from distinct random weights, the first from θ⁰.
    Args:
        k: the number of models, 1 or more; 1 is FedAvg to the bit.
    Server sees: means, and each client's choice.
    Departs: weighted by n_i (the paper's analysis takes equal sizes). A client is scored on the
    model it chose when it last trained; one that never trained chooses by training loss.
    Reference: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.
    """
    if k < 1:
        raise ConfigError(f"ifca: k must be 1 or more, not {k}")
    return grouped("ifca", by_loss(k), minimise(erm()))


@method
def oracle() -> Method:
    """The scenario's true groups, a model for each: the upper bound of clustering.

    Rule: FedAvg inside each true group.
    Server sees: means.
    Departs: no paper; needs a scenario that knows its groups.
    """
    return grouped("oracle", true_groups(), minimise(erm()))
