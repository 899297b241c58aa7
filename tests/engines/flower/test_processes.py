"""Engine processes: they start, are looked at, and end with whoever started them."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import coterie
from coterie.engines.flower.processes import Child, environment, free_port, tail, wait_for_port
from coterie.errors import EngineError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes and groups as POSIX has them")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends orphans")

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
LISTENS = """
import socket, sys, time
held = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(60)
"""
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def python(code, *arguments):
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *map(str, arguments)]


def said(log, seconds=10):
    """The first line of a log, once it is there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if log.exists() and "\n" in log.read_text():
            return log.read_text().splitlines()[0]
        time.sleep(0.01)
    raise AssertionError(f"nothing in {log}")


def gone(pid, seconds=10):
    """Whether a process ends, or is a zombie, within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def start(tmp_path):
    children = []

    def starting(code, *arguments, name="log"):
        child = Child(python(code, *arguments), tmp_path / name, environment(tmp_path / "home"))
        children.append(child)
        return child

    yield starting
    for child in children:
        child.stop(0)


def test_a_child_ends_by_itself_with_its_code(start):
    child = start("import sys; print('bye'); sys.exit(7)")
    assert child.wait(10)
    assert child.ended == 7
    assert not child.alive
    assert child.ended == 7  # a look takes nothing away
    assert child.stop() == 7
    assert child.ended == 7


def test_a_child_that_was_killed_says_by_what(start):
    child = start(SLEEPS)
    said(child.log)
    assert child.alive
    assert child.ended is None
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(10)
    assert child.ended == -signal.SIGKILL
    assert child.stop() == -signal.SIGKILL


def test_stop_asks_first(start):
    code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    print("up", flush=True)
    time.sleep(60)
    """
    child = start(code)
    said(child.log)
    assert child.stop(10) == 3
    assert child.stop(10) == 3


@linux
def test_stop_kills_the_group_of_one_who_does_not_listen(start):
    child = start(STUBBORN)
    grandchild = int(said(child.log))
    begun = time.monotonic()
    assert child.stop(0.1) == -signal.SIGKILL
    assert time.monotonic() - begun < 5
    assert gone(grandchild)


@linux
def test_stop_ends_what_a_dead_leader_left_in_its_group(start):
    child = start("""
    import os, time
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
    """)
    grandchild = int(said(child.log))
    assert child.wait(10)
    assert not gone(grandchild, 0.1)
    assert child.stop() == 0
    assert gone(grandchild)


def test_a_child_has_a_session_of_its_own(start):
    child = start(SLEEPS)
    said(child.log)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)


# Coterie's package without its __init__, which would import torch.
PARENT = """
import sys, time, types
from pathlib import Path
package = sys.modules["coterie"] = types.ModuleType("coterie")
package.__path__ = [{package!r}]
from coterie.engines.flower.processes import Child
child = Child({command!r}, Path({log!r}), {{}})
print(child.pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("hit", flush=True)
    time.sleep(60)
"""


def parent_of(log):
    """A process that starts a child and then sleeps."""
    package = str(Path(coterie.__file__).parent)
    code = PARENT.format(package=package, command=python(SLEEPS), log=str(log))
    return [sys.executable, "-I", "-S", "-c", code]


@linux
def test_a_child_dies_with_its_killed_parent(tmp_path):
    log = tmp_path / "log"
    parent = subprocess.Popen(
        parent_of(log), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(parent.stdout.readline())
        assert said(log) == "up"
        assert not gone(child, 0.05)
    finally:
        parent.kill()
        parent.communicate()
    assert gone(child)


@linux
def test_a_launcher_whose_parent_is_gone_starts_nothing(tmp_path):
    from coterie.engines import child_processes

    nobody = os.getpid() + 1  # not the launcher's parent
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            child_processes.__file__,
            str(nobody),
            "touch",
            str(tmp_path / "x"),
        ]
    )
    assert done.returncode == 1
    assert not (tmp_path / "x").exists()


