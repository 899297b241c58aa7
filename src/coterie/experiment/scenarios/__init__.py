"""Scenarios: papers' experiments under a name, with their settings and published figures.

>>> from coterie.experiment.scenarios import scenario
>>> scenario("fedclust/fmnist-skew20").figures["fedclust"]
0.9792
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunDirError, unknown
from coterie.experiment.scenarios.available import is_available, stand_in
from coterie.experiment.scenarios.load import read_scenarios
from coterie.experiment.scenarios.scenario import (
    NOTE,
    ChosenScenario,
    Scenario,
    absent,
    choose,
    remember,
)
from coterie.results.checksums import read_json

__all__ = [
    "SCENARIOS",
    "ChosenScenario",
    "Scenario",
    "absent",
    "choose",
    "is_available",
    "recall",
    "remember",
    "scenario",
    "stand_in",
]

PAPERS = ("fedclust", "dc-pfl", "fedtsdp", "user-centric", "survey")
SCENARIOS: dict[str, Scenario]  # read when first used


@cache
def _scenarios() -> dict[str, Scenario]:
    files = [Path(__file__).with_name(f"{paper}.toml") for paper in PAPERS]
    return {scenario.name: scenario for file in files for scenario in read_scenarios(file)}


def __getattr__(name: str) -> dict[str, Scenario]:
    if name != "SCENARIOS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _scenarios()


def scenario(name: str) -> Scenario:
    """The scenario with this name.

    >>> scenario("fedclust/svhn-skew25")
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown scenario 'fedclust/svhn-skew25'; did you mean ...
    """
    scenarios = _scenarios()
    if name not in scenarios:
        raise ConfigError(unknown("scenario", name, scenarios))
    return scenarios[name]


def recall(directory: Path, tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """The description of a resumed run's scenario, if it has one; ``tree`` are its tables."""
    if not (directory / NOTE).exists():
        return None
    advice = "remove it to continue without the paper's figures"
    name = read_json(directory / NOTE, advice).get("name")
    if name not in _scenarios():
        raise RunDirError(f"{directory / NOTE} is damaged (it names no scenario); {advice}")
    original = scenario(name)
    return ChosenScenario(original, tree["data"]["set"], asked=True, tree=dict(tree)).about()
