"""DC-PFL's table II: accuracy, rounds and seconds to convergence at three levels of heterogeneity.

    python benchmarks/dc_pfl_table.py --folder DATA    # within an hour on two cores

Fashion-MNIST, 50 clients of 300 samples each, a main and a second class for each client; all
clients in every round, the 2-conv 3-FC network, 5 epochs of batches of 32 (scenarios
``dc-pfl/fmnist-…``). Low, mid and high are thirds of the range of label divergence over 100 drawn
partitions. A run ends when the validation score has not risen by more than 0.1 point in 20 rounds,
after 60 at the latest; its seconds are those until then, the 20 rounds included. Seconds are
simulated: links of 2 Mbit/s both ways, and 1,000 samples a second, at which FedAvg's round is
computation for about the same part as in the paper (nearly a half).

What differs from the paper: a client has 300 samples, not up to 1,200, so a round has a quarter of
the steps. The learning rate, which the paper does not give, is therefore 0.05 and not the
scenario's 0.01; Per-FedAvg's outer rate β is 0.05 too, and not its usual 0.001. Both were chosen by
validation scores on seed 7, mid, which is not among the results: FedAvg after 20 rounds 0.644 with
0.01 and 0.735 with 0.05; Per-FedAvg after 10 rounds 0.188 with its usual α = 0.01 and β = 0.001,
0.808 with β = 0.05, 0.636 with both 0.05. No other method was tuned, nor was DC-PFL.

Each finished run is one file in the folder of the runs. If the script is killed, call it again: it
continues from the last round. The table goes to ``benchmarks/results/dc_pfl_table.json`` and
``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from coterie.core.tree import write_atomic
from coterie.data import Population
from coterie.data.heterogeneity import describe
from coterie.errors import ConfigError
from coterie.experiment.compare.compare import folder_of, method_list
from coterie.experiment.config import experiment_of, parse, population_of
from coterie.experiment.experiment import execute
from coterie.experiment.scenarios import scenario
from coterie.results.rundir import RunDir, without_nan
from coterie.results.toml import read_toml
from methods import RESULTS, as_page, commit, ended, machine

Tree = dict[str, Any]

LEVELS = ("low", "mid", "high")
METHODS = "local,fedavg,per-fedavg:beta=0.05,clusterfl,dc-pfl"
OURS = "dc-pfl"  # the method that ratios refer to
NAMES = {
    "local": "Standalone",
    "fedavg": "FedAvg",
    "per-fedavg": "Per-FedAvg",
    "clusterfl": "ClusterFL",
    "dc-pfl": "DC-PFL",
}
CLIENTS, SAMPLES, LR, ROUNDS = 50, 300, 0.05, 60
STOP = {"patience": 20, "gain": 0.001}
CLOCK = {
    "name": "links",
    "rate_up": 2.0,
    "rate_down": 2.0,
    "compute": "samples",
    "samples_per_second": 1000.0,
}
PAPER = "Liu et al., Dynamic Clustering for Personalized Federated Learning (DC-PFL), table II"
TABLE = """
low  local      0.810  -   -  114
low  fedavg     0.876 79 268  506
low  per-fedavg 0.890 58 197  431
low  clusterfl  0.901 61 207  391
low  dc-pfl     0.925 57  73  265
mid  local      0.808  -   -  120
mid  fedavg     0.852 82 262  512
mid  per-fedavg 0.873 61 207  444
mid  clusterfl  0.879 64 214  409
mid  dc-pfl     0.913 60  78  290
high local      0.802  -   -  119
high fedavg     0.801 91 309  582
high per-fedavg 0.845 72 245  501
high clusterfl  0.852 70 233  448
high dc-pfl     0.896 64  82  310
"""
FIGURES = ("accuracy", "rounds", "communication", "total")  # the table's columns


# --- runs ----------------------------------------------------------------------------------------


def settings(level: str, name: str, parameters: Tree, asked: argparse.Namespace, seed: int) -> Tree:
    """The scenario's tables with this benchmark's changes."""
    tree = scenario(f"dc-pfl/fmnist-{level}").tree(name)
    tree["data"] |= {"clients": CLIENTS, **({"folder": asked.folder} if asked.folder else {})}
    tree["partition"]["size"] = SAMPLES
    tree["method"] |= parameters
    tree["train"]["lr"] = LR
    tree["run"] |= {"rounds": asked.rounds, "seed": seed}
    tree["evaluation"] = {"adapt_epochs": 0}  # Per-FedAvg adapts by its own step
    return {**tree, "clock": dict(CLOCK), "stop": dict(STOP)}


def decisive(tree: Mapping[str, Any]) -> Tree:
    """All settings that a result depends on, as JSON has them."""
    full = parse(tree).model_dump()
    full["data"].pop("folder")
    for key in ("engine", "workers", "device", "checkpoint_every"):
        full["run"].pop(key)
    found: Tree = json.loads(json.dumps(full))
    return found


def carry_out(place: Path, title: str, tree: Tree, people: Callable[[], Population]) -> Tree:
    """The kept figures of a run: from its file, or from running or resuming it first.

    ``people`` are asked for only if anything is left to do.
    """
    key = folder_of(title)
    file, run, wanted = place / f"{key}.json", RunDir(place / key), decisive(tree)
    if file.exists():
        kept: Tree = json.loads(file.read_text())
        same_settings(file, kept["settings"], wanted)
        return kept
    begun = run.config.exists()
    if begun:
        same_settings(run.path, decisive(read_toml(run.config)), wanted)
    else:
        run.discard()  # it was stopped before it saved anything, or never started
    print(f"{title}: {'going on' if begun else 'begins'}", flush=True)
    result = execute(experiment_of(parse(tree), people()), run.path, resume=begun)
    layout = result.plan.start.layout
    kept = {
        "title": title,
        "settings": wanted,
        "commit": commit(),
        "model_bytes": 4 * layout.only(layout.shareable).size,
        "divergence": describe(result.plan.population)["kl"],
        "begun": {k: v for k, v in result.begun.items() if k != "notes"},
        "summary": dict(result.summary),
        "history": [slim(event) for event in result.history],
    }
    write_atomic(file, json.dumps(without_nan(kept), indent=1).encode(), durable=True)
    return kept


def same_settings(place: Path, kept: Tree, wanted: Tree) -> None:
    """Refuse to mix runs with different settings."""
    flat = [
        {f"{table}.{key}": value for table, own in tree.items() for key, value in own.items()}
        for tree in (kept, wanted)
    ]
    differ = [k for k in {**flat[0], **flat[1]} if flat[0].get(k) != flat[1].get(k)]
    if differ:
        one = differ[0]
        raise ConfigError(
            f"{place} was made with {one} = {flat[0].get(one)}, not {flat[1].get(one)}: choose "
            "another folder with --dir, or remove that one"
        )


def slim(event: Mapping[str, Any]) -> Tree:
    """A round without its cohort and the method's notes."""
    return {k: v for k, v in event.items() if k not in ("notes", "cohort", "client_bytes")}


