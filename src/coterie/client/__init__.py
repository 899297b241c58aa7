"""The client side: training, client state, scores, and what a task may use."""

from coterie.client.client import Client, Task
from coterie.client.fit import Fit, FlatModel
from coterie.client.objectives import (
    Batch,
    GradientRule,
    Objective,
    Penalty,
    StepContext,
    contrastive,
    erm,
    linear,
    proximal,
)
from coterie.core.schema import Schedule

__all__ = [
    "Batch",
    "Client",
    "Fit",
    "FlatModel",
    "GradientRule",
    "Objective",
    "Penalty",
    "Schedule",
    "StepContext",
    "Task",
    "contrastive",
    "erm",
    "linear",
    "proximal",
]
