"""Several seeds of a comparison: means, spread, and which methods are as good as the best.

The seed determines clients, splits and initial weights, and all methods of a setting share them. So
methods are compared seed by seed, and the variation between seeds cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BEST, TIE, WORSE, UNTESTED, UNTOLD = "best", "tie", "worse", "untested", ""
LEAST_SEEDS = 5  # with fewer seeds a test has hardly any power
LEVEL = 0.05
_LEAST_SHARED = 2  # common seeds needed to choose the best
_SAME = 1e-12  # smaller differences of scores are rounding errors

Scores = Mapping[int, float]  # by seed
Row = Mapping[str, Any]

# What is averaged over seeds. The first ones also have a spread, and the best one is marked.
MARKED = ("received", "adapted", "newcomers", "worst", "gain")
_NUMBERS = (
    *("better", "compared", "groups", "agreement", "bytes", "wasted", "rounds"),
    *("clock_computation", "clock_communication", "clock_waiting", "clock_total"),
    *("target_round", "target_bytes", "target_seconds", "epsilon", "delta", "seconds"),
    *("target_megabits", "target_round_adapted", "target_megabits_adapted", "newcomers_received"),
    *("full_received", "full_adapted"),
)


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None for fewer than two values.

    >>> deviation([1.0, 3.0]), deviation([1.0])
    (1.4142135623730951, None)
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of a paired two-sided t-test; 0 or 1 if all differences are equal.

    >>> p_value([0.5, 0.75], [0.5, 0.75]), p_value([0.5, 0.75], [0.25, 0.5])
    (1.0, 0.0)
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if np.ptp(differences) <= _SAME:
        return 1.0 if abs(differences[0]) <= _SAME else 0.0
    from scipy.stats import ttest_rel

    return float(ttest_rel(first, second).pvalue)


def holm(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """Which of several tests are significant together, by Holm's procedure.

    The smallest p must be at most level / m, the next at most level / (m - 1), and so on until one
    is larger.

    >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.02})), sorted(holm({"a": 0.03, "b": 0.04}))
    (['a', 'b', 'c'], [])
    """
    significant: set[str] = set()
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        if p_values[name] > level / (len(p_values) - rank):
            break
        significant.add(name)
    return significant


def marks(scores: Mapping[str, Scores], testing: bool | None = None) -> dict[str, str]:
    """Mark the best mean, and which others are significantly worse; "" is no mark.

    The best is chosen on the common seeds. Each other method is tested against it on the seeds that
    both have; with fewer than five of these it is "untested". Without ``testing`` (by default, if
    no method has five seeds) only the best is marked.

    >>> marks({"a": {0: 0.5, 1: 0.75}, "b": {0: 0.5, 1: 0.5}})
    {'a': 'best', 'b': ''}
    """
    scored = {name: by_seed for name, by_seed in scores.items() if by_seed}
    if not scored:
        return dict.fromkeys(scores, UNTOLD)
    if testing is None:
        testing = max(map(len, scored.values())) >= LEAST_SEEDS
    means = _means_on(scored, common_seeds(scored))
    top = max(means, key=lambda name: means[name])
    best = {name for name in means if means[top] - means[name] <= _SAME}
    marks = {name: BEST if name in best else UNTOLD for name in scores}
    tested: dict[str, float] = {}
    behind: dict[str, bool] = {}
    for name in [n for n in scored if n not in best and testing]:
        common = sorted(set(scores[name]) & set(scores[top]))
        marks[name] = UNTESTED
        if len(common) < LEAST_SEEDS:
            continue
        own, best_scores = ([scores[n][seed] for seed in common] for n in (name, top))
        tested[name] = p_value(own, best_scores)
        behind[name] = sum(own) < sum(best_scores)
    significant = holm(tested)
    for name in tested:
        marks[name] = WORSE if name in significant and behind[name] else TIE
    return marks


def common_seeds(scores: Mapping[str, Scores]) -> list[int] | None:
    """The common seeds; None if seeds differ and fewer than two are common.

    >>> common_seeds({"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {1: 0.5, 2: 0.5}})
    [1, 2]
    >>> common_seeds({"a": {0: 0.5}, "b": {0: 0.5}}), common_seeds({"a": {0: 0.5}, "b": {1: 0.5}})
    ([0], None)
    """
    seeds = [set(own_seeds) for own_seeds in scores.values() if own_seeds]
    shared = set.intersection(*seeds) if seeds else set()
    enough = len(shared) >= _LEAST_SHARED or all(own_seeds == shared for own_seeds in seeds)
    return sorted(shared) if enough else None


def _means_on(scores: Mapping[str, Scores], seeds: Sequence[int] | None) -> dict[str, float]:
    """The mean of each on these seeds, or on all its own seeds."""
    return {n: float(np.mean([values[s] for s in seeds or values])) for n, values in scores.items()}


def means_of(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each method and setting: means over seeds, ``_std`` and ``_mark`` of scores.

    ``axes`` are the keys of the rows that distinguish settings. ``shared_seeds`` is the number of
    common seeds of a setting; the best is chosen on these, or if it is None on all seeds.
    """
    blocks: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        block = blocks.setdefault(repr([row[axis] for axis in axes]), {})
        block.setdefault(str(row["method"]), []).append(row)
    most = max((len(runs) for block in blocks.values() for runs in block.values()), default=0)
    means: list[dict[str, Any]] = []
    for block in blocks.values():
        scores = {key: _by_seed(block, key) for key in MARKED}
        marked = {key: marks(runs, most >= LEAST_SEEDS) for key, runs in scores.items()}
        shared = common_seeds(scores["received"])
        for method, runs in block.items():
            line: dict[str, Any] = {"method": method, **{axis: runs[0][axis] for axis in axes}}
            line["seeds"] = len(runs)
            line["shared_seeds"] = None if shared is None else len(shared)
            for key in MARKED:
                values = list(scores[key][method].values())
                line[key] = float(np.mean(values)) if values else None
                line[f"{key}_std"] = deviation(values)
                line[f"{key}_mark"] = marked[key][method]
            for key in _NUMBERS:
                if any(key in row for row in runs):
                    line[key] = _mean([row.get(key) for row in runs], key)
                if key == "target_round" and key in line:
                    line["target_reached"] = sum(row.get(key) is not None for row in runs)
            if any("rested" in row for row in runs):
                line["rested"] = any(row.get("rested") for row in runs)
                last = {row.get("full_round") for row in runs}
                line["full_round"] = last.pop() if len(last) == 1 else None
            line |= {key: runs[0].get(key) for key in ("sees", "headline")}
            means.append(line)
    return means


def _mean(values: Sequence[float | None], key: str) -> float | None:
    """The mean without None; for the agreement None, a single group, counts as 0 (chance)."""
    present = [float(value) for value in values if value is not None]
    count = len(values) if key == "agreement" else len(present)
    return sum(present) / count if present else None


def _by_seed(block: Mapping[str, Sequence[Row]], key: str) -> dict[str, dict[int, float]]:
    return {
        method: {int(r["seed"]): float(r[key]) for r in rows if r.get(key) is not None}
        for method, rows in block.items()
    }
