"""Our 2x2 max-pooling is PyTorch's."""

import pytest
import torch
from torch import nn

from coterie.models.pooling import MaxPool2, _Windows


def gradients(pool, x, weights):
    x = x.clone().requires_grad_()
    out = pool(x)
    (out * weights).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("shape", [(10, 6, 28, 28), (2, 3, 4, 6), (1, 1, 2, 2), (3, 2, 5, 7)])
@pytest.mark.parametrize("ceil", [False, True])
def test_values_and_gradients_are_those_of_torch(shape, ceil):
    torch.manual_seed(0)
    x = torch.randn(shape)
    theirs = nn.MaxPool2d(2, ceil_mode=ceil)
    ours = MaxPool2(ceil_mode=ceil)
    weights = torch.randn_like(theirs(x))
    for a, b in zip(gradients(ours, x, weights), gradients(theirs, x, weights), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


def test_the_fast_path_is_taken_and_equal_on_any_size():
    torch.manual_seed(1)
    x, weights = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 2, 3)
    for a, b in zip(
        gradients(_Windows.apply, x, weights), gradients(nn.MaxPool2d(2), x, weights), strict=True
    ):
        assert torch.equal(a, b)
    big = torch.randn(10, 6, 28, 28, requires_grad=True)
    assert "_Windows" in type(MaxPool2()(big).grad_fn).__name__


def test_ties_give_the_gradient_to_one_of_the_largest():
    torch.manual_seed(2)
    x, weights = torch.randn(4, 3, 8, 8).round(), torch.rand(4, 3, 4, 4) + 1
    out, gradient = gradients(_Windows.apply, x, weights)
    at_the_top = x == out.repeat_interleave(2, -1).repeat_interleave(2, -2)
    assert bool((at_the_top | (gradient == 0)).all())
    assert torch.equal(nn.functional.avg_pool2d(gradient, 2) * 4, weights)


def test_constant_windows_are_split_as_torch_does():
    x, weights = torch.zeros(1, 1, 4, 4), torch.rand(1, 1, 2, 2)
    for a, b in zip(
        gradients(_Windows.apply, x, weights), gradients(nn.MaxPool2d(2), x, weights), strict=True
    ):
        assert torch.equal(a, b)
