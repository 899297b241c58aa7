"""Where Coterie stands in for Flower's own processes, on both sides of a federation.

Orders travel as Flower messages over its grid. But Flower's own processes would run the code that
a server sends with a run, and start anew for every message. With ``--isolation process`` a
SuperLink and a SuperNode leave that work to somebody else: here, to the process that serves and to
the one that has joined. All that is used of Flower beyond its public app API is in this module.
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

# What an engine process that is gone, or has given up what we do with it, looks like.
AWAY = (httpx.HTTPError, ConnectionError, RunNotRunningException)
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_BEAT = 15.0  # seconds; Flower gives a task up after about sixty without a sign of life
_TRIES = 3
# What Flower calls an app: a name to start a run by. There is no code in it, and nobody runs any.
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


def quiet() -> None:
    """Flower tells every retry; what matters of them is told by us."""
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _patient() -> Any:
    """Tries a few times: an engine process that is really gone is somebody else's business."""
    invoker = make_simple_http_retry_invoker()
    invoker.max_tries, hopeless = _TRIES, invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        # Flower's own rule interrupts the whole process when a token is void, as after a restart.
        void = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401
        return void or (hopeless is not None and hopeless(error))

    invoker.should_giveup = gives_up
    return invoker


def _client(
    kind: Any, address: str, ca: bytes | None, component: str, *more: Any, tries: Any = None
) -> Any:
    return kind.from_server_address(
        server_address=address,
        insecure=ca is None,
        root_certificates=ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *more],
        retry_invoker=tries or _patient(),
    )


