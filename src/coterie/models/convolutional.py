"""Convolutional models without shortcuts: LeNet-5, two small networks of papers, and VGG-16.

Max-pooling comes before ReLU: the two commute, and ReLU then processes a quarter of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.models.parts import (
    SMALL,
    Shape,
    add_dropout,
    chain,
    image,
    norm_layer,
    whole_number,
    widths,
)
from coterie.models.pooling import MaxPool2, max_pool
from coterie.registry import MODELS


def _two_convs(
    shape: tuple[int, int, int], channels: Sequence[int], kernel: int, pad: tuple[bool, bool]
) -> tuple[dict[str, nn.Module], int]:
    """Two blocks of convolution, 2x2 max-pooling and ReLU, flattened; and the number of features.

    ``pad`` says which of the two convolutions pads the image such that it keeps its size.
    """
    inputs, height, width = shape
    layers: dict[str, nn.Module] = {}
    for i, (outputs, padded) in enumerate(zip(channels, pad, strict=True), start=1):
        padding = kernel // 2 if padded else 0
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel, padding=padding)
        layers[f"pool{i}"] = MaxPool2()
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        inputs = outputs
    layers["flatten"] = nn.Flatten()
    return layers, inputs * height * width


class _PlainNet(nn.Module):
    """Two convolutions and three dense layers, with pooling and ReLU called as functions.

    Batches are often so small that a module for each of them would take 2 % of a training step.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        channels: Sequence[int],
        pad: tuple[bool, bool],
        hidden: Sequence[int],
        outputs: int,
    ) -> None:
        super().__init__()
        layers, features = _two_convs(shape, channels, 5, pad)
        self.conv1, self.conv2 = layers["conv1"], layers["conv2"]
        self.fc1 = nn.Linear(features, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.head = nn.Linear(hidden[1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for a batch of images."""
        x = torch.relu_(max_pool(self.conv1(x)))
        x = torch.relu_(max_pool(self.conv2(x)))
        x = torch.relu_(self.fc1(x.flatten(1)))
        outputs: Tensor = self.head(torch.relu_(self.fc2(x)))
        return outputs


@MODELS.register("lenet5")
def lenet5(shape: Shape, outputs: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: ``conv1``, ``conv2``, ``fc1``, ``fc2``, ``head``.

    Convolutions of 5x5 with 6 and 16 channels, each with 2x2 pooling, then 120 and 84 units. 62,006
    parameters on (3, 32, 32) with 10 outputs. On 28x28 ``conv1`` pads to the 32x32 of the original:
    61,706 on (1, 28, 28). Smaller images are padded in both. Reference: LeCun et al.,
    "Gradient-based learning applied to document recognition", 1998.

    >>> sum(p.numel() for p in lenet5((3, 32, 32), 10).parameters())
    62006
    """
    sample = image("lenet5", shape)
    side = min(sample[1:])
    return _PlainNet(sample, (6, 16), (side <= SMALL, side < SMALL), (120, 84), outputs)


@MODELS.register("cnn5")
def cnn5(
    shape: Shape,
    outputs: int,
    channels: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
) -> nn.Module:
    """Five layers, two of them convolutions: ``conv1``, ``conv2``, ``fc1``, ``fc2``, ``head``.

    5x5 kernels, each with 2x2 max-pooling; ``channels`` and ``hidden`` are the widths. The paper on
    DC-PFL uses the network of Wang et al., which has the widths of LeNet-5 for CIFAR-10: 62,006
    parameters on (3, 32, 32) with 10 outputs. Unlike ``lenet5``, it does not pad 28x28 images
    (44,426 parameters on (1, 28, 28)), only smaller ones. Reference: Wang et al., "Optimizing
    federated learning on non-IID data with reinforcement learning", 2020.

    >>> sum(p.numel() for p in cnn5((1, 28, 28), 10).parameters())
    44426
    """
    sample = image("cnn5", shape)
    pad = min(sample[1:]) < SMALL
    conv_widths, dense_widths = (
        widths("cnn5", name, value, 2)
        for name, value in (("channels", channels), ("hidden", hidden))
    )
    return _PlainNet(sample, conv_widths, (pad, pad), dense_widths, outputs)


@MODELS.register("cnn")
def cnn(shape: Shape, outputs: int, dropout: float | Sequence[float] = (0.25, 0.5)) -> nn.Module:
    """Two convolutions and two dense layers, with dropout: ``conv1``, ``conv2``, ``fc1``, ``head``.

    Convolutions of 3x3 with 32 and 64 channels, then 512 units. ``dropout`` is applied before and
    after ``fc1``: two rates, or one for both. 1,204,682 parameters on (3, 32, 32) with 10 outputs.
    Images smaller than 28x28 are padded. The paper does not mention pooling; here, 2x2 max-pooling
    follows each convolution. Reference: Zhu et al., "Federated two stage decoupling with adaptive
    personalization layers" (FedTSDP), 2023.

    >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
    1204682
    """
    sample = image("cnn", shape)
    rates = tuple(dropout) if isinstance(dropout, Sequence) else (dropout, dropout)
    if len(rates) != 2:
        raise ConfigError(f"cnn: dropout must be one rate or two, not {dropout!r}")
    pad = min(sample[1:]) < SMALL
    layers, features = _two_convs(sample, (32, 64), 3, (pad, pad))
    add_dropout(layers, "dropout1", "cnn", rates[0])
    layers["fc1"] = nn.Linear(features, 512)
    layers["relu_fc1"] = nn.ReLU(inplace=True)
    add_dropout(layers, "dropout2", "cnn", rates[1])
    layers["head"] = nn.Linear(512, outputs)
    return chain(layers)


VGG16 = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""The channels (in multiples of the width) and convolutions of the five stages of VGG-16."""


@MODELS.register("vgg16")
def vgg16(
    shape: Shape, outputs: int, width: int = 64, norm: str = "batch", dropout: float = 0.5
) -> nn.Module:
    """VGG-16 as used on CIFAR: ``conv1`` to ``conv13`` with norms, ``fc1``, ``fc2``, ``head``.

    Sixteen layers with weights: 13 convolutions of 3x3 (without bias, which the norm has) with
    ``width`` to 8 times ``width`` channels in five stages, each ending with 2x2 max-pooling; a mean
    over the remaining pixels; two dense layers of 8 times ``width`` units (instead of 4096 in the
    original), each after ``dropout``; and the head. 15,249,354 parameters on (3, 32, 32) with 10
    outputs. Small images are pooled less often, and never below 2x2 before the end of the last
    stage. Reference: Simonyan and Zisserman, "Very deep convolutional networks for large-scale
    image recognition", 2015.

    >>> model = vgg16((3, 32, 32), 10, width=8, norm="group")
    >>> sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())
    16
    """
    inputs, height, side = image("vgg16", shape)
    make_norm = norm_layer(norm)
    whole_number("vgg16", "width", width)
    side = min(height, side)
    layers: dict[str, nn.Module] = {}
    i = 0
    for stage, (multiple, convs) in enumerate(VGG16, start=1):
        channels = multiple * width
        for last in [False] * (convs - 1) + [True]:
            i += 1
            layers[f"conv{i}"] = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
            layers[f"norm{i}"] = make_norm(channels)
            # Batch norm needs two pixels to train on a batch of one, so keep 2x2 until the end.
            if last and (side > 2 or stage == len(VGG16)):
                layers[f"pool{stage}"] = MaxPool2(ceil_mode=True)
                side = (side + 1) // 2
            layers[f"relu{i}"] = nn.ReLU(inplace=True)
            inputs = channels
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    for i in (1, 2):
        add_dropout(layers, f"dropout{i}", "vgg16", dropout)
        layers[f"fc{i}"] = nn.Linear(inputs, inputs)
        layers[f"relu_fc{i}"] = nn.ReLU(inplace=True)
    layers["head"] = nn.Linear(inputs, outputs)
    return chain(layers)
