"""The parts of pages, and which of them have changed since a page was last updated."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

RETRY = 2000  # milliseconds before a browser reconnects
BEAT = 15.0  # seconds after which something is sent, to keep the connection alive


@dataclass(frozen=True)
class FeedPart:
    """A part of a page: its JSON, and the version in which it last changed."""

    payload: str
    digest: bytes
    version: int


class Feed:
    """The parts of one page, in order, shared by all browsers that have it open.

    ``version`` counts the changes. ``present`` is the version with the feed's name: a page that has
    the version of another feed, such as that of an earlier server, gets all parts again.

    >>> feed = Feed("mine")
    >>> feed.update({"a": "1", "b": "2"}), feed.update({"a": "1", "b": "2"}), feed.present
    (True, False, 'mine.1')
    >>> feed.update({"a": "1", "b": "3"}), feed.since("mine.1"), feed.since("other.1")
    (True, '{"order":["a","b"],"parts":{"b":3}}', '{"order":["a","b"],"parts":{"a":1,"b":3}}')
    """

    def __init__(self, name: str = "") -> None:
        self._name = name or secrets.token_hex(4)
        self.parts: dict[str, FeedPart] = {}
        self.version = 0
        self.watchers = 0
        self.closed = False
        self._news = asyncio.Condition()

    @property
    def present(self) -> str:
        """The version as pages get it."""
        return f"{self._name}.{self.version}"

    def update(self, payloads: Mapping[str, str]) -> bool:
        """Replace the parts; returns whether anything has changed."""
        coming, number = dict[str, FeedPart](), self.version + 1
        for id, payload in payloads.items():
            digest = hashlib.blake2b(payload.encode(), digest_size=16).digest()
            old = self.parts.get(id)
            coming[id] = old if old and old.digest == digest else FeedPart(payload, digest, number)
        different = list(coming) != list(self.parts) or any(
            part.version == number for part in coming.values()
        )
        if different:
            self.parts, self.version = coming, number
        return different

    def since(self, told: str) -> str:
        """All changes since the version that a page has, as JSON."""
        name, _, text = told.rpartition(".")
        possible = text.isdecimal() and len(text) <= len(str(self.version))
        known = int(text) if name == self._name and possible else 0
        changed = ",".join(
            f"{json.dumps(id)}:{part.payload}"
            for id, part in self.parts.items()
            if part.version > known
        )
        order = json.dumps(list(self.parts), separators=(",", ":"))
        return f'{{"order":{order},"parts":{{{changed}}}}}'

    async def tell(self) -> None:
        """Wake the streams that wait for changes."""
        async with self._news:
            self._news.notify_all()

    async def close(self) -> None:
        """End all streams."""
        self.closed = True
        await self.tell()

    async def stream(self, told: str) -> AsyncIterator[str]:
        """Server-sent events: the changes since the page's version, then each later change."""
        self.watchers += 1
        try:
            yield f"retry: {RETRY}\n\n"
            while not self.closed:
                if told != self.present:
                    data, told = self.since(told), self.present
                    yield f"id: {told}\nevent: parts\ndata: {data}\n\n"
                try:
                    async with asyncio.timeout(BEAT), self._news:
                        while not self.closed and told == self.present:
                            await self._news.wait()
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.watchers -= 1
