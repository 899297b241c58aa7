"""Coterie: federated learning among clients whose data differ.

>>> import coterie
>>> sorted(coterie.METHODS)[:2]
['dc-pfl', 'fedavg']
"""

__version__ = "0.1.0"

from coterie.client import Client, Fit, Objective, Penalty, Schedule, erm, proximal
from coterie.compose import (
    Assign,
    Local,
    Sharing,
    all_but_last,
    all_layers,
    alone,
    by_loss,
    everyone,
    grouped,
    minimise,
    no_layer,
    true_groups,
)
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
from coterie.layerwise import layer_wise
from coterie.method import Method, Public, Round, Setup, State, method
from coterie.methods import (
    METHODS,
    dc_pfl,
    fedavg,
    fedclust,
    fedper,
    fedprox,
    fedtsdp,
    ifca,
    local,
    oracle,
    user_centric,
)
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
    "Public",
    "Reply",
    "Result",
    "Round",
    "Schedule",
    "Setup",
    "Sharing",
    "Split",
    "State",
    "Upload",
    "Weights",
    "all_but_last",
    "all_layers",
    "alone",
    "by_loss",
    "chosen",
    "dc_pfl",
    "erm",
    "everyone",
    "fedavg",
    "fedclust",
    "fedper",
    "fedprox",
    "fedtsdp",
    "grouped",
    "ifca",
    "layer_wise",
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
    "user_centric",
]
