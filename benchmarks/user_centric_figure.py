"""The user-centric paper's figure 6: accuracy against time for three systems of up- and downlink.

    python benchmarks/user_centric_figure.py --folder DATA    # a quarter of an hour on two cores

Label and covariate shift, a smaller version of the scenario ``user-centric/covariate``: 20 users
with 1,000 samples each instead of 100 users, in four groups whose images are rotated by different
multiples of 90°; 60 rounds; Fashion-MNIST, which is more often available than EMNIST and about as
hard. LeNet-5, with initial weights as the authors' (the scenario's ``model.init``), batches of 64,
one epoch, momentum 0.9; a learning rate of 0.05 instead of 0.01, so that 60 rounds are enough to
learn: on seed 7, which is not shown, and with PyTorch's initial weights it had the better
validation score of 0.03 and 0.05 after 25 rounds.

A round takes T_dl·(m + ρN) + T_min + H_N/μ: m models sent down one after the other, where a model
that many users receive counts once, N uploads, and the slowest of N users that compute. The three
systems are the paper's: ρ = 4 and stragglers, ρ = 2, ρ = 1. What is sent and computed is the same
in all of them, so each method runs once, with the first system's clock, and the times in the other
two follow from the parts of its rounds (``coterie.report.systems``). ``coterie report`` draws the
same figure, ``compare-systems``, for any runs with this clock. Before round 1 the user-centric rule
asks for a gradient; FedFomo sends each client 5 models in a round. SCAFFOLD needs 5 epochs:
--methods adds it, for more time.

Each finished run is one file in the folder of the runs; if the script is killed, call it again to
continue. The figure and the table go to ``benchmarks/results/user_centric_figure.json``, ``.md``
and ``.html``, and ``.svg`` where kaleido and a browser are installed. The HTML takes plotly from
the network.
"""

from __future__ import annotations

import argparse
import bisect
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from coterie.channel.clocks import SYSTEMS, System
from coterie.data import Population
from coterie.experiment.compare.compare import method_list
from coterie.experiment.config import parse, population_of
from coterie.experiment.scenarios import scenario
from coterie.report import systems
from coterie.report.figures.systems import by_system, heading
from coterie.report.reading import Reading
from dc_pfl_table import Tree, carry_out, write
from methods import RESULTS, as_page, ended, machine

SCENARIO = scenario("user-centric/covariate")
METHODS = "user-centric,user-centric:streams=4,oracle,cfl,fedfomo,fedavg,local"
USERS, SAMPLES, LR, ROUNDS = 20, 1000, 0.05, 60
MEASURED = 1  # the system whose clock the runs have
OURS = "user-centric streams=4"


# --- runs ----------------------------------------------------------------------------------------


def settings(name: str, parameters: Tree, asked: argparse.Namespace) -> Tree:
    """The scenario's tables with this benchmark's changes."""
    tree = SCENARIO.tree(name, asked.data)
    folder = {"folder": asked.folder} if asked.folder else {}
    tree["data"] |= {"clients": USERS, "samples": USERS * SAMPLES, **folder}
    tree["method"] |= parameters
    tree["train"]["lr"] = LR
    tree["run"] |= {"rounds": asked.rounds, "seed": asked.seed}
    tree["evaluation"] = {"adapt_epochs": 0}
    tree["clock"] = {"name": "wireless", "system": MEASURED}
    return tree


def all_runs(asked: argparse.Namespace) -> dict[str, Tree]:
    """Every requested run, from its file or run now, all on one population."""
    people: list[Population] = []
    found = {}
    for title, name, parameters in method_list(asked.methods):
        tree = settings(name, parameters, asked)

        def population(tree: Tree = tree) -> Population:
            people[:] = people or [population_of(parse(tree))]
            return people[0]

        found[title] = carry_out(asked.dir, title, tree, population)
        seconds, last = found[title]["summary"]["seconds"], scores(found[title])[-1]
        print(f"{title}: {last:.3f}, {seconds:.0f} s", flush=True)
    return found


# --- time ----------------------------------------------------------------------------------------


def reading(title: str, kept: Tree) -> Reading:
    """The kept figures of a run in the form that reports read: all users answer in every round."""
    everybody = list(range(USERS))
    begun = {**kept["begun"], "event": "init", "groups": everybody}
    return Reading(
        title,
        "finished",
        config={"clock": {"name": "wireless", "system": MEASURED}},
        events=[begun, *({**event, "cohort": everybody} for event in kept["history"])],
        result={**kept["summary"], "method": title.split()[0]},
        sessions=[{"model_bytes": kept["model_bytes"]}],
    )


def times(kept: Tree, system: System) -> list[float]:
    """When each round ends, in units of T_dl."""
    return list(systems.times(reading("run", kept), system).values())


def scores(kept: Tree) -> list[float]:
    """The accuracy after each round, the mean over users' test data."""
    summary = kept["summary"]
    return [event[summary["headline"]][summary["judged_by"]] for event in kept["history"]]


def reached(ends: Sequence[float], found: Sequence[float], time: float) -> float | None:
    """The accuracy of the last round that has ended by a given time; None before the first.

    A round that misses the time by no more than rounding counts.
    """
    at = bisect.bisect_right(ends, time * (1 + 1e-9))
    return found[at - 1] if at else None


# --- the results ----------------------------------------------------------------------------------


