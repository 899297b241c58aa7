"""Tracking: the events of a run, handed to TensorBoard, MLflow or a tracker of one's own.

Trackers work in threads of their own. One that fails or is slow costs what it would have written,
never the run.
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
from coterie.tracking.courier import Courier

Tell = Callable[[str], None]

_PATIENCE = {"finished": 30.0, "stopped": 5.0, "failed": 5.0}  # seconds for what is under way


@runtime_checkable
class Tracker(Protocol):
    """What follows a run. Its calls come one after the other, from one thread.

    ``begin`` is told about the run: ``method``, ``rounds`` (asked for), ``seed``, ``judged_by``,
    ``config`` (tables), ``versions``, ``directory`` (None if it is not kept), and ``history``, the
    rounds that a resumed run had before. ``event`` gets every event of ``events.jsonl``, a round
    once its scores are there. ``end`` gets "finished", "stopped" or "failed", and the summary of
    a run that is finished.

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
        """The run begins, or goes on."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Something happened, mostly a round."""

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The run is over, for now at least."""


@TRACKERS.register("tensorboard", "files that TensorBoard shows")
def _tensorboard(directory: Path | None, within: Path | None) -> Tracker:
    from coterie.tracking.tensorboard import TensorBoard

    return TensorBoard(directory)


@TRACKERS.register("mlflow", "runs of an MLflow server, or in its files")
def _mlflow(directory: Path | None, within: Path | None) -> Tracker:
    from coterie.tracking.mlflow import MLflow

    return MLflow(directory, within)


def check(names: Iterable[str]) -> None:
    """Refuse a tracker that there is not, or whose library is not installed."""
    for name in names:
        TRACKERS.find(TRACKERS.admit(name, "--track"))
        if name in TRACKERS.index and find_spec(name) is None:  # ours are called as their libraries
            raise ConfigError(f"--track {name} needs the extra: pip install 'coterie[tracking]'")


def tracking(
    asked: Iterable[str | Tracker] | str | Tracker | None,
    directory: Path | None = None,
    tell: Tell | None = None,
    within: Path | None = None,
) -> Tracking | None:
    """Trackers by name, or of one's own, for one run; None if nothing is asked for.

    To be made in the process that runs, before anything is: what is wrong is refused here. ``tell``
    gets sentences about what could not be tracked (default: standard error); ``within`` is the
    folder of the comparison that it is a run of.
    """
    if asked is None:
        return None
    several = isinstance(asked, Iterable) and not isinstance(asked, str | Tracker)
    wanted = list(asked) if several else [asked]  # type: ignore[arg-type]
    wanted = [w for place, w in enumerate(wanted) if w not in wanted[:place]]  # named twice is once
    check(w for w in wanted if isinstance(w, str))
    made: list[tuple[str, Tracker]] = []
    for each in wanted:
        if isinstance(each, str):
            try:
                name = TRACKERS.admit(each, "--track")
                made.append((each, TRACKERS.make(name, {}, directory=directory, within=within)))
            except ImportError as error:
                raise ConfigError(
                    f"--track {each}: its library cannot be used ({error}): "
                    "pip install 'coterie[tracking]'"
                ) from None
        elif isinstance(each, Tracker) and not isinstance(each, type):
            made.append((type(each).__name__, each))
        else:
            raise ConfigError(
                f"track = {each!r}: give a name ({', '.join(TRACKERS)}), or an object with begin, "
                "event and end"
            )
    return Tracking(made, tell or _on_standard_error) if made else None


def _on_standard_error(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class Tracking:
    """All trackers of one run; as a context it ends them, and says what they missed."""

    def __init__(self, trackers: Iterable[tuple[str, Tracker]], tell: Tell) -> None:
        self._couriers = [Courier(name, tracker, tell) for name, tracker in trackers]
        self._tell = tell
        self._about: Mapping[str, Any] | None = None  # what is still to be told
        self._summary: Mapping[str, Any] = {}

    def begin(self, about: Mapping[str, Any]) -> None:
        """The run begins, or goes on; trackers hear of it with the first event.

        Until then the method may refuse the set-up, and what was begun is removed.
        """
        self._about = about

    def event(self, event: Mapping[str, Any]) -> None:
        """An event, as it is now: scores that come later are another one."""
        self._begin()
        for courier in self._couriers:
            courier.send("event", dict(event))

    def _begin(self) -> None:
        if self._about is None:
            return
        for courier in self._couriers:
            courier.start()
            courier.send("begin", self._about)
        self._about = None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """What the run came to."""
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
        for courier in self._couriers:
            courier.send("end", status, {} if error is not None else self._summary)
        for courier in self._couriers:
            if missed := courier.stop(_PATIENCE[status]):
                self._tell(missed)
