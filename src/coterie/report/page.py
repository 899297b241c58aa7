"""Pages about runs, which ``coterie report`` writes into a file and the live page serves.

A page is a list of blocks, each an element with its own id, so that a live page can replace one at
a time. Figures are JSON beside them; ``assets/page.js`` draws them when they come into sight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

from markupsafe import Markup

from coterie import __version__
from coterie.report import catalogue, comparison_sections, palette, run_sections
from coterie.report.catalogue import Drawn
from coterie.report.compared_runs import compared_runs
from coterie.report.reading import Reading
from coterie.report.rendering import bidirectional, render
from coterie.report.repeating import repeat
from coterie.report.words import DAMAGE, outcome
from coterie.report.words_compared import headline_compared
from coterie.results.differences import MARGIN

GENERATOR = "coterie report"  # this identifies a file as a report
# A page loads and sends nothing; its styles and scripts are inside it.
OFFLINE = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Block:
    """A part of a page: the outer HTML of the element with this id.

    A block with a ``figure`` (compact JSON of data and layout) has an element with the attribute
    ``data-plot``, into which it is drawn. A heading has a ``title`` and its ``level``.
    """

    id: str
    html: Markup
    figure: str | None = None
    title: str = ""
    level: int = 0


@dataclass(frozen=True)
class Link:
    """An entry of the navigation: to a block, with its title; level 2 is indented."""

    target: str
    title: str
    level: int = 1


def run_blocks(reading: Reading, prefix: str = "", level: int = 2) -> list[Block]:
    """Everything about one run, in order: headline, numbers, pictures and tables by section.

    ``prefix`` begins all ids, for several runs on a page; ``level`` is that of the headings.
    """
    problems = list(reading.problems)
    drawn = catalogue.pictures(reading, problems)
    names = bidirectional(
        _unless_damaged("the list of names", lambda: _names(reading), problems) or ()
    )
    blocks = [Block(f"{prefix}headline", words(outcome(reading), f"{prefix}headline", names))]
    id = f"{prefix}tiles"
    html: Markup | None = _unless_damaged(
        "the part 'tiles'", lambda: run_sections.tiles(reading, id), problems
    )
    blocks += [Block(id, html)] if html else []
    for section, title in catalogue.SECTIONS.items():
        shown = [d for d in drawn if d.section == section]
        captions = " ".join(d.words for d in shown)
        inside = picture_blocks(shown, prefix, level + 1, names, problems)
        tables = []
        for name, make in run_sections.TABLES.get(section, {}).items():
            id = f"{prefix}{name}"
            called = partial(make, reading, id, level + 1, captions)
            if html := _unless_damaged(f"the part '{name}'", called, problems):
                tables.append(Block(id, html))
        if inside or tables:
            blocks += [heading(f"{prefix}section-{section}", title, level), *inside, *tables]
    id = f"{prefix}repeat"
    html = _unless_damaged("the part 'repeat'", lambda: repeat(reading, id, level + 1), problems)
    blocks.append(heading(f"{prefix}section-repeat", "Repeat it", level))
    blocks += [Block(id, html)] if html else []
    id = f"{prefix}notice"
    return [Block(id, run_sections.notice(reading, id, problems)), *blocks]


def _names(reading: Reading) -> list[str]:
    """The names that can occur in sentences about a run."""
    classes = reading.data.get("classes") or ()
    return [reading.name, *reading.names, *map(str, classes)]


T = TypeVar("T")


def _unless_damaged(what: str, make: Callable[[], T], problems: list[str]) -> T | None:
    """What ``make`` returns; None, with a sentence in ``problems``, if files are damaged."""
    try:
        return make()
    except DAMAGE as error:
        why = (str(error).splitlines() or ["no reason"])[0][:120]
        damage = f"the run's data for it are damaged ({type(error).__name__}: {why})"
        problems.append(f"{what} is left out: {damage}")
        return None


def compared_blocks(
    readings: Sequence[Reading],
    level: int = 2,
    margin: float = MARGIN,
    link_of: Callable[[str], str] | None = None,
) -> list[Block]:
    """Several runs side by side: what they answer, tables, pictures, the settings that differ.

    ``link_of`` makes the address of a run of its name; by default it is below on the same page.
    """
    below_here = {r.name: f"#run-{n}" for n, r in enumerate(readings, 1)}
    link_of = link_of or below_here.__getitem__
    problems: list[str] = []
    names = bidirectional([r.name for r in readings])
    found = _unless_damaged("the comparison", lambda: compared_runs(readings, margin), problems)
    sentences = _unless_damaged(
        "the headline", lambda: headline_compared(readings, found), problems
    )
    drawn = catalogue.compared(readings, problems)
    pictures = {
        which: picture_blocks(
            [d for d in drawn if (d.name == _FIRST) == (which == "first")],
            "compared-",
            level + 1,
            names,
            problems,
        )
        for which in ("first", "other")
    }
    below = level + 1
    tables: dict[str, Callable[[str], Markup | None]] = {
        "each-run": lambda id: comparison_sections.each_run(readings, id, below, link_of),
        "settings": lambda id: comparison_sections.settings(readings, id, below),
    }
    if found is not None:
        tables |= {
            "choices": lambda id: comparison_sections.choices(found, id, below),
            "compared-table": lambda id: comparison_sections.standings(found, id, below, link_of),
            "real": lambda id: comparison_sections.real(found, id, below),
            "reached": lambda id: comparison_sections.reached(found, id, below),
            "which-round": lambda id: comparison_sections.rounds(found, id, below),
            "why-groups": lambda id: comparison_sections.why_groups(found, id, below),
        }
    blocks: dict[str, Block] = {}
    for id, make in tables.items():
        html = _unless_damaged(f"the part '{id}'", partial(make, id), problems)
        if html:
            blocks[id] = Block(id, html)

    def parts(*ids: str) -> list[Block]:
        return [blocks[id] for id in ids if id in blocks]

    made = [Block("compared-headline", words(sentences or [], "compared-headline", names))]
    made += parts("choices", "compared-table")
    made += pictures["first"] + parts("real") + pictures["other"]
    made += parts("reached", "which-round", "why-groups", "each-run", "settings")
    if problems:
        made.insert(0, Block("compared-notice", run_sections.unread("compared-notice", problems)))
    return [heading("section-compared", "Side by side", level), *made]


_FIRST = "compare-gain"  # the main picture of a comparison
QUESTIONS = {  # the parts of a comparison that answer one, by the ids of their blocks
    "choices": "What to choose",
    "compared-table": "Which method?",
    "compared-fig-compare-gain": "Who gains, who loses?",
    "real": "Is it real?",
    "reached": "What did it cost?",
    "which-round": "Which round's model?",
    "why-groups": "Why these groups?",
}


def words(sentences: Sequence[str], id: str, names: Sequence[str] = ()) -> Markup:
    """A headline: the first sentence is the largest; ``names`` keep their writing direction."""
    sentences = sentences or ["Nothing is known of this run."]
    return render("headline.html", id=id, sentences=sentences, names=names)


def heading(id: str, title: str, level: int) -> Block:
    """The heading of a section."""
    html = render("heading.html", id=id, title=title, level=level)
    return Block(id, html, title=title, level=level)


# --- pictures -----------------------------------------------------------------------------------


def picture_blocks(
    drawn: Sequence[Drawn], prefix: str, level: int, names: Sequence[str], problems: list[str]
) -> list[Block]:
    """A block for each picture, with scales of the same picture as tabs, small ones side by side.

    ``names`` keep their writing direction in captions; a picture that fails is left out, with a
    sentence in ``problems``.
    """
    tabs = [d.name for d in drawn if d.name in catalogue.TABS]
    tabs = tabs if len(tabs) > 1 else []
    drawn, beside = _in_pairs(drawn, tabs)
    by_name: dict[str, Block] = {}
    group = f"{prefix}tabs-accuracy"
    for each in drawn:
        kind = "block picture half" if each.name in beside else "block picture"
        tab = group if each.name in tabs else None
        if each.name in beside:
            each.sketch.layout["height"] = round(beside[each.name])
        called = partial(picture_block, each, prefix, level, kind, tab, names)
        block = _unless_damaged(f"the picture '{each.name}'", called, problems)
        if block is not None:
            by_name[each.name] = block
    picture_list = list(by_name.values())
    panels = [(by_name[name].id, catalogue.TABS[name]) for name in tabs if name in by_name]
    if panels:
        first = [b.id for b in picture_list].index(panels[0][0])
        html = render("tabs.html", id=group, label="Score against", panels=panels)
        picture_list.insert(first, Block(group, html))
    return picture_list


# Pictures that need the whole width of a page; the others are legible at half of it.
_WIDE = (
    *("compare-accuracy", "compare-bytes", "compare-time", "compare-gain"),
    *("compare-clients", "compare-seconds", "divergence", "distances-by-layer"),
    *("trials", "hopkins", "layers", "mixing-terms"),
)
_HIGHER = 1.5  # pictures side by side get the same height, unless one is so much higher
_LOWER = (360, 560)  # the height of pictures side by side, unless they need more than the second


def _in_pairs(drawn: Sequence[Drawn], tabs: Sequence[str]) -> tuple[list[Drawn], dict[str, float]]:
    """The pictures in an order in which those side by side are neighbours, and their heights.

    Pictures in tabs take one place, since one of them is shown at a time.
    """
    places: list[list[Drawn]] = []
    for each in drawn:
        together = each.name in tabs and places and places[-1][0].name in tabs
        places[-1].append(each) if together else places.append([each])
    ordered: list[list[Drawn]] = []
    beside: dict[str, float] = {}
    waiting: int | None = None  # the place in the order of one without a neighbour
    for place in places:
        if place[0].name in _WIDE:
            ordered.append(place)
            continue
        if waiting is None:
            waiting = len(ordered)
            ordered.append(place)
            continue
        pair = [d for d in (*ordered[waiting], *place) if not d.flat]
        ordered.insert(waiting + 1, place)
        waiting = None
        heights = [_height(d) for d in pair]
        most = max(heights, default=0.0)
        lower = min(_LOWER[0], most) if most <= _LOWER[1] else most
        alike = most < _HIGHER * min(heights, default=0.0)
        beside |= {d.name: lower if alike else _height(d) for d in pair}
    return [each for place in ordered for each in place], beside


def _height(drawn: Drawn) -> float:
    return float(drawn.sketch.layout.get("height") or 420)


def picture_block(
    drawn: Drawn,
    prefix: str,
    level: int,
    kind: str = "block picture",
    tabs: str | None = None,
    names: Sequence[str] = (),
) -> Block:
    """A picture with its heading and its caption."""
    id = f"{prefix}fig-{drawn.name}"
    if drawn.flat:
        told = {"title": drawn.title, "words": drawn.words, "names": names, "level": level}
        return Block(id, render("sentence.html", id=id, **told))
    tree = drawn.tree
    height = tree["layout"].get("height") or 420
    html = render(
        "picture.html",
        id=id,
        kind=kind,
        tabs=tabs,
        level=level,
        title=drawn.title,
        words=drawn.words,
        names=names,
        height=f"{height:.0f}",
    )
    return Block(id, html, figure_json(tree))


def figure_json(tree: dict[str, Any]) -> str:
    """Data and layout of a figure as compact JSON."""
    from plotly.io import to_json

    return str(
        to_json({"data": tree["data"], "layout": tree["layout"]}, validate=False, engine="json")
    )


# --- the whole page -----------------------------------------------------------------------------


def contents(blocks: Sequence[Block]) -> list[Link]:
    """Links to the headings among blocks."""
    top = min((b.level for b in blocks if b.title), default=1)
    return [Link(b.id, b.title, b.level - top + 1) for b in blocks if b.title]


def document(
    title: str,
    blocks: Sequence[Block],
    *,
    navigation: Sequence[Link] | None = None,
    scripts: Sequence[str] = (),
    plotly: str | None = None,
    policy: str | None = OFFLINE,
    header: Markup | str = "",
    about: str = "",
) -> str:
    """A whole page: the title is its only h1, with a line ``about`` it; ``blocks`` is its content.

    Without ``navigation``, the contents list the headings among the blocks. ``plotly`` is the
    address of plotly.js; None writes the library into the page, and "" leaves it out. ``scripts``
    are more JavaScript sources, run after the page's own; ``header`` is HTML at the top, beside the
    name. ``policy`` is the page's Content-Security-Policy; None if the server sends one.
    """
    links = contents(blocks) if navigation is None else navigation
    return render(
        "page.html",
        title=title,
        about=about,
        generator=GENERATOR,
        version=__version__,
        policy=policy,
        header=header,
        links=links,
        blocks=blocks,
        style=asset("page.css"),
        theme=asset("theme.js"),
        dark_colours=json.dumps(palette.DARK, separators=(",", ":")),
        plotly_address=plotly,
        plotly=_plotly() if plotly is None else None,
        scripts=[asset("page.js"), *map(Markup, scripts)],
    )


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


@cache
def asset(name: str) -> Markup:
    """The text of a file in ``assets``."""
    return Markup((files("coterie.report") / "assets" / name).read_text(encoding="utf-8"))
