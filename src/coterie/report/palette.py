"""The colours of all pictures, in the light and in the dark.

Pictures are drawn in the colours of the light page. A dark page replaces them one by one, by
``DARK``, wherever they occur in a figure; a colour that is not in it is used on both.
"""

from __future__ import annotations

# Okabe and Ito's: they differ for every kind of colour vision, and in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
TINTS = ("#7FB8D8", "#F2CE7F", "#7FCEB9", "#E5BCD3", "#AAD9F4", "#EAAE7F", "#F7F1A0", "#7F7F7F")
BLUE, ORANGE, GREEN, PURPLE = COLOURS[:4]
RED = "#D55E00"
ALONE, INK, FAINT, GRID, PAPER = "#D9D9D9", "#333333", "#999999", "#E5E5E5", "#FFFFFF"
LOW = "#F0F0F0"  # nothing of something, in a scale of shares

DARK = {
    "#0072B2": "#4DA6E0",
    "#000000": "#F5F5F5",
    ALONE: "#4A4F57",
    INK: "#E0E3E8",
    FAINT: "#8A9099",
    GRID: "#333942",
    PAPER: "#171A1F",
    LOW: "#22262D",
}


def colour_of(number: int) -> str:
    """The colour of a group, or of a run, by its number; they come again after sixteen."""
    return (*COLOURS, *TINTS)[number % (len(COLOURS) + len(TINTS))]
