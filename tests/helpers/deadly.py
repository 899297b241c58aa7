"""Methods whose tasks end their process, or never end: by name, so that they reach any worker."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import coterie
from coterie.client.client import Client
from coterie.core.messages import Upload
from coterie.core.method import Method, method
from coterie.methods import make


@method
def deadly(inner: str, folder: str, client: int, times: int) -> Method:
    """This client's work in the second round kills its process, so often, when it is all but done.

    A file in the folder counts how often it was begun.
    """
    made = make(inner)

    def fatal(c: Client, arrays, config) -> Upload:
        upload = made.tasks["train"](c, arrays, config)
        marks = Path(folder) / f"{c.id}-{c.round}"
        if c.id == client and c.round == 1:
            tries = int(marks.read_text()) if marks.exists() else 0
            marks.write_text(str(tries + 1))
            if tries < times:
                os.kill(os.getpid(), signal.SIGKILL)
        return upload

    return replace(made, tasks={**made.tasks, "train": fatal})


@method
def sleepy(folder: str, seconds: float) -> Method:
    """Client 0 sleeps so long in the first round; a file in the folder says that it began."""
    made = coterie.fedper()

    def slow(c: Client, arrays, config) -> Upload:
        if c.id == 0 and c.round == 0:
            (Path(folder) / "began").touch()
            time.sleep(seconds)
        return made.tasks["train"](c, arrays, config)

    return replace(made, tasks={"train": slow})
