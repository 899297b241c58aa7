"""Losses by name."""

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
    """Huber's loss: squared near zero, absolute beyond one."""
    return torch.nn.functional.huber_loss(out.reshape(y.shape), y)


def hinge(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An SVM's loss, smooth: squared hinges, each class against the rest, summed over classes.

    >>> float(hinge(torch.tensor([[2.0, 0.5, -1.0]]), torch.tensor([0])))  # only 0.5 is too high
    2.25
    """
    side = torch.nn.functional.one_hot(y, out.shape[1]) * 2 - 1
    return torch.relu(1 - side * out).square().sum(dim=1).mean()


LOSSES: dict[str, Criterion] = {
    "cross-entropy": torch.nn.functional.cross_entropy,
    "hinge": hinge,
    "mse": mse,
    "l1": l1,
    "huber": huber,
}
FOR_CLASSES = {"cross-entropy", "hinge"}  # the others are for numbers
