"""The pool engine: one single-threaded worker process per core, each with its own model.

The data is in memory once and shared with the workers. Within an exchange each distinct array is
sent once to each worker that needs it. A worker that dies, while working or while starting, is
replaced and its orders are run again. An order that kills three workers counts as a lost reply;
three workers killed in a row while starting end the run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

import torch

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message
from coterie.client.plan import Plan
from coterie.client.runtime import ClientRuntime
from coterie.core.engine import Answers, Request
from coterie.core.messages import ClientId
from coterie.engines.base import units
from coterie.engines.child_processes import STOPS, settle
from coterie.engines.workers import (
    TRIES,
    Queue,
    Unit,
    available_cores,
    check_workers,
    framed,
    portable,
    unframed,
    with_method,
)
from coterie.errors import EngineError

_READY, _BLOB, _UNIT, _FORGET = b"ready", b"B", b"U", b"F"


@dataclass(eq=False)
class Worker:
    """A worker process, seen from the parent."""

    process: Any
    pipe: Connection
    has: set[int] = field(default_factory=set)
    unit: Unit | None = None


class Pool:
    """Runs orders in worker processes, with the loop's exact results for any number of workers."""

    piggybacks = False

    def __init__(self, plan: Plan, workers: int | None = None) -> None:
        self._plan = plan
        self._train, self._held = plan.train_sizes, plan.held_sizes
        check_workers(workers)
        forks = sys.platform == "linux" and plan.device == "cpu"
        self._context: Any = mp.get_context("fork" if forks else "spawn")
        if not forks:
            plan.population.share()
        self._forked = forks
        self._workers: list[Worker] = []
        try:
            for _ in range(workers or available_cores()):
                self._workers.append(self._start())
            for worker in list(self._workers):
                self._await_ready(worker)
        except BaseException:
            self.close()
            raise

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients of the population."""
        return range(len(self._plan.population.clients))

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [w.process.pid for w in self._workers]

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Run these requests as workers become free, the largest clients first."""
        queue = Queue(units(requests, self._train, self._held, self._plan.training.batch_clients))
        numbers: dict[int, int] = {}
        for worker in list(self._workers):
            if not worker.process.is_alive():
                worker = self._replace(worker)
            worker.has.clear()
            with contextlib.suppress(OSError):  # a dead worker is noticed when it gets work
                worker.pipe.send_bytes(_FORGET)
        try:
            while queue or any(w.unit for w in self._workers):
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    yield from queue.overdue(w.unit for w in self._workers)
                    return
                self._feed(queue, numbers)
                busy = {w.pipe: w for w in self._workers if w.unit}
                frames: list[tuple[ClientId, bytes | None]] = []
                # No worker is busy if every send failed.
                for pipe in wait(list(busy), left) if busy else []:
                    frames += self._receive(busy[pipe], queue)  # type: ignore[index]
                self._feed(queue, numbers)  # keep workers busy while the server uses the answers
                for client, frame in frames:
                    yield client, None if frame is None else unframed(frame)
        finally:
            # An interrupted exchange must not leave answers for the next one to read.
            for worker in self._workers:
                if worker.unit is not None:
                    worker.unit = None
                    worker.process.kill()

    def close(self) -> None:
        """End the workers, which exit by themselves once their pipe is closed."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe()
        others = [w.pipe for w in self._workers] + [ours]
        process = self._context.Process(
            target=_work,
            args=(theirs, self._plan, others, os.getpid())
            if self._forked
            else (theirs, None, [], os.getpid()),
            daemon=True,
            name="coterie-worker",
        )
        # A signal in the middle of a fork would hit a worker that is not set up yet.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            process.start()
        except OSError as error:
            raise EngineError(f"a worker process could not be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()
        return Worker(process, ours)

    def _await_ready(self, worker: Worker) -> Worker:
        """Wait until this worker, or one that replaces it, has started; return that worker."""
        for _ in range(TRIES - 1):
            if self._is_ready(worker):
                return worker
            if worker.process.exitcode >= 0:  # not killed: its replacement would exit as well
                break
            worker = self._restart(worker)
        if self._is_ready(worker):
            return worker
        raise EngineError(_not_started(worker.process.exitcode))

    def _is_ready(self, worker: Worker) -> bool:
        """Wait until a worker has started; False if it ended instead."""
        try:
            if not self._forked:
                # Not as a process argument: multiprocessing would hang writing it to a dead one.
                worker.pipe.send_bytes(self._pickled())
            if worker.pipe.recv_bytes() == _READY:
                return True
        except (EOFError, OSError):
            pass
        worker.process.join()
        return False

    def _pickled(self) -> Any:
        try:
            return ForkingPickler.dumps(portable(self._plan))
        except (AttributeError, TypeError, PicklingError) as error:
            raise EngineError(
                f"a worker process could not be started: {error}. On this system models, losses "
                "and metrics are sent to workers by name: define them in a module, or use the "
                'loop engine (run.engine = "loop")'
            ) from error

    def _feed(self, queue: Queue, numbers: dict[int, int]) -> None:
        """Give each idle worker a unit of work."""
        for worker in list(self._workers):
            if queue and worker.unit is None:
                worker.unit = queue.take()
                try:
                    self._send(worker, worker.unit, numbers)
                except OSError:  # it was dead already, so the unit is not to blame
                    queue.put_back(worker.unit)
                    self._replace(worker)

    def _receive(self, worker: Worker, queue: Queue) -> list[tuple[ClientId, bytes | None]]:
        """Read a worker's answers; if the worker died, retry its unit or count it as lost."""
        unit = worker.unit
        assert unit is not None
        try:
            answers = [worker.pipe.recv_bytes() for _ in unit.requests]
        except (EOFError, OSError):
            self._replace(worker)
            return [(r.client, None) for r in queue.died(unit)]
        worker.unit = None
        return [(r.client, a) for r, a in zip(unit.requests, answers, strict=True)]

    def _send(self, worker: Worker, unit: Unit, numbers: dict[int, int]) -> None:
        work = []
        for request in unit.requests:
            blobs = [numbers.setdefault(id(p), len(numbers)) for p in request.message.payloads]
            for number, payload in zip(blobs, request.message.payloads, strict=True):
                if number not in worker.has:
                    worker.pipe.send_bytes(_BLOB + number.to_bytes(4, "little") + bytes(payload))
                    worker.has.add(number)
            work.append([request.client, request.message.header.decode(), blobs])
        worker.pipe.send_bytes(_UNIT + json.dumps(work).encode())

    def _replace(self, worker: Worker) -> Worker:
        """Replace a dead worker and wait until the new one is ready."""
        return self._await_ready(self._restart(worker))

    def _restart(self, worker: Worker) -> Worker:
        """Replace a dead worker by a new one, which is still starting."""
        worker.pipe.close()
        worker.process.join()
        index = self._workers.index(worker)
        del self._workers[index]  # so that no other process inherits the dead worker's pipe
        replacement = self._start()
        self._workers.insert(index, replacement)
        return replacement


