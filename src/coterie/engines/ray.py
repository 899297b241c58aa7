"""Workers on a Ray cluster: a machine that is rented, or a room full of them.

Every worker is an actor with one thread and one resident model. The clients' data lie once in the
object store of each machine, and so does every distinct array of an exchange. What clients keep is
in files of the run directory: workers that see it read and write there; for the others it travels
with the orders (``luggage``). An actor, or a machine, that dies is replaced and its orders are run
again.

This is the only module that imports Ray, and only when it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message
from coterie.client.plan import Plan
from coterie.client.runtime import ClientRuntime
from coterie.client.store import Store
from coterie.core.engine import Answers, Request
from coterie.core.messages import ClientId
from coterie.core.tree import write_atomic
from coterie.engines.base import units
from coterie.engines.shared_plan import SharedPlan, laid_out, unloaded
from coterie.engines.travelling_state import Copies, Version, brought, made, packed, unpacked
from coterie.engines.workers import (
    TRIES,
    Queue,
    Unit,
    arrived,
    available_cores,
    check_workers,
    framed,
    travelling,
    unframed,
)
from coterie.errors import ConfigError, EngineError

MARK = ".shared"  # a file in the run directory: who can read its number shares our storage
INLINE = 100_000  # bytes up to which Ray carries an argument within the call, which is faster
PATIENCE = 120.0  # seconds that we wait for a first worker to come up
_SPARE = 512_000_000  # bytes of the object store beside data and models


@dataclass(eq=False)
class Worker:
    """An actor, seen from the driver. It has one thing to do at a time, the pending one."""

    actor: Any = None
    pending: Any = None
    entered: bool = False
    shares: bool = True
    pid: int = 0
    unit: Unit | None = None
    has: set[int] = field(default_factory=set)
    there: set[Version] = field(default_factory=set)


class RayEngine:
    """Divides orders among actors; the same bits as the loop for any number of them.

    ``address`` is a cluster's; without one, Ray is started on this machine and ended by ``close``.
    A Ray that the program has started already is used, and left alone. Each worker takes ``cpus``
    and ``gpus`` of the cluster, fractions too. ``apart`` lets workers behave as if they did not see
    the run directory, to try that out.
    """

    piggybacks = False

    def __init__(
        self,
        plan: Plan,
        workers: int | None = None,
        address: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        apart: bool = False,
    ) -> None:
        check_workers(workers)
        _check_device(plan.device, gpus)
        self._plan = replace(plan, folder=plan.folder.resolve())
        self._train, self._held = plan.train_sizes, plan.held_sizes
        self._store = Store(self._plan.folder, plan.start.layout)
        self._cpus, self._gpus, self._apart = cpus, gpus, apart
        self._number = secrets.token_hex(16)
        self._workers: list[Worker] = []
        self._deaths = 0  # of workers that had not come up, in a row
        self._nobody_since: float | None = None
        self._ours = False
        self._goods: Any = None
        self._ray = imported()
        shared = laid_out(travelling(self._plan), self._ray.cloudpickle.dumps)
        try:
            self._connect(address, workers, shared.size)
            count = self._room(workers)
            self._plan.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._plan.folder / MARK, self._number.encode(), durable=False)
            self._goods = self._put(shared)
            del shared
            for _ in range(count):
                self._workers.append(self._start())
            self._await_workers()
        except BaseException:
            self.close()
            raise

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients of the population."""
        return range(len(self._plan.population.clients))

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are up, each on its own machine."""
        return [w.pid for w in self._workers if w.entered]

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Carry these out, largest clients first, as workers become free."""
        queue = Queue(units(requests, self._train, self._held, self._plan.training.batch_clients))
        blobs: dict[int, tuple[int, Any]] = {}
        for worker in list(self._workers):
            if worker.actor is None:
                self._replace(worker)
            elif worker.entered:
                worker.has.clear()
                worker.pending = worker.actor.begin.remote()
        try:
            while queue or any(w.unit for w in self._workers):
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:  # whoever is still at work is not waited for
                    yield from queue.overdue(w.unit for w in self._workers)
                    return
                self._feed(queue, blobs)
                come = [a for w in self._finished(left) for a in self._receive(w, queue)]
                self._feed(queue, blobs)  # first the next work, then what has to be thought about
                yield from come
        finally:
            # An exchange that was broken off leaves no answers behind for the next one to find.
            busy = [w for w in self._workers if w.unit is not None]
            ends = [w.pending for w in busy if w.pending is not None]
            for worker in busy:
                self._stop(worker)
            if ends:  # a killed one that had just finished could still write what it made
                self._ray.wait(ends, num_returns=len(ends), timeout=10)

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        with contextlib.suppress(Exception):  # whatever happened to the cluster, we leave
            left = [w.actor.leave.remote() for w in self._workers if w.entered and not w.shares]
            if left:
                self._ray.wait(left, num_returns=len(left), timeout=10)
        for worker in self._workers:
            with contextlib.suppress(Exception):
                self._stop(worker)
        self._workers, self._goods = [], None
        (self._plan.folder / MARK).unlink(missing_ok=True)
        if self._ours:
            self._ours = False
            with _own_signals():
                self._ray.shutdown()

    # --- the cluster ----------------------------------------------------------------------------

    def _connect(self, address: str | None, workers: int | None, data: int) -> None:
        ray = self._ray
        if ray.is_initialized():  # the program's own
            return
        check_token(address)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is not None:
            if address.startswith("ray://"):
                raise ConfigError(
                    f"run.address = '{address}': run Coterie on a machine of the cluster, with "
                    "--address auto; clients of Ray elsewhere (ray://) are not supported"
                )
            _knock(address)
            how: dict[str, Any] = {"address": address}
        else:
            cores = max(available_cores(), (workers or 0) * self._cpus)
            how = {
                "address": "local",
                "num_cpus": int(np.ceil(cores)),
                "object_store_memory": _store_size(self._plan, data, int(cores)),
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        self._ours = True
        try:
            with _own_signals():
                ray.init(**how, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as why:
            raise EngineError(_no_connection(address, str(why))) from why

    def _room(self, workers: int | None) -> int:
        """How many workers to start: as many as asked for, or as fit."""
        places, nodes = 0, []
        for node in self._ray.nodes():
            if node["Alive"]:
                cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
                fits = [cpus / self._cpus] + ([gpus / self._gpus] if self._gpus else [])
                places += int(min(fits) + 1e-9)
                nodes.append(f"{node['NodeManagerAddress']}: {cpus:g} CPUs, {gpus:g} GPUs")
        wants = f"{self._cpus:g} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
        if places < (workers or 1):
            raise EngineError(
                f"the Ray cluster has room for {places} workers of {wants} each, not for "
                f"{workers or 1} ({'; '.join(nodes)}). Ask for fewer (run.workers), or for less "
                "each (run.cpus_per_worker, run.gpus_per_worker)"
            )
        return workers or places

    def _put(self, value: Any) -> Any:
        try:
            return self._ray.put(value)
        except (self._ray.exceptions.ObjectStoreFullError, OSError) as error:
            raise EngineError(
                f"Ray's object store is too small for this run ({_first_line(str(error))}). Start "
                "Ray with more (ray start --object-store-memory), or free some memory"
            ) from error

    # --- workers --------------------------------------------------------------------------------

    def _await_workers(self) -> None:
        """Wait until all are up; in the end one is enough, if others find no room yet."""
        ends = time.monotonic() + PATIENCE
        while not all(w.entered for w in self._workers):
            left = ends - time.monotonic()
            if left <= 0 and any(w.entered for w in self._workers):
                return
            for worker in self._finished(left):
                self._receive(worker, Queue([]))

    def _start(self) -> Worker:
        """A new worker; it comes up by itself, and says so."""
        options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_restarts": 0}
        actor = self._ray.remote(**options)(Actor).remote()
        entering = actor.enter.remote(versions(), self._number, self._apart, self._goods)
        return Worker(actor, entering)

    def _stop(self, worker: Worker) -> None:
        if worker.actor is not None:
            self._ray.kill(worker.actor)
        worker.actor, worker.pending, worker.unit, worker.entered = None, None, None, False

    def _replace(self, worker: Worker) -> None:
        """A new worker in the place of a dead one."""
        self._stop(worker)
        self._workers[self._workers.index(worker)] = self._start()

    def _finished(self, left: float | None) -> list[Worker]:
        """Who has something to say; if nobody is up, that is waited for only so long."""
        pending = {w.pending: w for w in self._workers if w.pending is not None}
        now = time.monotonic()
        if any(w.entered for w in self._workers):
            self._nobody_since = None
        else:
            self._nobody_since = self._nobody_since or now
            patience = self._nobody_since + PATIENCE - now
            if patience <= 0:
                raise EngineError(
                    f"no worker came up within {PATIENCE:g} s: the CPUs or GPUs of the cluster are "
                    "in use, or its machines are gone. Look with `ray status`"
                )
            left = patience if left is None else min(left, patience)
        ready, _ = self._ray.wait(list(pending), timeout=None if left is None else max(0.0, left))
        return [pending[ref] for ref in ready]

    def _receive(self, worker: Worker, queue: Queue) -> list[tuple[ClientId, Message | None]]:
        """What a worker has to say; or, when it died, what that means for its work."""
        ref, unit, worker.pending = worker.pending, worker.unit, None
        try:
            said = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            if not worker.entered:
                self._deaths += 1
                if self._deaths >= TRIES or not _is_death(self._ray, error):
                    raise EngineError(_not_up(str(error))) from error
            self._replace(worker)
            lost = [] if unit is None else queue.died(unit)
            return [(r.client, None) for r in lost]
        if not worker.entered:
            self._welcome(worker, said)
        if unit is None:
            return []
        worker.unit = None
        answers, copies = said
        brought(self._store, unit.requests, copies, worker.there)
        # Copied, so that the object store is free again.
        messages = [unframed(a.tobytes()) for a in answers]
        return [(r.client, m) for r, m in zip(unit.requests, messages, strict=True)]

    def _welcome(self, worker: Worker, said: Mapping[str, Any]) -> None:
        """A worker came up: is it one of us, and does it see our files?"""
        if said["versions"] != versions():
            theirs, ours = (
                ", ".join(f"{k} {v}" for k, v in each.items())
                for each in (said["versions"], versions())
            )
            raise EngineError(
                f"the machine {said['node']} has {theirs}, this one {ours}: results would depend "
                "on who computes what. Install the same versions on all machines of the cluster"
            )
        if not said["shares"] and self._plan.privacy.secure:
            raise EngineError(
                f"the machine {said['node']} does not see {self._plan.folder}: with privacy.secure "
                "clients keep their keys and sessions in files there. Put the run directory on "
                "storage that all machines of the cluster share (--dir)"
            )
        self._deaths = 0
        worker.entered, worker.shares, worker.pid = True, said["shares"], said["pid"]

    def _feed(self, queue: Queue, blobs: dict[int, tuple[int, Any]]) -> None:
        """Give every idle worker something to do."""
        for worker in self._workers:
            if queue and worker.entered and worker.pending is None:
                worker.unit = queue.take()
                self._send(worker, worker.unit, blobs)

    def _send(self, worker: Worker, unit: Unit, blobs: dict[int, tuple[int, Any]]) -> None:
        """Arrays go as arguments of the call, each distinct one put once in an exchange."""
        work, new = [], dict[int, Any]()
        for request in unit.requests:
            ids = []
            for payload in request.message.payloads:
                if id(payload) not in blobs:
                    small = len(payload) < INLINE
                    array = np.frombuffer(payload, np.uint8)
                    blobs[id(payload)] = len(blobs), array if small else self._put(array)
                number, blob = blobs[id(payload)]
                ids.append(number)
                if number not in worker.has:
                    new[number] = blob
                    worker.has.add(number)
            work.append((request.client, request.message.header, ids))
        copies = [] if worker.shares else packed(self._store, unit.requests, worker.there)
        worker.pending = worker.actor.answer.remote(work, _flat(copies), list(new), *new.values())


class Actor:
    """A worker: one thread, one resident runtime. It runs where Ray puts it."""

    def enter(
        self,
        wanted: Mapping[str, str],
        number: str,
        apart: bool,
        shared: SharedPlan,
    ) -> dict[str, Any]:
        """Settle down with what was put for all workers; who we are."""
        said = {"versions": versions(), "pid": os.getpid(), "node": platform.node()}
        if said["versions"] != wanted:
            return said
        torch.set_num_threads(1)
        plan = arrived(unloaded(shared))
        mark = plan.folder / MARK
        self._shares = not apart and mark.exists() and mark.read_text() == number
        if not self._shares:
            plan = replace(plan, folder=_own_folder(number))
        self._runtime = ClientRuntime(plan)
        self._blobs: dict[int, Payload] = {}
        gc.collect()
        gc.freeze()  # what is here now stays: never look through it again
        return said | {"shares": self._shares}

    def begin(self) -> None:
        """A new exchange: the arrays of the last one are no longer needed."""
        self._blobs.clear()
        self._runtime.forget()

    def answer(
        self, work: Sequence[tuple[ClientId, bytes, list[int]]], copies: Any, new: Any, *blobs: Any
    ) -> tuple[list[Any], Any]:
        """Carry out a unit: its answers, and the client state that they made, if it has to travel.

        Arrays come once in an exchange, with the first unit that needs them, and are kept.
        """
        self._blobs |= {n: memoryview(b) for n, b in zip(new, blobs, strict=True)}
        unit = [(c, Message(h, tuple(self._blobs[i] for i in ids))) for c, h, ids in work]
        store = self._runtime.store
        before = {} if self._shares else unpacked(store, unit, copies)
        answers = [np.frombuffer(framed(a), np.uint8) for a in self._runtime.answer(unit)]
        return answers, _flat(made(store, before))

    def leave(self) -> None:
        """Clear away what lies here."""
        if not self._shares:
            shutil.rmtree(self._runtime.plan.folder, ignore_errors=True)


def _flat(copies: Copies) -> Any:
    """The same with arrays, which Ray moves without another copy."""
    return [(client, version, np.frombuffer(copy, np.uint8)) for client, version, copy in copies]


def versions() -> dict[str, str]:
    """What the bits of a result depend on."""
    from coterie import __version__

    python = ".".join(platform.python_version_tuple()[:2])
    return {"coterie": __version__, "torch": torch.__version__, "Python": python}


def _own_folder(number: str) -> Path:
    """A folder for this worker alone; those of dead workers of the same run are cleared away."""
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"coterie-{number}-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    own = place / f"coterie-{number}-{os.getpid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own


# --- Ray itself -----------------------------------------------------------------------------------


def imported() -> Any:
    """The module ray, quiet and with its doors shut; or a sentence."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    told = os.environ.get(_SKIPS)
    # A worker's death is our business; Ray would print a paragraph about it to standard output.
    os.environ.setdefault(_SKIPS, ".")
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            f"the engine 'ray' needs Ray ({error}): pip install 'coterie[ray]'"
        ) from None
    finally:
        if told is None:
            del os.environ[_SKIPS]
    return ray


_SKIPS = "RAY_DEDUP_LOGS_SKIP_REGEX"  # read when ray is imported


def check_token(address: str | None) -> None:
    """Keep token authentication on, with a token that nobody else can read.

    Ray listens on every network interface, and whoever it lets in may run any code.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise EngineError(
            f"RAY_AUTH_MODE = {mode}: Ray listens on every network interface and would run the "
            "code of anybody who can reach it. Set it to token, on all machines of the cluster"
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if path.exists():
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise EngineError(
                f"others can read {path}, which opens the Ray cluster to them: run "
                f"chmod 600 {path}; if anybody else uses this machine, make a new token too"
            )
    elif address is not None or named:
        raise EngineError(
            f"there is no token for the Ray cluster in {path}: on its first machine run "
            "`ray get-auth-token --generate`, copy the file to the same place on the others, and "
            f"chmod 600 {path} everywhere"
        )
    else:  # for the Ray of this run alone: it is in no file, and ends with this process
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the program's answers to signals: Ray puts its own in their place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ended: SystemExit | None = None
    try:
        yield
    except SystemExit as end:  # Ray's answer to SIGTERM while it starts
        ended = end
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
    if ended is not None:
        signal.raise_signal(signal.SIGTERM)
        raise ended


def _check_device(device: str, gpus: float) -> None:
    """Refuse GPUs that nobody would use, and workers that would have none."""
    if device.startswith("cuda") and not gpus:
        raise ConfigError(
            f"run.device = '{device}' on Ray needs a share of a GPU for each worker: set "
            "run.gpus_per_worker, as in 0.5 for two workers a GPU"
        )
    if gpus and not device.startswith("cuda"):
        raise ConfigError(
            f"run.gpus_per_worker = {gpus:g} has no effect with run.device = '{device}': set that "
            "to cuda, or leave GPUs out"
        )


def _store_size(plan: Plan, data: int, workers: int) -> int:
    """Bytes of the object store: the data once, models on their way, and room to move."""
    wanted = data + (32 + 4 * workers) * plan.start.vector.nbytes + _SPARE
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(wanted, 0.4 * pages))


def _is_death(ray: Any, error: Exception) -> bool:
    """Whether a worker died, rather than said why it cannot come up."""
    gone = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
    return isinstance(error, gone) and "Error:" not in str(error)


def _not_up(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()] or ["it died"]
    told = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
    if "No module named" in why:
        return (
            f"a machine of the Ray cluster lacks what the run needs ({told}): install the same "
            "environment, with Coterie in it, on all of them"
        )
    return f"a worker could not be started on the Ray cluster: {told}"


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would wait there for minutes."""
    place = address
    if address == "auto":
        noted = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        noted_there = noted.read_text().strip() if noted.exists() else ""
        place = os.environ.get("RAY_ADDRESS") or noted_there
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():  # Ray says what is wrong with it
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise EngineError(_no_connection(address, f"{place}: {error.strerror or error}")) from None


def _no_connection(address: str | None, why: str) -> str:
    told = _first_line(why)
    if "ersion mismatch" in why:
        told = " ".join(why.split())
        return f"{told}. Install the same versions on all machines of the Ray cluster"
    if address is None:
        return f"Ray could not be started on this machine: {told}"
    return (
        f"no connection to a Ray cluster at '{address}': {told}. Start one with "
        "`ray start --head`, or leave out --address for a Ray on this machine alone"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
