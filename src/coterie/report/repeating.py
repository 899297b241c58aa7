"""How to repeat a run: the commands, the exact configuration, versions and circumstances."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from coterie.errors import RunDirError
from coterie.report.reading import FINISHED, RUNNING, Reading
from coterie.report.rendering import render
from coterie.results.rundir import ENGINE
from coterie.results.toml import to_toml


def repeat(reading: Reading, id: str, level: int) -> Markup:
    """The block with the commands, the versions and the exact configuration."""
    first = reading.sessions[0] if reading.sessions else {}
    commands = [("Started with", command) for command in [_started(first)] if command]
    python, serving = from_python(reading), is_served(reading)
    if reading.config and not python:
        if not serving:
            commands.append(("Repeat it with", f"coterie run {_config_path(reading)} --dir again"))
        if reading.status not in (FINISHED, RUNNING) and (command := go_on(reading)):
            commands.append(("Continue it with", command))
    return render(
        "run/repeat.html",
        id=id,
        commands=commands,
        from_python=python,
        is_served=serving,
        facts=_circumstances(reading),
        config=to_toml(reading.config),
    )


def _circumstances(reading: Reading) -> list[tuple[str, Any]]:
    last = reading.sessions[-1] if reading.sessions else {}
    rows: list[tuple[str, Any]] = [("method", reading.method)]
    if reading.seed is not None:
        rows.append(("seed", reading.seed))
    if from_python(reading):  # the configuration of other runs has it
        rows.append(("rounds", reading.planned))
        train = reading.settings("train")
        settings = [f"{k} {v}" for k, v in train.items() if v is not None and v != {}]
        rows += [("training", ", ".join(settings))] if settings else []
    whens = [str(s["at"]) for s in reading.sessions if s.get("at")]
    if whens:
        shown = ", then ".join(whens).replace("T", " ").replace("+00:00", " UTC")
        rows.append(("started" if len(whens) == 1 else "worked on", shown))
    if last.get("engine"):
        workers = f", {last['workers']} workers" if last.get("workers") else ""
        rows.append(("engine", f"{last['engine']}{workers}"))
    if last.get("system"):
        rows.append(("system", last["system"]))
    versions = last.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    if reading.path is not None:
        rows.append(("folder", reading.path))
    return rows


def _started(session: Mapping[str, Any]) -> str:
    words = _words(session)
    return shlex.join(["coterie", *words]) if words else ""


def go_on(reading: Reading) -> str:
    """The command that continues a stopped run; "" if there is none."""
    try:
        words, folder = command(reading)
    except RunDirError:
        return ""
    if words[0] == "run":
        return shlex.join(["coterie", "run", "--resume", str(reading.path)])
    return f"cd {shlex.quote(str(folder))} && {shlex.join(['coterie', *words])}"


def why_not(reading: Reading) -> str:
    """Why no command continues a run, and what to do instead; "" if a command does."""
    try:
        command(reading)
    except RunDirError as error:
        return str(error)
    return ""


def command(reading: Reading) -> tuple[list[str], Path]:
    """The arguments that make Coterie continue a run, and the folder to run it in.

    Of the run's files it uses only the arguments of ``coterie serve``, and only if they lead to
    this run.
    """
    if reading.path is None or "python" in reading.config:
        raise RunDirError(
            f"{reading.name} was made in Python: continue it there, with simulate(..., "
            "directory=..., resume=True)"
        )
    path = reading.path.resolve()
    last = reading.sessions[-1] if reading.sessions else {}
    arguments = _words(last)
    if arguments[:1] != ["serve"]:
        if (path / ENGINE).is_dir():
            raise RunDirError(
                f"{reading.name} is a federation, and its coterie serve command is not known: give "
                "that command again"
            )
        return ["run", "--resume", str(path)], path.parent
    folder = Path(str(last.get("folder")))
    directories = given_for("--dir", arguments)
    leads = bool(directories) and (folder / directories[-1]).resolve() == path
    if not folder.is_absolute() or not folder.is_dir() or not leads:
        raise RunDirError(
            f"{reading.name} was served from a folder that does not exist any more, or with "
            "another "
            "--dir: give its coterie serve command again"
        )
    return arguments, folder


def is_served(reading: Reading) -> bool:
    """Whether the run was a federation, with its clients in other processes."""
    served = any(_words(session)[:1] == ["serve"] for session in reading.sessions)
    return served or (reading.path is not None and (reading.path / ENGINE).is_dir())


def given_for(option: str, words: Sequence[str]) -> list[str]:
    """All values of an option in a command.

    >>> given_for("--dir", ["serve", "--dir", "a", "--dir=b"])
    ['a', 'b']
    """
    return [
        after if word == option else word.removeprefix(f"{option}=")
        for word, after in pairwise([*words, ""])
        if word == option or word.startswith(f"{option}=")
    ]


def _words(session: Mapping[str, Any]) -> list[str]:
    """The arguments of a process; empty if they are not known."""
    words = session.get("argv")
    known = isinstance(words, list) and all(isinstance(w, str) for w in words)
    return list(words) if known and words else []


def _config_path(reading: Reading) -> str:
    return shlex.quote(str(reading.path / "config.toml")) if reading.path else "config.toml"


def from_python(reading: Reading) -> bool:
    """Whether a run was made from Python, so that no command repeats it."""
    return "python" in reading.config or reading.path is None
