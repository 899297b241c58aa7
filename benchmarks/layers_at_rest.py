"""What layer-wise aggregation saves DC-PFL, and what it costs: against itself with all layers.

    python benchmarks/layers_at_rest.py --folder DATA

Fashion-MNIST, 50 clients with a main and a second class each (``primary-secondary``), all of them
in every round, 5 epochs of batches of 32 at a learning rate of 0.05. DC-PFL runs at its defaults
and with ``alpha=1`` (the paper's NoLA); with ``--shares`` by the paper's rule, too, which gives the
curve of accuracy against bytes. Bytes are all bytes sent, probe and trial included, divided by
those of FedAvg in as many rounds.

In a round in which layers skip averaging, clients use their own layers and score higher.
Accuracies are therefore compared in rounds after which all clients have received all layers of
their group's mean: the mean of the last three. All runs, also those with ``alpha=1``, are scored in
the same rounds, since later rounds have higher scores. The other rounds are shown beside them.

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
from coterie.results.findings import rested
from dc_pfl_table import write
from methods import RESULTS, commit, machine
from rows import carried_out, commits
from user_centric_figure import draw

CLIENTS, LR, EPOCHS, BATCH = 50, 0.05, 5, 32
LAST = 3  # scores are averaged over this many full rounds at the end
START, ALPHA = 5, 3  # DC-PFL's defaults: after START rounds, every ALPHA-th is a full one
BYTES, POINTS = 0.55, 0.5  # the most bytes, relative to FedAvg's, and points that resting may cost


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
    rounds = [
        (e.get("notes", {}).get("layers", {}).get("all_due", True), e) for e in result.history
    ]
    full = {e["round"]: e["received"]["accuracy"] for _, e in rounds if is_full(e["round"])}
    pairs = zip(result.history, rested(result.history), strict=True)
    rest = [e["received"]["accuracy"] for e, rests in pairs if rests]
    assert all(whole for whole, e in rounds if is_full(e["round"]))
    total = result.summary["bytes"]
    return {
        **cell,
        "commit": commit(),
        "bytes": (total["down"] + total["up"]) / (one["down"] + one["up"]) / cell["rounds"],
        "full": statistics.mean(list(full.values())[-LAST:]),
        "full_rounds": list(full)[-LAST:],
        "resting": statistics.mean(rest[-LAST:]) if rest else None,
        "groups": len(set(result.groups.values())),
        "split_rounds": [e["round"] for _, e in rounds if "verdict" in e.get("notes", {})],
        "seconds": round(seconds, 1),
    }


def is_full(number: int) -> bool:
    """Whether all layers are due in this round, counted from 1, at DC-PFL's defaults.

    >>> [number for number in range(1, 15) if is_full(number)]
    [1, 2, 3, 4, 5, 8, 11, 14]
    """
    return number <= START or (number - 1 - START) % ALPHA == ALPHA - 1


def named(method: Mapping[str, Any]) -> str:
    if not method:
        return "defaults"
    return ", ".join(f"{k} {v:g}" for k, v in method.items())


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs of each model and setting: means over seeds, and in brackets each seed's."""
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
            with_each([r["bytes"] for r in mine], ".2f"),
            f"{100 * statistics.mean(r['full'] for r in mine):.1f}",
            with_each(gaps, "+.1f") if gaps and method != {"alpha": 1} else "–",
            f"{statistics.mean(rest):.1f}" if rest else "–",
            ", ".join(str(r["groups"]) for r in mine),
        ]
        lines.append(f"| {model} | {named(method)} | " + " | ".join(cells) + " |")
    return lines


def with_each(values: Sequence[float], form: str) -> str:
    """The mean of values, and the values.

    >>> with_each([0.5, 1.0], ".2f")
    '0.75 (0.50, 1.00)'
    """
    return f"{statistics.mean(values):{form}} ({', '.join(f'{v:{form}}' for v in values)})"


def points(rows: Sequence[Mapping[str, Any]], model: str) -> list[tuple[float, float, str]]:
    """Bytes, points against ``alpha=1`` and name of each setting of a model, means over seeds."""
    mine = [r for r in rows if r["model"] == model]
    whole = {r["seed"]: r["full"] for r in mine if r["method"] == {"alpha": 1}}
    found = []
    for text in dict.fromkeys(json.dumps(r["method"]) for r in mine):
        each = [r for r in mine if r["method"] == json.loads(text) and r["seed"] in whole]
        if each:
            gap = round(100 * statistics.mean(r["full"] - whole[r["seed"]] for r in each), 6)
            sent = statistics.mean(r["bytes"] for r in each)
            found.append((sent, gap, named(json.loads(text))))
    return sorted(found)


