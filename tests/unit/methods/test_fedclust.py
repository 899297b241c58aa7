"""FedClust's groups, by final layers written by hand or really trained."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core.messages import Upload
from coterie.core.method import Round
from coterie.core.weights import Layout
from coterie.errors import ConfigError, TrainingError
from coterie.methods.fedclust import final_layer
from scripted import Scripted, Spy, halves, linears, opened, setup, steps, weights
from support import drive, experiment, on_quadratics

TWO = linears((1, 1), (1, 1))  # layers 0 and 1 of two numbers each; 1 is the final one
START = weights(TWO, 0, 0, 0, 0)

# Two by the origin and two on a line above (10, 0). Distances: 2 and 8 inside; across, the mean of
# 10, √164 = 12.81, 8 and √128 = 11.31 is 10.53, the smallest 8, the largest 12.81.
FINALS = {0: (0, 0), 1: (2, 0), 2: (10, 0), 3: (10, 8)}


def by_hand(finals, sent=None):
    """Clients with these final layers after the warm-up, and these models in rounds."""

    def answer(order):
        if order.task == "warm-up":
            numbers = finals.get(order.client)
            return numbers and Upload({"final": weights(TWO, 0, 0, *numbers).only(["1"])})
        return Upload({"model": weights(TWO, *sent[order.client])})

    return Scripted(answer, range(len(finals)))


def groups(finals, **parameters):
    fed = by_hand(finals)
    return coterie.fedclust(**parameters).init(fed, setup(START, sorted(finals))).groups


def test_the_cut_follows_the_linkage():
    apart, one = {0: 0, 1: 0, 2: 1, 3: 1}, dict.fromkeys(range(4), 0)
    assert groups(FINALS, threshold=9.0) == apart
    assert groups(FINALS, threshold=9.0, linkage="complete") == apart
    assert groups(FINALS, threshold=9.0, linkage="single") == one  # 8 across is not above 9
    assert groups(FINALS, threshold=11.0) == one
    assert groups(FINALS, threshold=11.0, linkage="complete") == apart
    assert groups(FINALS, threshold=7.9) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert groups(FINALS, threshold=math.inf) == one


def test_clusters_by_number():
    assert groups(FINALS, clusters=2) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert groups(FINALS, clusters=3) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert groups(FINALS, clusters=4) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert groups(FINALS, clusters=5) == groups(FINALS, clusters=4)  # a reply may be lost


def test_more_groups_than_clients_are_refused_before_anything():
    made = coterie.fedclust(clusters=5)
    with pytest.raises(ConfigError, match="clusters = 5 groups for 4 clients"):
        made.check(setup(START, range(4)))


def test_auto_finds_planted_groups_and_leaves_equals_together():
    # Directions of 0°, 120° and 240°, and a few degrees more for each client and half.
    near = {c: (120 * (c % 3) + c, 120 * (c % 3) - c) for c in range(9)}
    state = told(near, trial="off")
    assert state.groups == {c: f"0/{c % 3}" for c in range(9)}
    assert all(m.vector.tolist() == [0, 0, 0, 0] for m in state.models.values())
    assert state.notes["evidence"]["groups"] == 3
    # Halves that have as little in common as those of two clients: 0° and 180°, 90° and 270°, ...
    odd = {c: (90 * c, 90 * c + 180) for c in range(4)}
    assert set(told(odd, trial="off").groups.values()) == {0}
    assert set(told(dict.fromkeys(range(5), (30, 30)), trial="off").groups.values()) == {0}


def test_how_far_a_client_went_does_not_matter_to_auto():
    near = {c: (90 * (c % 2) + c, 90 * (c % 2)) for c in range(6)}
    far = told(near, trial="off", lengths={0: 100.0, 3: 0.01})
    assert far.groups == told(near, trial="off").groups == {c: f"0/{c % 2}" for c in range(6)}


def test_auto_starts_with_one_model_and_a_trial_to_come():
    near = {c: (90 * (c % 2) + c, 90 * (c % 2)) for c in range(6)}
    state = told(near)
    assert state.groups == dict.fromkeys(range(6), 0)
    assert list(state.models) == [0]
    assert state.memory["trial"]["clients"] == list(range(6))
    assert state.notes["evidence"]["groups"] == 2
    paper = told(near, start="zero")
    assert paper.groups == {c: f"0/{c % 2}" for c in range(6)}
    assert "trial" not in paper.memory


def test_without_validation_data_the_evidence_decides_and_says_so():
    near = {c: (90 * (c % 2) + c, 90 * (c % 2)) for c in range(6)}
    state = told(near, validation=0)
    assert state.groups == {c: f"0/{c % 2}" for c in range(6)}
    assert "no client has validation data" in state.notes["verdict"]["why"]


def told(angles, validation=1, lengths=None, **parameters):
    """The first state, when the clients' final layers change in these directions, by half."""

    def answer(order):
        if order.task == "steps":
            return steps(25)
        far = (lengths or {}).get(order.client, 1.0)
        sides = [
            weights(TWO, 0, 0, far * math.cos(math.radians(a)), far * math.sin(math.radians(a)))
            for a in angles[order.client]
        ]
        return halves(*[side.only(["1"]) for side in sides], validation=validation)

    fed = Scripted(answer, range(len(angles)))
    parameters = {"fallback": False} | parameters
    return coterie.fedclust(**parameters).init(fed, setup(START, sorted(angles)))