def content(event: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of arrays that were sent down and up in a round, without headers."""
    moved = [b for kind, b in event.get("kinds", {}).items() if kind not in ("header", "losses")]
    return sum(down for down, _ in moved), sum(up for _, up in moved)


# --- the table -----------------------------------------------------------------------------------


def published(table: str = TABLE) -> dict[tuple[str, str], dict[str, float | None]]:
    """The paper's figures by level and method."""
    found = {}
    for level, name, *cells in (line.split() for line in table.strip().splitlines()):
        numbers = [None if cell == "-" else float(cell) for cell in cells]
        found[level, name] = dict(zip(FIGURES, numbers, strict=True))
    return found


def figures(kept: Tree) -> dict[str, Any]:
    """What a run contributes to the table.

    A round of communication is one in which any client's weights travel to the server.
    """
    summary, clock = kept["summary"], kept["summary"]["clock"]
    talked = sum(content(event)[1] > 0 for event in kept["history"])
    return {
        "accuracy": summary[summary["headline"]][summary["judged_by"]],
        "rounds": talked or None,
        "communication": clock["communication"] if talked else None,
        "total": clock["total"],
        "computation": clock["computation"],
        "all_rounds": summary["rounds"],
        "converged": bool(summary["stopped"]),
        "groups": summary["groups"],
        "bytes": summary["bytes"]["down"] + summary["bytes"]["up"],
        "seconds": summary["seconds"],
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def rows(runs: Sequence[tuple[str, str, str, Tree]]) -> list[Tree]:
    """A row for each level and method, its figures means over seeds.

    ``runs`` are levels, titles, names and kept figures.
    """
    paper, found = published(), dict[tuple[str, str], Tree]()
    for level, title in dict.fromkeys((level, title) for level, title, _, _ in runs):
        own = [(name, kept) for lev, t, name, kept in runs if (lev, t) == (level, title)]
        name, each = own[0][0], [figures(kept) for _, kept in own]
        known = [*FIGURES, "computation", "all_rounds", "groups", "bytes", "seconds"]
        row: Tree = {"level": level, "method": title, "name": name, "seeds": len(own)}
        row |= {key: mean(f[key] for f in each) for key in known}
        row["spread"] = statistics.stdev(f["accuracy"] for f in each) if len(each) > 1 else None
        row["converged"] = sum(f["converged"] for f in each)
        row["divergence"] = mean(kept["divergence"] for _, kept in own)
        row["paper"] = paper.get((level, name))
        found[level, title] = row
    for row in found.values():
        row["ratio"] = ratio(row, [r for r in found.values() if r["level"] == row["level"]])
        if row["paper"]:
            row["paper"]["ratio"] = row["paper"]["total"] / paper[row["level"], OURS]["total"]
    return list(found.values())


def ratio(row: Tree, same_level: Sequence[Tree]) -> float | None:
    """A row's total seconds to DC-PFL's, if that was run."""
    ours = [r["total"] for r in same_level if r["name"] == OURS]
    return row["total"] / ours[0] if ours else None


def page(kept: Mapping[str, Any]) -> str:
    """The table as Markdown, the paper's figures in brackets."""
    head = ("divergence", "method", "accuracy", "communication rounds", "communication s")
    lines = [
        f"| {' | '.join((*head, 'total s', 'to DC-PFL'))} |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in kept["rows"]:
        paper = row["paper"] or {}
        late = "" if row["converged"] == row["seeds"] else "†"
        cells = [
            f"{row['level']} ({row['divergence']:.2f})",
            f"{NAMES.get(row['name'], row['name'])}{late}",
            beside(row["accuracy"], paper.get("accuracy"), "{:.3f}"),
            beside(row["rounds"], paper.get("rounds"), "{:.0f}"),
            beside(row["communication"], paper.get("communication"), "{:.0f}"),
            beside(row["total"], paper.get("total"), "{:.0f}"),
            beside(row["ratio"], paper.get("ratio"), "×{:.2f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    limit = kept["settings"]["rounds"]
    told = [
        f"- In brackets: {PAPER}.",
        f"- † Some runs did not converge within {limit} rounds; their seconds are those of {limit} "
        "rounds.",
        "- Divergence: the mean over pairs of clients, in nats, of labels mixed with 0.1 % of the "
        "uniform distribution; the paper's is scaled by another factor.",
        f"- {', '.join(dict.fromkeys(row['method'] for row in kept['rows']))}; learning rate "
        f"{kept['settings']['lr']}",
        f"- seeds {', '.join(map(str, kept['seeds']))}; commit {', '.join(kept['commits'])}, "
        f"{kept['date']}, torch {kept['torch']}",
    ]
    return as_page("DC-PFL's table II: Fashion-MNIST", dict(kept), lines, told)


def beside(ours: float | None, theirs: float | None, form: str) -> str:
    """Two figures, the paper's in brackets; a dash for none."""
    both = ["–" if value is None else form.format(value) for value in (ours, theirs)]
    return "–" if both == ["–", "–"] else f"{both[0]} ({both[1]})"


# --- the command ---------------------------------------------------------------------------------


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"), help="the data's")
    parser.add_argument("--levels", type=lambda t: t.split(","), default=list(LEVELS))
    parser.add_argument("--methods", default=METHODS, help="as for coterie compare")
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", type=Path, default=Path("runs", "bench-dc-pfl-table"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table goes")
    asked = parser.parse_args(words)
    wrong = [level for level in asked.levels if level not in LEVELS]
    if wrong:
        parser.error(f"--levels: there is no level {wrong[0]}; they are {', '.join(LEVELS)}")
    return asked


def all_runs(asked: argparse.Namespace) -> list[tuple[str, str, str, Tree]]:
    """Every requested run, from its file or run now; one population for a level and seed."""
    found = []
    for level in asked.levels:
        for seed in asked.seeds:
            people: list[Population] = []
            for title, name, parameters in method_list(asked.methods):
                tree = settings(level, name, parameters, asked, seed)

                def population(tree: Tree = tree, people: list[Population] = people) -> Population:
                    people[:] = people or [population_of(parse(tree))]
                    return people[0]

                kept = carry_out(asked.dir, f"{level} {title} seed={seed}", tree, population)
                found.append((level, title, name, kept))
                print(f"{kept['title']}: {in_short(figures(kept))}", flush=True)
    return found


def in_short(own: Mapping[str, Any]) -> str:
    return (
        f"{own['accuracy']:.3f} after {own['all_rounds']} rounds, {own['total']:.0f} s of the "
        f"clock; it took {own['seconds']:.0f} s"
    )


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)
    runs, code = ended(lambda: all_runs(asked))
    if code:
        return code
    command = ["python benchmarks/dc_pfl_table.py --folder DATA"]
    command += [f"--levels {','.join(asked.levels)}"] * (asked.levels != list(LEVELS))
    command += [f"--methods {asked.methods}"] * (asked.methods != METHODS)
    command += [f"--seeds {','.join(map(str, asked.seeds))}"] * (asked.seeds != [0])
    command += [f"--rounds {asked.rounds}"] * (asked.rounds != ROUNDS)
    kept = {
        "command": " ".join(command),
        "paper": PAPER,
        "settings": {
            "clients": CLIENTS,
            "samples": SAMPLES,
            "lr": LR,
            "rounds": asked.rounds,
            "stop": STOP,
            "clock": CLOCK,
        },
        "seeds": asked.seeds,
        "commits": list(dict.fromkeys(run["commit"] for *_, run in runs)),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(sum(run["summary"]["seconds"] for *_, run in runs), 1),
        "rows": rows(runs),
    }
    write(asked.results / "dc_pfl_table", kept, page(kept))
    return 0


def write(target: Path, kept: Mapping[str, Any], text: str) -> None:
    """The figures as JSON, and as a page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(without_nan(kept), indent=1, ensure_ascii=False) + "\n"
    target.with_suffix(".json").write_text(figures)
    target.with_suffix(".md").write_text(text)
    print(f"{text}\nfigures in {target}.json and .md")


if __name__ == "__main__":
    sys.exit(main())
