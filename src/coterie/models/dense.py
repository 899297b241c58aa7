"""Models without convolutions: logistic regression, a perceptron, and a model for text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.errors import ConfigError
from coterie.models.parts import Shape, add_dropout, chain, whole_number, widths
from coterie.registry import MODELS


def _features(model: str, shape: Shape) -> int:
    """The number of features of a sample of ``shape``."""
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"{model} takes tables (features,) and images (channels, height, width), "
            f"not samples of shape {tuple(shape)}"
        )
    return math.prod(shape)


@MODELS.register("logistic")
def logistic(shape: Shape, outputs: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer, ``head``, on the flattened sample.

    7,850 parameters on (1, 28, 28) with 10 outputs. It is convex with cross-entropy, so there is a
    unique optimum. Reference: Cox, "The regression analysis of binary sequences", 1958.

    >>> sum(p.numel() for p in logistic((1, 28, 28), 10).parameters())
    7850
    """
    return chain(
        {"flatten": nn.Flatten(), "head": nn.Linear(_features("logistic", shape), outputs)}
    )


@MODELS.register("mlp")
def mlp(
    shape: Shape, outputs: int, hidden: Sequence[int] = (64,), dropout: float = 0.0
) -> nn.Module:
    """A multilayer perceptron: ``hidden1``, ``hidden2``, ... each with ReLU, then ``head``.

    ``hidden`` has the width of each hidden layer (it may be empty); each is followed by
    ``dropout``. 50,890 parameters on (1, 28, 28) with 10 outputs; ``hidden=(200, 200)`` is the
    "2NN" of the paper on federated averaging, with 199,210. Reference: McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data", 2017.

    >>> sum(p.numel() for p in mlp((1, 28, 28), 10, hidden=(200, 200)).parameters())
    199210
    """
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    features = _features("mlp", shape)
    for i, width in enumerate(widths("mlp", "hidden", hidden), start=1):
        layers[f"hidden{i}"] = nn.Linear(features, width)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        add_dropout(layers, f"dropout{i}", "mlp", dropout)
        features = width
    layers["head"] = nn.Linear(features, outputs)
    return chain(layers)


class MeanOfTokens(nn.Module):
    """Embed token ids, average over those that are not padding (id 0), and classify."""

    def __init__(self, vocabulary: int, dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.hidden = nn.Linear(dim, hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """The outputs for a batch of token ids, (batch, L); the mean of only padding is 0."""
        # The mask excludes padding even if noise or averaging has moved its embedding from 0.
        mask = (ids != 0).to(self.embedding.weight.dtype)
        share = mask / mask.sum(1, keepdim=True).clamp(min=1)
        mean = torch.bmm(share.unsqueeze(1), self.embedding(ids)).squeeze(1)
        out: Tensor = self.head(F.relu_(self.hidden(mean)))
        return out


@MODELS.register("text")
def text(shape: Shape, outputs: int, vocabulary: int, dim: int = 64, hidden: int = 64) -> nn.Module:
    """A deep averaging network: ``embedding``, mean over tokens, ``hidden`` with ReLU, ``head``.

    A sample has (L,) token ids below ``vocabulary``; id 0 is padding and ignored. ``dim`` is
    the length of a token's vector. 644,290 parameters with a vocabulary of 10,000 and 2 outputs.
    Reference: Iyyer et al., "Deep unordered composition rivals syntactic methods", 2015.

    >>> model = text((5,), 2, vocabulary=10)
    >>> model(torch.tensor([[4, 9, 1, 0, 0]])).shape
    torch.Size([1, 2])
    """
    if len(shape) != 1 or shape[0] < 1:
        raise ConfigError(f"text takes token ids (length,), not samples of shape {tuple(shape)}")
    return MeanOfTokens(
        whole_number("text", "vocabulary", vocabulary, least=2),
        whole_number("text", "dim", dim),
        whole_number("text", "hidden", hidden),
        outputs,
    )