def best(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each model, the best setting of all within the limits, or what is nearest to both."""
    lines = []
    for model in dict.fromkeys(r["model"] for r in rows):
        rests = [p for p in points(rows, model) if p[2] != "alpha 1"]
        if not rests:
            continue
        limits = f"at most {BYTES} of FedAvg's bytes and {POINTS} points below `alpha=1`"
        both = [p for p in rests if p[0] <= BYTES and p[1] >= -POINTS]
        if both:
            sent, gap, name = max(both, key=lambda p: p[1])
            lines.append(
                f"{model}: {name} is within both limits ({limits}): {sent:.2f}, {gap:+.1f}."
            )
            continue
        text = f"{model}: no setting is within both limits ({limits})"
        cheap = [p for p in rests if p[0] <= BYTES]
        close = [p for p in rests if p[1] >= -POINTS]
        if cheap:
            sent, gap, name = max(cheap, key=lambda p: p[1])
            text += (
                f"; of those within the bytes, {name} is the most accurate: {sent:.2f}, {gap:+.1f}"
            )
        if close:
            sent, gap, name = min(close)
            text += f"; of those within the points, {name} sends the least: {sent:.2f}, {gap:+.1f}"
        lines.append(f"{text}.")
    return lines


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """The points of each model for which several shares were measured."""
    every = {m: points(rows, m) for m in dict.fromkeys(r["model"] for r in rows)}
    return {m: p for m, p in every.items() if sum(n.startswith("share") for _, _, n in p) > 1}


def drawn(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Points of accuracy against bytes, with a line over the shares of each model."""
    from plotly.graph_objects import Figure

    figure = Figure()
    looks = (("#0072B2", "circle"), ("#D55E00", "diamond"), ("#009E73", "square"))
    for (model, settings), (colour, symbol) in zip(curves(rows).items(), looks, strict=False):
        for mode, wanted in (("lines+markers+text", True), ("markers+text", False)):
            chosen = [p for p in settings if p[2].startswith("share") == wanted]
            figure.add_scatter(
                x=[p[0] for p in chosen],
                y=[p[1] for p in chosen],
                text=[p[2] for p in chosen],
                mode=mode,
                name=model,
                showlegend=wanted,
                textposition="bottom center" if wanted else "top center",
                line_color=colour,
                marker={"color": colour, "symbol": symbol, "size": 9 if wanted else 12},
            )
    figure.add_hline(y=-POINTS, line_dash="dot", line_color="#999999")
    figure.add_vline(x=BYTES, line_dash="dot", line_color="#999999")
    figure.update_xaxes(title_text="bytes, relative to FedAvg's")
    figure.update_yaxes(title_text="received in full rounds: points above alpha 1")
    return figure.update_layout(template="plotly_white", width=900, height=480)


def page(kept: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    rows = kept["rows"]
    seeds = sorted({r["seed"] for r in rows})
    return "\n".join(
        [
            "# Layer-wise aggregation: what it saves, and what it costs",
            "",
            f"```sh\n{kept['command']}\n```",
            "",
            f"Fashion-MNIST, {CLIENTS} clients, a main and a second class each, "
            f"{rows[0]['samples'] // CLIENTS} samples a client, {rows[0]['rounds']} rounds of "
            f"{EPOCHS} epochs, seeds {', '.join(map(str, seeds))}. Accuracies are means of the "
            f"last {LAST} rounds of their kind, with `alpha` 1 of the same full rounds as the "
            f"others. {commits(rows)}, {kept['date']}, "
            f"{kept['machine']}.",
            "",
            *table(rows),
            "",
            "In brackets: each seed. A client that is alone in its group sends nothing, so runs "
            "that end with other groups differ in bytes for that reason, too.",
            "",
            *(f"- {line}" for line in best(rows)),
            "",
            *(["![Accuracy against bytes](layers_at_rest.svg)", ""] if curves(rows) else []),
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
    if any(r["method"] == {"alpha": 1} and "full_rounds" not in r for r in rows):
        parser.error(
            f"{asked.runs} has rows with alpha 1 that were scored in later rounds than "
            "the others: remove them, and call again"
        )
    shares = f" --shares {asked.shares}" if asked.shares else ""
    kept = {
        "command": f"python benchmarks/layers_at_rest.py --folder DATA{shares}",
        "date": date.today().isoformat(),
        "machine": machine(),
        "rows": rows,
    }
    write(asked.results / "layers_at_rest", kept, page(kept))
    if curves(rows):
        draw(asked.results / "layers_at_rest", drawn(rows))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
