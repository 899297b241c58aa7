"""What a method is, from its docstring and its signature: on the terminal and as Markdown.

A method's docstring begins with one line and has the sections of ``SECTIONS``; each parameter has
an entry under ``Args:``. Types, defaults and ranges come from the signature.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from coterie.errors import ConfigError
from coterie.method import Method

Factory = Callable[..., Method]

SECTIONS = ("Rule", "Args", "Server sees", "Travels", "Newcomers", "Departs", "Reference")

FAMILIES: dict[str, tuple[str, ...]] = {
    "global": ("local", "fedavg", "fedprox", "fednova", "scaffold", "moon", "feddyn"),
    "personalised": (
        *("per-fedavg", "pfedme", "ditto", "fedper", "fedrep", "lg-fedavg", "fedfomo", "apfl"),
        "user-centric",
    ),
    "clustered": (
        *("oracle", "ifca", "cfl", "fl-hc", "pacfl", "clusterfl", "flis", "adaptive", "k-fed"),
        *("fedclust", "dc-pfl", "fedtsdp"),
    ),
    "pieces": ("fedavgm", "fedadam", "fedyogi", "median", "trimmed-mean", "krum"),
}
OTHER = "other"  # a plug-in's

# What a part of a combination such as ifca+ditto can bring, in the words of ``compose``.
BRINGS = {
    "assign": "who learns together",
    "train": "how a client trains",
    "shared": "which layers are shared",
    "around": "how the server takes the mean",
}

_HEAD = re.compile(rf"({'|'.join(SECTIONS)}):\s*(.*)")
_ENTRY = re.compile(r"(\w+):\s*(.*)")
_NUMBER = r"-?\d+(?:\.\d+)?"
_RANGE = re.compile(
    rf"(?:above {_NUMBER},? (?:and )?(?:to|at most|below) {_NUMBER}|above {_NUMBER}"
    rf"|{_NUMBER} or more|{_NUMBER} to (?:below )?{_NUMBER}|any number)"
)
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Parameter:
    """One parameter: its type, default (none: it must be given), range and meaning, in words."""

    name: str
    type: str
    default: str | None
    range: str
    meaning: str

    def cells(self) -> tuple[str, ...]:
        """The same as a row of a table."""
        default = "required" if self.default is None else self.default
        return self.name, self.type, default, self.range or "–", self.meaning


@dataclass(frozen=True)
class Explanation:
    """A method in words. ``brings`` is what it adds to a combination with others."""

    name: str
    family: str
    about: str
    sections: Mapping[str, str]
    parameters: tuple[Parameter, ...]
    brings: tuple[str, ...]

    @property
    def example(self) -> str:
        """A command that runs it."""
        required = [p.name for p in self.parameters if p.default is None]
        settings = "".join(f" --set method.{name}=4" for name in required)
        return f"coterie run --method {self.name}{settings}"

    @property
    def combines(self) -> str:
        """What it adds to a combination, as a sentence."""
        if not self.brings:
            return ""
        return f"in a combination, ``NAME+NAME``, it says {' and '.join(self.brings)}."


def explain(name: str, factory: Factory) -> Explanation:
    """A method in words, as far as its docstring goes."""
    raw = sections(factory.__doc__ or "")
    told = arguments(raw.pop("Args", ""))
    hints = get_type_hints(inspect.unwrap(factory), include_extras=True)
    signature = inspect.signature(factory)
    return Explanation(
        name=name,
        family=family_of(name),
        about=joined(raw.pop("")),
        sections={title: joined(text) for title, text in raw.items()},
        parameters=tuple(
            _parameter(p, hints.get(p.name, Any), told.get(p.name, ""))
            for p in signature.parameters.values()
        ),
        brings=_brings(factory),
    )


def family_of(name: str) -> str:
    """To which family a method belongs."""
    return next((family for family, names in FAMILIES.items() if name in names), OTHER)


def by_family(explanations: Iterable[Explanation]) -> dict[str, list[Explanation]]:
    """Families that have any, in order; methods in the order given."""
    found: dict[str, list[Explanation]] = {family: [] for family in (*FAMILIES, OTHER)}
    for each in explanations:
        found[each.family].append(each)
    return {family: members for family, members in found.items() if members}


# --- docstrings ----------------------------------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring as they are written; the first line under the empty name.

    >>> sections("Mean of all.\\n\\nRule: the mean,\\nby n_i.\\nArgs:\\n    k: how many.")
    {'': 'Mean of all.\\n', 'Rule': 'the mean,\\nby n_i.', 'Args': '\\n    k: how many.'}
    """
    found: dict[str, list[str]] = {"": []}
    lines = found[""]
    for line in inspect.cleandoc(text).splitlines():
        head = _HEAD.fullmatch(line)
        if head is None:
            lines.append(line)
        else:
            lines = found[head[1]] = [head[2]]
    return {title: "\n".join(body) for title, body in found.items()}


