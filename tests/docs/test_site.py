"""The documentation as a site: no warning, all of it in reach, nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from browsing import opened, why_not
from fenced import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("material") is None, reason="the site needs the extra: pip install 'coterie[docs]'"
)

# What a browser fetches by itself when it opens a page, as against links that a reader follows.
LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "link": ("href",),
    "object": ("data",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
}
BUILT_BY_MATERIAL = {"404.html"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


class Read(HTMLParser):
    """What a page loads, where its links lead, and the places that links can lead to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.styles: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.places.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.styles.append(given.get("style", ""))
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        for name in LOADED.get(tag, ()):
            self.loads += [part.split()[0] for part in given.get(name, "").split(",") if part]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


@pytest.fixture(scope="module")
def pages(built: tuple[Path, str]) -> dict[str, Read]:
    folder, _ = built
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*.html")}
    return {name: Read(path.read_text()) for name, path in found.items()}


def resolved(page: str, link: str) -> tuple[str, str]:
    """The file of the site that a link leads to, and the place in it."""
    parts = urlsplit(urljoin(f"//site/{page}", link))
    return unquote(parts.path).lstrip("/"), unquote(parts.fragment)


def outside(link: str) -> bool:
    return bool(re.match(r"[a-z]+:|//", link, re.IGNORECASE))


def test_it_is_built_without_a_warning(built):
    _, said = built
    assert not re.search(r"warn|error|not found|not included", said, re.IGNORECASE), said
    assert not re.search(r"contains an? .*link", said), said  # what MkDocs only mentions


def test_every_link_leads_to_a_page_and_a_place_in_it(built, pages):
    folder, _ = built
    wrong = []
    for name, page in pages.items():
        if name in BUILT_BY_MATERIAL:
            continue  # its links are absolute: it is shown for any address
        for link in page.links:
            if outside(link):
                continue
            file, place = resolved(name, link)
            if file in ("", "."):
                file = "index.html"
            if not (folder / file).is_file():
                wrong.append(f"{name}: {link}")
            elif place and file in pages and place not in pages[file].places:
                wrong.append(f"{name}: {link}: no such place")
    assert not wrong


def test_every_page_can_be_reached_from_the_first(pages):
    """By links and the navigation, in as many steps as it takes."""
    seen, waiting = set(), {"index.html"}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        near = {resolved(name, link)[0] for link in pages[name].links if not outside(link)}
        waiting |= {file for file in near if file in pages} - seen
    assert set(pages) - seen <= BUILT_BY_MATERIAL


def test_every_page_of_docs_is_in_the_navigation(built, pages):
    """Not only reached: listed on every page, so on the first."""
    listed = {resolved("index.html", link)[0] for link in pages["index.html"].links}
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        page = path.relative_to(docs).with_suffix(".html").as_posix()
        page = re.sub(r"README\.html$", "index.html", page)
        assert page in listed | {"index.html"}, f"{path} is not in the navigation"


def test_the_site_loads_nothing_from_elsewhere(built, pages):
    folder, _ = built
    loads = {(name, it) for name, page in pages.items() for it in page.loads}
    assert len(loads) > len(pages)  # the test sees what is loaded
    assert not {(name, it) for name, it in loads if outside(it) and not it.startswith("data:")}
    for name, it in loads:
        file, _ = resolved(name, it)
        assert name in BUILT_BY_MATERIAL or it.startswith("data:") or (folder / file).is_file(), it
    styles = [p.read_text() for p in folder.rglob("*.css")]
    styles += [style for page in pages.values() for style in page.styles]
    fetched = {it for text in styles for it in re.findall(r"url\(['\"]?([^)'\"]+)", text)}
    fetched |= {it for text in styles for it in re.findall(r"@import\s+['\"]([^'\"]+)", text)}
    assert not {it for it in fetched if outside(it) and not it.startswith("data:")}


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_browser_finds_what_is_searched_for_and_asks_nobody_else(built, browser):
    folder, _ = built
    served = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with opened(browser, f"http://127.0.0.1:{server.server_port}/index.html") as seen:
                seen.page.get_by_role("link", name="Tutorial").first.click()
                seen.page.wait_for_url("**/tutorial.html")
                seen.page.keyboard.press("/")
                seen.page.keyboard.type("silhouette", delay=20)
                seen.page.locator(".md-search-result__item").first.wait_for(timeout=30_000)
                assert (seen.outside, seen.errors) == ([], [])
        finally:
            server.shutdown()


def test_the_repository_s_own_links_lead_somewhere():
    """As they are read on a code host: relative to the file, with that host's anchors."""
    wrong = []
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for page in [*top, *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
        for link in filter(None, (a or b for a, b in found)):
            if outside(link):
                continue
            name, _, place = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
            elif place and place not in anchors(target):
                wrong.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert not wrong


def anchors(page: Path) -> set[str]:
    """The anchors that a code host gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
