"""Several seeds of a comparison: means, spread, and which methods are as good as the best.

The seed determines clients, splits and initial weights, and all methods of a setting share them. So
methods are compared seed by seed, and the variation between seeds cancels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.results.differences import (
    LEAST_SEEDS,
    MARGIN,
    SAME,
    WORSE,
    Difference,
    Scores,
    differences,
)
from coterie.results.titles import reference_of

# Marks beside the verdicts of a difference: the highest mean, which is the best if all other usable
# methods are worse by the test.
BEST, HIGHEST, UNTOLD = "best", "highest", ""
_LEAST_SHARED = 2  # common seeds needed to choose the best

Row = Mapping[str, Any]

# What is taken from the first seed: words, and who was exposed.
_OF_THE_FIRST = ("sees", "sees_mostly", "exposed", "exposed_rounds", "headline")
# What is averaged over seeds. The first ones also have a spread, and the best one is marked.
MARKED = ("received", "adapted", "newcomers", "worst", "gain")
_NUMBERS = (
    *("better", "as_good", "worse_off", "largest_loss", "compared", "groups", "agreement"),
    *("bytes", "wasted", "rounds"),
    *("clock_computation", "clock_communication", "clock_waiting", "clock_total"),
    *("target_round", "target_bytes", "target_seconds", "epsilon", "delta", "seconds"),
    *("near_round", "near_bytes", "test_least"),
    *("target_megabits", "target_round_adapted", "target_megabits_adapted", "newcomers_received"),
    *("full_received", "full_adapted"),
)


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None for fewer than two values.

    >>> deviation([1.0, 3.0]), deviation([1.0])
    (1.4142135623730951, None)
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def best_of(scores: Mapping[str, Scores], references: Collection[str] = ()) -> set[str]:
    """The methods with the highest mean over the common seeds; reference lines never are.

    >>> best_of({"oracle": {0: 0.75}, "ifca": {0: 0.5}, "fedavg": {0: 0.25}}, ["oracle"])
    {'ifca'}
    """
    usable = {name: own for name, own in scores.items() if own and name not in references}
    if not usable:
        return set()
    means = _means_on(usable, common_seeds(usable))
    top = max(means.values())
    return {name for name, mean in means.items() if top - mean <= SAME}


def compared(
    scores: Mapping[str, Scores],
    references: Collection[str] = (),
    margin: float = MARGIN,
    testing: bool | None = None,
) -> tuple[dict[str, str], dict[str, Difference]]:
    """A mark for each method, and its difference to the best usable one.

    The marks are "best", "highest" (the highest mean, but not shown to be the best), the verdict of
    the difference, and "" where there is nothing to say. Without ``testing`` (by default, if no
    method has five seeds) only the highest mean is marked.

    >>> compared({"a": {0: 0.5, 1: 0.75}, "b": {0: 0.5, 1: 0.5}})[0]
    {'a': 'highest', 'b': ''}
    """
    scored = {name: by_seed for name, by_seed in scores.items() if by_seed}
    best = best_of(scored, references)
    marks = dict.fromkeys(scores, UNTOLD)
    if not best:
        return marks, {}
    if testing is None:
        testing = max(map(len, scored.values())) >= LEAST_SEEDS
    top = next(name for name in scored if name in best)
    found = differences(top, scored, margin)
    if testing:
        marks |= {name: difference.verdict for name, difference in found.items()}
    rivals = [name for name in scored if name not in best and name not in references]
    proven = testing and bool(rivals) and all(marks[name] == WORSE for name in rivals)
    return marks | dict.fromkeys(best, BEST if proven else HIGHEST), found


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


def means_of(
    rows: Sequence[Row], axes: Sequence[str], margin: float = MARGIN
) -> list[dict[str, Any]]:
    """A row for each method and setting: means over seeds, ``_std`` and ``_mark`` of scores.

    ``axes`` are the keys of the rows that distinguish settings. ``shared_seeds`` is the number of
    common seeds of a setting; the best is chosen on these, or if it is None on all seeds. ``score``
    is the score that a method is judged by, and ``difference`` that to the best usable method, with
    its interval and p-value adjusted for all pairs, and the seeds that would settle it.
    """
    blocks: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        block = blocks.setdefault(repr([row[axis] for axis in axes]), {})
        block.setdefault(str(row["method"]), []).append(row)
    most = max((len(runs) for block in blocks.values() for runs in block.values()), default=0)
    means: list[dict[str, Any]] = []
    for block in blocks.values():
        scores = {key: _by_seed(block, key) for key in (*MARKED, "score")}
        references = {name: reference(runs[0]) for name, runs in block.items()}
        lines = [name for name, of in references.items() if of]
        enough = most >= LEAST_SEEDS
        found = {key: compared(own, lines, margin, enough) for key, own in scores.items()}
        marked = {key: marks for key, (marks, _) in found.items()}
        to_best = found["score"][1]
        shared = common_seeds(scores["received"])
        for method, runs in block.items():
            line: dict[str, Any] = {"method": method, **{axis: runs[0][axis] for axis in axes}}
            line["seeds"] = len(runs)
            line["shared_seeds"] = None if shared is None else len(shared)
            for key in scores:
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
            line |= _of_difference(to_best.get(method))
            line |= {key: runs[0].get(key) for key in _OF_THE_FIRST}
            line["reference"] = references[method]
            means.append(line)
    return means


def _mean(values: Sequence[float | None], key: str) -> float | None:
    """The mean without None; for the agreement None, a single group, counts as 0 (chance)."""
    present = [float(value) for value in values if value is not None]
    count = len(values) if key == "agreement" else len(present)
    return sum(present) / count if present else None


def _of_difference(difference: Difference | None) -> dict[str, Any]:
    names = {
        "difference": "mean",
        "difference_low": "low",
        "difference_high": "high",
        "difference_p": "p",
        "difference_verdict": "verdict",
        "seeds_needed": "needed",
    }
    return {name: getattr(difference, key, None) for name, key in names.items()}


def reference(row: Row) -> str:
    """What a row's method is a reference line for; "" for a usable one."""
    return str(row["reference"] if "reference" in row else reference_of(str(row["method"])))


def judged_score(row: Row) -> float | None:
    """The score that a run is judged by: received, or adapted for methods that adapt."""
    return row.get(str(row.get("headline") or "received"))


def _by_seed(block: Mapping[str, Sequence[Row]], key: str) -> dict[str, dict[int, float]]:
    get = judged_score if key == "score" else lambda row: row.get(key)
    return {
        method: {int(r["seed"]): float(v) for r in rows if (v := get(r)) is not None}
        for method, rows in block.items()
    }