def test_exact_duplicates_are_one_group_at_threshold_zero():
    twins = {0: (1, 1), 1: (2, 2), 2: (1, 1), 3: (2, 2.000001)}
    assert groups(twins, threshold=0.0) == {0: 0, 1: 1, 2: 0, 3: 2}
    assert groups({0: (0, 0), 1: (1e-10, 0)}, threshold=0.0) == {0: 0, 1: 1}  # near is not equal


def test_one_client_and_two():
    for parameters in ({"threshold": 0.0}, {"threshold": math.inf}, {"clusters": 1}):
        assert groups({0: (3, 4)}, **parameters) == {0: 0}
    alone = told({0: (10, 20)})
    assert alone.groups == {0: 0}
    assert "too little data" in alone.notes["why"]
    assert told({0: (0, 180), 1: (90, 270)}, trial="off").groups == {0: 0, 1: 0}
    assert told({0: (0, 1), 1: (90, 91)}, trial="off").groups == {0: "0/0", 1: "0/1"}
    pair = {0: (0, 0), 1: (3, 4)}  # 5 apart
    assert groups(pair, threshold=4.9) == {0: 0, 1: 1}
    assert groups(pair, threshold=5.0) == {0: 0, 1: 0}
    assert groups(pair, clusters=2) == {0: 0, 1: 1}


def test_what_the_first_step_has_to_show():
    fed = by_hand(FINALS)
    notes = coterie.fedclust(threshold=9.0).init(fed, setup(START, range(4))).notes
    # Merges: 0 and 1 at 2, 2 and 3 at 8, then all at the mean of the four distances across.
    across = (10 + math.sqrt(164) + 8 + math.sqrt(128)) / 4
    assert [m[:2] + m[3:] for m in notes["dendrogram"]] == [[0, 1, 2], [2, 3, 2], [4, 5, 4]]
    assert [m[2] for m in notes["dendrogram"]] == pytest.approx([2, 8, across])
    assert notes["distances"][0] == pytest.approx([0, 2, 10, math.sqrt(164)], rel=1e-5)
    assert notes["threshold"] == 9.0


