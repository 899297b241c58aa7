"""The how-to on real federations: its commands as written, its files, its links."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.app import all_commands
from coterie.experiment.config import parse
from federated import Process, events, free_port, until
from fenced import check_command

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto" / "deploy.md"
EXAMPLES = ROOT / "examples" / "deploy"
SOURCE = ROOT / "src" / "coterie"
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", HOWTO.read_text(), re.DOTALL | re.MULTILINE)


def typed() -> list[tuple[str, list[str]]]:
    """The shell's blocks: the machine that the first line names, and its commands."""
    found = []
    for block in blocks("sh"):
        machine, *commands = block.strip().splitlines()
        assert machine.startswith("# "), machine
        found.append((machine[2:], commands))
    return found


def test_commands_of_the_page_have_only_options_that_exist():
    lines = [line for _, commands in typed() for line in commands]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("coterie ")]
    assert {words[0] for words in ours} == {"keys", "serve", "join"}
    for words in ours:
        check_command(words)
    kinds = {line.split()[0] for line in lines}
    assert kinds == {"coterie", "scp", "python", "rm"}
    options = re.findall(r"`(--[a-z-]+)", HOWTO.read_text())
    assert len(options) > 10
    ours_have = _options(all_commands()) | {"--help"}
    assert not set(options) - ours_have


def _options(command: Any) -> set[str]:
    if hasattr(command, "commands"):
        return set().union(*(_options(inner) for inner in command.commands.values()))
    return {name for parameter in command.params for name in parameter.opts}


def test_the_configurations_are_the_files_and_are_accepted():
    whole, privacy = blocks("toml")
    assert whole == (EXAMPLES / "hospitals.toml").read_text()
    from coterie.deploy.serve import _check

    _check(parse(tomllib.loads(whole)))
    asked = parse(tomllib.loads(whole + privacy))
    _check(asked)
    assert asked.privacy.secure
    assert (asked.run.real_deadline, asked.run.min_reports) == (60.0, 2)


