"""Notes of a comparison about its runs: how they were tuned, and what they warn of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.report.tables import size
from coterie.results.comparison import Comparison
from coterie.results.titles import value_in_title

_MOST = 6  # warnings below a table; all are in the runs' reports


def warning_notes(comparison: Comparison) -> list[str]:
    """What runs warn of, each once for its methods."""
    kinds: dict[str, dict[str, str]] = {}  # rows by what the warning is about, without numbers
    for row, warnings in comparison.warnings.items():
        for text in warnings:
            kinds.setdefault(text.partition(": ")[0], {}).setdefault(row, text)
    lines = []
    for kind, rows in kinds.items():
        same = len(set(rows.values())) == 1
        lines.append(f"{', '.join(rows)}: {next(iter(rows.values())) if same else kind}")
    more = [f"and {len(lines) - _MOST} more warnings in the reports"] * (len(lines) > _MOST)
    return [f"warning: {line}" for line in lines[:_MOST]] + more


def tuning_notes(comparison: Comparison) -> list[str]:
    """What was chosen on validation data for each row, and what it cost; or that nothing was."""
    rows = comparison.tuning.get("rows") or {}
    if not rows:
        if comparison.learning_rate is None:
            return []
        return [
            f"all methods ran at one learning rate, {comparison.learning_rate:g}, which may suit "
            "some better than others: --tune lr=0.01,0.05,0.1 chooses one for each"
        ]
    values: Mapping[str, Any] = comparison.tuning["values"]
    tried = " × ".join(
        f"{_short(key)} {', '.join(map(value_in_title, many))}" for key, many in values.items()
    )
    chosen = "; ".join(f"{row}: {_chosen(about['chosen'], values)}" for row, about in rows.items())
    runs = [one for about in rows.values() for one in about["tried"]]
    moved = sum(one.get("bytes", 0) for one in runs)
    seconds = sum(one.get("seconds", 0) for one in runs)
    per_row = max(len(about["tried"]) for about in rows.values())
    notes = [
        f"chosen on validation data, {per_row} runs a row over {tried}: {chosen}",
        f"tuning took {len(runs)} runs, {size(moved, digits=1)} and {seconds:.1f} s, "
        "which the table's bytes and time leave out but for the chosen run",
    ]
    failed = [
        f"{row} ({_chosen(one, values)})"
        for row, about in rows.items()
        for one in about["tried"]
        if one["val"] is None
    ]
    if failed:
        notes.append(f"failed while tuning, and not chosen: {', '.join(failed)}")
    edges = [row for row, about in rows.items() if _at_an_edge(about["chosen"], values)]
    if edges:
        notes.append(f"at an end of the values tried, so try further ones: {', '.join(edges)}")
    return notes


def _chosen(settings: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_short(key)} {value_in_title(settings[key])}" for key in values)


def _short(key: str) -> str:
    return key.removeprefix("train.")


def _at_an_edge(chosen: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a chosen number is the smallest or the largest of three or more."""
    numbers = {key: [v for v in many if isinstance(v, int | float)] for key, many in values.items()}
    return any(
        len(many) > 2 and chosen[key] in (min(many), max(many)) for key, many in numbers.items()
    )
