"""Scenarios: the settings of papers' experiments under a name, with the figures they published.

>>> from coterie.experiment.scenarios import scenario
>>> scenario("fedclust/fmnist-skew20").figures["fedclust"]
0.9792
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunDirError, unknown
from coterie.experiment.scenarios.available import at_hand, stand_in
from coterie.experiment.scenarios.fedclust import fedclust
from coterie.experiment.scenarios.papers import dc_pfl, fedtsdp, user_centric
from coterie.experiment.scenarios.scenario import NOTE, Chosen, Scenario, absent, choose, remember
from coterie.experiment.scenarios.survey import survey
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

_PAPERS = (fedclust, dc_pfl, fedtsdp, user_centric, survey)
SCENARIOS: dict[str, Scenario] = {s.name: s for paper in _PAPERS for s in paper()}


def scenario(name: str) -> Scenario:
    """The scenario of that name.

    >>> scenario("fedclust/svhn-skew25")
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown scenario 'fedclust/svhn-skew25'; did you mean ...
    """
    if name not in SCENARIOS:
        raise ConfigError(unknown("scenario", name, SCENARIOS))
    return SCENARIOS[name]


def recall(place: Path, tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to say of the scenario of a run that is continued with these tables, if it had one."""
    if not (place / NOTE).exists():
        return None
    advice = "remove it to go on without the paper's figures"
    name = read_json(place / NOTE, advice).get("name")
    if name not in SCENARIOS:
        raise RunDirError(f"{place / NOTE} is damaged (it names no scenario); {advice}")
    found = SCENARIOS[name]
    return Chosen(found, tree["data"]["set"], asked=True, tree=dict(tree)).about()