def test_the_python_of_the_page_is_in_the_files():
    loader, predict = blocks("python")
    assert loader in (EXAMPLES / "records.py").read_text()
    assert predict == (EXAMPLES / "predict.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        ast.parse(path.read_text())


def test_the_sentences_of_the_troubleshooting_table_are_said():
    files = [
        p
        for d in ("deploy", "engines/flower", "experiment", "results")
        for p in (SOURCE / d).glob("*.py")
    ]
    source = "".join(path.read_text() for path in files)
    source = re.sub(r'"\n\s*f?"', "", source)  # one sentence on several lines
    table = HOWTO.read_text().partition("## When something is wrong")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    sentences = [said for row in rows for said in re.findall(r"`([^`]+)`", row)]
    assert len(sentences) > 15
    for said in sentences:
        parts = [p.strip() for p in re.split(r"…|\d+", said) if len(p) > 6 and "/" not in p]
        for part in parts:
            assert part in source, part


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", HOWTO.read_text()):
        name, _, anchor = target.partition("#")
        path = (HOWTO.parent / name).resolve() if name else HOWTO
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize(("name", "restart"), [("serve", "on-failure"), ("join", "always")])
def test_units_start_our_commands_and_are_hardened(name, restart):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((EXAMPLES / f"coterie-{name}.service").read_text())
    service = unit["Service"]
    binary, *words = shlex.split(service["ExecStart"])
    assert binary == "/opt/coterie/bin/coterie"
    assert words[0] == name
    check_command(words)
    assert service["Restart"] == restart
    assert service["User"] == "coterie"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["ReadWritePaths"] == service["WorkingDirectory"] == "/var/lib/coterie"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_compose_file_runs_the_commands_of_the_page():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((EXAMPLES / "compose.yml").read_text())["services"]
    assert set(services) == {"server", "north", "south", "west"}
    pages = {machine.partition(".")[0]: c for machine, c in typed() if c[0].startswith("coterie j")}
    for name, service in services.items():
        check_command(service["command"])
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        if name != "server":
            assert ["coterie", *service["command"]] == shlex.split(pages[name][0])
    build = services["server"]["build"]
    context = (EXAMPLES / build["context"]).resolve()
    assert context == ROOT
    for line in (context / build["dockerfile"]).read_text().splitlines():
        if line.startswith("COPY"):
            assert all((context / source).exists() for source in line.split()[1:-1]), line


class Machines:
    """The page's machines: a folder each, the server on loopback."""

    def __init__(self, root: Path) -> None:
        self.root, self.port, self.running = root, free_port(), dict[str, Process]()
        self.env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def place(self, machine: str) -> Path:
        folder = self.root if machine == "anywhere" else self.root / machine
        folder.mkdir(exist_ok=True)
        return folder

    def type(self, machine: str, command: str) -> None:
        """One line at one machine; what serves or joins goes on, everything else ends."""
        here = command.replace("fl.example.org:8443", f"127.0.0.1:{self.port}")
        if command.startswith("scp "):  # a machine is a folder here
            _, how, *sources, target = command.split()
            host, _, path = target.partition(":")
            here = f"cp {how} {' '.join(sources)} {self.place(host) / path}"
        if command.startswith("coterie serve"):
            here += f" --host 127.0.0.1 --port {self.port}"
        if not command.startswith(("coterie serve", "coterie join")):
            subprocess.run(here, shell=True, check=True, env=self.env, cwd=self.place(machine))
            return
        words = shlex.split(here)[1:]
        before = Path.cwd()
        os.chdir(self.place(machine))
        try:
            self.running[machine] = Process(words, self.root / f"{machine}.log")
        finally:
            os.chdir(before)

    def close(self) -> None:
        for process in self.running.values():
            process.end()


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_the_page_as_written(tmp_path):
    """From keys to personal models; a fourth hospital, a killed server, a new certificate."""
    pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
    machines, steps = Machines(tmp_path), typed()
    hospitals = [f"{name}.example.org" for name in ("north", "south", "west", "east")]
    server = machines.place("fl.example.org")
    (tmp_path / "make_data.py").write_text((EXAMPLES / "make_data.py").read_text())
    (server / "hospitals.toml").write_text((EXAMPLES / "hospitals.toml").read_text())
    for name in hospitals:
        (machines.place(name) / "member").mkdir()
    (tmp_path / hospitals[0] / "predict.py").write_text((EXAMPLES / "predict.py").read_text())
    (tmp_path / hospitals[2] / "records.py").write_text((EXAMPLES / "records.py").read_text())
    try:
        _walk(machines, steps, hospitals, server)
    finally:
        machines.close()


def _walk(
    machines: Machines, steps: list[tuple[str, list[str]]], hospitals: list[str], server: Path
) -> None:
    def arrived() -> bool:
        return any(e.get("event") == "arrival" for e in events(server / "run"))

    later = iter(steps)
    for machine, commands in later:
        if commands[0].startswith("python predict"):
            break
        for command in commands:
            machines.type(machine, command)
        if machine == "anywhere":  # what was made goes to where it belongs
            for name in hospitals:
                made = machines.root / name.partition(".")[0]
                for path in made.iterdir():
                    path.rename(machines.root / name / path.name)
    serving = next(c for m, [c, *_] in steps if c.startswith("coterie serve"))
    machines.running["fl.example.org"].says("round 2/20", 300)
    rest = list(later)
    for machine, commands in rest[:3]:  # east
        for command in commands:
            machines.type(machine, command)
    until(arrived, "east is admitted", 300)
    machines.running["fl.example.org"].kill()
    machines.type("fl.example.org", serving)
    assert machines.running["fl.example.org"].wait(600) == 0, machines.running[
        "fl.example.org"
    ].text
    for name in hospitals:
        machines.running[name].says("the run is over", 60)
        assert (machines.root / name / "member" / "model.json").exists()
    predicted = subprocess.run(
        [sys.executable, "predict.py", "north.csv"],
        cwd=machines.root / hospitals[0],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    true = (machines.root / hospitals[0] / "north.csv").read_text().splitlines()[1:]
    right = [t.endswith("," + p.split()[0]) for t, p in zip(true, predicted, strict=True)]
    assert sum(right) > 0.85 * len(right)
    _again_with_secure_sums(machines, rest[3:], hospitals, server)


def _again_with_secure_sums(
    machines: Machines, rest: list[tuple[str, list[str]]], hospitals: list[str], server: Path
) -> None:
    """The same clients, which have stayed, under a new certificate and the page's [privacy]."""
    for machine, commands in rest:
        for command in commands:
            machines.type(machine, command)
    for name in hospitals:  # who is in the roster has changed: join again with the new one
        short = name.partition(".")[0]
        source = machines.root / "office" / "federation" / "clients" / short / "federation.json"
        (machines.root / name / "member" / "keys" / "federation.json").write_text(
            source.read_text()
        )
        machines.running[name].end()
    for machine, commands in typed():
        if commands[0].startswith("coterie join"):
            machines.type(machine, commands[0])
    whole, privacy = blocks("toml")
    (server / "secure.toml").write_text(whole + privacy)
    machines.type("fl.example.org", "coterie serve secure.toml --dir run2 --set run.rounds=1")
    assert machines.running["fl.example.org"].wait(600) == 0, machines.running[
        "fl.example.org"
    ].text
    assert "The server saw only sums of 4 clients" in machines.running["fl.example.org"].text
