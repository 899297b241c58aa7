"""The script and the spy of the systems' tests are what they claim to be."""

import torch

import coterie
from coterie.core.messages import Upload
from coterie.core.method import Round
from scripted import Scripted, Spy, setup, weights
from support import drive, on_quadratics


def test_the_script_gives_what_the_door_gives(tmp_path):
    # FedAvg on quadratics by its own tasks, or by a script that does the same step by hand.
    made = on_quadratics(coterie.fedavg(), [[1.0], [4.0, 6.0], [9.0]])
    state, _, _ = drive(made, tmp_path, rounds=1)
    goals, start = {0: 1.0, 1: 5.0, 2: 9.0}, made.plan(tmp_path).start

    def step(order):
        theta = float(order.arrays["0"].vector)
        return Upload({"model": weights(start.layout, theta - 0.2 * (theta - goals[order.client]))})

    fed = Scripted(step, range(3), {1: 2})
    method = coterie.fedavg()
    scripted = method.round(fed, method.init(fed, setup(start, range(3))), Round(0, [0, 1, 2]))
    # 0.2·(1 + 2·5 + 9)/4 = 1
    for found in (state, scripted):
        assert abs(float(found.models[0].vector) - 1.0) < 1e-6
    ((kind, orders, into),) = fed.asked
    assert (kind, list(orders), into) == ("reduce", [0, 1, 2], {c: {0: 1.0} for c in range(3)})


def test_the_spy_sees_every_order_and_changes_none(tmp_path):
    made = on_quadratics(coterie.fedavg(), [[1.0], [2.0]])
    plain, channel, _ = drive(made, tmp_path / "a", rounds=2)
    watched, spied, engine = drive(made, tmp_path / "b", Spy, rounds=2)
    assert torch.equal(plain.models[0].vector, watched.models[0].vector)
    assert channel.state.ledger.total == spied.state.ledger.total
    assert [(s.order, s.client) for s in engine.seen] == [
        ("1.0", 0), ("1.0", 1), ("2.0", 0), ("2.0", 1)
    ]  # fmt: skip
    seen = engine.of("2.0")[1]
    assert (seen.task, seen.down, seen.up, seen.payload) == (
        "train", {"0": ("theta",)}, {"model": ("theta",)}, (4, 4)
    )  # fmt: skip