def rows(runs: Mapping[str, Tree]) -> list[Tree]:
    """For each method and system: the duration of a round, and the accuracy at two common times.

    These are the times that FedAvg takes for half of its rounds and for all of them.
    """
    base = runs.get("fedavg") or next(iter(runs.values()))
    found = []
    for title, kept in runs.items():
        own: Tree = {"method": title, "rounds": len(kept["history"])}
        own["accuracy"] = scores(kept)[-1]
        own["paper"] = SCENARIO.figures.get(title)
        own["systems"] = {}
        for number, system in SYSTEMS.items():
            mine, fedavg = times(kept, system), times(base, system)
            own["systems"][str(number)] = {
                "round": systems.load_of(kept["history"][-1], kept["model_bytes"], USERS).lasts(
                    system, USERS
                ),
                "half": reached(mine, scores(kept), fedavg[(len(fedavg) - 1) // 2]),
                "end": reached(mine, scores(kept), fedavg[-1]),
                "times": mine,
            }
        found.append({**own, "curve": scores(kept)})
    return found


def figure(runs: Mapping[str, Tree], title: str) -> Any:
    """Three panels, one a system, over the time in which FedAvg does all its rounds."""
    picture = by_system([reading(name, kept) for name, kept in runs.items()]).figure()
    return picture.update_layout(title={"text": title}, width=1100)


def standing(table: Sequence[Tree], ours: str = OURS, base: str = "fedavg") -> list[str]:
    """How user-centric aggregation with four streams stands against FedAvg at the end."""
    by_name = {row["method"]: row["systems"] for row in table}
    if ours not in by_name or base not in by_name:
        return []
    told = []
    for number, system in SYSTEMS.items():
        mine, other = (by_name[name][str(number)]["end"] for name in (ours, base))
        head = f"system {number} ({heading(system)}), when {base} has done all its rounds: {ours} "
        if mine is None:
            told.append(f"{head}has not done a round")
            continue
        gap = round(100 * (mine - other), 1)
        much = f"is {abs(gap):.1f} points {'above' if gap > 0 else 'below'}"
        much = much if gap else "is the same as"
        told.append(f"{head}{much} {base} ({share(mine)} and {share(other)} %)")
    return told


def page(kept: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    head = ["method", "accuracy", "paper"]
    for number, system in SYSTEMS.items():
        head += [f"system {number}: {heading(system)}: round", "half", "end"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in kept["rows"]:
        cells = [row["method"], share(row["accuracy"]), share(row["paper"])]
        for own in row["systems"].values():
            cells += [f"{own['round']:.1f}", share(own["half"]), share(own["end"])]
        lines.append(f"| {' | '.join(cells)} |")
    told = [
        *(f"- {line}" for line in kept["standing"]),
        "- Accuracies are in per cent, means over users' own test data. The paper's are for EMNIST "
        f"and 100 users ({SCENARIO.paper}, table I), these for {kept['settings']['data']} and "
        f"{USERS} users.",
        "- round: the duration of the last round, in units of T_dl. half, end: the accuracy at the "
        "time when FedAvg has finished half of its rounds, and all of them.",
        f"- learning rate {kept['settings']['lr']}, {kept['settings']['rounds']} rounds",
        f"- seed {kept['seed']}; commit {', '.join(kept['commits'])}, {kept['date']}, torch "
        f"{kept['torch']}",
    ]
    return as_page("The user-centric paper's figure 6", dict(kept), lines, told)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def draw(target: Path, picture: Any) -> None:
    """Write the figure as HTML, and as SVG if kaleido and a browser are installed."""
    picture.write_html(target.with_suffix(".html"), include_plotlyjs="cdn")
    try:
        picture.write_image(target.with_suffix(".svg"))
    except Exception as error:  # no kaleido, no browser, or one that does not start
        print(f"no SVG: {str(error).strip().splitlines()[0]}", file=sys.stderr)


# --- the command ---------------------------------------------------------------------------------


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"), help="the data's")
    parser.add_argument("--data", default="fashion-mnist", help="the data set")
    parser.add_argument("--methods", default=METHODS, help="as for coterie compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", type=Path, default=Path("runs", "bench-user-centric-figure"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)

    def work() -> tuple[Any, Any]:
        runs = all_runs(asked)
        return runs, rows(runs)

    found, code = ended(work)
    if code:
        return code
    runs, table = found
    usual = arguments([])
    changed = [k for k in ("data", "methods", "seed", "rounds") if vars(asked)[k] != vars(usual)[k]]
    more = "".join(f" --{k} {vars(asked)[k]}" for k in changed)
    kept = {
        "command": f"python benchmarks/user_centric_figure.py --folder DATA{more}",
        "paper": f"{SCENARIO.paper}, figure 6",
        "settings": {
            "data": asked.data,
            "users": USERS,
            "samples": SAMPLES,
            "lr": LR,
            "rounds": asked.rounds,
            "systems": {str(k): s._asdict() for k, s in SYSTEMS.items()},
        },
        "seed": asked.seed,
        "commits": list(dict.fromkeys(run["commit"] for run in runs.values())),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        "seconds": round(sum(run["summary"]["seconds"] for run in runs.values()), 1),
        "standing": standing(table),
        "rows": table,
    }
    target = asked.results / "user_centric_figure"
    write(target, kept, page(kept))
    draw(target, figure(runs, f"Accuracy against time, {USERS} users, {asked.data} in 4 rotations"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
