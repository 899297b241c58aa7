"""A line that goes dead without a word, as when a cable is pulled, and comes back."""

import socket
import threading
import time

import pytest

from federated import federation, rounds, until

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")


class Relay:
    """Passes bytes on between clients and a server, until it is cut: then nothing, to either."""

    def __init__(self, server: int) -> None:
        self.cut, self._server = threading.Event(), server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.cut.is_set():  # no byte, no end, no error
                    time.sleep(0.1)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.e2e
def test_a_client_behind_a_dead_line_misses_rounds_and_comes_back(tmp_path):
    with federation(tmp_path, rounds=40) as fed:
        relay = Relay(fed.port)
        settings = ["--set", "run.real_deadline=8", "--set", "run.cohort=3"]
        server = fed.serve("served", *settings)
        place = tmp_path / "served"
        for name in fed.names:
            fed.join(name, port=relay.port if name == "c" else None)
        until(
            lambda: any(2 in e["cohort"] and not e["lost"] for e in rounds(place)), "a round", 240
        )
        relay.cut.set()
        missed = until(
            lambda: [e for e in rounds(place) if e["lost"] or e["late"] or 2 not in e["cohort"]],
            "a round that it missed",
        )
        time.sleep(40)  # long enough for both ends to give their connections up
        relay.cut.clear()

        def back() -> bool:
            later = [e for e in rounds(place) if e["round"] > missed[0]["round"]]
            return any(2 in e["cohort"] and not e["lost"] + e["late"] for e in later)

        until(back, "a round with all three again", 300)
        assert server.process.poll() is None
        relay.close()
