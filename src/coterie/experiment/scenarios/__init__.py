"""Scenarios: the settings of papers' experiments under a name, with the figures they published.

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
from coterie.experiment.scenarios.available import at_hand, stand_in
from coterie.experiment.scenarios.load import read_scenarios
from coterie.experiment.scenarios.scenario import NOTE, Chosen, Scenario, absent, choose, remember
from coterie.results.checksums import read_json

__all__ = [
    "SCENARIOS",
    "Chosen",
    "Scenario",
    "absent",
    "at_hand",
    "choose",
    "recall",
    "remember",
    "scenario",
    "stand_in",
]

PAPERS = ("fedclust", "dc-pfl", "fedtsdp", "user-centric", "survey")
SCENARIOS: dict[str, Scenario]  # read when it is first asked for


@cache
def _scenarios() -> dict[str, Scenario]:
    files = [Path(__file__).with_name(f"{paper}.toml") for paper in PAPERS]
    return {scenario.name: scenario for file in files for scenario in read_scenarios(file)}


def __getattr__(name: str) -> dict[str, Scenario]:
    if name != "SCENARIOS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _scenarios()


def scenario(name: str) -> Scenario:
    """The scenario of that name.

    >>> scenario("fedclust/svhn-skew25")
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown scenario 'fedclust/svhn-skew25'; did you mean ...
    """
    scenarios = _scenarios()
    if name not in scenarios:
        raise ConfigError(unknown("scenario", name, scenarios))
    return scenarios[name]


def recall(place: Path, tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to say of the scenario of a run that is continued with these tables, if it had one."""
    if not (place / NOTE).exists():
        return None
    advice = "remove it to go on without the paper's figures"
    name = read_json(place / NOTE, advice).get("name")
    if name not in _scenarios():
        raise RunDirError(f"{place / NOTE} is damaged (it names no scenario); {advice}")
    found = scenario(name)
    return Chosen(found, tree["data"]["set"], asked=True, tree=dict(tree)).about()
