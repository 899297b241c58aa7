"""Coterie: federated learning among clients whose data differ.

>>> import coterie
>>> sorted(coterie.METHODS)[:2]
['dc-pfl', 'fedavg']
"""

__version__ = "0.1.0"

from coterie.client import (
    Client,
    Descent,
    Fit,
    Objective,
    Penalty,
    Schedule,
    Slope,
    contrastive,
    erm,
    linear,
    proximal,
)
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
    keeping,
    minimise,
    no_layer,
    only_last,
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
    fedadam,
    fedavg,
    fedavgm,
    fedclust,
    fedper,
    fedprox,
    fedtsdp,
    fedyogi,
    ifca,
    krum,
    local,
    median,
    oracle,
    trimmed_mean,
    user_centric,
)
from coterie.run.api import run, simulate
from coterie.run.result import Result
from coterie.seeds import seed_for
from coterie.serverside import robust, stepping
from coterie.weights import Layout, Weights

__all__ = [
    "METHODS",
    "Assign",
    "Client",
    "ClientData",
    "CoterieError",
    "Descent",
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
    "Slope",
    "Split",
    "State",
    "Upload",
    "Weights",
    "all_but_last",
    "all_layers",
    "alone",
    "by_loss",
    "chosen",
    "contrastive",
    "dc_pfl",
    "erm",
    "everyone",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedclust",
    "fedper",
    "fedprox",
    "fedtsdp",
    "fedyogi",
    "grouped",
    "ifca",
    "keeping",
    "krum",
    "layer_wise",
    "linear",
    "local",
    "median",
    "method",
    "minimise",
    "no_layer",
    "only_last",
    "oracle",
    "proximal",
    "robust",
    "run",
    "seed_for",
    "simulate",
    "stepping",
    "trimmed_mean",
    "true_groups",
    "user_centric",
]
