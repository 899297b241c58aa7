"""FedAvg on Fashion-MNIST: label skew 20 % and IID, 100 clients, 10 a round, 50 rounds.

E=10, B=10, lr 0.01, momentum 0.9, LeNet-5. Prints the received accuracy (mean over clients), mean
of rounds 41 to 50, which should lie in 70-82 % under label skew and above 87 % when iid.

    python benchmarks/fashion_fedavg.py --folder DATA [--keep FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import coterie

EXPECTED = {"label-skew": (0.70, 0.82), "iid": (0.87, 1.0)}


def configuration(partition: str, folder: str | None, seed: int, rounds: int) -> dict:
    parameters = {"fraction": 0.2} if partition == "label-skew" else {}
    return {
        "data": {"set": "fashion-mnist", "folder": folder, "clients": 100},
        "partition": {"name": partition, **parameters},
        "model": {"name": "lenet5"},
        "method": {"name": "fedavg"},
        "train": {"epochs": 10, "batch_size": 10, "lr": 0.01, "momentum": 0.9},
        "run": {"rounds": rounds, "cohort": 0.1, "seed": seed},
        "evaluation": {"adapt_epochs": 0},
    }


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        default=os.environ.get("COTERIE_DATA"),
        help="the folder of Fashion-MNIST's files (default: COTERIE_DATA, else downloaded)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    code = commit()  # read it now: the checkout may change while this runs
    found = {}
    for partition, (low, high) in EXPECTED.items():
        began = time.perf_counter()
        result = coterie.run(
            configuration(partition, arguments.folder, arguments.seed, arguments.rounds)
        )
        received = [event["received"]["accuracy"] for event in result.history]
        mean = statistics.mean(received[-10:])
        seconds = time.perf_counter() - began
        verdict = "as expected" if low <= mean <= high else f"NOT in {low:.0%} to {high:.0%}"
        print(
            f"{partition:10} {mean:.1%} received, mean of the last ten of {arguments.rounds} "
            f"rounds ({verdict}), {seconds:.0f} s",
            flush=True,
        )
        found[partition] = {
            "received_mean_of_last_ten": round(mean, 4),
            "received_by_round": [round(a, 4) for a in received],
            "bytes": result.summary["bytes"],
            "seconds": round(seconds, 1),
        }
    if arguments.keep:
        about = {
            "command": "python "
            + " ".join([sys.argv[0], "--folder DATA", f"--seed {arguments.seed}"]),
            "commit": code,
            "seed": arguments.seed,
            "date": date.today().isoformat(),
            "torch": __import__("torch").__version__,
        }
        arguments.keep.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")
