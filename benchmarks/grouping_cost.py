"""What it costs FedClust to find its groups: bytes and local training, of a run of 20 rounds.

    python benchmarks/grouping_cost.py --folder DATA    # about five minutes on one core

Fashion-MNIST with LeNet-5, FedClust at its defaults, on three sets of clients:

- four label permutations, 20 clients: the final layer shows the groups;
- IID, 20 clients: the final layer shows nothing, and clients send the whole change (the fallback);
- four label permutations, 100 clients, 10 a round: the probe and the trial ask all clients.

The bytes are the ledger's. Those of the trial are the bytes of its round beyond an ordinary round.
The figures go to ``benchmarks/results/grouping_cost.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import coterie
from dc_pfl_table import write
from grouping_matrix import planted
from methods import RESULTS, as_page, commit, machine

ROUNDS, SEED = 20, 10
CASES: Mapping[str, Mapping[str, Any]] = {
    "final layer tells": {"kind": "permutation", "sizes": "134"},
    "with the fallback": {"kind": "iid", "sizes": "134"},
    "10 % cohorts": {"kind": "permutation", "sizes": "60x100", "cohort": 0.1},
}


def measured(name: str, folder: str | None) -> dict[str, Any]:
    """Bytes of the probe, of the trial and of all, and samples of the probe."""
    case = dict(CASES[name])
    kind, sizes = case.pop("kind"), case.pop("sizes")
    population, _ = planted(kind, sizes, SEED, "fashion-mnist", folder)
    settings = {"engine": "loop", "rounds": ROUNDS, "seed": SEED, "evaluate_every": 0, **case}
    result = coterie.simulate(population, "lenet5", "fedclust", **settings)
    moved = [sum(e["bytes"].values()) for e in (result.begun, *result.history)]
    tried = [i for i, e in enumerate(result.history, 1) if "verdict" in e.get("notes", {})]
    ordinary = min(moved[1:])
    grouping = result.summary["grouping"]
    return {
        "case": name,
        "clients": len(population.clients),
        "groups": len(set(result.groups.values())),
        "by": grouping["evidence"]["by"],
        "probe": moved[0],
        "trial": sum(moved[i] - ordinary for i in tried),
        "trials": len(tried),
        "all": sum(moved),
        "probe_rounds": grouping["probes"]["rounds"],
        "steps": grouping["evidence"]["steps"],
    }


def page(kept: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    head = ["", "groups", "probe, MB", "share", "trial, MB", "share", "all, MB", "local training"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * 7]
    for row in kept["rows"]:
        cells = [f"{row['case']} ({row['clients']} clients)", str(row["groups"])]
        for part in ("probe", "trial"):
            cells += [f"{row[part] / 1e6:.2f}", f"{row[part] / row['all']:.1%}"]
        cells += [f"{row['all'] / 1e6:.1f}", f"{row['probe_rounds']:.0f} rounds"]
        lines.append(f"| {' | '.join(cells)} |")
    told = [
        f"- {ROUNDS} rounds, seed {SEED}, LeNet-5, Fashion-MNIST, 134 samples a client (60 of 100 "
        "clients), the default schedule.",
        "- Shares are of all bytes of the run. Local training: the cost of the probe, in "
        "rounds of all clients.",
        f"- commit {kept['commit']}, {kept['date']}, torch {kept['torch']}",
    ]
    return as_page("What it costs to find groups", dict(kept), lines, told)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"), help="Fashion-MNIST's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    asked = parser.parse_args(words)
    began, rows = time.perf_counter(), []
    for name in CASES:
        rows.append(measured(name, asked.folder))
        print(rows[-1], flush=True)
    kept = {
        "command": "python benchmarks/grouping_cost.py --folder DATA",
        "seed": SEED,
        "commit": commit(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    write(asked.results / "grouping_cost", kept, page(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
