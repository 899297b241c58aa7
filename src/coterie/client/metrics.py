"""The scores of models on one split of their clients' data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.fit import Criterion


def scores(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], criterion: Criterion, classes: int | None
) -> list[dict[str, float]]:
    """Each client's loss and usual scores: a classifier's, or a regression's without ``classes``.

    >>> out = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> labels = torch.tensor([0, 1, 1])
    >>> (values,) = scores([out], [labels], torch.nn.functional.cross_entropy, 2)
    >>> round(values["accuracy"], 3), round(values["balanced_accuracy"], 3), round(values["f1"], 3)
    (0.667, 0.75, 0.667)
    """
    found: list[dict[str, float]] = [{"count": float(len(y))} for y in targets]
    some = [i for i, y in enumerate(targets) if len(y)]
    if not some:
        return found
    pairs = [(outputs[i], targets[i]) for i in some]
    if classes is None:
        more = [_regression(out, y) for out, y in pairs]
    else:
        more = _classification(pairs)
    for i, (out, y), values in zip(some, pairs, more, strict=True):
        found[i] |= {"loss": float(criterion(out, y)), **values}
    return found


def _classification(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, float]]:
    """Accuracy, mean recall of the classes in ``y``, mean F1 of those in ``y`` or predicted."""
    predictions = torch.cat([out for out, _ in pairs]).argmax(-1).numpy()
    y = torch.cat([y for _, y in pairs]).numpy()
    sizes = np.array([len(y) for _, y in pairs])
    width = int(max(y.max(), predictions.max())) + 1
    first = np.repeat(np.arange(len(pairs)) * width, sizes)  # of each sample's client
    cells = len(pairs) * width
    actual, predicted, correct = (
        np.bincount(places, minlength=cells).reshape(len(pairs), width)
        for places in (first + y, first + predictions, (first + y)[predictions == y])
    )
    present, either = actual > 0, (actual + predicted) > 0
    accuracy = correct.sum(1) / sizes
    recall = _means(correct[present] / actual[present], present)
    f1 = _means(2 * correct[either] / (actual + predicted)[either], either)
    columns = {"accuracy": accuracy, "balanced_accuracy": recall, "f1": f1}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _means(values: NDArray[np.float64], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean of each row's values, which are those of the chosen places, one after another."""
    counts = chosen.sum(1)
    ends = np.cumsum(counts)
    # Not reduceat, which adds in another order than the mean of a row alone.
    rows = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    sums: NDArray[np.float64] = np.array([np.add.reduce(values[a:b]) for a, b in rows])
    means: NDArray[np.float64] = sums / counts
    return means


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
