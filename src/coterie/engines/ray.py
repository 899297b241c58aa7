"""The Ray engine: workers on one or more machines of a Ray cluster.

Every worker is an actor with one thread and its own model. The object store of each machine holds
the clients' data once, and each distinct array of an exchange once. Client state is kept in files
of the run directory: workers that see the directory read and write there; for the others the state
is sent with the orders (``travelling_state``). If an actor or a machine dies, it is replaced and
its orders are run again.

Only this module imports Ray, and only when the engine is used.
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
from coterie.engines.shared_plan import SharedPlan, load_plan, share
from coterie.engines.travelling_state import (
    Copies,
    Version,
    copies_for_server,
    copies_for_worker,
    receive_at_server,
    receive_at_worker,
)
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
from coterie.errors import ConfigError, EngineError

MARK = ".shared"  # a file in the run directory; a worker that reads our token there sees our files
INLINE = 100_000  # bytes up to which Ray sends an argument within the call, which is faster
PATIENCE = 120.0  # seconds to wait for the first worker to start
_SPARE = 512_000_000  # bytes of the object store in addition to data and models


@dataclass(eq=False)
class Worker:
    """An actor, seen from the driver; ``pending`` is the one call that it is working on."""

    actor: Any = None
    pending: Any = None
    ready: bool = False
    shares: bool = True
    pid: int = 0
    unit: Unit | None = None
    has: set[int] = field(default_factory=set)
    present: set[Version] = field(default_factory=set)


class RayEngine:
    """Runs orders in Ray actors, with the loop's exact results for any number of them.

    ``address`` is the address of a cluster; without one, Ray is started on this machine and ended
    by ``close``. If the program has started Ray already, that is used and left running. Each worker
    takes ``cpus`` and ``gpus`` of the cluster, which may be fractions. With ``apart``, workers
    behave as if they did not see the run directory, which is useful for tests.
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
        self._token = secrets.token_hex(16)
        self._workers: list[Worker] = []
        self._failed_starts = 0  # in a row
        self._no_workers_since: float | None = None
        self._started_ray = False
        self._shared_plan: Any = None
        self._ray = imported()
        shared = share(portable(self._plan), self._ray.cloudpickle.dumps)
        try:
            self._connect(address, workers, shared.size)
            count = self._worker_count(workers)
            self._plan.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._plan.folder / MARK, self._token.encode(), durable=False)
            self._shared_plan = self._put(shared)
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
        """The process ids of the workers that are running, each valid on its own machine."""
        return [w.pid for w in self._workers if w.ready]

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Run these requests as workers become free, the largest clients first."""
        queue = Queue(units(requests, self._train, self._held, self._plan.training.batch_clients))
        blobs: dict[int, tuple[int, Any]] = {}
        for worker in list(self._workers):
            if worker.actor is None:
                self._replace(worker)
            elif worker.ready:
                worker.has.clear()
                worker.pending = worker.actor.begin.remote()
        try:
            while queue or any(w.unit for w in self._workers):
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    yield from queue.overdue(w.unit for w in self._workers)
                    return
                self._feed(queue, blobs)
                answers = [a for w in self._finished(left) for a in self._receive(w, queue)]
                self._feed(queue, blobs)  # keep workers busy while the server uses the answers
                yield from answers
        finally:
            # An interrupted exchange must not leave answers for the next one to read.
            busy = [w for w in self._workers if w.unit is not None]
            calls = [w.pending for w in busy if w.pending is not None]
            for worker in busy:
                self._stop(worker)
            if calls:  # a killed worker that had just finished could still be writing its state
                self._ray.wait(calls, num_returns=len(calls), timeout=10)

    def close(self) -> None:
        """End the workers, and Ray itself if this engine started it."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            calls = [w.actor.leave.remote() for w in self._workers if w.ready and not w.shares]
            if calls:
                self._ray.wait(calls, num_returns=len(calls), timeout=10)
        for worker in self._workers:
            with contextlib.suppress(Exception):
                self._stop(worker)
        self._workers, self._shared_plan = [], None
        (self._plan.folder / MARK).unlink(missing_ok=True)
        if self._started_ray:
            self._started_ray = False
            with _restored_signals():
                self._ray.shutdown()

    # --- the cluster ----------------------------------------------------------------------------

    def _connect(self, address: str | None, workers: int | None, data: int) -> None:
        ray = self._ray
        if ray.is_initialized():  # by the program that uses this engine
            return
        check_token(address)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is not None:
            if address.startswith("ray://"):
                raise ConfigError(
                    f"run.address = '{address}': Ray's client mode (ray://) is not supported. Run "
                    "Coterie on a machine of the cluster, with --address auto"
                )
            _check_reachable(address)
            options: dict[str, Any] = {"address": address}
        else:
            cores = max(available_cores(), (workers or 0) * self._cpus)
            options = {
                "address": "local",
                "num_cpus": int(np.ceil(cores)),
                "object_store_memory": _store_size(self._plan, data, int(cores)),
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        self._started_ray = True
        try:
            with _restored_signals():
                ray.init(**options, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as why:
            raise EngineError(_no_connection(address, str(why))) from why

    def _worker_count(self, workers: int | None) -> int:
        """The number of workers to start: the number set, or as many as the cluster has room for.

        Too little room for the number set is an error.
        """
        slots, nodes = 0, []
        for node in self._ray.nodes():
            if node["Alive"]:
                cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
                fits = [cpus / self._cpus] + ([gpus / self._gpus] if self._gpus else [])
                slots += int(min(fits) + 1e-9)
                nodes.append(f"{node['NodeManagerAddress']}: {cpus:g} CPUs, {gpus:g} GPUs")
        needs = f"{self._cpus:g} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
        if slots < (workers or 1):
            raise EngineError(
                f"the Ray cluster has room for {slots} workers of {needs} each, not for "
                f"{workers or 1} ({'; '.join(nodes)}). Use fewer workers (run.workers), or give "
                "each less (run.cpus_per_worker, run.gpus_per_worker)"
            )
        return workers or slots

    def _put(self, value: Any) -> Any:
        try:
            return self._ray.put(value)
        except (self._ray.exceptions.ObjectStoreFullError, OSError) as error:
            raise EngineError(
                f"Ray's object store is too small for this run ({_first_line(str(error))}). Start "
                "Ray with a larger one (ray start --object-store-memory), or free some memory"
            ) from error

    # --- workers --------------------------------------------------------------------------------

    def _await_workers(self) -> None:
        """Wait until all workers run; once ``PATIENCE`` is over, one is enough to begin."""
        until = time.monotonic() + PATIENCE
        while not all(w.ready for w in self._workers):
            left = until - time.monotonic()
            if left <= 0 and any(w.ready for w in self._workers):
                return
            for worker in self._finished(left):
                self._receive(worker, Queue([]))

    def _start(self) -> Worker:
        """Create a worker; its pending call ends when it has started."""
        options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_restarts": 0}
        actor = self._ray.remote(**options)(Actor).remote()
        starting = actor.enter.remote(
            library_versions(), self._token, self._apart, self._shared_plan
        )
        return Worker(actor, starting)

    def _stop(self, worker: Worker) -> None:
        if worker.actor is not None:
            self._ray.kill(worker.actor)
        worker.actor, worker.pending, worker.unit, worker.ready = None, None, None, False

    def _replace(self, worker: Worker) -> None:
        """Replace a dead worker by a new one."""
        self._stop(worker)
        self._workers[self._workers.index(worker)] = self._start()

    def _finished(self, left: float | None) -> list[Worker]:
        """Wait for workers whose call has ended; while no worker runs, ``PATIENCE`` at most."""
        pending = {w.pending: w for w in self._workers if w.pending is not None}
        now = time.monotonic()
        if any(w.ready for w in self._workers):
            self._no_workers_since = None
        else:
            self._no_workers_since = self._no_workers_since or now
            patience = self._no_workers_since + PATIENCE - now
            if patience <= 0:
                raise EngineError(
                    f"no worker started within {PATIENCE:g} s: the CPUs or GPUs of the cluster are "
                    "in use, or its machines are gone. Check with `ray status`"
                )
            left = patience if left is None else min(left, patience)
        ready, _ = self._ray.wait(list(pending), timeout=None if left is None else max(0.0, left))
        return [pending[ref] for ref in ready]

    def _receive(self, worker: Worker, queue: Queue) -> list[tuple[ClientId, Message | None]]:
        """Read a worker's answers; if the worker died, retry its unit or count it as lost."""
        call, unit, worker.pending = worker.pending, worker.unit, None
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if not worker.ready:
                self._failed_starts += 1
                if self._failed_starts >= TRIES or not _is_death(self._ray, error):
                    raise EngineError(_not_started(str(error))) from error
            self._replace(worker)
            lost = [] if unit is None else queue.died(unit)
            return [(r.client, None) for r in lost]
        if not worker.ready:
            self._check_started(worker, result)
        if unit is None:
            return []
        worker.unit = None
        answers, copies = result
        receive_at_server(self._store, unit.requests, copies, worker.present)
        # The bytes are copied so that Ray can free them in its object store.
        messages = [unframed(a.tobytes()) for a in answers]
        return [(r.client, m) for r, m in zip(unit.requests, messages, strict=True)]

    def _check_started(self, worker: Worker, machine: Mapping[str, Any]) -> None:
        """Check the versions and the storage of the machine on which a worker has started."""
        if machine["versions"] != library_versions():
            theirs, ours = (
                ", ".join(f"{name} {version}" for name, version in installed.items())
                for installed in (machine["versions"], library_versions())
            )
            raise EngineError(
                f"the machine {machine['node']} has {theirs}, this one {ours}: results would "
                "depend on which machine computes what. Install the same versions on all machines "
                "of the cluster"
            )
        if not machine["shares"] and self._plan.privacy.secure:
            raise EngineError(
                f"the machine {machine['node']} does not see {self._plan.folder}, where clients "
                "keep their keys and sessions with privacy.secure. Put the run directory on "
                "storage that all machines of the cluster share (--dir)"
            )
        self._failed_starts = 0
        worker.ready, worker.shares, worker.pid = True, machine["shares"], machine["pid"]

    def _feed(self, queue: Queue, blobs: dict[int, tuple[int, Any]]) -> None:
        """Give each idle worker a unit of work."""
        for worker in self._workers:
            if queue and worker.ready and worker.pending is None:
                worker.unit = queue.take()
                self._send(worker, worker.unit, blobs)

    def _send(self, worker: Worker, unit: Unit, blobs: dict[int, tuple[int, Any]]) -> None:
        """Start a unit at a worker; its arrays become arguments, each stored once an exchange."""
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
        present = worker.present
        copies = [] if worker.shares else copies_for_worker(self._store, unit.requests, present)
        worker.pending = worker.actor.answer.remote(work, _flat(copies), list(new), *new.values())


class Actor:
    """A worker with one thread and one client runtime, on a machine that Ray chooses."""

    def enter(
        self,
        expected: Mapping[str, str],
        token: str,
        apart: bool,
        shared: SharedPlan,
    ) -> dict[str, Any]:
        """Set the worker up from the shared plan; return the facts about its machine."""
        machine = {"versions": library_versions(), "pid": os.getpid(), "node": platform.node()}
        if machine["versions"] != expected:
            return machine
        torch.set_num_threads(1)
        plan = with_method(load_plan(shared))
        mark = plan.folder / MARK
        self._shares = not apart and mark.exists() and mark.read_text() == token
        if not self._shares:
            plan = replace(plan, folder=_worker_folder(token))
        self._runtime = ClientRuntime(plan)
        self._blobs: dict[int, Payload] = {}
        gc.collect()
        gc.freeze()  # these objects stay: spare the collector from scanning them again
        return machine | {"shares": self._shares}

    def begin(self) -> None:
        """Begin an exchange: drop the arrays of the previous one."""
        self._blobs.clear()
        self._runtime.forget()

    def answer(
        self, work: Sequence[tuple[ClientId, bytes, list[int]]], copies: Any, new: Any, *blobs: Any
    ) -> tuple[list[Any], Any]:
        """Run a unit; return its answers and, if storage is not shared, the new client state.

        Arrays arrive with the first unit of an exchange that needs them, and are kept until the
        next exchange.
        """
        self._blobs |= {n: memoryview(b) for n, b in zip(new, blobs, strict=True)}
        unit = [(c, Message(h, tuple(self._blobs[i] for i in ids))) for c, h, ids in work]
        store = self._runtime.store
        before = {} if self._shares else receive_at_worker(store, unit, copies)
        answers = [np.frombuffer(framed(a), np.uint8) for a in self._runtime.answer(unit)]
        return answers, _flat(copies_for_server(store, before))

    def leave(self) -> None:
        """Remove this worker's own folder."""
        if not self._shares:
            shutil.rmtree(self._runtime.plan.folder, ignore_errors=True)


def _flat(copies: Copies) -> Any:
    """Turn the copies of state into arrays, which Ray moves without another copy."""
    return [(client, version, np.frombuffer(copy, np.uint8)) for client, version, copy in copies]


def library_versions() -> dict[str, str]:
    """The versions of the packages that can change a result's bits."""
    from coterie import __version__

    python = ".".join(platform.python_version_tuple()[:2])
    return {"coterie": __version__, "torch": torch.__version__, "Python": python}


def _worker_folder(token: str) -> Path:
    """Make a folder for this worker alone; remove those of dead workers of the same run."""
    temporary = Path(tempfile.gettempdir())
    for old in temporary.glob(f"coterie-{token}-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = temporary / f"coterie-{token}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# --- Ray itself -----------------------------------------------------------------------------------


def imported() -> Any:
    """Import Ray with statistics off and authentication on; EngineError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    user_value = os.environ.get(_SKIPS)
    # Workers' deaths are handled here; Ray would also print a paragraph about each.
    os.environ.setdefault(_SKIPS, ".")
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            f"the engine 'ray' needs Ray ({error}): pip install 'coterie[ray]'"
        ) from None
    finally:
        if user_value is None:
            del os.environ[_SKIPS]
    return ray


_SKIPS = "RAY_DEDUP_LOGS_SKIP_REGEX"  # read when ray is imported


def check_token(address: str | None) -> None:
    """Require token authentication, with a token that other users cannot read.

    Ray listens on every network interface and runs any code for those it lets in.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise EngineError(
            f"RAY_AUTH_MODE = {mode}: Ray listens on every network interface and would run code "
            "for anyone who can reach it. Set it to token on all machines of the cluster"
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if path.exists():
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise EngineError(
                f"other users can read {path}, which gives them access to the Ray cluster: run "
                f"`chmod 600 {path}`, and make a new token if anyone else uses this machine"
            )
    elif address is not None or named:
        raise EngineError(
            f"there is no token for the Ray cluster in {path}: run `ray get-auth-token --generate` "
            "on its first machine, copy the file to the same path on the others, and run "
            f"`chmod 600 {path}` on each"
        )
    else:  # a token for this run's own Ray only, never written to a file
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore the program's signal handlers, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupted: SystemExit | None = None
    try:
        yield
    except SystemExit as exit:  # what Ray's handler raises for SIGTERM while Ray starts
        interrupted = exit
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if interrupted is not None:
        signal.raise_signal(signal.SIGTERM)
        raise interrupted


def _check_device(device: str, gpus: float) -> None:
    """Refuse GPUs that the device would not use, and a GPU device without GPUs."""
    if device.startswith("cuda") and not gpus:
        raise ConfigError(
            f"run.device = '{device}' on Ray needs a share of a GPU for each worker: set "
            "run.gpus_per_worker, for example to 0.5 for two workers on each GPU"
        )
    if gpus and not device.startswith("cuda"):
        raise ConfigError(
            f"run.gpus_per_worker = {gpus:g} has no effect with run.device = '{device}': set "
            "run.device = cuda, or leave out run.gpus_per_worker"
        )


def _store_size(plan: Plan, data: int, workers: int) -> int:
    """The size of the object store in bytes: the data, the models being sent, and some spare."""
    needed = data + (32 + 4 * workers) * plan.start.vector.nbytes + _SPARE
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(needed, 0.4 * memory))


def _is_death(ray: Any, error: Exception) -> bool:
    """Whether a worker died, and did not fail with an error that it reported."""
    deaths = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
    return isinstance(error, deaths) and "Error:" not in str(error)


def _not_started(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()] or ["it died"]
    reason = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
    if "No module named" in why:
        return (
            f"a machine of the Ray cluster lacks a module that the run needs ({reason}): install "
            "the same environment, including Coterie, on all machines"
        )
    return f"a worker could not be started on the Ray cluster: {reason}"


def _check_reachable(address: str) -> None:
    """Refuse an address that accepts no connection, where Ray itself would wait for minutes."""
    head = address
    if address == "auto":
        current = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        recorded = current.read_text().strip() if current.exists() else ""
        head = os.environ.get("RAY_ADDRESS") or recorded
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():  # Ray's own error says what is wrong with it
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise EngineError(_no_connection(address, f"{head}: {error.strerror or error}")) from None


def _no_connection(address: str | None, why: str) -> str:
    reason = _first_line(why)
    if "ersion mismatch" in why:
        reason = " ".join(why.split())
        return f"{reason}. Install the same versions on all machines of the Ray cluster"
    if address is None:
        return f"Ray could not be started on this machine: {reason}"
    return (
        f"no connection to a Ray cluster at '{address}': {reason}. Start one with "
        "`ray start --head`, or leave out --address to use Ray on this machine alone"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
