"""Methods that leave each client a model, or layers, of its own."""

from __future__ import annotations

from coterie.client import erm
from coterie.compose import all_but_last, everyone, grouped, minimise
from coterie.errors import ConfigError
from coterie.method import Method, method


@method
def fedper(k: int = 1) -> Method:
    """The last k layers stay with the client, the others are averaged.

    Rule: a client lays the shared layers over its own last k, trains all together, sends the
    shared ones; these are averaged by n_i.
    Args:
        k: personal layers counted from the end; 0 is FedAvg, all of them is ``local``, to the bit.
    Server sees: means of the shared layers.
    Departs: nowhere.
    Reference: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    """
    if k < 0:
        raise ConfigError(f"fedper: k must be 0 or more, not {k}")
    return grouped("fedper", everyone(), minimise(erm()), all_but_last(k))
