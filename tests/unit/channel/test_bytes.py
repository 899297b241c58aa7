"""Exact bytes: messages counted by hand."""

import json

import torch
from torch import nn

import coterie
from coterie.channel.wire import Wire
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from faulty import Faulty
from support import Constant, drive, on_quadratics


def test_a_message_by_hand():
    weights = Weights.of(nn.Linear(1, 1))
    message = Wire(weights.layout).pack({"a": weights})
    header = b'{"body":{"a":{"$weights":0}},"arrays":[["f4",[2],8]]}'
    assert message.header == header
    assert message.size == 8 + len(header) + 8


def test_one_round_of_fedavg_by_hand(tmp_path):
    # One parameter: four bytes of weights each way, and the headers written out here.
    made = on_quadratics(coterie.fedavg(), [[1.0], [4.0, 6.0]])
    _, channel, _ = drive(made, tmp_path, rounds=1)
    body = '{"order":"1.0","round":0,"task":"train","arrays":{"0":{"$weights":0}},"config":{}}'
    down = 8 + len(f'{{"body":{body},"arrays":[["f4",[1],4]]}}') + 4
    for client, examples, loss in ((0, 1, 1.0), (1, 2, 26.0)):
        reply = json.dumps(
            {"examples": examples, "arrays": {"model": {"$weights": 0}}, "metrics": {"loss": loss}},
            separators=(",", ":"),
        )
        up = 8 + len(f'{{"body":{reply},"arrays":[["f4",[1],4]]}}') + 4
        assert channel.state.ledger.method[client].down == down
        assert channel.state.ledger.method[client].up == up
    assert channel.state.ledger.total.total == sum(
        b.total for b in channel.state.ledger.method.values()
    )


class Counting(Loop):
    """Counts what really passes through the engine."""

    down = up = 0

    def exchange(self, requests, until=None):
        for r in requests:
            self.down += len(r.message.to_bytes())
        for client, answer in super().exchange(requests):
            self.up += len(answer.to_bytes())
            yield client, answer


def test_the_ledger_holds_what_the_engine_moved(tmp_path):
    made = on_quadratics(coterie.ifca(k=3), [[1.0], [2.0], [3.0]])
    object.__setattr__(made, "model", lambda: Constant(float(torch.rand(1))))
    _, channel, engine = drive(made, tmp_path, Counting, rounds=2)
    assert (channel.state.ledger.total.down, channel.state.ledger.total.up) == (
        engine.down,
        engine.up,
    )


def test_ifca_pays_for_k_models_down_and_one_up(tmp_path):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.rand(100_000))

        def forward(self, x):
            return self.theta[:1].expand(len(x))

    totals = {}
    for k in (1, 4):
        made = on_quadratics(coterie.ifca(k=k), [[1.0]] * 4)
        object.__setattr__(made, "model", Wide)
        _, channel, _ = drive(made, tmp_path / str(k), rounds=1)
        totals[k] = channel.state.ledger.total
    assert 3.99 < totals[4].down / totals[1].down < 4.0
    assert abs(totals[4].up - totals[1].up) < 4 * 20


def test_local_costs_nothing_and_its_orders_are_counted_apart(tmp_path):
    made = on_quadratics(coterie.local(), [[1.0], [2.0]])
    _, channel, _ = drive(made, tmp_path, rounds=2)
    assert channel.state.ledger.total.total == 0
    assert channel.state.ledger.unmetered.total > 0


def test_fedper_sends_only_what_is_shared(tmp_path):
    from support import experiment

    made = experiment(coterie.fedper(k=1))
    _, channel, _ = drive(made, tmp_path, rounds=1)
    shared = 64 * 12 + 12
    for moved in channel.state.ledger.method.values():
        assert 0 < moved.down - 4 * shared < 300
        assert 0 < moved.up - 4 * shared < 300


def test_frozen_layers_never_travel_or_change(tmp_path):
    from support import experiment, models

    made = experiment(coterie.fedavg(), freeze=("hidden1",), schedule={"weight_decay": 0.1})
    state, channel, _ = drive(made, tmp_path, rounds=2)
    start = made.plan(tmp_path).start
    head = 12 * 10 + 10
    assert start.layout.trainable == head
    for moved in channel.state.ledger.method.values():
        assert 0 < moved.up / 2 - 4 * head < 300
    for vector in models(made, state, channel):
        assert torch.equal(vector[head:], start.vector[head:])
        assert not torch.equal(vector[:head], start.vector[:head])


def test_lost_replies_waste_their_orders_way_down(tmp_path):
    made = on_quadratics(coterie.fedavg(), [[1.0], [2.0]])
    whole = drive(made, tmp_path / "a", rounds=1)[1].state.ledger
    lost = drive(
        made, tmp_path / "b", lambda p: Faulty(Loop(p), lose_reply=lambda c, o: c == 1), rounds=1
    )[1].state.ledger
    assert (lost.wasted[1].down, lost.wasted[1].up) == (whole.method[1].down, 0)
    assert lost.method == {0: whole.method[0]}
    assert lost.lost == 1


def test_layouts_of_equal_modules_are_equal():
    assert Layout.of(nn.Linear(2, 2)) == Layout.of(nn.Linear(2, 2))


def test_what_it_costs_fedclust_to_find_groups():
    """Numbers of steps, θ⁰ once, and two final layers: under 3 % of twenty rounds with LeNet-5."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 30, 1, 28, 28), generator=random, dtype=torch.uint8)
    clients = [(x, torch.arange(30) % 10) for x in images]
    settings = {"engine": "loop", "lr": 0.05, "batch_size": 10, "rounds": 1}
    result = coterie.simulate(clients, "lenet5", coterie.fedclust(fallback=False), **settings)
    probe, round = (sum(e["bytes"].values()) for e in (result.begun, result.history[0]))
    assert probe / (probe + 20 * round) < 0.03
    model, head = 61_706 * 4, 850 * 4  # LeNet-5 for one channel and its last layer, in float32
    assert 4 * (model + 2 * head) < probe < 4 * (model + 2 * head) + 4 * 2000
    given = coterie.simulate(clients, "lenet5", coterie.fedclust(warmup_steps=25), **settings)
    assert sum(given.begun["bytes"].values()) > 2 * probe  # with the whole change, too
