"""The round policy: which clients are selected, whose reports count, when a round is abandoned.

The rules are those of Bonawitz et al. (2019): more clients are selected than needed, the first
reports count, a deadline ends the round, and a round with too few reports is abandoned. The
simulated time is kept elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from coterie.channel.availability import MONTH, Availability
from coterie.channel.clocks import Clock, Seconds
from coterie.core.messages import ClientId
from coterie.core.schema import Policy as Policy
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import numpy_generator, seed_for

if TYPE_CHECKING:
    from coterie.channel.state import ChannelState


@dataclass(frozen=True)
class Accepted:
    """Clients whose reports count, in order of arrival; the others, by id; and the time taken."""

    reported: tuple[ClientId, ...]
    late: tuple[ClientId, ...]
    lasted: Seconds


def cohort_size(asked: int | float, clients: int) -> int:
    """The number of clients in a round's cohort.

    >>> cohort_size(0.1, 100), cohort_size(10, 100), cohort_size(1.0, 20)
    (10, 10, 20)
    """
    count = round(asked * clients) if isinstance(asked, float) and asked <= 1 else int(asked)
    if not 1 <= count <= clients:
        raise ConfigError(
            f"run.cohort = {asked} means {count} of {clients} clients: set it to a number from 1 "
            f"to {clients}, or to a fraction up to 1.0"
        )
    return count


@dataclass(frozen=True)
class Counts:
    """The numbers of clients that a policy means.

    So many are in a cohort; ``orders`` are sent to as many, over-selection included; and a round
    with fewer reports than ``least`` is abandoned.
    """

    cohort: int
    orders: int
    least: int


def counts(policy: Policy, clients: int) -> Counts:
    """The numbers that a policy means for so many clients.

    >>> counts(Policy(cohort=10, over_selection=1.3, min_reports=0.75), 100)
    Counts(cohort=10, orders=13, least=8)
    """
    cohort, least = cohort_size(policy.cohort, clients), policy.min_reports
    # Rounded, so that floating-point errors are ignored, such as 1.1 · 50 > 55.
    orders = math.ceil(round(policy.over_selection * cohort, 9))
    if isinstance(least, float) and least <= 1:
        least = math.ceil(round(least * cohort, 9))
    return Counts(cohort, orders, int(least))


def check(
    policy: Policy, clients: int, clock: Clock | None, availability: Availability | None = None
) -> None:
    """Refuse a policy that cannot work with this number of clients, or without a clock."""
    means = counts(policy, clients)
    if policy.sampling == "poisson" and (policy.over_selection > 1 or policy.weighted):
        raise ConfigError(
            "run.sampling = 'poisson' selects each client independently: leave out "
            "run.over_selection and run.weighted"
        )
    for key in ("cohort", "min_reports"):
        value = getattr(policy, key)
        if value > 1 and value != int(value):
            raise ConfigError(f"run.{key} = {value:g}: it must be a whole number or at most 1.0")
    if means.orders > clients:
        raise ConfigError(
            f"run.over_selection = {policy.over_selection:g} selects {means.orders} of "
            f"{clients} clients for a cohort of {means.cohort}: lower it, or run.cohort"
        )
    if not 1 <= means.least <= means.cohort:
        raise ConfigError(
            f"run.min_reports = {policy.min_reports} with a cohort of {means.cohort}: set it to a "
            f"number from 1 to {means.cohort}, or to a fraction up to 1.0"
        )
    if policy.weighted and availability is None:
        raise ConfigError(
            "run.weighted selects clients by the time that they are on, but all are always on: set "
            "availability.name, or leave out run.weighted"
        )
    timed = {
        "run.over_selection": policy.over_selection > 1,
        "run.deadline": policy.deadline is not None,
        "run.selection": policy.selection > 0,
        "availability": availability is not None,
    }
    needs = [key for key, used in timed.items() if used]
    if needs and clock is None:
        raise ConfigError(
            f"{needs[0]} uses simulated time, but there is no clock: choose one, as in "
            "clock.name = links"
        )


def select(
    policy: Policy,
    seed: int,
    round: int,
    members: Sequence[ClientId],
    availability: Availability | None = None,
    time: float = 0.0,
    present: Collection[ClientId] | None = None,
) -> list[ClientId]:
    """Select the clients of a round at random among the members that are on and present.

    If fewer are on than should be selected, all of them are. The cohort size refers to all members,
    whether they are on or not, so that the sampling rate that privacy is accounted for is constant.
    """
    candidates = [
        c
        for c in members
        if (availability is None or availability.on(c, time)) and (present is None or c in present)
    ]
    means = counts(policy, len(members))
    count = min(means.orders, len(candidates))
    if not count:
        return []
    if policy.sampling == "poisson":
        coins = numpy_generator(seed_for(seed, "cohort", round)).random(len(candidates))
        rate = means.cohort / len(members)
        return sorted(c for c, coin in zip(candidates, coins, strict=True) if coin < rate)
    weights = None
    if policy.weighted and availability is not None:
        shares = np.array([availability.share(c) for c in candidates])
        weights = shares / shares.sum()
    elif count == len(candidates):
        return sorted(candidates)
    generator = numpy_generator(seed_for(seed, "cohort", round))
    drawn = generator.choice(len(candidates), count, replace=False, p=weights)
    return sorted(int(candidates[i]) for i in drawn)


def ready(
    policy: Policy,
    members: Sequence[ClientId],
    availability: Availability | None,
    time: float,
) -> float:
    """The earliest time, from ``time`` on, at which enough clients are on for a round.

    Raises TrainingError if there is none within thirty days.
    """
    if availability is None:
        return time
    needed, now = counts(policy, len(members)).least, time
    while now <= time + MONTH:
        if sum(availability.on(c, now) for c in members) >= needed:
            return now
        now = availability.next_change(now)
    raise TrainingError(
        f"fewer than {needed} of {len(members)} clients are on together at any time in the 30 days "
        f"after second {time:g}: lower run.min_reports or change the availability"
    )


def selecting(policy: Policy, before: float | None) -> float:
    """The seconds of selection that do not overlap with the round before, which lasted ``before``.

    >>> [selecting(Policy(selection=5.0), before) for before in (None, 2.0, 9.0)]
    [5.0, 3.0, 0.0]
    """
    return max(0.0, policy.selection - (before or 0.0))


def accept(
    finishes: Mapping[ClientId, Seconds],
    enough: int | None,
    left: float | None,
    gone: Mapping[ClientId, float] | None = None,
) -> Accepted:
    """Determine whose reports count, and how long the exchange lasts.

    A report counts if it arrives within ``left`` seconds (None: no deadline) and before its client
    goes off, ``gone[client]`` seconds from now. Reports are taken in order of time, then of id,
    until there are ``enough`` (None: all). The time of a lost reply is infinite.

    The exchange ends with the last report that counts if there are enough or none is missing;
    otherwise at the deadline or, without one, when the last missing client has gone off.

    >>> accept({0: Seconds(3.0), 1: Seconds(1.0), 2: Seconds(9.0)}, enough=2, left=5.0)
    Accepted(reported=(1, 0), late=(2,), lasted=Seconds(computation=3.0, ...))
    """
    leaves = gone or {}
    limit = math.inf if left is None else left

    def counts(client: ClientId) -> bool:
        total = finishes[client].total
        return total <= limit and total < leaves.get(client, math.inf)

    in_time = sorted(filter(counts, finishes), key=lambda c: (finishes[c].total, c))
    reported = in_time[:enough]
    late = sorted(set(finishes) - set(reported))
    slowest = finishes[reported[-1]] if reported else Seconds()
    if not late or len(reported) == enough:
        return Accepted(tuple(reported), tuple(late), slowest)
    known = [leaves[c] for c in late if math.isfinite(leaves.get(c, math.inf))]
    end = max([0.0, *known]) if left is None else left
    waited = max(0.0, end - slowest.total)
    lasted = replace(slowest, waiting=slowest.waiting + waited)
    return Accepted(tuple(reported), tuple(late), lasted)


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, and the seconds that pass before they are asked.

    ``enough`` reports are waited for; with fewer than ``least`` the round is abandoned.
    """

    clients: list[ClientId]
    waits: float
    enough: int
    least: int


