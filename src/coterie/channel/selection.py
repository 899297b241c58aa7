"""Who takes part in a round: drawn from the members that are there, or during the round before."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from coterie.channel.availability import Availability
from coterie.channel.policy import Policy, cohort_size, least, ready, select, selecting
from coterie.channel.state import ChannelState
from coterie.core.messages import ClientId


@dataclass
class Selection:
    """Selects the cohorts of a run; the next one while a round goes on.

    ``present`` says who can be reached now, where clients come and go; ``nobody`` is called when
    none of them can, to wait for some.
    """

    policy: Policy
    available: Availability | None
    seed: int
    state: ChannelState
    present: Callable[[], Collection[ClientId]] | None = None
    nobody: Callable[[int], None] | None = None

    def cohort(self, number: int) -> tuple[list[ClientId], float]:
        """The clients of a round, and the seconds that pass before they are asked."""
        people, waits, hides = self.state.selected, 0.0, 0.0
        if people is None:
            now = self.state.lasted.total
            waits = ready(self.policy, self.state.members, self.available, now) - now
            people = self._drawn(number, now + waits)
            while self.nobody is not None and not people:  # all have left since
                self.nobody(number)
                people = self._drawn(number, now + waits)
        else:
            hides = self.state.round_lasted.total
        return people, waits + selecting(self.policy, hides)

    def reports(self, cohort: Collection[ClientId]) -> tuple[int, int]:
        """How many reports of a cohort are waited for, and how many a round needs at least."""
        clients, enough = len(self.state.members), len(cohort)
        if self.policy.sampling != "poisson":
            enough = min(cohort_size(self.policy.cohort, clients), enough)
        return enough, least(self.policy, clients)

    def following(self, number: int) -> list[ClientId] | None:
        """Who is on now and asked in the next round; None, if too few are: then it waits."""
        now, members = self.state.lasted.total, self.state.members
        on = sum(self.available is None or self.available.on(c, now) for c in members)
        return None if on < least(self.policy, len(members)) else self._drawn(number, now)

    def _drawn(self, number: int, now: float) -> list[ClientId]:
        there = None if self.present is None else self.present()
        return select(
            self.policy, self.seed, number, self.state.members, self.available, now, there
        )
