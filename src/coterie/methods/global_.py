"""One model for everybody, and its opposite: each alone."""

from __future__ import annotations

from coterie.client import erm, proximal
from coterie.compose import alone, everyone, grouped, minimise, no_layer
from coterie.errors import ConfigError
from coterie.method import Method, method


@method
def local() -> Method:
    """Each client trains alone.

    Rule: a client of the cohort trains its own model from where it left it; nothing is shared.
    Server sees: nothing. Bytes: none (in a simulation the orders that set the training going are
    counted apart).
    Departs: no paper; the lower bound of every comparison.
    """
    return grouped("local", alone(), minimise(erm()), no_layer)


@method
def fedavg() -> Method:
    """One model, the mean of the cohort's models.

    Rule: θ ← Σ_S n_i θ_i / Σ_S n_i, each θ_i trained from θ.
    Server sees: means.
    Departs: nowhere.
    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
    Data, AISTATS 2017.
    """
    return grouped("fedavg", everyone(), minimise(erm()))


@method
def fedprox(mu: float = 0.1) -> Method:
    """FedAvg whose clients stay near the model that they received.

    Rule: locally + μ/2·‖θ − θ_t‖², θ_t the model received; then as FedAvg. Buffers of batch
    normalisation are not pulled.
    Args:
        mu: strength of the pull, 0 or more; 0 is FedAvg to the bit.
    Server sees: means.
    Departs: all clients do the same number of epochs (the paper also drops that).
    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """
    if not mu >= 0:
        raise ConfigError(f"fedprox: mu must be 0 or more, not {mu}")
    return grouped("fedprox", everyone(), minimise(proximal(mu)))
