"""The plan of a comparison, kept in its directory so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.schema import Config
from coterie.core.tree import write_atomic
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.compare.entries import PlannedRun
from coterie.experiment.config import parse
from coterie.results.checksums import read_json
from coterie.results.rundir import without_nan
from coterie.results.toml import read_toml, to_toml

PLAN, ABOUTS = "comparison.toml", "scenarios.json"
_FORMAT = 2  # runs by folder

Abouts = Mapping[str, Mapping[str, Any]]


def asks_engine(tree: Mapping[str, Any], defaults: Any = None) -> bool:
    """Whether the tables choose an engine, its workers, or a real deadline."""
    table = tree.get("run", {})
    keys = ("engine", "workers", "address", "real_deadline")
    return any(table.get(key) != getattr(defaults, key, None) for key in keys)


def write_plan(
    directory: Path,
    entries: Sequence[PlannedRun],
    left_out: Mapping[str, str],
    engine_asked: bool,
    tune: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write the plan: the keys that all runs share, and those in which each run differs.

    ``tune`` are the values of settings that are chosen for each method.
    """
    trees = [entry.config.model_dump() for entry in entries]
    shared = {
        table: {
            key: value
            for key, value in differing.items()
            if all(repr(tree[table].get(key)) == repr(value) for tree in trees)  # 1 is not 1.0
        }
        for table, differing in trees[0].items()
    }
    runs = {}
    for entry, tree in zip(entries, trees, strict=True):
        differing = {
            table: {k: v for k, v in values.items() if k not in shared[table]}
            for table, values in tree.items()
        }
        runs[entry.folder] = {
            "method": entry.title,
            "seed": entry.seed,
            "optional": entry.optional,
            **({"in_python": True} if entry.in_python else {}),
            "settings": [[key, value] for key, value in entry.settings.items()],
            "own": {table: values for table, values in differing.items() if values},
        }
    plan = {"format": _FORMAT, "engine_asked": engine_asked, "left_out": dict(left_out)}
    if tune:
        plan["tune"] = {key: list(values) for key, values in tune.items()}
    text = to_toml({**plan, "shared": shared, "runs": runs})
    write_atomic(directory / PLAN, text.encode(), durable=True)


def read_plan(directory: Path) -> tuple[list[PlannedRun], dict[str, str], bool]:
    """The entries of a comparison, what was left out, and whether an engine was chosen."""
    path = directory / PLAN
    if not path.is_file():
        single = (directory / "config.toml").is_file()
        hint = f"; it is a run: coterie run --resume {directory}" if single else ""
        raise RunDirError(f"{directory} is not a comparison: it has no {PLAN}{hint}")
    try:
        plan = read_toml(path)
        if plan["format"] != _FORMAT:
            raise RunDirError(
                f"{path} was written by another version of Coterie: start the comparison again in "
                "a new folder"
            )
        entries = _plan(plan)
        defaults = Config().run
        engine_chosen = asks_engine(entries[0].config.model_dump(), defaults)
        return entries, plan.get("left_out", {}), bool(plan.get("engine_asked", engine_chosen))
    except (ConfigError, KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise RunDirError(
            f"{path} is damaged ({error}): start the comparison again in a new folder"
        ) from error


def read_tune(directory: Path) -> dict[str, list[Any]]:
    """The values of settings that are chosen for each method, by key; empty if there are none."""
    tune = read_toml(directory / PLAN).get("tune", {})
    return {str(key): list(values) for key, values in tune.items()}


def _plan(plan: Mapping[str, Any]) -> list[PlannedRun]:
    entries = []
    for folder, run in plan["runs"].items():
        own, shared = run.get("own", {}), plan["shared"]
        tree = {t: {**shared.get(t, {}), **own.get(t, {})} for t in {**shared, **own}}
        settings = dict(run["settings"])
        seed = run.get("seed")
        entries.append(
            PlannedRun(
                run["method"],
                parse(tree),
                run["optional"],
                settings,
                seed,
                folder,
                in_python=bool(run.get("in_python", False)),
            )
        )
    return entries


def read_abouts(directory: Path) -> Abouts:
    """The description of the scenario, by the names of the runs."""
    path = directory / ABOUTS
    advice = "remove it to continue without the paper's figures"
    return read_json(path, advice) if path.exists() else {}


def write_json(path: Path, tree: Any) -> None:
    """Write nested tables as JSON, atomically; NaN and infinity become null."""
    text = json.dumps(without_nan(tree), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(path, (text + "\n").encode(), durable=False)
