"""What pages show, in parts, and which of them have changed since a page was told last."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

RETRY = 2000  # milliseconds before a browser comes again
BEAT = 15.0  # seconds after which something is sent, so that nobody takes the line for dead


@dataclass(frozen=True)
class Part:
    """A part of a page: what is sent of it (JSON), and in which version it became so."""

    payload: str
    digest: bytes
    version: int


class Feed:
    """The parts of one page, in order. Everybody who has it open reads the same.

    ``version`` counts the changes. What a page has is told as ``present``, which names this feed
    too: in another one, of a new start or made after this one was forgotten, they begin again.

    >>> feed = Feed("mine")
    >>> feed.update({"a": "1", "b": "2"}), feed.update({"a": "1", "b": "2"}), feed.present
    (True, False, 'mine.1')
    >>> feed.update({"a": "1", "b": "3"}), feed.since("mine.1"), feed.since("other.1")
    (True, '{"order":["a","b"],"parts":{"b":3}}', '{"order":["a","b"],"parts":{"a":1,"b":3}}')
    """

    def __init__(self, name: str = "") -> None:
        self._name = name or secrets.token_hex(4)
        self.parts: dict[str, Part] = {}
        self.version = 0
        self.watchers = 0
        self.closed = False
        self._news = asyncio.Condition()

    @property
    def present(self) -> str:
        """The version as it is told to pages."""
        return f"{self._name}.{self.version}"

    def update(self, payloads: Mapping[str, str]) -> bool:
        """Let the page consist of these; whether anything is different now."""
        coming, number = dict[str, Part](), self.version + 1
        for id, payload in payloads.items():
            digest = hashlib.blake2b(payload.encode(), digest_size=16).digest()
            old = self.parts.get(id)
            coming[id] = old if old and old.digest == digest else Part(payload, digest, number)
        different = list(coming) != list(self.parts) or any(
            part.version == number for part in coming.values()
        )
        if different:
            self.parts, self.version = coming, number
        return different

    def since(self, told: str) -> str:
        """All that has changed since a page was told this version, as JSON."""
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
        """Wake whoever waits for news."""
        async with self._news:
            self._news.notify_all()

    async def close(self) -> None:
        """End all streams."""
        self.closed = True
        await self.tell()

    async def stream(self, told: str) -> AsyncIterator[str]:
        """Server-sent events: what is different from what the page has, then whatever changes."""
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
