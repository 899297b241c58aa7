"""FedAvg with and without a codec on Fashion-MNIST, IID: bytes uploaded and accuracy lost.

100 clients, 10 a round, LeNet-5, 5 epochs a round, batches of 10, lr 0.01, momentum 0.9. Each seed
runs with `raw` and with the codec one after the other. The script prints the bytes uploaded in the
whole run, their ratio, and the received accuracy (mean of the last ten rounds) of both.

    python benchmarks/quantised.py --folder DATA [--codec qsgd:levels=7] [--keep FILE.json]

``--keep`` writes the figures after every run and continues from what the file holds already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from datetime import date
from pathlib import Path

import coterie
from methods import commit


def configuration(arguments: argparse.Namespace, seed: int, up: str, down: str) -> dict:
    return {
        "data": {"set": "fashion-mnist", "folder": arguments.folder, "clients": 100},
        "partition": {"name": "iid"},
        "model": {"name": "lenet5"},
        "train": {"epochs": 5, "batch_size": 10, "lr": 0.01, "momentum": 0.9},
        "run": {"rounds": arguments.rounds, "cohort": 10, "seed": seed},
        "wire": {"up": up, "down": down},
        "evaluation": {"adapt_epochs": 0},
    }


def measured(result: coterie.Result) -> dict:
    last = [event["received"]["accuracy"] for event in result.history[-10:]]
    moved = result.summary["bytes"]
    return {
        "up": moved["up"],
        "down": moved["down"],
        "received": round(statistics.mean(last), 5),
        "kinds": moved["kinds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"))
    parser.add_argument("--codec", default="qsgd:levels=7,bucket=512", help="the codec up")
    parser.add_argument("--down", default="raw", help="the codec down")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    command = "python benchmarks/quantised.py --folder DATA " + " ".join(
        f"--{k} {' '.join(map(str, v)) if isinstance(v, list) else v}"
        for k, v in vars(arguments).items()
        if k in ("codec", "down", "seeds", "rounds")
    )
    kept = {"command": command, "commit": commit(), "date": str(date.today()), "runs": {}}
    if arguments.keep and arguments.keep.exists():
        before = json.loads(arguments.keep.read_text())
        if before["command"] == command:
            kept = before
    for seed in arguments.seeds:
        for name, up, down in (
            ("raw", "raw", "raw"),
            ("coded", arguments.codec, arguments.down),
        ):
            key = f"{name} {seed}"
            if key not in kept["runs"]:
                found = coterie.run(configuration(arguments, seed, up, down))
                kept["runs"][key] = measured(found)
            if arguments.keep:
                arguments.keep.write_text(json.dumps(kept, indent=1) + "\n")
        raw, coded = kept["runs"][f"raw {seed}"], kept["runs"][f"coded {seed}"]
        print(
            f"seed {seed}: {raw['received']:.2%} raw, {coded['received']:.2%} with "
            f"{arguments.codec} ({100 * (coded['received'] - raw['received']):+.2f} points), "
            f"{raw['up'] / coded['up']:.2f} times fewer bytes up",
            flush=True,
        )
    raw, coded = (
        [kept["runs"][f"{name} {seed}"] for seed in arguments.seeds] for name in ("raw", "coded")
    )
    lost = [100 * (a["received"] - b["received"]) for a, b in zip(raw, coded, strict=True)]
    ratio = sum(r["up"] for r in raw) / sum(r["up"] for r in coded)
    kept["summary"] = {
        "times_fewer_bytes_up": round(ratio, 3),
        "points_lost": [round(x, 3) for x in lost],
        "points_lost_mean": round(statistics.mean(lost), 3),
    }
    if arguments.keep:
        arguments.keep.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"all: {ratio:.2f} times fewer bytes up, {statistics.mean(lost):+.2f} points lost")
    sys.exit(0 if ratio >= 6 and statistics.mean(lost) <= 1 else 1)


if __name__ == "__main__":
    main()
