"""Reading run directories: finished, running, torn, crashed, or of older versions.

Parts that cannot be read are left out and listed in ``problems``; only a folder that is not a run
raises an error.
"""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from coterie.core.events import (
    ADMISSION,
    INIT,
    KINDS,
    ROUND,
    Data,
    Event,
    SessionLine,
    Summary,
    fields_of,
    is_count,
    mended,
)
from coterie.core.schema import Config
from coterie.errors import ConfigError, RunDirError
from coterie.results.checksums import JSON_LINES, check_note, from_json, read_lines
from coterie.results.findings import grouping_of, round_samples, warnings_of
from coterie.results.notebook import Notebook
from coterie.results.rundir import CHECKSUMS, RunDir, numbered, open_plain, rounds_of, wrong_tables

if TYPE_CHECKING:
    from coterie.results.result import Result

FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"
_CONFIG = dict.fromkeys([*Config.model_fields, "python"], dict[str, Any])
_MOST = 1000  # missing rounds that are listed at most
_DEPTH = 4  # how deep below a folder to look for runs

Row = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Reading(Notebook):
    """One run, as far as it can be read.

    ``status`` is "finished", "running" or "stopped" (also by a crash). ``events`` are the lines of
    ``events.jsonl`` that are valid and of known kinds; ``rounds`` are the rounds among them, with
    scores that came later. ``clients`` and ``exposed`` are rows of the tables written at the end,
    ``result`` is the summary, ``data`` describes the clients' data; all are empty if they are
    missing. ``problems`` are sentences.
    """

    name: str
    status: str
    path: Path | None = None
    config: Row = field(default_factory=dict)
    events: Sequence[Event] = ()
    clients: Sequence[Row] = ()
    exposed: Sequence[Row] = ()
    result: Summary = field(default_factory=Summary)
    data: Data = field(default_factory=Data)
    sessions: Sequence[SessionLine] = ()
    scenario: Row = field(default_factory=dict)
    problems: Sequence[str] = ()

    @cached_property
    def rounds(self) -> list[Event]:
        """The rounds, in order; the later one of a round that occurs twice."""
        by_number = {event["round"]: event for event in rounds_of(self.events)}
        return [by_number[number] for number in sorted(by_number)]

    @property
    def begun(self) -> Event:
        """The event before the first round, if there is one."""
        return next((e for e in self.events if e.get("event") == INIT), Event())

    @property
    def method(self) -> str:
        """The method's name."""
        tables = (self.config.get("method"), self.config.get("python"))
        named = [t.get("name") or t.get("method") for t in tables if isinstance(t, Mapping)]
        return str(self.result.get("method") or next(filter(None, named), "") or "unknown method")

    @property
    def judged_by(self) -> str:
        """The score that the run is judged by: "accuracy" or "r2"."""
        if "judged_by" in self.result:
            return str(self.result["judged_by"])
        return "r2" if any("r2" in (e.get("received") or {}) for e in self.rounds) else "accuracy"

    @property
    def headline(self) -> str:
        """The score of the two that counts: "received" or "adapted"."""
        tables = [self.result, *reversed(self.sessions)]
        headlines = (str(each["headline"]) for each in tables if each.get("headline"))
        return next(headlines, "received")

    @property
    def accuracy(self) -> float:
        """The mean score of the received model at the end, or so far (R² for a regression)."""
        tables = [self.result, *reversed(self.rounds)]
        scores: Row = next((e["received"] for e in tables if e.get("received")), {})
        if self.judged_by not in scores:
            raise ConfigError(f"{self.name}: no client has been scored")
        return float(scores[self.judged_by])

    @property
    def planned(self) -> int:
        """The planned number of rounds."""
        rounds = [s.get("rounds") for s in self.sessions[-1:]]
        rounds.append(self.settings("run").get("rounds"))
        count = next((n for n in rounds if isinstance(n, int)), 0)
        return max(count, len(self.rounds))

    @property
    def seed(self) -> int | None:
        """The seed, if it was written down."""
        seed = self.settings("run").get("seed")
        return seed if isinstance(seed, int) else None

    def settings(self, name: str) -> Row:
        """A table of the configuration, also of a run made in Python; empty if there is none."""
        return _table(self.config, name) or _table(_table(self.config, "python"), name)

    @property
    def newcomers(self) -> set[int]:
        """The clients that were held out while the others trained, as far as they are known."""
        marked = {c for c, row in enumerate(self.clients) if number(row.get("newcomer"))}
        joined = [e.get("clients") or () for e in self.events if e.get("event") == "admission"]
        return marked.union(*joined)

    @cached_property
    def names(self) -> list[str]:
        """The clients' names, in client order; their numbers where they have none."""
        names = self.data.get("names") or [c.get("name", "") for c in self.clients]
        members = max([len(names), *(len(e.get("groups") or ()) for e in self.rounds[-1:])])
        named = [str(names[c]) if c < len(names) and names[c] else "" for c in range(members)]
        return [
            f"client {name or c}" if not name or name.isdecimal() else name
            for c, name in enumerate(named)
        ]

    @property
    def groups(self) -> list[Any]:
        """Each client's last group, in client order."""
        steps = [e["groups"] for e in self.events if e.get("groups") and "clients" not in e]
        return list(steps[-1]) if steps else []

    @cached_property
    def grouping(self) -> dict[str, Any]:
        """How the run found its groups, as in ``result.json``; empty if it noted nothing."""
        groups = len({g for g in self.groups if g is not None})
        whole = round_samples(self.train_counts, self.settings("train"))
        return grouping_of(self._told, groups, self.status != RUNNING, whole)

    @property
    def warnings(self) -> list[str]:
        """The run's warnings, as sentences."""
        told = warnings_of(self._told, self.status == FINISHED)
        closing = self.result.get("warnings") or ()  # some are about the final scores
        return [*told, *(str(text) for text in closing if text not in told)]

    @property
    def _told(self) -> list[Event]:
        """The beginning and the rounds."""
        return [e for e in (self.begun, *self.rounds) if e]

    @property
    def train_counts(self) -> list[int]:
        """The training samples of the clients that train, as far as they are known."""
        newcomers, rows = self.newcomers, self.clients
        counts = [number(r.get("train")) for c, r in enumerate(rows) if c not in newcomers]
        counts = counts or [sum(row) for row in self.data.get("labels") or ()]
        return [int(n) for n in counts if n is not None]

    def scores(self, title: str) -> list[float | None]:
        """Each client's score at the end ("received", "adapted", "alone"), or so far."""
        key = f"{title}_{self.judged_by}"
        if any(c.get(key) for c in self.clients):
            return [number(c.get(key)) for c in self.clients]
        by_round = [e["client_scores"].get(title) for e in self.rounds if e.get("client_scores")]
        known = [scores for scores in by_round if scores]
        return list(known[-1]) if known else []

    def _read(self) -> Reading:
        return self

    @classmethod
    def of(cls, result: Result, name: str = "") -> Reading:
        """The reading of a result in memory, whether or not it was kept in a folder."""
        from coterie.results.provenance import data_record, size_of, versions

        held = result.newcomers
        came = result.summary.get("newcomers")
        told = [result.begun, *result.history]
        if came and held:
            told.append(cast(Event, {"round": result.rounds, "event": ADMISSION, **came}))
        return cls(
            name=name or str(result.summary["method"]),
            status=FINISHED,
            path=result.directory,
            config={
                "train": asdict(result.plan.training.schedule),
                "run": {"seed": result.plan.seed, "rounds": result.rounds},
            },
            events=[e for e in told if e],
            clients=result.clients,
            result=result.summary,
            data=data_record(result.plan.population),
            sessions=[{"versions": versions(), "model_bytes": size_of(result.plan.start)}],
        )


