"""Reading run directories as they are found: finished, going on, torn, crashed, or of long ago.

Whatever cannot be read is left out and said in ``problems``; only a folder that is no run at all is
refused.
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
    Session,
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
_MOST = 1000  # missing rounds that are looked for
_DEPTH = 4  # how deep under a folder runs are looked for

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reading(Notebook):
    """One run, as far as it can be read.

    ``status`` is "finished", "running" or "stopped" (also by a crash). ``events`` are the lines of
    ``events.jsonl`` that make sense, of kinds that are known; ``rounds`` those of them that are
    rounds, with scores that came later. ``clients`` and ``exposed`` are rows of the tables written
    at the end, ``result`` the summary, ``data`` what is known of clients' data; all are empty if
    they are not there. ``problems`` are sentences.
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
    sessions: Sequence[Session] = ()
    scenario: Row = field(default_factory=dict)
    problems: Sequence[str] = ()

    @cached_property
    def rounds(self) -> list[Event]:
        """The rounds, in order; of a round that is there twice, the later one."""
        found = {event["round"]: event for event in rounds_of(self.events)}
        return [found[number] for number in sorted(found)]

    @property
    def begun(self) -> Event:
        """What was before the first round, if anything was."""
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
        """Which of the two scores: "received" or "adapted"."""
        told = [self.result, *reversed(self.sessions)]
        found = (str(each["headline"]) for each in told if each.get("headline"))
        return next(found, "received")

    @property
    def accuracy(self) -> float:
        """The mean score of the received model at the end, or of late (R² for a regression)."""
        told = [self.result, *reversed(self.rounds)]
        found: Row = next((e["received"] for e in told if e.get("received")), {})
        if self.judged_by not in found:
            raise ConfigError(f"{self.name}: no client has been scored")
        return float(found[self.judged_by])

    @property
    def planned(self) -> int:
        """How many rounds were asked for."""
        asked = [s.get("rounds") for s in self.sessions[-1:]]
        asked.append(self.settings("run").get("rounds"))
        found = next((n for n in asked if isinstance(n, int)), 0)
        return max(found, len(self.rounds))

    @property
    def seed(self) -> int | None:
        """The seed, if it was written down."""
        found = self.settings("run").get("seed")
        return found if isinstance(found, int) else None

    def settings(self, name: str) -> Row:
        """A table of the configuration, also of a run made in Python; empty if there is none."""
        return _table(self.config, name) or _table(_table(self.config, "python"), name)

    @property
    def newcomers(self) -> set[int]:
        """Who was held out while the others trained, as far as it is known."""
        marked = {c for c, row in enumerate(self.clients) if number(row.get("newcomer"))}
        joined = [e.get("clients") or () for e in self.events if e.get("event") == "admission"]
        return marked.union(*joined)

    @property
    def names(self) -> list[str]:
        """What clients are called, in client order; those without a name by their number."""
        told = self.data.get("names") or [c.get("name", "") for c in self.clients]
        members = max([len(told), *(len(e.get("groups") or ()) for e in self.rounds[-1:])])
        named = [str(told[c]) if c < len(told) and told[c] else "" for c in range(members)]
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
        """How the run came to its groups, as in ``result.json``; empty if nothing is noted."""
        groups = len({g for g in self.groups if g is not None})
        whole = round_samples(self._train_counts, self.settings("train"))
        return grouping_of(self._told, groups, self.status != RUNNING, whole)

    @property
    def warnings(self) -> list[str]:
        """What the run warned of, in sentences."""
        return warnings_of(self._told, self.status == FINISHED)

    @property
    def _told(self) -> list[Event]:
        """The beginning and the rounds."""
        return [e for e in (self.begun, *self.rounds) if e]

    @property
    def _train_counts(self) -> list[int]:
        """How many training samples those who train have, as far as it is known."""
        came, rows = self.newcomers, self.clients
        counts = [number(r.get("train")) for c, r in enumerate(rows) if c not in came]
        counts = counts or [sum(row) for row in self.data.get("labels") or ()]
        return [int(n) for n in counts if n is not None]

    def scores(self, title: str) -> list[float | None]:
        """Each client's own score at the end ("received", "adapted", "alone"), or of late."""
        key = f"{title}_{self.judged_by}"
        if any(c.get(key) for c in self.clients):
            return [number(c.get(key)) for c in self.clients]
        told = [e["client_scores"].get(title) for e in self.rounds if e.get("client_scores")]
        found = [own for own in told if own]
        return list(found[-1]) if found else []

    def _read(self) -> Reading:
        return self

    @classmethod
    def of(cls, result: Result, name: str = "") -> Reading:
        """A result of this process, whether it was kept in a folder or not."""
        from coterie.results.provenance import described, size_of, versions

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
            data=described(result.plan.population),
            sessions=[{"versions": versions(), "model_bytes": size_of(result.plan.start)}],
        )


