"""Do runs one after another in this process, or several at a time, each in its own process.

Processes are forked, so that they share the data read here. A process that dies (killed, or out of
memory) is started once more and continues from its run's last checkpoint, and does not affect the
others; in ``concurrent.futures`` and loky it would end the whole pool. Stopping this process ends
all runs, which lose only their current round.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from coterie.core.events import Event
from coterie.engines.child_processes import STOPS, settle
from coterie.engines.workers import available_cores
from coterie.errors import ConfigError, CoterieError, EngineError, error_named
from coterie.experiment.experiment import Watch
from coterie.experiment.signals import StopSignal, heeding
from coterie.results.watchers import Look

_TRIES = 2  # attempts before a run whose process dies counts as failed
_TICK = 0.2  # seconds between updates of the display if nothing happens
# The fields of an event to display; others can be large, and are in the run directory.
_SHOWN = (
    *("round", "received", "groups", "bytes", "total_bytes", "seconds", "clock", "lost", "late"),
    *("adapted", "privacy", "withheld", "abandoned", "event"),
)

Work = Callable[[Watch], object]


@dataclass(frozen=True)
class Ready:
    """A run that is ready: its rounds, the score it is judged by, and the function that does it."""

    rounds: int
    judged_by: str
    work: Work


@dataclass(frozen=True)
class Job:
    """A run to do. ``ready`` is called here just before the run begins, and may read data."""

    name: str
    ready: Callable[[], Ready]


def at_once(jobs: int | None, runs: int, engine_asked: bool, run: Any) -> int:
    """The number of runs at the same time; ``run`` is the configuration's table.

    One for each core, unless an engine was chosen: then one, or as many as the cores have room for
    with its workers. On a GPU, and where processes cannot be forked, one.
    """
    forks = sys.platform == "linux" and run.device == "cpu"
    if jobs is not None:
        if jobs > 1 and not forks:
            raise ConfigError(
                f"jobs = {jobs}: several runs at the same time need Linux and run.device = 'cpu'; "
                "leave it out"
            )
        return max(1, min(jobs, runs))
    if not forks:
        return 1
    cores = available_cores()
    if engine_asked:
        cores = cores // run.workers if run.engine == "pool" and run.workers else 1
    return max(1, min(cores, runs))


def carry_out(jobs: Sequence[Job], count: int, display: Look) -> dict[str, CoterieError]:
    """Do the runs, ``count`` at a time; returns the errors of those that failed, by name."""
    return side_by_side(jobs, count, display) if count > 1 else one_by_one(jobs, display)


def one_by_one(jobs: Sequence[Job], display: Look) -> dict[str, CoterieError]:
    """Do the runs in this process."""
    failed: dict[str, CoterieError] = {}
    for job in jobs:
        name, started = job.name, False
        try:
            ready = job.ready()
            display.begin(name, ready.rounds, ready.judged_by)
            started = True
            error = attempted(ready.work, heeding(lambda event, n=name: display.round(n, event)))  # type: ignore[misc]
        except CoterieError as refused:
            error = refused
        if StopSignal.asked:  # a run can also fail because it is stopped
            raise KeyboardInterrupt
        if error is not None:
            failed[name] = error
        if started:
            display.end(name, error)
    return failed


def attempted(work: Work, watch: Watch) -> CoterieError | None:
    """Do a run and return its error; an unexpected exception is printed, too."""
    try:
        work(watch)
    except CoterieError as error:
        return error
    except Exception as error:
        traceback.print_exc()
        return CoterieError(f"it crashed with {type(error).__name__}: {error}")
    return None


# --- processes -----------------------------------------------------------------------------------


@dataclass
class _Worker:
    """A process that does a run."""

    job: Job
    process: Any
    pipe: Connection
    tries: int


def side_by_side(jobs: Sequence[Job], count: int, display: Look) -> dict[str, CoterieError]:
    """Do the runs in separate processes, at most ``count`` at a time."""
    waiting = [(job, 1) for job in reversed(jobs)]
    workers: list[_Worker] = []
    failed: dict[str, CoterieError] = {}

    def ended(job: Job, error: CoterieError | None) -> None:
        if error is not None:
            failed[job.name] = error
        display.end(job.name, error)

    try:
        while waiting or workers:
            if waiting and len(workers) < count:
                job, tries = waiting.pop()
                try:
                    ready = job.ready()
                except CoterieError as error:
                    ended(job, error)
                    continue
                if tries == 1:
                    display.begin(job.name, ready.rounds, ready.judged_by)
                _start(job, ready.work, tries, workers)
                continue
            readable = wait([w.pipe for w in workers], _TICK)
            for worker in [w for w in workers if w.pipe in readable]:
                try:
                    received = worker.pipe.recv()
                except (EOFError, OSError):  # it died without a result
                    workers.remove(worker)
                    how_it_ended = _buried(worker)
                    if worker.tries < _TRIES:
                        display.again(worker.job.name, how_it_ended)
                        waiting.append((worker.job, worker.tries + 1))
                    else:
                        ended(worker.job, EngineError(_hopeless(worker, how_it_ended)))
                    continue
                if isinstance(received, dict):
                    display.round(worker.job.name, cast(Event, received))
                else:
                    workers.remove(worker)
                    _buried(worker)
                    kind, sentence = received
                    ended(worker.job, error_named(kind)(sentence) if kind else None)
            display.tick()
            if StopSignal.asked:  # the exception may have been lost in a signal handler
                raise KeyboardInterrupt
    finally:
        _end(workers)
    return failed


def _hopeless(worker: _Worker, how_it_ended: str) -> str:
    return (
        f"its process {how_it_ended}, {worker.tries} times. If memory was short, try fewer runs at "
        "a time: --jobs 1"
    )


def _start(job: Job, work: Work, tries: int, workers: list[_Worker]) -> None:
    """Start a process and add it to the workers."""
    context = mp.get_context("fork")
    our_end, their_end = context.Pipe()
    process = context.Process(
        target=_work,
        args=(their_end, work, [*(w.pipe for w in workers), our_end], os.getpid()),
        name="coterie-run",
        daemon=False,  # it may have its own workers
    )
    # Block signals during the fork: one that arrived in the middle would hit a process that is not
    # set up. Blocked signals arrive at the end, when the new process is among the workers to kill.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        process.start()
        workers.append(_Worker(job, process, our_end, tries))
        their_end.close()
    except OSError as error:
        raise EngineError(
            f"could not start a process: {error.strerror}. Try fewer runs at a time: --jobs 1"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, work: Work, others: Sequence[Connection], parent: int) -> None:
    """The main function of a process: do one run and send its events."""
    settle(parent, others)
    torch.set_num_threads(1)
    gc.freeze()  # to look for garbage in what is shared with the parent would copy it

    def tell(event: Event) -> None:
        try:
            pipe.send(_slim(event))
        except OSError:  # the parent process is gone
            os._exit(1)

    error = attempted(work, tell)
    with contextlib.suppress(OSError):
        pipe.send(("", "") if error is None else (type(error).__name__, str(error)))


def _slim(event: Event) -> Event:
    return cast(Event, {key: value for key, value in event.items() if key in _SHOWN})


def _buried(worker: _Worker) -> str:
    """Wait until a process has exited, and say how it ended."""
    worker.pipe.close()
    worker.process.join()
    code = worker.process.exitcode
    return f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"


def _end(workers: Sequence[_Worker]) -> None:
    """Kill all workers. Their runs can be resumed, since checkpoints are written atomically."""
    if not workers:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # against a second Ctrl-C
    try:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
