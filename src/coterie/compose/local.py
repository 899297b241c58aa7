"""Local training: how a client trains the received model, and which model it then uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coterie.client import Client, Fit, Objective
from coterie.core.method import Setup
from coterie.core.weights import Weights

Check = Callable[[Setup], None]


Adapt = Callable[[Client, Weights, int], Weights]


@dataclass(frozen=True)
class Local:
    """How a client trains the received model, and which model it then uses.

    ``adapt(client, model, epochs)`` adapts the model that the client uses, by default by plain
    training; ``check`` raises an error for setups that do not fit. If ``gives_way``, the piece is
    replaced by any other that it is combined with. ``headline`` is the main score, "received" or
    "adapted".
    """

    train: Callable[[Client, Weights], Fit]
    uses: Callable[[Client, Weights], Weights] = lambda _, received: received
    adapt: Adapt | None = None
    check: Check | None = None
    gives_way: bool = False
    headline: str = "received"


def minimise(objective: Objective) -> Local:
    """Train the received model on an objective, and use the received model."""
    return Local(lambda client, start: client.fit(start, objective))


def keeping(name: str, train: Callable[[Client, Weights], Fit]) -> Local:
    """Use the personal model that ``train`` keeps in the client's state under ``name``.

    The personal model is already adapted to the client, so it is scored as it is. A client that has
    not trained yet uses and adapts the received model.
    """

    def uses(client: Client, received: Weights) -> Weights:
        return client.kept(name) or received

    def adapt(client: Client, model: Weights, epochs: int) -> Weights:
        return client.adapt(model, epochs) if client.kept(name) is None else model

    return Local(train, uses, adapt)
