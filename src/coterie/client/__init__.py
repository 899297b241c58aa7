"""The client's half: training, state, tasks."""

from coterie.client.client import Client, Task
from coterie.client.fit import Fit, FlatModel
from coterie.client.objectives import (
    Batch,
    Descent,
    Objective,
    Penalty,
    Slope,
    contrastive,
    erm,
    linear,
    proximal,
)
from coterie.schema import Schedule

__all__ = [
    "Batch",
    "Client",
    "Descent",
    "Fit",
    "FlatModel",
    "Objective",
    "Penalty",
    "Schedule",
    "Slope",
    "Task",
    "contrastive",
    "erm",
    "linear",
    "proximal",
]
