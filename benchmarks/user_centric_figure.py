"""The user-centric paper's figure 6: accuracy against time for three systems of up- and downlink.

    python benchmarks/user_centric_figure.py --folder DATA    # a quarter of an hour on two cores

Label and covariate shift, the scenario ``user-centric/covariate`` reduced: 20 users with 1,000
samples each instead of 100, in four groups whose images are turned by another quarter; 60 rounds;
Fashion-MNIST, at hand more often than EMNIST and about as hard. LeNet-5, its weights first drawn as
by the authors (the scenario's ``model.init``), batches of 64, one epoch, momentum 0.9; a learning
rate of 0.05 instead of 0.01, so that 60 rounds get somewhere: on seed 7, which is not shown, and
with PyTorch's first weights it had the best validation score of 0.03 and 0.05 after 25 rounds.

A round takes T_dl·(m + ρN) + T_min + H_N/μ: m models sent down one after the other, a model that
many hear counted once, N uploads, and the slowest of N users who compute. The three systems are the
paper's: ρ = 4 and stragglers, ρ = 2, ρ = 1. What is sent and computed is the same in all of them,
so each method is run once, with the first system's clock, and the rounds' parts are read off it;
the other two times follow. Before round 1 the user-centric rule asks for a gradient, FedFomo sends
each client 5 models in a round. SCAFFOLD needs 5 epochs: --methods adds it, for more time.

Each finished run is one file in the folder of the runs; what was killed goes on when the script is
called again. Figures and picture go to ``benchmarks/results/user_centric_figure.json``, ``.md`` and
``.html``, and ``.svg`` where kaleido and a browser are installed. The HTML takes plotly from the
network.
"""

from __future__ import annotations

import argparse
import bisect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from coterie.data import Population
from coterie.door.clock import SYSTEMS, System
from coterie.errors import TrainingError
from coterie.run.compare import method_list
from coterie.run.config import parse, population_of
from coterie.run.scenarios import scenario
from dc_pfl_table import Tree, carry_out, content, write
from methods import RESULTS, as_page, ended, machine

SCENARIO = scenario("user-centric/covariate")
METHODS = "user-centric,user-centric:streams=4,oracle,cfl,fedfomo,fedavg,local"
USERS, SAMPLES, LR, ROUNDS = 20, 1000, 0.05, 60
MEASURED = 1  # the system whose clock the runs have
COLOURS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7", "#E69F00", "#999999", "#56B4E9")
DASHES = ("solid", "solid", "dot", "dash", "dashdot", "longdash", "dot", "dash")


# --- runs ----------------------------------------------------------------------------------------


def settings(name: str, parameters: Tree, asked: argparse.Namespace) -> Tree:
    """The scenario's tables with what is different here."""
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
    """Every run that is asked for, done if it is not, all on one population."""
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


@dataclass(frozen=True)
class Load:
    """What a round asks of a system: models down, models up, and how often all users compute."""

    streams: float
    uploads: float
    turns: float

    def lasts(self, system: System, users: int) -> float:
        """In units of T_dl."""
        slowest = system.t_min + system.inverse_mu * harmonic(users)
        return self.streams + system.rho * self.uploads + self.turns * slowest


def harmonic(n: int) -> float:
    """1 + 1/2 + … + 1/n, the mean of the largest of n exponential delays."""
    return sum(1 / k for k in range(1, n + 1))


def load(event: Mapping[str, Any], model_bytes: int, users: int) -> Load:
    """A round's parts from the time that it took in the measured system.

    Known are the bytes sent up, and computation apart from communication; what is left of that is
    the streams. What is set up before round 1 has its bytes in one sum, headers included.
    """
    system, clock = SYSTEMS[MEASURED], event["clock"]
    if "kinds" in event:
        uploads = content(event)[1] / model_bytes
    else:
        uploads = float(round(event["bytes"]["up"] / model_bytes))
    streams = clock["communication"] - system.rho * uploads
    turns = clock["computation"] / (system.t_min + system.inverse_mu * harmonic(users))
    found = Load(tidy(streams), tidy(uploads), tidy(turns))
    if min(found.streams, found.turns) < 0 or found.turns != round(found.turns):
        raise TrainingError(
            f"the time of round {event['round']} cannot be divided into streams, uploads and "
            f"computation: {found}. Some users sat out or were lost?"
        )
    return found


def tidy(value: float) -> float:
    """Whole, if it is but for rounding."""
    return float(round(value)) if abs(value - round(value)) < 1e-6 else value


