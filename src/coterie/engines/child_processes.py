"""Child processes that end when the process that started them ends.

Run as a script, ``child_processes.py PARENT COMMAND...``, this module replaces itself with COMMAND.
That works for commands of other packages, and is safe in a process with threads, where running code
between fork and exec is not. Only the standard library is imported, so the detour costs
milliseconds.
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


class Closable(Protocol):
    """Something that can be closed."""

    def close(self) -> None:
        """Close it."""


def die_with(parent: int) -> None:
    """On Linux, ask the kernel to kill this process when its parent dies, even mid-computation.

    The kernel takes the thread that started the process for its parent, so that thread must live
    as long as the process should.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def settle(parent: int, inherited: Sequence[Closable]) -> None:
    """Prepare a newly forked process: only its parent may end it.

    ``inherited`` are the parent's ends of pipes. They are closed here, since a process that held
    them open could not notice the parent's death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    for pipe in inherited:
        pipe.close()
    die_with(parent)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
