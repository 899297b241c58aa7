"""The scores of a model on one split of a client's data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.client.fit import Criterion


def scores(
    outputs: Tensor, y: Tensor, criterion: Criterion, classes: int | None
) -> dict[str, float]:
    """The loss and the usual scores of a classifier, or of a regression if ``classes`` is None.

    >>> out = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> values = scores(out, torch.tensor([0, 1, 1]), torch.nn.functional.cross_entropy, 2)
    >>> round(values["accuracy"], 3), round(values["balanced_accuracy"], 3), round(values["f1"], 3)
    (0.667, 0.75, 0.667)
    """
    if not len(y):
        return {"count": 0.0}
    values = {"count": float(len(y)), "loss": float(criterion(outputs, y))}
    if classes is None:
        return values | _regression(outputs, y)
    return values | _classification(outputs.argmax(-1).numpy(), y.numpy())


def _classification(predictions: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy, mean recall of the classes in ``y``, mean F1 of those in ``y`` or predicted."""
    actual, predicted = np.bincount(y), np.bincount(predictions)
    n = max(len(actual), len(predicted))
    actual = np.pad(actual, (0, n - len(actual)))
    predicted = np.pad(predicted, (0, n - len(predicted)))
    correct = np.bincount(y[predictions == y], minlength=n)
    present, either = actual > 0, (actual + predicted) > 0
    return {
        "accuracy": float(correct.sum() / len(y)),
        "balanced_accuracy": float((correct[present] / actual[present]).mean()),
        "f1": float((2 * correct[either] / (actual + predicted)[either]).mean()),
    }


def _regression(outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Mean absolute error, root mean squared error, and R² (0 if the targets are constant)."""
    error = (outputs.reshape(y.shape) - y).double()
    spread = float((y.double() - y.double().mean(0)).square().sum())
    r2 = 1 - float(error.square().sum()) / spread if spread > 0 else 0.0
    return {
        "mae": float(error.abs().mean()),
        "rmse": float(torch.sqrt(error.square().mean())),
        "r2": r2,
    }
