"""The live page in a real browser, with a real run: it moves, stops, goes on, is accessible."""

import json
import os
import shutil
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from browsing import DESKTOP, PHONE, opened
from coterie.report.reading import FINISHED, RUNNING, STOPPED, read_run
from coterie.results.rundir import RunDir
from processes import COTERIE, PATIENCE

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SLOW = ("--clients", "20", "--epochs", "10", "--rounds", "400", "--engine", "loop", "--quiet")
SIZES = {"desktop": DESKTOP, "phone": PHONE}
# The list of runs and a run, light and dark, desktop and phone: two cover all of these.
COVERING = (("", "light", "desktop"), ("fedclust", "dark", "phone"))
VIEWS = [
    view if view in COVERING else pytest.param(*view, marks=pytest.mark.e2e)
    for view in product(("", "fedclust"), ("light", "dark"), SIZES)
]


def until(look, what):
    ends = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def folder(runs, hostile, tmp_path_factory):
    """The finished runs, one with markup in its names, and room for one that goes on."""
    place = tmp_path_factory.mktemp("watched")
    for run in sorted(runs.iterdir()):
        shutil.copytree(run, place / run.name)
    shutil.copytree(hostile, place / hostile.name)
    return place


@pytest.fixture(scope="module")
def address(folder):
    """A real ``coterie watch`` on a free port, and the address that it printed."""
    command = [*COTERIE, "watch", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as watching:
        assert watching.stdout is not None
        line = watching.stdout.readline()
        yield line.split(" at ")[-1].strip()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=PATIENCE) == 0


def page_of(address, name=""):
    base, _, token = address.partition("/#")
    return f"{base}/{name and 'run/'}{name}#{token}"


@pytest.mark.parametrize(("name", "shade", "screen"), VIEWS)
def test_axe_finds_nothing_and_nothing_leaves(name, shade, screen, address, browser):
    size = SIZES[screen]
    with opened(browser, page_of(address, name), shade == "dark", size) as seen:
        if name:
            seen.page.evaluate("() => window.coterie.drawAll()")
            drawn = seen.page.locator("[data-plot][data-drawn]").count()
            assert drawn == seen.page.locator("[data-plot]").count() >= 14
        else:
            assert seen.page.locator("#rows tr").count() >= 4
        assert seen.axe() == []
        assert seen.errors == []
        assert seen.outside == []
        assert seen.page.evaluate("() => document.documentElement.scrollWidth") <= size["width"]
        assert "token" not in seen.page.url


def test_markup_in_names_is_shown_as_it_is_written(address, browser):
    with opened(browser, page_of(address)) as seen:
        link = seen.page.locator("#rows").get_by_role("link", name="run <b>x")
        link.click()
        seen.page.wait_for_url("**/run/**")
        seen.page.evaluate("() => window.coterie.drawAll()")
        assert seen.page.locator("h1").inner_text() == "run <b>x"
        assert seen.page.evaluate("() => window.hacked") is None
        assert seen.page.locator("img").count() == 0
        assert seen.errors == []


def shown_rounds(seen):
    return seen.page.evaluate(
        "() => Math.max(0, ...(document.getElementById('plot-fig-accuracy')?._fullData || [])"
        ".flatMap((t) => [...(t.x || [])]).filter(Number.isFinite))"
    )


def test_a_run_is_followed_stopped_and_resumed_with_the_keyboard(folder, address, browser):
    place = folder / "going"
    command = [*COTERIE, "run", *SLOW, "--dir", str(place)]
    running = subprocess.Popen(command, **QUIET)
    try:
        with opened(browser, page_of(address)) as seen:
            row = seen.page.locator("#rows").get_by_role("link", name="going")
            row.wait_for(timeout=PATIENCE * 1000)  # it appears by itself
            row.click()
            seen.page.wait_for_url("**/run/going")
            seen.page.locator("#plot-fig-accuracy").wait_for(
                state="attached", timeout=PATIENCE * 1000
            )
            seen.page.evaluate("() => window.coterie.drawAll()")
            first = shown_rounds(seen)
            until(lambda: shown_rounds(seen) > first + 1, "a new round in the picture")
            links = seen.page.locator(".contents a").evaluate_all("all => all.map((a) => a.hash)")
            heads = seen.page.locator("main h2.section").evaluate_all("all => all.map((h) => h.id)")
            assert links == [f"#{head}" for head in heads]
            assert "#section-repeat" in links

            stop = seen.page.locator('[data-action="stop"]')
            stop.focus()
            seen.page.keyboard.press("Enter")
            assert running.wait(timeout=PATIENCE) == 130
            resume = seen.page.locator('[data-action="resume"]')
            resume.wait_for(state="visible", timeout=PATIENCE * 1000)
            until(resume.is_enabled, "the answer to the first click")
            done = len(read_run(place).rounds)
            assert read_run(place).status == STOPPED
            assert 0 < done < 400

            resume.focus()
            seen.page.keyboard.press("Enter")
            until(lambda: len(read_run(place).rounds) > done, "rounds after it was resumed")
            assert seen.page.evaluate("() => document.activeElement.closest('#state') !== null")
            assert read_run(place).status == RUNNING
            stop.wait_for(state="visible", timeout=PATIENCE * 1000)
            stop.click()  # waits until it is enabled
            until(lambda: read_run(place).status == STOPPED, "a second end")
            numbers = [json.loads(x)["round"] for x in (place / "events.jsonl").open()]
            assert numbers == sorted(set(numbers))
            assert seen.errors == []
    finally:
        running.kill()
        running.wait()
        (place / ".stop").touch()  # and whoever may have been resumed


def test_who_has_no_token_can_look_and_not_touch(folder, address, browser):
    place = folder / "crashed"
    shutil.copytree(folder / "fedclust", place)
    (place / "result.json").unlink()
    with opened(browser, page_of(address, "crashed").partition("#")[0]) as seen:
        seen.page.locator("#plot-fig-accuracy").wait_for(state="attached")
        button = seen.page.locator('[data-action="resume"]')
        assert button.is_disabled()
        assert "coterie watch" in seen.page.locator("#state-hint").inner_text()
        answer = seen.page.evaluate(
            "() => fetch('/api/runs/crashed/resume', {method: 'POST'}).then((a) => a.status)"
        )
        assert answer == 403
        notice = seen.page.locator("#notice")
        assert "Stopped" in notice.inner_text()
        working = RunDir(place)
        working.lock()  # as one who resumes it elsewhere does: the first news that the page gets
        notice.wait_for(state="detached", timeout=PATIENCE * 1000)
        assert "Running" in seen.page.locator("#state-words").inner_text()
        working.unlock()
        notice.wait_for(timeout=PATIENCE * 1000)
    assert read_run(place).status == STOPPED
    assert read_run(folder / "fedclust").status == FINISHED
    assert Path(place / "resumed.log").exists() is False
