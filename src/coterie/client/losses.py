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


LOSSES: dict[str, Criterion] = {
    "cross-entropy": torch.nn.functional.cross_entropy,
    "mse": mse,
    "l1": l1,
    "huber": huber,
}
