"""Data: data sets, partitions among clients, shifts, and measures of heterogeneity."""

from coterie.data.build import build_population
from coterie.data.clients import from_clients, raw_from_dataset
from coterie.data.heterogeneity import describe, emd_to_population, label_table, pairwise_kl
from coterie.data.partitions import Partition
from coterie.data.population import ClientData, Population, Split
from coterie.data.raw import RawData
from coterie.data.sets import load
from coterie.registry import PARTITIONS, SETS, SHIFTS

__all__ = [
    "PARTITIONS",
    "SETS",
    "SHIFTS",
    "ClientData",
    "Partition",
    "Population",
    "RawData",
    "Split",
    "build_population",
    "describe",
    "emd_to_population",
    "from_clients",
    "label_table",
    "load",
    "pairwise_kl",
    "raw_from_dataset",
]
