"""Scenarios and what papers published, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie.report.tables import percent
from coterie.run.toml import to_toml

if TYPE_CHECKING:
    from coterie.run.scenarios import Scenario


def figure_of(about: Mapping[str, Any]) -> str:
    """A published accuracy in per cent, with a dagger where the data are others."""
    elsewhere = about["figure"] is not None and about["instead"]
    return percent(about["figure"]) + ("†" if elsewhere else "")


def paper_notes(abouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines under published figures: where they are from, and why ours may differ."""
    if not abouts:
        return []
    about, lines = abouts[0], []
    if any(a["figure"] is not None for a in abouts):
        lines.append(f"paper: {about['paper']}, {about['table']}; {_comparable(about)}")
        if about["instead"]:
            lines.append(f"† ours {about['instead']}")
    changed = list(dict.fromkeys(c for a in abouts for c in a["changed"]))
    if changed:
        lines.append(f"not the scenario's settings: {'; '.join(changed)}")
    return lines


def _comparable(about: Mapping[str, Any]) -> str:
    if about["score"] == "unknown":
        return "it does not say whether these are received or adapted scores"
    return f"comparable with our {about['score']} score{' of newcomers' * about['newcomers']}"


def print_paper(out: Console, about: Mapping[str, Any]) -> None:
    """What a paper published for the run that has just ended."""
    figure = f"no figure for {about['method']} with these parameters"
    if about["figure"] is not None:
        spread = f" ± {percent(about['spread'])}" if about["spread"] is not None else ""
        figure = f"{figure_of(about)}{spread} % for {about['method']}"
    out.print(f"    [bold]paper[/]  {escape(figure)}", highlight=False, soft_wrap=True)
    for line in paper_notes([about]):
        text = escape(line.removeprefix("paper: "))
        out.print(f"           {text}", highlight=False, soft_wrap=True)


def scenario_listing(scenarios: Sequence[Scenario], used: Mapping[str, str]) -> Table:
    """All scenarios; ``used`` says which set is used for which, by what is at hand."""
    table = Table(title="Scenarios: the set-ups of papers' experiments")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("paper's figure in %")
    table.add_column("data here")
    for s in scenarios:
        key = s.key(s.config["method"])
        figure = "–" if key is None else f"{percent(s.figures[key])} {s.method} ({s.table})"
        data = s.data if used[s.data] == s.data else f"{used[s.data]} instead of {s.data}"
        table.add_row(*(escape(cell) for cell in (s.name, s.description, figure, data)))
    return table


def print_scenario(out: Console, scenario: Scenario, used: str) -> None:
    """One scenario in full: settings as TOML, figures, notes."""

    def say(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    title = f"[bold]{escape(scenario.name)}[/]  {escape(scenario.description)}"
    out.print(title, highlight=False, soft_wrap=True)
    say(f"{scenario.paper}, {scenario.table}")
    if used != scenario.data:
        say(f"data: {scenario.data} is not at hand; {used} would be used instead")
    say("\n" + to_toml(scenario.tree()))
    for method, tables in scenario.per_method.items():
        changed = [f"{t}.{k} = {v}" for t, table in tables.items() for k, v in table.items()]
        say(f"for {method}: {', '.join(changed)}")
    if scenario.figures:
        out.print(_published(scenario))
        about = {"score": scenario.score, "newcomers": scenario.newcomers}
        say(f"- The paper's figures: {_comparable(about)}.")
    for note in scenario.notes:
        say(f"- {note}")


def _published(scenario: Scenario) -> Table:
    table = Table(title="Published accuracy in %", title_justify="left", box=None)
    table.add_column("method", style="bold", no_wrap=True)
    for title in ("mean", "±", "worst client"):
        table.add_column(title, justify="right")
    for method in {**scenario.figures, **scenario.worst}:
        numbers = (scenario.figures, scenario.spread, scenario.worst)
        table.add_row(escape(method), *(percent(n.get(method), 2) for n in numbers))
    return table
