"""Coterie: federated learning among clients whose data differ.

>>> import coterie
>>> sorted(coterie.METHODS)[:2]
['fedavg', 'fedper']
"""

__version__ = "0.1.0"

from coterie.client import Client, Fit, Objective, Schedule, erm, proximal
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
from coterie.method import Method, Round, Setup, State, grouped, method
from coterie.methods import METHODS, fedavg, fedper, fedprox, ifca, local, oracle
from coterie.run.api import run, simulate
from coterie.run.result import Result
from coterie.weights import Layout, Weights

__all__ = [
    "METHODS",
    "Client",
    "ClientData",
    "CoterieError",
    "Federation",
    "Fit",
    "Layout",
    "Mean",
    "Method",
    "Objective",
    "Order",
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
    "chosen",
    "erm",
    "fedavg",
    "fedper",
    "fedprox",
    "grouped",
    "ifca",
    "local",
    "method",
    "oracle",
    "proximal",
    "run",
    "simulate",
]