@linux
def test_ctrl_c_in_the_terminal_does_not_reach_a_child(tmp_path):
    """A parent with a terminal of its own; the terminal's Ctrl-C goes to its whole foreground."""
    import pty

    log = tmp_path / "log"
    command = parent_of(log)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    try:
        child = int(heard(terminal, b"\n").split()[0])
        assert said(log) == "up"
        os.write(terminal, b"\x03")
        heard(terminal, b"hit")
        assert not gone(child, 0.2)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert gone(child)


def heard(terminal, word, seconds=20):
    text, until = b"", time.monotonic() + seconds
    while word not in text:
        ready, _, _ = select.select([terminal], [], [], until - time.monotonic())
        assert ready, text
        text += os.read(terminal, 1000)
    return text


def test_a_command_that_is_not_there(start, tmp_path):
    child = Child(["no-such-command"], tmp_path / "log", environment(tmp_path))
    with pytest.raises(EngineError, match=r"ended with exit code 1 .*\n?cannot start no-such-comm"):
        wait_for_port("127.0.0.1", free_port(), child, 10)
    child.stop()


def test_waiting_for_a_port(start):
    port = free_port()
    child = start(LISTENS, port)
    wait_for_port("127.0.0.1", port, child, 20)
    assert child.alive


def test_waiting_for_one_who_dies_or_stays_silent(start):
    port = free_port()
    child = start("print('first', flush=True); raise SystemExit('no such database')")
    with pytest.raises(EngineError, match=r"(?s)exit code 1 before.*first.*no such database"):
        wait_for_port("127.0.0.1", port, child, 20)
    silent = start(SLEEPS, name="silent")
    said(silent.log)
    with pytest.raises(EngineError, match=r"(?s)did not listen on 127.0.0.1:\d+ within 0.2 s.*up"):
        wait_for_port("127.0.0.1", port, silent, 0.2)


def test_a_log_is_private_and_appended_to(start):
    first = start("print('one')")
    first.wait(10)
    second = start("print('two')")
    second.wait(10)
    assert first.log.read_text() == "one\ntwo\n"
    assert first.log.stat().st_mode & 0o777 == 0o600


def test_the_tail_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert "cannot be read" in tail(log)
    log.write_bytes(b"")
    assert "empty" in tail(log)
    log.write_bytes(b"\x1b[92mINFO \x1b[0m: one\n\xfftwo\n\n")
    assert tail(log) == "INFO : one\n\N{REPLACEMENT CHARACTER}two"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(log, 2) == "line 99998\nline 99999"


def test_the_environment_is_closed_to_the_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org, localhost")
    monkeypatch.delenv("no_proxy", raising=False)
    env = environment(tmp_path)
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in env
    assert env["FLWR_HOME"] == str(tmp_path)
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,localhost,127.0.0.1,::1"
    assert env["HTTPS_PROXY"] == "http://proxy:3128"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert os.environ["FLWR_HOME"] == "/elsewhere"
    monkeypatch.setenv("NO_PROXY", "*")
    assert environment(tmp_path)["NO_PROXY"] == "*"


def test_flower_reads_the_settings_by_these_names(tmp_path):
    """With the extra: what the installed release makes of the environment."""
    pytest.importorskip("flwr", reason="needs coterie[flower]")
    code = """
    import importlib, json
    from flwr.supercore import telemetry, update_check, utils
    link = importlib.import_module("flwr.superlink.cli.flower_superlink")
    asked = []
    update_check._start_flwr_update_check_refresh_thread = asked.append
    telemetry.urllib.request.urlopen = lambda *a, **k: asked.append(a)
    update_check.warn_if_flwr_update_available("x")
    said = telemetry.create_event(telemetry.EventType.PING, None)
    print(json.dumps([str(utils.get_flwr_home()), asked, said,
                      link._runtime_dependency_install_default()]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [str(tmp_path), [], "disabled", False]


def test_free_ports_are_free():
    import socket

    for host in ("127.0.0.1", "::1"):
        try:
            port = free_port(host)
        except OSError:
            continue  # no IPv6 here
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            pass
