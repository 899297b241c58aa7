"""The names that a server may use in its configuration, and those a client's command line adds.

A client builds the model and the method from the names in the server's configuration. Allowed are
the names that come with Coterie, those that an installed package registers as an entry point, and
those that the client's own command line maps to a function. Anything that refers to code elsewhere
(a module, a file, an address) is refused before anything is imported or opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.schema import Config
from coterie.errors import ConfigError, WireError
from coterie.experiment.config import parse
from coterie.experiment.user_code import digests_of
from coterie.registry import (
    CODECS,
    METHODS,
    MODELS,
    PARTITIONS,
    SETS,
    SHIFTS,
    Registry,
    absolute,
    is_place,
)

FILES = ("file", "x", "y")  # options of data sets that name a file in the client's own folder
PLACES = ("cache", "mirror")  # options that name a folder or an address
OPTIONS: dict[str, Registry[Any]] = {"--method": METHODS, "--model": MODELS}


def checked_config(tree: Mapping[str, Any], simulated: bool) -> Config:
    """Check a server's configuration; WireError if it uses a name that this client does not allow.

    ``simulated`` says whether the client uses its part of the experiment's own data. Only then are
    the data set and the partition of the configuration used, and checked.
    """
    try:
        config = parse(tree)
    except ConfigError as why:
        raise WireError(f"the server's configuration is wrong: {why}") from None
    _check(MODELS, config.model.name)
    for part in config.method.name.split("+"):
        _check(METHODS, part)
    wire = config.wire
    for text in (wire.up, wire.down, *wire.layers.values(), *wire.down_layers.values()):
        for part in text.split("+"):
            _check(CODECS, CODECS.split(part)[0])
    if simulated:
        _check(SETS, config.data.set)
        _check(PARTITIONS, config.partition.name)
        if config.shift.name != "none":
            _check(SHIFTS, config.shift.name)
        _check_files(config.data.options)
    return config


def _check(registry: Registry[Any], name: str) -> None:
    """Refuse a name that is not registered, or that refers to a module, a file or an address.

    Such a reference is refused even if this process has loaded the same code for its own user.
    """
    if registry.knows(name) and not is_place(name):
        return
    option = next((option for option, known in OPTIONS.items() if known is registry), "--method")
    raise WireError(
        f"the server names the {registry.kind} '{name[:200]}', which this client does not have. It "
        "accepts names that come with Coterie or an installed package, and names that its own "
        f"command line maps to a function (coterie join {option} NAME=FILE.py:FUNCTION), but no "
        "modules, files or addresses"
    )


def check_code(tree: Mapping[str, Any], theirs: Mapping[str, str]) -> None:
    """Refuse terms in which a name refers to other code at the server than at this client.

    ``theirs`` are the digests of the server's files. There is none, and nothing to compare, for
    code that the server has from an installed package.
    """
    for kind, digest in digests_of(tree).items():
        if theirs.get(kind, digest) != digest:
            raise WireError(
                f"the {kind} of this client comes from another file than the server's (SHA-256 "
                f"{digest[:12]}… at the client, {theirs[kind][:12]}… at the server): all machines "
                "must use the same file"
            )


def _check_files(options: Mapping[str, Any]) -> None:
    """Refuse paths and addresses among the options of a data set."""
    for key, value in options.items():
        if key in PLACES or (key in FILES and not _plain(value)):
            raise WireError(
                f"the server's data.options.{key} = {str(value)[:200]!r} is a path or an address. "
                "A client reads files in its own folder only: set it to the name of such a file"
            )


def _plain(name: object) -> bool:
    """Whether it is a plain file name, without a folder."""
    return isinstance(name, str) and name not in (".", "..") and Path(name).name == name


def map_names(methods: Sequence[str], models: Sequence[str]) -> None:
    """Register the methods and models that the command line gives as ``NAME=FUNCTION``.

    The function of a model gets the shape of a sample, the number of outputs, and the keys of
    ``[model]``; the function of a method gets the keys of ``[method]``.
    """
    for (option, registry), texts in zip(OPTIONS.items(), (methods, models), strict=True):
        for text in texts:
            registry.map(text, option)


def mapped(texts: Collection[str]) -> tuple[str, ...]:
    """Make the files in ``NAME=FUNCTION`` absolute, for a process in another folder."""
    mappings = []
    for text in texts:
        name, _, function = text.partition("=")
        mappings.append(f"{name.strip()}={absolute(function.strip())}")
    return tuple(mappings)
