"""How long a report of ten long runs takes, and how large it is.

The script generates ten run directories of 200 rounds and 100 clients: groups that split, scores of
every client in every round, bytes by kind and client, labels, exposure, the notes of a grouping
method. Then ``coterie report`` runs on them in its own process, in turn with a bare reference: a
process that parses all lines of all events with ``json`` and loads plotly.js, which every report
needs. The bound is 10 seconds and 15 MB.

    python benchmarks/report.py                  # prints; --keep writes results/report.md and .json
    python benchmarks/report.py --folder RUNS    # leaves the runs, and the report, there
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from coterie.clustering.hierarchy import agglomerate, best_cut
from coterie.methods.tree_cuts import chosen_because
from coterie.results.rundir import RunDir
from methods import RESULTS, commit, machine

SECONDS, BYTES = 10.0, 15_000_000
LAYERS = ("conv1", "conv2", "dense", "head")
METHODS = (
    "fedavg",
    "fedprox",
    "ifca",
    "fedclust",
    "fl-hc",
    "cfl",
    "pacfl",
    "fedper",
    "ditto",
    "local",
)
BARE = """
import json, sys
from pathlib import Path
from plotly.offline import get_plotlyjs
lines = 0
for path in sorted(Path(sys.argv[1]).glob("*/events.jsonl")):
    with path.open() as file:
        lines += len([json.loads(line) for line in file])
