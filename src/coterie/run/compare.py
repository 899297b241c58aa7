"""Several methods on the same clients."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.run.config import Config, experiment_of, method_of, population_of
from coterie.run.evaluation import headline
from coterie.run.experiment import Watch, execute
from coterie.run.result import Result
from coterie.run.rundir import RunDir

Show = Callable[[str, int, str], AbstractContextManager[Watch]]


def method_list(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Titles, names and parameters from ``local,ifca:k=4``.

    >>> method_list("local,ifca:k=4")
    [('local', 'local', {}), ('ifca k=4', 'ifca', {'k': 4})]
    """
    found: list[tuple[str, str, dict[str, Any]]] = []
    for item in re.split(r",(?![^\[]*\])", text):  # a comma inside [1, 2] does not separate
        name, *settings = item.strip().split(":")
        parameters = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"--methods {item}: write name:parameter=value, as in ifca:k=4")
            try:
                parameters[key] = tomllib.loads(f"v = {value}")["v"]
            except tomllib.TOMLDecodeError:
                parameters[key] = value
        title = " ".join([name, *settings])
        if title in [t for t, _, _ in found]:
            raise ConfigError(f"--methods names '{item.strip()}' twice: once is enough")
        found.append((title, name, parameters))
    return found


def compare(
    titles: Sequence[str],
    configs: Sequence[Config],
    directory: Path,
    show: Show,
    oracle_if_possible: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """Run each configuration on one population; a row each for the table.

    The oracle needs a scenario with known groups; ``oracle_if_possible`` leaves it out elsewhere.
    """
    for config in configs:
        method_of(config)  # names and parameters, before data is read
    population = population_of(configs[0])
    if population.groups is None and oracle_if_possible:
        pairs = zip(titles, configs, strict=True)
        kept = [(t, c) for t, c in pairs if c.method.name != "oracle"]
        titles, configs = [t for t, _ in kept], [c for _, c in kept]
    if population.groups is None and any(c.method.name == "oracle" for c in configs):
        raise ConfigError(
            "method oracle needs a scenario with known groups: give the data a shift (--shift "
            "rotation), or leave oracle out of --methods"
        )
    experiments = [experiment_of(config, population) for config in configs]  # check them all first
    RunDir.create(directory)
    judged_by = headline(population.classes is None)
    results: list[Result] = []
    for title, experiment in zip(titles, experiments, strict=True):
        place = directory / folder_of(title)
        with show(title, experiment.settings.rounds, judged_by) as watch:
            results.append(execute(experiment, place, watch=watch))
    alone = next((r for t, r in zip(titles, results, strict=True) if t == "local"), None)
    rows = [_row(t, r, alone, judged_by) for t, r in zip(titles, results, strict=True)]
    return rows, judged_by


def folder_of(title: str) -> str:
    """The name of the folder that a method's run is kept in.

    >>> folder_of("ifca k=4")
    'ifca-k=4'
    """
    return re.sub(r"[\s/]+", "-", title)


def _row(title: str, result: Result, alone: Result | None, judged_by: str) -> dict[str, Any]:
    summary = result.summary
    gains = [] if alone is None or alone is result else _gains(result, alone, judged_by)
    return {
        "method": title,
        "received": summary["received"].get(judged_by),
        "adapted": summary["adapted"].get(judged_by),
        "newcomers": _of_newcomers(result, "adapted", {}).get(judged_by),
        "worst": summary["received"].get("worst"),
        "gain": sum(gains) / len(gains) if gains else None,
        "better": f"{sum(g > 0 for g in gains)}/{len(gains)}" if gains else None,
        "groups": summary["groups"],
        "agreement": agreement(result),
        "bytes": summary["bytes"]["down"] + summary["bytes"]["up"],
        "seconds": summary["seconds"],
        "sees": summary["sees"],
    }


def _of_newcomers(result: Result, key: str, default: Any) -> Any:
    """What the summary says of clients that joined at the end; others are not meant by scores."""
    return result.summary.get("newcomers", {}).get(key, default)


def _gains(result: Result, alone: Result, judged_by: str) -> list[float]:
    key = f"received_{judged_by}"
    outside = set(_of_newcomers(result, "clients", []))
    pairs = zip(result.clients, alone.clients, strict=True)
    kept = [(a, b) for a, b in pairs if a["client"] not in outside]
    both = [(a.get(key, ""), b.get(key, "")) for a, b in kept]
    return [a - b for a, b in both if a != "" and b != ""]


def agreement(result: Result) -> float | None:
    """The adjusted Rand index between the groups found and the true ones, if there are any."""
    truth = result.plan.population.groups
    known = sorted(result.groups)
    if truth is None or not known or len(set(result.groups.values())) < 2:
        return None
    from sklearn.metrics import adjusted_rand_score

    return float(
        adjusted_rand_score([truth[c] for c in known], [str(result.groups[c]) for c in known])
    )
