"""What a comparison answers, in sentences: which method, is it real, was it worth it, who loses.

The terminal, the files of a comparison, notebooks and the report say the same, from the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coterie.report.tables import score, size
from coterie.report.words import SEEN, saw_of, value, word
from coterie.results.differences import (
    BETTER,
    EQUAL,
    LEAST_SEEDS,
    MARGIN,
    OPEN,
    UNTESTED,
    WORSE,
    differences,
)
from coterie.results.seeds import BEST, HIGHEST, judged_score, means_of
from coterie.results.titles import place_of

Row = Mapping[str, Any]
CEILING, ALONE = "ceiling", "alone"
_CALLED = {CEILING: "the ceiling", ALONE: "training alone"}
FEW_SEEDS = "too few seeds to tell"
_ALIKE = 1.02  # bytes that differ by less are about the same


@dataclass(frozen=True)
class Answer:
    """What is to be said of one setting: ``setting`` is "" if there is only one.

    ``choices`` are the methods that no other one beats in score, bytes and what the server sees,
    each with its reason.
    """

    setting: str
    best: str
    worth: str
    losers: str
    choices: Sequence[tuple[str, str]]

    @property
    def sentences(self) -> list[str]:
        """All sentences but those of the choices."""
        return [text for text in (self.best, self.worth, self.losers) if text]


@dataclass(frozen=True)
class Block:
    """The methods of one setting: the rows of their runs, and their means over seeds."""

    setting: str
    rows: Sequence[Row]
    lines: Sequence[Row]
    by: str
    margin: float = MARGIN

    @cached_property
    def usable(self) -> list[Row]:
        """The means of methods that are no reference lines, the highest score first."""
        usable = [line for line in self.lines if not line["reference"] and _known(line)]
        return sorted(usable, key=lambda line: -line["score"])

    @cached_property
    def top(self) -> list[Row]:
        """The usable methods with the highest mean."""
        return [line for line in self.usable if line["score_mark"] in (BEST, HIGHEST)]

    @cached_property
    def most_seeds(self) -> int:
        """The most seeds of a method."""
        return max((int(line["seeds"]) for line in self.lines), default=0)

    @property
    def tested(self) -> bool:
        """Whether there are enough seeds for tests."""
        return self.most_seeds >= LEAST_SEEDS

    def line_of(self, reference: str) -> Row | None:
        """The means of a reference line, if the comparison has it."""
        found = (line for line in self.lines if line["reference"] == reference and _known(line))
        return next(found, None)

    def verdicts_to(self, line: Row) -> dict[str, str]:
        """The verdict of each method's difference to one of them."""
        scores: dict[str, dict[int, float]] = {}
        for row in self.rows:
            judged = judged_score(row)
            if judged is not None:
                scores.setdefault(str(row["method"]), {})[int(row.get("seed", 0))] = judged
        found = differences(str(line["method"]), scores, self.margin)
        return {name: difference.verdict for name, difference in found.items()}


def _known(line: Row) -> bool:
    return line.get("score") is not None


