"""Methods that leave each client a model, or layers, of its own."""

from __future__ import annotations

from coterie.compose import all_but_last, grouped
from coterie.method import Method, Natural, method


@method
def fedper(k: Natural = 1) -> Method:
    """The last k layers stay with the client, the others are averaged.

    Rule: a client lays the shared layers over its own last k, trains all together, sends the
    shared ones; these are averaged by n_i.
    Args:
        k: personal layers counted from the end, 0 or more and no more than the model has; 0 is
            FedAvg, all of them is ``local``, to the bit.
    Server sees: means of the shared layers.
    Travels: the shared layers down, the same up.
    Newcomers: get the shared layers; their own last k are those of θ⁰.
    Departs: nowhere.
    Reference: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    """
    return grouped("fedper", shared=all_but_last(k))
