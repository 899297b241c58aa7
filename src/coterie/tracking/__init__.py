"""Tracking: send the events of a run to TensorBoard, MLflow, W&B or your own tracker.

Each tracker runs in its own thread. If it fails or is slow, its records are incomplete, but it
never delays or ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from coterie.errors import ConfigError, Interrupted
from coterie.registry import TRACKERS
from coterie.tracking.tracker_thread import TrackerThread

Tell = Callable[[str], None]

_PATIENCE = {"finished": 30.0, "stopped": 5.0, "failed": 5.0}  # seconds to wait at the end


@runtime_checkable
class Tracker(Protocol):
    """An object that follows a run. Its methods are called one after the other in one thread.

    ``begin`` receives a description of the run: ``method``, ``rounds`` (planned), ``seed``,
    ``judged_by``, ``config`` (tables), ``versions``, ``directory`` (None if the run is not kept),
    and ``history``, the earlier rounds of a resumed run. ``event`` receives every event of
    ``events.jsonl``, and a round once it has its scores. ``end`` receives "finished", "stopped" or
    "failed", and the summary of a finished run.

    >>> class Best:
    ...     def begin(self, about):
    ...         self.best, self.key = 0.0, about["judged_by"]
    ...     def event(self, event):
    ...         self.best = max(self.best, event.get("received", {}).get(self.key, 0.0))
    ...     def end(self, status, summary):
    ...         print(status, self.best >= summary["received"][self.key])
    >>> import coterie
    >>> small = {"data": {"clients": 4}, "run": {"rounds": 2, "engine": "loop"}}
    >>> result = coterie.run(small, track=[Best()])
    finished True
    """

    def begin(self, about: Mapping[str, Any]) -> None:
        """The run begins, or is resumed."""

    def event(self, event: Mapping[str, Any]) -> None:
        """An event, usually a round."""

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The run has ended, perhaps to be resumed."""


@TRACKERS.register("tensorboard", "files for TensorBoard")
def _tensorboard(directory: Path | None, within: Path | None) -> Tracker:
    from coterie.tracking.tensorboard import TensorBoard

    return TensorBoard(directory)


@TRACKERS.register("mlflow", "runs on an MLflow server, or in its local files")
def _mlflow(directory: Path | None, within: Path | None) -> Tracker:
    from coterie.tracking.mlflow import MLflow

    return MLflow(directory, within)


@TRACKERS.register("wandb", "runs on Weights & Biases, or in its local files")
def _wandb(directory: Path | None, within: Path | None) -> Tracker:
    from coterie.tracking.wandb import WandB

    return WandB(directory, within)


def check(names: Iterable[str]) -> None:
    """Refuse an unknown tracker, or one whose library is not installed."""
    for name in names:
        TRACKERS.find(TRACKERS.admit(name, "--track"))
        if name in TRACKERS.index and find_spec(name) is None:  # named like their libraries
            raise ConfigError(f"--track {name} needs the extra: {_install(name)}")


def _install(name: str) -> str:
    """How to install what a tracker needs."""
    return f"pip install 'coterie[{'wandb' if name == 'wandb' else 'tracking'}]'"


def tracking(
    trackers: Iterable[str | Tracker] | str | Tracker | None,
    directory: Path | None = None,
    tell: Tell | None = None,
    within: Path | None = None,
) -> Tracking | None:
    """Create the trackers of one run, by name or your own; None if there are none.

    Call it in the process of the run, before the run starts, so that mistakes are refused early.
    ``tell`` receives messages about what could not be tracked (default: standard error); ``within``
    is the directory of the comparison that the run belongs to.
    """
    if trackers is None:
        return None
    is_list = isinstance(trackers, Iterable) and not isinstance(trackers, str | Tracker)
    wanted = list(trackers) if is_list else [trackers]  # type: ignore[arg-type]
    wanted = [w for i, w in enumerate(wanted) if w not in wanted[:i]]  # without duplicates
    check(w for w in wanted if isinstance(w, str))
    named: list[tuple[str, Tracker]] = []
    for tracker in wanted:
        if isinstance(tracker, str):
            try:
                name = TRACKERS.admit(tracker, "--track")
                named.append((tracker, TRACKERS.make(name, {}, directory=directory, within=within)))
            except ImportError as error:
                raise ConfigError(
                    f"--track {tracker}: its library cannot be used ({error}): {_install(tracker)}"
                ) from None
        elif isinstance(tracker, Tracker) and not isinstance(tracker, type):
            named.append((type(tracker).__name__, tracker))
        else:
            raise ConfigError(
                f"track = {tracker!r}: give a name ({', '.join(TRACKERS)}), or an object with "
                "begin, event and end"
            )
    return Tracking(named, tell or _on_standard_error) if named else None


def _on_standard_error(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class Tracking:
    """All trackers of one run; as a context manager it ends them and reports what they missed."""

    def __init__(self, trackers: Iterable[tuple[str, Tracker]], tell: Tell) -> None:
        self._threads = [TrackerThread(name, tracker, tell) for name, tracker in trackers]
        self._tell = tell
        self._about: Mapping[str, Any] | None = None  # not yet sent
        self._summary: Mapping[str, Any] = {}

    def begin(self, about: Mapping[str, Any]) -> None:
        """Keep the description of the run, which trackers receive just before its first event.

        Until then the method may still refuse the set-up, and the run directory may be removed.
        """
        self._about = about

    def event(self, event: Mapping[str, Any]) -> None:
        """Send a copy of an event; scores that come later are another event."""
        self._begin()
        for thread in self._threads:
            thread.send("event", dict(event))

    def _begin(self) -> None:
        if self._about is None:
            return
        for thread in self._threads:
            thread.start()
            thread.send("begin", self._about)
        self._about = None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary for the end of the run."""
        self._summary = summary

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        status = "finished"
        if not isinstance(error, ConfigError):
            self._begin()
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt | Interrupted)
            status = "stopped" if stopped else "failed"
        for thread in self._threads:
            thread.send("end", status, {} if error is not None else self._summary)
        for thread in self._threads:
            if missed := thread.stop(_PATIENCE[status]):
                self._tell(missed)
