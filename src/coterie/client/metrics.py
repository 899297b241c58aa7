"""Scores of one model on one split."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.client.fit import Criterion


def scores(
    outputs: Tensor, y: Tensor, criterion: Criterion, classes: int | None
) -> dict[str, float]:
    """Loss and the usual scores: of a classifier, or of a regression when ``classes`` is None.

    >>> out = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> found = scores(out, torch.tensor([0, 1, 1]), torch.nn.functional.cross_entropy, 2)
    >>> round(found["accuracy"], 3), round(found["balanced_accuracy"], 3), round(found["f1"], 3)
    (0.667, 0.75, 0.667)
    """
    if not len(y):
        return {"count": 0.0}
    found = {"count": float(len(y)), "loss": float(criterion(outputs, y))}
    if classes is None:
        return found | _regression(outputs, y)
    return found | _classification(outputs.argmax(-1).numpy(), y.numpy())


def _classification(guess: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy; mean recall of the classes present; F1 averaged over classes present or guessed."""
    seen, guessed = np.bincount(y), np.bincount(guess)
    n = max(len(seen), len(guessed))
    seen, guessed = np.pad(seen, (0, n - len(seen))), np.pad(guessed, (0, n - len(guessed)))
    right = np.bincount(y[guess == y], minlength=n)
    present, either = seen > 0, (seen + guessed) > 0
    return {
        "accuracy": float(right.sum() / len(y)),
        "balanced_accuracy": float((right[present] / seen[present]).mean()),
        "f1": float((2 * right[either] / (seen + guessed)[either]).mean()),
    }


def _regression(outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Mean absolute error, root mean square error, and R² (0 where the targets are constant)."""
    error = (outputs.reshape(y.shape) - y).double()
    spread = float((y.double() - y.double().mean(0)).square().sum())
    r2 = 1 - float(error.square().sum()) / spread if spread > 0 else 0.0
    return {
        "mae": float(error.abs().mean()),
        "rmse": float(torch.sqrt(error.square().mean())),
        "r2": r2,
    }