def test_every_model_starts_at_the_common_start_and_moves_with_its_own_group():
    sent = {0: (1, 1, 1, 1), 1: (3, 3, 3, 3), 2: (10, 0, 0, 0), 3: (0, 10, 0, 0)}
    fed = by_hand(FINALS, sent)
    fed.examples = {0: 1, 1: 3}
    method = coterie.fedclust(clusters=2)
    state = method.init(fed, setup(START, range(4)))
    assert [m.vector.tolist() for m in state.models.values()] == [[0, 0, 0, 0]] * 2
    state = method.round(fed, state, Round(0, [0, 1, 2]))
    # (1·1 + 3·3)/4 = 2.5 in the first group; the second one's is its one member's who took part.
    assert [m.vector.tolist() for m in state.models.values()] == [[2.5] * 4, [10, 0, 0, 0]]
    assert {c: list(o.arrays) for c, o in fed.asked[-1][1].items()} == {
        0: ["0"],
        1: ["0"],
        2: ["1"],
    }


def test_a_newcomer_joins_the_nearest_mean_of_warm_up_layers():
    # Means (1, 0) and (10, 4). From (6.2, 0): 5.2 to the first and √(3.8² + 4²) = 5.52 to the
    # second, although the nearest single client is (10, 0), of the second, at 3.8.
    # The groups' models have gone to each other's places meanwhile: these must not count.
    finals = {**FINALS, 4: (6.2, 0), 5: (6.2, 4), 6: None}
    sent = {c: (0, 0, 10, 4) if c < 2 else (0, 0, 1, 0) for c in range(4)}
    fed = by_hand(finals, sent)
    method = coterie.fedclust(threshold=9.0)
    state = method.round(fed, method.init(fed, setup(START, range(4))), Round(0, range(4)))
    assert state.models[0].vector.tolist() == [0, 0, 10, 4]
    found = method.admit(fed, state, Round(1, [4, 5, 6]))
    # From (6.2, 4): √(5.2² + 4²) = 6.56 to the first and 3.8 to the second.
    assert found.groups == {**state.groups, 4: 0, 5: 1}  # 6 did not answer: it stays outside
    assert {c: o.task for c, o in fed.asked[-1][1].items()} == dict.fromkeys([4, 5, 6], "warm-up")
    assert all(
        torch.equal(o.arrays["model"].vector, START.vector) for o in fed.asked[-1][1].values()
    )
    assert method.sends(found, 4)["0"].vector.tolist() == [0, 0, 10, 4]


def test_who_did_not_answer_at_first_is_placed_at_its_turn():
    finals = {**FINALS, 1: None}
    fed = by_hand(finals, dict.fromkeys(range(4), (1, 1, 1, 1)))
    method = coterie.fedclust(threshold=9.0)
    state = method.init(fed, setup(START, range(4)))
    assert state.groups == {0: 0, 2: 1, 3: 1}
    finals[1] = (2, 0)
    state = method.round(fed, state, Round(0, [2, 3]))
    assert 1 not in state.groups
    state = method.round(fed, state, Round(1, [1, 2]))
    assert state.groups == {0: 0, 1: 0, 2: 1, 3: 1}
    assert [sorted(orders) for _, orders, _ in fed.asked[-2:]] == [[1], [1, 2]]
    with pytest.raises(TrainingError, match="no client answered the warm-up"):
        groups({0: None, 1: None}, clusters=1)


# --- what travels --------------------------------------------------------------------------------


def test_only_the_final_layer_goes_up_in_the_warm_up(tmp_path):
    made = experiment(coterie.fedclust(clusters=2, warmup_epochs=1))
    plan = made.plan(tmp_path)
    _, channel, engine = drive(made, tmp_path, Spy, rounds=1)
    warm = engine.of("init.0")
    whole = plan.start.layout.names
    head = ("head.weight", "head.bias")
    for seen in warm.values():
        assert (seen.task, seen.down, seen.up) == ("warm-up", {"model": whole}, {"final": head})
        # 64·12 + 12 + 12·10 + 10 = 910 numbers down, 130 up, four bytes each.
        assert seen.payload == (4 * 910, 4 * 130)
    assert {s.order for s in engine.seen} == {"init.0", "1.0"}
    assert all(s.up == {"model": whole} for s in engine.of("1.0").values())
    assert channel.exposed == {"each", "means"}


