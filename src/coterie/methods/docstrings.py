"""What a method's docstring says, section by section."""

from __future__ import annotations

import inspect
import re
import textwrap

from coterie.core.method import Method

# The sections of a docstring, and what they are called where they are shown.
SECTIONS = {
    "Rule": "Rule",
    "Args": "Parameters",
    "Server sees": "The server sees",
    "Travels": "Travels, for each client of a round",
    "Newcomers": "Newcomers",
    "Departs": "Where it departs from its paper",
    "Notes": "Notes",
    "Reference": "Reference",
}

_HEAD = re.compile(rf"(Family|{'|'.join(SECTIONS)}):\s*(.*)")
_ENTRY = re.compile(r"(\w+):\s*(.*)")


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

    >>> first_sentence("1 model down, 1 up; in a trial 1.5 up. More of it.")
    '1 model down, 1 up; in a trial 1.5 up'
    """
    return re.split(r"\.(?=\s|$)", text, maxsplit=1)[0]


def looked_at(method: Method) -> str:
    """What the server sees of each client, from the docstrings of the method's parts."""
    from coterie.registry import METHODS

    found = []
    for part in method.name.split("+"):
        words = sections(getattr(METHODS.get(part), "__doc__", None) or "").get("Server sees", "")
        first = first_sentence(joined(words)).partition(";")[0]
        if first.startswith("each"):
            found.append(first)
    return ", and ".join(found)
