"""A real SuperLink and real clients over TLS with node keys, against the loop, to the bit."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from federated import Federation, Process, federation, rounds, same_models

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

METHODS = {
    "fedavg": [],
    "ifca": ["--set", "method.k=2"],
    "fedclust": [],
    "user-centric": [],
    "ditto": [],
}
# The server alone decides when a trial is due; its clients only get the orders.
ALWAYS_TRY = (
    "import sys, coterie.methods; "
    "sys.modules['coterie.methods.dc_pfl'].has_ended = lambda *_: True; "
    "from coterie.cli.app import main; main()"
)


def test_one_round_of_fedavg_over_tls(tmp_path):
    with federation(tmp_path, names=("a", "b"), rounds=1) as fed:
        server = fed.serve("served")
        clients = [fed.join(name, "--once") for name in fed.names]
        loop = fed.loop("served")
        assert server.wait() == 0, server.text
        assert [client.wait() for client in clients] == [0, 0]
        same_models(fed, loop)
        assert [e["exchanges"] for e in rounds(tmp_path / "served")] == [1]


NETWORK = """
from torch import nn

def net(shape, outputs, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
"""


@pytest.mark.e2e
def test_a_model_of_each_partys_own_goes_by_its_name(tmp_path):
    (tmp_path / "theirs.py").write_text(NETWORK)
    (tmp_path / "ours.py").write_text(NETWORK)
    with federation(tmp_path, names=("a", "b"), rounds=1) as fed:
        fed.config.write_text(
            fed.config.read_text().replace('"mlp"', '"mynet"').replace("[16]", "5")
        )
        server = fed.serve("served", "--model", f"mynet={tmp_path}/theirs.py:net")
        own = ("--model", f"mynet={tmp_path}/ours.py:net")
        clients = [fed.join(name, "--once", *own) for name in fed.names]
        assert server.wait() == 0, server.text
        assert [client.wait() for client in clients] == [0, 0]
        left = [load_file(tmp_path / name / "model.safetensors") for name in fed.names]
        assert all(model["1.weight"].shape == (5, 64) for model in left)


@pytest.fixture(scope="module")
def staying(tmp_path_factory):
    """Three clients that stay while one federation after another is served."""
    with federation(tmp_path_factory.mktemp("staying")) as fed:
        for name in fed.names:
            fed.join(name)
        yield fed


@pytest.mark.e2e
@pytest.mark.parametrize("method", METHODS)
def test_a_served_method_gives_the_bits_of_the_loop(staying: Federation, method):
    more = ["--set", f"method.name={method}", *METHODS[method]]
    server = staying.serve(method, *more)
    loop = staying.loop(method, *more)
    assert server.wait() == 0, server.text
    same_models(staying, loop)
    assert [e["exchanges"] for e in rounds(staying.root / method)] == [1, 1]


@pytest.mark.e2e
def test_dc_pfl_with_a_trial_gives_the_bits_of_the_loop(staying: Federation):
    python = [sys.executable, "-c", ALWAYS_TRY]
    keys = ["start=1", "levels=0.2", "trial=two-models", "trial_on=training"]
    more = ["--set", "run.rounds=4", "--set", "method.name=dc-pfl"]
    more += [word for key in keys for word in ("--set", f"method.{key}")]
    server = staying.serve("dc-pfl", *more, python=python)
    loop = staying.root / "dc-pfl-loop"
    command = ["run", staying.config, "--engine", "loop", "--dir", loop, "--quiet", *more]
    subprocess.run([*python, *map(str, command)], check=True, capture_output=True)
    assert server.wait() == 0, server.text
    same_models(staying, loop)
    served = rounds(staying.root / "dc-pfl")
    assert [e["exchanges"] for e in served] == [1, 1, 2, 1]
    assert [len(set(e["groups"])) for e in served] == [1, 1, 2, 2]  # the trial was a success


@pytest.mark.e2e
def test_a_model_of_45_mb_goes_through(staying: Federation):
    more = ["--set", "model.name=resnet18", "--set", "run.rounds=1", "--set", "train.batch_size=64"]
    server = staying.serve("resnet18", *more)
    loop = staying.loop("resnet18", *more)
    assert server.wait(400) == 0, server.text
    same_models(staying, loop)
    moved = rounds(staying.root / "resnet18")[0]["bytes"]
    assert min(moved.values()) > 3 * 44e6


@pytest.mark.e2e
def test_a_superlink_that_is_there_already_is_used(tmp_path):
    with federation(tmp_path, names=("a", "b"), rounds=1) as fed:
        secret = tmp_path / "secret"
        secret.write_bytes(b"of this test")
        keys = fed.keys / "server"
        command = [
            *("--host", "127.0.0.1", "--port", fed.port),
            *("--ssl-ca-certfile", keys / "ca.pem", "--ssl-certfile", keys / "server.pem"),
            *("--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"),
            *("--isolation", "process", "--superexec-auth-secret-file", secret),
        ]
        program = Path(sys.executable).with_name("flower-superlink")
        link = Process(command, tmp_path / "link.log", [str(program)])
        fed.running.append(link)
        given = ["--superlink", f"127.0.0.1:{fed.port}", "--superlink-secret", secret]
        link.says("Application startup complete")
        server = fed.serve("served", *given)
        clients = [fed.join(name, "--once") for name in fed.names]
        loop = fed.loop("served")
        assert server.wait() == 0, server.text
        assert [client.wait() for client in clients] == [0, 0]
        same_models(fed, loop)
        assert link.process.poll() is None  # it is not ours to end
