"""Versions of client state."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.channel.wire import Wire
from coterie.client.store import Store
from coterie.core.method import Method
from coterie.core.weights import Layout
from coterie.engines.loop import Loop
from coterie.errors import RunDirError, TrainingError
from faulty import Faulty
from support import drive, experiment

LAYOUT = Layout.of(nn.Linear(1, 1))
ASKED, OTHER = (Wire(LAYOUT).pack({"task": task}) for task in ("train", "score"))
REPLY = Wire(LAYOUT).pack({"metrics": {"loss": 1.0}})


def versions(store, client):
    return sorted(p.name for p in (store.folder / str(client)).iterdir())


def test_versions_are_kept_as_asked(tmp_path):
    store = Store(tmp_path, LAYOUT)
    for name in ("1.0", "2.0", "3.0"):
        store.write(7, name, {"x": torch.tensor([float(name)])}, ASKED, REPLY)
    store.keep(7, ["2.0", "3.0"])
    assert versions(store, 7) == ["2-0.state", "3-0.state"]
    assert store.read(7, "2.0")["x"].item() == 2
    assert store.read(7, "") == {}
    assert store.answered(7, "3.0", ASKED).to_bytes() == REPLY.to_bytes()
    assert store.answered(7, "3.0", OTHER) is None
    assert store.answered(7, "4.0", ASKED) is None
    with pytest.raises(RunDirError, match=r"client 7 no longer has version 1\.0"):
        store.read(7, "1.0")
    store.flush({7: "3.0", 8: ""})


def counting(method: Method, done: list) -> Method:
    from dataclasses import replace

    task = method.tasks["train"]

    def work(client, arrays, config):
        done.append((client.id, client.round))
        return task(client, arrays, config)

    return replace(method, tasks={"train": work})


def test_a_repeated_order_is_answered_and_not_carried_out_again(tmp_path):
    done: list = []
    made = experiment(counting(coterie.fedper(), done))
    drive(made, tmp_path, lambda p: Faulty(Loop(p), repeat=lambda c, o: True), rounds=2)
    assert sorted(done) == [(c, r) for c in range(6) for r in range(2)]


def test_a_client_keeps_few_versions(tmp_path):
    made = experiment(coterie.fedper())
    _, channel, _ = drive(made, tmp_path, rounds=5)
    store = Store(tmp_path, channel.wire.layout)
    for client in range(6):
        assert versions(store, client) == ["4-0.state", "5-0.state"]
        assert channel.state.versions[client] == "5.0"


def test_a_damaged_version_is_noticed(tmp_path):
    store = Store(tmp_path, LAYOUT)
    store.write(7, "1.0", {"x": torch.tensor([1.0])}, ASKED, REPLY)
    path = tmp_path / "7" / "1-0.state"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunDirError, match="checksum is wrong"):
        store.read(7, "1.0")
    assert store.answered(7, "1.0", ASKED) is None  # it will be carried out again


def test_a_reply_that_is_not_finite_is_never_stored(tmp_path):
    """Otherwise a resumed run would be answered with it for ever."""

    def diverges(client, arrays, config):
        client.state["seen"] = 1
        return coterie.Upload({"model": arrays["0"] * float("nan")})

    method = replace(coterie.fedavg(), tasks={"train": diverges})
    with pytest.raises(TrainingError, match="no longer finite"):
        drive(experiment(method), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
