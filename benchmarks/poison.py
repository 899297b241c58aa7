"""What a poisoned update does under each ``run.outliers``, and how long honest updates are.

    python benchmarks/poison.py    # about ten minutes on one core

Digits, the default model. In the first table one client of ten sends, in every round, a different
model from the one that it trained:

- 1e30: every number is 1e30;
- NaN: every number is NaN;
- 100-fold: its change times 100;
- sign-flipped: its change times -1; and times -10.

In the second table all clients are honest. It gives the longest change of an honest client relative
to the limit of "reject", which justifies that limit: clients of 25 and of 5,000 training samples,
with one epoch and five, with momentum; clients that have nearly converged beside one that has other
labels or takes part rarely.

The figures go to ``benchmarks/results/poison.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import coterie
from coterie.channel import outliers
from coterie.channel.outliers import BOUND, LEAST, MOVES, OUTLIERS, lengths, limit
from coterie.core.weights import Weights
from coterie.errors import TrainingError
from coterie.methods import make
from dc_pfl_table import write
from methods import RESULTS, as_page, commit, machine

SEEDS = (40, 41, 42)  # the limit was not chosen on these
CLIENTS, SAMPLES, ROUNDS, BAD = 10, 140, 15, 3
SCHEDULE = {"epochs": 2, "batch_size": 16, "lr": 0.1}
ATTACKED: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "median": {},
}
Attack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # trained, received
ATTACKS: Mapping[str, Attack | None] = {
    "none": None,
    "1e30": lambda trained, sent: torch.full_like(trained, 1e30),
    "NaN": lambda trained, sent: torch.full_like(trained, float("nan")),
    "100-fold": lambda trained, sent: sent + 100 * (trained - sent),
    "sign-flipped": lambda trained, sent: 2 * sent - trained,
    "sign-flipped, 10-fold": lambda trained, sent: sent - 10 * (trained - sent),
}
ONE_LARGE = [36] * 9 + [7150]  # of which seven tenths are for training
HONEST: Mapping[str, Mapping[str, Any]] = {
    "25 and 5,000 samples": {"sizes": ONE_LARGE, "rounds": 5},
    "the same, 5 epochs": {"sizes": ONE_LARGE, "rounds": 3, "epochs": 5, "lr": 0.01},
    "the same, momentum 0.9": {"sizes": ONE_LARGE, "rounds": 3, "momentum": 0.9},
    "one with other labels, late": {
        "sizes": [140] * 10,
        "odd": True,
        "rounds": 20,
        "epochs": 5,
        "lr": 0.3,
    },
    "the same, four of ten a round": {
        "sizes": [140] * 10,
        "odd": True,
        "rounds": 20,
        "cohort": 0.4,
        "epochs": 5,
        "lr": 0.3,
    },
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fednova": {},
    "scaffold": {},
    "feddyn": {},
    "ifca": {"k": 2},
    "fedclust": {},
    "cfl": {},
    "user-centric": {},
    "fedfomo": {},
    "ditto": {},
    "per-fedavg": {},
    "fedrep": {},
}


@cache
def digits() -> coterie.data.RawData:
    """The digits, read once."""
    return coterie.data.load("digits")


def people(sizes: Sequence[int], seed: int, odd: bool = False) -> list[tuple[Any, Any]]:
    """Clients with these numbers of digits, drawn with replacement; the first may be odd."""
    raw, random = digits(), np.random.default_rng(seed)
    found = []
    for client, size in enumerate(sizes):
        rows = random.integers(len(raw.y), size=size)
        labels = (raw.y[rows] + 3) % 10 if odd and not client else raw.y[rows]
        found.append((raw.x[rows], labels))
    return found


def poisoned(method: coterie.Method, attack: Attack) -> coterie.Method:
    """The same method, in which one client sends its model as the attack changes it."""
    train = method.tasks["train"]

    def work(client: Any, arrays: Any, config: Any) -> coterie.Upload:
        upload = train(client, arrays, config)
        model = upload.arrays.get("model")
        if client.id != BAD or not isinstance(model, Weights):
            return upload
        # After the client's own check, which a malicious client would not have.
        base = arrays[upload.since["model"]].part(model.layout)
        wrong = Weights(model.layout, attack(model.vector, base.vector))
        return replace(upload, arrays={**upload.arrays, "model": wrong})

    return replace(method, tasks={**method.tasks, "train": work})


def attacked(name: str, attack: str, outliers: str, seed: int) -> dict[str, Any]:
    """The accuracy at the end, how often the client was left out, or in which round it ended."""
    method, lie = make(name, dict(ATTACKED[name])), ATTACKS[attack]
    done: list[int] = []
    scores: list[float] = []
    left_out: list[str] = []

    def watch(event: Mapping[str, Any]) -> None:
        done.append(event["round"])
        scores.extend([event["received"]["accuracy"]] if "received" in event else [])
        left_out.extend(event.get("rejected", {}))

    ended = ""
    try:
        coterie.simulate(
            people([SAMPLES] * CLIENTS, seed),
            method=method if lie is None else poisoned(method, lie),
            rounds=ROUNDS,
            seed=seed,
            engine="loop",
            outliers=outliers,
            evaluate_every=0,
            adapt_epochs=0,
            watch=watch,
            **(SCHEDULE | ({"momentum": 0.0} if name == "scaffold" else {})),
        )
    except TrainingError as error:
        ended = str(error)
    return {
        "method": name,
        "attack": attack,
        "outliers": outliers,
        "seed": seed,
        "accuracy": scores[-1] if scores else None,
        "rounds": len(done),
        "left_out": len(left_out),
        "others_left_out": len([c for c in left_out if c != str(BAD)]),
        "ended": ended,
    }


def longest(kind: str, name: str, seed: int) -> dict[str, Any]:
    """The longest honest change relative to its cohort's median, with its task and array."""
    case = dict(HONEST[kind])
    clients = people(case.pop("sizes"), seed, case.pop("odd", False))
    worst: list[tuple[float, str]] = [(0.0, "")]
    judge = outliers.too_long

    def measured(orders: Any, received: Any, sent: Any, examples: Any) -> dict[int, str]:
        for each in lengths(orders, received, sent, examples):
            share = each.length.norm / each.usual / limit(each.others, each.share, each.alike)
            worst[0] = max(worst[0], (share, f"{orders[each.client].task}: {each.place[0]}"))
        return {}

    if name == "scaffold":
        case.pop("momentum", None)
        case["lr"] = min(case.get("lr", 0.05), 0.05)  # above, it diverges by itself
    outliers.too_long = measured
    try:
        coterie.simulate(
            clients,
            method=make(name, dict(METHODS[name])),
            seed=seed,
            engine="loop",
            evaluate_every=0,
            adapt_epochs=0,
            **case,
        )
        ended = ""
    except TrainingError as error:
        ended = str(error)
    finally:
        outliers.too_long = judge
    ratio, what = worst[0]
    return {
        "kind": kind,
        "method": name,
        "seed": seed,
        "ratio": ratio,
        "what": what,
        "ended": ended,
    }


