"""Convolutional models with shortcuts: ResNet-9 and ResNet-18, in the forms used on CIFAR."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from coterie.models.parts import Shape, chain, image, norm_layer, whole_number
from coterie.models.pooling import MaxPool2
from coterie.registry import MODELS


def _conv(inputs: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that preserves the size; it has no bias because its norm has one."""
    return nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)


class PlainBlock(nn.Module):
    """The block of ResNet-9: the input plus two convolutions, each with norm and ReLU."""

    def __init__(self, channels: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels)
        self.norm1 = make_norm(channels)
        self.conv2 = _conv(channels, channels)
        self.norm2 = make_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the same shape as ``x``."""
        out = F.relu_(self.norm1(self.conv1(x)))
        return x + F.relu_(self.norm2(self.conv2(out)))


class BasicBlock(nn.Module):
    """The block of ResNet-18: two convolutions with norms, plus a shortcut before the last ReLU."""

    def __init__(
        self, inputs: int, channels: int, stride: int, make_norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, channels, stride)
        self.norm1 = make_norm(channels)
        self.conv2 = _conv(channels, channels)
        self.norm2 = make_norm(channels)
        self.shortcut: nn.Conv2d | None = None
        if inputs != channels:
            self.shortcut = nn.Conv2d(inputs, channels, 1, stride=stride, bias=False)
            self.shortcut_norm = make_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; height and width are divided by the stride."""
        out = F.relu_(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x if self.shortcut is None else self.shortcut_norm(self.shortcut(x))
        return F.relu_(out)


@MODELS.register("resnet9")
def resnet9(shape: Shape, outputs: int, width: int = 64, norm: str = "batch") -> nn.Module:
    """ResNet-9: ``conv1``, ``conv2``, ``block1``, ``conv3``, ``conv4``, ``block2``, ``head``.

    3x3 convolutions with ``width``, 2, 4 and 8 times ``width`` channels, each followed by its norm
    (``"batch"`` or ``"group"``); ``conv2`` to ``conv4`` halve the image, but never below 2x2;
    ``block1`` and ``block2`` have two convolutions each; then the maximum over the remaining
    pixels. 6,573,130 parameters on (3, 32, 32) with 10 outputs. References: He et al., "Deep
    residual learning for image recognition", 2016; Page, "How to train your ResNet", 2018.

    >>> sum(p.numel() for p in resnet9((3, 32, 32), 10).parameters())
    6573130
    """
    channels, height, side = image("resnet9", shape)
    make_norm = norm_layer(norm)
    whole_number("resnet9", "width", width)
    side = min(height, side)
    layers: dict[str, nn.Module] = {}
    for i, multiple in enumerate((1, 2, 4, 8), start=1):
        layers[f"conv{i}"] = _conv(channels, multiple * width)
        channels = multiple * width
        layers[f"norm{i}"] = make_norm(channels)
        # Batch norm needs two pixels to train on a batch of one. Pooling commutes with ReLU.
        if i > 1 and side > 2:
            layers[f"pool{i}"] = MaxPool2(ceil_mode=True)
            side = (side + 1) // 2
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        if i in (2, 4):
            layers[f"block{i // 2}"] = PlainBlock(channels, make_norm)
    layers["maximum"] = nn.AdaptiveMaxPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels, outputs)
    return chain(layers)


@MODELS.register("resnet18")
def resnet18(shape: Shape, outputs: int, width: int = 64, norm: str = "batch") -> nn.Module:
    """ResNet-18 as used on CIFAR: ``conv1``, ``block1`` to ``block8``, ``head``.

    The first convolution is 3x3 with stride 1, without max-pooling. Eight blocks of two 3x3
    convolutions, each followed by its norm (``"batch"`` or ``"group"``), with ``width`` to 8 times
    ``width`` channels; ``block3``, ``block5`` and ``block7`` halve the image, but never below 2x2,
    and have a 1x1 convolution on the shortcut; then the mean over the remaining pixels. 11,173,962
    parameters on (3, 32, 32) with 10 outputs. Reference: He et al., "Deep residual learning for
    image recognition", 2016.

    >>> model = resnet18((1, 8, 8), 10, width=4)
    >>> [name for name, _ in model.block3.named_children()]
    ['conv1', 'norm1', 'conv2', 'norm2', 'shortcut', 'shortcut_norm']
    """
    inputs, height, side = image("resnet18", shape)
    make_norm = norm_layer(norm)
    channels = whole_number("resnet18", "width", width)
    side = min(height, side)
    layers: dict[str, nn.Module] = {
        "conv1": _conv(inputs, channels),
        "norm1": make_norm(channels),
        "relu1": nn.ReLU(inplace=True),
    }
    for i in range(1, 9):
        inputs, stride = channels, 1
        if i in (3, 5, 7):
            channels *= 2
            # Batch norm needs two pixels to train on a batch of one.
            stride = 2 if side > 2 else 1
            side = (side + stride - 1) // stride
        layers[f"block{i}"] = BasicBlock(inputs, channels, stride, make_norm)
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels, outputs)
    return chain(layers)