def _not_started(code: int) -> str:
    """The error message when no worker starts, from the exit code of the last one tried."""
    if code < 0:
        return (
            f"{TRIES} worker processes in a row were killed while starting (signal {-code}). Is "
            "there enough memory? Try fewer workers (run.workers) or the loop engine "
            '(run.engine = "loop")'
        )
    return (
        f"a worker process ended while starting (exit code {code}). On some systems a script that "
        "starts workers needs `if __name__ == '__main__':`. If that is not the cause, try fewer "
        'workers (run.workers) or the loop engine (run.engine = "loop")'
    )


def _work(pipe: Connection, plan: Plan | None, others: Sequence[Connection], parent: int) -> None:
    """Answer units of work, in a worker process, until the parent closes the pipe."""
    settle(parent, others)
    torch.set_num_threads(1)
    blobs: dict[int, Payload] = {}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        runtime = ClientRuntime(with_method(plan or pickle.loads(pipe.recv_bytes())))
        gc.freeze()  # to look for garbage in what is shared with the parent would copy it
        pipe.send_bytes(_READY)
        while True:
            frame = pipe.recv_bytes()
            kind, content = frame[:1], memoryview(frame)[1:]
            if kind == _FORGET:
                blobs.clear()
                runtime.forget()
            elif kind == _BLOB:
                blobs[int.from_bytes(content[:4], "little")] = content[4:]
            else:
                work = json.loads(bytes(content))
                unit = [
                    (c, Message(h.encode(), tuple(blobs[b] for b in ids))) for c, h, ids in work
                ]
                for answer in runtime.answer(unit):
                    pipe.send_bytes(framed(answer))
