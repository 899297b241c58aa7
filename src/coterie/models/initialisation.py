"""The initial weights of a model: PyTorch's, or drawn by the rules of He or Glorot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from coterie.errors import ConfigError, unknown

Draw = Callable[[Tensor], Tensor]

he: Draw = partial(nn.init.kaiming_uniform_, nonlinearity="relu")
"""Uniform in ±√(6 / inputs), which preserves the variance of activations through ReLU layers."""

glorot: Draw = nn.init.xavier_uniform_
"""Uniform in ±√(6 / (inputs + outputs))."""


class Rule(NamedTuple):
    """The distributions of the weights of convolutions and dense layers; biases are zero."""

    convolution: Draw
    dense: Draw


INITIALISATIONS: dict[str, Rule | None] = {
    "torch": None,
    "he": Rule(he, he),
    "glorot": Rule(glorot, glorot),
    "authors": Rule(he, glorot),
}
"""The rules by name; "torch" keeps the initialisation of PyTorch, and "authors" is the rule of the
authors of User-Centric Federated Learning."""


def check_init(name: object) -> None:
    """Raise an error if an initialisation is unknown."""
    if not isinstance(name, str) or name not in INITIALISATIONS:
        raise ConfigError(unknown("choice of init", name, INITIALISATIONS))


def initialise(module: nn.Module, init: str) -> None:
    """Draw new weights for all convolutions and dense layers, in place, with torch's generator.

    Other parts, such as normalisations, embeddings and recurrent layers, are not changed; nor are
    frozen biases, and layers whose weights are frozen or computed from other parameters.

    >>> layer = nn.Linear(100, 50)
    >>> initialise(layer, "he")
    >>> bool(layer.weight.abs().max() <= 0.06**0.5), layer.bias.count_nonzero().item()
    (True, 0)
    """
    check_init(init)
    rule = INITIALISATIONS[init]
    if rule is None:
        return
    for part in module.modules():
        if not isinstance(part, nn.Linear | _ConvNd):
            continue
        trained = {k: p for k, p in part.named_parameters(recurse=False) if p.requires_grad}
        if "weight" not in trained:
            continue
        draw = rule.dense if isinstance(part, nn.Linear) else rule.convolution
        draw(trained["weight"])
        if "bias" in trained:
            nn.init.zeros_(trained["bias"])
