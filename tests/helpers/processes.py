"""Commands of Coterie as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How many seconds a test waits, before it gives up, for what takes a moment on an idle machine.
PATIENCE = 200.0
COTERIE = [sys.executable, "-m", "coterie"]


@contextmanager
def starting() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Something that starts a command, at the head of its process group; in the end all are ended.

    Options are those of ``Popen``, and win.
    """
    begun: list[subprocess.Popen[str]] = []

    def call(*words: object, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COTERIE, *map(str, words)],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "start_new_session": True,
                "env": {**os.environ, "PYTHONUNBUFFERED": "1"},
                **options,
            },
        )
        begun.append(process)
        return process

    try:
        yield call
    finally:
        for process in begun:
            if process.poll() is None:
                process.kill()
            process.communicate()
