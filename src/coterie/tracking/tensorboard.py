"""TensorBoard's event files, in the folder ``tensorboard`` of a run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from coterie.errors import ConfigError
from coterie.results.rundir import finite
from coterie.results.toml import to_toml
from coterie.tracking.values import flat, numbers

FOLDER = "tensorboard"


class TensorBoard:
    """Scores, bytes and seconds of each round as scalars, clients' scores as histograms."""

    def __init__(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError(
                "tensorboard's files go into the run's folder, and this run is not kept: name one, "
                "as in directory='runs/first'"
            )
        self._folder = directory / FOLDER
        self._writer: Any = None  # it makes its file at once, so only when the run begins
        self._last = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new file; what an earlier one has of rounds that come again is hidden."""
        before = about["history"]
        goes_on = bool(before) and any(self._folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(
            str(self._folder), purge_step=len(before) + 1 if goes_on else 0
        )
        tables = about["config"]
        self._parameters(tables, about["judged_by"])
        if not goes_on:
            self._writer.add_text("configuration", _as_code(to_toml(tables), "toml"), 0)
        for event in () if goes_on else before:
            self.event(event)
        self._writer.flush()
        self._last = len(before)

    def _parameters(self, tables: Mapping[str, Any], judged_by: str) -> None:
        """What the page of hyperparameters shows, and which scores it shows beside them."""
        shown = [f"received/{name}" for name in (judged_by, "worst", "loss")]
        made = hparams(flat(tables), dict.fromkeys(shown, 0.0))  # type: ignore[no-untyped-call]
        for summary in made[:2]:
            self._writer.file_writer.add_summary(summary)
        self._ending = made[2]

    def event(self, event: Mapping[str, Any]) -> None:
        """A round's numbers, with the round as the step."""
        if "event" in event:
            return
        step = self._last = event["round"]
        for name, value in numbers(event).items():
            self._writer.add_scalar(name, value, step)
        for title, own in (event.get("client_scores") or {}).items():
            scores = np.array([s for s in own if s is not None])
            if scores.size:
                self._writer.add_histogram(f"clients/{title}", scores, step)
        self._writer.flush()

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The summary of a run that is finished, as text."""
        if summary:
            # After the last round, so that it is hidden if the run goes on.
            text = json.dumps(finite(summary), indent=1)
            self._writer.add_text("result", _as_code(text, "json"), self._last + 1)
            self._writer.file_writer.add_summary(self._ending)
        self._writer.close()


def _as_code(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
