"""What commands share: their options, how these become a configuration, and where words go."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.markup import escape

from coterie.core.keys import Key, flags
from coterie.core.schema import Config
from coterie.errors import ConfigError, LostHistory

if TYPE_CHECKING:
    from coterie.experiment.scenarios import Chosen, Scenario

Command = TypeVar("Command", bound=Callable[..., None])

out = Console()
err = Console(stderr=True)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A TOML file; flags and --set override it.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, as in method.mu=0.01.")
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also write to tensorboard or mlflow; may be repeated."),
]
DiscardDamaged = Annotated[
    bool,
    typer.Option(
        "--discard-damaged",
        help="Go on although a damaged file costs a part of the run's history; the file is kept.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
ScenarioName = Annotated[
    str | None,
    typer.Option("--scenario", help="A paper's set-up (see `coterie scenarios`); all else wins."),
]
StandIn = Annotated[
    bool,
    typer.Option(
        "--stand-in", help="Use another data set if the scenario's is not at hand, and say so."
    ),
]

FLAGS = {name: key.path for name, key in flags().items()}


def option(key: Key) -> Any:
    """The option of the command line that a key declares."""
    return typer.Option(key.flag, envvar=key.env or None, help=key.help)


Folder = Annotated[Path | None, option(flags()["folder"])]


def flagged(
    after: str, without: Collection[str] = (), config: type[BaseModel] = Config
) -> Callable[[Command], Command]:
    """Give a command the options that keys declare, ``without`` some, ``after`` its own parameter.

    They come as ``**flags``: None, or False, where they were not given.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        found = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        place = [p.name for p in found].index(after) + 1
        made = [_parameter(key) for name, key in flags(config).items() if name not in without]
        found[place:place] = made
        command.__signature__ = own.replace(parameters=found)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(key: Key) -> inspect.Parameter:
    kind, yes = key.option_type, key.option_type is bool
    annotation = Annotated[kind if yes else kind | None, option(key)]  # type: ignore[valid-type]
    usual = False if yes else None
    return inspect.Parameter(
        key.parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=usual, annotation=annotation
    )


def resolve(
    config: Path | None,
    sets: list[str] | None,
    sweeping: bool = False,
    scenario: str | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """A file, then flags, then --set: one tree of tables.

    A file's table ``[method]`` without a name is about the method of the scenario, if there is one.
    """
    from coterie.experiment.config import assign, assign_text, assign_texts
    from coterie.experiment.user_code import admitted
    from coterie.results.toml import read_toml

    tree = read_toml(config) if config else {}
    if "sweep" in tree and not sweeping:
        raise ConfigError(
            f"{config} has a table [sweep], so this is a sweep: coterie compare {config}"
        )
    if scenario is not None and isinstance(tree.get("method"), dict):
        tree["method"].setdefault("name", _find(scenario).method)
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        if flag == "folder" and "folder" in tree.get("data", {}) and from_environment(value):
            continue  # the environment is only a default
        if flag == "cohort":
            assign_text(tree, f"run.cohort={value}")
        else:
            assign(tree, FLAGS[flag], value)
    assign_texts(tree, sets or [])
    return admitted(tree)


def chosen_of(scenario: str | None, given: dict[str, Any], stand_in: bool = False) -> Chosen | None:
    """The scenario with the user's own tables laid over it, if one was named."""
    if scenario is None:
        if stand_in:
            raise ConfigError("--stand-in is about a scenario's data: name one with --scenario")
        return None
    from coterie.experiment.scenarios import choose

    return choose(_find(scenario), given, stand_in)


def _find(scenario: str) -> Scenario:
    from coterie.experiment.scenarios import scenario as find

    return find(scenario)


def tell(chosen: Chosen | None) -> None:
    """Say that another data set is used than the scenario's."""
    if chosen is not None and chosen.warning:
        err.print(f"[yellow]note:[/] {escape(chosen.warning)}", highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Say something on standard error, above the progress if that is there."""
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


_Result = TypeVar("_Result")


def asking(go: Callable[[bool], _Result], discard: bool) -> _Result:
    """Do it; if it would lose a part of a run's history, ask first, if anybody is there to answer.

    ``go`` is told whether that may be lost; ``discard`` is what the command line says of it.
    """
    try:
        return go(discard)
    except LostHistory as loss:
        if not sys.stdin.isatty() or not sys.stderr.isatty():
            raise
        err.print(escape(f"{loss}."), highlight=False, soft_wrap=True)
        if not typer.confirm("Go on without it?", err=True):
            raise
    return go(True)


def from_environment(folder: str) -> bool:
    """Whether a folder comes from ``COTERIE_DATA`` and not from a flag."""
    given = any(a == "--folder" or a.startswith("--folder=") for a in sys.argv)
    return os.environ.get("COTERIE_DATA") == folder and not given


def refuse_with_resume(
    what: str, more: bool, flags: dict[str, Any], *free: str, and_also: str = ""
) -> None:
    """With --resume nothing may be given that would change the course of what was begun."""
    given = [k for k, v in flags.items() if v is not None and v is not False and k not in free]
    given = [k for k in given if not (k == "folder" and from_environment(flags[k]))]
    if more or given:
        *names, last = (f"--{name}" for name in free)
        raise ConfigError(
            f"--resume takes the configuration of the {what}; only {', '.join(names)} and "
            f"{last}{and_also} can be given with it"
        )


def new_directory(name: str) -> Path:
    """A folder below runs/ that is not there yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = Path("runs") / f"{stamp}-{name}", 2
    while path.exists():
        path, number = Path("runs") / f"{stamp}-{name}-{number}", number + 1
    return path


def show(table: RenderableType) -> None:
    """A table on the terminal; elsewhere, where nobody's window is too narrow, in full width."""
    wide = out.is_terminal or "COLUMNS" in os.environ
    (out if wide else Console(width=1000, file=out.file)).print(table)
