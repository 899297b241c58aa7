"""The client's half: training, state, tasks."""

from coterie.client.client import Client, Task
from coterie.client.fit import Fit, FlatModel, Schedule
from coterie.client.objectives import Objective, Penalty, erm, proximal

__all__ = [
    "Client",
    "Fit",
    "FlatModel",
    "Objective",
    "Penalty",
    "Schedule",
    "Task",
    "erm",
    "proximal",
]
