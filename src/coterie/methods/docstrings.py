"""Read a method's docstring section by section."""

from __future__ import annotations

import inspect
import re
import textwrap

from coterie.core.method import Method

# The sections of a docstring, and their titles for display.
SECTIONS = {
    "Rule": "Rule",
    "Args": "Parameters",
    "Server sees": "The server sees",
    "Travels": "Communication, for each client of a round",
    "Newcomers": "Newcomers",
    "Departs": "Where it departs from its paper",
    "Notes": "Notes",
    "Reference": "Reference",
}

_HEAD = re.compile(rf"(Family|{'|'.join(SECTIONS)}):\s*(.*)")
_ENTRY = re.compile(r"(\w+):\s*(.*)")


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring, as written; the text before the first one has the empty name.

    >>> sections("Mean of all.\\n\\nRule: the mean,\\nby n_i.\\nArgs:\\n    k: how many.")
    {'': 'Mean of all.\\n', 'Rule': 'the mean,\\nby n_i.', 'Args': '\\n    k: how many.'}
    """
    bodies: dict[str, list[str]] = {"": []}
    lines = bodies[""]
    for line in inspect.cleandoc(text).splitlines():
        head = _HEAD.fullmatch(line)
        if head is None:
            lines.append(line)
        else:
            lines = bodies[head[1]] = [head[2]]
    return {title: "\n".join(body) for title, body in bodies.items()}


def arguments(text: str) -> dict[str, str]:
    """The description of each parameter in the section ``Args:``.

    >>> arguments("\\n    k: how many\\n        of them.\\n    mu: strength.")
    {'k': 'how many of them.', 'mu': 'strength.'}
    """
    meanings: dict[str, list[str]] = {}
    for line in textwrap.dedent(text.lstrip("\n")).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            meanings[entry[1]] = [entry[2]]
        elif meanings:
            meanings[list(meanings)[-1]].append(line)
    return {name: joined("\n".join(body)) for name, body in meanings.items()}


def joined(text: str) -> str:
    """The text with each paragraph on one line."""
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip())


def first_sentence(text: str) -> str:
    """The first sentence, for tables.

    >>> first_sentence("1 model down, 1 up; in a trial 1.5 up. More of it.")
    '1 model down, 1 up; in a trial 1.5 up'
    """
    return re.split(r"\.(?=\s|$)", text, maxsplit=1)[0]


def looked_at(method: Method) -> str:
    """What the server sees of each client, from the docstrings of the method's parts."""
    from coterie.registry import METHODS

    parts = []
    for name in method.name.split("+"):
        text = sections(getattr(METHODS.get(name), "__doc__", None) or "").get("Server sees", "")
        first = first_sentence(joined(text)).partition(";")[0]
        if first.startswith("each"):
            parts.append(first)
    return ", and ".join(parts)
