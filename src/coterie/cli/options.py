"""What the commands share: options, reading them into a configuration, and printing."""

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
    from coterie.experiment.scenarios import ChosenScenario, Scenario

Command = TypeVar("Command", bound=Callable[..., None])

out = Console()
err = Console(stderr=True)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A TOML file; flags and --set override its values.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set any key: section.key=value, as in method.mu=0.01."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also log to tensorboard, mlflow or wandb; may be repeated."),
]
DiscardDamaged = Annotated[
    bool,
    typer.Option(
        "--discard-damaged",
        help="Resume even if a damaged file loses part of the run's history; the file is kept.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
ScenarioName = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        help="A paper's experiment (see `coterie scenarios`); your settings override it.",
    ),
]
StandIn = Annotated[
    bool,
    typer.Option(
        "--stand-in", help="Use another data set, with a note, if the scenario's is not available."
    ),
]

FLAGS = {name: key.path for name, key in flags().items()}


def option(key: Key) -> Any:
    """The command-line option that a configuration key declares."""
    return typer.Option(key.flag, envvar=key.env or None, help=key.help)


Folder = Annotated[Path | None, option(flags()["folder"])]


def flagged(
    after: str, without: Collection[str] = (), config: type[BaseModel] = Config
) -> Callable[[Command], Command]:
    """Add the options that configuration keys declare to a command, ``after`` this parameter.

    The command receives them as ``**flags``, with None or False for those that were not given.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        position = [p.name for p in parameters].index(after) + 1
        from_keys = [_parameter(key) for name, key in flags(config).items() if name not in without]
        parameters[position:position] = from_keys
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(key: Key) -> inspect.Parameter:
    kind, is_switch = key.option_type, key.option_type is bool
    annotation = Annotated[kind if is_switch else kind | None, option(key)]  # type: ignore[valid-type]
    default = False if is_switch else None
    return inspect.Parameter(
        key.parameter,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=default,
        annotation=annotation,
    )


def resolve(
    config: Path | None,
    sets: list[str] | None,
    sweeping: bool = False,
    scenario: str | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """Merge a file, the flags and ``--set``, in this order, into one tree of tables.

    A table ``[method]`` without a name in the file configures the scenario's method, if there is a
    scenario.
    """
    from coterie.experiment.config import assign, assign_text, assign_texts
    from coterie.experiment.spelling import spelled_out
    from coterie.experiment.user_code import admitted
    from coterie.results.toml import read_toml

    tree = read_toml(config) if config else {}
    if "sweep" in tree and not sweeping:
        raise ConfigError(f"{config} has a table [sweep]; run it with: coterie compare {config}")
    if scenario is not None and isinstance(tree.get("method"), dict):
        tree["method"].setdefault("name", _find(scenario).method)
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        if flag == "folder" and "folder" in tree.get("data", {}) and from_environment(value):
            continue  # the file overrides the environment
        if flag == "cohort":
            assign_text(tree, f"run.cohort={value}")
        else:
            assign(tree, FLAGS[flag], value)
    tree = spelled_out(tree)  # before --set, which replaces parameters that exclude each other
    assign_texts(tree, sets or [])
    return admitted(tree)


def chosen_of(
    scenario: str | None, settings: dict[str, Any], stand_in: bool = False
) -> ChosenScenario | None:
    """The named scenario with the user's settings on top; None without a scenario."""
    if scenario is None:
        if stand_in:
            raise ConfigError("--stand-in needs a scenario: name one with --scenario")
        return None
    from coterie.experiment.scenarios import choose

    return choose(_find(scenario), settings, stand_in)


def _find(scenario: str) -> Scenario:
    from coterie.experiment.scenarios import scenario as find

    return find(scenario)


def tell(chosen: ChosenScenario | None) -> None:
    """Print a note if another data set replaces the scenario's."""
    if chosen is not None and chosen.warning:
        err.print(f"[yellow]note:[/] {escape(chosen.warning)}", highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a note on standard error, above the progress display if there is one."""
    err.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


_Result = TypeVar("_Result")


def asking(work: Callable[[bool], _Result], discard: bool) -> _Result:
    """Call ``work(discard)``; before history is lost, ask the user if there is a terminal.

    ``work`` receives whether part of the run's history may be lost, at first as the command line
    says it (``--discard-damaged``).
    """
    try:
        return work(discard)
    except LostHistory as loss:
        if not sys.stdin.isatty() or not sys.stderr.isatty():
            raise
        err.print(escape(f"{loss}."), highlight=False, soft_wrap=True)
        if not typer.confirm("Go on without it?", err=True):
            raise
    return work(True)


def from_environment(folder: str) -> bool:
    """Whether the data folder comes from ``COTERIE_DATA`` and not from a flag."""
    is_flag = any(a == "--folder" or a.startswith("--folder=") for a in sys.argv)
    return os.environ.get("COTERIE_DATA") == folder and not is_flag


def refuse_with_resume(
    what: str, other_arguments: bool, flags: dict[str, Any], *allowed: str, and_also: str = ""
) -> None:
    """Refuse options that would change a run or comparison that is resumed."""
    refused = [k for k, v in flags.items() if v is not None and v is not False and k not in allowed]
    refused = [k for k in refused if not (k == "folder" and from_environment(flags[k]))]
    if other_arguments or refused:
        *names, last = (f"--{name}" for name in allowed)
        raise ConfigError(
            f"--resume uses the configuration of the {what}; only {', '.join(names)} and "
            f"{last}{and_also} can be given with it"
        )


def new_directory(name: str) -> Path:
    """A path below runs/ that does not exist yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = Path("runs") / f"{stamp}-{name}", 2
    while path.exists():
        path, number = Path("runs") / f"{stamp}-{name}-{number}", number + 1
    return path


def show(table: RenderableType) -> None:
    """Print a table, in full width unless standard output is a terminal."""
    wide = out.is_terminal or "COLUMNS" in os.environ
    (out if wide else Console(width=1000, file=out.file)).print(table)
