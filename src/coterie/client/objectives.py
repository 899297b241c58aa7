"""Local objectives: the loss of the data, plus penalties on the parameters.

A penalty works on one vector or on a matrix of rows alike, and adds its gradient in place. A term
looks at what the model makes of a batch, and a descent replaces the gradient by one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.weights import Weights

if TYPE_CHECKING:
    from coterie.client.fit import FlatModel

Batch = tuple[Tensor, Tensor]
# Of the inputs of a batch and their representation, the input of the model's last layer.
Term = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Penalty:
    """A term of the parameters θ, given the parameters that training started from."""

    value: Callable[[Tensor, Tensor], Tensor]
    add_gradient: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class StepContext:
    """Where one step stands: the model's vector, its parameters θ, and the gradient to fill.

    ``at(batch)`` replaces the gradient by that of the batch's loss at the present θ, and gives the
    loss.
    """

    vector: Tensor
    theta: Tensor
    gradient: Tensor
    at: Callable[[Batch], Tensor]


@dataclass(frozen=True)
class GradientRule:
    """A gradient of one's own: of so many batches, each from a shuffle of its own.

    ``look(slope, batches)`` leaves the direction to descend in ``slope.gradient``, θ as it was,
    and gives the loss.
    """

    batches: int
    look: Callable[[StepContext, tuple[Batch, ...]], Tensor]


@dataclass(frozen=True)
class Objective:
    """What a client minimises: the mean loss of its training data, these penalties and terms."""

    penalties: tuple[Penalty, ...] = ()
    terms: tuple[Callable[[FlatModel], Term], ...] = ()
    gradient_rule: GradientRule | None = None

    def __add__(self, other: Objective) -> Objective:
        return Objective(
            self.penalties + other.penalties,
            self.terms + other.terms,
            self.gradient_rule or other.gradient_rule,
        )


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


def linear(slope: Weights) -> Objective:
    """A tilt, ⟨slope, θ⟩: its gradient is the same everywhere (control variates, duals)."""
    tilt = slope.parameters

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(tilt.to(gradient.device))

    return Objective((Penalty(lambda theta, _: theta @ tilt.to(theta.device), add_gradient),))


def contrastive(mu: float, temperature: float, towards: Weights, away: Weights) -> Objective:
    """Pull representations to those of one model and away from those of another (MOON).

    μ·−log[exp(cos(z, z₊)/T) / (exp(cos(z, z₊)/T) + exp(cos(z, z₋)/T))], mean over the batch. The
    two other models are run in evaluation mode on copies: buffers and dropout are left alone.
    With ``mu=0`` there is no term at all, so the bits are those of ``erm()``.
    """
    if mu == 0:
        return erm()

    def term(model: FlatModel) -> Term:
        good, bad = (model.twin(i, w) for i, w in enumerate((towards, away)))

        def value(x: Tensor, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                others = [twin.represent(x)[1] for twin in (good, bad)]
            near, far = (torch.cosine_similarity(hidden, z) / temperature for z in others)
            return mu * torch.nn.functional.softplus(far - near).mean()

        return value

    return Objective(terms=(term,))
