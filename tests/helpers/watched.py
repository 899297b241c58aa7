"""A live page on loopback, its streams, and run directories made by hand."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import PATIENCE

TOKEN = "the-token-of-tests"


def round_of(number: int, clients: int = 4, **more: Any) -> dict[str, Any]:
    """A line of events.jsonl, as a run of FedAvg writes it."""
    scores = [((7 * c + number) % 100) / 100 for c in range(clients)]
    mean = sum(scores) / clients
    table = {"accuracy": mean, "weighted_accuracy": mean, "worst": min(scores), "worst_client": 0}
    table |= {"p10": min(scores), "p50": mean, "p90": max(scores), "std": 0.1, "loss": 0.5}
    moved = {"down": 1000 * clients, "up": 1000 * clients}
    return {
        "round": number,
        "cohort": list(range(clients)),
        "groups": [c % 3 for c in range(clients)],
        "bytes": moved,
        "total_bytes": {key: number * value for key, value in moved.items()},
        "wasted": {"down": 0, "up": 0},
        "total_wasted": {"down": 0, "up": 0},
        "kinds": {"model": [1000 * clients] * 2},
        "client_bytes": {str(c): [1000, 1000] for c in range(clients)},
        "lost": 0,
        "late": 0,
        "received": table,
        "client_scores": {"received": scores},
        "exchanges": 2,
        "seconds": {"train": 0.5, "score": 0.1},
        **more,
    }


def make_run(path: Path, rounds: int, planned: int = 10, clients: int = 4) -> Path:
    """A run that was stopped after so many rounds."""
    path.mkdir(parents=True)
    config = f'[run]\nrounds = {planned}\nseed = 0\n[method]\nname = "fedavg"\n'
    (path / "config.toml").write_text(config)
    add_lines(path, *(round_of(n, clients) for n in range(1, rounds + 1)))
    return path


def add_lines(path: Path, *events: dict[str, Any]) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@contextmanager
def served(folder: Path, *hosts: str, **options: Any) -> Iterator[Page]:
    """The live page of a folder, served by a thread at a port of its own."""
    import uvicorn

    from coterie.report.live.app import live_app
    from coterie.report.live.watching import Watching

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    watching = Watching(folder, **options)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            await watching.close()
            await super().shutdown(sockets)

    app = live_app(watching, TOKEN, hosts or ["127.0.0.1"], port)
    settings = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2)
    server = Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Page(port, watching)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


class Answer:
    """What came of a request."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers = answer.status, answer.headers
        self.text = answer.read().decode()


class Page:
    """The served page, as a browser or a stranger asks for it."""

    def __init__(self, port: int, watching: Any) -> None:
        self.port, self.watching = port, watching

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, token: str | None = TOKEN, **headers: str) -> Answer:
        shown = {} if token is None else {"X-Coterie-Token": token}
        return self.ask("POST", path, **shown, **headers)

    def ask(self, method: str, path: str, **headers: str) -> Answer:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            named = {key.replace("_", "-"): value for key, value in headers.items()}
            line.putrequest(method, path, skip_host="Host" in named)
            for key, value in named.items():
                line.putheader(key, value)
            line.endheaders()
            return Answer(line.getresponse())
        finally:
            line.close()

    @contextmanager
    def stream(self, path: str, **headers: str) -> Iterator[Stream]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        line.request("GET", path, headers=named)
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield Stream(answer)
        finally:
            if line.sock is not None:
                line.sock.shutdown(socket.SHUT_RDWR)  # or else the thread that reads holds it open
            line.close()


class Stream:
    """Server-sent events, one after the other."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.id = ""
        self.ended = False
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=[answer], daemon=True).start()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            while text := answer.readline():
                self._lines.put(text.decode())
        self.ended = True

    def next(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """The next event's parts."""
        found = self.maybe(seconds)
        assert found is not None, f"nothing came in {seconds:g} s"
        return found

    def maybe(self, seconds: float) -> dict[str, Any] | None:
        """The same; None if there is none in this time."""
        ends, data = time.monotonic() + seconds, None
        while (left := ends - time.monotonic()) > 0:
            try:
                text = self._lines.get(timeout=left)
            except queue.Empty:
                return None
            key, _, value = text.rstrip("\r\n").partition(": ")
            if key == "id":
                self.id = value
            elif key == "data":
                data = json.loads(value)
            elif not key and not value and data is not None:
                return data
        return None

    def until(self, done: Any, seconds: float = PATIENCE) -> dict[str, Any]:
        """The first event for which this holds."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            found = self.maybe(left)
            if found is not None and done(found):
                return found
        raise AssertionError(f"it did not come in {seconds:g} s")
