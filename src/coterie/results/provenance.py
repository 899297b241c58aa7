"""What a run writes down of itself: who its clients are, and which process worked on it."""

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
from coterie.core.events import Data, Headline, Session
from coterie.core.weights import Weights
from coterie.data.heterogeneity import label_table
from coterie.data.population import Population

if TYPE_CHECKING:
    from coterie.client.plan import Plan
    from coterie.experiment.experiment import Experiment

_NAMED = ("torch", "numpy", "scipy", "scikit-learn")


def session(experiment: Experiment, done: int, plan: Plan) -> Session:
    """The process that begins to work on a run: when, what it was told, and with what versions.

    ``argv`` is what follows the program's name; None if this is not the command line's process.
    ``headline`` is the score that the method is judged by, ``model_bytes`` the size of what of the
    model travels, ``batch_clients`` how many clients train as one stacked model.
    """
    settings = experiment.settings
    program = Path(sys.argv[0]) if sys.argv else Path()
    ours = program.name == "coterie" or program.parts[-2:] == ("coterie", "__main__.py")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv[1:] if ours else None,
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
    """The bytes of a model on its way, uncompressed."""
    return 4 * start.layout.only(start.layout.shareable).size


def about(
    experiment: Experiment, judged_by: str, directory: Path | None, history: Sequence[Any]
) -> dict[str, Any]:
    """What trackers are told of a run when it begins, or goes on after these rounds."""
    settings, config = experiment.settings, dict(experiment.config)
    if "run" not in config:  # made in Python: its own table says it, and trackers want it as usual
        chosen = {"rounds": settings.rounds, "seed": settings.seed, "cohort": settings.cohort}
        made = config.get("python") or {}
        if made:
            config["python"] = {k: v for k, v in made.items() if not isinstance(v, Mapping)}
        config |= {"train": asdict(experiment.schedule), "run": chosen}
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
    """Coterie's, Python's, and those of the libraries that decide a result.

    >>> list(versions())[:3]
    ['coterie', 'python', 'torch']
    """
    found = {"coterie": __version__, "python": platform.python_version()}
    loaded = [name for name in ("ray", "flwr") if name in sys.modules]
    for name in (*_NAMED, *loaded):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def described(population: Population, elsewhere: bool = False) -> Data:
    """What may be known of clients' data: names, true groups, labels or the spread of targets.

    Of clients ``elsewhere`` the server knows no labels: they stay theirs.
    """
    found: Data = {
        "names": [client.name for client in population.clients],
        "groups": None if population.groups is None else [int(g) for g in population.groups],
        "classes": None if population.classes is None else list(population.classes),
    }
    if elsewhere:
        return found
    if population.classes is not None:
        return {**found, "labels": label_table(population).astype(int).tolist()}
    held = [client.train.y.numpy().reshape(-1) for client in population.clients]
    quarters = (0, 25, 50, 75, 100)
    told = [
        [round(float(q), 6) for q in np.percentile(y, quarters)] if len(y) else None for y in held
    ]
    return {**found, "quartiles": told}