class Beat:
    """Signs of life of a task, for as long as it is worked at."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client, self._over = client, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_BEAT):
            try:
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except (*AWAY, RuntimeError):
                continue  # if it stays away, whoever works at the task will notice

    def stop(self) -> None:
        """It is done."""
        self._over.set()


class Link:
    """A SuperLink that runs, as the serving process uses it."""

    def __init__(
        self, address: str, ca: Path | None, secret: bytes | None, begun: Path | None = None
    ) -> None:
        self.address, self._begun = address, begun  # where the runs are noted that we began
        self._ca = None if ca is None else ca.read_bytes()
        self._secret = secret
        self._control = _client(ControlHttpClient, address, self._ca, "flwr-cli")
        self._grid: HttpGrid | None = None
        self._beat: Beat | None = None

    def register(self, public_keys: dict[int, str]) -> dict[int, int]:
        """Let the holders of these keys (OpenSSH) in, and only them; gives their node ids."""
        wanted = {
            client: public_key_to_bytes(load_ssh_public_key(key.encode()))  # type: ignore[arg-type]
            for client, key in public_keys.items()
        }
        known = self._nodes()
        for key in wanted.values():
            if key not in known:
                self._control.RegisterNode(RegisterNodeRequest(public_key=key))
        known = self._nodes()
        return {client: known[key] for client, key in wanted.items()}

    def _nodes(self) -> dict[bytes, int]:
        listed = self._control.ListNodes(ListNodesRequest()).nodes_info
        return {n.public_key: n.node_id for n in listed if n.status != "unregistered"}

    def open(self) -> Grid:
        """A grid of a run of its own; of runs that were left behind, the orders are void."""
        self.close()
        begun = self._begun
        ours = set(begun.read_text().split()) if begun is not None and begun.exists() else set()
        for run in self._control.ListRuns(ListRunsRequest()).run_dict.values():
            if run.status.status != "finished" and str(run.run_id) in ours:
                try:
                    self._control.StopRun(StopRunRequest(run_id=run.run_id))
                except httpx.HTTPStatusError:
                    continue  # it ended by itself meanwhile
        app, _ = build_fab_from_files({"pyproject.toml": _APP.encode()})
        bundle = fab_to_proto(Fab(hashlib.sha256(app).hexdigest(), app, {}))
        started = self._control.StartRun(StartRunRequest(fab=bundle)).run_id
        if begun is not None:
            begun.write_text(str(started))  # those before it have just been ended
        token = self._token(started)
        grid = HttpGrid(self.address, self._ca is None, self._ca, token=token)
        grid._retry_invoker = _patient()
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = given.task_id
        TaskIdentity.run_id = given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        self._grid, self._beat = grid, Beat(grid._runtime_client)
        return grid

    def _token(self, run: int) -> str:
        """The right to be the server of this run: a SuperLink is for one federation at a time."""
        auth = [] if self._secret is None else [_auth(self._secret)]
        client = _client(RuntimeHttpClient, self.address, self._ca, "SuperExec", *auth)
        asked = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
        try:
            while True:
                got = client.AcquireTask(asked)
                if not got.token:
                    raise EngineError(
                        f"the SuperLink at {self.address} gave the run to somebody else: start it "
                        "with --isolation process"
                    )
                if got.task.run_id == run:
                    return str(got.token)
        finally:
            client.close()

    def close(self) -> None:
        """End the run; the SuperLink stays."""
        if self._grid is not None:
            with contextlib.suppress(*AWAY):
                self._control.StopRun(StopRunRequest(run_id=self._grid.run.run_id))
        self.abandon()

    def abandon(self) -> None:
        """Leave the run to itself, with a SuperLink that does not answer."""
        if self._beat is not None:
            self._beat.stop()
        if self._grid is not None:
            self._grid.close()
        self._grid = self._beat = None


def _auth(secret: bytes) -> SuperExecAuthHttpInterceptor:
    return SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)


def client_app(answer: Callable[[RecordDict], RecordDict]) -> ClientApp:
    """The one client app: it carries out whatever order comes, with what is installed here."""
    app = ClientApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        return Message(answer(message.content), reply_to=message)

    return app


class GivenUp(Exception):
    """The rest of a message will never come."""


class Desk:
    """A SuperNode's messages, taken and answered one after another by this process.

    ``given_up`` says whether the SuperNode no longer fetches a message. Its worker is told that
    there is one before all of it has come; if the server's run ends meanwhile, a SuperNode forgets
    to tell it so, and Flower's own way is to ask for the rest for two hours.
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
        """Answer one message; False if there was none."""
        if not ours(int(self.address.rpartition(":")[2])):
            raise ConnectionError(f"somebody else listens at {self.address}")
        asked = AcquireTaskRequest(supported_task_types=["flwr-clientapp"])
        got = self._acquire.AcquireTask(asked)
        if not got.token:
            return False
        token = RuntimeTokenHttpInterceptor(got.token)
        client = _client(RuntimeHttpClient, self.address, None, "flwr-clientapp", token)
        self._heed(client)
        beat = Beat(client)
        try:
            message, context, _, _ = pull_task_input(client)
            push_message(client, self._app(message=message, context=context), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        except GivenUp:
            push_task_output(client, None, SubStatus.FAILED, "the message did not come")
        finally:
            beat.stop()
            client.close()
        return True

    def _heed(self, client: Any) -> None:
        """Have this client stop asking for parts of a message that was given up."""
        names: list[str] = []
        pull_messages, pull_object = client.PullMessages, client.PullObject

        def messages(*request: Any, **options: Any) -> Any:
            came = pull_messages(*request, **options)
            names.extend(tree.object_id for tree in came.message_object_trees)
            return came

        def part(*request: Any, **options: Any) -> Any:
            came = pull_object(*request, **options)
            if not came.object_available and any(map(self._given_up, names)):
                raise GivenUp
            return came

        client.PullMessages, client.PullObject = messages, part


def ours(port: int) -> bool:
    """Whether a process of the same user listens on this port of loopback, where one can know.

    Between two lives of a SuperNode another user of the machine could take its port, and give
    orders in its place.
    """
    try:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return True
    fields = [line.split() for line in lines]
    users = {f[7] for f in fields if f[3] == "0A" and int(f[1].partition(":")[2], 16) == port}
    return users <= {str(os.getuid())}
