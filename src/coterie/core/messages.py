"""The messages between the server and its clients: orders, uploads, replies and means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.core.weights import Weights
from coterie.errors import Diverged

ClientId = int


Slot = int | str


Scalar = bool | int | float | str


Array = Weights | Tensor


def vector_of(array: Array) -> Tensor:
    """The values of an array as a tensor."""
    return array.vector if isinstance(array, Weights) else array


@dataclass(frozen=True)
class Order:
    """A task for one client, with its arrays and configuration.

    ``unmetered`` marks work that a real client would do on its own, without a message: its bytes
    are counted separately, like those of scoring. ``unhurried`` marks work in addition to a round's
    training, such as evidence for groups: the round's deadline does not apply to it. In a real
    federation, it has the real deadline to itself.
    """

    client: ClientId
    task: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    config: Mapping[str, Scalar] = field(default_factory=dict)
    unmetered: bool = False
    unhurried: bool = False


@dataclass(frozen=True)
class Upload:
    """The result of a task.

    ``delta_of`` names the received array that each array is a change of: codecs, clipping and
    fixed-point encoding are applied to the difference.
    """

    arrays: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    delta_of: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One client's answer to an order."""

    client: ClientId
    examples: int
    arrays: Mapping[str, Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Mean:
    """A weighted mean of replies, and the clients that contributed, as orders can go unanswered.

    Metrics are means over the clients that report them: unweighted, except in secure sums, where
    clients count as in the means of the arrays.
    """

    arrays: Mapping[str, Array]
    examples: int
    clients: tuple[ClientId, ...]
    metrics: Mapping[str, float]


def all_finite(vector: Tensor) -> bool:
    """Whether a vector holds neither NaN nor infinite values.

    These show in its sum, which is quicker than looking at each value; only where finite values
    have too large a sum are they looked at one by one.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([math.inf, -math.inf]))
    (True, False)
    """
    if not vector.is_floating_point():
        return True
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())


def check_finite(client: ClientId, round: int, task: str, arrays: Mapping[str, Array]) -> None:
    """Raise an error if any array contains NaN or infinity."""
    for name, array in arrays.items():
        if not all_finite(vector_of(array)):
            raise Diverged(
                f"client {client}, round {round + 1}: '{name}' from task '{task}' is no longer "
                "finite. Lower the learning rate (train.lr) or clip gradients (train.clip)"
            )


@dataclass(frozen=True)
class Chosen:
    """Slots chosen by the clients, each named in this metric of the client's reply."""

    metric: str


def chosen(metric: str) -> Chosen:
    """Let each client choose the slot that its reply is averaged into, as in IFCA."""
    return Chosen(metric)


Mixing = Mapping[ClientId, Mapping[Slot, float]] | Chosen
