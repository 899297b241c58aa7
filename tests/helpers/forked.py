"""Commands and scripts in processes that have imported everything before they begin.

A process imports Coterie once and forks another for each command, in that command's folder and
environment. A command is a process of its own as ever, but need not import PyTorch anew, which
takes longer than most of what tests ask of it. Whatever kills processes or looks at their start
uses real ones (``processes.py``).
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing as mp
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

# What PyTorch and Rich look at when they are imported.
SETTINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
# Takes its words, folder, environment and streams to the process below, and ends as it says.
ASK = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
    there.connect({address!r})
    mine = [{script!r} or sys.argv[1], sys.argv[{first}:], os.getcwd(), dict(os.environ)]
    socket.send_fds(there, [json.dumps(mine).encode()], [0, 1, 2])
    code = there.recv(16)
sys.exit(int(code) if code else "the process ended without a word")
"""
MOST = 1 << 20


@cache
def commands() -> Path:
    """A folder to put on a path, with ``coterie`` and, for a file of Python, ``script``."""
    folder = Path(tempfile.mkdtemp())
    address = str(folder / "socket")
    for name, script, first in (("coterie", "coterie", 1), ("script", "", 2)):
        text = ASK.format(python=sys.executable, address=address, script=script, first=first)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env={**os.environ, **SETTINGS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        server.communicate()  # closes what it reads from
        shutil.rmtree(folder)

    atexit.register(end)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return folder


def run(*words: object, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of Coterie's, or a file of Python, in a process that is forked; how it must end."""
    name = "script" if str(words[0]).endswith(".py") else "coterie"
    done = subprocess.run(
        [commands() / name, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done


def answer(there: socket.socket, text: bytes, streams: list[int]) -> None:
    """In the new process: run what is asked for, and say how it ended."""
    name, words, folder, environment = json.loads(text)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    before = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in before if path not in sys.path]
    code: object = 0
    try:
        sys.argv = [name, *words]
        if name == "coterie":
            from coterie.cli.app import main

            main()
        else:
            sys.path.insert(0, str(Path(name).parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    there.send(str(code or 0).encode())


def main(address: str) -> None:
    """Listen until whoever started this is gone."""
    import selectors

    import coterie.cli.app
    import coterie.experiment.compare.compare
    import coterie.experiment.config
    import coterie.report.html

    coterie.cli.app.all_commands()
    gc.collect()
    gc.freeze()  # or else every process would copy what it inherits as it looks for garbage
    fork = mp.get_context("fork")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as here,
        selectors.DefaultSelector() as ready,
    ):
        here.bind(address)
        here.listen()
        ready.register(here, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        print("ready", flush=True)
        while all(key.fileobj is here for key, _ in ready.select()):
            there, _ = here.accept()
            with there:
                text, streams, _, _ = socket.recv_fds(there, MOST, 3)
                fork.Process(target=answer, args=(there, text, streams)).start()
            for stream in streams:
                os.close(stream)


if __name__ == "__main__":
    main(sys.argv[1])
