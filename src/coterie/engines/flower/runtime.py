"""Connections to Flower's SuperLink and SuperNode, in place of Flower's own app processes.

Orders are sent as Flower messages over its grid. But Flower's own app processes would run code that
a server sends with a run, and would be started again for every message. With ``--isolation
process`` a SuperLink and a SuperNode leave that work to other processes: here, to the one that
serves and the one that has joined. Whatever Coterie uses of Flower beyond its public app API is in
this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from coterie import __version__
from coterie.errors import EngineError

# The errors when a SuperLink or SuperNode is gone, or has ended the run.
UNREACHABLE = (httpx.HTTPError, ConnectionError, RunNotRunningException)
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_HEARTBEAT = 15.0  # seconds; Flower gives up a task after about sixty without a heartbeat
_TRIES = 3
# An empty Flower app, since a run is started by naming one. It contains no code.
_APP = f"""[project]
name = "coterie"
version = "{__version__.partition("+")[0]}"
license = {{text = "Apache-2.0"}}
dependencies = []
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "coterie:installed"
clientapp = "coterie:installed"
[tool.flwr.app.config]
"""


def silence_flower() -> None:
    """Turn off the logs of Flower's clients, which report every retry."""
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _few_retries() -> Any:
    """Flower's retry policy with few tries: the callers reconnect to a process that is gone."""
    invoker = make_simple_http_retry_invoker()
    invoker.max_tries, flower_gives_up = _TRIES, invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        # Flower's own rule interrupts the whole process on an invalid token, as after a restart.
        invalid = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401
        return invalid or (flower_gives_up is not None and flower_gives_up(error))

    invoker.should_giveup = gives_up
    return invoker


def _client(kind: Any, address: str, ca: bytes | None, component: str, *interceptors: Any) -> Any:
    return kind.from_server_address(
        server_address=address,
        insecure=ca is None,
        root_certificates=ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
        retry_invoker=_few_retries(),
    )


class Heartbeat:
    """Sends Flower heartbeats for a task until it is stopped."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client, self._stopped = client, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_HEARTBEAT):
            try:
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except (*UNREACHABLE, RuntimeError):
                continue  # the thread that works at the task notices as well

    def stop(self) -> None:
        """Stop: the task is done."""
        self._stopped.set()


class SuperLink:
    """The serving process's connection to a running SuperLink.

    ``runs_file`` records the Flower runs started here, so that those a crash left can be ended.
    """

    def __init__(
        self, address: str, ca: Path | None, secret: bytes | None, runs_file: Path | None = None
    ) -> None:
        self.address, self._runs_file = address, runs_file
        self._ca = None if ca is None else ca.read_bytes()
        self._secret = secret
        self._control = _client(ControlHttpClient, address, self._ca, "flwr-cli")
        self._grid: HttpGrid | None = None
        self._heartbeat: Heartbeat | None = None

    def register(self, public_keys: dict[int, str]) -> dict[int, int]:
        """Register the clients with these public keys (OpenSSH); return their node ids."""
        keys = {
            client: public_key_to_bytes(load_ssh_public_key(key.encode()))  # type: ignore[arg-type]
            for client, key in public_keys.items()
        }
        registered = self._nodes()
        for key in keys.values():
            if key not in registered:
                self._control.RegisterNode(RegisterNodeRequest(public_key=key))
        registered = self._nodes()
        return {client: registered[key] for client, key in keys.items()}

    def _nodes(self) -> dict[bytes, int]:
        nodes = self._control.ListNodes(ListNodesRequest()).nodes_info
        return {n.public_key: n.node_id for n in nodes if n.status != "unregistered"}

    def open(self) -> Grid:
        """Start a Flower run and return its grid; runs that an earlier process left are stopped."""
        self.close()
        file = self._runs_file
        ours = set(file.read_text().split()) if file is not None and file.exists() else set()
        for run in self._control.ListRuns(ListRunsRequest()).run_dict.values():
            if run.status.status != "finished" and str(run.run_id) in ours:
                try:
                    self._control.StopRun(StopRunRequest(run_id=run.run_id))
                except httpx.HTTPStatusError:
                    continue  # it has ended by itself in the meantime
        app, _ = build_fab_from_files({"pyproject.toml": _APP.encode()})
        bundle = fab_to_proto(Fab(hashlib.sha256(app).hexdigest(), app, {}))
        started = self._control.StartRun(StartRunRequest(fab=bundle)).run_id
        if file is not None:
            file.write_text(str(started))  # earlier runs have just been stopped
        token = self._token(started)
        grid = HttpGrid(self.address, self._ca is None, self._ca, token=token)
        grid._retry_invoker = _few_retries()
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = task.task_id
        TaskIdentity.run_id = task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        self._grid, self._heartbeat = grid, Heartbeat(grid._runtime_client)
        return grid

    def _token(self, run: int) -> str:
        """Acquire the server task of this run; a SuperLink serves one federation at a time."""
        auth = [] if self._secret is None else [_auth(self._secret)]
        client = _client(RuntimeHttpClient, self.address, self._ca, "SuperExec", *auth)
        request = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
        try:
            while True:
                acquired = client.AcquireTask(request)
                if not acquired.token:
                    raise EngineError(
                        f"the SuperLink at {self.address} gave the run to another process: start "
                        "the SuperLink with --isolation process"
                    )
                if acquired.task.run_id == run:
                    return str(acquired.token)
        finally:
            client.close()

    def close(self) -> None:
        """End the Flower run; the SuperLink keeps running."""
        if self._grid is not None:
            with contextlib.suppress(*UNREACHABLE):
                self._control.StopRun(StopRunRequest(run_id=self._grid.run.run_id))
        self.abandon()

    def abandon(self) -> None:
        """Give up the Flower run without ending it, when the SuperLink does not answer."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._grid is not None:
            self._grid.close()
        self._grid = self._heartbeat = None


