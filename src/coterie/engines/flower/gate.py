"""The gate: a proxy that exposes only the clients' part of a SuperLink to the network.

A SuperLink serves clients, operators and applications on one port, and anyone who can reach that
port can register keys and start runs. So the SuperLink listens on loopback only, and the gate in
front of it accepts connections with TLS and the server's certificate. It forwards only what clients
need, ``POST /v1/fleet/NAME``, and answers everything else with 404.

The gate parses each request and writes a new one, so that the SuperLink gets the gate's own
framing, host and path, whatever the original contained. Bodies are streamed in pieces. The gate
runs in its own thread, which spends nearly all its time waiting for sockets or in OpenSSL.

A SuperLink checks that a request is signed by the node it names, but not that the answers inside
come from the same node. So the gate reads ``push-messages`` requests, which are small (arrays are
sent separately), and lets a client answer in its own name only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import socket
import ssl
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import h11
    import httpx

    from coterie.engines.flower.keys import EnrolledClient, ServerKeys

T = TypeVar("T")

# From a request's headers: the node that sent it, 0 if that is not known, None if not admitted.
Admits = Callable[[Mapping[str, str]], int | None]

LOG = logging.getLogger("coterie.gate")
_ALLOWED = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_ANSWERS = b"/v1/fleet/push-messages"
_PIECE = 1 << 18
_HEADERS, _HEADERS_SIZE, _TARGET_SIZE = 100, 1 << 15, 100
# These concern one connection only, or the gate writes its own. x-forwarded-* are dropped as well,
# because a SuperLink trusts them.
_NOT_FORWARDED = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection", b"http2-settings"),
    *(b"host", b"expect", b"forwarded", b"via", b"x-real-ip", b"cookie", b"content-length"),
}


@dataclass(frozen=True)
class Limits:
    """Limits on what a client may use; times in seconds, sizes in bytes."""

    body: int = 1 << 30
    answers: int = 1 << 24  # a body that the gate itself reads: messages without their arrays
    connections: int = 400
    each_address: int = 100  # connections from one address, except loopback
    handshake: float = 10
    headers: float = 20  # from the start, or the end of the last answer, to the end of the headers
    patience: float = 30  # of waiting for the client, within a body or while it reads an answer
    slowest: float = 2000  # bytes a second; slower transfers use up the patience
    linger: float = 1  # after a refusal, while the client is still sending
    upstream: float = 120  # for the SuperLink to answer


class _Refused(Exception):
    """A request that is answered with this HTTP status and not forwarded."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """Listens on ``host:port`` and forwards clients' requests to a SuperLink on loopback.

    ``keys`` are the server's keys: clients are shown their certificate, and the SuperLink, which
    uses the same one, is checked against their authority. Without keys, ``insecure`` must be set
    and the address must be on loopback. ``admits`` gets a request's headers (with lower-case names)
    before the body is read; a request that it does not admit gets status 412, as from a SuperLink.
    If it returns the node that sent the request, answers in the name of another node get 403.
    """

    def __init__(
        self,
        host: str,
        port: int,
        superlink: int,
        keys: ServerKeys | None = None,
        *,
        insecure: bool = False,
        admits: Admits | None = None,
        limits: Limits | None = None,
        log: logging.Logger = LOG,
    ) -> None:
        if insecure == (keys is not None):
            raise ConfigError("serving needs either the server's keys or --insecure, on loopback")
        try:
            import h11  # noqa: F401
            import httpx  # noqa: F401
        except ImportError:
            raise ConfigError("serving needs the extra: pip install 'coterie[flower]'") from None
        self._family, self._bind = _resolved(host, port)
        if insecure and not ipaddress.ip_address(self._bind[0]).is_loopback:
            raise ConfigError(
                f"--insecure is for loopback (127.0.0.1) only, and {host} is not: others could "
                "read and change everything. Make keys with `coterie keys make`"
            )
        self.admits = admits  # may be replaced while the gate is open
        self._keys, self._superlink = keys, superlink
        self._limits = limits or Limits()
        self._refusals = Refusals(log)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._open: Counter[str] = Counter()
        self._server = None if keys is None else _serving(keys)
        self._client = None if keys is None else ssl.create_default_context(cafile=str(keys.ca))

    @property
    def address(self) -> tuple[str, int]:
        """The address it listens on, with the actual port if port 0 was requested."""
        if self._listener is None:
            raise EngineError("the gate is not open")
        name: tuple[str, int] = self._listener.getsockname()[:2]
        return name

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return sum(self._open.values())

    def start(self) -> None:
        """Open the gate, and return once it accepts connections."""
        listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._family == socket.AF_INET6:
                both = not ipaddress.ip_address(self._bind[0]).is_unspecified
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, both)
            listener.bind(self._bind)
            listener.listen(128)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            host, port = self._bind[:2]
            raise EngineError(
                f"cannot listen on {host}:{port}: {error.strerror}. Is another server running? "
                "Choose another port or address"
            ) from None
        self._listener = listener
        ready = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._run(ready))
            finally:
                ready.set()

        self._thread = threading.Thread(target=run, name="coterie-gate", daemon=True)
        self._thread.start()
        ready.wait()
        if self._stop is None:
            self.close()
            raise EngineError("the gate could not be opened")

    def close(self) -> None:
        """Close the gate and every connection through it."""
        if self._thread is not None and self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _run(self, ready: threading.Event) -> None:
        import httpx

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=20,
            keepalive_expiry=2,  # well before the SuperLink closes a connection, after 5
        )
        tasks: set[asyncio.Task[None]] = set()
        # Only httpx's transport is used: no cookies, redirects, proxies or default headers.
        async with httpx.AsyncHTTPTransport(
            verify=self._client or False, trust_env=False, limits=limits
        ) as upstream:
            accepting = asyncio.create_task(self._accept(upstream, tasks))
            ready.set()
            await self._stop.wait()
            for task in (accepting, *tasks):
                task.cancel()
            await asyncio.gather(accepting, *tasks, return_exceptions=True)

    async def _accept(
        self, upstream: httpx.AsyncHTTPTransport, tasks: set[asyncio.Task[None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # no file descriptor is left, or the client has gone
                self._refusals.note("?", f"a connection could not be accepted: {error.strerror}")
                await asyncio.sleep(0.05)
                continue
            address = str(peer[0])
            if self._full(address):
                self._refusals.note(address, "too many connections")
                connection.close()
                continue
            self._open[address] += 1
            task = asyncio.create_task(self._converse(connection, address, upstream))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _full(self, address: str) -> bool:
        if self.connections >= self._limits.connections:
            return True
        plain = address.removeprefix("::ffff:").partition("%")[0]
        local = ipaddress.ip_address(plain).is_loopback
        return not local and self._open[address] >= self._limits.each_address

    async def _converse(
        self, connection: socket.socket, address: str, upstream: httpx.AsyncHTTPTransport
    ) -> None:
        """Handle one connection from handshake to end; errors are logged and never raised."""
        try:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = await self._shake_hands(connection, address)
            if line is None:
                return
            try:
                visit = _Visit(line, self._limits, self._superlink, self._keys is not None)
                while await self._answer(visit, address, upstream):
                    pass
                await line.end(self._limits.patience)
            finally:
                line.abort()
        except Exception as error:
            self._refusals.note(address, f"broken off: {type(error).__name__}: {error}")
        finally:
            connection.close()
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    async def _shake_hands(self, connection: socket.socket, address: str) -> _Line | None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        timeout = None if self._server is None else self._limits.handshake
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._server, ssl_handshake_timeout=timeout
            )
        except (OSError, TimeoutError, ssl.SSLError) as error:
            self._refusals.note(address, f"no TLS: {error or type(error).__name__}")
            return None
        return _Line(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _answer(
        self, visit: _Visit, address: str, upstream: httpx.AsyncHTTPTransport
    ) -> bool:
        """Read and answer one request; return whether another may follow on the connection."""
        import h11

        request_line = b"?"
        try:
            request = await visit.request()
            if request is None:
                return False
            request_line = request.method + b" " + request.target
            visit.check(request)
            node = 0 if self.admits is None else self.admits(_headers_of(request))
            if node is None:
                raise _Refused(412, "it is not signed by a key of this federation")
            return await visit.forward(request, upstream, node)
        except _Refused as refused:
            self._refusals.note(address, f"{request_line[:200]!r}: {refused} ({refused.status})")
            await visit.refuse(refused.status, str(refused))
        except h11.RemoteProtocolError as error:
            self._refusals.note(address, f"{request_line[:200]!r}: {error}")
            await visit.refuse(error.error_status_hint or 400, "invalid HTTP")
        return False


class Refusals:
    """Logs refused requests and connections: at most ten lines in ten seconds, then a count."""

    def __init__(
        self,
        log: logging.Logger,
        lines: int = 10,
        seconds: float = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._lines, self._seconds, self._clock = log, lines, seconds, clock
        self._since, self._written, self._omitted = clock(), 0, 0

    def note(self, address: str, reason: str) -> None:
        """Write a line, or count it."""
        now = self._clock()
        if now - self._since >= self._seconds:
            if self._omitted:
                self._log.warning("gate: %d more refusals not shown", self._omitted)
            self._since, self._written, self._omitted = now, 0, 0
        if self._written >= self._lines:
            self._omitted += 1
            return
        self._written += 1
        self._log.warning("gate: refused %s: %s", address, reason)


class _Line:
    """The reader and the writer of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def end(self, patience: float) -> None:
        """Close the connection once everything written has been sent."""
        self.writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(patience):
                await self.writer.wait_closed()

    def abort(self) -> None:
        """Reset the connection at once, so that the client can tell an incomplete answer."""
        self.writer.transport.abort()


