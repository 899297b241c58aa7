"""The models that a run can train, by name; ``make_model`` makes one for the shape of the data.

Packages register factories of their own under the entry point ``coterie.models``.

In every model the last linear layer is called ``head``, and a norm is registered directly after
the convolution that it normalises. Weights start as torch starts them, so ``torch.manual_seed``
before ``make_model`` decides them; ``initialise`` draws them anew by another rule.
"""

from __future__ import annotations

from torch import nn

from coterie.models.initialisation import INITIALISATIONS, check_init, initialise
from coterie.models.parts import Shape, whole
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
    """The model called ``name`` for samples of ``shape``, with ``outputs`` numbers out.

    ``params`` are those of the factory's signature. A name, a parameter, a value or a shape that
    does not fit is a ConfigError that says what does.

    >>> make_model("mlp", (4,), 3, hidden=(8,)).head
    Linear(in_features=8, out_features=3, bias=True)
    """
    whole(name, "outputs", outputs)
    made: nn.Module = MODELS.make(name, params, shape=tuple(shape), outputs=outputs)
    return made
