"""Processes that do not outlive the one that started them.

Run as a script, ``orphans.py PARENT COMMAND...``, it becomes that command: the way for commands
that are not ours, and safe in a process with threads, where code between fork and exec is not. It
imports nothing but the standard library, so that this costs milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

STOPS = {signal.SIGINT, signal.SIGTERM}


class Closing(Protocol):
    """Something that can be closed."""

    def close(self) -> None:
        """Close it."""


def die_with(parent: int) -> None:
    """On Linux, ask the kernel to end this process when its parent dies, even while it computes.

    The kernel counts the thread that started it as the parent: it must live as long.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def settle(parent: int, inherited: Sequence[Closing]) -> None:
    """Begin the life of a process that was forked: its end is the parent's to decide.

    ``inherited`` are the parent's ends of pipes: held open, they would hide its death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    for each in inherited:
        each.close()
    die_with(parent)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
