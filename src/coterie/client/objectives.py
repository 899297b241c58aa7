"""Local objectives: the loss on the client's data, plus penalties and further terms.

A penalty depends on the parameters only; it works on one vector or on a matrix of rows, and adds
its gradient in place. A term depends on the representations of a batch. A gradient rule replaces
the gradient of the loss by another direction. What is a client's own, such as an anchor, is kept as
data, so that the objectives of several clients can be stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coterie.core.weights import Weights

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Penalty:
    """A penalty on the parameters θ, which may depend on those that training started from.

    ``strength`` is the factor by which its gradient grows with the distance from an anchor. If it
    has a vector that belongs to the client, that is ``anchor``, and ``remake(anchor)`` makes the
    penalty from it or from a matrix with a row for each client.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    add_gradient: Callable[[Tensor, Tensor, Tensor], None]
    strength: float = 0.0
    anchor: Tensor | None = None
    remake: partial[Penalty] | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What penalties have in common that differ in their anchors alone."""
        made_by = self.remake and (self.remake.func, self.remake.args)
        return made_by or (self.value, self.add_gradient), self.strength, self.anchor is None


def stack_penalties(penalties: Sequence[Penalty], device: torch.device) -> Penalty | None:
    """The penalties of several clients as one for a matrix of rows; None if they differ in kind."""
    first = penalties[0]
    if any(p.kind != first.kind for p in penalties):
        return None
    anchors = [p.anchor for p in penalties if p.anchor is not None]
    if first.remake is None or not anchors:
        return first
    return first.remake(torch.stack(anchors).to(device))


@dataclass(frozen=True)
class Term:
    """A term that depends on representations: the inputs of the model's last layer.

    ``values(hidden, others)`` gives a number for each sample, from the representations by the
    trained model and by the other ``models``, which run in evaluation mode; ``strength`` times
    their mean over the batch is added to the loss. Terms of one ``kind`` differ in ``models`` only.
    """

    values: Callable[[Tensor, Sequence[Tensor]], Tensor]
    models: tuple[Weights, ...]
    strength: float
    kind: tuple[object, ...]


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
    terms: tuple[Term, ...] = ()
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
    return Objective((_pull(mu, None if anchor is None else anchor.parameters),))


def _pull(mu: float, anchor: Tensor | None) -> Penalty:
    """The penalty of ``proximal``, for one client or, with a matrix of anchors, for several."""

    def towards(start: Tensor) -> Tensor:
        return start if anchor is None else anchor.to(start.device)

    def value(theta: Tensor, start: Tensor) -> Tensor:
        return (theta - towards(start)).square().sum(-1) * (mu / 2)

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(theta - towards(start), alpha=mu)

    return Penalty(value, add_gradient, mu, anchor, partial(_pull, mu))


def linear(slope: Weights) -> Objective:
    """Add ⟨slope, θ⟩, whose gradient is constant, as for control variates and dual variables."""
    return Objective((_tilt(slope.parameters),))


def _tilt(slope: Tensor) -> Penalty:
    """The penalty of ``linear``, for one client or, with a matrix of slopes, for several."""

    def value(theta: Tensor, start: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vecdot(theta, slope.to(theta.device))
        return found

    def add_gradient(gradient: Tensor, theta: Tensor, start: Tensor) -> None:
        gradient.add_(slope.to(gradient.device))

    return Penalty(value, add_gradient, anchor=slope, remake=partial(_tilt))


def contrastive(mu: float, temperature: float, towards: Weights, away: Weights) -> Objective:
    """Pull representations towards those of one model and away from those of another (MOON).

    Adds μ·−log[exp(cos(z, z₊)/T) / (exp(cos(z, z₊)/T) + exp(cos(z, z₋)/T))], averaged over the
    batch. The two other models run in evaluation mode on copies, so buffers and dropout of the
    trained model are not affected. With ``mu=0`` nothing is added, so results are bitwise those of
    ``erm()``.
    """
    if mu == 0:
        return erm()

    def values(hidden: Tensor, others: Sequence[Tensor]) -> Tensor:
        near, far = (torch.cosine_similarity(hidden, z, dim=-1) / temperature for z in others)
        return torch.nn.functional.softplus(far - near)

    term = Term(values, (towards, away), mu, ("contrastive", mu, temperature))
    return Objective(terms=(term,))
