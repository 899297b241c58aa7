"""Coterie: federated learning among clients whose data differ.

>>> import coterie
>>> sorted(coterie.METHODS)[:2]
['fedavg', 'fedper']
"""

__version__ = "0.1.0"

from coterie.client import Client, Fit, Objective, Penalty, Schedule, erm, proximal
from coterie.data import ClientData, Population, Split
from coterie.errors import CoterieError
from coterie.federation import (
    Federation,
    Mean,
    Order,
    Reply,
    Upload,
    chosen,
)
from coterie.method import (
    Assign,
    Local,
    Method,
    Round,
    Setup,
    State,
    all_but_last,
    all_layers,
    alone,
    by_loss,
    everyone,
    grouped,
    method,
    minimise,
    no_layer,
    true_groups,
)
from coterie.methods import METHODS, fedavg, fedper, fedprox, ifca, local, oracle
from coterie.run.api import run, simulate
from coterie.run.result import Result
from coterie.seeds import seed_for
from coterie.weights import Layout, Weights

__all__ = [
    "METHODS",
    "Assign",
    "Client",
    "ClientData",
    "CoterieError",
    "Federation",
    "Fit",
    "Layout",
    "Local",
    "Mean",
    "Method",
    "Objective",
    "Order",
    "Penalty",
    "Population",
    "Reply",
    "Result",
    "Round",
    "Schedule",
    "Setup",
    "Split",
    "State",
    "Upload",
    "Weights",
    "all_but_last",
    "all_layers",
    "alone",
    "by_loss",
    "chosen",
    "erm",
    "everyone",
    "fedavg",
    "fedper",
    "fedprox",
    "grouped",
    "ifca",
    "local",
    "method",
    "minimise",
    "no_layer",
    "oracle",
    "proximal",
    "run",
    "seed_for",
    "simulate",
    "true_groups",
]
