"""Descriptions of methods from docstrings and signatures, for the terminal and as Markdown.

A method's docstring begins with one line, has ``Family:`` (one of ``FAMILIES``, by which lists are
sorted) and then the sections of ``methods.docstrings``, with optional ``Notes:``; each parameter
has an entry under ``Args:``. Types, defaults and ranges come from the signature.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from coterie.core.method import Method
from coterie.errors import ConfigError
from coterie.methods.docstrings import (
    SECTIONS,
    arguments,
    first_sentence,
    joined,
    looked_at,
    sections,
)
from coterie.report.listings import FAMILIES, coloured

Factory = Callable[..., Method]

OTHER = "other"  # family of plug-ins
SECURE = "Secure aggregation"  # the section that is not the docstring's
# What the data must have for a method, as the command line says it.
NEEDS = {"oracle": " --shift rotation"}
NEEDS["known-groups"] = " --set method.groups=group --shift rotation"
NEEDS["adaptive-tau"] = " --set stop.bytes=5e6"
# What ``--reveal`` must name for a method to work under secure aggregation, where that is enough.
REVEALS = {"fedclust": "final-layer", "group-evidence": "final-layer"}

# What a part of a combination such as ifca+ditto can bring, in the words of ``compose``.
BRINGS = {
    "assign": "who learns together",
    "train": "how a client trains",
    "shared": "which layers are shared",
    "around": "what goes around it: how the server takes the mean, or how many steps clients make",
}

_NUMBER = r"-?\d+(?:\.\d+)?"
_RANGE = re.compile(
    rf"(?:above {_NUMBER}|{_NUMBER} or more)(?:,? (?:and )?(?:to|at most|below) {_NUMBER})?"
    rf"|{_NUMBER} to (?:below )?{_NUMBER}"
)
_NUMERIC = re.compile(r"(?:above |below |at most )?-?\d")
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Parameter:
    """One parameter: its type, default (None if it is required), range and meaning."""

    name: str
    type: str
    default: str | None
    range: str
    meaning: str

    def cells(self) -> tuple[str, ...]:
        """The parameter as a row of a table."""
        default = "required" if self.default is None else self.default
        return self.name, self.type, default, self.range or "–", self.meaning


@dataclass(frozen=True)
class Explanation:
    """The description of a method. ``brings`` is what it adds to a combination with others.

    ``secure`` is whether it works under secure aggregation, and why; None where it is unknown.
    ``sees`` is what its server looks at: nothing, means, or each reply.
    """

    name: str
    family: str
    about: str
    sections: Mapping[str, str]
    parameters: tuple[Parameter, ...]
    brings: tuple[str, ...]
    secure: tuple[bool, str] | None = None
    sees: str = "–"

    @property
    def example(self) -> str:
        """A command that runs the method."""
        required = [p.name for p in self.parameters if p.default is None]
        settings = "".join(f" --set method.{name}=4" for name in required)
        return f"coterie run --method {self.name}{settings}{NEEDS.get(self.name, '')}"

    @property
    def signature(self) -> str:
        """The method's parameters with their defaults, on one line."""
        return ", ".join(
            p.name if p.default is None else f"{p.name}={p.default}" for p in self.parameters
        )

    @property
    def row(self) -> dict[str, str]:
        """The method's line in a list."""
        return {
            "about": self.about,
            "family": self.family,
            "sees": self.sees,
            "secure": secure_word(self.secure),
            "parameters": self.signature,
        }

    @property
    def combines(self) -> str:
        """What the method adds to a combination, as a sentence."""
        if not self.brings:
            return ""
        return f"in a combination, ``NAME+NAME``, it says {' and '.join(self.brings)}."


def explain(name: str, factory: Factory) -> Explanation:
    """The description of a method, as far as its docstring goes."""
    raw = sections(factory.__doc__ or "")
    described = arguments(raw.pop("Args", ""))
    hints = get_type_hints(inspect.unwrap(factory), include_extras=True)
    signature = inspect.signature(factory)
    method = _made(factory)
    family = joined(raw.pop("Family", OTHER)).removesuffix(".")
    return Explanation(
        name=name,
        family=family,
        about=joined(raw.pop("")),
        sections={title: joined(text) for title, text in raw.items()},
        parameters=tuple(
            _parameter(p, hints.get(p.name, Any), described.get(p.name, ""))
            for p in signature.parameters.values()
        ),
        brings=_brings(method),
        secure=None if method is None else secure_words(method),
        sees="–" if method is None else method.sees,
    )