def blocks_of(
    rows: Sequence[Row], axes: Sequence[str], by: str, margin: float = MARGIN
) -> list[Block]:
    """The settings of a comparison, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(repr([row[axis] for axis in axes]), []).append({"seed": 0, **row})
    blocks = []
    for own in found.values():
        setting = place_of("", {axis: own[0][axis] for axis in axes}).removeprefix(", ")
        blocks.append(Block(setting, own, means_of(own, axes, margin), by, margin))
    return blocks


def answers(
    rows: Sequence[Row], axes: Sequence[str], by: str, margin: float = MARGIN
) -> list[Answer]:
    """What each setting of a comparison answers; settings with a single method have no answer."""
    blocks = blocks_of(rows, axes, by, margin)
    return [answer_of(block) for block in blocks if len(block.lines) > 1]


def answer_of(block: Block) -> Answer:
    """What a setting answers."""
    return Answer(block.setting, best(block), worth(block), losers(block), choices(block))


def points(difference: float, by: str) -> str:
    """The size of a difference of two scores.

    >>> points(-0.061, "accuracy"), points(0.01, "accuracy"), points(0.061, "r2")
    ('6.1 points', '1.0 point', '0.061')
    """
    if by != "accuracy":
        return f"{abs(difference):.3f}"
    text = f"{100 * abs(difference):.1f}"
    return f"{text} point{'s' * (text != '1.0')}"


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Names as a list in a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    shown = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


# --- which method, and is it real -----------------------------------------------------------------


def best(block: Block) -> str:
    """The best usable method beside the reference lines, and which others may be as good."""
    top = block.top
    if not top:
        return ""
    names, first = [str(line["method"]) for line in top], top[0]
    shown = value(first["score"], block.by)
    if len(block.usable) == 1:
        text = f"{names[0]} is the only usable method: {shown}"
    elif len(names) == len(block.usable):
        text = f"All {len(names)} usable methods have the same {word(block.by)}: {shown}"
    elif first["score_mark"] == BEST:
        are = "is the best" if len(names) == 1 else "are the best"
        text = f"{listed(names)} {are} of the usable methods: {shown}"
    else:
        have = "has" if len(names) == 1 else "have"
        text = f"{listed(names)} {have} the highest {word(block.by)} of the usable methods: {shown}"
    text += "".join(_beside(block, first, each) for each in (ALONE, CEILING))
    return f"{text}{_real(block)}."


def _beside(block: Block, top: Row, reference: str) -> str:
    """The difference of the best to a reference line."""
    line = block.line_of(reference)
    if line is None:
        return ""
    gap = top["score"] - line["score"]
    unsure = " (not distinguished)" if line["score_mark"] == OPEN else ""
    return f", {_by_how_much(gap, block.by, _CALLED[reference])}{unsure}"


def _by_how_much(gap: float, by: str, than: str) -> str:
    if abs(gap) < 0.0005:  # it would be shown as 0
        return f"as high as {than}"
    return f"{points(gap, by)} {'above' if gap > 0 else 'below'} {than}"


def _real(block: Block) -> str:
    """Which other methods may be as good, and how many seeds would tell."""
    rivals = [line for line in block.usable if line not in block.top]
    if not rivals:
        return ""
    if not block.tested:
        return f". {_few(block, rivals)}"
    marked = {
        mark: [str(line["method"]) for line in rivals if line["score_mark"] == mark]
        for mark in (EQUAL, OPEN, UNTESTED)
    }
    half = margin_in_words(block.margin, block.by)
    parts = []
    if marked[EQUAL]:
        parts.append(f"equal to {listed(marked[EQUAL])} within {half}")
    if marked[OPEN]:
        parts.append(f"not distinguished from {listed(marked[OPEN])}{_settled(rivals)}")
    if marked[UNTESTED]:
        parts.append(f"{FEW_SEEDS} for {listed(marked[UNTESTED])}")
    return "".join(f"; {part}" for part in parts) or "; every other usable method is worse"


def _few(block: Block, rivals: Sequence[Row]) -> str:
    needed = _needed(rivals)
    text = f"{few_seeds(block.most_seeds)} which differences are real"
    if needed is None:
        return f"{text}, {_LEAST} are needed"
    return f"{text}; by their spread, about {needed} would settle the closest"


def few_seeds(seeds: int) -> str:
    """The number of seeds, and that they are too few.

    >>> few_seeds(1), few_seeds(3)
    ('One seed: too few seeds to tell', '3 seeds: too few seeds to tell')
    """
    return f"{'One seed' if seeds == 1 else f'{seeds} seeds'}: {FEW_SEEDS}"


_LEAST = "five" if LEAST_SEEDS == 5 else str(LEAST_SEEDS)


def _settled(rivals: Sequence[Row]) -> str:
    open_ones = [line for line in rivals if line["score_mark"] == OPEN]
    needed = _needed(open_ones)
    if needed is None:
        return ""
    which = "the closest" if len(open_ones) > 1 else "it"
    return f" (about {needed} seeds would settle {which})"


def _needed(rivals: Sequence[Row]) -> int | None:
    """The number of seeds that would settle the closest of these."""
    closest = max(rivals, key=lambda line: float(line["score"]))
    needed = closest.get("seeds_needed")
    return None if needed is None else int(needed)


# --- was it worth it, and who loses ---------------------------------------------------------------


def worth(block: Block) -> str:
    """Whether taking part in the federation paid, compared with training alone."""
    text = _worth(block)
    return f"{text[:1].upper()}{text[1:]}"


def _worth(block: Block) -> str:
    alone = block.line_of(ALONE)
    if alone is None or not block.usable:
        return ""
    verdicts = block.verdicts_to(alone) if block.tested else {}
    above, below, unsure = list[Row](), list[Row](), list[Row]()
    for line in block.usable:
        gap = line["score"] - alone["score"]
        verdict = verdicts.get(str(line["method"]), UNTESTED)
        if block.tested and verdict not in (BETTER, WORSE):
            unsure.append(line)
        else:
            (above if gap > 0 else below).append(line)
    names = [[str(line["method"]) for line in kind] for kind in (above, below, unsure)]
    by_means = "" if block.tested else f"By the mean{'s' * (block.most_seeds > 1)}, "
    open_ones = f"; not distinguished from it: {listed(names[2])}" if unsure else ""
    gaps = [_by_how_much(line["score"] - alone["score"], block.by, "it") for line in below]
    lost = [f"{name} ({gap})" for name, gap in zip(names[1], gaps, strict=True)]
    if not above and not below:
        first = block.usable[0]
        gap = _by_how_much(first["score"] - alone["score"], block.by, "it")
        which = f"; the highest, {names[2][0]}, is {gap}" if len(names[2]) > 1 else f" ({gap})"
        return (
            "it is not shown that federating was worth it: "
            f"{listed(names[2])} {_is(names[2])} not distinguished from training alone{which}."
        )
    if not above:
        if not unsure and len(below) > 1:
            return (
                f"{by_means}federating was not worth it: every usable method is below training "
                f"alone, {lost[0]} the least."
            )
        return (
            f"{by_means}federating was not worth it with {listed(lost)}, below training "
            f"alone{open_ones}."
        )
    if not below:
        every = "every usable method is" if not unsure else f"{listed(names[0])} {_is(names[0])}"
        return f"{by_means}federating was worth it: {every} above training alone{open_ones}."
    return (
        f"{by_means}federating was worth it with {listed(names[0])}, above training alone, but not "
        f"with {listed(lost)}{open_ones}."
    )


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def losers(block: Block) -> str:
    """Who gains and who loses with the best method, compared with training alone."""
    line = next((line for line in block.top if line.get("better") is not None), None)
    if line is None:
        return ""
    seeds = ", as means over seeds" if line["seeds"] > 1 else ""
    of = f"{_few_digits(line['compared'])} clients compared with training alone"
    return f"With {line['method']}, {of}: {gainers(line, block.by)}{seeds}."


def gainers(line: Row, by: str) -> str:
    """The clients that are better off than alone, as good, and worse off.

    >>> line = {"better": 7, "as_good": 6, "worse_off": 7, "largest_loss": 0.17}
    >>> gainers(line, "accuracy")
    'better 7, same 6, worse 7 (by up to 17.0 points)'
    """
    counts = [line[key] for key in ("better", "as_good", "worse_off")]
    titles = zip(("better", "same", "worse"), counts, strict=True)
    text = ", ".join(f"{title} {_few_digits(n)}" for title, n in titles)
    most = line.get("largest_loss")
    return f"{text} (by up to {points(most, by)})" if most and counts[2] else text


def _few_digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


# --- what to choose -------------------------------------------------------------------------------

_MOST_SEEN_FIRST = tuple(SEEN)


def _seen(line: Row) -> int:
    """How little the server sees: the smaller, the more."""
    sees = str(line.get("sees") or "")
    return _MOST_SEEN_FIRST.index(sees) if sees in _MOST_SEEN_FIRST else 0


def choices(block: Block) -> list[tuple[str, str]]:
    """The usable methods that nothing else beats in score, bytes and what the server sees.

    Training alone counts among the others: a method below it is no choice, however little it sends.
    """
    known = [line for line in block.usable if line.get("bytes") is not None]
    alone = block.line_of(ALONE)
    others = known if alone is None or alone.get("bytes") is None else [*known, alone]
    kept = [
        line
        for line in known
        if not any(_beats(other, line) for other in others if other is not line)
    ]
    if not kept:
        return []
    least = min(line["bytes"] for line in kept)
    hidden = max(_seen(line) for line in kept)
    return [(str(line["method"]), _reason(line, kept[0], least, hidden, block.by)) for line in kept]


def _beats(other: Row, line: Row) -> bool:
    one, two = ((row["score"], -row["bytes"], _seen(row)) for row in (other, line))
    return one != two and all(a >= b for a, b in zip(one, two, strict=True))


def _reason(line: Row, first: Row, least: float, hidden: int, by: str) -> str:
    parts = []
    if line["score"] == first["score"]:
        parts.append(f"the highest {word(by)}, {value(line['score'], by)}")
    else:
        gap = points(first["score"] - line["score"], by)
        parts.append(f"{value(line['score'], by)}, {gap} below the highest")
    if line["bytes"] == least:
        parts.append(f"the fewest bytes, {size(line['bytes'], digits=1)}")
    elif first["bytes"] > _ALIKE * line["bytes"]:
        share = 100 * (1 - line["bytes"] / first["bytes"])
        parts.append(f"{size(line['bytes'], digits=1)}, {share:.0f} % fewer bytes than the highest")
    else:
        parts.append(size(line["bytes"], digits=1))
    sees = str(line.get("sees") or "")
    if sees:
        least_seen = " at most" if _seen(line) == hidden and _seen(first) < hidden else ""
        parts.append(f"the server saw {saw_of(line)}{least_seen}")
    return "; ".join(parts)


def lines_of(found: Sequence[Answer]) -> list[str]:
    """The answers as lines below a table."""
    lines = []
    for answer in found:
        texts = list(answer.sentences)
        if len(answer.choices) > 1:
            texts += [f"to choose {name}: {reason}" for name, reason in answer.choices]
        lines += [f"{answer.setting}: {text}" if answer.setting else text for text in texts]
    return lines


def one_sample(rows: Sequence[Row], by: str) -> str:
    """The points that one test sample makes for the client with the fewest; "" below one point.

    >>> one_sample([{"test_least": 18}], "accuracy")
    'one test sample is 5.6 points of the score of the client with the fewest, 18'
    """
    least = min((row["test_least"] for row in rows if row.get("test_least")), default=None)
    if by != "accuracy" or least is None or least > 100:
        return ""
    return (
        f"one test sample is {points(1 / least, by)} of the score of the client with the fewest, "
        f"{least:.0f}"
    )


def margin_in_words(margin: float, by: str) -> str:
    """The margin within which scores count as equal.

    >>> margin_in_words(0.005, "accuracy")
    '±0.5 points'
    """
    return f"±{100 * margin:g} points" if by == "accuracy" else f"±{score(margin, by)}"
