"""The report in a real browser: drawn, silent, self-contained, usable by keyboard, accessible."""

from itertools import product

import pytest

from browsing import DESKTOP, PHONE, opened
from coterie.report.html import write_report

SIZES = {"desktop": DESKTOP, "phone": PHONE}
# Reports of one run and of several, light and dark, desktop and phone: two cover all of these.
COVERING = (("single", "light", "desktop"), ("several", "dark", "phone"))
VIEWS = [
    view if view in COVERING else pytest.param(*view, marks=pytest.mark.e2e)
    for view in product(("single", "several"), ("light", "dark"), SIZES)
]
# How much of each picture is on the page: all its traces, in a drawing that has a size.
DRAWN = """() => [...document.querySelectorAll("[data-plot]")].map((plot) => ({
  id: plot.id,
  drawn: plot.hasAttribute("data-drawn"),
  traces: plot._fullData ? plot._fullData.length : 0,
  asked: JSON.parse(document.getElementById(plot.dataset.plot).textContent).data.length,
  wide: plot.querySelector("svg.main-svg")?.getBoundingClientRect().width || 0,
}))"""


@pytest.fixture(scope="module")
def single(runs, tmp_path_factory):
    return write_report([runs / "fedclust"], tmp_path_factory.mktemp("single") / "report.html")


@pytest.fixture(scope="module")
def several(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("several") / "report.html")


def drawn_all(seen):
    seen.page.evaluate(
        "() => document.querySelectorAll('details').forEach((each) => { each.open = true; })"
    )
    seen.page.evaluate(
        "() => document.querySelectorAll('[role=tabpanel]').forEach((p) => { p.hidden = false; })"
    )
    seen.page.evaluate("() => window.coterie.drawAll()")
    return seen.page.evaluate(DRAWN)


@pytest.mark.parametrize(("which", "shade", "screen"), VIEWS)
def test_every_figure_is_drawn_accessible_and_nothing_is_asked_of_anybody(
    which, shade, screen, browser, request
):
    path, size = request.getfixturevalue(which), SIZES[screen]
    with opened(browser, path.as_uri(), shade == "dark", size) as seen:
        figures = drawn_all(seen)
        assert len(figures) >= (14 if which == "single" else 30)
        for figure in figures:
            assert figure["drawn"], figure
            assert figure["traces"] == figure["asked"] > 0, figure
            assert figure["wide"] > 100, figure
        assert [url for url in seen.requests if not url.startswith(("data:", "blob:"))] == [
            path.as_uri()
        ]
        wide = seen.page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= size["width"]  # one scrolls down only
        assert seen.axe() == []
        assert seen.errors == []


def test_figures_are_drawn_as_one_scrolls_to_them(single, browser):
    with opened(browser, single.as_uri()) as seen:
        last = seen.page.locator("[data-plot]:visible").last
        assert last.get_attribute("data-drawn") is None
        last.scroll_into_view_if_needed()
        seen.page.wait_for_function(
            "(id) => document.getElementById(id).hasAttribute('data-drawn')",
            arg=last.get_attribute("id"),
        )


def focused(seen):
    return seen.page.evaluate(
        "() => ({id: document.activeElement.id, text: document.activeElement.textContent.trim(),"
        " tag: document.activeElement.tagName})"
    )


def test_the_keyboard_is_enough(single, browser):
    with opened(browser, single.as_uri()) as seen:
        keys = seen.page.keyboard
        keys.press("Tab")
        assert focused(seen)["text"] == "Skip to the content"
        keys.press("Enter")
        assert seen.page.evaluate("() => location.hash") == "#main"

        tabs = seen.page.locator('[role="tab"]')
        assert tabs.count() == 3  # rounds, bytes, seconds
        tabs.first.focus()
        chosen = [tabs.nth(0).get_attribute("aria-controls")]
        for _ in range(2):
            keys.press("ArrowRight")
            now = seen.page.locator('[role="tab"][aria-selected="true"]')
            chosen.append(now.get_attribute("aria-controls"))
            assert focused(seen)["id"] == now.get_attribute("id")
            panels = seen.page.locator('[role="tabpanel"]:visible')
            assert [panels.nth(0).get_attribute("id")] == chosen[-1:]
        assert len(set(chosen)) == 3

        before = seen.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        seen.page.locator("#theme").focus()
        keys.press("Enter")
        assert seen.page.locator("#theme").get_attribute("aria-pressed") == "true"
        after = seen.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert before != after

        sort = seen.page.locator("button.sort:visible").first
        sort.focus()
        keys.press("Enter")
        head = sort.locator("xpath=ancestor::th")
        assert head.get_attribute("aria-sort") in ("ascending", "descending")


def test_everything_that_can_be_reached_shows_that_it_is(single, browser):
    with opened(browser, single.as_uri()) as seen:
        for _ in range(40):
            seen.page.keyboard.press("Tab")
            shown = seen.page.evaluate(
                "() => { const s = getComputedStyle(document.activeElement);"
                " return [document.activeElement.outerHTML.slice(0, 80), s.outlineStyle,"
                " parseFloat(s.outlineWidth)]; }"
            )
            if shown[0].startswith("<body"):
                break
            assert shown[1] != "none", shown
            assert shown[2] > 0, shown


def test_the_dark_page_has_the_dark_colours_and_text_that_can_be_read(single, browser):
    colours = []
    for dark in (False, True):
        with opened(browser, single.as_uri(), dark) as seen:
            seen.page.evaluate("() => window.coterie.draw('fig-accuracy')")
            colours.append(
                seen.page.evaluate(
                    "() => { const p = document.getElementById('plot-fig-accuracy');"
                    " return [p._fullLayout.font.color, p._fullData.map((t) => t.line?.color)]; }"
                )
            )
    (light_ink, light_lines), (dark_ink, dark_lines) = colours
    assert light_ink.upper() == "#333333"
    assert dark_ink.upper() == "#E0E3E8"
    assert light_lines != dark_lines


def test_markup_in_names_is_shown_as_it_is_written(hostile, browser, tmp_path):
    path = write_report([hostile], tmp_path / "report.html")
    with opened(browser, path.as_uri()) as seen:
        drawn_all(seen)
        assert seen.page.evaluate("() => window.hacked") is None
        assert seen.page.locator("img").count() == 0
        assert "<b>bold</b>" in seen.page.locator("body").inner_text()
        assert seen.errors == []


def test_a_request_that_leaves_the_machine_is_seen_and_cut_off(browser, tmp_path):
    (tmp_path / "page.html").write_text("<img src='http://elsewhere.invalid/x.png'>")
    with opened(browser, (tmp_path / "page.html").as_uri()) as seen:
        assert seen.outside == ["http://elsewhere.invalid/x.png"]
        assert any("ERR_FAILED" in said for said in seen.errors)  # cut off, not looked up
