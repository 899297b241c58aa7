"""Rounds of twenty users as the wireless clock has them."""

from coterie.channel.clocks import Leg, Moment, make_clock

MODEL = 4000  # bytes
H20 = sum(1 / k for k in range(1, 21))


def legs(streams, models_down=1, models_up=1):
    """Twenty users; ``streams`` is each one's stream, None for nothing sent down."""
    return [
        Leg(
            client=c,
            down=0,
            up=0,
            content_down=0 if s is None else models_down * MODEL,
            content_up=models_up * MODEL,
            stream=() if s is None else (s,),
            samples=10,
        )
        for c, s in enumerate(streams)
    ]


def clocked(legs, system):
    """What the clock itself says, for one exchange of all."""
    clock = make_clock("wireless", {"system": system}, 0, 20, MODEL)
    return max(clock.finishes(legs, Moment(0, 0)).values(), key=lambda s: s.total)


def measured(legs, number=1, accuracy=0.5):
    """A round's event as a run with the first system's clock has it."""
    last = clocked(legs, 1)
    up = sum(leg.content_up for leg in legs)
    times = (last.computation, last.communication)
    return {
        "round": number,
        "kinds": {"header": [50, 40], "losses": [0, 20], "model/fc": [3 * up + 8, up]},
        "bytes": {"down": 0, "up": up + 999 * bool(up)},
        "received": {"accuracy": accuracy},
        "clock": {"computation": times[0], "communication": times[1], "waiting": 0.0},
    }


EXCHANGES = {
    "fedavg": (legs([7] * 20), 1, 20),
    "streams=4": (legs([c % 4 for c in range(20)]), 4, 20),
    "all": (legs(range(20)), 20, 20),
    "fedfomo": (legs(range(20), models_down=5), 100, 20),
    "local": (legs([None] * 20, models_up=0), 0, 0),
}
