"""Scenarios and papers' published figures, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie.report.tables import percent
from coterie.results.rows import megabits
from coterie.results.toml import to_toml

if TYPE_CHECKING:
    from coterie.experiment.scenarios import Scenario


def published_accuracy(about: Mapping[str, Any]) -> str:
    """A published accuracy in per cent, with a double dagger where the data are different."""
    elsewhere = about["figure"] is not None and about["instead"]
    return percent(about["figure"]) + ("‡" if elsewhere else "")


def paper_notes(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines below published figures: their sources, and why a run's figures may differ."""
    if not rows:
        return []
    abouts, lines = list(rows.values()), []
    about = abouts[0]
    published = [a for a in abouts if a["figure"] is not None]
    if published:
        scores: dict[str, list[str]] = {}
        for each in published:
            scores.setdefault(each["score"], []).append(each["method"])
        lines.append(f"paper: {about['paper']}, {about['table']}; {_comparable(scores, about)}")
        if about["instead"]:
            lines.append(f"‡ ours {about['instead']}")
    if any(cost in (a.get("to_target") or {}) for a in abouts for cost in _COSTS):
        lines.append(_counted(abouts))
    return lines + _changed({row: a["changed"] for row, a in rows.items()})


def _changed(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Settings that differ from the scenario's: those of all rows first, then of single rows."""
    every = [c for c in next(iter(rows.values())) if all(c in other for other in rows.values())]
    lines = {"": every}
    whose: dict[tuple[str, ...], list[str]] = {}
    for row, changed in rows.items():
        whose.setdefault(tuple(c for c in changed if c not in every), []).append(row)
    lines |= {f" for {' and '.join(names)}": list(own) for own, names in whose.items()}
    return [f"not the scenario's settings{who}: {'; '.join(c)}" for who, c in lines.items() if c]


def _comparable(scores: Mapping[str, Sequence[str]], about: Mapping[str, Any]) -> str:
    """The scores of a run that published figures are comparable with, by method."""
    told = {
        "unknown": "it does not say whether these are received or adapted scores",
        "clustering": "the share of samples in the right cluster, which a run does not measure",
    }
    for score, words in told.items():
        if score in scores:
            return words
    newcomers = " of newcomers" * about["newcomers"]
    if len(scores) == 1:
        return f"comparable with our {next(iter(scores))} score{newcomers}"
    each = [
        f"our {score} score{newcomers} ({', '.join(dict.fromkeys(who))})"
        for score, who in scores.items()
    ]
    return f"comparable with {' and '.join(each)}"


# --- what it took to reach a target --------------------------------------------------------------

_COSTS = {"rounds": "rounds", "megabits": "Mbit a client"}


def cost_of(about: Mapping[str, Any] | None, cost: str) -> str:
    """The paper's rounds or megabits to the target; "never", or a dash if the paper has none."""
    costs = (about or {}).get("to_target") or {}
    if cost not in costs:
        return "–"
    return "never" if costs[cost] is None else f"{costs[cost]:g}"


def _counted(abouts: Sequence[Mapping[str, Any]]) -> str:
    """How the paper and a run count rounds and megabits."""
    costs = [a["to_target"] for a in abouts if a.get("to_target")]
    target = costs[0]["target"]
    if target is None:
        return "rounds: the paper does not say what for; ours are those until the run ended"
    sent = "; Mbit are down and up, a mean over clients" * any("megabits" in c for c in costs)
    return f"to target: until the test score is {percent(target)} % for the first time{sent}"


def target_lines(about: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """The cost of a scenario's target, in the paper and in this run."""
    costs, lines = about.get("to_target") or {}, []
    for cost, unit in _COSTS.items():
        if cost not in costs:
            continue
        if costs["target"] is None:
            lines.append(f"the paper's run took {costs[cost]:g} {unit}, ours {summary[cost]}")
            continue
        if "to_target" not in summary:
            continue
        ours = _after(_spent(summary["to_target"], cost), unit)
        if "to_target_adapted" in summary:
            adapted = _after(_spent(summary["to_target_adapted"], cost), unit)
            ours += f" (adapted score: {adapted})"
        theirs = _after(costs[cost], unit)
        lines.append(f"{percent(costs['target'])} %: in the paper {theirs}, here {ours}")
    return lines


def _spent(reached: Mapping[str, Any] | None, cost: str) -> float | None:
    """Rounds or megabits until the target was reached, in words."""
    if cost == "megabits":
        return megabits(reached)
    return None if reached is None else float(reached["round"])


def _after(spent: float | None, unit: str) -> str:
    return "never" if spent is None else f"after {spent:.6g} {unit}"


def print_paper(out: Console, about: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """The lines about the published figure for a run that has just ended."""
    figure = f"no figure for {about['method']} with these parameters"
    if about["figure"] is not None:
        spread = f" ± {percent(about['spread'])}" if about["spread"] is not None else ""
        figure = f"{published_accuracy(about)}{spread} % for {about['method']}"
    out.print(f"    [bold]paper[/]  {escape(figure)}", highlight=False, soft_wrap=True)
    for line in [*target_lines(about, summary), *paper_notes({about["method"]: about})]:
        text = escape(line.removeprefix("paper: "))
        out.print(f"           {text}", highlight=False, soft_wrap=True)


# --- scenarios -----------------------------------------------------------------------------------


def scenario_listing(scenarios: Sequence[Scenario], used: Mapping[str, str]) -> Table:
    """All scenarios; ``used`` maps data sets to those that ``--stand-in`` would use."""
    table = Table(title="Scenarios: the set-ups of papers' experiments")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("paper's figure in %")
    table.add_column("data here")
    for s in scenarios:
        key = s.key(s.config["method"])
        figure = "–" if key is None else f"{percent(s.figures[key])} {s.method} ({s.table})"
        there = used[s.data] == s.data
        data = s.data if there else f"{s.data} is missing; with --stand-in {used[s.data]}"
        table.add_row(*(escape(cell) for cell in (s.name, s.description, figure, data)))
    return table


def print_scenario(out: Console, scenario: Scenario, missing: str = "") -> None:
    """One scenario in full: settings as TOML, figures, notes, and help with missing data."""

    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    title = f"[bold]{escape(scenario.name)}[/]  {escape(scenario.description)}"
    out.print(title, highlight=False, soft_wrap=True)
    say(f"{scenario.paper}, {scenario.table}")
    if missing:
        say(f"data: {missing}")
    say("\n" + to_toml(scenario.tree()))
    for method, tables in scenario.per_method.items():
        changed = [f"{t}.{k} = {v}" for t, table in tables.items() for k, v in table.items()]
        say(f"for {method}: {', '.join(changed)}")
    if scenario.figures:
        out.print(_published(scenario))
        scores: dict[str, list[str]] = {}
        for name in dict.fromkeys(key.split()[0] for key in scenario.figures):
            scores.setdefault(scenario.score_of(name), []).append(name)
        words = _comparable(scores, {"newcomers": scenario.newcomers})
        say(f"- The paper's figures: {words}.")
    for note in scenario.notes:
        say(f"- {note}")


def _published(scenario: Scenario) -> Table:
    table = Table(title="Published accuracy in %", title_justify="left", box=None)
    table.add_column("method", style="bold", no_wrap=True)
    abouts = {key: {"to_target": scenario.costs_of(key)} for key in scenario.figures}
    counted = {"rounds": scenario.rounds_to_target, "megabits": scenario.megabits_to_target}
    costs = [cost for cost, published in counted.items() if published]
    to = "" if scenario.target is None else f" to {percent(scenario.target)} %"
    for title in ("mean", "±", "worst client", *(f"{_COSTS[cost]}{to}" for cost in costs)):
        table.add_column(title, justify="right")
    for method in {**scenario.figures, **scenario.worst}:
        numbers = (scenario.figures, scenario.spread, scenario.worst)
        cells = [percent(n.get(method), 2) for n in numbers]
        cells += [cost_of(abouts.get(method), cost) for cost in costs]
        table.add_row(escape(method), *cells)
    return table
