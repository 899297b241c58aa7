"""Several seeds of one comparison: means, spread, and who is as good as the best.

The seed decides clients, splits and initial weights, and every method of a block runs on the same
ones: so methods are compared seed by seed, and what seeds differ by falls out of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BEST, TIE, WORSE, UNTESTED, UNTOLD = "best", "tie", "worse", "untested", ""
LEAST_SEEDS = 5  # below, a test says next to nothing
LEVEL = 0.05
_LEAST_SHARED = 2  # seeds that all have, to choose the best by
_SAME = 1e-12  # differences of scores that are rounding, and nothing else

Scores = Mapping[int, float]  # by seed
Row = Mapping[str, Any]

# What is averaged over seeds; of the first ones the spread is given, too, and the best is marked.
MARKED = ("received", "adapted", "newcomers", "worst", "gain")
_NUMBERS = (
    *("better", "compared", "groups", "agreement", "bytes", "wasted", "rounds"),
    *("clock_computation", "clock_communication", "clock_waiting", "clock_total"),
    *("target_round", "target_bytes", "target_seconds", "epsilon", "delta", "seconds"),
    *("target_megabits", "target_round_adapted", "target_megabits_adapted", "newcomers_received"),
    *("full_received", "full_adapted"),
)


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None of fewer than two values.

    >>> deviation([1.0, 3.0]), deviation([1.0])
    (1.4142135623730951, None)
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def p_value(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of a paired two-sided t-test; differences that are all alike decide it by themselves.

    >>> p_value([0.5, 0.75], [0.5, 0.75]), p_value([0.5, 0.75], [0.25, 0.5])
    (1.0, 0.0)
    """
    gaps = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    if np.ptp(gaps) <= _SAME:
        return 1.0 if abs(gaps[0]) <= _SAME else 0.0
    from scipy.stats import ttest_rel

    return float(ttest_rel(ours, theirs).pvalue)


def holm(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """Which of several tests are significant together, by Holm's steps.

    The smallest p must be at most level / m, the next level / (m - 1), and so on to the first that
    is not.

    >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.02})), sorted(holm({"a": 0.03, "b": 0.04}))
    (['a', 'b', 'c'], [])
    """
    found: set[str] = set()
    for place, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        if p_values[name] > level / (len(p_values) - place):
            break
        found.add(name)
    return found


def marks(scores: Mapping[str, Scores], testing: bool | None = None) -> dict[str, str]:
    """Who has the best mean, who is not significantly worse, who is; "" where nothing is said.

    The best is the best on the seeds that all have. Each is tested against it on the seeds that
    both have; with fewer than five of them it is "untested". Unless ``testing`` (by default: if
    somebody has five seeds) nothing is said of anybody but the best.

    >>> marks({"a": {0: 0.5, 1: 0.75}, "b": {0: 0.5, 1: 0.5}})
    {'a': 'best', 'b': ''}
    """
    there = {name: own for name, own in scores.items() if own}
    if not there:
        return dict.fromkeys(scores, UNTOLD)
    if testing is None:
        testing = max(map(len, there.values())) >= LEAST_SEEDS
    means = _means_on(there, common_seeds(there))
    top = max(means, key=lambda name: means[name])
    best = {name for name in means if means[top] - means[name] <= _SAME}
    found = {name: BEST if name in best else UNTOLD for name in scores}
    tested: dict[str, float] = {}
    behind: dict[str, bool] = {}
    for name in [n for n in there if n not in best and testing]:
        both = sorted(set(scores[name]) & set(scores[top]))
        found[name] = UNTESTED
        if len(both) < LEAST_SEEDS:
            continue
        ours, theirs = ([scores[n][seed] for seed in both] for n in (name, top))
        tested[name] = p_value(ours, theirs)
        behind[name] = sum(ours) < sum(theirs)
    significant = holm(tested)
    for name in tested:
        found[name] = WORSE if name in significant and behind[name] else TIE
    return found


def common_seeds(scores: Mapping[str, Scores]) -> list[int] | None:
    """The seeds that all have; None if they differ and fewer than two are left to judge by.

    >>> common_seeds({"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {1: 0.5, 2: 0.5}})
    [1, 2]
    >>> common_seeds({"a": {0: 0.5}, "b": {0: 0.5}}), common_seeds({"a": {0: 0.5}, "b": {1: 0.5}})
    ([0], None)
    """
    everybody = [set(own) for own in scores.values() if own]
    shared = set.intersection(*everybody) if everybody else set()
    enough = len(shared) >= _LEAST_SHARED or all(own == shared for own in everybody)
    return sorted(shared) if enough else None


def _means_on(scores: Mapping[str, Scores], seeds: Sequence[int] | None) -> dict[str, float]:
    """The mean of each on these seeds, or on all of its own."""
    return {n: float(np.mean([own[s] for s in seeds or own])) for n, own in scores.items()}


def means_of(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each method and setting: means over seeds, ``_std`` and ``_mark`` of scores.

    ``axes`` are the keys of the rows that tell settings apart. ``shared_seeds`` is how many seeds
    all methods of a setting have; the best is chosen on these, or if it is None on all.
    """
    blocks: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        block = blocks.setdefault(repr([row[axis] for axis in axes]), {})
        block.setdefault(str(row["method"]), []).append(row)
    most = max((len(own) for block in blocks.values() for own in block.values()), default=0)
    found: list[dict[str, Any]] = []
    for block in blocks.values():
        scores = {key: _by_seed(block, key) for key in MARKED}
        marked = {key: marks(own, most >= LEAST_SEEDS) for key, own in scores.items()}
        shared = common_seeds(scores["received"])
        for method, own in block.items():
            line: dict[str, Any] = {"method": method, **{axis: own[0][axis] for axis in axes}}
            line["seeds"] = len(own)
            line["shared_seeds"] = None if shared is None else len(shared)
            for key in MARKED:
                values = list(scores[key][method].values())
                line[key] = float(np.mean(values)) if values else None
                line[f"{key}_std"] = deviation(values)
                line[f"{key}_mark"] = marked[key][method]
            for key in _NUMBERS:
                if any(key in row for row in own):
                    line[key] = _mean([row.get(key) for row in own], key)
                if key == "target_round" and key in line:
                    line["target_reached"] = sum(row.get(key) is not None for row in own)
            if any("rested" in row for row in own):
                line["rested"] = any(row.get("rested") for row in own)
                last = {row.get("full_round") for row in own}
                line["full_round"] = last.pop() if len(last) == 1 else None
            line |= {key: own[0].get(key) for key in ("sees", "headline")}
            found.append(line)
    return found


def _mean(values: Sequence[float | None], key: str) -> float | None:
    """Of those that there are; who found a single group, if others did not, agrees by chance."""
    known = [float(value) for value in values if value is not None]
    count = len(values) if key == "agreement" else len(known)
    return sum(known) / count if known else None


def _by_seed(block: Mapping[str, Sequence[Row]], key: str) -> dict[str, dict[int, float]]:
    return {
        method: {int(r["seed"]): float(r[key]) for r in own if r.get(key) is not None}
        for method, own in block.items()
    }
