"""Write docs/reference/commands.md and docs/reference/python.md from the code.

    .venv/bin/python docs/reference_pages.py           # write what is out of date
    .venv/bin/python docs/reference_pages.py --check   # only name it; exit code 1 if there is any

The commands and their options come from the command line itself, the public names of ``coterie``,
their signatures and words from its docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from methods_pages import write_or_check

import coterie
from coterie.cli import app

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- made from the code by docs/reference_pages.py: do not edit -->"

# The modules of the public names, in the order of the page, with what a reader looks for there.
PLACES = {
    "coterie.run": "Run, and look",
    "coterie.report": "Run, and look",
    "coterie.data": "Data",
    "coterie.compose": "Methods from pieces",
    "coterie.layerwise": "Methods from pieces",
    "coterie.serverside": "Methods from pieces",
    "coterie.method": "Methods with a round of their own",
    "coterie.federation": "Methods with a round of their own",
    "coterie.seeds": "Methods with a round of their own",
    "coterie.client": "What a client does",
    "coterie.weights": "Weights",
    "coterie.errors": "Errors",
}


def wanted() -> dict[Path, str]:
    """The text that each page should have."""
    pages = {"commands.md": commands_page(), "python.md": python_page()}
    return {FOLDER / name: f"{MADE}\n\n{text.strip()}\n" for name, text in pages.items()}


def commands_page() -> str:
    """All commands with their arguments and options."""
    parts = [
        "# Commands",
        "As `coterie COMMAND --help` prints them; `python -m coterie` is the same. Most options "
        "stand for a key of the [configuration](config.md). What a command ends with: "
        "[exit codes](exit-codes.md).",
    ]
    front = [
        f"| [`coterie {name}`](#coterie-{name.replace(' ', '-')}) | {_line(command)} |"
        for name, command in _commands()
    ]
    parts.append("\n".join(["| command | does |", "|---|---|", *front]))
    for name, command in _commands():
        parts += [f"## coterie {name}", _text(command.help), _parameters(name, command)]
    return "\n\n".join(part for part in parts if part)


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        if command.hidden:
            continue
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", it) for sub, it in inner.items())


def _parameters(name: str, command: Any) -> str:
    """The usage of a command and a table of its options."""
    usage, rows = [f"coterie {name}"], []
    for it in command.params:
        if it.param_type_name == "argument":
            many = "…" if it.nargs != 1 else ""
            label = f"{(it.metavar or it.name).upper()}{many}"
            usage.append(label if it.required else f"[{label}]")
            rows.append((f"`{label}`", getattr(it, "help", None) or "", it.required, None))
            continue
        flags = ", ".join(f"`{flag}`" for flag in (*it.opts, *it.secondary_opts))
        kind = "" if it.is_flag else f" {it.type.name.split(' range')[0]}"
        rows.append((flags + kind, it.help or "", it.required, _default(it)))
    usage.append("[OPTIONS]")
    lines = [
        f"| {label} | {_cell(words)}{' (needed)' if needed else ''}{default or ''} |"
        for label, words, needed, default in rows
    ]
    table = "\n".join(["| option | meaning |", "|---|---|", *lines]) if lines else ""
    return f"```text\n{' '.join(usage)}\n```\n\n{table}"


def _default(option: Any) -> str:
    if not option.show_default or option.default in (None, False) or callable(option.default):
        return ""
    value = option.default
    return "" if isinstance(value, list | tuple) else f" (default: {value})"


def python_page() -> str:
    """The public names of the package, but for the methods, which have pages of their own."""
    factories = {id(factory) for factory in coterie.METHODS.values()}
    found: dict[str, list[str]] = {title: [] for title in PLACES.values()}
    for name in coterie.__all__:
        it = getattr(coterie, name)
        if id(it) in factories or name == "METHODS":
            continue
        found[_place(name, it)].append(_entry(name, it))
    parts = [
        "# Python",
        "The public names of `import coterie`; what is not here may change without notice. Each "
        "method of [the list](../methods/README.md) is a function of the same name with "
        "underscores (`coterie.dc_pfl(start=5)`); `coterie.METHODS` has them by name.",
    ]
    for title, entries in found.items():
        parts += [f"## {title}", *entries] if entries else []
    return "\n\n".join(parts)


def _place(name: str, it: Any) -> str:
    fits = [start for start in PLACES if f"{it.__module__}.".startswith(f"{start}.")]
    if not fits:
        raise LookupError(f"{name} is of {it.__module__}: say in PLACES where that belongs")
    return PLACES[max(fits, key=len)]


def _entry(name: str, it: Any) -> str:
    """A name with its signature, its words, and the public parts of a class."""
    lines = [f"### {name}"]
    if inspect.isclass(it) or inspect.isfunction(it):
        lines.append(f"```py\n{_signature(name, it)}\n```")
    lines.append(_text(it.__doc__ if inspect.isclass(it) or inspect.isfunction(it) else None))
    if inspect.isclass(it) and not issubclass(it, Exception):
        lines.append(_members(it))
    return "\n\n".join(line for line in lines if line)


def _members(it: type) -> str:
    rows = []
    ours = [kind for kind in it.__mro__ if kind.__module__.startswith("coterie.")]
    members = {name: member for kind in reversed(ours) for name, member in vars(kind).items()}
    for name, member in members.items():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        words = getattr(inner, "__doc__", None)
        if (
            name.startswith("_")
            or not words
            or not (callable(inner) or isinstance(inner, property))
        ):
            continue
        shown = f".{name}" if isinstance(inner, property) else f".{name}(…)"
        rows.append(f"| `{shown}` | {_cell(_text(words).split(chr(10) * 2)[0])} |")
    return "\n".join(["| part | what it is |", "|---|---|", *rows]) if rows else ""


def _signature(name: str, it: Any) -> str:
    """The signature, an argument a line where one line is too long."""
    if getattr(it, "_is_protocol", False):
        return f"class {name}(Protocol)"
    if inspect.isclass(it) and issubclass(it, Exception):
        return f"class {name}(Exception)"
    signature = inspect.signature(it)
    kept = [p for p in signature.parameters.values() if p.name != "self"]
    shown = [_argument(p) for p in kept]
    stars = next((i for i, p in enumerate(kept) if p.kind is p.KEYWORD_ONLY), None)
    if stars is not None and not any(p.kind is p.VAR_POSITIONAL for p in kept):
        shown.insert(stars, "*")
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def _argument(it: inspect.Parameter) -> str:
    stars = "*" * (it.kind is it.VAR_POSITIONAL) + "**" * (it.kind is it.VAR_KEYWORD)
    default = "" if it.default is it.empty else f"={it.default!r}"
    return f"{stars}{it.name}{'=…' if '<' in default else default}"  # a function has no short name


def _text(words: str | None) -> str:
    """A docstring as Markdown: examples as code, names in single marks."""
    found, code = [], False
    for block in re.split(r"\n\s*\n", inspect.cleandoc(words or "")):
        code = block.lstrip().startswith(">>>")
        text = re.sub(r"``([^`]*)``", r"`\1`", block)
        text = re.sub(r":(?:class|func|meth|mod):`~?([^`]*)`", r"`\1`", text)
        found.append(f"```pycon\n{block}\n```" if code else text)
    return "\n\n".join(found)


def _line(command: Any) -> str:
    return _cell(_text(command.help).split("\n\n")[0])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write_or_check(__doc__, wanted())
