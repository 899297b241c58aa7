"""Loss functions and their names in the configuration."""

from __future__ import annotations

import torch

from coterie.client.fit import Criterion


def mse(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return torch.nn.functional.mse_loss(out.reshape(y.shape), y)


def l1(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean absolute error."""
    return torch.nn.functional.l1_loss(out.reshape(y.shape), y)


def huber(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The Huber loss: squared for errors up to one, absolute beyond."""
    return torch.nn.functional.huber_loss(out.reshape(y.shape), y)


def hinge(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The squared hinge loss of an SVM, one class against the rest, summed over the classes.

    >>> float(hinge(torch.tensor([[2.0, 0.5, -1.0]]), torch.tensor([0])))  # only 0.5 is too high
    2.25
    """
    sign = torch.nn.functional.one_hot(y, out.shape[1]) * 2 - 1
    return torch.relu(1 - sign * out).square().sum(dim=1).mean()


LOSSES: dict[str, Criterion] = {
    "cross-entropy": torch.nn.functional.cross_entropy,
    "hinge": hinge,
    "mse": mse,
    "l1": l1,
    "huber": huber,
}
FOR_CLASSES = {"cross-entropy", "hinge"}  # the others are for regression
