"""What a run records about itself: its clients, and the processes that worked on it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coterie import __version__
from coterie.core.events import Data, Headline, SessionLine
from coterie.core.weights import Weights
from coterie.data.heterogeneity import label_table
from coterie.data.population import Population

if TYPE_CHECKING:
    from coterie.client.plan import Plan
    from coterie.experiment.experiment import Experiment

_NAMED = ("torch", "numpy", "scipy", "scikit-learn")


def session(experiment: Experiment, done: int, plan: Plan) -> SessionLine:
    """The record of a process that works on a run: its time, arguments and versions.

    ``argv`` are the arguments of the command line; None if the run was started from Python.
    ``headline`` is the score that the method is judged by, ``model_bytes`` the size of the part of
    the model that is sent, ``batch_clients`` how many clients train as one stacked model.
    """
    settings = experiment.settings
    program = Path(sys.argv[0]) if sys.argv else Path()
    is_command_line = program.name == "coterie" or program.parts[-2:] == ("coterie", "__main__.py")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv[1:] if is_command_line else None,
        "folder": str(Path.cwd()),
        "rounds": settings.rounds,
        "done": done,
        "engine": settings.engine,
        "workers": settings.workers,
        "headline": cast(Headline, experiment.method.headline),
        "model_bytes": size_of(plan.start),
        "batch_clients": plan.training.batch_clients,
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def size_of(start: Weights) -> int:
    """The uncompressed bytes of the part of a model that is sent."""
    return 4 * start.layout.only(start.layout.shareable).size


def about(
    experiment: Experiment, judged_by: str, directory: Path | None, history: Sequence[Any]
) -> dict[str, Any]:
    """The description of a run for trackers; ``history`` are the rounds before a resume."""
    settings, config = experiment.settings, dict(experiment.config)
    if "run" not in config:  # from Python: give trackers the usual tables
        run = {"rounds": settings.rounds, "seed": settings.seed, "cohort": settings.cohort}
        python = config.get("python") or {}
        if python:
            config["python"] = {k: v for k, v in python.items() if not isinstance(v, Mapping)}
        config |= {"train": asdict(experiment.schedule), "run": run}
    return {
        "method": experiment.method.name,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "judged_by": judged_by,
        "config": config,
        "versions": versions(),
        "directory": directory,
        "history": list(history),
    }


def versions() -> dict[str, str]:
    """The versions of Coterie, Python, and the libraries that determine a result.

    >>> list(versions())[:3]
    ['coterie', 'python', 'torch']
    """
    versions = {"coterie": __version__, "python": platform.python_version()}
    loaded = [name for name in ("ray", "flwr") if name in sys.modules]
    for name in (*_NAMED, *loaded):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def data_record(population: Population, elsewhere: bool = False) -> Data:
    """What the server may know of clients' data: names, true groups, labels or target quartiles.

    Labels of clients ``elsewhere`` (in a real federation) are not known.
    """
    description: Data = {
        "names": [client.name for client in population.clients],
        "groups": None if population.groups is None else [int(g) for g in population.groups],
        "classes": None if population.classes is None else list(population.classes),
    }
    if elsewhere:
        return description
    if population.classes is not None:
        return {**description, "labels": label_table(population).astype(int).tolist()}
    targets = [client.train.y.numpy().reshape(-1) for client in population.clients]
    ranks = (0, 25, 50, 75, 100)
    quartiles = [
        [round(float(q), 6) for q in np.percentile(y, ranks)] if len(y) else None for y in targets
    ]
    return {**description, "quartiles": quartiles}
