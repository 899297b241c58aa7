"""How a client trains the model that it received, and which model it then uses."""

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
    """How a client trains the model it received, and which model it then uses.

    ``adapt(client, model, epochs)`` is how it adapts the model that it uses, where that is not
    plain training; ``check`` refuses what does not fit. One that ``gives_way`` is left out where
    it is combined with another. ``headline`` is the score that counts, "received" or "adapted".
    """

    train: Callable[[Client, Weights], Fit]
    uses: Callable[[Client, Weights], Weights] = lambda _, received: received
    adapt: Adapt | None = None
    check: Check | None = None
    gives_way: bool = False
    headline: str = "received"


def minimise(objective: Objective) -> Local:
    """Train what was received on an objective, and use what is received."""
    return Local(lambda client, start: client.fit(start, objective))


def keeping(name: str, train: Callable[[Client, Weights], Fit]) -> Local:
    """A client uses the model that ``train`` leaves in its state under this name.

    It is scored as it stands, adapted to the client already. A client that has not trained yet
    uses, and adapts, what it receives.
    """

    def uses(client: Client, received: Weights) -> Weights:
        return client.kept(name) or received

    def adapt(client: Client, model: Weights, epochs: int) -> Weights:
        return client.adapt(model, epochs) if client.kept(name) is None else model

    return Local(train, uses, adapt)
