"""Helpers of the model factories: checks of their arguments, and norm and dropout layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from coterie.errors import ConfigError, unknown

Shape: TypeAlias = tuple[int, ...]
"""The shape of one sample: (C, H, W) an image, (F,) a row of a table, (L,) token ids."""

SMALL = 28
"""Images with a side below this are padded, so that convolutions do not shrink them."""

LEAST = 4
"""The smallest side of an image that the image models accept: two poolings leave one pixel."""


def whole_number(model: str, key: str, value: object, least: int = 1) -> int:
    """Check that ``value`` is a whole number of at least ``least``, and return it.

    >>> whole_number("mlp", "outputs", 10)
    10
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{model}: {key} must be a whole number of {least} or more, not {value!r}"
        )
    return value


def widths(model: str, key: str, value: object, count: int | None = None) -> list[int]:
    """Check that ``value`` is a list of layer widths, ``count`` of them if given, and return it.

    >>> widths("mlp", "hidden", (64, 32))
    [64, 32]
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{model}: {key} must be a list of whole numbers, not {value!r}")
    if count is not None and len(value) != count:
        raise ConfigError(f"{model}: {key} must have {count} numbers, not {len(value)}: {value!r}")
    return [whole_number(model, f"each of {key}", width) for width in value]


def image(model: str, shape: Shape) -> tuple[int, int, int]:
    """The channels, height and width of ``shape``; a ConfigError if ``model`` does not accept it.

    >>> image("lenet5", (1, 28, 28))
    (1, 28, 28)
    """
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < LEAST:
        raise ConfigError(
            f"{model} takes images (channels, height, width) of at least {LEAST}x{LEAST} pixels, "
            f"not samples of shape {tuple(shape)}"
        )
    channels, height, width = shape
    return channels, height, width


def add_dropout(layers: dict[str, nn.Module], name: str, model: str, p: object) -> None:
    """Add an ``nn.Dropout`` called ``name`` to ``layers``, unless ``p`` is 0.

    Thus a model without dropout has no such module, which code can check.

    >>> layers: dict[str, nn.Module] = {}
    >>> add_dropout(layers, "dropout1", "mlp", 0.0), add_dropout(layers, "dropout2", "mlp", 0.5)
    (None, None)
    >>> layers
    {'dropout2': Dropout(p=0.5, inplace=False)}
    """
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        raise ConfigError(f"{model}: dropout must be at least 0 and less than 1, not {p!r}")
    if p:
        layers[name] = nn.Dropout(p)


def chain(layers: dict[str, nn.Module]) -> nn.Sequential:
    """Combine layers, in order, into a module with an attribute for each layer.

    >>> chain({"head": nn.Linear(4, 2)}).head
    Linear(in_features=4, out_features=2, bias=True)
    """
    return nn.Sequential(OrderedDict(layers))


def _group_norm(channels: int) -> nn.Module:
    """GroupNorm with about 16 channels per group, which worked well for Wu and He (2018)."""
    return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)


NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": _group_norm}
"""The norms of a convolution's output. ``group`` has no running statistics, so that there are
no buffers to average, and clients whose data differ do not disturb each other."""


def norm_layer(name: str) -> Callable[[int], nn.Module]:
    """The factory of the named norm for a number of channels.

    >>> norm_layer("group")(64).num_groups
    4
    """
    if name not in NORMS:
        raise ConfigError(unknown("norm", name, NORMS))
    return NORMS[name]