def read_run(path: str | Path, name: str = "") -> Reading:
    """Read a run directory as far as possible, even one that is running or was stopped.

    What it returns has ``accuracy``, ``groups``, ``to_dataframe()`` and ``figure("groups")``, and a
    notebook shows it, as with a ``Result``. It needs no data, and has no models.
    """
    path = Path(path)
    run = RunDir(path)
    if not run.config.is_file() and not run.events.is_file():
        hint = f": there is no folder {path}" if not path.is_dir() else ": it has no config.toml"
        raise RunDirError(f"{path} is not a run directory{hint}")
    problems: list[str] = []
    # Before reading the files: if no process works on the run now, they do not change any more.
    working, saved = run.at_work(), run.saved()
    events = _events(run.events, problems)
    result = _checked(run.result, from_json, fields_of(Summary), problems)
    clients, exposed = _rows(run.table, problems), _rows(run.exposure, problems)
    for wrong in wrong_tables(run, result.pop(CHECKSUMS, None)):
        problems.append(f"{wrong.name} is damaged (its checksum is wrong), or of another time")
    last = max((e["round"] for e in events if "event" not in e), default=0)
    done = result.get("rounds")
    if isinstance(done, int) and done < last:
        problems.append(f"result.json is of round {done}, before the run was continued: left out")
        result, clients, exposed = {}, [], []
    rounds = {e["round"] for e in events if "event" not in e}
    lacking = (n for n in range(1, max(saved, last) + 1) if n not in rounds)
    if gone := list(islice(lacking, _MOST)):
        problems.append(f"{run.events.name} lacks {numbered(gone)}")
    sessions = _lines(run.sessions, problems)
    status = RUNNING if working else FINISHED if result else STOPPED
    return Reading(
        name=name or path.resolve().name,
        status=status,
        path=path,
        config=_checked(run.config, _config, _CONFIG, problems),
        events=events,
        clients=clients,
        exposed=exposed,
        result=result,
        data=_checked(run.data, from_json, fields_of(Data), problems),
        sessions=_mended(run.sessions, sessions, fields_of(SessionLine), problems),
        scenario=_mapping(path / "scenario.json", from_json, problems),
        problems=problems,
    )


