"""The models that a run can train, by name; ``make_model`` makes one for the shape of the data.

Packages register factories of their own under the entry point ``coterie.models``.

In every model the last linear layer is called ``head``, and a norm is registered directly after
the convolution that it normalises. Weights start as torch starts them, so ``torch.manual_seed``
before ``make_model`` decides them; ``initialise`` draws them anew by another rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from torch import nn

from coterie.errors import ConfigError, unknown
from coterie.models.convolutional import cnn, cnn5, lenet5, vgg16
from coterie.models.dense import logistic, mlp, text
from coterie.models.initialisation import INITIALISATIONS, check_init, initialise
from coterie.models.parts import Shape, whole
from coterie.models.residual import resnet9, resnet18

__all__ = [
    "INITIALISATIONS",
    "MODELS",
    "OWN",
    "Shape",
    "check_init",
    "find",
    "initialise",
    "is_known",
    "make_model",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "lenet5": lenet5,
    "cnn": cnn,
    "cnn5": cnn5,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "vgg16": vgg16,
    "text": text,
}
"""Factories by name: each takes the shape of one sample, the number of outputs, and parameters."""

OWN: dict[str, Callable[..., nn.Module]] = {}
"""The same, as the command line of this process maps names to functions."""


def is_known(name: str) -> bool:
    """Whether there is a model of that name; no code is imported to find out."""
    return name in MODELS or name in OWN or name in entry_points(group="coterie.models").names


def find(name: str) -> Callable[..., nn.Module]:
    """The factory of a model: ours, this process's own, or an installed package's."""
    if name in MODELS or name in OWN:
        return MODELS.get(name) or OWN[name]
    installed = {e.name: e for e in entry_points(group="coterie.models")}
    if name not in installed:
        raise ConfigError(unknown("model", name, [*MODELS, *OWN, *installed]))
    factory: Callable[..., nn.Module] = installed[name].load()
    return factory


def make_model(name: str, shape: Shape, outputs: int, **params: object) -> nn.Module:
    """The model called ``name`` for samples of ``shape``, with ``outputs`` numbers out.

    ``params`` are those of the factory's signature. A name, a parameter, a value or a shape that
    does not fit is a ConfigError that says what does.

    >>> make_model("mlp", (4,), 3, hidden=(8,)).head
    Linear(in_features=8, out_features=3, bias=True)
    """
    factory = find(name)
    known = {
        key: parameter
        for key, parameter in inspect.signature(factory).parameters.items()
        if key not in ("shape", "outputs")
    }
    for key in params:
        if not known:
            raise ConfigError(f"model '{name}' takes no parameters, but was given '{key}'")
        if key not in known:
            raise ConfigError(unknown(f"parameter of model '{name}':", key, known))
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in params:
            raise ConfigError(f"model '{name}' needs the parameter '{key}'")
    whole(name, "outputs", outputs)
    return factory(tuple(shape), outputs, **params)