def arguments(text: str) -> dict[str, str]:
    """What ``Args:`` says of each parameter.

    >>> arguments("\\n    k: how many\\n        of them.\\n    mu: strength.")
    {'k': 'how many of them.', 'mu': 'strength.'}
    """
    found: dict[str, list[str]] = {}
    for line in textwrap.dedent(text.lstrip("\n")).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            found[entry[1]] = [entry[2]]
        elif found:
            found[list(found)[-1]].append(line)
    return {name: joined("\n".join(body)) for name, body in found.items()}


def joined(text: str) -> str:
    """Paragraphs on one line each."""
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip())


def first_sentence(text: str) -> str:
    """What a table has room for.

    >>> first_sentence("one model down, one up. In a trial (round 5.5) two down.")
    'one model down, one up'
    """
    return re.split(r"(?<!et al)(?<!i\.e)[.;](?=\s|$)", text, maxsplit=1)[0]


# --- signatures ----------------------------------------------------------------------------------


def _parameter(parameter: inspect.Parameter, hint: Any, meaning: str) -> Parameter:
    kinds, ranges = _described(hint)
    written = _RANGE.search(meaning)
    if not any(map(_NUMERIC.match, ranges)) and _counts(kinds) and written is not None:
        ranges = [written[0], *ranges]  # the signature does not say it, the docstring does
    for said in filter(_NUMERIC.match, ranges):
        meaning = meaning.replace(f", {said}", "", 1)  # the table has a column for it
    default = None if parameter.default is parameter.empty else shown(parameter.default)
    kind = " or ".join(dict.fromkeys(kinds)) or "any"
    return Parameter(parameter.name, kind, default, ", ".join(ranges), meaning)


_NUMERIC = re.compile(r"^(?:above |below |at most |any )?-?\d|^any number$")


def _counts(kinds: Sequence[str]) -> bool:
    return "integer" in kinds or "number" in kinds


def _described(hint: Any) -> tuple[list[str], list[str]]:
    """The types and the ranges that a hint allows, in words; leaving it out is no type."""
    origin = get_origin(hint)
    if origin is Annotated:
        kind, *notes = get_args(hint)
        kinds, ranges = _described(kind)
        return kinds, [*ranges, *filter(None, [_bounds(notes)])]
    if origin in (Union, UnionType):
        parts = [_described(part) for part in get_args(hint) if part is not NoneType]
        return [k for kinds, _ in parts for k in kinds], [r for _, found in parts for r in found]
    if origin is Literal:
        return ["choice"], [shown(value) for value in get_args(hint)]
    if origin is not None:  # tuple[int, ...], list[float]
        inner = [_described(part) for part in get_args(hint) if part is not Ellipsis]
        kinds = dict.fromkeys(k for found, _ in inner for k in found)
        return [f"list of {' or '.join(kinds)}s"], [r for _, found in inner for r in found]
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
        return f"{shown(low)} to {shown(high)}"
    if low is not None and below is not None:
        return f"{shown(low)} to below {shown(below)}"
    words = [
        f"{shown(low)} or more" if low is not None else "",
        f"above {shown(above)}" if above is not None else "",
        f"at most {shown(high)}" if high is not None else "",
        f"below {shown(below)}" if below is not None else "",
    ]
    return ", ".join(filter(None, words))


