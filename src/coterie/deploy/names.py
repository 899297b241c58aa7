"""What a server may name at a member, and what a member's own command line maps names to.

A member builds model and method from the names in a server's configuration. A name is one that
comes with Coterie, one that an installed package registers as an entry point, or one that the
member's own command line maps to a function. What looks like code or a place to get some from (a
module, a file, an address) is no such name: it is refused before anything is imported or opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.data import PARTITIONS, SETS, SHIFTS
from coterie.errors import ConfigError, WireError
from coterie.methods import is_known as is_method
from coterie.models import MODELS, OWN
from coterie.models import is_known as is_model
from coterie.run.config import Config, parse

FILES = ("file", "x", "y")  # options of data sets that name a file in the client's own folder
PLACES = ("cache", "mirror")  # and those that name a folder or an address


def asked(tree: Mapping[str, Any], simulated: bool) -> Config:
    """A server's configuration, if this member has all that it names; WireError if not.

    ``simulated`` says whether the member takes its part of the experiment's own data: only then
    does what the configuration says of data sets and partitions matter to it.
    """
    try:
        config = parse(tree)
    except ConfigError as why:
        raise WireError(f"the server's configuration is wrong: {why}") from None
    _check("model", config.model.name, is_model(config.model.name))
    for part in config.method.name.split("+"):
        _check("method", part, is_method(part))
    if simulated:
        _check("data set", config.data.set, config.data.set in SETS)
        _check("partition", config.partition.name, config.partition.name in PARTITIONS)
        _check("shift", config.shift.name, config.shift.name in ("none", *SHIFTS))
        _check_files(config.data.options)
    return config


def _check(what: str, name: str, known: bool) -> None:
    if not known:
        raise WireError(
            f"the server names the {what} '{name[:200]}', which this client does not have. It "
            "takes names that come with Coterie or with an installed package, and those that its "
            "own command line maps (coterie join --model NAME=FILE.py:FUNCTION); no module, no "
            "file and no address"
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


def map_models(texts: Sequence[str]) -> None:
    """Let this process know models by the names of ``NAME=FUNCTION``, from its command line.

    A function gets the shape of a sample, the number of outputs, and the keys of ``[model]``.
    """
    for text in texts:
        name, equals, function = (part.strip() for part in text.partition("="))
        if not equals or not name or not function or _like_code(name):
            raise ConfigError(f"--model {text}: write NAME=FILE.py:FUNCTION, as in net=mine.py:net")
        if name in MODELS:
            raise ConfigError(f"--model {text}: '{name}' comes with Coterie: choose another name")
        OWN[name] = function_at(function, "--model")


def _like_code(name: str) -> bool:
    return any(sign in name for sign in (":", "/", "\\", ".", "+"))


def absolute(texts: Collection[str]) -> tuple[str, ...]:
    """The same mappings for a process that may be in another folder."""
    made = []
    for text in texts:
        name, _, function = text.partition("=")
        place, colon, own = function.strip().rpartition(":")
        whole = str(Path(place).resolve()) if place.endswith(".py") else place
        made.append(f"{name}={whole}{colon}{own}")
    return tuple(made)


def function_at(text: str, option: str) -> Callable[..., Any]:
    """The user's own function, ``package.module:function`` or ``FILE.py:function``.

    A module is found as Python finds modules, or in the folder that one is in.
    """
    place, colon, function = text.rpartition(":")
    if not colon or not place:
        raise ConfigError(f"{option} {text}: write package.module:function or FILE.py:function")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
        found = getattr(module, function)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{option} {text}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{option} {text}: that is no function")
    made: Callable[..., Any] = found
    return made


def _imported(module: str) -> Any:
    _look_in(os.getcwd())
    return importlib.import_module(module)


def _from_file(path: Path) -> Any:
    """A file as a module; what lies beside it can be imported by it."""
    name = f"_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _look_in(str(path.resolve().parent))
    sys.modules[name] = module  # where dataclasses look for the names of types
    spec.loader.exec_module(module)
    return module


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