def by_family(explanations: Iterable[Explanation]) -> dict[str, list[Explanation]]:
    """Methods by family, in the order of families; empty families are left out."""
    families: dict[str, list[Explanation]] = {family: [] for family in FAMILIES}
    for each in explanations:
        families[each.family if each.family in families else OTHER].append(each)
    return {family: members for family, members in families.items() if members}


# --- docstrings ----------------------------------------------------------------------------------


# --- signatures ----------------------------------------------------------------------------------


def _parameter(parameter: inspect.Parameter, hint: Any, meaning: str) -> Parameter:
    kinds, ranges = _described(hint)
    written = _RANGE.search(meaning)
    if written is not None and _counts(kinds):
        if not any(map(_NUMERIC.match, ranges)):  # the docstring says what the signature does not
            ranges = [written[0], *ranges]
        # The table has a column for it.
        meaning = re.sub(rf", {re.escape(written[0])}(?=[;.,)]|$| \()", "", meaning, count=1)
    default = None if parameter.default is parameter.empty else as_toml_value(parameter.default)
    kind = " or ".join(dict.fromkeys(kinds)) or "any"
    return Parameter(parameter.name, kind, default, ", ".join(ranges), meaning)


def _counts(kinds: Sequence[str]) -> bool:
    return "integer" in kinds or "number" in kinds


def _described(hint: Any) -> tuple[list[str], list[str]]:
    """The types and the ranges that a hint allows, in words, without None."""
    origin = get_origin(hint)
    if origin is Annotated:
        kind, *notes = get_args(hint)
        kinds, ranges = _described(kind)
        return kinds, [*ranges, *filter(None, [_bounds(notes)])]
    if origin in (Union, UnionType):
        parts = [_described(part) for part in get_args(hint) if part is not NoneType]
        return [k for kinds, _ in parts for k in kinds], [r for _, found in parts for r in found]
    if origin is Literal:
        return ["choice"], [as_toml_value(value) for value in get_args(hint)]
    if origin is dict:
        return ["table"], []
    if origin is not None:  # tuple[int, ...], list[float]
        inner = [_described(part) for part in get_args(hint) if part is not Ellipsis]
        items = " or ".join(dict.fromkeys(k for found, _ in inner for k in found))
        return [f"list of {items}s" if items else "list"], [r for _, found in inner for r in found]
    return ([_TYPES[hint]] if hint in _TYPES else []), []


def _bounds(notes: Sequence[Any]) -> str:
    """The limits of a number, from pydantic's field.

    >>> from pydantic import Field
    >>> _bounds([Field(ge=0, le=1)]), _bounds([Field(gt=0)]), _bounds([Field(gt=0, lt=2)])
    ('0 to 1', 'above 0', 'above 0, below 2')
    """
    limits: dict[str, Any] = {}
    for note in notes:
        for limit in (note, *getattr(note, "metadata", ())):
            for key in ("ge", "gt", "le", "lt"):
                if getattr(limit, key, None) is not None:
                    limits[key] = getattr(limit, key)
    low, above = limits.get("ge"), limits.get("gt")
    high, below = limits.get("le"), limits.get("lt")
    if low is not None and high is not None:
        return f"{as_toml_value(low)} to {as_toml_value(high)}"
    if above is not None and high is not None:
        return f"above {as_toml_value(above)} to {as_toml_value(high)}"
    if low is not None and below is not None:
        return f"{as_toml_value(low)} to below {as_toml_value(below)}"
    words = [
        f"{as_toml_value(low)} or more" if low is not None else "",
        f"above {as_toml_value(above)}" if above is not None else "",
        f"at most {as_toml_value(high)}" if high is not None else "",
        f"below {as_toml_value(below)}" if below is not None else "",
    ]
    return ", ".join(filter(None, words))


