"""kill -9 of a secure federation's server after clients have signed and before it has saved."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

import faked_grid
from coterie.results.toml import read_toml
from federated import federation, rounds, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAMES = ("a", "b", "c", "d")
SECURE = """
[privacy]
secure = true
randomness = "system"
"""


def signed(fed, name):
    """The rounds, from 0, whose sum a client has signed and remembers."""
    found = [*(fed.keys / "clients" / name).glob("signed-*.json")]
    kept = [json.loads(path.read_text())["record"]["rounds"] for path in found]
    return [int(number) for rounds in kept for number, sum in rounds.items() if sum["signed"]]


def test_the_run_goes_on_without_the_round_that_was_signed(tmp_path):
    """One client is gone for good; the others end with the bits of a run that lost that round."""
    with federation(tmp_path, names=NAMES, rounds=3) as fed:
        fed.config.write_text(fed.config.read_text() + SECURE)
        server = fed.serve("served")
        members = {name: fed.join(name, "--secure", "--once") for name in NAMES}
        until(lambda: all(signed(fed, n) == [0] for n in NAMES), "signatures of round 1", 300)
        server.kill()
        assert not rounds(tmp_path / "served")
        members["d"].kill()
        again = fed.serve("served")
        assert again.wait(600) == 0, again.text
        first, *others = rounds(tmp_path / "served")
        assert "differs by 1 of its 3 members" in first["abandoned"]
        assert [sorted(e["cohort"]) for e in others] == [[0, 1, 2]] * 2
        assert not any("abandoned" in e for e in others)
        run = json.loads(next((tmp_path / "served").rglob("served.json")).read_text())["run"]
        settings = read_toml(fed.config)
        plain = faked_grid.Federation(
            tmp_path / "plain", settings, secure=True, keys=fed.keys, names=NAMES
        )
        plain.run_name = lambda name: run
        plain.grid.faults |= {(c, "1.0"): "lose" for c in range(4)}

        def leave(event):
            plain.grid.away.add(3)

        result = plain.serve(watch=leave)
        assert [bool(e.get("abandoned")) for e in result.history] == [True, False, False]
        for client, name in enumerate(NAMES[:3]):
            mine = load_file(tmp_path / name / "model.safetensors")
            for key, tensor in plain.model(client).items():
                assert torch.equal(mine[key], tensor)
