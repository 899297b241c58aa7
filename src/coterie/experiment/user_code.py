"""A user's own functions in a configuration, named by their places: ``method.name = "mine.py:f"``.

They are loaded where a user's own words come in, on the command line, in a file or from Python, and
nowhere else: what another machine names is looked up by its name and never loaded from a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.registry import (
    AVAILABILITIES,
    CLOCKS,
    CODECS,
    ENGINES,
    METHODS,
    MODELS,
    PARTITIONS,
    SETS,
    SHIFTS,
    Registry,
    is_place,
)

KEYS: dict[str, Registry[Any]] = {
    "method.name": METHODS,
    "model.name": MODELS,
    "data.set": SETS,
    "partition.name": PARTITIONS,
    "shift.name": SHIFTS,
    "wire.up": CODECS,
    "wire.down": CODECS,
    "wire.layers": CODECS,
    "wire.down_layers": CODECS,
    "clock.name": CLOCKS,
    "availability.name": AVAILABILITIES,
    "run.engine": ENGINES,
}
"""The keys whose values are names, and what they are names of."""

Change = Callable[[Registry[Any], str, str], str]
Digests = Mapping[str, str]  # the SHA-256 of a file, by the kind and the name of what is in it


def admitted(tree: Mapping[str, Any], known: Digests | None = None) -> dict[str, Any]:
    """A user's own configuration, its places absolute, and what is there loaded.

    ``known`` are the files' digests when a run began: one that has changed since is refused.
    """

    def admit(registry: Registry[Any], name: str, key: str) -> str:
        digest = (known or {}).get(f"{registry.kind} {name}")
        return registry.admit(name, f"{key} =", digest)

    return _changed(tree, admit)


def by_name(tree: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The same configuration for a federation: what goes by its place gets the function's name.

    Clients do not know this machine's files: each maps the name to a function of its own.
    """

    def rename(registry: Registry[Any], name: str, key: str) -> str:
        if not is_place(name):
            return name
        if registry not in (METHODS, MODELS):
            raise ConfigError(
                f"{key} = {name}: a federation's clients could not know it. Install it, here and "
                f"there, as a package with an entry point coterie.{registry.group}"
            )
        own = name.rpartition(":")[2].replace("_", "-")
        registry.map(f"{own}={name}", f"{key} =")
        tell(
            f"{registry.kind} '{own}' is this machine's own: clients need it too (coterie join "
            f"--{registry.kind} {own}=FILE.py:FUNCTION, from a file with the same content)"
        )
        return own

    return _changed(tree, rename)


def digests_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the user's own files that a configuration names functions of."""
    found: dict[str, str] = {}

    def note(registry: Registry[Any], name: str, key: str) -> str:
        if name in registry.own:
            found[f"{registry.kind} {name}"] = registry.own[name].digest
        return name

    _changed(tree, note)
    return found


def check_digests(before: Digests, tree: Mapping[str, Any]) -> None:
    """Refuse to go on with what is another file than when it began."""
    for what, digest in digests_of(tree).items():
        if before.get(what, digest) != digest:
            raise ConfigError(
                f"the file of the {what} has changed since this began (its SHA-256 was "
                f"{before[what][:12]}…, and is {digest[:12]}…): put it back as it was, or begin "
                "anew"
            )


def _changed(tree: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """A configuration with some names replaced."""
    made = {t: dict(v) if isinstance(v, Mapping) else v for t, v in tree.items()}
    for key, registry in KEYS.items():
        table, _, leaf = key.partition(".")
        place = made.get(table)
        if not isinstance(place, dict):
            continue
        value = place.get(leaf)
        if isinstance(value, str):
            place[leaf] = _text(registry, value, key, change)
        elif isinstance(value, Mapping):
            place[leaf] = {
                k: _text(registry, v, f"{key}.{k}", change) if isinstance(v, str) else v
                for k, v in value.items()
            }
    return made


def _text(registry: Registry[Any], text: str, key: str, change: Change) -> str:
    """A name, or several joined by ``+``, a codec's with parameters after it."""
    if text in registry or is_place(text) or registry not in (METHODS, CODECS):
        return change(registry, text, key)
    parts = []
    for part in text.split("+"):
        name = registry.split(part)[0] if registry is CODECS else part
        parts.append(change(registry, name, key) + part[len(name) :])
    return "+".join(parts)
