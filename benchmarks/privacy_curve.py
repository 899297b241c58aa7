"""Accuracy against ε: client-level differential privacy on Fashion-MNIST with 1,000 clients.

    python benchmarks/privacy_curve.py --folder DATA    # about a quarter of an hour on two cores

70,000 images, 70 for each client, IID: 56 to train on, 7 to validate, 7 to test. FedAvg, each
client selected with probability q = 0.1 in each round, T = 60 rounds, δ = 1/1000^1.1. A perceptron
with one hidden layer of 32 units: noise grows with the root of the number of weights, and larger
models learn less under the same ε. Two epochs of batches of 10, learning rate 0.1. Changes are
clipped to a fixed bound that was chosen on seed 9, which is not shown (the results name the bounds
tried).

The noise of each ε is calibrated for T rounds. "∞" clips as well and adds noise that hides nothing
(a multiplier of 0.01); "none" is plain FedAvg. The score is the mean accuracy over the clients'
own test images of the model after the last round; every ε is that of the accountant's
privacy loss distribution at the end.

Each finished cell goes into ``cells.json`` in the folder of the runs; if the script is killed, call
it again to continue. Figures and picture go to ``benchmarks/results/privacy_curve.json``, ``.md``
and ``.svg`` (the last where kaleido and a browser are installed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from coterie.core.tree import write_atomic
from coterie.data import Population
from coterie.errors import ConfigError
from coterie.experiment.config import experiment_of, parse, population_of
from coterie.experiment.experiment import execute
from coterie.results.rundir import without_nan
from dc_pfl_table import Tree, write
from methods import RESULTS, as_page, commit, ended, machine

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
UNNOISED = 0.01  # a multiplier that hides nothing, to see what clipping costs
CLIENTS, COHORT, ROUNDS, CLIP = 1000, 0.1, 60, 1.0
SEEDS = (0, 1)
TUNING = "seed 9 at ε = 2 and 30 rounds: 0.25 gave 76.9 %, 0.5 79.4 %, 1 79.7 %"


# --- runs ----------------------------------------------------------------------------------------


def cells() -> dict[str, Tree]:
    """The runs by name, with the table ``[privacy]`` of each."""
    found: dict[str, Tree] = {f"{e:g}": {"epsilon": e, "clip": CLIP} for e in EPSILONS}
    return {**found, "∞": {"noise": UNNOISED, "clip": CLIP}, "none": {}}


def settings(privacy: Tree, seed: int, asked: argparse.Namespace) -> Tree:
    """A configuration."""
    folder = {"folder": asked.folder} if asked.folder else {}
    return {
        "data": {"set": "fashion-mnist", "clients": CLIENTS, "test_fraction": 0.1, **folder},
        "partition": {"name": "iid"},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "fedavg"},
        "train": {"epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0.0},
        "run": {"rounds": asked.rounds, "cohort": COHORT, "sampling": "poisson", "seed": seed},
        "evaluation": {"adapt_epochs": 0, "every": 10},
        "privacy": privacy,
    }


def decisive(tree: Tree) -> Tree:
    """The part of a configuration that a result depends on."""
    return {**tree, "data": {k: v for k, v in tree["data"].items() if k != "folder"}}


def all_runs(asked: argparse.Namespace) -> dict[str, Tree]:
    """Every cell, from the file or run now; all of one seed on one population."""
    file = asked.dir / "cells.json"
    done: dict[str, Tree] = json.loads(file.read_text()) if file.exists() else {}
    people: dict[int, Population] = {}
    for seed in asked.seeds:
        for name, privacy in cells().items():
            tree, key = settings(privacy, seed, asked), f"{name} seed {seed}"
            if key in done:
                if done[key]["settings"] != decisive(tree):
                    raise ConfigError(f"{file} has {key} with other settings: choose another --dir")
                continue
            config = parse(tree)
            if seed not in people:
                people = {seed: population_of(config)}
            result = execute(experiment_of(config, people[seed]))
            done[key] = {
                "cell": name,
                "seed": seed,
                "settings": decisive(tree),
                "commit": commit(),
                "privacy": result.summary.get("privacy", {}),
                "accuracy": result.summary["received"]["accuracy"],
                "curve": {
                    str(e["round"]): e["received"]["accuracy"]
                    for e in result.history
                    if "received" in e
                },
                "parameters": result.plan.start.layout.size,
                "seconds": result.summary["seconds"],
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(without_nan(done), indent=1).encode(), durable=True)
            print(f"ε {key}: {done[key]['accuracy']:.3f}, {done[key]['seconds']:.0f} s", flush=True)
    wanted = {f"{name} seed {seed}" for seed in asked.seeds for name in cells()}
    return {key: kept for key, kept in done.items() if key in wanted}


# --- the results ----------------------------------------------------------------------------------


def rows(runs: Mapping[str, Tree]) -> list[Tree]:
    """One for each cell, over all seeds."""
    found = []
    for name in cells():
        own = [kept for kept in runs.values() if kept["cell"] == name]
        scores, privacy = [kept["accuracy"] for kept in own], own[0]["privacy"]
        found.append(
            {
                "cell": name,
                "epsilon": privacy.get("epsilon") if name not in ("∞", "none") else None,
                "noise": privacy.get("noise"),
                "clip": privacy.get("clip"),
                "releases": privacy.get("releases"),
                "accuracy": statistics.mean(scores),
                "scores": scores,
            }
        )
    return found


def page(kept: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    seeds = ", ".join(map(str, kept["seeds"]))
    lines = [
        f"| ε requested | ε reported | noise multiplier z | accuracy % | seeds {seeds} |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in kept["rows"]:
        spent = "–" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        noise = "–" if row["noise"] is None else f"{row['noise']:.3g}"
        each = ", ".join(f"{100 * s:.1f}" for s in row["scores"])
        lines.append(
            f"| {row['cell']} | {spent} | {noise} | {100 * row['accuracy']:.1f} | {each} |"
        )
    own = kept["settings"]
    notes = [
        f"- {own['clients']} clients of 70 images each, IID; {own['parameters']} weights; FedAvg, "
        f"{own['rounds']} rounds; Poisson sampling with q = {own['cohort']:g}; δ = "
        f"{own['delta']:.3g}; add or remove one client.",
        f"- Changes are clipped to {own['clip']:g}, chosen on {own['tuning']}. That choice is not "
        "covered by ε.",
        f"- ∞: clipping, and noise with a multiplier of {UNNOISED:g}, which hides nothing. none: "
        "FedAvg without clipping and noise.",
        "- Scores, and the choice of settings, use test and validation images without noise. The "
        "noise is simulated from a known seed, so these runs protect no one.",
        "",
        "![accuracy against ε](privacy_curve.svg)",
        "",
        f"- commit {', '.join(kept['commits'])}, {kept['date']}, torch {kept['torch']}",
    ]
    return as_page("Accuracy against ε, client-level", dict(kept), lines, notes)


def figure(table: Sequence[Tree]) -> Any:
    """Accuracy over ε, with two lines for the accuracy without noise and without clipping."""
    import plotly.graph_objects as go

    noised = [row for row in table if row["epsilon"] is not None]
    picture = go.Figure()
    picture.add_scatter(
        x=[row["epsilon"] for row in noised for _ in row["scores"]],
        y=[round(100 * s, 2) for row in noised for s in row["scores"]],
        mode="markers", marker={"color": "#0072B2", "symbol": "circle-open", "size": 7},
        name="each seed",
    )  # fmt: skip
    picture.add_scatter(
        x=[row["epsilon"] for row in noised],
        y=[round(100 * row["accuracy"], 2) for row in noised],
        mode="lines", line={"color": "#0072B2", "width": 2}, name="mean",
    )  # fmt: skip
    ends = [noised[0]["epsilon"], noised[-1]["epsilon"]]
    for name, dash, title in (("∞", "dash", "clipped, no noise"), ("none", "dot", "FedAvg")):
        level = next(row["accuracy"] for row in table if row["cell"] == name)
        picture.add_scatter(
            x=ends, y=[round(100 * level, 2)] * 2, mode="lines", name=title,
            line={"color": "#000000", "dash": dash, "width": 1.5},
        )  # fmt: skip
    picture.update_xaxes(
        title="ε of the whole run",
        type="log",
        tickvals=list(EPSILONS),
        ticktext=[f"{e:g}" for e in EPSILONS],
    )
    picture.update_yaxes(title="accuracy %, mean over clients")
    picture.update_layout(
        title={"text": "Client-level privacy, Fashion-MNIST, 1,000 clients", "font": {"size": 16}},
        template="plotly_white", width=720, height=440,
        font={"family": "Arial, Helvetica, sans-serif", "size": 13},
        margin={"l": 60, "r": 20, "t": 60, "b": 100},
        legend={"orientation": "h", "x": 0.5, "xanchor": "center", "y": -0.2},
    )  # fmt: skip
    return picture


# --- the command ---------------------------------------------------------------------------------


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"), help="the data's")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", type=Path, default=Path("runs", "bench-privacy-curve"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)
    runs, code = ended(lambda: all_runs(asked))
    if code:
        return code
    more = "" if asked.rounds == ROUNDS else f" --rounds {asked.rounds}"
    if asked.seeds != list(SEEDS):
        more += f" --seeds {' '.join(map(str, asked.seeds))}"
    noised = next(run for run in runs.values() if run["cell"] == "8")
    table = rows(runs)
    kept = {
        "command": f"python benchmarks/privacy_curve.py --folder DATA{more}",
        "settings": {
            "data": "fashion-mnist",
            "clients": CLIENTS,
            "cohort": COHORT,
            "rounds": asked.rounds,
            "clip": CLIP,
            "tuning": TUNING,
            "delta": noised["privacy"]["delta"],
            "parameters": noised["parameters"],
            "all": noised["settings"],
        },
        "seeds": asked.seeds,
        "commits": list(dict.fromkeys(run["commit"] for run in runs.values())),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(sum(run["seconds"] for run in runs.values()), 1),
        "rows": table,
        "runs": runs,
    }
    target = asked.results / "privacy_curve"
    write(target, kept, page(kept))
    try:
        figure(table).write_image(target.with_suffix(".svg"))
    except Exception as error:  # no kaleido, no browser, or one that does not start
        print(f"no SVG: {str(error).strip().splitlines()[0]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
