"""Call a tracker in a thread of its own, so that it can neither delay a run nor end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from textwrap import shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.tracking import Tracker

_ENOUGH = 3  # failures in a row before a tracker gets no more rounds
_LENGTH = 160  # characters of the reason of a failure
_SHORT = 5.0  # seconds to wait for a tracker whose last call failed


class TrackerThread:
    """One tracker and the thread that calls it, in order."""

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self._name, self._tracker, self._tell = name, tracker, tell
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sent = self._delivered = 0  # rounds
        self._failures = 0  # in a row
        self._begun = self._ended = self._warned = False
        self._over = False  # skip the remaining calls

    def start(self) -> None:
        """Start the thread."""
        # A daemon thread: a hanging network must not keep the process alive.
        self._thread = threading.Thread(
            target=self._work, name=f"coterie-track-{self._name}", daemon=True
        )
        self._thread.start()

    def send(self, call: str, *arguments: Any) -> None:
        """Queue a call."""
        self._sent += _is_round(call, arguments)
        self._calls.put((call, arguments))

    def stop(self, seconds: float) -> str:
        """Wait at most ``seconds`` for queued calls; return a message about what was missed."""
        if self._thread is None:
            return ""
        self._calls.put(None)
        self._thread.join(min(seconds, _SHORT) if self._failures else seconds)
        self._over = True
        missed = self._sent - self._delivered
        if missed:
            rounds = "round was" if self._sent == 1 else "rounds were"
            return f"{self._name}: {missed} of {self._sent} {rounds} not tracked"
        return "" if self._ended else f"{self._name}: the end of the run was not tracked"

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, arguments = item
            if self._over or not self._wanted(call):
                continue
            try:
                getattr(self._tracker, call)(*arguments)
            except BaseException as error:  # a user's tracker may raise anything, even SystemExit
                self._failed(error)
            else:
                self._failures = 0
                self._begun |= call == "begin"
                self._delivered += _is_round(call, arguments)
                self._ended |= call == "end"

    def _wanted(self, call: str) -> bool:
        """Whether to make a call: a tracker that has begun can always end."""
        if call == "begin":
            return True
        return self._begun and (call == "end" or self._failures < _ENOUGH)

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if not self._warned and not self._over:
            self._warned = True
            message = shorten(str(error), _LENGTH, placeholder=" …")
            reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
            self._tell(f"{self._name} could not track the run ({reason}); the run continues")


def _is_round(call: str, arguments: tuple[Any, ...]) -> bool:
    return call == "event" and "event" not in arguments[0]
