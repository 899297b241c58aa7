"""Local objectives: the loss of the data, plus penalties on the parameters.

A penalty works on one vector or on a matrix of rows alike, and adds its gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from coterie.weights import Weights


@dataclass(frozen=True)
class Penalty:
    """A term of the parameters θ, given the parameters that training started from."""

    value: Callable[[Tensor, Tensor], Tensor]
    add_gradient: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Objective:
    """What a client minimises: the mean loss of its training data and these penalties."""

    penalties: tuple[Penalty, ...] = ()

    def __add__(self, other: Objective) -> Objective:
        return Objective(self.penalties + other.penalties)


def erm() -> Objective:
    """Empirical risk: the loss of the data and nothing else."""
    return Objective()


def proximal(mu: float, anchor: Weights | None = None) -> Objective:
    """Pull towards an anchor, μ/2·‖θ − anchor‖²; the anchor is the model received unless given.

    With ``mu=0`` there is no term at all, so the bits are those of ``erm()``.
    """
    if mu == 0:
        return erm()

    def towards(start: Tensor) -> Tensor:
        return start if anchor is None else anchor.parameters.to(start.device)

    def value(theta: Tensor, start: Tensor) -> Tensor:
        return (theta - towards(start)).square().sum(-1) * (mu / 2)

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(theta - towards(start), alpha=mu)

    return Objective((Penalty(value, add_gradient),))
