"""Write docs/methods from the methods' docstrings.

    .venv/bin/python docs/methods_pages.py           # write what is out of date
    .venv/bin/python docs/methods_pages.py --check   # only name it; exit code 1 if there is any

A page whose first line is the first marker is generated as a whole. A page with words of its own
around the markers keeps them: between the markers it has the method in a line and its parameters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from coterie.methods import METHODS
from coterie.report.method_help import Explanation, card, explain, overview, page

FOLDER = Path(__file__).parent / "methods"
BEGIN = "<!-- generated from the docstrings by docs/methods_pages.py: do not edit -->"
END = "<!-- end of the generated part -->"


def wanted(folder: Path = FOLDER, methods: Mapping[str, Explanation] | None = None) -> dict:
    """The text that every page should have, by path; none for a page without its method."""
    known = methods or {name: explain(name, factory) for name, factory in METHODS.items()}
    front = folder / "README.md"
    found: dict[Path, str | None] = {front: filled(front.read_text(), overview(known.values()))}
    for name, it in known.items():
        path = folder / f"{name}.md"
        now = path.read_text() if path.exists() else ""
        by_hand = bool(now) and not now.startswith(BEGIN)
        whole = f"{BEGIN}\n\n{page(it)}\n\n{END}\n"
        found[path] = filled(now, card(it)) if by_hand else whole
    for path in sorted(folder.glob("*.md")):
        if path not in found and path.read_text().startswith(BEGIN):
            found[path] = None
    return found


def filled(text: str, part: str, marker: str = BEGIN) -> str:
    """A page with another text between its markers."""
    before, begin, rest = text.partition(marker)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"a page has no markers {marker}: {text.splitlines()[0]!r}")
    return f"{before}{marker}\n\n{part}\n\n{END}{after}"


def outdated(folder: Path = FOLDER) -> dict:
    """The pages that are not as they should be, with the text that they should have."""
    return other_than_now(wanted(folder))


def other_than_now(pages: Mapping[Path, str | None]) -> dict:
    """Those of these pages that are not as they should be."""
    return {
        path: text
        for path, text in pages.items()
        if text != (path.read_text() if path.exists() else None)
    }


def write_or_check(about: str, pages: Mapping[Path, str | None]) -> None:
    """Bring pages up to date, or with --check only name those that are not; then end."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    found = other_than_now(pages)
    for path, text in found.items():
        print(f"{'out of date' if check else 'written' if text else 'removed'}: {path}")
        if check:
            continue
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    sys.exit(1 if check and found else 0)


if __name__ == "__main__":
    write_or_check(__doc__, wanted())