print(lines, len(get_plotlyjs()))
"""


def made_up(place: Path, method: str, rounds: int, clients: int, seed: int) -> None:
    """A run directory as a run of this size leaves it."""
    random = np.random.default_rng(seed)
    truth = random.integers(0, 6, clients)
    labels = random.poisson(0.5 + 30 * (random.random((clients, 10)) < 0.3))
    run = RunDir(place)
    place.mkdir(parents=True)
    run.write_config(configuration(method, rounds, clients, seed))
    names = [f"ward {c}" for c in range(clients)]
    known = {"names": names, "groups": truth.tolist(), "classes": list("0123456789")}
    run.data.write_text(json.dumps({**known, "labels": labels.tolist()}))
    run.sessions.write_text(json.dumps(session(method, rounds)) + "\n")
    skill = random.uniform(0.55, 0.95, clients)
    total, clock = np.zeros(2), 0.0
    with run.events.open("w") as file:
        file.write(json.dumps(begun(truth, clients, random)) + "\n")
        for number in range(1, rounds + 1):
            event = one_round(number, truth, skill, random)
            total += [event["bytes"]["down"], event["bytes"]["up"]]
            clock += event["clock"]["computation"] + event["clock"]["communication"]
            event["total_bytes"] = {"down": int(total[0]), "up": int(total[1])}
            event["clock"]["total"] = clock
            file.write(json.dumps(event) + "\n")
    write_clients(run, event, truth, names, labels)
    run.result.write_text(json.dumps(summary(method, rounds, event, clock), indent=1))


def configuration(method: str, rounds: int, clients: int, seed: int) -> dict[str, Any]:
    return {
        "data": {"set": "digits", "clients": clients},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "model": {"name": "lenet5"},
        "method": {"name": method},
        "train": {"epochs": 2, "batch_size": 32, "lr": 0.05},
        "run": {"rounds": rounds, "seed": seed, "engine": "loop"},
        "clock": {"name": "links"},
    }


def session(method: str, rounds: int) -> dict[str, Any]:
    return {
        "at": "2026-01-01T00:00:00+00:00",
        "argv": ["run", "--method", method, "--rounds", str(rounds)],
        "folder": ".",
        "rounds": rounds,
        "done": 0,
        "engine": "loop",
        "versions": {"coterie": "made up", "python": platform.python_version()},
        "system": platform.system(),
    }


def begun(truth: np.ndarray, clients: int, random: np.random.Generator) -> dict[str, Any]:
    """The notes of a method that groups by distance, before the first round."""
    apart = (truth[:, None] != truth[None, :]) + 0.2 * random.random((clients, clients))
    distances = np.round((apart + apart.T) / 2 * (1 - np.eye(clients)), 6)
    tree = agglomerate(distances)
    cut = best_cut(distances, tree)
    notes = {
        "clients": list(range(clients)),
        "distances": distances.tolist(),
        "dendrogram": tree.to_list(),
        "threshold": cut.height,
        "why": chosen_because(cut),
        "silhouette": cut.scores,
    }
    moved = {"down": 250_000 * clients, "up": 3_000 * clients}
    return {"round": 0, "event": "init", "groups": [0] * clients, "bytes": moved, "notes": notes}


def one_round(
    number: int, truth: np.ndarray, skill: np.ndarray, random: np.random.Generator
) -> dict[str, Any]:
    """A round; groups split twice on the way."""
    clients = len(truth)
    groups = np.zeros(clients, int) if number < 20 else truth % 3 if number < 60 else truth
    learned = skill * (1 - np.exp(-number / 30))
    received = np.clip(learned + 0.03 * random.standard_normal(clients), 0, 1)
    adapted = np.clip(received + 0.03 * random.random(clients), 0, 1)
    bytes_by = {str(c): [250_000, 250_000 + int(random.integers(0, 9))] for c in range(clients)}
    kinds = {f"model/{layer}": [250_000 * clients // 4] * 2 for layer in LAYERS}
    up = sum(pair[1] for pair in bytes_by.values())
    return {
        "round": number,
        "cohort": list(range(clients)),
        "groups": groups.tolist(),
        "bytes": {"down": 250_000 * clients, "up": up},
        "wasted": {"down": 0, "up": 0},
        "total_wasted": {"down": 0, "up": 0},
        "kinds": kinds,
        "client_bytes": bytes_by,
        "lost": 0,
        "late": 0,
        "clock": {
            "computation": 1.5 + float(random.random()),
            "communication": 2.5,
            "waiting": 0.0,
        },
        "received": scores(received),
        "adapted": scores(adapted),
        "client_scores": {"received": received.tolist(), "adapted": adapted.tolist()},
        "exchanges": 1,
        "seconds": {"train": 2.0, "score": 0.25},
    }


def scores(own: np.ndarray) -> dict[str, Any]:
    low, middle, high = np.percentile(own, (10, 50, 90))
    return {
        "accuracy": float(own.mean()),
        "weighted_accuracy": float(own.mean()),
        "worst": float(own.min()),
        "worst_client": int(own.argmin()),
        "p10": float(low),
        "p50": float(middle),
        "p90": float(high),
        "std": float(own.std()),
        "loss": float(1.5 - own.mean()),
        "val": float(own.mean()),
    }


def write_clients(
    run: RunDir, last: dict[str, Any], truth: np.ndarray, names: list[str], labels: np.ndarray
) -> None:
    own = last["client_scores"]
    with run.table.open("w", newline="") as file:
        heads = ["client", "name", "group", "true_group", "train", "val", "test"]
        writer = csv.writer(file)
        writer.writerow([*heads, "bytes_down", "bytes_up", "received_accuracy", "adapted_accuracy"])
        for c, name in enumerate(names):
            held = [int(labels[c].sum()), 10, 20]
            moved = [250_000 * last["round"]] * 2
            row = [c, name, last["groups"][c], int(truth[c]), *held, *moved]
            writer.writerow([*row, own["received"][c], own["adapted"][c]])


def summary(method: str, rounds: int, last: dict[str, Any], clock: float) -> dict[str, Any]:
    span = {"clients": len(last["groups"]), "rounds": rounds, "first": 1, "last": rounds}
    seen = {**span, "arrays": {"model": {"layers": list(LAYERS), **span}}}
    near = {"least": 3, "count": 0, "by_difference": {}, "examples": []}
    kinds = {k: {"down": d * rounds, "up": u * rounds} for k, (d, u) in last["kinds"].items()}
    nothing = {"down": 0, "up": 0}
    return {
        "method": method,
        "rounds": rounds,
        "stopped": "",
        "judged_by": "accuracy",
        "headline": "received",
        "received": last["received"],
        "adapted": last["adapted"],
        "best_on_validation": {},
        "bytes": {**last["total_bytes"], "unmetered": nothing, "wasted": nothing, "kinds": kinds},
        "groups": len(set(last["groups"])),
        "sees": "means",
        "seconds": 2.25 * rounds,
        "train_seconds": 2.0 * rounds,
        "lost": 0,
        "late": 0,
        "abandoned": 0,
        "exposure": {
            "clients": len(last["groups"]),
            "layers": list(LAYERS),
            "single": {"none, averaged on arrival": seen},
            "sums": {},
            "near": near,
            "revealed": [],
            "abandoned": 0,
            "secure": False,
        },
        "clock": {
            "computation": clock / 2,
            "communication": clock / 2,
            "waiting": 0.0,
            "total": clock,
        },
    }


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of the clock and of all cores; the second is the same on a machine that is busy."""
    began, used = time.perf_counter(), _of_cores()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began, _of_cores() - used


