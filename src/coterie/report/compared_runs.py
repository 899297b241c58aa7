"""The runs on a page as rows of a comparison, as ``coterie compare`` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from coterie.report import numbers
from coterie.report.answers import Answer, Block, answer_of, blocks_of
from coterie.report.figures.compared import (
    KindOfRun,
    alike,
    final,
    gains_of,
    ranked,
)
from coterie.report.reading import FINISHED, Reading, number
from coterie.report.words import DAMAGE, agreement_with_truth
from coterie.results.differences import MARGIN
from coterie.results.rows import gained, in_full, near_the_end, saw

# Tables of a configuration that say which clients there are, and what they are scored by.
_CLIENTS = ("data", "partition", "shift", "evaluation")


@dataclass(frozen=True)
class ComparedRuns:
    """The runs that are judged by the same score: by kind, as rows, and by setting.

    ``axes`` are the keys of rows that distinguish settings: keys of clients' data, and others that
    have several values for the same method.
    """

    by: str
    kinds: Sequence[KindOfRun]
    rows: Sequence[Mapping[str, Any]]
    axes: Sequence[str]
    margin: float = MARGIN
    kind_of_row: Mapping[tuple[str, str], KindOfRun] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[Block]:
        """The settings, with the means of each method."""
        return blocks_of(self.rows, self.axes, self.by, self.margin)

    @cached_property
    def answers(self) -> list[Answer]:
        """What each setting with several methods answers."""
        return [answer_of(block) for block in self.blocks if len(block.lines) > 1]


def compared_runs(readings: Sequence[Reading], margin: float = MARGIN) -> ComparedRuns:
    """The rows and the settings of the runs that are judged by the first one's score.

    Where some seeds of a method are not finished, only the others count.
    """
    by, runs = alike(readings)
    kinds = ranked(runs)
    flat = {id(r): flattened(r.config) for r in runs}
    axes = _axes([[flat[id(r)] for r in kind.runs] for kind in kinds], kinds)
    gains: dict[int, list[float]] = {}
    for _, dots in gains_of(runs):
        for run, _, gain in dots:
            gains.setdefault(id(run), []).append(gain)
    rows, kind_of_row = [], {}
    titles = _titles(kinds, axes, flat)
    for kind, title in zip(kinds, titles, strict=True):
        done = [r for r in kind.runs if r.status == FINISHED] or kind.runs
        for reading in done:
            setting = {axis: flat[id(reading)].get(axis) for axis in axes}
            row = _row(reading, gains.get(id(reading), []))
            rows.append({**setting, "method": title, "reference": kind.reference, **row})
            kind_of_row[title, repr(list(setting.values()))] = kind
    return ComparedRuns(by, kinds, rows, axes, margin, kind_of_row)


def _axes(configs: Sequence[Sequence[Mapping[str, Any]]], kinds: Sequence[KindOfRun]) -> list[str]:
    every = [tree for own in configs for tree in own]
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for kind, own in zip(kinds, configs, strict=True):
        by_method.setdefault(kind.runs[0].method, []).extend(own)
    differ = [k for k in differing(every) if k != "run.seed" and not k.startswith("method.")]
    of_clients = [key for key in differ if key.partition(".")[0] in _CLIENTS]
    swept = {key for own in by_method.values() for key in differing(own)}
    known = [t for t in every if "method.name" in t]  # made in Python, others do not say it
    return [k for k in differ if k in of_clients or (k in swept and len(known) == len(every))]


def _titles(
    kinds: Sequence[KindOfRun], axes: Sequence[str], flat: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """The kinds' titles; without the folder of the setting, where they are unique without it."""
    if not axes:
        return [kind.title for kind in kinds]
    short = [kind.title.partition("/")[0] for kind in kinds]
    places = [[title, *(flat[id(k.runs[0])].get(a) for a in axes)]
              for k, title in zip(kinds, short, strict=True)]  # fmt: skip
    unique = len({repr(place) for place in places}) == len(places)
    return short if unique else [kind.title for kind in kinds]


def _row(reading: Reading, gains: Sequence[float]) -> dict[str, Any]:
    """The numbers of a run, also of one that is not finished."""
    by, headline = reading.judged_by, reading.headline
    received, adapted = (numbers.scored(reading, t) for t in ("received", "adapted"))
    newcomers = (reading.result.get("newcomers") or {}).get("adapted") or {}
    moved = numbers.bytes_so_far(reading)
    judged = adapted if headline == "adapted" else received
    spent = reading.result.get("seconds")
    return {
        "seed": 0 if reading.seed is None else reading.seed,
        "headline": headline,
        "received": number(received.get(by)),
        "adapted": number(adapted.get(by)),
        headline: final(reading),
        "newcomers": number(newcomers.get(by)),
        "worst": number(judged.get("worst")),
        **gained(gains),
        "groups": numbers.group_count(reading) or None,
        "agreement": _unless_damaged(lambda: agreement_with_truth(reading)),
        "bytes": moved.get("down", 0) + moved.get("up", 0) if moved else None,
        **near_the_end(reading.rounds, headline, by),
        "rounds": len(reading.rounds),
        "clock_total": number(numbers.clock(reading).get("total")),
        "seconds": number(spent),
        "epsilon": number(numbers.privacy_loss(reading).get("epsilon")),
        "test_least": test_least(reading),
        **saw_by(reading),
        "status": reading.status,
        **in_full(reading.rounds, by),
    }


def test_least(reading: Reading) -> int | None:
    """The fewest test samples of a client that has any."""
    counts = [number(row.get("test")) for row in reading.clients]
    return min((int(n) for n in counts if n), default=None)


def saw_by(reading: Reading) -> dict[str, Any]:
    """What the server saw; None if the run does not say it."""
    known = reading.result.get("exposure") or reading.result.get("sees")
    return (_unless_damaged(lambda: saw(reading.result)) if known else None) or {"sees": None}


def _unless_damaged(make: Any) -> Any:
    try:
        return make()
    except DAMAGE:
        return None


def differing(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ."""
    keys = list(dict.fromkeys(key for tree in flat for key in tree))
    return [k for k in keys if any(tree.get(k) != flat[0].get(k) for tree in flat)]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys.

    >>> flattened({"run": {"seed": 1, "stop": {}}, "x": [1]})
    {'run.seed': 1, 'run.stop': {}, 'x': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = value
    return flat
