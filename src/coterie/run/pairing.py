"""Several seeds of one comparison: means, spread, and who is as good as the best.

The seed decides clients, splits and initial weights, and every method of a block runs on the same
ones: so methods are compared seed by seed, and what seeds differ by falls out of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BEST, TIE, WORSE, UNTOLD = "best", "tie", "worse", ""
LEAST_SEEDS = 5  # below, a test says next to nothing
LEVEL = 0.05
_SAME = 1e-12  # differences of scores that are rounding, and nothing else

Scores = Mapping[int, float]  # by seed
Row = Mapping[str, Any]

# What is averaged over seeds; of the first ones the spread is given, too, and the best is marked.
MARKED = ("received", "adapted", "newcomers", "worst", "gain")
_NUMBERS = (
    *("better", "compared", "groups", "agreement", "bytes", "wasted", "rounds"),
    *("clock_computation", "clock_communication", "clock_waiting", "clock_total"),
    *("target_round", "target_bytes", "target_seconds", "epsilon", "delta", "seconds"),
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


def marks(scores: Mapping[str, Scores]) -> dict[str, str]:
    """Who has the best mean, who is not significantly worse, who is; "" where nothing is said.

    Each is tested against the best on the seeds that both have; with fewer than five of them
    nothing is said.

    >>> marks({"a": {0: 0.5, 1: 0.75}, "b": {0: 0.5, 1: 0.5}})
    {'a': 'best', 'b': ''}
    """
    means = {name: float(np.mean(list(own.values()))) for name, own in scores.items() if own}
    if not means:
        return dict.fromkeys(scores, UNTOLD)
    top = max(means, key=lambda name: means[name])
    found = {n: BEST if n in means and means[n] == means[top] else UNTOLD for n in scores}
    tested: dict[str, float] = {}
    behind: dict[str, bool] = {}
    for name in means:
        both = sorted(set(scores[name]) & set(scores[top]))
        if found[name] == BEST or len(both) < LEAST_SEEDS:
            continue
        ours, best = ([scores[n][seed] for seed in both] for n in (name, top))
        tested[name] = p_value(ours, best)
        behind[name] = sum(ours) < sum(best)
    significant = holm(tested)
    for name in tested:
        found[name] = WORSE if name in significant and behind[name] else TIE
    return found


def means_of(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each method and setting: means over seeds, ``_std`` and ``_mark`` of scores.

    ``axes`` are the keys of the rows that tell settings apart.
    """
    blocks: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        block = blocks.setdefault(repr([row[axis] for axis in axes]), {})
        block.setdefault(str(row["method"]), []).append(row)
    found: list[dict[str, Any]] = []
    for block in blocks.values():
        scores = {key: _by_seed(block, key) for key in MARKED}
        marked = {key: marks(own) for key, own in scores.items()}
        for method, own in block.items():
            line: dict[str, Any] = {"method": method, **{axis: own[0][axis] for axis in axes}}
            line["seeds"] = len(own)
            for key in MARKED:
                values = list(scores[key][method].values())
                line[key] = float(np.mean(values)) if values else None
                line[f"{key}_std"] = deviation(values)
                line[f"{key}_mark"] = marked[key][method]
            for key in _NUMBERS:
                if any(key in row for row in own):
                    values = [float(row[key]) for row in own if row.get(key) is not None]
                    line[key] = float(np.mean(values)) if values else None
            line |= {key: own[0].get(key) for key in ("sees", "headline")}
            found.append(line)
    return found


def _by_seed(block: Mapping[str, Sequence[Row]], key: str) -> dict[str, dict[int, float]]:
    return {
        method: {int(r["seed"]): float(r[key]) for r in own if r.get(key) is not None}
        for method, own in block.items()
    }