def _of_cores() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def measured(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of the report and of the bare reference, taking turns, and the report's bytes."""
    to = folder / "report.html"
    ours = [sys.executable, "-m", "coterie", "report", str(folder), "--to", str(to)]
    bare = [sys.executable, "-c", BARE, str(folder)]
    busy = os.getloadavg()[0]
    spent: dict[str, list[float]] = {"report": [], "bare": []}
    cores: dict[str, list[float]] = {"report": [], "bare": []}
    for _ in range(repeats):
        for name, command in (("report", ours), ("bare", bare)):
            clock, used = timed(command)
            spent[name].append(clock)
            cores[name].append(used)
    return {"seconds": spent, "core_seconds": cores, "load": busy, "bytes": to.stat().st_size}


def page(kept: dict[str, Any]) -> str:
    def row(title: str, name: str, bytes: str) -> str:
        clock, cores = kept["seconds"][name], kept["core_seconds"][name]
        middle, used = statistics.median(clock), statistics.median(cores)
        return f"| {title} | {middle:.1f} | {max(clock):.1f} | {used:.1f} | {bytes} |"

    report, bare = (statistics.median(kept["seconds"][name]) for name in ("report", "bare"))
    what = f"{kept['runs']} runs × {kept['rounds']} rounds × {kept['clients']} clients"
    rows = [
        "| | seconds, median | most | of all cores | bytes |",
        "|---|---:|---:|---:|---:|",
        row(f"`coterie report`, {what}", "report", f"{kept['bytes'] / 1e6:.1f} MB"),
        row("bare: parsing the events, loading plotly.js", "bare", ""),
        f"| ratio | {report / bare:.1f} | | | |",
        f"| bound | {SECONDS:.0f} | | | {BYTES / 1e6:.0f} MB |",
    ]
    notes = [
        f"- {len(kept['seconds']['report'])} times each, taking turns; whole processes, from "
        "start to end.",
        f"- seed {kept['seed']}; commit {kept['commit']}, {kept['date']}, plotly {kept['plotly']}",
        f"- {kept['machine']}; load {kept['load']:.1f} at the start",
    ]
    table, said = "\n".join(rows), "\n".join(notes)
    return f"# The report of ten long runs\n\n```sh\n{kept['command']}\n```\n\n{table}\n\n{said}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the made-up runs go (default: nowhere)")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write results/report.md and .json")
    given = parser.parse_args()
    usual = vars(parser.parse_args([]))
    changed = [
        k for k in ("runs", "rounds", "clients", "seed", "repeats") if vars(given)[k] != usual[k]
    ]
    told = [word for key in changed for word in (f"--{key}", str(vars(given)[key]))]
    told += ["--keep"] * given.keep
    with tempfile.TemporaryDirectory() as temporary:
        # Each size has its own folder, so runs that exist already have the requested size.
        size = f"{given.runs}x{given.rounds}x{given.clients}-seed-{given.seed}"
        folder = (given.folder or Path(temporary)) / size
        for number in range(given.runs):
            method = METHODS[number % len(METHODS)]
            place = folder / f"{number:02}-{method}"
            if not place.exists():
                made_up(place, method, given.rounds, given.clients, given.seed + number)
        found = measured(folder, given.repeats)
    import plotly

    kept = {
        **{key: getattr(given, key) for key in ("runs", "rounds", "clients", "seed")},
        **found,
        "command": shlex.join(["python", "benchmarks/report.py", *told]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "plotly": plotly.__version__,
        "machine": machine(),
    }
    text = page(kept)
    print(text)
    if given.keep:
        (RESULTS / "report.json").write_text(json.dumps(kept, indent=1) + "\n")
        (RESULTS / "report.md").write_text(text)
    good = statistics.median(found["seconds"]["report"]) < SECONDS and found["bytes"] < BYTES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
