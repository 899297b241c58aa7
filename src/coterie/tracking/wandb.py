"""The Weights & Biases tracker: one W&B run for each run, also after a resume."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.results.rundir import RunDir, without_nan
from coterie.tracking.values import flat, numbers

_EXIT = {"finished": 0, "stopped": 130, "failed": 1}


class WandB:
    """Logs the configuration, metrics by round, the summary and the tables of a run.

    Where runs go is up to W&B's own variables, as ``WANDB_PROJECT`` and ``WANDB_MODE=offline``.
    """

    def __init__(self, directory: Path | None, within: Path | None = None) -> None:
        import wandb  # here, so that this module can be read without the extra

        self._wandb = wandb
        self._directory, self._within = directory, within
        self._run: Any = None
        self._logged = 0  # the last logged round

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start a W&B run or continue the earlier one, and log rounds that it lacks."""
        directory, within = self._directory, self._within
        name, group, identity = about["method"], None, None
        if directory is not None:
            name = directory.name if within is None else directory.relative_to(within).as_posix()
            group = None if within is None else within.name
            # The same directory is the same run, also after a resume.
            identity = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]
        config = flat(about["config"])
        config |= {f"version.{library}": version for library, version in about["versions"].items()}
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "coterie",
            name=name,
            group=group,
            id=identity,
            resume="allow",
            dir=None if directory is None else str(directory),
            config={**config, "method": about["method"], "seed": about["seed"]},
            tags=[str(about["method"])[:64]],
            settings=self._wandb.Settings(silent=True),
        )
        self._logged = int(self._run.summary.get("round") or 0)
        self._log(about["history"])

    def event(self, event: Mapping[str, Any]) -> None:
        """Log the numbers of a round, with the round as the step, or the scores of newcomers."""
        if "event" not in event:
            self._log([event])
        elif event["event"] == "admission" and event.get("received"):
            scores = numbers({k: event[k] for k in ("received", "adapted")})
            self._run.summary.update({f"newcomers/{k}": v for k, v in scores.items()})

    def _log(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["round"] > self._logged:
                self._logged = event["round"]
                self._run.log({**numbers(event), "round": self._logged}, step=self._logged)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Log the summary and how the run ended."""
        if summary:
            values = flat(without_nan(dict(summary)))
            self._run.summary.update({f"result/{key}": value for key, value in values.items()})
            table = None if self._directory is None else RunDir(self._directory).table
            if table is not None and table.is_file():
                self._run.save(str(table), policy="now")
        self._run.summary["status"] = summary.get("stopped") or status
        self._run.finish(exit_code=_EXIT[status])