class _Patience:
    """How long to wait for a client: a budget of time that waiting uses up and bytes refill.

    So a client can hold a connection neither by silence nor by sending single bytes. Only time
    spent waiting for the client counts, not the time the SuperLink takes.
    """

    def __init__(self, limits: Limits) -> None:
        self._left, self._limits = limits.patience, limits

    async def wait(self, action: Awaitable[T]) -> T:
        start = time.monotonic()
        try:
            # Not asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
            async with asyncio.timeout(max(self._left, 0.001)):
                return await action
        except TimeoutError:
            raise _Refused(408, "too slow") from None
        finally:
            self._left -= time.monotonic() - start

    def earn(self, size: int) -> None:
        self._left = min(self._left + size / self._limits.slowest, self._limits.patience)


class _Visit:
    """The HTTP conversation on one connection."""

    def __init__(self, line: _Line, limits: Limits, superlink: int, secure: bool) -> None:
        import h11

        self._line, self._limits = line, limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADERS_SIZE)
        self._base = f"{'https' if secure else 'http'}://127.0.0.1:{superlink}"

    async def request(self) -> h11.Request | None:
        """The next request, without its body; None if the client has closed or sends nothing."""
        import h11

        try:
            async with asyncio.timeout(self._limits.headers):
                event = await self._next()
        except TimeoutError:
            if self._http.trailing_data[0]:
                raise _Refused(408, "too slow") from None
            return None
        except ConnectionError:
            return None
        return event if isinstance(event, h11.Request) else None

    def check(self, request: h11.Request) -> None:
        """Refuse any request except the few kinds that clients make."""
        names = [name for name, _ in request.headers]
        size = sum(len(name) + len(value) for name, value in request.headers)
        if len(names) > _HEADERS or size > _HEADERS_SIZE or len(request.target) > _TARGET_SIZE:
            raise _Refused(431, "too many or too long headers")
        if request.method != b"POST" or not _ALLOWED.fullmatch(request.target):
            raise _Refused(404, "not found")
        if b"upgrade" in names or b"http2-settings" in names:
            raise _Refused(400, "upgrades are not supported")
        if b"transfer-encoding" in names and b"content-length" in names:
            raise _Refused(400, "both transfer-encoding and content-length")
        for name, value in request.headers:
            if name == b"content-length" and int(value) > self._limits.body:
                raise _Refused(413, "too large")

    async def forward(
        self, request: h11.Request, upstream: httpx.AsyncHTTPTransport, node: int
    ) -> bool:
        """Forward a request and return its answer; the result says whether another may follow."""
        import httpx

        reads = node and request.target == _ANSWERS
        content = await self._own_answers(node) if reads else self._body(self._limits.body)

        length = dict(request.headers).get(b"content-length")
        headers = _passing(request.headers)
        if length is not None:
            headers.append((b"content-length", length))
        limits = self._limits
        waits = dict.fromkeys(("connect", "read", "write", "pool"), limits.upstream)
        waits["connect"] = min(5, limits.upstream)
        forwarded = httpx.Request(
            "POST",
            self._base + request.target.decode("ascii"),
            headers=headers,
            content=content,
            extensions={"timeout": waits},
        )
        try:
            answer = await upstream.handle_async_request(forwarded)
        except httpx.TimeoutException:
            raise _Refused(504, "the server does not answer") from None
        except httpx.TransportError as error:
            raise _Refused(502, f"the server is not reachable ({type(error).__name__})") from None
        try:
            await self._send_back(answer)
        finally:
            await answer.aclose()
        return self._next_cycle()

    async def _own_answers(self, node: int) -> bytes:
        """The whole body of a request to push messages, which must all come from this node."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from google.protobuf.message import DecodeError

        body = b"".join([piece async for piece in self._body(self._limits.answers)])
        try:
            request = PushMessagesRequest.FromString(body)
        except DecodeError:
            raise _Refused(400, "an invalid body") from None
        nodes = {request.node.node_id, *(m.metadata.src_node_id for m in request.messages_list)}
        if nodes != {node}:
            raise _Refused(403, "an answer in the name of another client")
        return body

    async def _body(self, largest: int) -> AsyncIterator[bytes]:
        """The request's body as it arrives; refused if it is too large or too slow."""
        import h11

        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        patience, total = _Patience(self._limits), 0
        while True:
            event = await patience.wait(self._next())
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise _Refused(400, "the request ended early")
            total += len(event.data)
            if total > largest:
                raise _Refused(413, "too large")
            patience.earn(len(event.data))
            yield bytes(event.data)

    async def _send_back(self, answer: httpx.Response) -> None:
        import h11

        headers = _passing(answer.headers.raw)
        length = answer.headers.get("content-length")
        if length is not None and "transfer-encoding" not in answer.headers:
            headers.append((b"content-length", length.encode()))
        if self._http.their_state is not h11.DONE:  # answered before all of the request was read
            headers.append((b"connection", b"close"))
        patience = _Patience(self._limits)
        await self._send(h11.Response(status_code=answer.status_code, headers=headers), patience)
        async for piece in answer.aiter_raw(_PIECE):
            await self._send(h11.Data(data=piece), patience)
            patience.earn(len(piece))
        await self._send(h11.EndOfMessage(), patience)

    async def refuse(self, status: int, reason: str) -> None:
        """Answer with this status, if an answer can still be sent, and end the conversation."""
        import h11

        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        # Flower's clients show an error in this form to their users.
        text = json.dumps({"code": status, "detail": f"refused by the gate: {reason}"}).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(text))),
            ("connection", "close"),
        ]
        patience = _Patience(self._limits)
        with contextlib.suppress(_Refused, ConnectionError, h11.LocalProtocolError):
            await self._send(h11.Response(status_code=status, headers=headers), patience)
            await self._send(h11.Data(data=text), patience)
            await self._send(h11.EndOfMessage(), patience)
            await self._linger()

    async def _linger(self) -> None:
        """Keep reading for a moment: closing while the client sends would lose it the answer."""
        import h11

        with contextlib.suppress(TimeoutError, ConnectionError, h11.RemoteProtocolError):
            if isinstance(self._http.next_event(), h11.EndOfMessage):
                return
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(self._limits.linger):
                while await self._line.reader.read(_PIECE):
                    pass

    def _next_cycle(self) -> bool:
        import h11

        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _next(self) -> Any:
        """The next HTTP event from the client."""
        import h11

        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._line.reader.read(_PIECE))

    async def _send(self, event: Any, patience: _Patience | None = None) -> None:
        self._line.writer.write(self._http.send(event) or b"")
        await (patience or _Patience(self._limits)).wait(self._line.writer.drain())


