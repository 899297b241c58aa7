"""Ctrl-C and SIGTERM: a run ends with a message that says how to continue."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from coterie.core.events import Event
from coterie.errors import CoterieError, Interrupted

if TYPE_CHECKING:
    from coterie.experiment.experiment import Watch


class StopSignal:
    """Whether the user asked to stop; an exception raised in a signal handler can get lost."""

    asked = False


@contextmanager
def stoppable() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise KeyboardInterrupt, but not in forked processes."""
    owner = os.getpid()
    StopSignal.asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker that has not set its own handlers yet
            os._exit(128 + number)
        StopSignal.asked = True
        raise KeyboardInterrupt

    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # After a stop, ignore further signals: only the message and the exit remain.
            signal.signal(number, signal.SIG_IGN if StopSignal.asked else handler)
        StopSignal.asked = False  # a later run of this process was not asked to stop


def heeding(watch: Watch) -> Watch:
    """The same callback, which ends the run if the user asked to stop."""

    def watch_and_stop(event: Event) -> None:
        watch(event)
        if StopSignal.asked:
            raise KeyboardInterrupt

    return watch_and_stop


@contextmanager
def stopped_with(message: Callable[[], str]) -> Iterator[None]:
    """Raise Interrupted with this message if the user stops the code inside."""
    try:
        yield
    except (KeyboardInterrupt, CoterieError) as error:
        asked = StopSignal.asked or isinstance(error, Interrupted)
        if isinstance(error, CoterieError) and not asked:
            raise
        raise Interrupted(message()) from None