def read_run(path: str | Path, name: str = "") -> Reading:
    """A run directory, read as far as it goes: also one that is going on, or was stopped.

    What it gives has ``accuracy``, ``groups``, ``to_dataframe()`` and ``figure("groups")``, and a
    notebook shows it, as with a ``Result``. It needs no data, and has no models.
    """
    path = Path(path)
    run = RunDir(path)
    if not run.config.is_file() and not run.events.is_file():
        hint = f": there is no folder {path}" if not path.is_dir() else ": it has no config.toml"
        raise RunDirError(f"{path} is not a run directory{hint}")
    problems: list[str] = []
    # Looked at before the files: those of a run that nobody works on are as it left them.
    working, saved = run.at_work(), run.saved()
    events = _events(run.events, problems)
    result = _checked(run.result, from_json, fields_of(Summary), problems)
    clients, exposed = _rows(run.table, problems), _rows(run.exposure, problems)
    for wrong in wrong_tables(run, result.pop(CHECKSUMS, None)):
        problems.append(f"{wrong.name} is damaged (its checksum is wrong), or of another time")
    last = max((e["round"] for e in events if "event" not in e), default=0)
    told = result.get("rounds")
    if isinstance(told, int) and told < last:
        problems.append(f"result.json is of round {told}, before the run was continued: left out")
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
        sessions=_mended(run.sessions, sessions, fields_of(Session), problems),
        scenario=_mapping(path / "scenario.json", from_json, problems),
        problems=problems,
    )


def find_runs(path: Path, is_run: Callable[[Path], bool] | None = None) -> dict[str, Path]:
    """The run directories of a folder, by name: itself, or those below it.

    A folder inside a run is none; names are paths below the folder. ``is_run`` says what counts as
    one, if not having a configuration.
    """
    is_run = is_run or has_config
    if is_run(path):
        return {path.resolve().name: path}
    found: dict[str, Path] = {}
    _walk(path, path, _DEPTH, is_run, found)
    return found


def _walk(
    top: Path, folder: Path, depth: int, is_run: Callable[[Path], bool], found: dict[str, Path]
) -> None:
    try:
        inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return
    for each in inside:
        if is_run(each):
            found[each.relative_to(top).as_posix()] = each
        elif depth > 1:
            _walk(top, each, depth - 1, is_run, found)


def has_config(path: Path) -> bool:
    """Whether a folder is that of a run which has begun."""
    return os.path.isfile(RunDir(path).config)  # also of a folder that may not be entered: no


def number(value: Any) -> float | None:
    """A number, wherever it was written; None if it is none.

    >>> number("0.5"), number(""), number(None), number("nan")
    (0.5, None, None, None)
    """
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found - found == 0 else None


# --- files --------------------------------------------------------------------------------------


def _events(path: Path, problems: list[str]) -> list[Event]:
    """The events that make sense; unknown kinds are left out, and said."""
    found, strange = [], dict[str, int]()
    for event in _lines(path, problems):
        if not is_count(event.get("round")):
            strange["without a round"] = strange.get("without a round", 0) + 1
        elif "event" in event and event["event"] not in KINDS.keys() - {ROUND}:
            kind = f"of kind '{event['event']}'"
            strange[kind] = strange.get(kind, 0) + 1
        else:
            found.append(event)
    for kind, count in strange.items():
        problems.append(f"{path.name} has {count} event{'s' * (count > 1)} {kind}: left out")
    return _mended(path, found, fields_of(Event), problems)


def _mended(
    path: Path, trees: Sequence[Row], fields: Mapping[str, Any], problems: list[str]
) -> list[Any]:
    """Tables without what is not as it should be, which is said once for each field."""
    bad: list[str] = []
    found = [mended(tree, fields, bad) for tree in trees]
    for key in dict.fromkeys(bad):
        problems.append(
            f"{path.name}: '{key}' is not as it should be, and left out where it is not"
        )
    return found


def _checked(
    path: Path,
    parse: Callable[[str], Any],
    fields: Mapping[str, Any],
    problems: list[str],
) -> Any:
    return _mended(path, [_mapping(path, parse, problems)], fields, problems)[0]


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a file that grows; the last may be torn, others are said to be damaged."""
    found = read_lines(_data(path, problems), JSON_LINES)
    if count := len(found.damaged):
        problems.append(f"{path.name} has {count} damaged line{'s' * (count > 1)}: left out")
    return [line.value for line in found.every]


def _config(text: str) -> dict[str, Any]:
    check_note(text.encode())
    found = tomllib.loads(text)
    if not found:
        raise ValueError("it has no tables")
    return found


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
    # Cells beyond the last column have no name, those that a torn row lacks no text.
    return [{str(k): v or "" for k, v in row.items() if k is not None} for row in rows]


def _text(path: Path, problems: list[str]) -> str:
    """A file's text, "" if there is none; bytes that are no text become question marks."""
    return _data(path, problems).decode(errors="replace")


def _data(path: Path, problems: list[str]) -> bytes:
    """A file's content, nothing if there is none."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return b""


def _table(config: Row, name: str) -> Row:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
