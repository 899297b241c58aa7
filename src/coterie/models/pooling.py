"""2x2 max-pooling without branches.

PyTorch's kernel for this walks the windows with a comparison that a processor cannot foresee. On
one CPU thread, maxima of whole slices take a fifth of its time forward and half of it with the
backward pass; small maps are left to PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_SMALL = 20_000  # numbers in a map below which calling Python for the backward pass does not pay


class MaxPool2(nn.MaxPool2d):
    """The maximum of each 2x2 window: the values of ``nn.MaxPool2d(2)`` to the bit.

    So are its gradients, except where the two largest of a window are equal and lie on its
    diagonal from the upper right: then the lower left gets the gradient instead.

    >>> MaxPool2()(torch.tensor([[[[1.0, 2.0], [4.0, 3.0]]]]))
    tensor([[[[4.]]]])
    """

    def __init__(self, ceil_mode: bool = False) -> None:
        super().__init__(2, ceil_mode=ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Pool the last two dimensions."""
        if x.device.type != "cpu" or x.dim() != 4 or x.shape[-1] % 2 or x.shape[-2] % 2:
            return self._torch(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _across(_down(x))
        if x.numel() < _SMALL or not x.is_contiguous():
            return self._torch(x)
        return _Windows.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    def _torch(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(x, 2, ceil_mode=self.ceil_mode)


def _down(x: Tensor) -> Tensor:
    return torch.maximum(x[..., 0::2, :], x[..., 1::2, :])


def _across(x: Tensor) -> Tensor:
    return torch.maximum(x[..., 0::2], x[..., 1::2])


def _second_is_larger(first: Tensor, second: Tensor) -> Tensor:
    """1 where the second is larger, else 0: arithmetic, for masks of floats are faster than bools.

    The difference of two distinct floats is never zero, so this is exact.
    """
    return (second - first).sign_().clamp_(min=0)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        columns = _down(x)
        ctx.save_for_backward(x, columns)
        return _across(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, columns = ctx.saved_tensors
        of_columns = torch.empty_like(columns)
        left, right = of_columns[..., 0::2], of_columns[..., 1::2]
        torch.mul(gradient, _second_is_larger(columns[..., 0::2], columns[..., 1::2]), out=right)
        torch.sub(gradient, right, out=left)
        of_x = torch.empty_like(x)
        upper, lower = of_x[..., 0::2, :], of_x[..., 1::2, :]
        torch.mul(of_columns, _second_is_larger(x[..., 0::2, :], x[..., 1::2, :]), out=lower)
        torch.sub(of_columns, lower, out=upper)
        return of_x
