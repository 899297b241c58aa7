"""Local objectives: the loss on the client's data, plus penalties and further terms.

A penalty depends on the parameters only; it works on one vector or on a matrix of rows, and adds
its gradient in place. A term depends on the inputs of a batch and their representations. A gradient
rule replaces the gradient of the loss by another direction.
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
# A function of a batch's inputs and their representations, the inputs of the model's last layer.
Term = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Penalty:
    """A penalty on the parameters θ, which may depend on those that training started from.

    ``strength`` is the factor by which its gradient grows with the distance from an anchor.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    add_gradient: Callable[[Tensor, Tensor, Tensor], None]
    strength: float = 0.0


@dataclass(frozen=True)
class StepContext:
    """What a gradient rule works on: the model's vector, its parameters θ, and the gradient.

    ``at(batch)`` replaces the gradient by that of the batch's loss at the current θ, and returns
    the loss.
    """

    vector: Tensor
    theta: Tensor
    gradient: Tensor
    at: Callable[[Batch], Tensor]


@dataclass(frozen=True)
class GradientRule:
    """A rule that replaces the gradient, using several independently shuffled batches each step.

    ``look(context, batches)`` writes the gradient to descend into ``context.gradient``, leaves θ
    unchanged, and returns the loss.
    """

    batches: int
    look: Callable[[StepContext, tuple[Batch, ...]], Tensor]


@dataclass(frozen=True)
class Objective:
    """What a client minimises: the mean loss on its training data, plus penalties and terms."""

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
    """The empirical risk: the mean loss on the data, with nothing added."""
    return Objective()


def proximal(mu: float, anchor: Weights | None = None) -> Objective:
    """Add μ/2·‖θ − anchor‖², which pulls the model towards an anchor, by default the one received.

    With ``mu=0`` nothing is added, so results are bitwise those of ``erm()``.
    """
    if mu == 0:
        return erm()

    def towards(start: Tensor) -> Tensor:
        return start if anchor is None else anchor.parameters.to(start.device)

    def value(theta: Tensor, start: Tensor) -> Tensor:
        return (theta - towards(start)).square().sum(-1) * (mu / 2)

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(theta - towards(start), alpha=mu)

    return Objective((Penalty(value, add_gradient, mu),))


def linear(slope: Weights) -> Objective:
    """Add ⟨slope, θ⟩, whose gradient is constant, as for control variates and dual variables."""
    constant = slope.parameters

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(constant.to(gradient.device))

    return Objective((Penalty(lambda theta, _: theta @ constant.to(theta.device), add_gradient),))


def contrastive(mu: float, temperature: float, towards: Weights, away: Weights) -> Objective:
    """Pull representations towards those of one model and away from those of another (MOON).

    Adds μ·−log[exp(cos(z, z₊)/T) / (exp(cos(z, z₊)/T) + exp(cos(z, z₋)/T))], averaged over the
    batch. The two other models run in evaluation mode on copies, so buffers and dropout of the
    trained model are not affected. With ``mu=0`` nothing is added, so results are bitwise those of
    ``erm()``.
    """
    if mu == 0:
        return erm()

    def term(model: FlatModel) -> Term:
        positive, negative = (model.twin(i, w) for i, w in enumerate((towards, away)))

        def value(x: Tensor, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                others = [twin.represent(x)[1] for twin in (positive, negative)]
            near, far = (torch.cosine_similarity(hidden, z) / temperature for z in others)
            return mu * torch.nn.functional.softplus(far - near).mean()

        return value

    return Objective(terms=(term,))
