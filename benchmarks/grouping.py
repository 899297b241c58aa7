"""Seconds and peak memory of grouping many clients by their models, on one core.

    python benchmarks/grouping.py [--clients 1000] [--parameters 62000]

Random float32 rows in planted groups; the peak is that of the whole process, rows included.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np

from coterie.clustering import agglomerate, best_cut, cosine, euclidean, scaled_l1


def models(clients: int, parameters: int, groups: int) -> np.ndarray:
    random = np.random.default_rng(0)
    rows = random.standard_normal((clients, parameters), dtype=np.float32)
    centres = random.standard_normal((groups, parameters), dtype=np.float32)
    for i, row in enumerate(rows):
        row += centres[i % groups]
    return rows


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # kB on Linux


def timed(title: str, work: Callable[[], np.ndarray]) -> np.ndarray:
    began = time.perf_counter()
    found = work()
    print(f"{title:24} {time.perf_counter() - began:7.2f} s  peak {peak():6.0f} MB", flush=True)
    return found


def measure(clients: int, parameters: int, groups: int) -> None:
    rows = models(clients, parameters, groups)
    print(f"{clients} clients, {parameters} parameters: {rows.nbytes / 2**20:.0f} MB of float32")
    print(f"{'before':24} {'':9}  peak {peak():6.0f} MB")
    for name, function in (("L2", euclidean), ("cosine", cosine), ("scaled L1", scaled_l1)):
        matrix = timed(f"{name} matrix", lambda function=function: function(rows))
        tree = timed(f"{name} dendrogram", lambda matrix=matrix: agglomerate(matrix))
        cut = timed(f"{name} best cut", lambda matrix=matrix, tree=tree: best_cut(matrix, tree))
        print(f"{'':24} {cut.labels.max() + 1} groups of {groups} found")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=62_000)
    parser.add_argument("--groups", type=int, default=5)
    arguments = parser.parse_args()
    measure(arguments.clients, arguments.parameters, arguments.groups)
