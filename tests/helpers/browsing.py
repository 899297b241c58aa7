"""A real browser for tests: every request, every message of its console, and axe-core's opinion.

Needs playwright (which downloads nothing here) and a Chromium or Chrome of the system; tests are
skipped with a message where one of them is missing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 780}
# An address that leaves the machine. A pattern, not a function: the browser's driver goes by it
# alone, where a function would hold every request up until the test next talks to the driver.
OUTSIDE = re.compile(
    r"^(?!(data|blob|file|about):)(?!(https?|wss?)://(127\.0\.0\.1|localhost|\[::1\])([:/?#]|$))"
)


def browser_path() -> str | None:
    """Where the system's browser is, if it has one."""
    named = os.environ.get("COTERIE_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def why_not() -> str:
    """Why no browser can be opened; "" if one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install 'coterie[dev]'"
    if browser_path() is None:
        return (
            f"no browser: none of {', '.join(NAMES)} is on the path (or name it: COTERIE_BROWSER)"
        )
    return ""


@contextmanager
def browser() -> Iterator[Any]:
    """The system's browser, without a window."""
    from playwright.sync_api import sync_playwright

    # A sandbox cannot be had by root, nor in most containers.
    with sync_playwright() as made:
        opened = made.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class Seen:
    """A page, and what went on while it was open."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        """Requests that would have left the machine; they were cut off."""
        return [url for url in self.requests if OUTSIDE.match(url)]

    def axe(self) -> list[str]:
        """What axe-core finds wrong: rule, how bad, and where."""
        script = files("axe_playwright_python").joinpath("axe.min.js").read_text()
        self.page.evaluate(script)
        # What is right is much longer, and would travel here, too.
        violations = self.page.evaluate(
            "() => axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)"
        )
        return [
            f"{v['id']} ({v['impact']}): {v['help']}: {node['html'][:200]}"
            for v in violations
            for node in v["nodes"]
        ]


@contextmanager
def opened(
    browser: Any, url: str, dark: bool = False, size: dict[str, int] = DESKTOP
) -> Iterator[Seen]:
    """A page at this address, in the light or in the dark."""
    context = browser.new_context(
        viewport=size, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    try:
        seen = Seen(context.new_page())
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on(
            "console",
            lambda said: (
                seen.errors.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        context.route(OUTSIDE, lambda route: route.abort())
        seen.page.goto(url)
        yield seen
    finally:
        context.close()
