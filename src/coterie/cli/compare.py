"""The command that compares: methods, seeds, partitions and settings, side by side."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.options import (
    FLAGS,
    ConfigFile,
    Quiet,
    ScenarioName,
    Sets,
    StandIn,
    Track,
    chosen_of,
    err,
    flagged,
    new_directory,
    out,
    refuse_with_resume,
    resolve,
    show,
    tell,
    warn,
)
from coterie.errors import ConfigError, Interrupted
from coterie.experiment.compare.sweep import USUAL, Asked, Assignments, Sweep, of_flags, of_table
from coterie.experiment.signals import stopped_with

if TYPE_CHECKING:
    from coterie.core.schema import Config
    from coterie.experiment.compare.entries import Entry
    from coterie.results.comparison import Comparison


class Format(StrEnum):
    """What is printed on standard output."""

    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    LATEX = "latex"
    JSON = "json"


@flagged(after="jobs", without=("method", "alone"))
def compare(
    config: ConfigFile = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with parameters as in ifca:k=4, or training of their own as in "
            "scaffold:train.lr=0.01, separated by commas; all for every one. "
            f"(default: {USUAL}; oracle where the true groups are known; those of a "
            "scenario's table)"
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="How many seeds, as in 5 (0 to 4), or which, as in 3,7. With --resume: "
            "further ones."
        ),
    ] = None,
    partitions: Annotated[
        str | None, typer.Option(help="Several, as in iid,dirichlet:alpha=0.1.")
    ] = None,
    shifts: Annotated[
        str | None, typer.Option(help="Several, as in none,rotation:groups=4.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Several values of any key, as in train.lr=0.05,0.1; may be repeated."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at a time (default: as many as cores; 1 with --engine)."),
    ] = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the runs (default: runs/…).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the comparison in this directory.")
    ] = None,
    track: Track = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A line a round where there is no terminal.")
    ] = False,
    form: Annotated[
        Format | None, typer.Option("--format", help="What is printed (default: table).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    **flags: Any,
) -> None:
    """Run several methods on the same clients and print them side by side.

    With several seeds, partitions, shifts or values it is a sweep: means over seeds, side by side.
    """
    from coterie.tracking import check

    names = track or []
    check(names)
    shape = _form(form, as_json)
    place = resume or directory or new_directory("compare")
    asked = of_flags(methods, seeds, partitions, shifts, vary, jobs)
    with stopped_with(lambda: _how_to_go_on(place, names)):
        if resume is not None:
            more = any((config, methods, partitions, shifts, vary, sets, directory))
            more = more or scenario is not None or stand_in
            free = ("engine", "workers", "address")
            refuse_with_resume("comparison", more, flags, *free, "seeds", "jobs", "track")
            made = _continued(
                place, asked, (quiet, verbose), names, {key: flags[key] for key in free}
            )
        else:
            scene = (scenario, stand_in)
            made = _begun(place, asked, (quiet, verbose), config, sets, scene, names, flags)
    _print(made, place, shape)
    _say_what_is_missing(made, place, names)


def _form(form: Format | None, as_json: bool) -> Format:
    if as_json and form not in (None, Format.JSON):
        raise ConfigError(f"--json and --format {form}: give one of the two")
    return Format.JSON if as_json else form or Format.TABLE


def _begun(
    place: Path,
    flagged: Sweep,
    quiet_verbose: tuple[bool, bool],
    file: Path | None,
    sets: list[str] | None,
    scene: tuple[str | None, bool],
    track: list[str],
    flags: dict[str, Any],
) -> Comparison:
    """A new comparison: a file, flags that win over it, and what they sweep over."""
    from coterie.experiment.compare.compare import run_all, set_up
    from coterie.experiment.compare.entries import Populations, entries_of
    from coterie.experiment.compare.plan import asks_engine
    from coterie.experiment.config import parse
    from coterie.report.runs_progress import runs_progress

    scenario, stand_in = scene
    _refuse_parameters(sets or [])
    base = resolve(file, sets, sweeping=True, scenario=scenario, **flags)
    sweep = _swept(base, flagged, sets, flags)
    named = bool(sweep.methods)
    if not named and scenario is not None:
        sweep = of_flags(_of_the_table(scenario)).over(sweep)
    abouts: dict[str, dict[str, Any]] = {}

    def configure(method: Asked, assignments: Assignments) -> Config:
        tree = set_up(base, method, assignments)
        chosen = chosen_of(scenario, tree, stand_in)
        if chosen is None:
            return parse(tree)
        if not abouts:
            tell(chosen)
        found = parse(chosen.tree)
        abouts[found.model_dump_json()] = chosen.about()
        return found

    people = Populations()
    entries = entries_of(sweep, configure, people, oracle_if_possible=not named)
    for text in dict.fromkeys(map(_public, entries)):
        if text:
            warn(text)
    told = {e.name: abouts[e.config.model_dump_json()] for e in entries} if abouts else None
    with runs_progress(err, *quiet_verbose) as look:
        return run_all(
            entries,
            people,
            place,
            look,
            sweep.jobs,
            _note,
            told,
            engine_asked=asks_engine(base),
            track=track,
        )


def _public(entry: Entry) -> str:
    """What ε does not cover in a run, in words."""
    from coterie.channel.privacy.settings import Privacy
    from coterie.core.schema import part
    from coterie.experiment.config import method_of
    from coterie.experiment.privacy import left_public

    privacy = part(Privacy, entry.config.privacy)
    silent = entry.optional or not privacy.noised  # an optional method may refuse its parameters
    return "" if silent else left_public(privacy, method_of(entry.config))


def _refuse_parameters(sets: list[str]) -> None:
    """A parameter without its method: nobody could say whose it is."""
    for text in sets:
        key, _, value = text.partition("=")
        own = key.strip().removeprefix("method.")
        if own == key.strip() or own.startswith("layer_"):
            continue
        how = f"--methods {value.strip()}"
        if own != "name":
            how = (
                f"with its method, as in --methods {_taking(own)}:{own}={value.strip()}, or for "
                f"all that take it with --vary {key.strip()}={value.strip()}"
            )
        raise ConfigError(f"--set {text}: a comparison has several methods; write {how}")


def _taking(parameter: str) -> str:
    """A method that takes this, for an example."""
    from coterie.registry import METHODS

    takes = (n for n, f in METHODS.items() if parameter in inspect.signature(f).parameters)
    return next(takes, "NAME")


def _swept(
    base: dict[str, Any], flagged: Sweep, sets: list[str] | None, flags: Mapping[str, Any]
) -> Sweep:
    """What is swept over: flags win over the file, a single value over several of the file."""
    given = [FLAGS[k] for k, v in flags.items() if v is not None and v is not False]
    given += [text.partition("=")[0].strip() for text in sets or []]
    both = [key for key in flagged.keys if key in given]
    if both:
        raise ConfigError(f"{both[0]} is given once and swept over: leave one of the two out")
    written = of_table(base.pop("sweep", {})).without(given)
    return flagged.over(written)


def _continued(
    place: Path,
    asked: Sweep,
    quiet_verbose: tuple[bool, bool],
    track: list[str],
    changes: dict[str, Any],
) -> Comparison:
    from coterie.experiment.compare.compare import go_on
    from coterie.report.runs_progress import runs_progress

    with runs_progress(err, *quiet_verbose) as look:
        return go_on(place, look, asked.jobs, _note, asked.seeds, track, **changes)


def _of_the_table(scenario: str) -> str:
    """The methods of a scenario's table that there are, as --methods takes them."""
    from coterie.experiment.scenarios import scenario as find

    return ",".join(find(scenario).methods())


