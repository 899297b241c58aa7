"""What is to be seen where several runs are drawn in three systems of up- and downlink."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.channel.clocks import SYSTEMS
from coterie.report.figures.systems import heading, standings, timed
from coterie.report.reading import Reading
from coterie.report.words import value
from coterie.results.findings import spoken

MOST = 3  # runs whose scores are said in each system


def by_system(readings: Sequence[Reading]) -> str:
    """Of scores against time: who is ahead by the end in each system."""
    shown = timed(readings)
    told = []
    for number, ends in standings(readings).items():
        known = sorted(((v, t) for t, v in ends.items() if v is not None), key=lambda p: -p[0])
        best = ", ".join(f"{title} {value(v, shown.by)}" for v, title in known[:MOST])
        told.append(f"{heading(SYSTEMS[number])}: {best}")
    others = [f"{spoken(names)} ({why})" for why, names in shown.left_out.items()]
    left_out = f" Left out: {'; '.join(others)}." if others else ""
    return (
        f"By the time at which {shown.base.name} has done all its rounds, the best are, with "
        f"{'; '.join(told)}. ρ is how much slower up is than down.{left_out}"
    )
