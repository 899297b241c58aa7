"""Round policy: who is asked, whose report counts, and when a round is given up.

The rules of Bonawitz et al. (2019): more clients are asked than needed, the first reports count,
a deadline ends the round, and a round with too few reports is abandoned. Functions only; the
run holds the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.channel.availability import MONTH, Availability
from coterie.channel.clocks import Clock, Seconds
from coterie.core.messages import ClientId
from coterie.core.schema import Policy as Policy
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import numpy_generator, seed_for


@dataclass(frozen=True)
class Accepted:
    """Whose reports count, first come first; whose do not, by id; and how long it took."""

    reported: tuple[ClientId, ...]
    late: tuple[ClientId, ...]
    lasted: Seconds


def cohort_size(asked: int | float, clients: int) -> int:
    """How many clients take part in a round.

    >>> cohort_size(0.1, 100), cohort_size(10, 100), cohort_size(1.0, 20)
    (10, 10, 20)
    """
    count = round(asked * clients) if isinstance(asked, float) and asked <= 1 else int(asked)
    if not 1 <= count <= clients:
        raise ConfigError(
            f"run.cohort = {asked} makes {count} of {clients} clients; give a number from 1 to "
            f"{clients} or a fraction up to 1.0"
        )
    return count


def orders(policy: Policy, clients: int) -> int:
    """How many clients are asked.

    >>> orders(Policy(cohort=10, over_selection=1.3), 100)
    13
    """
    return _up(policy.over_selection * cohort_size(policy.cohort, clients))


def least(policy: Policy, clients: int) -> int:
    """How many reports a round needs in order not to be abandoned.

    >>> least(Policy(cohort=10, min_reports=0.75), 100)
    8
    """
    asked = policy.min_reports
    if isinstance(asked, float) and asked <= 1:
        return _up(asked * cohort_size(policy.cohort, clients))
    return int(asked)


def _up(number: float) -> int:
    """Rounded up, but not because 1.1 · 50 is a little above 55 in binary."""
    return math.ceil(round(number, 9))


def check(
    policy: Policy, clients: int, clock: Clock | None, availability: Availability | None = None
) -> None:
    """Refuse a policy that cannot work with so many clients, or that needs a clock and has none."""
    cohort = cohort_size(policy.cohort, clients)
    if policy.sampling == "poisson" and (policy.over_selection > 1 or policy.weighted):
        raise ConfigError(
            "run.sampling = 'poisson' draws each client by a coin: leave out run.over_selection "
            "and run.weighted"
        )
    for key in ("cohort", "min_reports"):
        value = getattr(policy, key)
        if value > 1 and value != int(value):
            raise ConfigError(f"run.{key} = {value:g}: give a whole number, or a share up to 1.0")
    if orders(policy, clients) > clients:
        raise ConfigError(
            f"run.over_selection = {policy.over_selection:g} asks {orders(policy, clients)} of "
            f"{clients} clients for a cohort of {cohort}: lower it, or run.cohort"
        )
    if not 1 <= least(policy, clients) <= cohort:
        raise ConfigError(
            f"run.min_reports = {policy.min_reports} of a cohort of {cohort}: give a number from 1 "
            f"to {cohort}, or a share up to 1.0"
        )
    if policy.weighted and availability is None:
        raise ConfigError(
            "run.weighted draws by the time that clients are on, and all are always on: give an "
            "availability, or leave it out"
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
            f"{needs[0]} is about simulated time, and there is no clock: choose one, as in "
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
    """Whom to ask in a round, drawn from a seed of its own among those who are on, and present.

    If fewer are on than should be asked, all of them are. A cohort is of all members, whoever is
    there: so the rate of a coin, which privacy is counted by, does not change.
    """
    there = [
        c
        for c in members
        if (availability is None or availability.on(c, time)) and (present is None or c in present)
    ]
    count = min(orders(policy, len(members)), len(there))
    if not count:
        return []
    if policy.sampling == "poisson":
        coins = numpy_generator(seed_for(seed, "cohort", round)).random(len(there))
        rate = cohort_size(policy.cohort, len(members)) / len(members)
        return sorted(c for c, coin in zip(there, coins, strict=True) if coin < rate)
    weights = None
    if policy.weighted and availability is not None:
        shares = np.array([availability.share(c) for c in there])
        weights = shares / shares.sum()
    generator = numpy_generator(seed_for(seed, "cohort", round))
    drawn = generator.choice(len(there), count, replace=False, p=weights)
    return sorted(int(there[i]) for i in drawn)


def ready(
    policy: Policy,
    members: Sequence[ClientId],
    availability: Availability | None,
    time: float,
) -> float:
    """The first moment from now on at which enough clients are on for a round not to be abandoned.

    If none comes within thirty days, a ``TrainingError`` says so.
    """
    if availability is None:
        return time
    needed, now = least(policy, len(members)), time
    while now <= time + MONTH:
        if sum(availability.on(c, now) for c in members) >= needed:
            return now
        now = availability.next_change(now)
    raise TrainingError(
        f"fewer than {needed} of {len(members)} clients are on together at any time in the 30 days "
        f"after second {time:g}: lower run.min_reports or change the availability"
    )


def selecting(policy: Policy, before: float | None) -> float:
    """The seconds of selection that the round before, which lasted so long, does not hide.

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
    """Whose reports count, and how long the exchange lasts.

    Those count that come within the ``left`` seconds (None: no deadline) and before their client
    goes off, ``gone[client]`` seconds from now; in order of time, then of id, until there are
    ``enough`` (None: as many as come). A lost reply never finishes: its time is infinite.

    The exchange ends with the last report that counts if there are enough or nobody is missing;
    otherwise at the deadline, or without one when the last of the missing is known to be gone.

    >>> accept({0: Seconds(3.0), 1: Seconds(1.0), 2: Seconds(9.0)}, enough=2, left=5.0)
    Accepted(reported=(1, 0), late=(2,), lasted=Seconds(computation=3.0, ...))
    """
    leaves = gone or {}
    limit = math.inf if left is None else left

    def counts(client: ClientId) -> bool:
        total = finishes[client].total
        return total <= limit and total < leaves.get(client, math.inf)

    coming = sorted(filter(counts, finishes), key=lambda c: (finishes[c].total, c))
    reported = coming[:enough]
    late = sorted(set(finishes) - set(reported))
    slowest = finishes[reported[-1]] if reported else Seconds()
    if not late or len(reported) == enough:
        return Accepted(tuple(reported), tuple(late), slowest)
    known = [leaves[c] for c in late if math.isfinite(leaves.get(c, math.inf))]
    end = max([0.0, *known]) if left is None else left
    waited = max(0.0, end - slowest.total)
    lasted = replace(slowest, waiting=slowest.waiting + waited)
    return Accepted(tuple(reported), tuple(late), lasted)
