"""What layer-wise aggregation saves DC-PFL, and what it costs: against itself with all layers.

    python benchmarks/layers_at_rest.py --folder DATA

Fashion-MNIST, 50 clients with a main and a second class each (``primary-secondary``), all of them
in every round, 5 epochs of batches of 32 at a learning rate of 0.05. DC-PFL runs at its defaults
and with ``alpha=1`` (the paper's NoLA); with ``--shares`` by the paper's rule, too. Bytes are all
bytes sent, probe and trial included, divided by those of FedAvg in as many rounds.

In a round in which layers rest (skip averaging), clients use their own layers and score higher.
Accuracies are therefore compared in rounds after which all clients have received all layers of
their group's mean: the mean of the last three. The other rounds are shown beside them.

Rows are appended to a file as they come; call the script again to continue after an interruption.
The rule was chosen on seeds 0 and 1; those reported are others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.data import build_population, load
from dc_pfl_table import write
from methods import RESULTS, commit, machine
from rows import carried_out

CLIENTS, LR, EPOCHS, BATCH = 50, 0.05, 5, 32
LAST = 3  # scores are averaged over this many full rounds at the end


def cells(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every run."""
    methods: list[dict[str, Any]] = [{}, {"alpha": 1}]
    methods += [{"share": float(s)} for s in asked.shares.split(",") if s]
    for seed in asked.seeds:
        for model in asked.models.split(","):
            for method in methods:
                size = {"rounds": asked.rounds, "samples": asked.samples}
                yield {"model": model, "seed": seed, "method": method, **size}


def run(cell: Mapping[str, Any], folder: str | None) -> dict[str, Any]:
    """One run, as a row of results."""
    torch.set_num_threads(1)
    people = build_population(
        load("fashion-mnist", folder),
        clients=CLIENTS,
        partition="primary-secondary",
        samples=cell["samples"],
        seed=cell["seed"],
    )
    simulate = partial(
        coterie.simulate,
        people,
        model=cell["model"],
        seed=cell["seed"],
        engine="loop",
        epochs=EPOCHS,
        batch_size=BATCH,
        lr=LR,
    )
    began = time.perf_counter()
    result = simulate(
        method=coterie.dc_pfl(**cell["method"]), rounds=cell["rounds"], evaluate_every=1
    )
    seconds = time.perf_counter() - began
    one = simulate(method="fedavg", rounds=1, evaluate_every=0).summary["bytes"]
    rounds = [(e["notes"].get("layers", {}).get("all_due", True), e) for e in result.history]
    full = [e["received"]["accuracy"] for whole, e in rounds if whole]
    rest = [e["received"]["accuracy"] for whole, e in rounds if not whole]
    total = result.summary["bytes"]
    return {
        **cell,
        "commit": commit(),
        "bytes": (total["down"] + total["up"]) / (one["down"] + one["up"]) / cell["rounds"],
        "full": statistics.mean(full[-LAST:]),
        "resting": statistics.mean(rest[-LAST:]) if rest else None,
        "groups": len(set(result.groups.values())),
        "split_rounds": [e["round"] for _, e in rounds if "verdict" in e["notes"]],
        "seconds": round(seconds, 1),
    }


def named(method: Mapping[str, Any]) -> str:
    if not method:
        return "defaults"
    return ", ".join(f"{k} {v:g}" for k, v in method.items())


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs of each model and setting, means over seeds."""
    lines = [
        "| model | DC-PFL | bytes / FedAvg's | received %, full rounds | against `alpha` 1 | "
        "received %, layers at rest | groups |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    places = dict.fromkeys((r["model"], json.dumps(r["method"])) for r in rows)
    for model, text in places:
        method = json.loads(text)
        mine = [r for r in rows if (r["model"], r["method"]) == (model, method)]
        whole = {r["seed"]: r for r in rows if r["model"] == model and r["method"] == {"alpha": 1}}
        gaps = [100 * (r["full"] - whole[r["seed"]]["full"]) for r in mine if r["seed"] in whole]
        rest = [100 * r["resting"] for r in mine if r["resting"] is not None]
        cells = [
            f"{statistics.mean(r['bytes'] for r in mine):.2f}",
            f"{100 * statistics.mean(r['full'] for r in mine):.1f}",
            f"{statistics.mean(gaps):+.1f}" if gaps and method != {"alpha": 1} else "–",
            f"{statistics.mean(rest):.1f}" if rest else "–",
            ", ".join(str(r["groups"]) for r in mine),
        ]
        lines.append(f"| {model} | {named(method)} | " + " | ".join(cells) + " |")
    return lines


def page(kept: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    rows = kept["rows"]
    seeds = sorted({r["seed"] for r in rows})
    return "\n".join(
        [
            "# Layers at rest: what they save, what they cost",
            "",
            f"```sh\n{kept['command']}\n```",
            "",
            f"Fashion-MNIST, {CLIENTS} clients, a main and a second class each, "
            f"{rows[0]['samples'] // CLIENTS} samples a client, {rows[0]['rounds']} rounds of "
            f"{EPOCHS} epochs, seeds {', '.join(map(str, seeds))}. Accuracies are means of the "
            f"last {LAST} rounds of their kind. Commit {kept['commit']}, {kept['date']}, "
            f"{kept['machine']}.",
            "",
            *table(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"))
    parser.add_argument("--models", default="lenet5,cnn5")
    parser.add_argument("--seeds", default="10,11,12")
    parser.add_argument("--shares", default="", help="the paper's rule, too: numbers from 0 to 1")
    parser.add_argument("--rounds", type=int, default=41, help="the last is a full one")
    parser.add_argument("--samples", type=int, default=6000, help="of all clients together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=Path, default=Path("runs", "bench-layers-at-rest.jsonl"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    asked.seeds = [int(s) for s in asked.seeds.split(",")]
    work = partial(run, folder=asked.folder)
    rows = carried_out(list(cells(asked)), work, asked.runs, asked.jobs)
    shares = f" --shares {asked.shares}" if asked.shares else ""
    kept = {
        "command": f"python benchmarks/layers_at_rest.py --folder DATA{shares}",
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": machine(),
        "rows": rows,
    }
    write(asked.results / "layers_at_rest", kept, page(kept))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
