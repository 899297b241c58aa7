"""One model for all clients (FedAvg, FedProx), and its opposite: each client alone."""

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
    Rule: a client of the cohort continues to train its own model; nothing is shared.
    Server sees: nothing.
    Travels: nothing. In a simulation, the orders that start the training are counted separately.
    Newcomers: train alone, too, from θ⁰.
    Departs: there is no paper; this is the lower bound of every comparison.
    Reference: none.
    """
    return grouped("local", alone(), shared=no_layer)


@method
def fedavg() -> Method:
    """One model, the mean of the cohort's models.

    Family: global.
    Rule: θ ← Σ_S n_i θ_i / Σ_S n_i, where S is the cohort, θ_i is client i's model, trained from θ,
    and n_i is its number of samples.
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
    """FedAvg with a proximal term: clients stay near the model that they received.

    Family: global.
    Rule: a client minimises its loss + μ/2·‖θ − θ_t‖², where θ_t is the model received; the rest is
    as in FedAvg. The term does not affect buffers of batch normalisation.
    Args:
        mu: strength μ of the proximal term, 0 or more; 0 is FedAvg to the bit.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: all clients train for the same number of epochs (the paper also drops this assumption).
    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """
    return grouped("fedprox", train=minimise(proximal(mu)))
