"""How to repeat a run: the commands, the exact configuration, versions and circumstances."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from coterie.report.markup import Markup, joined, tag
from coterie.report.reading import FINISHED, RUNNING, Reading
from coterie.run.toml import to_toml


def repeat(reading: Reading, id: str, level: int) -> Markup:
    """The commands, versions and the exact configuration."""
    first = reading.sessions[0] if reading.sessions else {}
    commands = [("Started with", command) for command in [_started(first)] if command]
    python = from_python(reading)
    if reading.config and not python:
        commands.append(("Repeat it with", f"coterie run {_config_path(reading)} --dir again"))
        if reading.status not in (FINISHED, RUNNING):
            commands.append(("Continue it with", go_on(reading)))
    config = to_toml(reading.config)
    return tag(
        "div",
        [_command(title, text) for title, text in commands],
        tag("p", "It was made from Python: continue or repeat it with the same call.")
        if python
        else None,
        _circumstances(reading),
        tag(
            "details",
            tag("summary", "The exact configuration"),
            copied(config, "config.toml"),
            data_keep="config",
        )
        if config
        else None,
        id=id,
        class_="block",
    )


def _command(title: str, text: str) -> Markup:
    return joined(tag("p", f"{title}:", class_="label"), copied(text, title.lower()))


def copied(text: str, what: str) -> Markup:
    """Text in a box with a button that copies it."""
    button = tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy: {what}")
    box = tag("pre", tag("code", text), tabindex="0", role="group", aria_label=what)
    return tag("div", button, box, class_="copied")


def _circumstances(reading: Reading) -> Markup:
    last = reading.sessions[-1] if reading.sessions else {}
    rows: list[tuple[str, Any]] = [("method", reading.method)]
    if reading.seed is not None:
        rows.append(("seed", reading.seed))
    if reading.sessions:
        whens = [
            str(s.get("at", "")).replace("T", " ").replace("+00:00", " UTC")
            for s in reading.sessions
        ]
        rows.append(
            ("started" if len(whens) == 1 else "worked on", ", then ".join(filter(None, whens)))
        )
        workers = f", {last['workers']} workers" if last.get("workers") else ""
        rows.append(("engine", f"{last.get('engine', 'unknown')}{workers}"))
        rows.append(("system", last.get("system", "unknown")))
    versions = last.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    if reading.path is not None:
        rows.append(("folder", reading.path))
    return tag("dl", [(tag("dt", k), tag("dd", str(v))) for k, v in rows], class_="facts")


def _started(session: Mapping[str, Any]) -> str:
    argv = session.get("argv")
    return shlex.join(["coterie", *map(str, argv)]) if isinstance(argv, list) else ""


def go_on(reading: Reading) -> str:
    """The command that continues a run that was stopped; "" for one made from Python."""
    if from_python(reading):
        return ""
    return f"coterie run --resume {shlex.quote(str(reading.path))}"


def _config_path(reading: Reading) -> str:
    return shlex.quote(str(reading.path / "config.toml")) if reading.path else "config.toml"


def from_python(reading: Reading) -> bool:
    """Whether it was made by ``simulate``, which no file can repeat."""
    return "python" in reading.config or reading.path is None
