"""The time that a run would have taken in a system with another uplink and downlink.

A round of the wireless clock takes T_dl·(m + ρN) + T_min + H_n/μ: m models sent down, where a
broadcast model counts once; N uploads; and the slowest of n clients that compute. Transfers and
computation do not depend on the system. So the parts of each round follow from a run in one system,
and give its time in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.channel.clocks import SYSTEMS, System
from coterie.core.events import Event as Event
from coterie.errors import ConfigError
from coterie.report.reading import Reading, number

_SMALL = 1e-6  # values closer to a whole number are that number, up to rounding
_WITHOUT = ("header", "losses")  # kinds of bytes that the wireless clock does not count


@dataclass(frozen=True)
class Load:
    """The load of a round: models down, models up, and how often all users compute."""

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
    """The mean computing time of the slowest of these users, in units of T_dl.

    1 + 1/2 + … + 1/n is the mean of the largest of n exponential delays.

    >>> slowest(SYSTEMS[1], 2)
    2.5
    """
    return system.t_min + system.inverse_mu * sum(1 / k for k in range(1, users + 1))


def load_of(
    event: Event, model_bytes: int, users: int, system: System = SYSTEMS[1], t_dl: float = 1.0
) -> Load:
    """A round's load from its time in the system of the run's clock.

    The bytes sent up are known, and computation is separate from communication, whose remainder is
    the streams. For an event without bytes by kind, the uploads are rounded to whole models, which
    leaves out headers.
    """
    clock, kinds = event["clock"], event.get("kinds")
    if kinds is None:
        uploads = float(round(event["bytes"]["up"] / model_bytes))
    else:
        uploads = sum(up for kind, (_, up) in kinds.items() if kind not in _WITHOUT) / model_bytes
    streams = (clock["communication"] or 0.0) / t_dl - system.rho * uploads
    one = slowest(system, users)
    turns = (clock["computation"] or 0.0) / t_dl / one if one else 0.0
    round_load = Load(_tidy(streams), _tidy(uploads), _tidy(turns))
    is_whole = round_load.turns == round(round_load.turns) and round_load.streams >= 0
    if not is_whole or clock.get("waiting") or event.get("lost") or event.get("late"):
        raise ConfigError(
            f"the time of round {event['round']} cannot be divided into models sent down, uploads "
            f"and computation: it would be {round_load.streams:.4g} models down, "
            f"{round_load.uploads:.4g} "
            f"up, and {round_load.turns:.4g} times that all {users} users compute. Were some users "
            "left out, late or lost?"
        )
    return round_load


def _tidy(value: float) -> float:
    """A value as a whole number, if it is one up to rounding."""
    return float(round(value)) if abs(value - round(value)) < _SMALL else value


def times(reading: Reading, system: System) -> dict[int, float]:
    """The time at which each round would have ended in this system, in units of T_dl.

    The run must have had the wireless clock, with replies of all clients. Where some clients of a
    cohort compute more often than others, the slowest of the whole cohort counts each time.
    """
    own, t_dl = clock_of(reading)
    size = model_bytes(reading)
    now, ends = 0.0, dict[int, float]()
    begun = [reading.begun] if "clock" in reading.begun else []
    for event in (*begun, *reading.rounds):
        if "clock" not in event:
            raise ConfigError(f"{reading.name}: round {event['round']} has no simulated time")
        users = _users(event)
        try:
            now += load_of(event, size, users, own, t_dl).lasts(system, users)
        except ConfigError as error:
            raise ConfigError(f"{reading.name}: {error}") from None
        ends[event["round"]] = now
    ends.pop(0, None)
    return ends


def clock_of(reading: Reading) -> tuple[System, float]:
    """The system that a run's wireless clock was set to, and its T_dl in seconds."""
    settings = reading.settings("clock")
    if settings.get("name") != "wireless":
        raise ConfigError(f"{reading.name}: times in other systems need --clock wireless")
    if settings.get("draw"):
        raise ConfigError(f"{reading.name}: delays were drawn (clock.draw), so they have no parts")
    base = SYSTEMS.get(settings.get("system", 1), SYSTEMS[1])._asdict()
    known = {
        k: v for k in ("rho", "t_min", "inverse_mu") if (v := number(settings.get(k))) is not None
    }
    return System(**{**base, **known}), float(settings.get("t_dl", 1.0))


def model_bytes(reading: Reading) -> int:
    """The bytes of the run's model in transfer."""
    sizes = (s.get("model_bytes") for s in reversed(reading.sessions))
    bytes_of_model = next((n for n in sizes if n), None)
    if bytes_of_model is None:
        raise ConfigError(
            f"{reading.name}: this run is of an older version and does not know the size of its "
            "model"
        )
    return int(bytes_of_model)


def _users(event: Event) -> int:
    """The number of clients that compute: the cohort; before round 1 all clients."""
    return len(event.get("cohort") or [g for g in event.get("groups") or () if g is not None])
