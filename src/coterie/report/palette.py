"""The colours of all pictures, on light and dark pages.

Pictures are drawn in the colours of the light page. A dark page replaces each colour by its value
in ``DARK`` wherever it occurs in a figure; colours that are not in ``DARK`` are used on both.
"""

from __future__ import annotations

# Okabe and Ito's colours differ for every kind of colour vision, and in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
TINTS = ("#7FB8D8", "#F2CE7F", "#7FCEB9", "#E5BCD3", "#AAD9F4", "#EAAE7F", "#F7F1A0", "#7F7F7F")
BLUE, ORANGE, GREEN, PURPLE = COLOURS[:4]
RED, SKY = "#D55E00", "#56B4E9"
ALONE, INK, FAINT, GRID, PAPER = "#D9D9D9", "#333333", "#999999", "#E5E5E5", "#FFFFFF"
LOW = "#F0F0F0"  # a share of 0
# For lines on paper: yellow, amber and light blue are too pale for a thin line.
LINES = ("#0072B2", "#D55E00", "#009E73", "#AA3377", "#A87400", "#5B4FA2", "#3A86A8", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
SCALE = (LOW, "#8FC1E3", "#0A4F86")  # from 0 to 1: paler is less on a light page

# No dark colour is among the light ones, so that no colour is replaced twice.
DARK = {
    "#0072B2": "#3D8FD1",
    "#56B4E9": "#93D5FF",
    "#000000": "#F5F5F5",
    "#7FB8D8": "#255C84",
    "#AAD9F4": "#5C8FA8",
    "#7F7F7F": "#B5B5B5",
    "#AA3377": "#E285B5",
    "#A87400": "#D9A63A",
    "#5B4FA2": "#A79BEA",
    "#3A86A8": "#7CC3E0",
    "#D55E00": "#F08A3C",
    "#009E73": "#2DBE93",
    "#8FC1E3": "#2F6C99",
    "#0A4F86": "#A6DBFF",
    ALONE: "#4A4F57",
    INK: "#E0E3E8",
    FAINT: "#8A9099",
    GRID: "#333942",
    PAPER: "#171A1F",
    LOW: "#22262D",
}


def colour_of(number: int) -> str:
    """The colour of a group by its number; colours repeat after sixteen."""
    return (*COLOURS, *TINTS)[number % (len(COLOURS) + len(TINTS))]


def line_of(number: int) -> tuple[str, str]:
    """The colour and the dashes of a run's line by its number; forty are different."""
    return LINES[number % len(LINES)], DASHES[number // len(LINES) % len(DASHES)]


def scale(colours: tuple[str, ...] = SCALE) -> list[tuple[float, str]]:
    """A continuous colour scale through these colours.

    >>> scale(("#FFFFFF", "#000000"))
    [(0.0, '#FFFFFF'), (1.0, '#000000')]
    """
    return [(i / (len(colours) - 1), colour) for i, colour in enumerate(colours)]
