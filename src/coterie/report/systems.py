"""How long a run would have taken in another system of up- and downlink.

A round of the wireless clock takes T_dl·(m + ρN) + T_min + H_n/μ: m models sent down, a model that
many hear counted once; N uploads; and the slowest of n clients that compute. What is sent and
computed does not depend on the system. So the parts of each round can be read off a run in one
system, and say how long it takes in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.channel.clocks import SYSTEMS, System
from coterie.core.events import Event as Event
from coterie.errors import ConfigError
from coterie.report.reading import Reading, number

_SMALL = 1e-6  # what is closer to a whole number is one, but for rounding
_WITHOUT = ("header", "losses")  # kinds of bytes that the wireless clock does not count


@dataclass(frozen=True)
class Load:
    """What a round asks of a system: models down, models up, and how often all users compute."""

    streams: float
    uploads: float
    turns: float

    def lasts(self, system: System, users: int) -> float:
        """In units of T_dl.

        >>> Load(4, 20, 1).lasts(SYSTEMS[2], 20)
        45.0
        """
        return self.streams + system.rho * self.uploads + self.turns * slowest(system, users)


def slowest(system: System, users: int) -> float:
    """How long the slowest of so many users computes on average, in units of T_dl.

    1 + 1/2 + … + 1/n is the mean of the largest of n exponential delays.

    >>> slowest(SYSTEMS[1], 2)
    2.5
    """
    return system.t_min + system.inverse_mu * sum(1 / k for k in range(1, users + 1))


def load(
    event: Event, model_bytes: int, users: int, system: System = SYSTEMS[1], t_dl: float = 1.0
) -> Load:
    """A round's parts from the time that it took in the system of the run's clock.

    Known are the bytes sent up, and computation apart from communication; what is left of that is
    the streams. Of an event without bytes by kind the uploads are rounded to whole models, headers
    left out.
    """
    clock, kinds = event["clock"], event.get("kinds")
    if kinds is None:
        uploads = float(round(event["bytes"]["up"] / model_bytes))
    else:
        uploads = sum(up for kind, (_, up) in kinds.items() if kind not in _WITHOUT) / model_bytes
    streams = (clock["communication"] or 0.0) / t_dl - system.rho * uploads
    one = slowest(system, users)
    turns = (clock["computation"] or 0.0) / t_dl / one if one else 0.0
    found = Load(_tidy(streams), _tidy(uploads), _tidy(turns))
    whole = found.turns == round(found.turns) and found.streams >= 0
    if not whole or clock.get("waiting") or event.get("lost") or event.get("late"):
        raise ConfigError(
            f"the time of round {event['round']} cannot be divided into models sent down, uploads "
            f"and computation: it would be {found.streams:.4g} models down, {found.uploads:.4g} "
            f"up, and {found.turns:.4g} times that all {users} users compute. Were some users "
            "left out, late or lost?"
        )
    return found


def _tidy(value: float) -> float:
    """Whole, if it is but for rounding."""
    return float(round(value)) if abs(value - round(value)) < _SMALL else value


def times(reading: Reading, system: System) -> dict[int, float]:
    """When each round would have ended in this system, in units of T_dl.

    The run must have had the wireless clock, all clients answering. Where some clients of a cohort
    compute more often than others, the slowest of the whole cohort counts each time.
    """
    own, t_dl = clock_of(reading)
    size = model_bytes(reading)
    now, found = 0.0, dict[int, float]()
    begun = [reading.begun] if "clock" in reading.begun else []
    for event in (*begun, *reading.rounds):
        if "clock" not in event:
            raise ConfigError(f"{reading.name}: round {event['round']} has no simulated time")
        users = _users(event)
        try:
            now += load(event, size, users, own, t_dl).lasts(system, users)
        except ConfigError as error:
            raise ConfigError(f"{reading.name}: {error}") from None
        found[event["round"]] = now
    found.pop(0, None)
    return found


def clock_of(reading: Reading) -> tuple[System, float]:
    """The system that a run's wireless clock was set to, and its T_dl in seconds."""
    told = reading.settings("clock")
    if told.get("name") != "wireless":
        raise ConfigError(f"{reading.name}: times in other systems need --clock wireless")
    if told.get("draw"):
        raise ConfigError(f"{reading.name}: delays were drawn (clock.draw), so they have no parts")
    base = SYSTEMS.get(told.get("system", 1), SYSTEMS[1])._asdict()
    given = {k: v for k in ("rho", "t_min", "inverse_mu") if (v := number(told.get(k))) is not None}
    return System(**{**base, **given}), float(told.get("t_dl", 1.0))


def model_bytes(reading: Reading) -> int:
    """How large the run's model is on its way."""
    sizes = (s.get("model_bytes") for s in reversed(reading.sessions))
    found = next((n for n in sizes if n), None)
    if found is None:
        raise ConfigError(
            f"{reading.name}: an older run, which does not say how large its model is"
        )
    return int(found)


def _users(event: Event) -> int:
    """Who computes: the cohort; before round 1 everybody."""
    return len(event.get("cohort") or [g for g in event.get("groups") or () if g is not None])
