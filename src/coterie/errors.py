"""The errors of Coterie, with the exit codes of the command line.

=============================  ====  =====================================================
error                          exit  meaning
=============================  ====  =====================================================
``CoterieError``                  1  any error of Coterie not listed below
``ConfigError``                   2  a wrong name, key or value in the configuration
``DataError``                     3  data that is missing, damaged or cannot be divided
``RunDirError``                   4  a run directory or checkpoint that cannot be used
``LostHistory``                   4  a run that can only be resumed with some history lost
``TrainingError``                 5  training failed (diverged, or no client replied)
``EngineError``                   6  the engine could not start or lost its workers
``WireError``                     7  a message that is damaged or truncated
``Interrupted``                 130  stopped by the user (Ctrl-C); saved results are kept
=============================  ====  =====================================================

Messages say what happened, which client or key, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class CoterieError(Exception):
    """The base class of all errors that Coterie reports to users."""

    exit_code = 1


class ConfigError(CoterieError):
    """A wrong name, key or value in the configuration."""

    exit_code = 2


class DataError(CoterieError):
    """Data that is missing, damaged, or cannot be divided as requested."""

    exit_code = 3


class RunDirError(CoterieError):
    """A run directory or checkpoint that cannot be read, written or resumed."""

    exit_code = 4


class LostHistory(RunDirError):
    """A run that can only be resumed without a part of its history, which was not accepted."""


class TrainingError(CoterieError):
    """Training failed: a model diverged, a task raised an error, or no client replied."""

    exit_code = 5


class Diverged(TrainingError):
    """An update with NaN, infinity, or numbers that are too large to be summed."""


class Abandoned(TrainingError):
    """A round in which too few clients replied, and which therefore has no effect."""


class EngineError(CoterieError):
    """The engine could not start or could not keep its workers alive."""

    exit_code = 6


class WireError(CoterieError):
    """A message that is damaged, truncated, or not from Coterie."""

    exit_code = 7


class Interrupted(CoterieError):
    """The user stopped the run; everything saved so far is intact."""

    exit_code = 130


_LISTED = 16  # names that an error lists; of more it gives the nearest


def unknown(what: str, name: object, known: Iterable[object]) -> str:
    """A sentence about an unknown name that suggests the closest known ones, or lists a few.

    >>> unknown("method", "fedagv", ["fedavg", "local"])
    "unknown method 'fedagv'; did you mean 'fedavg'? Known: fedavg, local"
    >>> unknown("number", "twelv", ["one", "two", "twelve", *map(str, range(20))])
    "unknown number 'twelv'; did you mean 'twelve'? There are 23, such as twelve, two and one"
    """
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    if len(names) <= _LISTED:
        return f"unknown {what} '{name}'{hint} Known: {', '.join(names)}"
    nearest = difflib.get_close_matches(str(name), names, n=3, cutoff=0.0)
    *first, last = nearest
    such = f"{', '.join(first)} and {last}"
    return f"unknown {what} '{name}'{hint} There are {len(names)}, such as {such}"


def error_named(name: str) -> type[CoterieError]:
    """The error class of the given name, for errors that were sent by another process."""
    classes: list[type[CoterieError]] = [CoterieError]
    for error_class in classes:
        classes.extend(error_class.__subclasses__())
    return next((c for c in classes if c.__name__ == name), TrainingError)


def reasons(error: ValidationError) -> str:
    """The conditions that a value violates; if it may be of several types, one for each type.

    >>> from typing import Annotated, Literal
    >>> from pydantic import Field, TypeAdapter, ValidationError
    >>> kind = TypeAdapter(Literal["auto"] | Annotated[float, Field(gt=0)])
    >>> try:
    ...     kind.validate_python(-1)
    ... except ValidationError as error:
    ...     print(reasons(error))
    must be 'auto' or greater than 0
    """
    phrases = []
    for detail in error.errors():
        reason = detail["msg"].lower().removeprefix("value error, ").replace("input should be ", "")
        reason = reason.replace("greater than or equal to", "at least")
        phrases.append(reason.replace("less than or equal to", "at most"))
    sentence = " or ".join(dict.fromkeys(phrases))
    only_conditions = all("input should be" in e["msg"].lower() for e in error.errors())
    return f"must be {sentence}" if only_conditions else sentence
