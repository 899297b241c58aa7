"""The gate: all of a SuperLink that the network ever sees.

A SuperLink serves its clients, its operators and its applications on one port, and whoever reaches
that port may register keys and start runs. So it listens on loopback only, and the gate listens for
it: it speaks TLS with the server's certificate, hands on exactly ``POST /v1/fleet/NAME``, what
clients need, and answers everything else with 404.

Requests are taken apart and written anew, never copied: what reaches the SuperLink has the gate's
own framing, host and path, whatever tricks the original tried. Bodies flow through in pieces. It
runs in a thread of its own, which waits for sockets or is in OpenSSL nearly all the time.

A SuperLink checks that a request is signed by the node that it names, and not that the answers in
it are of the same node. So the gate reads ``push-messages``, which are small (arrays travel by
themselves), and lets a client answer for itself only.
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

    from coterie.engines.flower.keys import Member, ServerKeys

T = TypeVar("T")

# The node that a request's headers prove to be of, 0 if none is known; None: it is not admitted.
Admits = Callable[[Mapping[str, str]], int | None]

LOG = logging.getLogger("coterie.gate")
_ALLOWED = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_ANSWERS = b"/v1/fleet/push-messages"
_PIECE = 1 << 18
_HEADERS, _HEADERS_SIZE, _TARGET_SIZE = 100, 1 << 15, 100
# Of one connection only, or made anew by the gate. So are x-forwarded-*: a SuperLink believes them.
_NOT_FORWARDED = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection", b"http2-settings"),
    *(b"host", b"expect", b"forwarded", b"via", b"x-real-ip", b"cookie", b"content-length"),
}


@dataclass(frozen=True)
class Limits:
    """What a client may take; times in seconds, sizes in bytes."""

    body: int = 1 << 30
    answers: int = 1 << 24  # a body that the gate reads itself: messages without their arrays
    connections: int = 400
    each_address: int = 100  # connections from one address; loopback has no such limit
    handshake: float = 10
    headers: float = 20  # from the first moment, or the end of the last answer, to a whole request
    patience: float = 30  # for silence within a body, or while an answer is to be taken
    slowest: float = 2000  # bytes a second; what is slower uses that patience up
    linger: float = 1  # after a refusal, for one who still talks
    upstream: float = 120  # for the SuperLink to answer


class _Refused(Exception):
    """A request that gets this status and nothing else."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """Listens on ``host:port`` and hands clients' requests on to a SuperLink on loopback.

    ``keys`` are the server's: their certificate is shown to clients, and the SuperLink, which uses
    the same one, is checked against their authority. Without keys, ``insecure`` must say so, and
    the address must be a loopback one. ``admits`` may look at a request's headers (lower-case
    names) before its body is read; who is not admitted gets 412, as from a SuperLink. Where it
    gives the node that sent a request, answers in it that name another get 403.
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
            raise ConfigError("a gate needs either the server's keys or --insecure, for loopback")
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
        self.admits = admits  # may be changed while it is open
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
        """Where it listens: the port is a real one even if 0 was asked for."""
        if self._listener is None:
            raise EngineError("the gate is not open")
        name: tuple[str, int] = self._listener.getsockname()[:2]
        return name

    @property
    def connections(self) -> int:
        """How many are open now."""
        return sum(self._open.values())

    def start(self) -> None:
        """Open it; it is open when this returns."""
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
        """Close it and every connection through it."""
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
            keepalive_expiry=2,  # well before the SuperLink hangs up, after 5
        )
        tasks: set[asyncio.Task[None]] = set()
        # Of httpx only what carries requests: no cookies, redirects, proxies or defaults.
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
            except OSError as error:  # no descriptor left, or the peer has gone
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
        here = ipaddress.ip_address(plain).is_loopback
        return not here and self._open[address] >= self._limits.each_address

    async def _converse(
        self, connection: socket.socket, address: str, upstream: httpx.AsyncHTTPTransport
    ) -> None:
        """One connection, from handshake to end; nothing that goes wrong here leaves here."""
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
        """One request and its answer; whether another may follow."""
        import h11

        wanted = b"?"
        try:
            request = await visit.request()
            if request is None:
                return False
            wanted = request.method + b" " + request.target
            visit.check(request)
            node = 0 if self.admits is None else self.admits(_named(request))
            if node is None:
                raise _Refused(412, "no key of this federation")
            return await visit.forward(request, upstream, node)
        except _Refused as refused:
            self._refusals.note(address, f"{wanted[:200]!r}: {refused} ({refused.status})")
            await visit.refuse(refused.status, str(refused))
        except h11.RemoteProtocolError as error:
            self._refusals.note(address, f"{wanted[:200]!r}: {error}")
            await visit.refuse(error.error_status_hint or 400, "not understood")
        return False


