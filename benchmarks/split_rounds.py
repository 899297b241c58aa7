"""When DC-PFL splits: the rounds of ten runs, beside the loss that they follow.

    python benchmarks/split_rounds.py

Digits, 20 clients whose labels differ by Dirichlet 0.3, an MLP, 90 rounds of 2 epochs, batches of
16; ten runs, two seeds at five learning rates, so that the loss falls at different speeds. DC-PFL
at its defaults: it tries groups with clear evidence after two rounds, and others when the rapid
decrease has ended. The paper's rule (``bend="absolute"``) is applied to the same losses. Losses of
rounds in which layers skip averaging do not count, because received models are then partly the
clients' own.

Figures and picture go to ``benchmarks/results/split_rounds.json``, ``.md`` and ``.html``, and
``.svg`` where kaleido and a browser are installed. The HTML takes plotly from the network.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.data import build_population, load
from coterie.methods.dc_pfl_decrease import has_ended
from dc_pfl_table import write
from methods import RESULTS, commit, machine
from rows import carried_out, commits
from user_centric_figure import draw

CLIENTS, ALPHA, ROUNDS, RATES = 20, 0.3, 90, (0.2, 0.1, 0.05, 0.02, 0.01)
SMOOTH, OBSERVE, SLEEP = 5, 3, 6  # DC-PFL's defaults, for the paper's rule on the same losses


def cells(seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every run."""
    for seed in seeds:
        for lr in RATES:
            yield {"lr": lr, "seed": seed}


def run(cell: Mapping[str, Any]) -> dict[str, Any]:
    """One run: its losses, when the decrease ended, and when groups were tried and changed."""
    torch.set_num_threads(1)
    people = build_population(
        load("digits"),
        clients=CLIENTS,
        partition="dirichlet",
        partition_params={"alpha": ALPHA},
        seed=cell["seed"],
    )
    result = coterie.simulate(
        people,
        method="dc-pfl",
        model="mlp",
        rounds=ROUNDS,
        seed=cell["seed"],
        engine="loop",
        epochs=2,
        batch_size=16,
        lr=cell["lr"],
        evaluate_every=0,
    )
    groups = [len(set(e["groups"])) for e in result.history]
    before = [1, *groups[:-1]]
    noted = [(e["round"], e["notes"]) for e in result.history]
    told = [(n, notes) for n, notes in noted if notes.get("loss") is not None]
    losses = [(n, notes["loss"], not notes.get("mixed", False)) for n, notes in told]
    return {
        **cell,
        "commit": commit(),
        "losses": losses,
        "ended": [n for n, notes in noted if notes.get("ended")],
        "tried": [n for n, notes in noted if "verdict" in notes],
        "split": [n for (n, _), a, b in zip(noted, before, groups, strict=True) if b > a],
        "groups": groups[-1],
        "paper": by_the_paper([(n, loss) for n, loss, full in losses if full]),
    }


def by_the_paper(losses: Sequence[tuple[int, float]]) -> list[int]:
    """The rounds in which the paper's rule sees an end, resting for 6 after each."""
    found: list[int] = []
    watched: list[float] = []
    for number, loss in losses:
        if found and number <= found[-1] + SLEEP:
            continue
        watched.append(loss)
        if has_ended(watched, "absolute", SMOOTH, OBSERVE):
            found.append(number)
            watched = []
    return found


def drawn(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The loss of every run, with the rounds in which its groups changed."""
    from plotly.subplots import make_subplots

    columns, lines = len(RATES), len(rows) // len(RATES)
    titles = [f"lr {r['lr']:g}, seed {r['seed']}: {r['groups']} groups" for r in rows]
    figure = make_subplots(
        lines, columns, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.02
    )
    for place, row in enumerate(rows):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        for name, colour, wanted in (
            ("loss", "#0072B2", True),
            ("layers at rest", "#B0C4DE", False),
        ):
            points = [(n, loss) for n, loss, full in row["losses"] if full == wanted]
            x, y = zip(*points, strict=True) if points else ((), ())
            mode = "lines" if wanted else "markers"
            style = {"line_color": colour, "marker": {"color": colour, "size": 3}}
            figure.add_scatter(x=x, y=y, mode=mode, name=name, showlegend=not place, **style, **at)
        for word, colour, dash in (("ended", "#999999", "dot"), ("split", "#D55E00", "solid")):
            for number in row[word]:
                figure.add_vline(x=number, line_color=colour, line_dash=dash, line_width=2, **at)
    for word, colour, dash in (
        ("rapid decrease over", "#999999", "dot"),
        ("split", "#D55E00", "solid"),
    ):
        figure.add_scatter(
            x=[None], y=[None], mode="lines", line={"color": colour, "dash": dash}, name=word
        )
    figure.update_xaxes(title_text="round", row=lines)
    figure.update_yaxes(title_text="loss received", col=1)
    figure.update_layout(
        template="plotly_white", width=1300, height=520, legend={"orientation": "h", "y": -0.15}
    )
    figure.update_annotations(font_size=12)
    return figure


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What happened when, run by run."""

    def told(numbers: Sequence[int]) -> str:
        return ", ".join(map(str, numbers)) or "–"

    lines = [
        "| lr | seed | rapid decrease over | groups tried | split | groups | paper's rule |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        places = [told(r[k]) for k in ("ended", "tried", "split")]
        cells = [f"{r['lr']:g}", str(r["seed"]), *places, str(r["groups"]), told(r["paper"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(kept: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    return "\n".join(
        [
            "# When DC-PFL splits",
            "",
            f"```sh\n{kept['command']}\n```",
            "",
            f"Digits, {CLIENTS} clients, Dirichlet {ALPHA}, an MLP, {ROUNDS} rounds of 2 epochs. "
            "The columns between seed and groups have rounds; so has the last column: those in "
            "which the paper's rule detects the end of a rapid decrease in the same losses. "
            f"{commits(kept['rows'])}, {kept['date']}, {kept['machine']}.",
            "",
            "![Losses and splits](split_rounds.svg)",
            "",
            *table(kept["rows"]),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="10,11")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=Path, default=Path("runs", "bench-split-rounds.jsonl"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    seeds = [int(s) for s in asked.seeds.split(",")]
    kept = {
        "command": "python benchmarks/split_rounds.py",
        "rows": carried_out(list(cells(seeds)), run, asked.runs, asked.jobs),
        "date": date.today().isoformat(),
        "machine": machine(),
    }
    target = asked.results / "split_rounds"
    write(target, kept, page(kept))
    draw(target, drawn(kept["rows"]))
    print("\n".join(table(kept["rows"])))


if __name__ == "__main__":
    main()
