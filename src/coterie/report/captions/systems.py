"""The caption of several runs in three systems with different uplinks and downlinks."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.channel.clocks import SYSTEMS
from coterie.report.figures.systems import heading, standings, timed_runs
from coterie.report.reading import Reading
from coterie.report.words import value
from coterie.results.findings import spoken

MOST = 3  # runs whose scores are given for each system


def by_system(readings: Sequence[Reading]) -> str:
    """The caption of scores against time: the best runs at the end in each system."""
    shown = timed_runs(readings)
    systems = []
    for number, ends in standings(readings).items():
        known = sorted(((v, t) for t, v in ends.items() if v is not None), key=lambda p: -p[0])
        best = ", ".join(f"{title} {value(v, shown.by)}" for v, title in known[:MOST])
        systems.append(f"{heading(SYSTEMS[number])}: {best}")
    others = [f"{spoken(names)} ({why})" for why, names in shown.left_out.items()]
    left_out = f" Left out: {'; '.join(others)}." if others else ""
    return (
        f"When {shown.base.name} has completed all its rounds, the best runs are, with "
        f"{'; '.join(systems)}. ρ is how many times slower the uplink is than the "
        f"downlink.{left_out}"
    )