def loads(kept: Tree) -> list[Load]:
    """Of what came before round 1, then of each round."""
    before = [kept["begun"]] if "clock" in kept["begun"] else []
    return [load(e, kept["model_bytes"], USERS) for e in (*before, *kept["history"])]


def times(kept: Tree, system: System) -> list[float]:
    """When each round ends, in units of T_dl."""
    ends = list(accumulate(each.lasts(system, USERS) for each in loads(kept)))
    return ends[-len(kept["history"]) :]


def scores(kept: Tree) -> list[float]:
    """The accuracy after each round, the mean over users' test data."""
    summary = kept["summary"]
    return [event[summary["headline"]][summary["judged_by"]] for event in kept["history"]]


def reached(ends: Sequence[float], found: Sequence[float], time: float) -> float | None:
    """The accuracy of the last round that is over by then; None before the first.

    A time that is missed by no more than rounding counts.
    """
    at = bisect.bisect_right(ends, time * (1 + 1e-9))
    return found[at - 1] if at else None


# --- what is shown -------------------------------------------------------------------------------


def rows(runs: Mapping[str, Tree]) -> list[Tree]:
    """For each method and system: what a round takes, and the accuracy by two common times.

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
                "round": loads(kept)[-1].lasts(system, USERS),
                "half": reached(mine, scores(kept), fedavg[(len(fedavg) - 1) // 2]),
                "end": reached(mine, scores(kept), fedavg[-1]),
                "times": mine,
            }
        found.append({**own, "curve": scores(kept)})
    return found


def figure(table: Sequence[Tree], title: str) -> Any:
    """Three panels, one a system, over the time in which FedAvg does all its rounds.

    Who has done all rounds before, without sending anything, keeps what it has.
    """
    from plotly.subplots import make_subplots

    panels = make_subplots(
        rows=1, cols=len(SYSTEMS), shared_yaxes=True, horizontal_spacing=0.03,
        subplot_titles=[heading(s) for s in SYSTEMS.values()],
    )  # fmt: skip
    base = next((row for row in table if row["method"] == "fedavg"), table[0])
    for column, number in enumerate(SYSTEMS, start=1):
        end = base["systems"][str(number)]["times"][-1]
        for row, colour, dash in zip(table, COLOURS, DASHES, strict=False):
            x, y = row["systems"][str(number)]["times"], row["curve"]
            if x[-1] < end:
                x, y = [*x, end], [*y, y[-1]]
            panels.add_scatter(
                x=[round(t, 3) for t in x],
                y=[round(100 * score, 2) for score in y],
                name=row["method"], legendgroup=row["method"], showlegend=column == 1,
                mode="lines", line={"color": colour, "dash": dash, "width": 2},
                row=1, col=column,
            )  # fmt: skip
        panels.update_xaxes(title="time / T<sub>dl</sub>", range=[0, end], row=1, col=column)
    panels.update_yaxes(title="accuracy %, mean over users", row=1, col=1)
    panels.update_layout(
        title={"text": title, "font": {"size": 16}},
        template="plotly_white", width=1100, height=460,
        font={"family": "Arial, Helvetica, sans-serif", "size": 13},
        margin={"l": 60, "r": 20, "t": 90, "b": 110},
        legend={"orientation": "h", "x": 0.5, "xanchor": "center", "y": -0.2},
    )  # fmt: skip
    return panels


def heading(system: System) -> str:
    """A system in a few words."""
    nodes = "stragglers" if system.inverse_mu else "no stragglers"
    return f"ρ = {system.rho:g}, {nodes}"


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
        "- Accuracies in per cent, the mean over users' own test data; those of the paper are of "
        f"EMNIST and 100 users ({SCENARIO.paper}, table I), this is {kept['settings']['data']} "
        f"with {USERS}.",
        "- round: what the last one takes, in T_dl. half, end: the accuracy by the time at which "
        "FedAvg has done half of its rounds, and all.",
        f"- learning rate {kept['settings']['lr']}, {kept['settings']['rounds']} rounds",
        f"- seed {kept['seed']}; commit {', '.join(kept['commits'])}, {kept['date']}, torch "
        f"{kept['torch']}",
    ]
    return as_page("The user-centric paper's figure 6", dict(kept), lines, told)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def draw(target: Path, picture: Any) -> None:
    """HTML; and SVG, if there is what it takes."""
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
        "rows": table,
    }
    target = asked.results / "user_centric_figure"
    write(target, kept, page(kept))
    draw(
        target, figure(table, f"Accuracy against time, {USERS} users, {asked.data} in 4 rotations")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
