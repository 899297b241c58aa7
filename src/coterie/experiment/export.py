"""Export the models of a run, or predict with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from coterie.channel.state import ChannelState
from coterie.core.events import Summary
from coterie.core.tree import to_safetensors, write_atomic
from coterie.core.weights import Weights
from coterie.data.samples import samples_like
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.checkpoint import Checkpoints
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.user_code import admitted
from coterie.results.result import Result
from coterie.results.rundir import RunDir, rounds_of


def reopen(directory: Path) -> Result:
    """Load a run, finished or not, from its last checkpoint."""
    run = RunDir.open(directory)
    tree = run.read_config()
    if "python" in tree:
        raise ConfigError(
            f"{directory} was created by coterie.simulate: use the result's model() in Python"
        )
    experiment = experiment_of(parse(admitted(tree, run.read_code())))
    plan, recorded = experiment.plan(run.clients), run.recorded("batch_clients")
    layout = plan.start.layout
    fingerprint = experiment.fingerprint(plan.start, 1 if recorded is None else recorded)
    last = Checkpoints(run.checkpoints, fingerprint).newest(layout)
    channel = ChannelState.from_tree(last.channel)
    summary = run.read_result() if run.result.exists() else {}
    if (done := summary.get("rounds", 0)) > last.rounds:
        raise RunDirError(
            f"the checkpoint of round {done} is missing from {run.checkpoints}. Repeat the round "
            f"with: coterie run --resume {directory}"
        )
    return Result(
        history=rounds_of(run.read_events()),
        clients=[],
        summary=cast(Summary, summary),
        state=last.state,
        plan=plan,
        versions=channel.versions,
        rounds=last.rounds,
        held=channel.held,
        newcomers=experiment.newcomers,
        directory=directory,
    )


def export_model(result: Result, client: int, target: Path) -> None:
    """Write one client's model to a safetensors file, described in its metadata."""
    check_target(target)
    write_model(result, client, result.weights(client), target)


def write_model(
    result: Result, client: int, weights: Weights, target: Path, **description: object
) -> None:
    """Write weights to a safetensors file whose metadata names the client, method and data."""
    population = result.plan.population
    about = {
        "method": result.plan.method.name,
        "client": str(client),
        "rounds": str(result.rounds),
        "classes": json.dumps(population.classes),
        "shape": json.dumps(population.shape),
        **{name: str(value) for name, value in description.items()},
    }
    write_atomic(target, to_safetensors(weights.tensors(), about), durable=False)


def check_target(target: Path) -> None:
    """Refuse a file whose folder does not exist, before any work is done."""
    if not target.parent.is_dir():
        raise RunDirError(f"cannot write {target}: there is no folder {target.parent}; create it")


def predictions(result: Result, client: int, path: Path) -> list[dict[str, Any]]:
    """A row for each sample: the predicted class and its probability, or the predicted numbers."""
    out = result.predict(client, samples_like(path, result.plan.population))
    classes = result.plan.population.classes
    if classes is None:
        columns = out.reshape(len(out), -1).tolist()
        return [
            {
                "sample": i,
                **{f"prediction{j}" if len(r) > 1 else "prediction": v for j, v in enumerate(r)},
            }
            for i, r in enumerate(columns)
        ]
    probabilities, predicted = out.softmax(-1).max(-1)
    pairs = zip(predicted.tolist(), probabilities.tolist(), strict=True)
    return [
        {"sample": i, "class": classes[g], "probability": round(p, 6)}
        for i, (g, p) in enumerate(pairs)
    ]
