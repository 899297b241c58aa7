"""What initial weights change: FedAvg after a few rounds, and the mixing weights of user-centric.

    python benchmarks/initialisation.py --folder DATA    # less than five minutes on one core

20 clients, for each choice of ``model.init`` and each of some seeds:

- FedAvg: the received accuracy after 5 rounds of one epoch, with IID clients.
- user-centric: the mixing weights follow before round 1 from gradients at the initial weights of
  the model. Four groups of 5 clients have their labels permuted. The figure is the share of its row
  that a client gives to its own group, averaged over clients: 0.25 separates nothing, 1 is perfect.
  Variances are taken over batches of a third of a client's data, which is the default.

Digits with ``mlp``, batches of 10; Fashion-MNIST, if it is available, with ``lenet5``, 400 images a
client, batches of 32. SGD, learning rate 0.05. The figures go to
``benchmarks/results/initialisation.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data import Population
from coterie.experiment.config import experiment_of, parse, population_of
from coterie.experiment.experiment import execute
from coterie.experiment.scenarios.available import is_available
from coterie.models import INITIALISATIONS
from coterie.results.result import Result
from dc_pfl_table import Tree, write
from methods import RESULTS, as_page, commit, machine

CLIENTS, GROUPS, ROUNDS, SAMPLES, SEEDS = 20, 4, 5, 400, (0, 1, 2, 3, 4)
SETS: dict[str, Tree] = {
    "digits": {
        "data": {"set": "digits"},
        "model": {"name": "mlp"},
        "train": {"batch_size": 10},
    },
    "fashion-mnist": {
        "data": {"set": "fashion-mnist", "samples": CLIENTS * SAMPLES},
        "model": {"name": "lenet5"},
        "train": {"batch_size": 32},
    },
}
# Methods and partitions: the mixing weights need no training.
MEASURED: dict[str, Tree] = {
    "fedavg": {"run": {"rounds": ROUNDS}, "evaluation": {"every": ROUNDS}},
    "user-centric": {
        "shift": {"name": "label-permutation", "groups": GROUPS},
        "train": {"epochs": 0},
        "run": {"rounds": 1},
        "evaluation": {"every": 0},
    },
}


def settings(name: str, method: str, init: str, seed: int, folder: str | None) -> Tree:
    """A configuration."""
    base, measured = SETS[name], MEASURED[method]
    place = {"folder": folder} if folder and name != "digits" else {}
    return {
        "data": {"clients": CLIENTS, **base["data"], **place},
        "shift": measured.get("shift", {"name": "none"}),
        "model": {**base["model"], "init": init},
        "method": {"name": method},
        "train": {"epochs": 1, "lr": 0.05, **base["train"], **measured.get("train", {})},
        "run": {"seed": seed, "engine": "loop", **measured["run"]},
        "evaluation": {"adapt_epochs": 0, **measured["evaluation"]},
    }


def own_group(mixing: Any, groups: Sequence[int]) -> float:
    """The share of its row of weights that a client gives to its own group, the mean over clients.

    >>> own_group([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], [0, 0, 1])
    0.766...
    """
    labels = np.asarray(groups)
    same = labels[:, None] == labels
    return float((np.asarray(mixing) * same).sum(1).mean())


def figure(method: str, result: Result) -> float:
    """What is measured of a run."""
    if method == "fedavg":
        return float(result.summary["received"]["accuracy"])
    notes, groups = result.begun["notes"], result.plan.population.groups
    assert groups is not None
    return own_group(notes["mixing"], [groups[c] for c in notes["clients"]])


def all_figures(sets: Sequence[str], seeds: Sequence[int], folder: str | None) -> list[Tree]:
    """A row for each data set and initialisation, all of one seed on the same clients."""
    found: dict[tuple[str, str], Tree] = {
        (name, init): {"set": name, "model": SETS[name]["model"]["name"], "init": init}
        | {method: [] for method in MEASURED}
        for name in sets
        for init in INITIALISATIONS
    }
    for name in sets:
        for method in MEASURED:
            for seed in seeds:
                people: Population | None = None
                for init in INITIALISATIONS:
                    config = parse(settings(name, method, init, seed, folder))
                    people = people or population_of(config)
                    result = execute(experiment_of(config, people))
                    found[name, init][method].append(figure(method, result))
            print(f"{name}, {method}: done", flush=True)
    return list(found.values())


def page(kept: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    head = ["data, model", "init", "FedAvg received %", "weight of the own group"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---:|---:|"]
    for row in kept["rows"]:
        cells = [f"{row['set']}, {row['model']}", f"`{row['init']}`"]
        cells += [spread(row["fedavg"], 100, 1), spread(row["user-centric"], 1, 3)]
        lines.append(f"| {' | '.join(cells)} |")
    told = [
        f"- Mean ± standard deviation over seeds {', '.join(map(str, kept['seeds']))}.",
        f"- FedAvg: {CLIENTS} IID clients, after {ROUNDS} rounds of one epoch, learning rate 0.05.",
        f"- Weight of the own group: the weight that user-centric's rule gives to a client's own "
        f"group, of {GROUPS} groups with permuted labels, with the default `variance_batch`; "
        f"{1 / GROUPS:.2f} means that groups are not separated.",
        f"- commit {kept['commit']}, {kept['date']}, torch {kept['torch']}",
    ]
    return as_page("Initial weights", dict(kept), lines, told)


def spread(values: Sequence[float], scale: float, digits: int) -> str:
    """Mean ± standard deviation."""
    scaled = [scale * value for value in values]
    deviation = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{deviation}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"), help="Fashion-MNIST's")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)
    sets = [name for name in SETS if is_available(name, asked.folder)]
    for name in SETS.keys() - set(sets):
        print(
            f"{name} is not available and is left out; --folder says where it is", file=sys.stderr
        )
    began = time.perf_counter()
    found = all_figures(sets, asked.seeds, asked.folder)
    folder = " --folder DATA" * ("fashion-mnist" in sets)
    seeds = f" --seeds {' '.join(map(str, asked.seeds))}" * (tuple(asked.seeds) != SEEDS)
    kept = {
        "command": f"python benchmarks/initialisation.py{folder}{seeds}",
        "settings": {"clients": CLIENTS, "groups": GROUPS, "rounds": ROUNDS, "samples": SAMPLES},
        "seeds": asked.seeds,
        "commit": commit(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": found,
    }
    write(asked.results / "initialisation", kept, page(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