def shown(value: Any) -> str:
    """A value as a user writes it in TOML.

    >>> shown(True), shown("auto"), shown(None), shown((1, 2)), shown(0.5)
    ('true', '"auto"', 'none', '[1, 2]', '0.5')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(v) for v in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def required(factory: Factory) -> list[str]:
    """The parameters that must be given."""
    parameters = inspect.signature(factory).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in named if p.default is p.empty]


def _brings(factory: Factory) -> tuple[str, ...]:
    """What a method is put together from, apart from what FedAvg has too."""
    try:
        pieces = factory(**dict.fromkeys(required(factory), 1)).pieces
    except ConfigError:
        return ()
    return tuple(words for piece, words in BRINGS.items() if getattr(pieces, piece, None))


# --- combinations --------------------------------------------------------------------------------


def combination(parts: Mapping[str, Factory]) -> list[Explanation]:
    """The parts of a combination, each with its parameters as they are written there.

    A parameter that two parts have is written with the part's name before it: ``ifca.k``.
    """
    found = [explain(name, factory) for name, factory in parts.items()]
    names = [p.name for each in found for p in each.parameters]
    return [
        replace(each, parameters=tuple(
            replace(p, name=f"{each.name}.{p.name}") if names.count(p.name) > 1 else p
            for p in each.parameters
        ))
        for each in found
    ]  # fmt: skip


# --- on the terminal -----------------------------------------------------------------------------


def print_explanation(out: Console, it: Explanation) -> None:
    """A method in full."""
    out.print(f"[bold]{escape(it.name)}[/]  {_rich(it.about)} [dim]({it.family})[/]")
    for title in ("Rule", "Args", "Server sees", "Travels", "Newcomers", "Departs", "Reference"):
        if title == "Args" and it.parameters:
            out.print("\n[bold]Parameters[/]")
            out.print(Padding(_parameter_table(it.parameters), (0, 0, 0, 2)))
        elif it.sections.get(title):
            _section(out, title, it.sections[title])
    if it.combines:
        _section(out, "Combines", it.combines)
    _section(out, "Try it", f"``{it.example}``")


def _section(out: Console, title: str, text: str) -> None:
    out.print(f"\n[bold]{title}[/]")
    out.print(Padding(_rich(text), (0, 0, 0, 2)), highlight=False)


def _parameter_table(parameters: Sequence[Parameter]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("name", "type", "default", "range"):
        table.add_column(
            title, no_wrap=title in ("name", "default"), style="bold" * (title == "name")
        )
    table.add_column("meaning", ratio=1)
    for parameter in parameters:
        *cells, meaning = parameter.cells()
        table.add_row(*map(escape, cells), _rich(meaning))
    return table


def print_combination(out: Console, name: str, parts: Sequence[Explanation]) -> None:
    """What each part of a combination brings."""
    out.print(f"[bold]{escape(name)}[/]  one method from the pieces of {len(parts)}")
    for each in parts:
        brings = " and ".join(each.brings) or "nothing that FedAvg does not have"
        out.print(f"\n[bold]{escape(each.name)}[/] brings {brings}. {_rich(each.about)}")
        if each.sections.get("Rule"):
            out.print(Padding(_rich(each.sections["Rule"]), (0, 0, 0, 2)), highlight=False)
        if each.parameters:
            out.print(Padding(_parameter_table(each.parameters), (1, 0, 0, 2)))
        for title in ("Server sees", "Travels", "Newcomers"):
            if each.sections.get(title):
                text = f"[bold]{title}[/]: {_rich(each.sections[title])}"
                out.print(Padding(text, (0, 0, 0, 2)), highlight=False)
    names = " ".join(f"coterie methods {each.name};" for each in parts).rstrip(";")
    out.print(f"\nEach in full: {escape(names)}", highlight=False)


def _rich(text: str) -> str:
    """Code in colour, all else as it is."""
    return re.sub(r"``(.+?)``", r"[cyan]\1[/]", escape(text))


def method_listing(explanations: Iterable[Explanation]) -> Table:
    """All methods by family, a line each."""
    table = Table(title="Methods")
    for title in ("family", "name", "parameters", "what it is"):
        table.add_column(title, style="bold" * (title == "name"), no_wrap=title == "name")
    for family, members in by_family(explanations).items():
        for each in members:
            first = family if each is members[0] else ""
            written = [
                p.name if p.default is None else f"{p.name}={p.default}" for p in each.parameters
            ]
            table.add_row(first, escape(each.name), escape(", ".join(written)), _rich(each.about))
        table.add_section()
    return table


# --- as Markdown ---------------------------------------------------------------------------------


def page(it: Explanation) -> str:
    """A method's page: all that its docstring says."""
    parts = [f"# {it.name}", f"{markdown(it.about)} ({it.family.capitalize()}.)"]
    parts.append(f"```sh\n{it.example}\n```")
    for title in SECTIONS:
        if title == "Args":
            parts.append(f"## Parameters\n\n{parameter_table(it.parameters)}")
        elif it.sections.get(title):
            heading = {"Departs": "Where it departs from its paper", "Travels": "What travels"}
            text = markdown(it.sections[title])
            parts.append(f"## {heading.get(title, title)}\n\n{_wrapped(capitalised(text))}")
    if it.combines:
        parts.append(f"## Combines\n\n{_wrapped(capitalised(it.combines))}")
    return "\n\n".join(parts)


def card(it: Explanation) -> str:
    """What a page written by hand has at its top: the method in a line, and its parameters."""
    about = f"*{markdown(it.about)}*"
    return f"{about}\n\n{parameter_table(it.parameters)}"


def parameter_table(parameters: Sequence[Parameter]) -> str:
    """Parameters as a Markdown table."""
    if not parameters:
        return "None."
    rows = ["| parameter | type | default | range | meaning |", "|---|---|---|---|---|"]
    for p in parameters:
        name, kind, default, limits, meaning = p.cells()
        default = default if p.default in (None, "none") else f"`{default}`"
        rows.append(
            f"| `{name}` | {kind} | {default} | {markdown(limits, cell=True)} "
            f"| {markdown(meaning, cell=True)} |"
        )
    return "\n".join(rows)


def overview(explanations: Iterable[Explanation]) -> str:
    """All methods by family, as Markdown tables with links to their pages."""
    parts = []
    for family, members in by_family(explanations).items():
        rows = ["| method | what it is | server sees | travels, each client and round |"]
        rows.append("|---|---|---|---|")
        for each in members:
            words = (each.about.rstrip("."), *(
                first_sentence(each.sections.get(title, "–")) for title in ("Server sees", "Travels")
            ))  # fmt: skip
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
    """With a capital, if it begins with a word."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z][a-z']*\b", text) else text


def _wrapped(text: str, width: int = 110) -> str:
    paragraphs = text.split("\n\n")
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(wrap.fill(p) for p in paragraphs)
