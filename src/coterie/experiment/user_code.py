"""A user's own functions in a configuration, as in ``method.name = "mine.py:f"``.

They are loaded only from the user's own configuration: the command line, a file, or Python. A name
that another machine sends is looked up in the registries, and code is never loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.spelling import spelled_out
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
"""The keys whose values are registered names, and their registries."""

Change = Callable[[Registry[Any], str, str], str]
FileDigests = Mapping[str, str]  # SHA-256 of files, by the kind and name of the function in them


def admitted(tree: Mapping[str, Any], known: FileDigests | None = None) -> dict[str, Any]:
    """Load the functions that a user's configuration names; paths become absolute.

    Names with parameters, as in ``ifca:k=4``, become names and parameters.
    ``known`` are the digests of the files when the run began: a file that has changed is refused.
    """

    def admit(registry: Registry[Any], name: str, key: str) -> str:
        digest = (known or {}).get(f"{registry.kind} {name}")
        return registry.admit(name, f"{key} =", digest)

    return _changed(spelled_out(tree), admit)


def by_name(tree: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The same configuration for a federation, with functions by name instead of by path.

    Clients do not have this machine's files: each maps the name to its own function.
    """

    def rename(registry: Registry[Any], name: str, key: str) -> str:
        if not is_place(name):
            return name
        if registry not in (METHODS, MODELS):
            raise ConfigError(
                f"{key} = {name}: the clients of a federation do not have this file. Install it as "
                f"a package with an entry point coterie.{registry.group}, here and on the clients"
            )
        function = name.rpartition(":")[2].replace("_", "-")
        registry.map(f"{function}={name}", f"{key} =")
        tell(
            f"{registry.kind} '{function}' is from a file of this machine: clients need it too "
            f"(coterie join --{registry.kind} {function}=FILE.py:FUNCTION, with the same content)"
        )
        return function

    return _changed(tree, rename)


def digests_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the user's files whose functions a configuration names."""
    digests: dict[str, str] = {}

    def note(registry: Registry[Any], name: str, key: str) -> str:
        if name in registry.own:
            digests[f"{registry.kind} {name}"] = registry.own[name].digest
        return name

    _changed(tree, note)
    return digests


def check_digests(before: FileDigests, tree: Mapping[str, Any]) -> None:
    """Refuse to continue with a file that has changed since the run began."""
    for what, digest in digests_of(tree).items():
        if before.get(what, digest) != digest:
            raise ConfigError(
                f"the file of the {what} has changed since the run began (its SHA-256 was "
                f"{before[what][:12]}…, and is {digest[:12]}…): restore it, or start a new run"
            )


def _changed(tree: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """A configuration with some names replaced."""
    changed = {t: dict(v) if isinstance(v, Mapping) else v for t, v in tree.items()}
    for key, registry in KEYS.items():
        table, _, leaf = key.partition(".")
        values = changed.get(table)
        if not isinstance(values, dict):
            continue
        value = values.get(leaf)
        if isinstance(value, str):
            values[leaf] = _text(registry, value, key, change)
        elif isinstance(value, Mapping):
            values[leaf] = {
                k: _text(registry, v, f"{key}.{k}", change) if isinstance(v, str) else v
                for k, v in value.items()
            }
    return changed


def _text(registry: Registry[Any], text: str, key: str, change: Change) -> str:
    """Change a name, or each of several joined by ``+``; codecs keep their parameters."""
    if text in registry or is_place(text) or registry not in (METHODS, CODECS):
        return change(registry, text, key)
    parts = []
    for part in text.split("+"):
        name = registry.split(part)[0] if registry is CODECS else part
        parts.append(change(registry, name, key) + part[len(name) :])
    return "+".join(parts)
