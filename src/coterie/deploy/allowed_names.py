"""What a server may name at a member, and what a member's own command line maps names to.

A member builds model and method from the names in a server's configuration. A name is one that
comes with Coterie, one that an installed package registers as an entry point, or one that the
member's own command line maps to a function. What looks like code or a place to get some from (a
module, a file, an address) is no such name: it is refused before anything is imported or opened.
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
PLACES = ("cache", "mirror")  # and those that name a folder or an address
OPTIONS: dict[str, Registry[Any]] = {"--method": METHODS, "--model": MODELS}


def asked(tree: Mapping[str, Any], simulated: bool) -> Config:
    """A server's configuration, if this member has all that it names; WireError if not.

    ``simulated`` says whether the member takes its part of the experiment's own data: only then
    does what the configuration says of data sets and partitions matter to it.
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
    """Refuse a name that is not known here, and one that is no name but a place.

    A place is refused even if this process has loaded it, for its own user.
    """
    if registry.knows(name) and not is_place(name):
        return
    option = next((option for option, own in OPTIONS.items() if own is registry), "--method")
    raise WireError(
        f"the server names the {registry.kind} '{name[:200]}', which this client does not have. It "
        "takes names that come with Coterie or with an installed package, and those that its "
        f"own command line maps (coterie join {option} NAME=FILE.py:FUNCTION); no module, no "
        "file and no address"
    )


def check_code(tree: Mapping[str, Any], theirs: Mapping[str, str]) -> None:
    """Refuse terms in which a name stands for other code than this client's command line maps.

    ``theirs`` are the digests of the server's files. Where the server has it from an installed
    package there is none, and nothing to compare.
    """
    for what, digest in digests_of(tree).items():
        if theirs.get(what, digest) != digest:
            raise WireError(
                f"the {what} of this client is of another file than the server's (SHA-256 "
                f"{digest[:12]}… here, {theirs[what][:12]}… there): all must have the same"
            )


def _check_files(options: Mapping[str, Any]) -> None:
    """Refuse paths and addresses among the options of a data set."""
    for key, value in options.items():
        if key in PLACES or (key in FILES and not _plain(value)):
            raise WireError(
                f"the server's data.options.{key} = {str(value)[:200]!r} names a place at this "
                "client. It reads its own files only: give the name of a file in its folder"
            )


def _plain(name: object) -> bool:
    """Whether it is the name of a file, and of no other folder's."""
    return isinstance(name, str) and name not in (".", "..") and Path(name).name == name


def map_names(methods: Sequence[str], models: Sequence[str]) -> None:
    """Let this process know methods and models by the names of ``NAME=FUNCTION``.

    They come from its own command line. A model's function gets the shape of a sample, the number
    of outputs, and the keys of ``[model]``; a method's the keys of ``[method]``.
    """
    for (option, registry), texts in zip(OPTIONS.items(), (methods, models), strict=True):
        for text in texts:
            registry.map(text, option)


def mapped(texts: Collection[str]) -> tuple[str, ...]:
    """The same mappings for a process that may be in another folder."""
    made = []
    for text in texts:
        name, _, place = text.partition("=")
        made.append(f"{name.strip()}={absolute(place.strip())}")
    return tuple(made)
