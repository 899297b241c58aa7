"""The command ``coterie compare``: methods, seeds, partitions and settings side by side."""

from __future__ import annotations

import inspect
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.dry_run import DryRun, tell_comparison
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
from coterie.experiment.compare.sweep import (
    USUAL,
    Assignments,
    NamedMethod,
    Sweep,
    methods_of,
    of_flags,
    of_table,
)
from coterie.experiment.signals import stopped_with

if TYPE_CHECKING:
    from coterie.core.schema import Config
    from coterie.experiment.compare.entries import PlannedRun
    from coterie.results.comparison import Comparison


class TableFormat(StrEnum):
    """The format of the results on standard output."""

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
            help="Methods separated by commas, with parameters as in ifca:k=4 or their own "
            "training as in scaffold:train.lr=0.01; all for every method. "
            f"(default: {USUAL}, and oracle if the true groups are known; with --scenario "
            "those of the paper's table)"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="One more method, also your own as FILE.py:FUNCTION; may be repeated.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="The number of seeds, as in 5 (0 to 4), or a list, as in 3,7. With --resume: "
            "additional seeds."
        ),
    ] = None,
    partitions: Annotated[
        str | None, typer.Option(help="Several partitions, as in iid,dirichlet:alpha=0.1.")
    ] = None,
    shifts: Annotated[
        str | None, typer.Option(help="Several shifts, as in none,rotation:groups=4.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Several values of a key, as in train.lr=0.05,0.1; may be repeated."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Training settings to choose for each method on validation data, as in "
            "lr=0.01,0.05,0.1; may be repeated."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at the same time (default: one for each core; 1 with --engine)."),
    ] = None,
    sets: Sets = None,
    scenario: ScenarioName = None,
    stand_in: StandIn = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="The directory of the runs (default: a new one below runs/)."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the comparison in this directory.")
    ] = None,
    track: Track = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print a line for each round where there is no terminal."
        ),
    ] = False,
    form: Annotated[
        TableFormat | None,
        typer.Option("--format", help="The format of the results (default: table)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    **flags: Any,
) -> None:
    """Run several methods on the same clients and print their results side by side.

    With several seeds, partitions, shifts or values it is a sweep, and prints means over seeds.
    """
    from coterie.tracking import check

    trackers = track or []
    check(trackers)
    form_of_output = _form(form, as_json)
    compare_dir = resume or directory or new_directory("compare")
    sweep = of_flags(methods, seeds, partitions, shifts, vary, jobs, tune)
    comparison: Comparison | None
    with stopped_with(lambda: _how_to_go_on(compare_dir, trackers)):
        if resume is not None:
            refused = any(
                (config, methods, method, partitions, shifts, vary, tune, sets, directory)
            )
            refused = refused or scenario is not None or stand_in
            changeable = ("engine", "workers", "address")
            refuse_with_resume("comparison", refused, flags, *changeable, "seeds", "jobs", "track")
            comparison = _continued(
                compare_dir,
                sweep,
                (quiet, verbose),
                trackers,
                {key: flags[key] for key in changeable},
            )
        else:
            scenario_options = (scenario, stand_in)
            comparison = _begun(
                compare_dir,
                sweep,
                (quiet, verbose),
                config,
                sets,
                scenario_options,
                trackers,
                flags,
                method or [],
                dry_run,
            )
            if comparison is None:
                return
    _print(comparison, compare_dir, form_of_output)
    _say_what_is_missing(comparison, compare_dir, trackers)


def _form(form: TableFormat | None, as_json: bool) -> TableFormat:
    if as_json and form not in (None, TableFormat.JSON):
        raise ConfigError(f"give --json or --format {form}, not both")
    return TableFormat.JSON if as_json else form or TableFormat.TABLE


def _begun(
    directory: Path,
    from_flags: Sweep,
    quiet_verbose: tuple[bool, bool],
    file: Path | None,
    sets: list[str] | None,
    scenario_options: tuple[str | None, bool],
    track: list[str],
    flags: dict[str, Any],
    more_methods: list[str],
    dry_run: bool,
) -> Comparison | None:
    """Run a new comparison, configured by a file and by flags that override it.

    In a dry run it is only forecast, and the answer is None.
    """
    from coterie.experiment.compare.compare import run_all, set_up
    from coterie.experiment.compare.entries import Populations, checked_runs, entries_of
    from coterie.experiment.compare.jobs import at_once
    from coterie.experiment.compare.plan import asks_engine
    from coterie.experiment.compare.tuning import check_tuned, check_validates
    from coterie.experiment.config import parse
    from coterie.report.runs_progress import runs_progress

    scenario, stand_in = scenario_options
    _refuse_parameters(sets or [])
    base = resolve(file, sets, sweeping=True, scenario=scenario, **flags)
    sweep = _swept(base, from_flags, sets, flags)
    methods_given = bool(sweep.methods)
    if not methods_given and scenario is not None:
        sweep = of_flags(_of_the_table(scenario)).over(sweep)
    if more_methods:
        sweep = replace(sweep, methods=",".join([sweep.methods or USUAL, *more_methods]))
    methods_now = methods_of(sweep)
    check_tuned(sweep, methods_now)
    abouts: dict[str, dict[str, Any]] = {}

    def configure(method: NamedMethod, assignments: Assignments) -> Config:
        tree = set_up(base, method, assignments)
        chosen = chosen_of(scenario, tree, stand_in)
        if chosen is None:
            return parse(tree)
        if not abouts:
            tell(chosen)
        found = parse(chosen.tree)
        abouts[found.model_dump_json()] = chosen.about()
        return found

    clients = Populations()
    entries = entries_of(sweep, configure, clients, not methods_given, methods_now)
    for text in dict.fromkeys(map(_public, entries)):
        if text:
            warn(text)
    if dry_run:
        kept, _ = checked_runs(entries, clients, _note, check_validates if sweep.tune else None)
        count = at_once(sweep.jobs, len(kept), asks_engine(base), kept[0].config.run)
        tried = math.prod(len(values) for values in sweep.tune.values()) if sweep.tune else 0
        tell_comparison(kept, clients, count, tried)
        return None
    abouts_by_run = (
        {e.name: abouts[e.config.model_dump_json()] for e in entries} if abouts else None
    )
    with runs_progress(err, *quiet_verbose) as display:
        return run_all(
            entries,
            clients,
            directory,
            display,
            sweep.jobs,
            _note,
            abouts_by_run,
            engine_asked=asks_engine(base),
            track=track,
            tune=sweep.tune,
        )


def _public(entry: PlannedRun) -> str:
    """What the privacy budget of a run does not cover, in words; empty if there is nothing."""
    from coterie.channel.privacy.settings import Privacy
    from coterie.core.schema import part
    from coterie.experiment.config import method_of
    from coterie.experiment.privacy import left_public

    privacy = part(Privacy, entry.config.privacy)
    silent = (
        entry.optional or not privacy.noised
    )  # an optional method may not accept its parameters
    return "" if silent else left_public(privacy, method_of(entry.config))


def _refuse_parameters(sets: list[str]) -> None:
    """Refuse a method's parameter in ``--set``: it does not say which method it belongs to."""
    for text in sets:
        key, _, value = text.partition("=")
        parameter = key.strip().removeprefix("method.")
        if parameter == key.strip() or parameter.startswith("layer_"):
            continue
        advice = f"--methods {value.strip()}"
        if parameter != "name":
            advice = (
                "it with its method, as in --methods "
                f"{_taking(parameter)}:{parameter}={value.strip()}, or for all that have it with "
                f"--vary {key.strip()}={value.strip()}"
            )
        raise ConfigError(f"--set {text}: a comparison has several methods; write {advice}")


def _taking(parameter: str) -> str:
    """A method that has this parameter, for an example."""
    from coterie.registry import METHODS

    names = (n for n, f in METHODS.items() if parameter in inspect.signature(f).parameters)
    return next(names, "NAME")


def _swept(
    base: dict[str, Any], from_flags: Sweep, sets: list[str] | None, flags: Mapping[str, Any]
) -> Sweep:
    """The sweep of the file and the flags; a single value on the command line replaces a list."""
    keys_given = [FLAGS[k] for k, v in flags.items() if v is not None and v is not False]
    keys_given += [text.partition("=")[0].strip() for text in sets or []]
    given_twice = [key for key in from_flags.keys if key in keys_given]
    if given_twice:
        raise ConfigError(
            f"{given_twice[0]} has a single value and is swept over: leave out one of the two"
        )
    in_file = of_table(base.pop("sweep", {})).without(keys_given)
    return from_flags.over(in_file)


def _continued(
    directory: Path,
    sweep: Sweep,
    quiet_verbose: tuple[bool, bool],
    track: list[str],
    changes: dict[str, Any],
) -> Comparison:
    from coterie.experiment.compare.compare import go_on
    from coterie.report.runs_progress import runs_progress

    with runs_progress(err, *quiet_verbose) as display:
        return go_on(directory, display, sweep.jobs, _note, sweep.seeds, track, **changes)


def _of_the_table(scenario: str) -> str:
    """The methods of a scenario's table, as ``--methods`` takes them."""
    from coterie.experiment.scenarios import scenario as find

    return ",".join(find(scenario).methods())


def _note(name: str, reason: str) -> None:
    """Print a note that a method is left out."""
    warn(f"{name} is left out: {reason}")


# --- output at the end ---------------------------------------------------------------------------


def _print(comparison: Comparison, directory: Path, form: TableFormat) -> None:
    from coterie.experiment.compare.compare import MEANS, TABLE
    from coterie.report.comparison_tables import sheet_of
    from coterie.report.table_formats import as_rich, notes_of
    from coterie.results.rundir import without_nan

    if form == TableFormat.TABLE:
        sheet = sheet_of(comparison)
        show(as_rich(sheet))
        for line in notes_of(sheet):
            out.print(escape(line), highlight=False, soft_wrap=True)
        out.print(f"kept in {escape(str(directory))}", soft_wrap=True)
        return
    texts: dict[TableFormat, Callable[[], str]] = {
        TableFormat.MARKDOWN: comparison.markdown,
        TableFormat.LATEX: comparison.latex,
        TableFormat.CSV: (directory / (MEANS if comparison.swept else TABLE)).read_text,
        TableFormat.JSON: lambda: json.dumps(
            without_nan({**comparison.to_dict(), "directory": str(directory)})
        ),
    }
    typer.echo(texts[form]().rstrip("\n"))


def _say_what_is_missing(comparison: Comparison, directory: Path, track: list[str]) -> None:
    """Raise the error of a failed run, or ``Interrupted`` if runs were stopped."""
    command = _again(directory, track)
    for name, error in comparison.failed.items():
        others = f" (and {len(comparison.failed) - 1} more)" if len(comparison.failed) > 1 else ""
        raise type(error)(
            f"{name} failed{others}: {error}. The others are kept; try again: {command}"
        )
    if comparison.stopped:
        names = "; ".join(comparison.stopped)
        raise Interrupted(
            f"stopped on request: {names}. The others are done; continue with: {command}"
        )


def _again(directory: Path, track: list[str]) -> str:
    flags = "".join(f" --track {tracker}" for tracker in track)
    return f"coterie compare --resume {shlex.quote(str(directory))}{flags}"


def _how_to_go_on(directory: Path, track: list[str]) -> str:
    from coterie.experiment.compare.plan import PLAN

    if (directory / PLAN).exists():
        command = _again(directory, track)
        return f"stopped. Finished methods are kept in {directory}; continue with: {command}"
    return f"stopped before anything was saved in {directory}"
