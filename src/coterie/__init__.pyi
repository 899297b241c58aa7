"""The public names of Coterie, for editors and type checkers.

What is not a method is written here, once: ``import coterie`` reads from this file in which module
each name is. The methods are added by ``docs/index_of_names.py``.
"""

from coterie import data as data
from coterie import methods as methods
from coterie import models as models
from coterie.client import Client as Client
from coterie.client import Fit as Fit
from coterie.client import GradientRule as GradientRule
from coterie.client import Objective as Objective
from coterie.client import Penalty as Penalty
from coterie.client import Schedule as Schedule
from coterie.client import StepContext as StepContext
from coterie.client import contrastive as contrastive
from coterie.client import erm as erm
from coterie.client import linear as linear
from coterie.client import proximal as proximal
from coterie.compose.assign import Assign as Assign
from coterie.compose.assign import alone as alone
from coterie.compose.assign import by_loss as by_loss
from coterie.compose.assign import everyone as everyone
from coterie.compose.assign import true_groups as true_groups
from coterie.compose.grouped import grouped as grouped
from coterie.compose.layerwise import layer_wise as layer_wise
from coterie.compose.local import Local as Local
from coterie.compose.local import keeping as keeping
from coterie.compose.local import minimise as minimise
from coterie.compose.robust import (
    with_robust_aggregation as with_robust_aggregation,
)
from coterie.compose.server_optimizer import with_server_optimizer as with_server_optimizer
from coterie.compose.sharing import Sharing as Sharing
from coterie.compose.sharing import all_but_last as all_but_last
from coterie.compose.sharing import all_layers as all_layers
from coterie.compose.sharing import no_layer as no_layer
from coterie.compose.sharing import only_last as only_last
from coterie.core.federation import Federation as Federation
from coterie.core.messages import Mean as Mean
from coterie.core.messages import Order as Order
from coterie.core.messages import Reply as Reply
from coterie.core.messages import Upload as Upload
from coterie.core.messages import chosen as chosen
from coterie.core.method import Method as Method
from coterie.core.method import Public as Public
from coterie.core.method import Round as Round
from coterie.core.method import Setup as Setup
from coterie.core.method import State as State
from coterie.core.method import method as method
from coterie.core.weights import Layout as Layout
from coterie.core.weights import Weights as Weights
from coterie.data import ClientData as ClientData
from coterie.data import Population as Population
from coterie.data import Split as Split
from coterie.errors import CoterieError as CoterieError
from coterie.experiment.api import run as run
from coterie.experiment.api import simulate as simulate
from coterie.experiment.compare.compare import compare as compare
from coterie.experiment.find_groups import FoundGroups as FoundGroups
from coterie.experiment.find_groups import find_groups as find_groups
from coterie.registry import METHODS as METHODS
from coterie.report.reading import read_run as read_run
from coterie.results.comparison import Comparison as Comparison
from coterie.results.result import Result as Result
from coterie.seeds import seed_for as seed_for
from coterie.tracking import Tracker as Tracker

__version__: str
__all__: list[str]

# The methods: made by docs/index_of_names.py.
from coterie.methods.adaptive_tau import adaptive_tau as adaptive_tau
from coterie.methods.cfl import cfl as cfl
from coterie.methods.clustered import ifca as ifca
from coterie.methods.clustered import oracle as oracle
from coterie.methods.dc_pfl import dc_pfl as dc_pfl
from coterie.methods.drift_correction import feddyn as feddyn
from coterie.methods.drift_correction import scaffold as scaffold
from coterie.methods.fedavg import fedavg as fedavg
from coterie.methods.fedavg import fedprox as fedprox
from coterie.methods.fedavg import local as local
from coterie.methods.fedclust import fedclust as fedclust
from coterie.methods.fedfomo import fedfomo as fedfomo
from coterie.methods.fednova import fednova as fednova
from coterie.methods.fedtsdp import fedtsdp as fedtsdp
from coterie.methods.group_evidence import group_evidence as group_evidence
from coterie.methods.k_fed import k_fed as k_fed
from coterie.methods.known_groups import known_groups as known_groups
from coterie.methods.meta import apfl as apfl
from coterie.methods.meta import per_fedavg as per_fedavg
from coterie.methods.meta import pfedme as pfedme
from coterie.methods.moon import moon as moon
from coterie.methods.pacfl import pacfl as pacfl
from coterie.methods.personal import ditto as ditto
from coterie.methods.personal import fedper as fedper
from coterie.methods.personal import fedrep as fedrep
from coterie.methods.personal import lg_fedavg as lg_fedavg
from coterie.methods.regrouped import adaptive as adaptive
from coterie.methods.regrouped import clusterfl as clusterfl
from coterie.methods.regrouped import fl_hc as fl_hc
from coterie.methods.regrouped import flis as flis
from coterie.methods.server_rules import fedadam as fedadam
from coterie.methods.server_rules import fedavgm as fedavgm
from coterie.methods.server_rules import fedyogi as fedyogi
from coterie.methods.server_rules import krum as krum
from coterie.methods.server_rules import median as median
from coterie.methods.server_rules import trimmed_mean as trimmed_mean
from coterie.methods.user_centric import user_centric as user_centric
