"""The models by name; ``make_model`` creates one for the shape of the data.

Other packages can register model factories under the entry point ``coterie.models``.

In every model, the last linear layer is called ``head``, and a norm is registered directly after
the convolution that it normalises. Weights are initialised by PyTorch, with the seed set by
``torch.manual_seed`` before ``make_model``; ``initialise`` draws them by another rule.
"""

from __future__ import annotations

from torch import nn

from coterie.models.initialisation import INITIALISATIONS, check_init, initialise
from coterie.models.parts import Shape, whole_number
from coterie.registry import MODELS

__all__ = [
    "INITIALISATIONS",
    "MODELS",
    "Shape",
    "check_init",
    "initialise",
    "make_model",
]


def make_model(name: str, shape: Shape, outputs: int, **params: object) -> nn.Module:
    """Create the named model for samples of ``shape``, with the given number of outputs.

    ``params`` are the other parameters of the factory. An unknown name or parameter, or a value or
    shape that does not fit, is a ConfigError.

    >>> make_model("mlp", (4,), 3, hidden=(8,)).head
    Linear(in_features=8, out_features=3, bias=True)
    """
    whole_number(name, "outputs", outputs)
    model: nn.Module = MODELS.make(name, params, shape=tuple(shape), outputs=outputs)
    return model