def signed_by(clients: Iterable[EnrolledClient], nodes: Mapping[int, int] | None = None) -> Admits:
    """Admit these clients only, by the key and the signature that Flower adds to a request.

    ``nodes`` are the clients' nodes by client id, once they are known. A SuperLink checks the same
    and the signed time as well, but only after it has read the whole body into memory; requests
    that do not come from clients should not get so far.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    known: dict[bytes, tuple[ec.EllipticCurvePublicKey, int]] = {}
    for client in clients:
        key = serialization.load_ssh_public_key(client.node.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        node = 0 if nodes is None else nodes[client.id]
        known[key.public_bytes(serialization.Encoding.PEM, form)] = key, node

    def admits(headers: Mapping[str, str]) -> int | None:
        try:
            key, node = known[b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)]
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            key.verify(signature, headers[TIMESTAMP_HEADER].encode(), ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, InvalidSignature):
            return None
        return node

    return admits


def _passing(headers: Any) -> list[tuple[bytes, bytes]]:
    """The headers to forward: none that concern the connection or that it names."""
    pairs = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    named = {
        word.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for word in value.split(b",")
    }
    barred = _NOT_FORWARDED | named
    return [
        (name, value)
        for name, value in pairs
        if name not in barred and not name.startswith(b"x-forwarded")
    ]


def _headers_of(request: h11.Request) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: invalid address ({error})") from None
    family, _, _, _, address = sorted(candidates, key=lambda c: c[0] != socket.AF_INET)[0]
    return family, address


def _serving(keys: ServerKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(keys.certificate, keys.key)
    return context
