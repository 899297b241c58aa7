"""Access to the live page, and permission to stop and resume runs."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

TOKEN = "x-coterie-token"

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def new_token() -> str:
    """A new random secret."""
    return secrets.token_urlsafe(32)


def is_loopback(address: str) -> bool:
    """Whether only processes on this machine can reach an address.

    >>> [is_loopback(a) for a in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_everywhere(address: str) -> bool:
    """Whether an address stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The name in a Host header, without its port; "" if it is invalid.

    >>> host_of("localhost:8050"), host_of("[::1]:80"), host_of("a@b"), host_of("EXAMPLE.org")
    ('localhost', '::1', '', 'example.org')
    """
    try:
        parts = urlsplit(f"//{header}")
        valid = parts.netloc == header and parts.username is None and not parts.path
        return (parts.hostname or "") if valid else ""
    except ValueError:
        return ""


def _place_of(origin: str) -> str:
    """The host and port of an Origin header; "" if it is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class RequestGuard:
    """Guards an ASGI application.

    Requests must name the served host, since a page elsewhere could otherwise reach this server
    under its own name. Requests that change something need the token in a header, which pages
    elsewhere cannot send, and the same origin. Beyond loopback, seeing the page needs the token,
    too, or a cookie from an earlier request with the token.
    """

    def __init__(
        self,
        app: Any,
        token: str,
        hosts: Collection[str],
        port: int,
        policy: str,
        welcome: str = "",
    ) -> None:
        self.app, self._token = app, token
        self._names = {host.lower() for host in hosts}
        self._any_name = any(
            map(is_everywhere, hosts)
        )  # then the page is visible only with the token
        self._open = all(map(is_loopback, hosts))
        self.cookie = f"coterie-{port}"
        self.pass_word = hmac.new(token.encode(), b"reading", hashlib.sha256).hexdigest()
        self._welcome = welcome
        headers = {
            "cache-control": "no-store",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "x-frame-options": "DENY",
        }
        self._headers = [(k.encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a sentence."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def sealed(message: Any) -> None:
            if message["type"] == "http.response.start":
                have = {key.lower() for key, _ in message["headers"]}
                more = [(k, v) for k, v in self._headers if k not in have]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        status, words = self._verdict(scope["method"], scope["path"], headers)
        if not status:
            await self.app(scope, receive, sealed)
            return
        page = status == 401 and not scope["path"].startswith("/api/") and bool(self._welcome)
        kind = b"text/html; charset=utf-8" if page else b"text/plain; charset=utf-8"
        body = (self._welcome if page else words).encode()
        start = {"type": "http.response.start", "status": status}
        length = str(len(body)).encode()
        await sealed({**start, "headers": [(b"content-type", kind), (b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    def _verdict(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """The status and the sentence of a refusal; 0 if the request is allowed."""
        named = headers.get("host", "")
        if not self._served(host_of(named)):
            return 400, "this page is not served under that name"
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and _place_of(origin) != named.lower():
                return 403, "this was asked from another page"
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return 403, "this was asked from another page"
            if not self._is_token(headers.get(TOKEN, "")):
                return 403, "the token is missing or wrong: use the address that was printed"
            return 0, ""
        free = path.startswith("/assets/") or path == "/favicon.ico"  # the same for all browsers
        if self._open or free or self._has_pass(headers.get("cookie", "")):
            return 0, ""
        return 401, "this page needs the token: use the address that was printed"

    def _served(self, name: str) -> bool:
        return bool(name) and (self._any_name or name in self._names or is_loopback(name))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _has_pass(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return False
        given = "" if found is None else found.value
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.pass_word.encode())
