"""What passes between the server and its clients: orders, uploads, replies and means."""

from __future__ import annotations

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
    """The numbers of an array, whichever it is."""
    return array.vector if isinstance(array, Weights) else array


@dataclass(frozen=True)
class Order:
    """One piece of work for one client.

    ``unmetered`` marks work that a real client would do on its own, with no message: its bytes are
    counted apart, as those of scoring are. ``unhurried`` marks work beside a round's ordinary
    training, such as evidence about groups: the round's deadlines do not run for it, as before the
    first round; clients elsewhere have the real one anew.
    """

    client: ClientId
    task: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    config: Mapping[str, Scalar] = field(default_factory=dict)
    unmetered: bool = False
    unhurried: bool = False


@dataclass(frozen=True)
class Upload:
    """What a task returns.

    ``delta_of`` says which received array each upload is a change of: codecs, clipping and fixed
    point act on that difference.
    """

    arrays: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    delta_of: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What one client sent back."""

    client: ClientId
    examples: int
    arrays: Mapping[str, Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Mean:
    """A weighted mean of replies, and who contributed: orders can go unanswered.

    Metrics are plain means over those who report them: a loss is everybody's alike.
    """

    arrays: Mapping[str, Array]
    examples: int
    clients: tuple[ClientId, ...]
    metrics: Mapping[str, float]


def check_finite(client: ClientId, round: int, task: str, arrays: Mapping[str, Array]) -> None:
    """Refuse arrays that hold NaN or infinity, in words for the user."""
    for name, array in arrays.items():
        vector = vector_of(array)
        if vector.is_floating_point() and not bool(torch.isfinite(vector).all()):
            raise Diverged(
                f"client {client}, round {round + 1}: '{name}' from task '{task}' is no longer "
                "finite. Lower the learning rate (train.lr) or clip gradients (train.clip)"
            )


@dataclass(frozen=True)
class Chosen:
    """The slot is the client's own choice, named in this metric of its reply."""

    metric: str


def chosen(metric: str) -> Chosen:
    """Let each client name the slot that its reply goes into (IFCA's pick)."""
    return Chosen(metric)


Mixing = Mapping[ClientId, Mapping[Slot, float]] | Chosen