def _note(name: str, reason: str) -> None:
    """Say at once which method is left out."""
    warn(f"{name} is left out: {reason}")


# --- what is said at the end ---------------------------------------------------------------------


def _print(made: Comparison, place: Path, shape: Format) -> None:
    from coterie.experiment.compare.compare import MEANS, TABLE
    from coterie.report.comparison_tables import sheet_of
    from coterie.report.table_formats import as_rich, notes_of
    from coterie.results.rundir import finite

    if shape == Format.TABLE:
        sheet = sheet_of(made)
        show(as_rich(sheet))
        for line in notes_of(sheet):
            out.print(escape(line), highlight=False, soft_wrap=True)
        out.print(f"kept in {escape(str(place))}", soft_wrap=True)
        return
    texts: dict[Format, Callable[[], str]] = {
        Format.MARKDOWN: made.markdown,
        Format.LATEX: made.latex,
        Format.CSV: (place / (MEANS if made.swept else TABLE)).read_text,
        Format.JSON: lambda: json.dumps(finite({**made.to_dict(), "directory": str(place)})),
    }
    typer.echo(texts[shape]().rstrip("\n"))


def _say_what_is_missing(made: Comparison, place: Path, track: list[str]) -> None:
    """What failed gives the exit code; what was asked to stop, 130."""
    how = _again(place, track)
    for name, error in made.failed.items():
        others = f" (and {len(made.failed) - 1} more)" if len(made.failed) > 1 else ""
        raise type(error)(f"{name} failed{others}: {error}. The others are kept; try again: {how}")
    if made.stopped:
        names = "; ".join(made.stopped)
        raise Interrupted(f"asked to stop: {names}. The others are done; continue with: {how}")


def _again(place: Path, track: list[str]) -> str:
    more = "".join(f" --track {each}" for each in track)
    return f"coterie compare --resume {shlex.quote(str(place))}{more}"


def _how_to_go_on(place: Path, track: list[str]) -> str:
    from coterie.experiment.compare.plan import PLAN

    if (place / PLAN).exists():
        how = _again(place, track)
        return f"stopped. Finished methods are kept in {place}; continue with: {how}"
    return f"stopped before anything was saved in {place}"
