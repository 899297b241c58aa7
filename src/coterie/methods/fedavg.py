"""One model for everybody, and its opposite: each alone."""

from __future__ import annotations

from coterie.client import proximal
from coterie.compose.assign import alone
from coterie.compose.grouped import grouped
from coterie.compose.local import minimise
from coterie.compose.sharing import no_layer
from coterie.core.method import Method, NonNegative, method


@method
def local() -> Method:
    """Each client trains alone.

    Family: global.
    Rule: a client of the cohort trains its own model from where it left it; nothing is shared.
    Server sees: nothing.
    Travels: nothing. In a simulation the orders that set the training going are counted apart.
    Newcomers: each is alone too, with θ⁰.
    Departs: no paper; the lower bound of every comparison.
    Reference: none.
    """
    return grouped("local", alone(), shared=no_layer)


@method
def fedavg() -> Method:
    """One model, the mean of the cohort's models.

    Family: global.
    Rule: θ ← Σ_S n_i θ_i / Σ_S n_i, each θ_i trained from θ.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere.
    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
    Data, AISTATS 2017.
    """
    return grouped("fedavg")


@method
def fedprox(mu: NonNegative = 0.1) -> Method:
    """FedAvg whose clients stay near the model that they received.

    Family: global.
    Rule: locally + μ/2·‖θ − θ_t‖², θ_t the model received; then as FedAvg. Buffers of batch
    normalisation are not pulled.
    Args:
        mu: strength of the pull, 0 or more; 0 is FedAvg to the bit.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: all clients do the same number of epochs (the paper also drops that).
    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """
    return grouped("fedprox", train=minimise(proximal(mu)))