def test_the_warm_up_costs_its_messages_to_the_byte(tmp_path):
    made = experiment(coterie.fedclust(clusters=2, warmup_epochs=1))
    channel, _, plan = opened(made, tmp_path)  # no rounds: what it counts is the warm-up
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    body = (
        '{"order":"init.0","round":0,"task":"warm-up","arrays":{"model":{"$weights":0}},'
        '"config":{}}'
    )
    down = 8 + len(f'{{"body":{body},"arrays":[["f4",[910],3640]]}}') + 3640
    for client, moved in channel.state.ledger.method.items():
        of = {"$weights": 0, "of": ["head.weight", "head.bias"]}
        examples = len(made.population.clients[client].train)
        reply = {"examples": examples, "arrays": {"final": of}, "metrics": {}}
        text = json.dumps(reply, separators=(",", ":"))
        up = 8 + len(f'{{"body":{text},"arrays":[["f4",[130],520]]}}') + 520
        assert (moved.down, moved.up) == (down, up)
    assert channel.exposed == {"each"}


def test_a_frozen_last_layer_gives_way_to_the_one_before(tmp_path):
    made = experiment(coterie.fedclust(clusters=2, warmup_epochs=1), freeze=("head",))
    _, _, engine = drive(made, tmp_path, Spy, rounds=1)
    hidden = ("hidden1.weight", "hidden1.bias")
    for seen in engine.of("init.0").values():
        assert (seen.down, seen.up) == ({"model": hidden}, {"final": hidden})


def test_the_final_layer_is_that_of_the_layout():
    normed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.BatchNorm1d(3))
    # A normalisation belongs to the layer before it; statistics are no part, nor is what is local.
    shared = final_layer(Layout.of(normed))
    assert set(shared.names) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(final_layer(Layout.of(normed, bn="local")).names) == {"1.weight", "1.bias"}
    for parameter in normed[1].parameters():
        parameter.requires_grad_(False)
    assert set(final_layer(Layout.of(normed)).names) == {"2.weight", "2.bias"}
    assert set(final_layer(Layout.of(normed, bn="local")).names) == {"0.weight", "0.bias"}
    plain = nn.Linear(2, 2, bias=False)
    assert final_layer(Layout.of(plain)).names == ("weight",)


# --- the warm-up itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "share"),
    [({}, 1 - 0.8**10), ({"warmup_epochs": 1}, 0.2), ({"warmup_epochs": 2}, 0.36)],
    ids=["ten", "one", "two"],
)
def test_newcomers_warm_up_as_everybody_did(asked, share, tmp_path):
    # From 0 a step goes 0.2 of the way to ȳ, two steps 0.2 + 0.8·0.2 = 0.36 of it; whatever the
    # learning rate of the present round, here 0.1·0.5⁷.
    made = on_quadratics(
        coterie.fedclust(threshold=0.0, **asked), [[1.0], [5.0], [10.0]], schedule={"lr_decay": 0.5}
    )
    channel, engine, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    state = made.method.init(channel, replace(made.setup(plan.start), clients=[0, 1]))
    channel.begin(7, stage="admit")
    state = made.method.admit(channel, state, Round(7, [2]))
    ups = {s.client: float(s.sent["final"].vector) for s in engine.seen}
    assert ups == pytest.approx({0: share, 1: 5 * share, 2: 10 * share}, abs=1e-6)
    assert state.groups == {0: 0, 1: 1, 2: 1}


def test_parameters_that_make_no_sense():
    for wrong in (
        {"threshold": -1.0}, {"threshold": math.nan}, {"threshold": "atuo"}, {"clusters": 0},
        {"clusters": 2, "threshold": 1.0}, {"warmup_epochs": 0}, {"linkage": "wart"},
        {"warmup_steps": 0}, {"trial": "on"},
        {"warmup_steps": 50, "warmup_epochs": 2}, {"clusters": 2, "start": "one"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="fedclust"):
            coterie.fedclust(**wrong)
    assert np.isinf(coterie.fedclust(threshold=math.inf).source.parameters["threshold"])
