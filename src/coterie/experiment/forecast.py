"""What a run will take, before it starts: clients, model, bytes, seconds, memory and exposure.

Bytes come from playing the rounds without any training: every message is encoded as in the run.
Only what depends on data is then missing, and becomes a range. Seconds come from the first rounds,
which are run for real, in memory. Nothing is written.
"""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.channel.exposure import sentences
from coterie.channel.ledger import Bytes
from coterie.channel.policy import cohort_size
from coterie.engines.workers import available_cores
from coterie.errors import CoterieError
from coterie.experiment.experiment import Experiment, execute, with_settings
from coterie.experiment.stopping import Stop
from coterie.registry import METHODS
from coterie.results.provenance import size_of
from coterie.results.result import Result

_PLAYED = 2**31  # bytes of messages that are played at most; further rounds are extrapolated
_TRIALS = 1.5  # how much longer rounds take, on average, of methods that go on trying other groups
_NUMBER = 24  # characters that a written number may have more than in a played message
_TIMED = 2  # rounds that are run for real; the second one is without start-up
# Methods that form groups once, before or in the first round, and those whose bytes never depend on
# the data although they form groups.
_ONCE = ("fedclust", "pacfl", "user-centric", "group-evidence")
_FIXED = ("ifca", "oracle", "known-groups")
_DEPENDS = ("fedfomo", "user-centric", "adaptive-tau")


@dataclass(frozen=True)
class Range:
    """A number, or the smallest and the largest that it can be."""

    low: int
    high: int

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    @property
    def exact(self) -> bool:
        """Whether it is a single number."""
        return self.low == self.high


@dataclass(frozen=True)
class Forecast:
    """What a run will take; ``causes`` say why bytes are a range."""

    method: str
    clients: int
    cohort: int
    samples: tuple[int, int, int]
    model: str
    parameters: int
    rounds: int
    down: Range
    up: Range
    seconds: float
    memory: int
    epsilon: float | None
    sees: str
    exposed: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        tree = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return tree | {
            "down": [self.down.low, self.down.high],
            "up": [self.up.low, self.up.high],
            "samples": list(self.samples),
        }


def forecast(experiment: Experiment) -> Forecast:
    """What a run of this experiment will take."""
    settings, clients = experiment.settings, experiment.population.clients
    rounds = settings.rounds
    timed, took = _run(experiment, min(_TIMED, rounds))
    down, up, causes = _bytes(experiment, timed)
    if settings.stop != Stop():
        first = timed.history[0]["total_bytes"]
        down, up = Range(first["down"], down.high), Range(first["up"], up.high)
        causes.append("a rule in [stop] may end the run early")
    splits = [(len(c.train), len(c.val), len(c.test)) for c in clients]
    train, val, test = (sum(column) for column in zip(*splits, strict=True))
    start = timed.plan.start
    members = len(experiment.members)
    privacy = timed.summary.get("privacy") or {}
    epsilon = settings.privacy.epsilon if settings.privacy.noised else None
    if settings.privacy.noised and epsilon is None:
        epsilon = privacy.get("epsilon")
    result = Forecast(
        method=experiment.method.name,
        clients=len(clients),
        cohort=cohort_size(settings.policy.cohort, members),
        samples=(train, val, test),
        model=type(timed.plan.module).__name__,
        parameters=start.layout.size,
        rounds=rounds,
        down=down,
        up=up,
        seconds=_seconds(experiment, timed, took),
        memory=_memory(experiment, start),
        epsilon=epsilon,
        sees=experiment.method.sees,
        exposed=sentences(timed.summary["exposure"]) if timed.summary.get("exposure") else [],
        causes=causes,
    )
    _forget(timed)
    return result


def _run(experiment: Experiment, rounds: int, **changes: Any) -> tuple[Result, float]:
    """Some rounds in memory, on the loop engine, and the seconds that they took."""
    short = with_settings(
        experiment, rounds=rounds, engine="loop", workers=None, address=None, stop=Stop(), **changes
    )
    began = time.perf_counter()
    return execute(short), time.perf_counter() - began


def _forget(result: Result) -> None:
    if result.scratch is not None:
        result.scratch.cleanup()


# --- bytes ---------------------------------------------------------------------------------------


