"""What MkDocs cannot do by itself for this site.

The pages are read in the repository, too, so their links are those of the repository. What they
name outside ``docs`` is put into the site under ``repository/``: a Markdown file as a page, a
folder as a list of its files, anything else as it is. A folder in the navigation stands for its
front page and the pages that it names, in its order and under its headings. Pages of methods have
the methods' real names in the navigation, and their rules as formulas (``methods/formulas.toml``),
which the KaTeX in ``assets`` renders: no request leaves the reader's machine.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BESIDE = "repository"
METHODS = tomllib.loads((DOCS / "methods" / "formulas.toml").read_text(encoding="utf-8"))
IN_NAVIGATION = ("CHANGELOG.md", "CONTRIBUTING.md")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")([^)\"#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Spread the folders of the navigation out into their pages."""
    config.nav = [_spread(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages name outside docs, and what those name in turn."""
    waiting = {f"{BESIDE}/{name}" for name in IN_NAVIGATION}
    for file in files.documentation_pages():
        waiting |= _named(file.src_uri, file.content_string)
    done: set[str] = set()
    while waiting:
        place = waiting.pop()
        done.add(place)
        source = _source(place)
        if source.is_dir():
            text = _listing(source)
            place = f"{place}/index.md"
            files.append(File.generated(config, place, content=text))
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(source)))
            continue
        waiting |= _named(place, text) - done
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into those of the site, and add formulas."""
    folder, _, name = page.file.src_uri.rpartition("/")
    formula = METHODS["formulas"].get(name.removesuffix(".md")) if folder == "methods" else None
    if formula:
        markdown = _with_formula(markdown, formula)
    here = posixpath.dirname(page.file.src_uri)

    def turned(found: re.Match[str]) -> str:
        place = _place(page.file.src_uri, found[2])
        if place is None:
            return found[0]
        file = place if files.get_file_from_path(place) else f"{place}/index.md"
        return found[1] + posixpath.relpath(file, here)

    return _outside_code(LINK, turned, markdown)


def _with_formula(markdown: str, formula: str) -> str:
    """The page with a formula at the head of its rule, or below its title."""
    safe = formula.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    place = re.search(r"^## (?:Rule|The rule|The method).*$", markdown, re.MULTILINE)
    place = place or re.search(r"^# .*$", markdown, re.MULTILINE)
    assert place is not None
    block = f'\n\n<div class="formula">{safe}</div>\n'
    return markdown[: place.end()] + block + markdown[place.end() :]


def _spread(entry: Any) -> Any:
    """An entry of the navigation; a folder becomes its pages."""
    if isinstance(entry, dict):
        return {title: _spread(inner) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_spread(inner) for inner in entry]
    if not str(entry).endswith("/"):
        return entry
    heading, under = "", dict[str, str]()
    for line in (DOCS / entry / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line[4:] if line.startswith("### ") else ""
        if named := re.match(r"\| \[[^]]*\]\(([\w-]+\.md)\)", line):
            under.pop(named[1], None)  # the last list that has a page is its place
            under[named[1]] = heading
    found: list[Any] = [f"{entry}README.md"]
    names = METHODS["names"] if entry == "methods/" else {}
    for title in dict.fromkeys(under.values()):
        pages: list[Any] = []
        for page in (page for page, place in under.items() if place == title):
            name = names.get(page.removesuffix(".md"))
            pages.append({name: f"{entry}{page}"} if name else f"{entry}{page}")
        found += [{title: pages}] if title else pages
    return found


def _named(page: str, text: str) -> set[str]:
    """The places under ``repository/`` that a page names."""
    places: set[str] = set()

    def note(found: re.Match[str]) -> str:
        place = _place(page, found[2])
        if place is not None and place.startswith(f"{BESIDE}/"):
            places.add(place)
        return found[0]

    _outside_code(LINK, note, text)
    return places


def _place(page: str, link: str) -> str | None:
    """Where in the site the repository's file is that a page names.

    None if the link is good as it is, and for what is not there: MkDocs then warns about it.
    """
    if re.match(r"[a-z]+:|/", link):
        return None
    beside = page.startswith(f"{BESIDE}/")
    target = (_source(page).parent / link).resolve()
    inside = target.is_relative_to(DOCS)
    if not target.is_relative_to(ROOT) or not target.exists() or (inside and not beside):
        return None
    name = target.relative_to(DOCS if inside else ROOT).as_posix()
    return name if inside else f"{BESIDE}/{name}"


def _source(place: str) -> Path:
    """The repository's file for a place in the site."""
    beside, _, name = place.partition("/")
    return ROOT / name if beside == BESIDE else DOCS / place


def _listing(folder: Path) -> str:
    """A page of links to a folder's files."""
    files = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    title = folder.relative_to(ROOT).as_posix()
    return f"# {title}\n\n" + "\n".join(f"- [{name}]({name})" for name in files) + "\n"


def _outside_code(pattern: re.Pattern[str], turn: Any, text: str) -> str:
    """Replace what matches, but not in blocks of code."""
    parts, end = [], 0
    for block in FENCED.finditer(text):
        parts += [pattern.sub(turn, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join(parts) + pattern.sub(turn, text[end:])
