"""Secure sums in a federation that is served: each member's secret stays with it."""

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.common.serde import recorddict_to_proto

from coterie.engines.flower.keys import read_client
from coterie.errors import ConfigError
from faked_grid import Federation, loop, tree

SECURE = {"secure": True, "randomness": "system"}


def secured(**tables):
    return tree(method={"name": "fedavg"}, **tables)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    fed = Federation(tmp_path_factory.mktemp("secure"), secured(privacy=SECURE), secure=True)
    return fed, fed.serve()


def test_the_sum_is_that_of_the_plain_means(served):
    fed, result = served
    plain = loop(secured(), salts=fed.salts)
    start = result.plan.start.vector
    for client in range(3):
        mine, other = fed.model(client), plain.weights(client).tensors()
        for name in other:
            # Three rounds, each rounded to a grid of 2^-24 for each of three clients.
            assert torch.allclose(mine[name], other[name], rtol=0, atol=1e-4)
    moved = torch.cat([t.flatten() for t in plain.weights(0).tensors().values()])
    assert (moved - start).abs().max() > 1e-2  # there was something to get wrong
    assert result.summary["kept"] == [0, 1, 2]
    assert all("rejected" not in e for e in result.history)


def test_one_round_is_exact_to_the_grid(tmp_path):
    made = secured(run={"rounds": 1})
    fed = Federation(tmp_path, {**made, "privacy": SECURE}, secure=True)
    fed.serve()
    wanted = loop(made, salts=fed.salts).weights(0).tensors()
    for name, tensor in fed.model(0).items():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=3 * 2**-24 + 1e-6)


def test_the_server_saw_no_single_update(served):
    _, result = served
    assert result.summary["exposure"]["single"] == {}
    assert result.summary["exposure"]["sums"]["secure"]["rounds"] == 3
    assert result.summary["privacy"]


def test_secrets_stay_where_they_are(served):
    fed, _ = served
    wires = [recorddict_to_proto(p.message.content).SerializeToString() for p in fed.grid.posts]
    wires += [recorddict_to_proto(p.answer).SerializeToString() for p in fed.grid.posts]
    secrets = {c: read_client(fed.keys / "clients" / f"site{c}").identity for c in range(3)}
    assert len(set(secrets.values())) == 3
    for client, secret in secrets.items():
        assert not any(secret in wire or secret.hex().encode() in wire for wire in wires)
        own = (fed.root / f"site{client}", fed.keys / "clients" / f"site{client}")
        holders = [p for p in fed.root.rglob("*") if p.is_file() and secret in p.read_bytes()]
        assert holders
        assert all(any(p.is_relative_to(place) for place in own) for p in holders)
    keys = list(fed.root.glob("site*/runs/*/states/identities/*.key"))
    assert len(keys) == 3
    assert all(p.stat().st_mode & 0o077 == 0 for p in keys)


def test_with_a_false_key_there_is_no_sum(tmp_path):
    """Clients go by their own rosters: a server cannot put itself in another's place."""
    fed = Federation(tmp_path, secured(privacy=SECURE), secure=True)
    fed.grid.members[1].who.roster[0] = bytes(32)  # as one that was given a false roster would
    result = fed.serve()
    assert all("ended without a sum" in e["abandoned"] for e in result.history)
    start = torch.cat([t.flatten() for t in result.plan.start.tensors().values()])
    kept = fed.model(0)
    assert torch.equal(torch.cat([kept[k].flatten() for k in result.plan.start.tensors()]), start)


def test_simulated_randomness_is_refused(tmp_path):
    fed = Federation(tmp_path, secured(privacy={"secure": True}), secure=True)
    with pytest.raises(ConfigError, match=r"set privacy.randomness = system"):
        fed.serve()