def as_toml_value(value: Any) -> str:
    """A value as a user writes it in TOML.

    >>> [as_toml_value(value) for value in (True, "auto", None, (1, 2), 0.5)]
    ['true', '"auto"', 'none', '[1, 2]', '0.5']
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml_value(v) for v in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def required(factory: Factory) -> list[str]:
    """The required parameters."""
    parameters = inspect.signature(factory).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in named if p.default is p.empty]


def _made(factory: Factory) -> Method | None:
    """The method, with 1 for required parameters; None if it refuses that."""
    try:
        return factory(**dict.fromkeys(required(factory), 1))
    except ConfigError:
        return None


def _brings(method: Method | None) -> tuple[str, ...]:
    """The parts of a method, apart from those that FedAvg has, too."""
    pieces = None if method is None else method.pieces
    return tuple(words for piece, words in BRINGS.items() if getattr(pieces, piece, None))


# --- secure aggregation --------------------------------------------------------------------------


def secure_words(method: Method) -> tuple[bool, str]:
    """Whether a method works where the server learns only sums, and why.

    >>> from coterie.methods import fedavg, krum
    >>> secure_words(fedavg())
    (True, 'it asks for sums only')
    >>> secure_words(krum())
    (False, "it looks at each client's model")
    """
    if method.sees == "nothing":
        return True, "it sends nothing that could be summed"
    alike = "; all clients must make the same number of steps (``train.steps``)"
    alike = alike if method.same_steps else ""
    if method.sees != "each":
        return True, f"it asks for sums only{alike}"
    looks = f"it looks at {looked_at(method) or 'the replies of each client'}"
    reveal = next((REVEALS[p] for p in method.name.split("+") if p in REVEALS), None)
    return False, f"{looks}; ``--reveal {reveal}`` lets that through{alike}" if reveal else looks


def secure_line(words: tuple[bool, str]) -> str:
    """The same as a sentence."""
    works, why = words
    return f"{'yes' if works else 'no'}: {why}."


def secure_word(words: tuple[bool, str] | None) -> str:
    """The same as a cell of a table."""
    return "–" if words is None else "yes" if words[0] else "no"


# --- combinations --------------------------------------------------------------------------------


def combination(parts: Mapping[str, Factory]) -> list[Explanation]:
    """The parts of a combination, each with its parameters as they are written there.

    A parameter that two parts have is written with the part's name before it: ``ifca.k``.
    """
    explanations = [explain(name, factory) for name, factory in parts.items()]
    names = [p.name for each in explanations for p in each.parameters]

    def written(part: str, parameter: Parameter) -> Parameter:
        twice = names.count(parameter.name) > 1
        return replace(parameter, name=f"{part}.{parameter.name}") if twice else parameter

    return [
        replace(each, parameters=tuple(written(each.name, p) for p in each.parameters))
        for each in explanations
    ]


# --- on the terminal -----------------------------------------------------------------------------


def print_explanation(out: Console, it: Explanation) -> None:
    """The full description of a method."""
    out.print(f"[bold]{escape(it.name)}[/] ({it.family})", highlight=False)
    out.print(coloured(it.about), highlight=False)
    for section, title in SECTIONS.items():
        if section == "Args" and it.parameters:
            _section(out, title, _parameter_table(it.parameters))
        elif it.sections.get(section):
            _section(out, title, coloured(capitalised(it.sections[section])))
    if it.secure is not None:
        _section(out, SECURE, coloured(capitalised(secure_line(it.secure))))
    if it.combines:
        _section(out, "Combinations", coloured(capitalised(it.combines)))
    _section(out, "Try it", escape(it.example))


def print_combination(
    out: Console, name: str, parts: Sequence[Explanation], secure: tuple[bool, str] | None = None
) -> None:
    """What each part of a combination brings, and whether the whole works with secure sums."""
    out.print(f"[bold]{escape(name)}[/]: what each part brings", highlight=False)
    for each in parts:
        brings = " and ".join(each.brings) or "nothing that FedAvg has not"
        words = [f"{coloured(each.about)} It brings [bold]{brings}[/]."]
        for section in ("Rule", "Server sees", "Travels", "Newcomers"):
            if each.sections.get(section):
                text = coloured(capitalised(each.sections[section]))
                words.append(f"[dim]{section}.[/] {text}")
        _section(out, each.name, "\n".join(words))
        if each.parameters:
            _indented(out, _parameter_table(each.parameters))
    if secure is not None:
        _section(out, SECURE, coloured(capitalised(secure_line(secure))))
    names = ", ".join(f"coterie methods {each.name}" for each in parts)
    out.print(f"\nEach in full: {escape(names)}", highlight=False)


def _section(out: Console, title: str, content: RenderableType) -> None:
    out.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    _indented(out, content)


def _indented(out: Console, content: RenderableType) -> None:
    out.print(Padding(content, (0, 0, 0, 2)), highlight=False)


def _parameter_table(parameters: Sequence[Parameter]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("name", "type", "default", "range", "meaning"):
        narrow = 20 if title == "range" else None  # a list of choices leaves room for the meaning
        table.add_column(title, no_wrap=title in ("name", "default"), max_width=narrow)
    for parameter in parameters:
        name, *cells, meaning = parameter.cells()
        table.add_row(f"[bold]{escape(name)}[/]", *map(escape, cells), coloured(meaning))
    return table


# --- as Markdown ---------------------------------------------------------------------------------


def page(it: Explanation) -> str:
    """A method's page, with its whole docstring."""
    family = f"Family: [{it.family}](README.md#{it.family})."
    parts = [f"# {it.name}", markdown(it.about), family, f"```sh\n{it.example}\n```"]
    for section, title in SECTIONS.items():
        if section == "Args":
            parts.append(f"## {title}\n\n{parameter_table(it.parameters)}")
        elif it.sections.get(section):
            parts.append(f"## {title}\n\n{_paragraphs(it.sections[section])}")
    if it.secure is not None:
        parts.append(f"## {SECURE}\n\n{_paragraphs(secure_line(it.secure))}")
    if it.combines:
        parts.append(f"## Combinations\n\n{_paragraphs(it.combines)}")
    return "\n\n".join(parts)


