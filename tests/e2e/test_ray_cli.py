"""Runs on Ray from the command line: a Ray of their own, a cluster of two, Ctrl-C."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from coterie.experiment.export import reopen

pytest.importorskip("ray", reason="Ray is not installed: pip install 'coterie[ray]'")
pytestmark = pytest.mark.e2e

BIN = Path(sys.executable).parent
HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "cluster.md"
LONG = ("--clients", 4, "--set", "data.samples=400", "--epochs", 40, "--method", "fedper")
LONG = (*LONG, "--set", "evaluation.adapt_epochs=0", "--batch-size", 8)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    """Nobody's token but the test's."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def same_models(one, other, clients=4):
    one, other = reopen(Path(one)), reopen(Path(other))
    return all(torch.equal(one.weights(c).vector, other.weights(c).vector) for c in range(clients))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_the_user_and_continued_elsewhere(cli, start, number):
    process = start("run", *LONG, "--engine", "ray", "--workers", 2, "--rounds", 1000, "--dir", "r")
    for line in process.stderr:
        if "round 2/1000" in line:
            break
    group = members(process.pid)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal tells the whole group
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    lines = err.splitlines()
    assert [line for line in lines if not line.startswith("fedper  round ")] == lines[-1:]
    assert lines[-1].endswith("coterie run --resume r")
    gone(group)
    assert not Path("home/.ray").exists()  # its token was in no file
    done = max(int(p.stem[-6:]) for p in Path("r/checkpoints").glob("*.json"))
    assert cli("run", "--resume", "r", "--rounds", done + 1, "--engine", "loop", "-q").code == 0
    whole = cli("run", *LONG, "--rounds", done + 1, "--engine", "loop", "--dir", "whole", "-q")
    assert whole.code == 0
    assert same_models("r", "whole")


def members(parent):
    """A process and all that it started, and they, and so on."""
    found, rows = {parent}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        rows.append((int(stat.parent.name), int(text.rpartition(")")[2].split()[1])))
    while more := {pid for pid, above in rows if above in found} - found:
        found |= more
    return found


def gone(pids, within=15.0):
    """Wait until none of these processes is left."""
    ends = time.monotonic() + within
    while left := [p for p in pids if alive(p)]:
        assert time.monotonic() < ends, left
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_driver_that_is_killed_leaves_no_process_behind(start):
    process = start("run", *LONG, "--engine", "ray", "--workers", 2, "--rounds", 1000, "--dir", "r")
    for line in process.stderr:
        if "round 1/1000" in line:
            break
    group = members(process.pid)
    assert len(group) > 4
    process.kill()
    process.communicate()
    gone(group, 150)  # Ray's own agents take a minute to notice


def test_wrong_addresses_and_tokens_are_sentences(cli, small, monkeypatch):
    small = (*small[:-4], *small[-2:])  # without its engine
    run = ("run", *small, "--rounds", 1, "--dir", "r")
    cli(*run, "--engine", "loop", "--address", "auto").says(
        2, "run.address = 'auto' is for Ray, but the engine is 'loop'"
    )
    cli(*run, "--engine", "ray", "--address", "auto").says(6, "there is no token for the Ray")
    token = Path("home/.ray/auth_token").resolve()
    token.parent.mkdir()
    token.write_text("0" * 64)
    token.chmod(0o644)
    cli(*run, "--engine", "ray").says(6, f"run `chmod 600 {token}`")
    token.chmod(0o600)


def test_no_cluster_at_an_address_is_a_sentence(start, small):
    token = Path("home/.ray/auth_token")
    token.parent.mkdir()
    token.write_text("0" * 64)
    token.chmod(0o600)
    words = ("run", *small, "--engine", "ray", "--address", f"127.0.0.1:{free_port()}")
    process = start(*words, "--dir", "r")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 6
    assert err.splitlines()[-1].startswith("error: no connection to a Ray cluster at '127.0.0.1:")
    assert "Traceback" not in err


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def howto_commands():
    """The how-to's commands that make a cluster and use it, line by line."""
    blocks = re.findall(r"```sh\n(.*?)```", HOWTO.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


@pytest.fixture
def cluster():
    """The how-to's cluster: its commands as written, but for the ports and the places."""
    begun = []
    port = str(free_port())
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token"}
    env["RAY_USAGE_STATS_ENABLED"] = "0"
    commands = howto_commands()

    def find(beginning):
        return next(c for c in commands if c.startswith(beginning))

    def run(command):
        subprocess.run(shlex.split(command.replace("~", env["HOME"])), env=env, check=True)

    def node(command, *more):
        words = [*shlex.split(command.replace("6379", port)), *more, "--num-cpus", "1"]
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        begun.append(process)
        for line in process.stdout:
            if "Ray runtime started" in line:
                return process
        raise AssertionError(words)

    run(find("ray get-auth-token"))
    run(find("chmod 600"))
    place = tempfile.mkdtemp(prefix="ray")  # a short name, for sockets
    node(find("ray start --block --head"), "--temp-dir", place, "--include-dashboard=false")
    here = socket.gethostbyname(socket.gethostname())
    second = find("ray start --block --address").replace("HEAD", here)
    node(second, "--min-worker-port", "20002", "--max-worker-port", "21999")
    yield f"{here}:{port}", find("coterie run --engine ray --address"), begun[1], env
    for process in begun[::-1]:
        everybody = members(process.pid)
        process.terminate()
        process.communicate(timeout=60)
        gone(everybody, 60)
    shutil.rmtree(place)


def test_the_how_to_a_cluster_of_two_one_of_which_dies(cli, cluster):
    """The second machine is killed in the middle of a run, which goes on to the same end."""
    address, command, second, env = cluster
    words = command.replace("auto", address).replace("/shared/", "").split()
    at = words.index("--dir") + 1
    place = words[at]
    words += [str(w) for w in (*LONG, "--rounds", 6)]
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "round 2/6" in line:
            break
    victims = members(second.pid)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "round 6/6" in err
    assert "Traceback" not in err
    whole = cli("run", *LONG, "--rounds", 6, "--engine", "loop", "--dir", "whole", "-q")
    assert whole.code == 0
    assert same_models(place, "whole")
    assert Path(place, "clients.csv").read_text() == Path("whole/clients.csv").read_text()
