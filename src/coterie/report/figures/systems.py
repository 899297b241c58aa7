"""Several runs in the three systems of the user-centric paper: scores against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.channel.clocks import SYSTEMS, System
from coterie.errors import ConfigError
from coterie.report import systems
from coterie.report.figures.compared import alike, kind_lines, kinds_of, score_axis
from coterie.report.figures.scores import Place, curve, said
from coterie.report.figures.sketch import TEMPLATE, Panel, Sketch
from coterie.report.figures.style import styled
from coterie.report.reading import Reading

_GAP = 0.03  # between panels
_HOVER = "time %{x:.5~g} T<sub>dl</sub>"


@dataclass(frozen=True)
class TimedRuns:
    """Runs whose times in other systems are known, and the score that they are judged by.

    ``left_out`` are the names of the other runs, by reason.
    """

    by: str
    runs: Sequence[Reading]
    base: Reading
    left_out: Mapping[str, Sequence[str]]

    def ends(self, system: System) -> float:
        """The time at which the reference run has completed its rounds."""
        return max(systems.times(self.base, system).values())

    def points(self, run: Reading, system: System) -> list[tuple[float, float]]:
        """A run's score against time; a run that ends early keeps its last score."""
        curve_points = curve(run.rounds, run.headline, self.by, placed(run, system))
        end = self.ends(system)
        return (
            [*curve_points, (end, curve_points[-1][1])]
            if curve_points and curve_points[-1][0] < end
            else curve_points
        )

    def at_end(self, run: Reading, system: System) -> float | None:
        """The score of the last round completed by the end; None before the first."""
        end = self.ends(system) * (1 + 1e-9)  # a round that misses the end only by rounding counts
        scores = [y for x, y in self.points(run, system) if x <= end]
        return scores[-1] if scores else None


def timed_runs(readings: Sequence[Reading]) -> TimedRuns:
    """The runs with the wireless clock, with FedAvg as the reference.

    Without FedAvg the reference is the run that first completes its rounds in the third system, of
    those that send anything.
    """
    by, runs = alike(readings)
    known: list[Reading] = []
    left_out: dict[str, list[str]] = {}
    for run in runs:
        try:
            systems.times(run, SYSTEMS[1])
            if not curve(run.rounds, run.headline, by):
                raise ConfigError("no round was scored")
            known.append(run)
        except ConfigError as error:
            left_out.setdefault(str(error).removeprefix(f"{run.name}: "), []).append(run.name)
    if not known:
        why, names = next(iter(left_out.items()), ("there is no run", []))
        raise ConfigError(f"{', '.join(names)}: {why}" if names else why)
    fedavg = [r for r in known if r.method == "fedavg"]
    sends = [r for r in known if any(dict(e.get("bytes") or {}).get("up") for e in r.rounds)]
    base = min(fedavg or sends or known, key=lambda r: max(systems.times(r, SYSTEMS[3]).values()))
    return TimedRuns(by, known, base, left_out)


def placed(run: Reading, system: System) -> Place:
    """The position of a round of this run on the time axis of a system."""
    ends = systems.times(run, system)
    return lambda event: ends.get(event["round"])


def heading(system: System) -> str:
    """A system in a few words.

    >>> heading(SYSTEMS[1])
    'ρ = 4, stragglers'
    """
    nodes = "stragglers" if system.inverse_mu else "no stragglers"
    return f"ρ = {system.rho:g}, {nodes}"


def by_system(readings: Sequence[Reading]) -> Sketch:
    """A panel for each of three systems: each run's headline score against time in units of T_dl.

    Time ends when FedAvg has completed all its rounds; runs that end earlier keep their last score.
    """
    shown = timed_runs(readings)
    figure = _columns(len(SYSTEMS))
    kinds = kinds_of(shown.runs)
    for panel, (number, system) in enumerate(SYSTEMS.items(), 1):
        curves = [[shown.points(r, system) for r in kind.runs] for kind in kinds]
        for trace in kind_lines(kinds, curves, _HOVER):
            hidden = {} if panel == 1 else {"showlegend": False}
            figure.add({**trace, **hidden, "legendgroup": trace["name"]}, panel=panel)
        # On lines of their own: on a phone a panel is narrow.
        what = f"time / T<sub>dl</sub><br>system {number}: {heading(system)}".replace(", ", "<br>")
        figure.x(title=what, range=[0, shown.ends(system)], nticks=5, tickangle=0, panel=panel)
    score_axis(figure.y, shown.by)
    for panel in range(2, len(SYSTEMS) + 1):
        figure.y(title="", matches="y", showticklabels=False, panel=panel)
    finished = styled(figure, f"{said(shown.by)} against time in three systems", 460)
    figure.x(automargin=True)
    return finished


def _columns(count: int) -> Sketch:
    """Panels side by side."""
    wide = (1 - _GAP * (count - 1)) / count
    layout: dict[str, Any] = {"template": TEMPLATE}
    found = []
    for place in range(count):
        at = "" if place == 0 else str(place + 1)
        left = place * (wide + _GAP)
        domain = [round(left, 6), round(min(1.0, left + wide), 6)]
        layout[f"xaxis{at}"] = {"anchor": f"y{at}", "domain": domain}
        layout[f"yaxis{at}"] = {"anchor": f"x{at}"}
        found.append(Panel(at, at))
    return Sketch([], layout, found)


def standings(readings: Sequence[Reading]) -> Mapping[int, Mapping[str, float | None]]:
    """For each system, the mean score of each kind of run at the end of the time axis."""
    shown = timed_runs(readings)
    scores: dict[int, dict[str, float | None]] = {}
    for number, system in SYSTEMS.items():
        scores[number] = {}
        for kind in kinds_of(shown.runs):
            ends = [shown.at_end(r, system) for r in kind.runs]
            known = [v for v in ends if v is not None]
            scores[number][kind.title] = sum(known) / len(known) if known else None
    return scores
