"""Ctrl-C and SIGTERM: a run ends with a sentence that says how to go on."""

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


class Stop:
    """Whether the user asked to stop. An exception raised inside a callback can get lost."""

    asked = False


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM do the same, in this process and not in those forked from it."""
    owner = os.getpid()
    Stop.asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker that has not set its own handlers yet
            os._exit(128 + number)
        Stop.asked = True
        raise KeyboardInterrupt

    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # Who has been heard may be impatient: what is left is a sentence and the exit.
            signal.signal(number, signal.SIG_IGN if Stop.asked else handler)


def heeding(watch: Watch) -> Watch:
    """The same, but it ends the run if the user asked for that."""

    def look(event: Event) -> None:
        watch(event)
        if Stop.asked:
            raise KeyboardInterrupt

    return look


@contextmanager
def stopped_with(sentence: Callable[[], str]) -> Iterator[None]:
    """Say this if the user stops what is inside, also if it fails because of that."""
    try:
        yield
    except (KeyboardInterrupt, CoterieError) as error:
        asked = Stop.asked or isinstance(error, Interrupted)
        if isinstance(error, CoterieError) and not asked:
            raise
        raise Interrupted(sentence()) from None