def card(it: Explanation) -> str:
    """The top of a hand-written page: the method in a line, and its parameters."""
    return f"*{markdown(it.about)}*\n\n{parameter_table(it.parameters)}"


def parameter_table(parameters: Sequence[Parameter]) -> str:
    """Parameters as a Markdown table."""
    if not parameters:
        return "None."
    rows = ["| parameter | type | default | range | meaning |", "|---|---|---|---|---|"]
    for parameter in parameters:
        name, kind, default, limits, meaning = parameter.cells()
        default = default if parameter.default in (None, "none") else f"`{default}`"
        cells = (kind, default, markdown(limits, cell=True), markdown(meaning, cell=True))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def overview(explanations: Iterable[Explanation]) -> str:
    """All methods by family, as Markdown tables with links to their pages."""
    parts = []
    for family, members in by_family(explanations).items():
        rows = ["| method | what it is | server sees | secure | travels, each client and round |"]
        rows.append("|---|---|---|---|---|")
        for each in members:
            sees, travels = (each.sections.get(s, "–") for s in ("Server sees", "Travels"))
            secure = secure_word(each.secure)
            words = (each.about.rstrip("."), first_sentence(sees), secure, first_sentence(travels))
            cells = " | ".join(markdown(w, cell=True) for w in words)
            rows.append(f"| [`{each.name}`]({each.name}.md) | {cells} |")
        parts.append(f"### {family.capitalize()}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def markdown(text: str, cell: bool = False) -> str:
    """Plain text as Markdown that shows the same; double back-quotes become code.

    >>> print(markdown("``k`` of a*b, n_i in [0, 1], |x| < 2"))
    `k` of a\\*b, n_i in \\[0, 1\\], |x| \\< 2
    """
    parts = re.split(r"``(.+?)``", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"`{part}`"
        else:
            part = re.sub(r"[\\*\[\]<`]", r"\\\g<0>", part)
            parts[i] = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", part)
    made = "".join(parts)
    return made.replace("|", "\\|").replace("\n\n", "<br>") if cell else made


def capitalised(text: str) -> str:
    """With a capital, if it begins with a plain word: θ and k stay as they are.

    >>> capitalised("means of all"), capitalised("θ ← 0"), capitalised("k models")
    ('Means of all', 'θ ← 0', 'k models')
    """
    return text[:1].upper() + text[1:] if re.match(r"(a|[a-z]{2,})(?=[\s,;.:'])", text) else text


def _paragraphs(text: str, width: int = 110) -> str:
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(wrap.fill(p) for p in markdown(capitalised(text)).split("\n\n"))