class Refusals:
    """Log lines about what was refused: at most ten in ten seconds, then a count."""

    def __init__(
        self,
        log: logging.Logger,
        lines: int = 10,
        seconds: float = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._lines, self._seconds, self._clock = log, lines, seconds, clock
        self._since, self._written, self._left = clock(), 0, 0

    def note(self, address: str, what: str) -> None:
        """Write a line, or count it."""
        now = self._clock()
        if now - self._since >= self._seconds:
            if self._left:
                self._log.warning("gate: %d more refused and not shown", self._left)
            self._since, self._written, self._left = now, 0, 0
        if self._written >= self._lines:
            self._left += 1
            return
        self._written += 1
        self._log.warning("gate: refused %s: %s", address, what)


class _Line:
    """A connection's two ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def end(self, patience: float) -> None:
        """Hang up when all that was said has gone out."""
        self.writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(patience):
                await self.writer.wait_closed()

    def abort(self) -> None:
        """Hang up at once; the other side can tell that something was missing."""
        self.writer.transport.abort()


class _Patience:
    """How long a peer is waited for: a time that waiting uses up and bytes win back.

    So neither silence nor a byte now and then holds a connection. Only time spent waiting for the
    peer counts, not what the other side of the gate takes.
    """

    def __init__(self, limits: Limits) -> None:
        self._left, self._limits = limits.patience, limits

    async def wait(self, waited: Awaitable[T]) -> T:
        begun = time.monotonic()
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation now and then.
            async with asyncio.timeout(max(self._left, 0.001)):
                return await waited
        except TimeoutError:
            raise _Refused(408, "too slow") from None
        finally:
            self._left -= time.monotonic() - begun

    def earn(self, size: int) -> None:
        self._left = min(self._left + size / self._limits.slowest, self._limits.patience)


class _Visit:
    """The HTTP spoken on one connection."""

    def __init__(self, line: _Line, limits: Limits, superlink: int, secure: bool) -> None:
        import h11

        self._line, self._limits = line, limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADERS_SIZE)
        self._base = f"{'https' if secure else 'http'}://127.0.0.1:{superlink}"

    async def request(self) -> h11.Request | None:
        """The next request, without its body; None when the client has hung up or says nothing."""
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
        """Refuse all but a plain request of the few that clients make."""
        names = [name for name, _ in request.headers]
        size = sum(len(name) + len(value) for name, value in request.headers)
        if len(names) > _HEADERS or size > _HEADERS_SIZE or len(request.target) > _TARGET_SIZE:
            raise _Refused(431, "too much before the body")
        if request.method != b"POST" or not _ALLOWED.fullmatch(request.target):
            raise _Refused(404, "not found")
        if b"upgrade" in names or b"http2-settings" in names:
            raise _Refused(400, "no upgrades")
        if b"transfer-encoding" in names and b"content-length" in names:
            raise _Refused(400, "two lengths")
        for name, value in request.headers:
            if name == b"content-length" and int(value) > self._limits.body:
                raise _Refused(413, "too large")

    async def forward(
        self, request: h11.Request, upstream: httpx.AsyncHTTPTransport, node: int
    ) -> bool:
        """Hand a request on and its answer back; whether another may follow."""
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
        handed = httpx.Request(
            "POST",
            self._base + request.target.decode("ascii"),
            headers=headers,
            content=content,
            extensions={"timeout": waits},
        )
        try:
            answer = await upstream.handle_async_request(handed)
        except httpx.TimeoutException:
            raise _Refused(504, "the server does not answer") from None
        except httpx.TransportError as error:
            raise _Refused(502, f"the server is away ({type(error).__name__})") from None
        try:
            await self._give_back(answer)
        finally:
            await answer.aclose()
        return self._next_cycle()

    async def _own_answers(self, node: int) -> bytes:
        """The whole body of a request to push messages, if all of them are of this node."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from google.protobuf.message import DecodeError

        body = b"".join([piece async for piece in self._body(self._limits.answers)])
        try:
            asked = PushMessagesRequest.FromString(body)
        except DecodeError:
            raise _Refused(400, "not understood") from None
        named = {asked.node.node_id, *(m.metadata.src_node_id for m in asked.messages_list)}
        if named != {node}:
            raise _Refused(403, "an answer in the name of another client")
        return body

    async def _body(self, most: int) -> AsyncIterator[bytes]:
        """The request's body as it comes in, no more than allowed and no slower."""
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
            if total > most:
                raise _Refused(413, "too large")
            patience.earn(len(event.data))
            yield bytes(event.data)

    async def _give_back(self, answer: httpx.Response) -> None:
        import h11

        headers = _passing(answer.headers.raw)
        length = answer.headers.get("content-length")
        if length is not None and "transfer-encoding" not in answer.headers:
            headers.append((b"content-length", length.encode()))
        if self._http.their_state is not h11.DONE:  # answered before it had listened to the end
            headers.append((b"connection", b"close"))
        patience = _Patience(self._limits)
        await self._send(h11.Response(status_code=answer.status_code, headers=headers), patience)
        async for piece in answer.aiter_raw(_PIECE):
            await self._send(h11.Data(data=piece), patience)
            patience.earn(len(piece))
        await self._send(h11.EndOfMessage(), patience)

    async def refuse(self, status: int, reason: str) -> None:
        """Answer with this status, if there is still somebody to answer, and hang up."""
        import h11

        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        # In the form in which Flower's clients show it to their users.
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
        """Listen a little longer: hanging up on one who still talks would lose him the answer."""
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
        """The next thing that the client says."""
        import h11

        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._line.reader.read(_PIECE))

    async def _send(self, event: Any, patience: _Patience | None = None) -> None:
        self._line.writer.write(self._http.send(event) or b"")
        await (patience or _Patience(self._limits)).wait(self._line.writer.drain())


def signed_by(clients: Iterable[Member], nodes: Mapping[int, int] | None = None) -> Admits:
    """Admit these clients only, by the key and the signature that Flower puts on a request.

    ``nodes`` are those of the clients, by id, once they are known. A SuperLink checks the same, and
    the time that is signed, but reads a request's whole body into memory first: whoever is no
    client should not get so far.
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
    """The headers that go through: not those of the connection, nor those that it names."""
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


def _named(request: h11.Request) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} is no address to listen on ({error})") from None
    family, _, _, _, address = sorted(found, key=lambda f: f[0] != socket.AF_INET)[0]
    return family, address


def _serving(keys: ServerKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(keys.certificate, keys.key)
    return context
