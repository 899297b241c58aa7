"""What can go wrong, as a tree; each branch has the exit code that the command line ends with.

=============================  ====  =====================================================
error                          exit  meaning
=============================  ====  =====================================================
``CoterieError``                  1  anything of ours not named below
``ConfigError``                   2  a wrong name, key or value in the configuration
``DataError``                     3  data that is missing, damaged or cannot be split as asked
``RunDirError``                   4  a run directory or checkpoint that cannot be used
``LostHistory``                   4  one that can be used only with a loss that nobody accepted
``TrainingError``                 5  training itself failed (diverged, no reply left)
``EngineError``                   6  the engine could not start or lost its workers
``WireError``                     7  a message that was damaged or cut short on its way
``Interrupted``                 130  stopped by the user (Ctrl-C); what was saved stays
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
    """Anything that Coterie refuses or gives up on, in words for the user."""

    exit_code = 1


class ConfigError(CoterieError):
    """A wrong name, key or value in the configuration."""

    exit_code = 2


class DataError(CoterieError):
    """Data that is missing, damaged, or cannot be divided as asked."""

    exit_code = 3


class RunDirError(CoterieError):
    """A run directory or checkpoint that cannot be read, written or resumed."""

    exit_code = 4


class LostHistory(RunDirError):
    """A run that can be resumed only without a part of its history, unless that is accepted."""


class TrainingError(CoterieError):
    """Training failed: a model diverged, a task raised, or nobody replied."""

    exit_code = 5


class Diverged(TrainingError):
    """An update that holds NaN or infinity, or numbers too large to be added up."""


class Abandoned(TrainingError):
    """A round in which too few clients reported: it is as if it had not been."""


class EngineError(CoterieError):
    """The engine could not start or could not keep its workers alive."""

    exit_code = 6


class WireError(CoterieError):
    """A message that was damaged or cut short on its way, or is none of ours."""

    exit_code = 7


class Interrupted(CoterieError):
    """The user stopped the run; everything saved so far is intact."""

    exit_code = 130


def unknown(what: str, name: object, known: Iterable[object]) -> str:
    """A sentence for a name that is not known, offering the closest one.

    >>> unknown("method", "fedagv", ["fedavg", "local"])
    "unknown method 'fedagv'; did you mean 'fedavg'? Known: fedavg, local"
    """
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"unknown {what} '{name}'{hint} Known: {', '.join(names)}"


def error_named(name: str) -> type[CoterieError]:
    """The error of this name, for one that crossed a process boundary."""
    kinds: list[type[CoterieError]] = [CoterieError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((k for k in kinds if k.__name__ == name), TrainingError)


def reasons(error: ValidationError) -> str:
    """Why a value will not do; of one that may be of several kinds, what each would have been.

    >>> from typing import Annotated, Literal
    >>> from pydantic import Field, TypeAdapter, ValidationError
    >>> kind = TypeAdapter(Literal["auto"] | Annotated[float, Field(gt=0)])
    >>> try:
    ...     kind.validate_python(-1)
    ... except ValidationError as error:
    ...     print(reasons(error))
    must be 'auto' or greater than 0
    """
    found = []
    for one in error.errors():
        reason = one["msg"].lower().removeprefix("value error, ").replace("input should be ", "")
        reason = reason.replace("greater than or equal to", "at least")
        found.append(reason.replace("less than or equal to", "at most"))
    words = " or ".join(dict.fromkeys(found))
    plain = all("input should be" in e["msg"].lower() for e in error.errors())
    return f"must be {words}" if plain else words
