"""The public names of Coterie, for editors and type checkers.

What is not a method is written here, once: ``import coterie`` reads from this file in which module
each name is. The methods are added by ``docs/index_of_names.py``.
"""

from coterie import data as data
from coterie import methods as methods
from coterie import models as models
from coterie.client import Client as Client
from coterie.client import Descent as Descent
from coterie.client import Fit as Fit
from coterie.client import Objective as Objective
from coterie.client import Penalty as Penalty
from coterie.client import Schedule as Schedule
from coterie.client import Slope as Slope
from coterie.client import contrastive as contrastive
from coterie.client import erm as erm
from coterie.client import linear as linear
from coterie.client import proximal as proximal
from coterie.compose import Assign as Assign
from coterie.compose import Local as Local
from coterie.compose import Sharing as Sharing
from coterie.compose import all_but_last as all_but_last
from coterie.compose import all_layers as all_layers
from coterie.compose import alone as alone
from coterie.compose import by_loss as by_loss
from coterie.compose import everyone as everyone
from coterie.compose import grouped as grouped
from coterie.compose import keeping as keeping
from coterie.compose import minimise as minimise
from coterie.compose import no_layer as no_layer
from coterie.compose import only_last as only_last
from coterie.compose import true_groups as true_groups
from coterie.data import ClientData as ClientData
from coterie.data import Population as Population
from coterie.data import Split as Split
from coterie.errors import CoterieError as CoterieError
from coterie.federation import Federation as Federation
from coterie.federation import Mean as Mean
from coterie.federation import Order as Order
from coterie.federation import Reply as Reply
from coterie.federation import Upload as Upload
from coterie.federation import chosen as chosen
from coterie.layerwise import layer_wise as layer_wise
from coterie.method import Method as Method
from coterie.method import Public as Public
from coterie.method import Round as Round
from coterie.method import Setup as Setup
from coterie.method import State as State
from coterie.method import method as method
from coterie.registry import METHODS as METHODS
from coterie.report.reading import read_run as read_run
from coterie.results.comparison import Comparison as Comparison
from coterie.results.result import Result as Result
from coterie.run.api import run as run
from coterie.run.api import simulate as simulate
from coterie.run.compare import compare as compare
from coterie.run.groups import FoundGroups as FoundGroups
from coterie.run.groups import find_groups as find_groups
from coterie.seeds import seed_for as seed_for
from coterie.serverside import robust as robust
from coterie.serverside import stepping as stepping
from coterie.tracking import Tracker as Tracker
from coterie.weights import Layout as Layout
from coterie.weights import Weights as Weights

__version__: str
__all__: list[str]

# The methods: made by docs/index_of_names.py.
from coterie.methods.adaptive_tau import adaptive_tau as adaptive_tau
from coterie.methods.cfl import cfl as cfl
from coterie.methods.clustered import ifca as ifca
from coterie.methods.clustered import oracle as oracle
from coterie.methods.control import feddyn as feddyn
from coterie.methods.control import scaffold as scaffold
from coterie.methods.dc_pfl import dc_pfl as dc_pfl
from coterie.methods.fedclust import fedclust as fedclust
from coterie.methods.fedfomo import fedfomo as fedfomo
from coterie.methods.fednova import fednova as fednova
from coterie.methods.fedtsdp import fedtsdp as fedtsdp
from coterie.methods.global_ import fedavg as fedavg
from coterie.methods.global_ import fedprox as fedprox
from coterie.methods.global_ import local as local
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
from coterie.methods.serverside import fedadam as fedadam
from coterie.methods.serverside import fedavgm as fedavgm
from coterie.methods.serverside import fedyogi as fedyogi
from coterie.methods.serverside import krum as krum
from coterie.methods.serverside import median as median
from coterie.methods.serverside import trimmed_mean as trimmed_mean
from coterie.methods.user_centric import user_centric as user_centric