@dataclass
class Selection:
    """Selects the cohorts of a run; the next one while a round goes on, if that makes a difference.

    ``present`` says who can be reached now, where clients come and go; ``nobody`` is called when
    none of them can, to wait for some.
    """

    policy: Policy
    available: Availability | None
    seed: int
    state: ChannelState
    present: Callable[[], Collection[ClientId]] | None = None
    nobody: Callable[[int], None] | None = None

    @property
    def ahead(self) -> bool:
        """Whether it matters when a cohort is selected: it takes time, or clients go off."""
        return self.available is not None or self.policy.selection > 0

    def cohort(self, number: int) -> Cohort:
        """The clients of a round."""
        people, self.state.selected = self.state.selected, None
        members, now, waits = self.state.members, self.state.lasted.total, 0.0
        if people is not None:
            waits = selecting(self.policy, self.state.round_lasted.total)
        else:
            if self.ahead:
                waits = ready(self.policy, members, self.available, now) - now
            people = self._drawn(number, now + waits)
            while self.nobody is not None and not people:  # all have left since
                self.nobody(number)
                people = self._drawn(number, now + waits)
            waits += selecting(self.policy, 0.0) if self.ahead else 0.0
        means, enough = counts(self.policy, len(self.state.members)), len(people)
        if self.policy.sampling != "poisson":
            enough = min(means.cohort, enough)
        return Cohort(people, waits, enough, means.least)

    def following(self, number: int) -> list[ClientId] | None:
        """Who is on now and asked in the next round; None, if too few are: then it waits."""
        now, members = self.state.lasted.total, self.state.members
        on = sum(self.available is None or self.available.on(c, now) for c in members)
        return None if on < counts(self.policy, len(members)).least else self._drawn(number, now)

    def _drawn(self, number: int, now: float) -> list[ClientId]:
        """A round's clients, drawn among the members that are on and can be reached."""
        there = None if self.present is None else self.present()
        return select(
            self.policy, self.seed, number, self.state.members, self.available, now, there
        )
