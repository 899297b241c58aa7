"""The gate: real sockets, real TLS, a real HTTP server behind it, and what must not get there."""

import contextlib
import hashlib
import http.client
import logging
import socket
import socketserver
import ssl
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs coterie[flower]")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.engines.flower.gate import Gate, Limits, Refusals, signed_by
from coterie.engines.flower.keys import make_federation, read_client, read_server
from coterie.engines.flower.processes import free_port
from coterie.errors import ConfigError, EngineError

FLEET = "/v1/fleet/pull-messages"
QUICK = Limits(linger=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "federation"
    make_federation(folder, ["fl.example.org"], ["a", "b"])
    return folder


@pytest.fixture(scope="module")
def keys(folder):
    return read_server(folder)


class Upstream(socketserver.ThreadingTCPServer):
    """Stands for the SuperLink: notes whatever reaches it and answers with what it got."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, keys, port=0):
        self.seen, self.lines = [], []
        super().__init__(("127.0.0.1", port), Noting)
        if keys is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys.certificate, keys.key)
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, client_address):
        self.lines.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        pass

    def stop(self):
        self.shutdown()
        self.server_close()
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


class Noting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        size, digest = 0, hashlib.sha256()
        note = SimpleNamespace(
            path=self.path, headers=self.headers, method=self.command, whole=False
        )
        self.server.seen.append(note)
        for piece in self.pieces():
            size += len(piece)
            digest.update(piece)
        note.size, note.digest, note.whole = size, digest.hexdigest(), True
        behave = self.headers.get("x-behave")
        if behave == "hang-up":
            self.close_connection = True
            return
        if behave == "stop-half-way":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)
            self.close_connection = True
            return
        self.send_response(int(self.headers.get("x-status", 200)))
        self.send_header("x-seen", digest.hexdigest())
        self.send_header("connection", "keep-alive, x-internal")
        self.send_header("x-internal", "not for clients")
        self.send_header("keep-alive", "timeout=5")
        self.send_header("set-cookie", "session=1")
        if behave == "chunks":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in (b"one", b"two"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        answer = int(self.headers.get("x-answer", 2))
        self.send_header("content-length", str(answer))
        self.end_headers()
        for start in range(0, answer, 1 << 20):
            self.wfile.write(b"k" * min(1 << 20, answer - start))

    do_GET = do_POST

    def pieces(self):
        if self.headers.get("transfer-encoding") == "chunked":
            while length := int(self.rfile.readline(), 16):
                yield self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("content-length", 0))
        while left:
            piece = self.rfile.read(min(left, 1 << 20))
            if not piece:
                raise ConnectionError("cut")
            left -= len(piece)
            yield piece


@pytest.fixture
def gates(keys):
    """Makes gates before an upstream of their own."""
    with contextlib.ExitStack() as stack:

        def opening(insecure=False, port=0, **options):
            used = None if insecure else keys
            upstream = Upstream(used)
            stack.callback(upstream.stop)
            options = {"limits": QUICK} | options
            gate = Gate("127.0.0.1", port, upstream.port, used, insecure=insecure, **options)
            gate.start()
            stack.callback(gate.close)
            return gate, upstream

        yield opening


@pytest.fixture
def gate(gates):
    return gates()


def trusting(keys):
    return ssl.create_default_context(cafile=str(keys.ca))


def dial(gate, keys, **options):
    """A socket to the gate, with TLS."""
    plain = socket.create_connection(gate.address, timeout=20)
    return trusting(keys).wrap_socket(plain, server_hostname="localhost", **options)


def client(gate, keys):
    return http.client.HTTPSConnection(
        "127.0.0.1", gate.address[1], context=trusting(keys), timeout=30
    )


def post(gate, keys, path=FLEET, body=b"hello", **headers):
    connection = client(gate, keys)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer


def raw(gate, keys, request):
    """What comes back for these very bytes."""
    with dial(gate, keys) as line:
        line.sendall(request)
        said = b""
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            while piece := line.recv(65536):
                said += piece
                if b"\r\n\r\n" in said and b"connection: close" not in said.lower():
                    break
    return said


def status(said):
    return int(said.split()[1]) if said else None


# What goes through


def test_a_request_and_its_answer_go_through(gate, keys):
    gate, upstream = gate
    code, body, answer = post(
        gate, keys, flwr_signature="abc", content_type="application/protobuf", x_status="418"
    )
    assert (code, body) == (418, b"kk")
    assert answer.getheader("x-seen") == hashlib.sha256(b"hello").hexdigest()
    (seen,) = upstream.seen
    assert (seen.method, seen.path, seen.size) == ("POST", FLEET, 5)
    assert seen.headers["flwr-signature"] == "abc"
    assert seen.headers["content-type"] == "application/protobuf"


def test_what_belongs_to_a_connection_stays_on_it(gate, keys):
    gate, upstream = gate
    _, _, answer = post(
        gate,
        keys,
        host="evil.example.org/v1/control?",
        connection="keep-alive, x-mine",
        x_mine="1",
        te="trailers",
        keep_alive="timeout=9",
        proxy_authorization="secret",
        x_forwarded_for="10.0.0.1",
        x_forwarded_proto="https",
        forwarded="for=10.0.0.1",
        cookie="a=b",
    )
    (seen,) = upstream.seen
    assert seen.headers["host"] == f"127.0.0.1:{upstream.port}"
    assert {name.lower() for name in seen.headers} <= {"host", "content-length", "accept-encoding"}
    assert [name.lower() for name, _ in answer.getheaders()].count("content-length") == 1
    for name in ("x-internal", "keep-alive", "connection"):
        assert answer.getheader(name) is None


def test_nothing_of_one_client_is_said_to_another(gate, keys):
    gate, upstream = gate
    assert post(gate, keys)[2].getheader("set-cookie") is not None
    post(gate, keys)
    assert all("cookie" not in seen.headers for seen in upstream.seen)


def test_one_connection_carries_many_requests(gate, keys):
    gate, upstream = gate
    connection = client(gate, keys)
    with contextlib.closing(connection):
        connection.connect()
        first = connection.sock
        for i in range(5):
            connection.request("POST", FLEET, b"x" * i)
            answer = connection.getresponse()
            assert answer.read() == b"kk"
            assert connection.sock is first
    assert [seen.size for seen in upstream.seen] == [0, 1, 2, 3, 4]
    assert gate.connections <= 1


def test_requests_sent_at_once_are_answered_in_turn(gate, keys):
    gate, upstream = gate
    one = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\na"
    last = one.replace(b"get-run", b"get-fab").replace(b"Host", b"Connection: close\r\nHost")
    with dial(gate, keys) as line:
        line.sendall(one + last)
        said = b""
        while piece := line.recv(65536):
            said += piece
    assert said.count(b"HTTP/1.1 200") == 2
    assert [seen.path for seen in upstream.seen] == ["/v1/fleet/get-run", "/v1/fleet/get-fab"]


def test_bodies_in_chunks_go_through_both_ways(gate, keys):
    gate, upstream = gate
    connection = client(gate, keys)
    with contextlib.closing(connection):
        connection.request(
            "POST", FLEET, iter([b"abc", b"def"]), {"x-behave": "chunks"}, encode_chunked=True
        )
        assert connection.getresponse().read() == b"onetwo"
    assert upstream.seen[0].digest == hashlib.sha256(b"abcdef").hexdigest()


def test_one_who_asks_before_it_sends_is_told_to_go_on(gate, keys):
    gate, upstream = gate
    with dial(gate, keys) as line:
        line.sendall(
            b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert line.recv(1000).startswith(b"HTTP/1.1 100")
        line.sendall(b"ok")
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
    assert upstream.seen[0].size == 2


def test_the_last_answer_on_a_connection_arrives_whole(gate, keys):
    """To one who takes it slowly, and after whom the gate hangs up."""
    gate, _ = gate
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(20)
    plain.connect(gate.address)
    with trusting(keys).wrap_socket(
        plain, server_hostname="localhost", suppress_ragged_eofs=False
    ) as line:
        line.sendall(
            b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            b"x-answer: 3000000\r\nContent-Length: 0\r\n\r\n"
        )
        said = b""
        while piece := line.recv(4096):
            said += piece
    assert said.count(b"k") >= 3_000_000


def test_64_megabytes_go_through_and_are_never_held(gate, keys, monkeypatch):
    """In and out, bit for bit; what lies between the two sockets stays small."""
    gate, _ = gate
    size, most = 64 << 20, [0]
    from asyncio import StreamReader

    before = StreamReader.feed_data

    def measuring(self, data):
        before(self, data)
        most[0] = max(most[0], len(self._buffer))

    monkeypatch.setattr(StreamReader, "feed_data", measuring)
    piece = bytes(range(256)) * 4096
    body = piece * (size // len(piece))
    code, back, answer = post(gate, keys, body=body, x_answer=str(size))
    assert code == 200
    assert answer.getheader("x-seen") == hashlib.sha256(body).hexdigest()
    assert len(back) == size
    assert back.count(b"k") == size
    assert 0 < most[0] < 4 << 20


# What must not get there

PLAIN = b"Host: h\r\nContent-Length: 0\r\n\r\n"
TRICKS = {
    "control": b"POST /v1/control/start-run HTTP/1.1\r\n" + PLAIN,
    "runtime": b"POST /v1/runtime/push-messages HTTP/1.1\r\n" + PLAIN,
    "health": b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
    "root": b"POST / HTTP/1.1\r\n" + PLAIN,
    "get": b"GET /v1/fleet/pull-messages HTTP/1.1\r\nHost: h\r\n\r\n",
    "put": b"PUT /v1/fleet/pull-messages HTTP/1.1\r\n" + PLAIN,
    "lower-case post": b"post /v1/fleet/pull-messages HTTP/1.1\r\n" + PLAIN,
    "no name": b"POST /v1/fleet/ HTTP/1.1\r\n" + PLAIN,
    "folder only": b"POST /v1/fleet HTTP/1.1\r\n" + PLAIN,
    "deeper": b"POST /v1/fleet/a/b HTTP/1.1\r\n" + PLAIN,
    "final slash": b"POST /v1/fleet/get-run/ HTTP/1.1\r\n" + PLAIN,
    "dots": b"POST /v1/fleet/../control/start-run HTTP/1.1\r\n" + PLAIN,
    "dots at the end": b"POST /v1/fleet/.. HTTP/1.1\r\n" + PLAIN,
    "coded dots": b"POST /v1/fleet/%2e%2e/control/start-run HTTP/1.1\r\n" + PLAIN,
    "coded slash": b"POST /v1/fleet/..%2fcontrol%2fstart-run HTTP/1.1\r\n" + PLAIN,
    "twice coded": b"POST /v1/fleet/%252e%252e/control/start-run HTTP/1.1\r\n" + PLAIN,
    "coded letter": b"POST /v1/fleet/get-ru%6e HTTP/1.1\r\n" + PLAIN,
    "two slashes": b"POST //v1/control/start-run HTTP/1.1\r\n" + PLAIN,
    "two slashes, fleet": b"POST //v1/fleet/get-run HTTP/1.1\r\n" + PLAIN,
    "inner slashes": b"POST /v1/fleet//get-run HTTP/1.1\r\n" + PLAIN,
    "backslashes": b"POST /v1/fleet/..\\control\\start-run HTTP/1.1\r\n" + PLAIN,
    "semicolon": b"POST /v1/fleet/..;/control/start-run HTTP/1.1\r\n" + PLAIN,
    "query": b"POST /v1/fleet/get-run?x=/v1/control HTTP/1.1\r\n" + PLAIN,
    "fragment": b"POST /v1/fleet/get-run#/v1/control HTTP/1.1\r\n" + PLAIN,
    "absolute": b"POST http://127.0.0.1/v1/control/start-run HTTP/1.1\r\n" + PLAIN,
    "absolute, fleet": b"POST https://localhost/v1/fleet/get-run HTTP/1.1\r\n" + PLAIN,
    "authority": b"POST @127.0.0.1/v1/control/start-run HTTP/1.1\r\n" + PLAIN,
    "connect": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: h\r\n\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    "capitals": b"POST /V1/Fleet/get-run HTTP/1.1\r\n" + PLAIN,
    "nul": b"POST /v1/fleet/get-run\0 HTTP/1.1\r\n" + PLAIN,
    "newline": b"POST /v1/fleet/get-run\n HTTP/1.1\r\n" + PLAIN,
    "tab": b"POST\t/v1/fleet/get-run HTTP/1.1\r\n" + PLAIN,
    "h2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "h2c": b"POST /v1/fleet/get-run HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" + PLAIN,
    "websocket": b"POST /v1/fleet/get-run HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    + PLAIN,
    "two hosts": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: a\r\n" + PLAIN,
    "no host": b"POST /v1/fleet/get-run HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "length and chunks": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nPOST /v1/control/start-run HTTP/1.1\r\n" + PLAIN,
    "chunks and length": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/fleet/get-run HTTP/1.1\r\nContent-Length: 40\r\n" + PLAIN,
    "a signed length": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: +0\r\n\r\n",
    "a list of lengths": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    b"Content-Length: 0, 40\r\n\r\n",
    "other coding": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "odd coding": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding twice": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
    b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "space before the colon": b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "too many headers": b"POST /v1/fleet/get-run HTTP/1.1\r\n" + b"a: b\r\n" * 9000 + PLAIN,
    "a long path": b"POST /v1/fleet/" + b"a" * 70000 + b" HTTP/1.1\r\n" + PLAIN,
    "no HTTP": b"\x00\x01\x02\x03\r\n\r\n",
}


@pytest.fixture(scope="module")
def standing(keys):
    """One gate for all the tricks: it must be as good after them as before."""
    upstream = Upstream(keys)
    gate = Gate("127.0.0.1", 0, upstream.port, keys, limits=QUICK)
    gate.start()
    yield gate, upstream
    gate.close()
    upstream.stop()


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_do_not_get_through(standing, keys, trick):
    gate, upstream = standing
    upstream.seen.clear()
    said = raw(gate, keys, TRICKS[trick])
    assert 400 <= status(said) < 600
    assert said.count(b"HTTP/1.1") == 1  # nothing smuggled was answered
    assert b"connection: close" in said.lower()
    assert upstream.seen == []
    assert post(gate, keys)[0] == 200
    assert [seen.path for seen in upstream.seen] == [FLEET]


def test_not_found_is_what_the_rest_looks_like(standing, keys):
    gate, _ = standing
    for trick in ("control", "runtime", "health", "dots", "coded dots", "two slashes", "absolute"):
        assert status(raw(gate, keys, TRICKS[trick])) == 404


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhello\r\nzz\r\n",
        b"-1\r\n",
        b"FFFFFFFFFFFFFFFFFFFFF\r\n",
        b"5\r\nhelloPOST /v1/control/start-run HTTP/1.1\r\n\r\n",
    ],
)
def test_broken_chunks_end_the_request(gate, keys, body):
    """What was begun upstream is never completed there."""
    gate, upstream = gate
    head = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert status(raw(gate, keys, head + body)) == 400
    assert post(gate, keys)[0] == 200
    assert [s.path for s in upstream.seen if s.whole] == [FLEET]


def test_a_request_cut_short_is_not_completed(gate, keys):
    gate, upstream = gate
    with dial(gate, keys) as line:
        line.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc")
    assert post(gate, keys)[0] == 200
    assert [s.path for s in upstream.seen if s.whole] == [FLEET]


# Limits


def test_bodies_have_a_limit(gates, keys):
    gate, upstream = gates(limits=replace(QUICK, body=1000))
    assert post(gate, keys, body=b"x" * 1000)[0] == 200
    assert post(gate, keys, body=b"x" * 1001)[0] == 413
    assert len(upstream.seen) == 1
    connection = client(gate, keys)
    with contextlib.closing(connection):
        connection.request("POST", FLEET, iter([b"x" * 600] * 2), encode_chunked=True)
        assert connection.getresponse().status == 413
    assert [seen.size for seen in upstream.seen if seen.whole] == [1000]


def wait_until(true, seconds=10):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def closed(line):
    """Whether the other side hangs up."""
    try:
        return line.recv(1) == b""
    except (ConnectionResetError, ssl.SSLError):
        return True


def test_connections_have_a_limit(gates, keys):
    gate, _ = gates(limits=replace(QUICK, connections=3))
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(dial(gate, keys)) for _ in range(3)]
        wait_until(lambda: gate.connections == 3)
        with socket.create_connection(gate.address, timeout=5) as fourth:
            assert closed(fourth)  # at once: a handshake would be waited for twice as long
        held[0].close()
        wait_until(lambda: gate.connections == 2)
        assert post(gate, keys)[0] == 200
    wait_until(lambda: gate.connections == 0)


def test_one_address_has_a_limit_of_its_own(keys):
    gate = Gate("127.0.0.1", 0, 1, keys, limits=replace(QUICK, connections=10, each_address=2))
    gate._open.update({"192.0.2.1": 2, "192.0.2.2": 1, "127.0.0.1": 3})
    full = {a: gate._full(a) for a in ("192.0.2.1", "192.0.2.2", "127.0.0.1", "::ffff:127.0.0.1")}
    assert full == {
        "192.0.2.1": True,
        "192.0.2.2": False,
        "127.0.0.1": False,
        "::ffff:127.0.0.1": False,
    }
    gate._open["192.0.2.9"] = 4
    assert gate._full("127.0.0.1")


def test_silence_is_not_waited_for(gates, keys):
    """Before the handshake, before a request, within its head, within its body."""
    gate, upstream = gates(limits=replace(QUICK, handshake=0.2, headers=0.3, patience=0.3))
    head = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    with contextlib.ExitStack() as stack:
        mute = stack.enter_context(socket.create_connection(gate.address, timeout=10))
        lines = [stack.enter_context(dial(gate, keys)) for _ in range(3)]
        lines[1].sendall(head)
        lines[2].sendall(head + b"Content-Length: 9\r\n\r\nabc")
        assert closed(mute)
        assert closed(lines[0])
        assert status(lines[1].recv(1000)) == 408
        assert status(lines[2].recv(1000)) == 408
    wait_until(lambda: gate.connections == 0)
    assert not any(seen.whole for seen in upstream.seen)


def test_a_byte_now_and_then_does_not_hold_a_connection(gates, keys):
    """Each byte comes well within the time allowed for silence, and still it ends."""
    gate, _ = gates(limits=replace(QUICK, headers=0.4, patience=0.4))
    for head in (b"", b"Content-Length: 9999\r\n\r\n"):
        begun = time.monotonic()
        with dial(gate, keys) as line:
            line.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n" + head)
            line.settimeout(0.05)
            said = b""
            while not said and time.monotonic() - begun < 10:
                with contextlib.suppress(TimeoutError, OSError):
                    line.send(b"a")
                with contextlib.suppress(TimeoutError):
                    said = line.recv(1000)
        assert status(said) == 408
        assert time.monotonic() - begun < 5
    wait_until(lambda: gate.connections == 0)


def test_a_slow_body_that_gets_on_is_waited_for(gates, keys):
    """Twice the fixed patience, but each piece earns more."""
    gate, upstream = gates(limits=replace(QUICK, patience=0.2, slowest=1000))
    with dial(gate, keys) as line:
        line.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(10):
            line.sendall(b"x" * 100)
            time.sleep(0.04)
        assert status(line.recv(1000)) == 200
    assert upstream.seen[0].size == 1000


def test_an_answer_that_nobody_takes_is_dropped(gates, keys):
    gate, _ = gates(limits=replace(QUICK, patience=0.3))
    with dial(gate, keys) as line:
        line.sendall(
            b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nx-answer: 50000000\r\n"
            b"Content-Length: 0\r\n\r\n"
        )
        wait_until(lambda: gate.connections == 0)


# When the SuperLink is away


def test_a_superlink_that_is_away_and_comes_back(gates, keys):
    gate, upstream = gates()
    port = upstream.port
    assert post(gate, keys)[0] == 200
    upstream.stop()
    code, body, _ = post(gate, keys)
    assert code == 502
    assert b"refused by the gate: the server is not reachable" in body
    back = Upstream(keys, port)
    try:
        assert post(gate, keys)[0] == 200
    finally:
        back.stop()


def test_a_superlink_that_hangs_up(gate, keys):
    gate, _ = gate
    assert post(gate, keys, x_behave="hang-up")[0] == 502
    with pytest.raises((http.client.IncompleteRead, ssl.SSLError, ConnectionError)):
        post(gate, keys, x_behave="stop-half-way")
    assert post(gate, keys)[0] == 200


def test_a_superlink_that_does_not_answer(gates, keys):
    gate, _ = gates(limits=replace(QUICK, upstream=0.2))
    mute = socket.create_server(("127.0.0.1", 0))
    with mute:
        gate._superlink = mute.getsockname()[1]
        assert post(gate, keys)[0] == 504


def test_only_the_federations_own_superlink_is_spoken_to(tmp_path, gates, keys):
    """Another process on the SuperLink's port, without its key, gets no request."""
    make_federation(tmp_path / "other", ["h"], ["a"])
    stranger = Upstream(read_server(tmp_path / "other"))
    gate, _ = gates()
    try:
        gate._superlink = stranger.port
        assert post(gate, keys)[0] == 502
        assert stranger.seen == []
    finally:
        stranger.stop()


def test_proxies_of_the_environment_are_not_used(gates, keys, monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    gate, _ = gates()
    assert post(gate, keys)[0] == 200


# TLS


def test_tls_is_new_enough_and_speaks_only_http_1(gate, keys):
    gate, _ = gate
    with dial(gate, keys) as line:
        assert line.version() == "TLSv1.3"
    context = trusting(keys)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection(gate.address, timeout=10)
    with context.wrap_socket(plain, server_hostname="fl.example.org") as line:
        assert line.version() == "TLSv1.2"
        assert line.selected_alpn_protocol() == "http/1.1"
    old = trusting(keys)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    plain = socket.create_connection(gate.address, timeout=10)
    with plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname="localhost")


def test_no_request_without_tls(gate):
    gate, upstream = gate
    with socket.create_connection(gate.address, timeout=10) as line:
        line.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\n" + PLAIN)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := line.recv(1000):
                said += piece
    assert b"HTTP" not in said
    assert upstream.seen == []


def test_insecure_is_for_loopback_only(gates, keys):
    gate, upstream = gates(insecure=True)
    connection = http.client.HTTPConnection(*gate.address, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", FLEET, b"x")
        assert connection.getresponse().read() == b"kk"
        connection.request("POST", "/v1/control/start-run", b"x")
        assert connection.getresponse().status == 404
    assert len(upstream.seen) == 1
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="loopback"):
            Gate(host, 0, 1, insecure=True)
    Gate("localhost", 0, 1, insecure=True)
    with pytest.raises(ConfigError, match="either the server's keys or --insecure"):
        Gate("127.0.0.1", 0, 1)
    with pytest.raises(ConfigError, match="either the server's keys or --insecure"):
        Gate("127.0.0.1", 0, 1, keys, insecure=True)


# Who is admitted


def flower_headers(key):
    """What Flower's own client puts on a request for this key."""
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    request = SimpleNamespace(headers={})
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(
        SimpleNamespace(request=request), lambda context: None
    )
    return request.headers


def test_only_signatures_of_the_federations_clients_are_admitted(gates, folder, keys):
    gate, upstream = gates(admits=signed_by(keys.clients))

    def ask(headers):
        return post(gate, keys, **headers)[0]

    private = read_client(folder / "clients/a").node_key.read_bytes()
    known = flower_headers(serialization.load_ssh_private_key(private, None))
    stranger = flower_headers(ec.generate_private_key(ec.SECP384R1()))
    public, signature = "flwr-public-key", "flwr-signature"
    assert set(known) == {public, signature, "flwr-timestamp"}
    assert ask(known) == 200
    for headers in (
        {},
        stranger,
        known | {signature: stranger[signature]},
        known | {public: stranger[public]},
        known | {"flwr-timestamp": stranger["flwr-timestamp"] + "0"},
        known | {signature: "%%%"},
        {k: v for k, v in known.items() if k != "flwr-timestamp"},
    ):
        assert ask(headers) == 412
    assert len(upstream.seen) == 1
    gate.admits = signed_by(keys.clients[1:])
    assert ask(known) == 412


def answers(node, *sources):
    """A request to push messages, as this node and with messages from these."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node

    said = [Message(metadata=Metadata(src_node_id=source)) for source in sources]
    return PushMessagesRequest(node=Node(node_id=node), messages_list=said).SerializeToString()


def test_a_client_answers_for_its_own_node_only(gates, folder, keys):
    nodes = {0: 11, 1: 2**63 + 5}
    gate, upstream = gates(
        admits=signed_by(keys.clients, nodes), limits=replace(QUICK, answers=10_000)
    )

    def push(name, body, path="/v1/fleet/push-messages"):
        private = read_client(folder / "clients" / name).node_key.read_bytes()
        proof = flower_headers(serialization.load_ssh_private_key(private, None))
        return post(gate, keys, path, body, **proof)[0]

    a, b = nodes.values()
    assert push("a", answers(a, a)) == 200
    assert push("b", iter([answers(b, b), answers(b, b)])) == 200  # in chunks
    assert [note.digest for note in upstream.seen] == [
        hashlib.sha256(body).hexdigest() for body in (answers(a, a), answers(b, b) * 2)
    ]
    for body in (answers(a, b), answers(a, a, b), answers(b, b), answers(b, a), answers(a, 0)):
        assert push("a", body) == 403
    assert push("a", answers(a, a) + answers(b)) == 403  # the second node takes the first's place
    assert push("a", answers(a, a) + b"\xff") == 400
    assert push("a", answers(a, *[a] * 2000)) == 413
    assert len(upstream.seen) == 2
    assert push("a", b"\xff" * 20_000, "/v1/fleet/push-object") == 200  # flows through, unread


def test_who_is_not_admitted_does_not_get_a_body_in(gates, keys):
    gate, upstream = gates(admits=lambda headers: None)
    assert post(gate, keys, body=b"x" * 1_000_000)[0] == 412
    assert upstream.seen == []


# Logs, start and end


def test_refusals_are_logged_and_cannot_forge_or_flood(gates, keys, caplog):
    gate, _ = gates()
    with caplog.at_level(logging.WARNING, "coterie.gate"):
        raw(gate, keys, TRICKS["control"])
        raw(gate, keys, TRICKS["a long path"])
        for _ in range(12):
            raw(gate, keys, TRICKS["no HTTP"])
    assert "127.0.0.1: b'POST /v1/control/start-run': not found (404)" in caplog.messages[0]
    assert len(caplog.messages) == 10
    assert all("\n" not in m and len(m) < 400 for m in caplog.messages)


def test_refusals_that_were_not_shown_are_counted(caplog):
    now = [0.0]
    refusals = Refusals(
        logging.getLogger("coterie.gate"), lines=2, seconds=10, clock=lambda: now[0]
    )
    for _ in range(5):
        refusals.note("h", "x")
    assert len(caplog.messages) == 2
    now[0] = 10
    refusals.note("h", "y")
    assert caplog.messages[2:] == [
        "gate: 3 more refusals not shown",
        "gate: refused h: y",
    ]


def test_an_address_in_use(gate, keys):
    gate, _ = gate
    with pytest.raises(EngineError, match=r"cannot listen on 127.0.0.1:.*Address already in use"):
        Gate("127.0.0.1", gate.address[1], 1, keys).start()
    with pytest.raises(ConfigError, match=r"no.such.host.invalid:1: invalid address"):
        Gate("no.such.host.invalid", 1, 1, keys)


def test_a_closed_gate_is_closed(gates, keys):
    gate, _ = gates()
    address = gate.address
    with dial(gate, keys) as line:
        wait_until(lambda: gate.connections == 1)
        thread = gate._thread
        gate.close()
        assert closed(line)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    with pytest.raises(EngineError, match="not open"):
        gate.address  # noqa: B018
    gate.close()
    assert not thread.is_alive()


def test_a_gate_closes_at_once_whatever_its_clients_do(keys):
    """Just answered, in the middle of a body, in the middle of an answer."""
    upstream = Upstream(keys)
    head = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\n"
    requests = [
        *[head + b"Content-Length: 0\r\n\r\n"] * 5,
        head + b"Content-Length: 9\r\n\r\nabc",
        head + b"x-answer: 50000000\r\nContent-Length: 0\r\n\r\n",
    ]
    try:
        for request in requests:
            upstream.seen.clear()
            gate = Gate("127.0.0.1", 0, upstream.port, keys)
            gate.start()
            with dial(gate, keys) as line:
                line.sendall(request)
                if b"abc" in request:
                    wait_until(lambda: upstream.seen)
                else:
                    line.recv(1)
                begun = time.monotonic()
                gate.close()
                assert time.monotonic() - begun < 3
    finally:
        upstream.stop()


def test_a_gate_opens_again_on_the_same_port(keys):
    port = free_port()
    for _ in range(2):
        gate = Gate("127.0.0.1", port, 1, keys)
        gate.start()
        assert post(gate, keys)[0] == 502
        gate.close()