def find_runs(path: Path, is_run: Callable[[Path], bool] | None = None) -> dict[str, Path]:
    """The run directories of a folder, by name: itself, or those below it.

    A folder inside a run is not a run; names are paths below the folder. ``is_run`` decides what is
    a run; by default, a folder with a configuration.
    """
    is_run = is_run or has_config
    if is_run(path):
        return {path.resolve().name: path}
    runs: dict[str, Path] = {}
    _walk(path, path, _DEPTH, is_run, runs)
    return runs


def _walk(
    top: Path, folder: Path, depth: int, is_run: Callable[[Path], bool], runs: dict[str, Path]
) -> None:
    try:
        inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return
    for each in inside:
        if is_run(each):
            runs[each.relative_to(top).as_posix()] = each
        elif depth > 1:
            _walk(top, each, depth - 1, is_run, runs)


def has_config(path: Path) -> bool:
    """Whether a folder belongs to a run that has begun."""
    return os.path.isfile(RunDir(path).config)  # False for a folder without access, too


def number(value: Any) -> float | None:
    """A value as a finite number; None if it is not one.

    >>> number("0.5"), number(""), number(None), number("nan")
    (0.5, None, None, None)
    """
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return converted if converted - converted == 0 else None


# --- files --------------------------------------------------------------------------------------


def _events(path: Path, problems: list[str]) -> list[Event]:
    """The valid events; unknown kinds are left out and listed in ``problems``."""
    events, unknown = [], dict[str, int]()
    for event in _lines(path, problems):
        if not is_count(event.get("round")):
            unknown["without a round"] = unknown.get("without a round", 0) + 1
        elif "event" in event and event["event"] not in KINDS.keys() - {ROUND}:
            kind = f"of kind '{event['event']}'"
            unknown[kind] = unknown.get(kind, 0) + 1
        else:
            events.append(event)
    for kind, count in unknown.items():
        problems.append(f"{path.name} has {count} event{'s' * (count > 1)} {kind}: left out")
    return _mended(path, events, fields_of(Event), problems)


def _mended(
    path: Path, trees: Sequence[Row], fields: Mapping[str, Any], problems: list[str]
) -> list[Any]:
    """Tables without values of a wrong type, each field of which is listed once."""
    bad: list[str] = []
    kept = [mended(tree, fields, bad) for tree in trees]
    for key in dict.fromkeys(bad):
        problems.append(f"{path.name}: '{key}' has values of the wrong type, which are left out")
    return kept


def _checked(
    path: Path,
    parse: Callable[[str], Any],
    fields: Mapping[str, Any],
    problems: list[str],
) -> Any:
    return _mended(path, [_mapping(path, parse, problems)], fields, problems)[0]


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a growing file; the last may be torn, others like it are listed as damaged."""
    lines = read_lines(_data(path, problems), JSON_LINES)
    if count := len(lines.damaged):
        problems.append(f"{path.name} has {count} damaged line{'s' * (count > 1)}: left out")
    return [line.value for line in lines.every]


def _config(text: str) -> dict[str, Any]:
    check_note(text.encode())
    config = tomllib.loads(text)
    if not config:
        raise ValueError("it has no tables")
    return config


def _mapping(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    text = _text(path, problems)
    if not text.strip():
        return {}
    try:
        tree = parse(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{path.name} cannot be read: it has no table")
    return tree if isinstance(tree, dict) else {}


def _rows(path: Path, problems: list[str]) -> list[dict[str, str]]:
    try:
        rows = list(csv.DictReader(_text(path, problems).splitlines()))
    except csv.Error as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return []
    # Cells beyond the last column have no name, and cells missing in a torn row have no text.
    return [{str(k): v or "" for k, v in row.items() if k is not None} for row in rows]


def _text(path: Path, problems: list[str]) -> str:
    """A file's text, "" if it is missing; invalid bytes become question marks."""
    return _data(path, problems).decode(errors="replace")


def _data(path: Path, problems: list[str]) -> bytes:
    """A file's content; empty if it is missing."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return b""


def _table(config: Row, name: str) -> Row:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}
