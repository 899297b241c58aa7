"""Runs one after another in this process, or several at a time, each in a process of its own.

A process is forked, so what was read here is there without a copy. One that dies (killed, or out of
memory) is started once more and goes on from its run's last checkpoint; a run that fails leaves the
others alone. Whoever stops this process ends all of them: nothing of theirs is lost but the round
that they were at.
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
from coterie.experiment.signals import Stop, heeding
from coterie.results.watchers import Look

_TRIES = 2  # processes that a run may lose before it counts as failed
_TICK = 0.2  # seconds after which a display is brought up to date, if nothing happens
# What of a round's event is shown; others can be large, and are in the run's folder.
_SHOWN = (
    *("round", "received", "groups", "bytes", "total_bytes", "seconds", "clock", "lost", "late"),
    *("adapted", "privacy", "withheld", "abandoned", "event"),
)

Work = Callable[[Watch], object]


@dataclass(frozen=True)
class Ready:
    """A run that can begin: its length, the score that it is judged by, and what does it."""

    rounds: int
    judged_by: str
    work: Work


@dataclass(frozen=True)
class Job:
    """A run to be done. ``ready`` is called here, just before it begins, and may read data."""

    name: str
    ready: Callable[[], Ready]


def at_once(asked: int | None, runs: int, engine_asked: bool, run: Any) -> int:
    """How many runs are at work at a time; ``run`` is the configuration's table.

    As many as there are cores, unless an engine was asked for: then one, or as many as their
    workers leave cores for. On a GPU, and where processes cannot be forked, one.
    """
    forks = sys.platform == "linux" and run.device == "cpu"
    if asked is not None:
        if asked > 1 and not forks:
            raise ConfigError(
                f"jobs = {asked}: several runs at a time need Linux and run.device = 'cpu'; leave "
                "it out"
            )
        return max(1, min(asked, runs))
    if not forks:
        return 1
    cores = available_cores()
    if engine_asked:
        cores = cores // run.workers if run.engine == "pool" and run.workers else 1
    return max(1, min(cores, runs))


def carry_out(jobs: Sequence[Job], count: int, look: Look) -> dict[str, CoterieError]:
    """Do these, so many at a time; what failed, and why, by name."""
    return side_by_side(jobs, count, look) if count > 1 else one_by_one(jobs, look)


def one_by_one(jobs: Sequence[Job], look: Look) -> dict[str, CoterieError]:
    """Do these here."""
    failed: dict[str, CoterieError] = {}
    for job in jobs:
        name, begun = job.name, False
        try:
            ready = job.ready()
            look.begin(name, ready.rounds, ready.judged_by)
            begun = True
            error = attempted(ready.work, heeding(lambda event, n=name: look.round(n, event)))  # type: ignore[misc]
        except CoterieError as refused:
            error = refused
        if Stop.asked:  # a run can also fail because it is stopped
            raise KeyboardInterrupt
        if error is not None:
            failed[name] = error
        if begun:
            look.end(name, error)
    return failed


def attempted(work: Work, watch: Watch) -> CoterieError | None:
    """Do it; what it failed with. A mistake of ours is shown, and fails only this run."""
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
    """A process at work on a run, seen from here."""

    job: Job
    process: Any
    pipe: Connection
    tries: int


def side_by_side(jobs: Sequence[Job], count: int, look: Look) -> dict[str, CoterieError]:
    """Do these in processes of their own, at most so many at a time."""
    waiting = [(job, 1) for job in reversed(jobs)]
    workers: list[_Worker] = []
    failed: dict[str, CoterieError] = {}

    def ended(job: Job, error: CoterieError | None) -> None:
        if error is not None:
            failed[job.name] = error
        look.end(job.name, error)

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
                    look.begin(job.name, ready.rounds, ready.judged_by)
                _start(job, ready.work, tries, workers)
                continue
            heard = wait([w.pipe for w in workers], _TICK)
            for worker in [w for w in workers if w.pipe in heard]:
                try:
                    said = worker.pipe.recv()
                except (EOFError, OSError):  # it died before it could say how it ended
                    workers.remove(worker)
                    why = _buried(worker)
                    if worker.tries < _TRIES:
                        look.again(worker.job.name, why)
                        waiting.append((worker.job, worker.tries + 1))
                    else:
                        ended(worker.job, EngineError(_hopeless(worker, why)))
                    continue
                if isinstance(said, dict):
                    look.round(worker.job.name, cast(Event, said))
                else:
                    workers.remove(worker)
                    _buried(worker)
                    kind, sentence = said
                    ended(worker.job, error_named(kind)(sentence) if kind else None)
            look.tick()
            if Stop.asked:  # Python may have lost the exception that says so
                raise KeyboardInterrupt
    finally:
        _end(workers)
    return failed


def _hopeless(worker: _Worker, why: str) -> str:
    return (
        f"its process {why}, {worker.tries} times. If memory was short, fewer at a time may do: "
        "--jobs 1"
    )


def _start(job: Job, work: Work, tries: int, workers: list[_Worker]) -> None:
    """Begin a process, and count it among those that are at work."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_work,
        args=(theirs, work, [*(w.pipe for w in workers), ours], os.getpid()),
        name="coterie-run",
        daemon=False,  # it may have workers of its own
    )
    # A signal that arrived in the middle of a fork would strike a half-made process. One that
    # waited strikes when it is let through again: whoever ends all must know this one by then.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        process.start()
        workers.append(_Worker(job, process, ours, tries))
        theirs.close()
    except OSError as error:
        raise EngineError(
            f"a process could not be started: {error.strerror}. Fewer at a time may do: --jobs 1"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _work(pipe: Connection, work: Work, others: Sequence[Connection], parent: int) -> None:
    """The life of such a process: one run, told of round by round."""
    settle(parent, others)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is here now stays: never look through it again

    def tell(event: Event) -> None:
        try:
            pipe.send(_slim(event))
        except OSError:  # nobody is there any more: no run fails of that, and nobody would read it
            os._exit(1)

    error = attempted(work, tell)
    with contextlib.suppress(OSError):
        pipe.send(("", "") if error is None else (type(error).__name__, str(error)))


def _slim(event: Event) -> Event:
    return cast(Event, {key: value for key, value in event.items() if key in _SHOWN})


def _buried(worker: _Worker) -> str:
    """Wait for the end of a process that has ended its work; how it ended."""
    worker.pipe.close()
    worker.process.join()
    code = worker.process.exitcode
    return f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"


def _end(workers: Sequence[_Worker]) -> None:
    """End all that are still at work. Their runs survive it: checkpoints are whole or not there."""
    if not workers:
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # users are impatient
    try:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