def _auth(secret: bytes) -> SuperExecAuthHttpInterceptor:
    return SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)


def client_app(answer: Callable[[RecordDict], RecordDict]) -> ClientApp:
    """The client app: it answers every message with ``answer``, running installed code only."""
    app = ClientApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        return Message(answer(message.content), reply_to=message)

    return app


class GivenUp(Exception):
    """The rest of a message will never arrive."""


class NodeWorker:
    """Takes a SuperNode's messages and answers them, one after another, in this process.

    ``given_up`` says whether the SuperNode no longer fetches a message. A SuperNode announces a
    message before all of it has arrived, and says nothing if the server's run ends in between;
    Flower's own client would then ask for the rest for two hours.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        app: ClientApp,
        given_up: Callable[[str], bool] = lambda message: False,
    ) -> None:
        self.address, self._app, self._given_up = address, app, given_up
        self._acquire = _client(RuntimeHttpClient, address, None, "SuperExec", _auth(secret))

    def serve(self) -> bool:
        """Answer one message; return False if there was none."""
        if not ours(int(self.address.rpartition(":")[2])):
            raise ConnectionError(f"a process of another user listens at {self.address}")
        request = AcquireTaskRequest(supported_task_types=["flwr-clientapp"])
        acquired = self._acquire.AcquireTask(request)
        if not acquired.token:
            return False
        token = RuntimeTokenHttpInterceptor(acquired.token)
        client = _client(RuntimeHttpClient, self.address, None, "flwr-clientapp", token)
        self._stop_when_given_up(client)
        heartbeat = Heartbeat(client)
        try:
            message, context, _, _ = pull_task_input(client)
            push_message(client, self._app(message=message, context=context), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        except GivenUp:
            push_task_output(client, None, SubStatus.FAILED, "the message did not arrive")
        finally:
            heartbeat.stop()
            client.close()
        return True

    def _stop_when_given_up(self, client: Any) -> None:
        """Make a client stop asking for parts of a message that the SuperNode gave up."""
        names: list[str] = []
        pull_messages, pull_object = client.PullMessages, client.PullObject

        def messages(*request: Any, **options: Any) -> Any:
            response = pull_messages(*request, **options)
            names.extend(tree.object_id for tree in response.message_object_trees)
            return response

        def part(*request: Any, **options: Any) -> Any:
            response = pull_object(*request, **options)
            if not response.object_available and any(map(self._given_up, names)):
                raise GivenUp
            return response

        client.PullMessages, client.PullObject = messages, part


def ours(port: int) -> bool:
    """Whether a process of the same user listens on this loopback port; True where unknown.

    While a SuperNode restarts, another user of the machine could take its port and send orders in
    its place.
    """
    try:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return True
    fields = [line.split() for line in lines]
    users = {f[7] for f in fields if f[3] == "0A" and int(f[1].partition(":")[2], 16) == port}
    return users <= {str(os.getuid())}
