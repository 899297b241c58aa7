"""The result of a trial: the validation loss of each number of groups that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import clear, dots, figure_of, level, line, plain, styled
from coterie.report.palette import BLUE, GREEN, INK, RED


def verdict(notes: Mapping[str, Any]) -> Sketch:
    """Mean validation loss by number of groups, with standard errors and the choice.

    ``notes`` are a trial's verdict. An error bar is the standard error of the difference from the
    lowest loss, which itself has none: the trial chooses the fewest groups whose bar reaches down
    to the lowest loss. Where the evidence had chosen groups, the trial keeps those, or takes the
    first finer ones with nine tenths of the best gain, measured without the scoring client.
    """
    points = tried(notes)
    heights = [(groups, loss) for groups, loss, _ in points]
    lowest = min(loss for _, loss in heights)
    bars = {
        "type": "data",
        "array": clear([error for *_, error in points]),
        "color": BLUE,
        "thickness": 1.2,
        "width": 4,
    }
    hover = "%{x} groups: %{y:.4g} ± %{error_y.array:.2g}<extra></extra>"
    traces = [
        line(heights, "validation loss", BLUE, error_y=bars, hovertemplate=hover),
        level(heights, lowest, "lowest loss", INK, "dot"),
    ]
    if others := without_own(notes):
        name = "without the client itself"
        hover = f"%{{x}} groups, {name}: %{{y:.4g}}<extra></extra>"
        traces.append(line(others, name, GREEN, "dash", hovertemplate=hover))
    chosen = [each for each in heights if each[0] == notes.get("chosen")]
    if chosen:
        word = "one model" if chosen[0][0] == 1 else f"{chosen[0][0]} groups"
        traces.append(dots(chosen[:1], f"chosen: {word}", RED, "diamond"))
    figure = figure_of(traces)
    first, last = heights[0][0], heights[-1][0]
    figure.x(title="number of groups", range=[first - 0.5, last + 0.5])
    if len(points) < 12:
        figure.x(dtick=1)  # groups are whole numbers
    figure.y(title="mean validation loss")
    subtitle = [plain(notes["why"])] if notes.get("why") else []
    return styled(figure, "Trial: validation loss by number of groups", 400, *subtitle)


def without_own(notes: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The losses of clients' groups without the clients' own updates, where a trial has them."""
    others = notes.get("others") or ()
    if len(others) != len(notes["cuts"]) or list(others) == list(notes["losses"]):
        return []
    pairs = zip(notes["cuts"], others, strict=True)
    return sorted((int(groups), float(loss)) for groups, loss in pairs)


def tried(notes: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """The numbers of groups that were tried, each with its loss and standard error."""
    if not notes.get("losses"):
        raise ConfigError("this trial has no losses: no client has validation data")
    rows = zip(notes["cuts"], notes["losses"], notes["errors"], strict=True)
    return sorted((int(groups), float(loss), float(error)) for groups, loss, error in rows)
