"""The TensorBoard tracker: event files in the folder ``tensorboard`` of a run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from coterie.errors import ConfigError
from coterie.results.rundir import without_nan
from coterie.results.toml import to_toml
from coterie.tracking.values import flat, numbers

FOLDER = "tensorboard"


class TensorBoard:
    """Writes scores, bytes and seconds of rounds as scalars, and client scores as histograms."""

    def __init__(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError(
                "tensorboard writes into the run directory, and this run has none: give one, "
                "as in directory='runs/first'"
            )
        self._folder = directory / FOLDER
        self._writer: Any = None  # created in begin, since it opens its file at once
        self._last = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """Open a new file, which hides rounds of earlier files that are repeated."""
        history = about["history"]
        continued = bool(history) and any(self._folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(
            str(self._folder), purge_step=len(history) + 1 if continued else 0
        )
        tables = about["config"]
        self._parameters(tables, about["judged_by"])
        if not continued:
            self._writer.add_text("configuration", _as_code(to_toml(tables), "toml"), 0)
        for event in () if continued else history:
            self.event(event)
        self._writer.flush()
        self._last = len(history)

    def _parameters(self, tables: Mapping[str, Any], judged_by: str) -> None:
        """Write the hyperparameters, and the names of the scores to show with them."""
        scores = [f"received/{name}" for name in (judged_by, "worst", "loss")]
        summaries = hparams(flat(tables), dict.fromkeys(scores, 0.0))  # type: ignore[no-untyped-call]
        for summary in summaries[:2]:
            self._writer.file_writer.add_summary(summary)
        self._ending = summaries[2]

    def event(self, event: Mapping[str, Any]) -> None:
        """Write the numbers of a round, with the round as the step."""
        if "event" in event:
            return
        step = self._last = event["round"]
        for name, value in numbers(event).items():
            self._writer.add_scalar(name, value, step)
        for title, scores_of_clients in (event.get("client_scores") or {}).items():
            scores = np.array([s for s in scores_of_clients if s is not None])
            if scores.size:
                self._writer.add_histogram(f"clients/{title}", scores, step)
        self._writer.flush()

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the summary of a finished run as text."""
        if summary:
            # After the last round, so that it is hidden if the run is resumed.
            text = json.dumps(without_nan(summary), indent=1)
            self._writer.add_text("result", _as_code(text, "json"), self._last + 1)
            self._writer.file_writer.add_summary(self._ending)
        self._writer.close()


def _as_code(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
