"""The state of the live page, shared by all browsers that have it open."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from coterie.report.live import rows
from coterie.report.live.control import Controls
from coterie.report.live.feeds import Feed
from coterie.report.live.folders import Following, Glance, last_round, name_as_text
from coterie.report.page import Block, run_blocks
from coterie.report.reading import RUNNING, Reading
from coterie.report.rendering import render

PACE = 1.0  # seconds between two looks
_SHARE = 4  # the pause after drawing a run, as a multiple of the time that it took
_LONGEST = 10.0  # seconds, but no longer
_LASTS = 60.0  # seconds for which a page that is not open is kept

Draw = Callable[[Reading], list[Block]]
_Blocks = tuple[list[Block], int | None]


@dataclass
class _Page:
    """One run's page: its blocks, and when it may be drawn again."""

    feed: Feed
    lock: asyncio.Lock
    blocks: list[Block]
    round: int | None = None  # the last that is drawn
    changes: int = -2  # of the run's files when it was drawn; −1 for a run that is gone
    again: float = 0.0
    used: float = 0.0


class Watching:
    """The runs of a folder, and the pages that show them."""

    def __init__(self, folder: Path, draw: Draw = run_blocks) -> None:
        self.controls = Controls()
        self.title = name_as_text(folder.name or str(folder))
        self.following = Following(folder, self.controls.doing)
        self._draw = draw
        self.list = Feed()
        self._pages: dict[str, _Page] = {}
        self._looking = asyncio.Lock()
        self._looked = float("-inf")
        self._closed = asyncio.Event()

    async def follow(self) -> None:
        """Look for changes while a page is open."""
        while not self._closed.is_set():
            began = time.monotonic()
            await asyncio.to_thread(self.controls.reap)
            if self.list.watchers or any(p.feed.watchers for p in self._pages.values()):
                await self.look()
                for name, page in list(self._pages.items()):
                    if page.feed.watchers:
                        await self._publish(name, page)
            self._tidy()
            pause = max(PACE / 4, PACE - (time.monotonic() - began))
            try:
                async with asyncio.timeout(pause):
                    await self._closed.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """End all streams, and ``follow``."""
        self._closed.set()
        for feed in (self.list, *(page.feed for page in self._pages.values())):
            await feed.close()

    async def look(self, at_once: bool = False, search: bool = False) -> None:
        """Update the list unless it is recent; with ``search``, look for new runs as well."""
        async with self._looking:
            if not at_once and time.monotonic() < self._looked + PACE / 2:
                return
            payloads = await asyncio.to_thread(self._list, search)
            self._looked = time.monotonic()
            if self.list.update(payloads):
                await self.list.tell()

    def _list(self, search: bool = False) -> dict[str, str]:
        runs = list(self.following.look(search).values())
        summary = rows.summary(runs, self.title)
        parts = {"summary": json.dumps({"text": summary})}
        return parts | {id: rows.row_part(html) for id, html in rows.in_order(runs)}

    async def compared(self, names: Sequence[str], comparison: str) -> list[Reading]:
        """The readings of these runs, and of those of a comparison; unknown names are left out."""
        await self.look()
        runs = self.following.glances()
        chosen = [n for n, run in runs.items() if comparison and run.comparison == comparison]
        chosen += [n for n in dict.fromkeys(names) if n in runs and n not in chosen]
        found = await asyncio.to_thread(lambda: [self.following.reading(n) for n in chosen])
        return [reading for reading in found if reading is not None]

    async def page(self, name: str) -> tuple[list[Block], Feed] | None:
        """A run's present blocks and the feed of their changes; None if there is no such run."""
        await self.look()
        if self.following.glance(name) is None and name not in self._pages:
            await self.look(at_once=True, search=True)  # it may have begun after the last search
            if self.following.glance(name) is None:
                return None
        page = self._pages.get(name)
        if page is None:
            page = self._pages[name] = _Page(Feed(), asyncio.Lock(), [])
        page.used = time.monotonic()
        await self._publish(name, page, at_once=True)
        if self._closed.is_set():
            await page.feed.close()
        return page.blocks, page.feed

    async def tell(self, name: str, action: Callable[[Glance, Reading], None]) -> bool:
        """Do something to a run in its present state; False if there is none of this name."""

        def act() -> bool:
            self.following.look_again(name)
            run, reading = self.following.glance(name), self.following.reading(name)
            if run is None:
                return False
            action(run, reading if reading is not None else Reading(name, run.status, run.path))
            self.following.look_again(name)
            return True

        await self.look()
        exists = await asyncio.to_thread(act)
        await self.look(at_once=True)
        if name in self._pages:
            await self._publish(name, self._pages[name])
        return exists

    async def _publish(self, name: str, page: _Page, at_once: bool = False) -> None:
        """Draw a run again if its files have changed, and update its state in any case."""
        async with page.lock:  # other requests wait for the result
            changes = self.following.changes(name)
            due = at_once or time.monotonic() >= page.again
            if self.following.glance(name) is not None and changes != page.changes and due:
                drawn, took = await asyncio.to_thread(_timed, self._blocks, name)
                page.blocks, page.round = drawn
                page.changes = changes
                page.again = time.monotonic() + min(_SHARE * took, _LONGEST)
            run = self.following.glance(
                name
            )  # afterwards, so that the state is not older than the pictures
            state = rows.gone(name) if run is None else self._state(run, page.round)
            first = Block("state", rows.state_block(state))
            page.blocks = [first, *page.blocks[1:]]
            parts = {"state": json.dumps({"state": state})}
            parts |= {b.id: rows.block_part(b) for b in page.blocks[1:]}
            if page.feed.update(parts):
                await page.feed.tell()

    def _state(self, run: Glance, drawn: int | None) -> Mapping[str, Any]:
        return rows.state(run, self.controls.failure(run.path), drawn)

    def _blocks(self, name: str) -> _Blocks:
        """A run's blocks, the first empty for its state, and the last round that they show."""
        first = [Block("state", Markup())]
        reading = self.following.reading(name)
        if reading is None:
            return first, None
        about = None
        try:
            about, blocks = rows.federation(reading), self._draw(reading)
        except Exception as error:  # a broken file must not end the page
            words = f"This run cannot be drawn ({type(error).__name__}: {error})."
            blocks = [Block("broken", render("live/broken.html", words=words))]
        if reading.status == RUNNING and not reading.problems:
            blocks = [b for b in blocks if b.id != "notice"]  # the state says the same
        if about is not None:
            position = next((i for i, b in enumerate(blocks) if b.title), len(blocks))
            blocks.insert(position, Block("federation", about))
        return first + blocks, last_round(reading)

    def _tidy(self) -> None:
        """Forget pages that are not open."""
        old = time.monotonic() - _LASTS
        for name, page in list(self._pages.items()):
            if not page.feed.watchers and page.used < old:
                del self._pages[name]


def _timed(make: Callable[[str], _Blocks], name: str) -> tuple[_Blocks, float]:
    """The result of ``make``, and the seconds of a core that it took."""
    began = time.thread_time()
    return make(name), time.thread_time() - began