def page(kept: Mapping[str, Any]) -> str:
    """Both tables as Markdown."""
    lines = [
        f"| method | attack | {' | '.join(OUTLIERS)} |",
        "|---|---|" + "---:|" * len(OUTLIERS),
    ]
    for name in ATTACKED:
        for attack in ATTACKS:
            cells = [_cell(kept["attacks"], name, attack, how) for how in OUTLIERS]
            lines.append(f"| {name} | {attack} | {' | '.join(cells)} |")
    lines += ["", f"| honest clients | {' | '.join(METHODS)} |", "|---|" + "---:|" * len(METHODS)]
    for kind in HONEST:
        cells = []
        for name in METHODS:
            found = [r for r in kept["honest"] if (r["kind"], r["method"]) == (kind, name)]
            mark = "*" * any(r["ended"] for r in found)
            cells.append(f"{max(r['ratio'] for r in found):.2f}{mark}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    told = [
        f"- First table: received accuracy after {ROUNDS} rounds, in per cent, mean of seeds "
        f"{', '.join(map(str, SEEDS))}; {CLIENTS} clients of {SAMPLES} digits, IID, "
        f"{SCHEDULE['epochs']} epochs, batches of {SCHEDULE['batch_size']}, learning rate "
        f'{SCHEDULE["lr"]}. Client {BAD} attacks in every round. "reject" leaves out updates '
        f"that are not finite or longer than {limit(CLIENTS):,.0f} times the median (for clients "
        f'of the same size), "clip" shortens updates to {BOUND:g} times the median. '
        "In brackets: the number of rounds, of all seeds together, in which the client was left "
        "out.",
        "- A length says nothing about a direction: a change below the limit passes "
        '"reject", and "clip" bounds how far it moves the mean, but not in which direction.',
        "- Second table: the longest change of an honest client divided by its limit, over the "
        "same seeds; above 1 it would be left out. *: training diverged, no matter what was left "
        "out, and the run ended.",
        f"- commit {kept['commit']}, {kept['date']}, torch {kept['torch']}",
    ]
    return as_page("Poisoned updates", dict(kept), lines, told)


def _cell(rows: Sequence[Mapping[str, Any]], name: str, attack: str, how: str) -> str:
    found = [r for r in rows if (r["method"], r["attack"], r["outliers"]) == (name, attack, how)]
    if not found:
        return "refused"
    ended = [r for r in found if r["ended"]]
    if ended:
        return f"ended in round {min(r['rounds'] for r in ended) + 1}"
    left_out = sum(r["left_out"] for r in found)
    return f"{100 * fmean(r['accuracy'] for r in found):.1f}" + f" ({left_out})" * bool(left_out)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    began, attacks, honest = time.perf_counter(), [], []
    for name in ATTACKED:
        for attack in ATTACKS:
            for how in OUTLIERS:
                if how == "clip" and make(name, dict(ATTACKED[name])).no_clipping:
                    continue
                attacks += [attacked(name, attack, how, seed) for seed in SEEDS]
                print(name, attack, how, _cell(attacks, name, attack, how), flush=True)
    for kind in HONEST:
        for name in METHODS:
            honest += [longest(kind, name, seed) for seed in SEEDS]
            print(honest[-1], flush=True)
    kept = {
        "command": "python benchmarks/poison.py",
        "seeds": SEEDS,
        "commit": commit(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(time.perf_counter() - began, 1),
        "limit": {"moves": MOVES, "least": LEAST},
        "bound": BOUND,
        "attacks": attacks,
        "honest": honest,
    }
    write(asked.results / "poison", kept, page(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
