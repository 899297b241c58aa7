"""Every picture of a run, by name: what ``coterie report``, the live page and notebooks draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, unknown
from coterie.report import figures
from coterie.report.reading import Reading

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The parts of a report, in order, and what they are called.
SECTIONS = {
    "accuracy": "How good",
    "clients": "For whom",
    "groups": "Who learned with whom",
    "method": "How the method went about it",
    "cost": "What it cost",
    "privacy": "What the server saw",
}


@dataclass(frozen=True)
class Picture:
    """One kind of picture.

    ``draw`` raises a ``ConfigError`` that says why where a run has nothing for it; ``words`` says
    what is to be seen, for those who do not see it and as its caption.
    """

    name: str
    section: str
    title: str
    draw: Callable[[Reading], Figure]
    words: Callable[[Reading], str]


@dataclass(frozen=True)
class Drawn:
    """A picture of a run, or of several."""

    name: str
    section: str
    title: str
    words: str
    figure: Figure


def noting(reading: Reading, key: str) -> Mapping[str, Any]:
    """The first event whose notes have this key; a sentence if none has."""
    for event in reading.events:
        if (event.get("notes") or {}).get(key) is not None:
            return event
    raise ConfigError(f"{reading.name}: {reading.method} noted no '{key}'")


PICTURES: dict[str, Picture] = {
    p.name: p
    for p in (
        Picture(
            "groups",
            "groups",
            "Groups over rounds",
            lambda r: figures.groups_over_rounds(r.events),
            lambda r: "Who was in which group in which round.",
        ),
    )
}


def draw(name: str, reading: Reading) -> Figure:
    """One picture by its name."""
    if name not in PICTURES:
        raise ConfigError(unknown("picture", name, PICTURES))
    return PICTURES[name].draw(reading)


def pictures(reading: Reading) -> list[Drawn]:
    """All pictures that a run has something for, in the order of ``PICTURES``."""
    found = []
    for p in PICTURES.values():
        try:
            found.append(Drawn(p.name, p.section, p.title, p.words(reading), p.draw(reading)))
        except ConfigError:
            continue
    return found


def compared(readings: Sequence[Reading]) -> list[Drawn]:
    """The pictures that have several runs side by side."""
    return []
