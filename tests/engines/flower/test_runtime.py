"""What our processes know of each other on one machine: a secret, and whose port it is."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.engines.flower.processes import shared_secret
from coterie.engines.flower.runtime import ours

LISTEN = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); input()"
)


def test_a_secret_is_made_once_and_is_its_owners(tmp_path):
    path = tmp_path / "secret"
    secret = shared_secret(path)
    assert len(secret) == 32
    assert shared_secret(path) == secret == path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0


def test_a_secret_that_a_crash_left_empty_is_made_anew(tmp_path):
    path = tmp_path / "secret"
    path.touch()
    assert len(shared_secret(path)) == 32


def test_a_port_of_ours_is_ours():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ours(listener.getsockname()[1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as somebody else")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a port is")
def test_a_port_of_somebody_else_is_not(tmp_path):
    # The system's own Python: whoever listens may not be able to read this one.
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    other = subprocess.Popen(
        [python, "-c", LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        user=65534,
        cwd="/",
    )
    try:
        told = other.stdout.readline()
        if not told:
            pytest.skip("no Python here that another user can run")
        assert not ours(int(told))
    finally:
        other.kill()
        other.wait()
        for pipe in (other.stdin, other.stdout):
            pipe.close()
