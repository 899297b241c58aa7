"""The command ``coterie groups``: do the clients fall into groups, and does grouping pay?"""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.options import (
    FLAGS,
    ConfigFile,
    Quiet,
    ScenarioName,
    Sets,
    StandIn,
    chosen_of,
    err,
    flagged,
    out,
    resolve,
    show,
    tell,
    warn,
)

if TYPE_CHECKING:
    from coterie.data import Population
    from coterie.experiment.find_groups import FoundGroups

# Options of a run that do not concern its clients and their data.
_NO_FLAGS = (
    *("method", "rounds", "cohort", "holdout", "admit_epochs", "clock", "outliers"),
    *("alone", "target", "secure", "epsilon", "reveal"),
)
_OF_DATA = {"data", "folder", "clients", "partition", "shift", "seed"}
PictureFile = Annotated[Path | None, typer.Option(help="Also write a figure to this HTML file.")]


@flagged(after="picture", without=_NO_FLAGS)
def groups(
    config: ConfigFile = None,
    by: Annotated[
        str,
        typer.Option(help="What to compare: final-layer, model, gradient, labels, data or all."),
    ] = "final-layer",
    seeds: Annotated[
        int, typer.Option(min=1, help="How many times to split the data into halves.")
    ] = 3,
    probe_steps: Annotated[
        int | None, typer.Option(min=1, help="Local training steps before models are compared.")
    ] = None,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Do not test whether training in groups pays.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="Write the groups to this JSON file, for the method known-groups."
        ),
    ] = None,
    picture: PictureFile = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    **flags: Any,
) -> None:
    """Find out whether clients fall into groups, how certain that is, and whether it pays."""
    from coterie.data import describe
    from coterie.experiment.config import experiment_of, parse
    from coterie.experiment.experiment import execute
    from coterie.experiment.export import check_target
    from coterie.experiment.find_groups import FoundGroups, check_by, check_groupable, written
    from coterie.report.found_groups import page, print_groups
    from coterie.results.rundir import without_nan

    check_by(by)
    for target in filter(None, (to, picture)):
        check_target(target)
    tree = resolve(config, sets, scenario=scenario, **flags)
    chosen = chosen_of(scenario, tree, stand_in)
    tell(chosen)
    tree = _asking(tree if chosen is None else chosen.tree, by, seeds, probe_steps, not no_trial)
    experiment = experiment_of(parse(tree))
    check_groupable(experiment.population, by)
    started = time.perf_counter()
    with nullcontext() if quiet else err.status("comparing clients"):
        result = execute(experiment)
    groups_found = FoundGroups.of(result, time.perf_counter() - started)
    if to is not None:
        groups_found.to_json(to)
    if picture is not None:
        written(picture, page(groups_found))
    if as_json:
        answer = {**groups_found.to_dict(), "data": describe(experiment.population)}
        typer.echo(json.dumps(without_nan(answer)))
        return
    print_groups(out, groups_found)
    out.print()
    describe_clients(experiment.population)
    for kind, path in (("groups", to), ("picture", picture)):
        if path is not None:
            note = groups_found.told_of_file if kind == "groups" else ""
            out.print(f"[bold]{kind:>7}[/]  in {escape(str(path))}{note}", soft_wrap=True)
    out.print(
        f"   [bold]next[/]  {escape(_next(groups_found, to))}", highlight=False, soft_wrap=True
    )


@flagged(after="config", without=FLAGS.keys() - _OF_DATA)
def probe(
    config: ConfigFile = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    picture: PictureFile = None,
    **flags: Any,
) -> None:
    """Describe how much clients' data differ (deprecated: use `coterie groups`)."""
    from coterie.data import label_table
    from coterie.experiment.config import parse, population_of
    from coterie.report.data_figures import label_heatmap, target_boxes

    warn("coterie probe is deprecated: coterie groups does the same and looks for groups")
    tree = resolve(config, sets, scenario=scenario, **flags)
    chosen = chosen_of(scenario, tree, stand_in)
    tell(chosen)
    population = population_of(parse(tree if chosen is None else chosen.tree))
    if picture is not None:
        true_groups = population.groups
        if population.classes is not None:
            label_heatmap(label_table(population), population.classes, true_groups, picture)
        else:
            target_boxes([c.train.y.numpy() for c in population.clients], true_groups, picture)
        out.print(f"picture in {escape(str(picture))}", soft_wrap=True)
    describe_clients(population)


def describe_clients(population: Population) -> None:
    """Print each client's data by label or target, and how much clients differ."""
    from coterie.data import describe, label_table
    from coterie.report.tables import label_picture, target_picture

    if population.classes is not None:
        show(label_picture(label_table(population), population.classes, population.groups))
    else:
        targets = [c.train.y.numpy() for c in population.clients]
        show(target_picture(targets, population.groups))
    for key, value in describe(population).items():
        if value is not None:
            name = "true groups" if key == "groups" else key.replace("_", " ")
            out.print(f"[bold]{name}[/]: {_shown(value)}", soft_wrap=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _asking(
    tree: dict[str, Any], by: str, seeds: int, steps: int | None, trial: bool
) -> dict[str, Any]:
    """The configuration of a run that only looks for groups, with all clients and no scores."""
    from coterie.experiment.find_groups import rounds_for
    from coterie.methods.group_evidence import NAME

    method: dict[str, Any] = {"name": NAME, "by": by, "seeds": seeds}
    method |= {"trial": "auto" if trial else "off"} | ({"steps": steps} if steps else {})
    run = {**tree.get("run", {}), "rounds": rounds_for(trial), "holdout": 0}
    settings = {k: v for k, v in tree.items() if k != "stop"}
    return {**settings, "method": method, "run": run, "evaluation": {"every": 0, "adapt_epochs": 0}}


# Options that coterie run does not have, and whether they take a value.
_OWN = {
    **dict.fromkeys(("--by", "--seeds", "--probe-steps", "--to", "--picture"), True),
    **dict.fromkeys(("--no-trial", "--json", "--quiet", "-q"), False),
}


def _next(groups_found: FoundGroups, to: Path | None) -> str:
    """The command to run next."""
    arguments = iter(sys.argv[2:])
    kept_arguments = []
    for argument in arguments:
        if argument.partition("=")[0] not in _OWN:
            kept_arguments.append(argument)
        elif _OWN[argument.partition("=")[0]] and "=" not in argument:
            next(arguments, None)
    if groups_found.says_little:
        return shlex.join(["coterie", "groups", *kept_arguments, "--by", "all"])
    has_groups = groups_found.evidence["groups"] > 1 and groups_found.pays is not False
    has_groups = has_groups and "min_group" not in groups_found.trial  # too small for secure sums
    if has_groups and to is not None and groups_found.own_pay is not False:
        method = ["known-groups", "--set", f"method.groups={to}"]
    else:
        method = ["fedclust" if has_groups else "fedavg"]
    return shlex.join(["coterie", "run", *kept_arguments, "--method", *method])
