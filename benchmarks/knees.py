"""How often DC-PFL's detector finds the end of a rapid decrease, by the round of the knee.

    python benchmarks/knees.py

It uses artificial losses with a known knee and Gaussian noise of 2 % of the whole fall, 100 seeds
each: softplus hinges of width 1.5 and logistic falls of width 5, each with its greatest convex
curvature in the round of the knee. An end counts as found if the first detection is in the round of
the knee or in one of the eight after it. Curves without a knee (flat, rising, straight) should have
none within 60 rounds. The constants of the rule were chosen on seeds 0 to 99; these are others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from coterie.methods.dc_pfl_decrease import Bend, has_ended
from dc_pfl_table import write
from methods import RESULTS, commit, machine

Curve = np.ndarray[Any, Any]
KNEES = (12, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60)
LATEST = 8
RULES: tuple[Bend, ...] = ("slope", "convex", "absolute")


def hinge(knee: int) -> Curve:
    return np.asarray(1.5 * np.log1p(np.exp((knee - np.arange(knee + LATEST + 1)) / 1.5)))


def logistic(knee: int) -> Curve:
    at = (np.arange(knee + LATEST + 1) - knee) / 5.0
    return np.asarray(1 / (1 + np.exp(at + math.log(2 + math.sqrt(3)))))


def first(losses: Curve, bend: Bend) -> int | None:
    """The round in which the end is found, or none."""
    numbers = (n for n in range(len(losses)) if has_ended(losses[: n + 1].tolist(), bend, 5, 3))
    return next(numbers, None)


def found(curve: Callable[[int], Curve], knee: int, seeds: Sequence[int], bend: Bend) -> int:
    """In how many draws the end is found in time."""
    plain = curve(knee)
    fall, right = float(plain[0] - plain[-1]), 0
    for seed in seeds:
        noise = np.random.default_rng([seed, knee]).normal(size=len(plain))
        number = first(plain + 0.02 * fall * noise, bend)
        right += number is not None and number >= knee
    return right


def falsely(curve: Curve, seeds: Sequence[int], bend: Bend) -> int:
    """In how many draws an end is found where there is none."""
    noise = (np.random.default_rng(seed).normal(size=len(curve)) for seed in seeds)
    return sum(first(curve + 0.02 * n, bend) is not None for n in noise)


def table(kept: dict[str, Any]) -> list[str]:
    lines = [
        "| rule | curve | " + " | ".join(map(str, KNEES)) + " |",
        "|---|---|" + "---:|" * len(KNEES),
    ]
    for row in kept["knees"]:
        cells = " | ".join(str(n) for n in row["found"])
        lines.append(f"| `{row['bend']}` | {row['curve']} | {cells} |")
    lines += ["", "| rule | flat | rising | straight |", "|---|---:|---:|---:|"]
    for row in kept["none"]:
        lines.append(f"| `{row['bend']}` | {row['flat']} | {row['rising']} | {row['straight']} |")
    return lines


def page(kept: dict[str, Any]) -> str:
    seeds = kept["seeds"]
    return "\n".join(
        [
            "# When a rapid decrease ends: detections by the round of the knee",
            "",
            f"```sh\n{kept['command']}\n```",
            "",
            f"The first table has the number of draws, of {len(seeds)}, in which the end is found "
            f"in the round of the knee or in one of the {LATEST} rounds after it; the second has "
            "the number of draws in which an end is found within 60 rounds of a curve without a "
            f"knee. The noise is 2 % of the whole fall; seeds {seeds[0]} to {seeds[-1]}. "
            f"Commit {kept['commit']}, {kept['date']}, {kept['machine']}.",
            "",
            *table(kept),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    seeds = list(range(3000, 3100))
    flat = {
        "flat": np.ones(60),
        "rising": np.linspace(1, 2, 60),
        "straight": np.linspace(2, 1, 60),
    }
    kept = {
        "command": "python benchmarks/knees.py",
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": machine(),
        "seeds": seeds,
        "knees": [
            {
                "bend": bend,
                "curve": curve.__name__,
                "found": [found(curve, knee, seeds, bend) for knee in KNEES],
            }
            for bend in RULES
            for curve in (hinge, logistic)
        ],
        "none": [
            {"bend": bend, **{name: falsely(curve, seeds, bend) for name, curve in flat.items()}}
            for bend in RULES
        ],
    }
    write(asked.results / "knees", kept, page(kept))
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