def _bytes(experiment: Experiment, timed: Result) -> tuple[Range, Range, list[str]]:
    causes: list[str] = []
    if _depends_on_data(experiment):
        return _by_bounds(experiment, timed)
    rounds, cohort = experiment.settings.rounds, len(timed.history[0]["cohort"])
    one = timed.history[-1]["bytes"]
    size = max(1, one["down"] + one["up"])
    count = max(1, min(rounds, _PLAYED // size))
    still = replace(experiment, schedule=replace(experiment.schedule, epochs=0, steps=None))
    silent = {"evaluate_every": 0, "adapt_epochs": 0, "alone": False, "target": None, "holdout": 0}
    silent["holdout"] = experiment.settings.holdout
    try:
        played, _ = _run(still, count, **silent)
    except CoterieError:  # a method, or its privacy, that does without training is refused
        return _by_bounds(experiment, timed)
    ledger = played.history[-1]["total_bytes"]
    begun = Bytes.from_json(played.begun.get("bytes"))
    down, up = ledger["down"], ledger["up"]
    replies = sum(len(e["cohort"]) for e in played.history)
    _forget(played)
    digits = 0
    if count < rounds:  # every further round costs the same but for the digits of its number
        share = (rounds - count) / max(1, count)
        down += round((down - begun.down) * share)
        up += round((up - begun.up) * share)
        replies += (rounds - count) * cohort
        digits = 4 * replies
        causes.append(f"messages of rounds after {count} are taken to be as long as before")
    numbers = _NUMBER * _numbers_in(timed)
    wide = Range(up, up + replies * numbers + digits)
    if numbers and up:
        causes.append("clients write their loss and other scores in digits")
    if "zstd" in experiment.settings.wire.up or experiment.settings.wire.layers:
        raw = replace(experiment.settings.wire, up="raw", layers={})
        plain, _ = _run(with_settings(still, wire=raw), 1, **silent)
        most = plain.history[0]["bytes"]["up"]
        _forget(plain)
        wide = Range(0, max(wide.high, round(1.05 * most * rounds) + replies * numbers))
        causes.append(f"the length of {experiment.settings.wire.up} depends on the values")
    narrow = Range(down, down + digits)
    if experiment.settings.policy.sampling == "poisson":
        most_clients = len(experiment.members) * rounds / max(1, replies)
        narrow = Range(0, round(narrow.high * most_clients))
        wide = Range(0, round(wide.high * most_clients))
        causes.append("clients take part at random")
    return narrow, wide, causes


def _numbers_in(timed: Result) -> int:
    """How many numbers a client's reply has at most: each of its metrics."""
    return 3 if timed.history[-1]["bytes"]["up"] else 0


def _depends_on_data(experiment: Experiment) -> bool:
    """Whether the method, or skipped layers, make the bytes of a round depend on data."""
    name, pieces = experiment.method.name, experiment.config.get("method") or {}
    if int(pieces.get("layer_interval", 1) or 1) > 1 or experiment.method.needs_all_layers:
        return True
    for part in name.split("+"):
        family = METHODS.index.get(part, {}).get("family")
        if part in _DEPENDS or (family == "clustered" and part not in _FIXED):
            return True
        if family is None:  # not one of Coterie's own
            return experiment.method.sees == "each"
    return False


def _by_bounds(experiment: Experiment, timed: Result) -> tuple[Range, Range, list[str]]:
    """From the first rounds, which are those of the run, and bounds on the later ones."""
    rounds, done = experiment.settings.rounds, len(timed.history)
    spent = timed.history[-1]["total_bytes"]
    first = Bytes.from_json(timed.begun.get("bytes")) + Bytes(spent["down"], spent["up"])
    if timed.begun.get("bytes"):
        first = Bytes(spent["down"], spent["up"])
    cohort = len(timed.history[-1]["cohort"])
    name = experiment.method.name.split("+")[0]
    message = size_of(timed.plan.start) + 1000  # with its header
    later = rounds - done
    last = timed.history[-1]["bytes"]
    once = name in _ONCE and done > 1
    skips = (
        name == "dc-pfl"
        or int((experiment.config.get("method") or {}).get("layer_interval", 1)) > 1
    )
    cuts = 2 + _candidates(len(experiment.members))
    ranges = []
    for total, way in ((first.down, "down"), (first.up, "up")):
        steady: int = last[way]  # type: ignore[literal-required]
        if once and not skips:
            slack = 2 * _NUMBER * cohort * later
            ranges.append(
                Range(
                    total + round(0.98 * later * steady) - slack,
                    total + round(1.02 * later * steady) + slack,
                )
            )
            continue
        most = later * cohort * message * cuts
        low = 0 if skips else round(0.5 * later * min(steady, cohort * message))
        ranges.append(Range(total + low, total + most))
    if once and not skips:
        why = f"{name} formed its groups in the first rounds, as in this forecast"
    else:
        why = f"{name} decides by the data when clients get a trial of other groups"
        why += ", and which layers are sent" if skips else ""
    return ranges[0], ranges[1], [why]


def _candidates(clients: int) -> int:
    """The most groupings that one trial compares: all up to 16 groups, then in steps of 1/4."""
    count, groups = min(clients, 16), min(clients, 16)
    while groups < clients:
        groups, count = min(clients, math.ceil(groups * 1.25)), count + 1
    return count


# --- seconds and memory --------------------------------------------------------------------------


def _seconds(experiment: Experiment, timed: Result, took: float) -> float:
    """From the last of the first rounds: a round is trained, and scored where it is due."""
    settings, rounds = experiment.settings, experiment.settings.rounds
    last = timed.history[-1]["seconds"]
    train, score = min(e["seconds"]["train"] for e in timed.history), last.get("score", 0.0)
    name = experiment.method.name.split("+")[0]
    if _depends_on_data(experiment) and name not in _ONCE:
        train *= _TRIALS
    begun = timed.begun.get("seconds", {}).get("train", 0.0)
    known = begun + sum(sum(e["seconds"].values()) for e in timed.history)
    closing = max(0.0, took - known)  # of these rounds: start-up, final scores, adapting
    every = settings.evaluate_every
    scored = rounds // every if every else 1
    cores = 1
    if settings.engine == "pool":
        cores = min(settings.workers or available_cores(), len(timed.history[-1]["cohort"]))
    later = (rounds - len(timed.history)) * train + max(0, scored - len(timed.history)) * score
    return float(
        took if rounds == len(timed.history) and cores == 1 else known + closing + later / cores
    )


def _memory(experiment: Experiment, start: Any) -> int:
    """The peak of this process so far, and for a pool its workers' models and libraries."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if experiment.settings.engine != "pool":
        return int(peak)
    workers = experiment.settings.workers or available_cores()
    return int(peak + workers * (100 * 2**20 + 6 * size_of(start)))
