"""Settings of all tests."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from browsing import browser as a_browser
from browsing import why_not

# The same examples in every run, so that a failure is the change's own; to look for new ones:
# HYPOTHESIS_PROFILE=explore make test
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell starts background jobs with SIGINT ignored, and what these start would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
# Tests of several files that must not run beside one another: they start servers, clusters or a
# browser, or they share what takes long to set up. One worker takes a whole group.
TOGETHER = {
    "federations": ("tests/e2e/test_federation", "tests/engines/flower", "tests/engines/test_ray"),
    "browser": ("tests/browser", "tests/docs/test_site"),
}
# The longest first: a long file that begins last would keep one worker busy while others are idle.
LONGEST = (
    *("tests/docs", "tests/e2e/test_federation", "tests/engines", "tests/browser", "tests/laws"),
    *("tests/contract", "tests/faults", "tests/e2e", "tests/attacks"),
)


@cache  # there are thousands of tests in hundreds of files
def standing(file: Path) -> tuple[int, str]:
    """Where in ``LONGEST`` a file stands, and what one worker takes as a whole.

    That is a group of ``TOGETHER``, or else the file. Files that are not in ``LONGEST`` come last.
    """
    place = file.relative_to(ROOT).as_posix()
    ranks = (n for n, start in enumerate(LONGEST) if place.startswith(start))
    groups = (name for name, starts in TOGETHER.items() if place.startswith(starts))
    return next(ranks, len(LONGEST)), next(groups, place)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: standing(item.path)[0])
    if config.pluginmanager.hasplugin("xdist"):  # or else there is no such mark
        for item in items:
            item.add_marker(pytest.mark.xdist_group(standing(item.path)[1]))


def pytest_collection_finish() -> None:
    """Keep the collector of garbage away from what is there until the end: thousands of tests.

    A process that a test forks would touch, and so copy, all of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The one browser of a process: playwright cannot be started twice."""
    if reason := why_not():
        pytest.skip(reason)
    with a_browser() as opened:
        yield opened
