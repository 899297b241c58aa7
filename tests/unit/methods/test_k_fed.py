"""k-FED's groups, by centres worked by hand or from real data."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie.clustering import canonical
from coterie.core.messages import Upload
from coterie.core.method import Round
from coterie.data import ClientData, Population, Split
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, TrainingError
from coterie.methods.k_fed import k_fed
from faulty import Faulty
from scripted import Scripted, Spy, linears, opened, setup, weights
from support import digits, drive, experiment, models, same_bits

ONE = linears((1, 1))
START = weights(ONE, 0, 0)

# Centres on a line, each with its number of points. Inside a client they are 10, 9, 20 and 11
# apart: client 2 begins, with 0 and 20. Then the farthest is 10 (10 away from both); then 11 is 1
# away from 10, and 1 is 1 away from 0.
SENT = {
    0: {0: 5, 10: 3},
    1: {1: 2, 10: 6},
    2: {0: 4, 20: 4},
    3: {0: 1, 11: 1},
}


def by_hand(sent, models=None):
    """Clients that send these centres with their numbers of points; None is no answer."""

    def answer(order):
        if order.task == "centre":
            own = sent.get(order.client)
            if own is None:
                return None
            centres = torch.tensor([[float(at)] for at in own])
            return Upload({"centres": centres, "points": torch.tensor(list(own.values()))})
        return Upload({"model": weights(ONE, *models[order.client])})

    return Scripted(answer, range(len(sent)))


def begun(sent, k, **parameters):
    return k_fed(k=k, **parameters).init(by_hand(sent), setup(START, sorted(sent)))


def test_groups_by_hand():
    state = begun(SENT, 3, local=2)
    assert state.memory["seeds"].tolist() == [[0], [20], [10]]
    assert state.notes["assigned"] == [[0, 2], [0, 2], [0, 1], [0, 2]]
    # Client 0 has five points of eight in 0, client 1 six in 10 (group 2); clients 2 and 3 have as
    # many in either: the lower group.
    assert state.groups == {0: 0, 1: 2, 2: 0, 3: 0}
    # Nobody has most of its points at 20: that group has no model.
    assert list(state.models) == [0, 2]
    assert all(m is START for m in state.models.values())
    assert state.notes["points"][1] == [2, 6]


def test_points_decide_and_not_the_number_of_centres():
    sent = {0: {0: 1, 50: 1, 99: 1}, 1: {1: 2, 2: 2, 51: 5}, 2: {0: 2, 1: 2, 50: 3}}
    state = begun(sent, 3)
    assert state.memory["seeds"].ravel().tolist() == [0, 50, 99]
    # Five points at 51 against 2 + 2 of two centres near 0; then three at 50 against 2 + 2.
    assert state.groups == {0: 0, 1: 1, 2: 0}


def test_local_clusters_are_the_square_root_of_k_unless_given(tmp_path):
    for k, expected in ((1, 1), (2, 1), (3, 2), (4, 2), (6, 2), (7, 3), (9, 3), (16, 4)):
        assert sizes(asked(k_fed(k=k), digits(), tmp_path / str(k))) == {expected}
    assert sizes(asked(k_fed(k=9, local=5), digits(), tmp_path / "given")) == {5}


def asked(method, population, folder):
    """Each client's answer to the first question."""
    made = experiment(method, population)
    channel, engine, plan = opened(made, folder)
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    return {c: s.sent for c, s in engine.of("init.0").items()}


def sizes(sent):
    return {len(s["centres"]) for s in sent.values()} | {len(s["points"]) for s in sent.values()}


def table(*clients):
    """A population whose clients hold these inputs, for both training and testing."""
    people = []
    for rows in clients:
        x = torch.as_tensor(rows)
        split = Split(x, torch.arange(len(x)) % 2)
        people.append(ClientData(split, split, split))
    shape = tuple(people[0].train.x.shape[1:])
    return Population(tuple(people), "table", shape, ("a", "b"), 2)


# --- what a client sends -------------------------------------------------------------------------


def test_centres_and_points_of_the_data_as_the_model_sees_them(tmp_path):
    # Bytes 255 and 0 are 1 and −1; three black images with one white corner, two white ones.
    images = torch.zeros(5, 1, 2, 2, dtype=torch.uint8)
    images[:3, 0, 0, 0], images[3:] = 255, 255
    sent = asked(k_fed(k=3), table(images, images), tmp_path)[0]
    assert sent["centres"].dtype == torch.float32
    rows = dict(zip(map(tuple, sent["centres"].tolist()), sent["points"].tolist(), strict=True))
    assert rows == {(1, -1, -1, -1): 3, (1, 1, 1, 1): 2}


def test_who_has_few_points_sends_few_centres_and_is_grouped_all_the_same(tmp_path):
    near = torch.tensor([[0.0, 0.1], [0.0, -0.1], [9.0, 0.1], [9.0, -0.1], [0.1, 9.0]])
    people = table(near, near[:1], near[2:4], near[[0, 0, 0]])
    sent = asked(k_fed(k=9), people, tmp_path / "a")
    assert [len(sent[c]["centres"]) for c in range(4)] == [3, 1, 2, 1]
    assert sent[3]["points"].tolist() == [3]
    state, _, _ = drive(experiment(k_fed(k=3, local=3), people), tmp_path / "b", rounds=1)
    assert state.groups[0] == state.groups[1] == state.groups[3] != state.groups[2]


def test_words_are_refused_in_a_sentence(tmp_path):
    tokens = torch.randint(0, 50, (6, 8))
    with pytest.raises(ConfigError, match=r"k-fed .* client 0 are token indices .*int64.*fedclust"):
        asked(k_fed(k=2), table(tokens, tokens), tmp_path)


def test_the_centres_cost_their_messages_to_the_byte(tmp_path):
    made = experiment(k_fed(k=4))
    channel, engine, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    body = '{"order":"init.0","round":0,"task":"centre","arrays":{},"config":{}}'
    for client, moved in channel.state.ledger.method.items():
        assert moved.down == 8 + len(f'{{"body":{body},"arrays":[]}}')
        examples = len(made.population.clients[client].train)
        arrays = {"centres": {"$tensor": 0}, "points": {"$tensor": 1}}
        text = json.dumps(
            {"examples": examples, "arrays": arrays, "metrics": {}}, separators=(",", ":")
        )
        # Two centres of 64 pixels, four bytes each number, and two counts of eight bytes.
        head = f'{{"body":{text},"arrays":[["f4",[2,64],512],["i8",[2],16]]}}'
        assert moved.up == 8 + len(head) + 512 + 16
        assert int(engine.of("init.0")[client].sent["points"].sum()) == examples
    assert channel.exposed == {"each"}


# --- rounds and newcomers ------------------------------------------------------------------------


def test_every_model_moves_with_its_own_group():
    sent = {0: (1, 1), 1: (5, 7), 2: (3, 3), 3: (9, 9)}
    fed = by_hand(SENT, sent)
    fed.examples = {0: 1, 2: 3}
    method = k_fed(k=3, local=2)
    state = method.round(fed, method.init(fed, setup(START, range(4))), Round(0, [0, 1, 2]))
    # (1·1 + 3·3)/4 = 2.5 in group 0; client 1 is alone in group 2.
    assert {s: m.vector.tolist() for s, m in state.models.items()} == {0: [2.5, 2.5], 2: [5, 7]}


def test_newcomers_join_by_their_centres():
    new = {
        4: {2: 1, 12: 3},  # most at 12, nearest to 10: group 2
        5: {19: 5, 4: 2, 9: 1},  # most at 19, whose group has no model; then at 4: group 0
        6: {19: 5},  # nothing where there is a model: 19 is nearer to 10 than to 0
        7: None,
        8: dict(SENT[1]),  # as client 1
    }
    fed = by_hand({**SENT, **new})
    method = k_fed(k=3, local=2)
    state = method.init(fed, setup(START, range(4)))
    found = method.admit(fed, state, Round(5, [4, 5, 6, 7, 8]))
    assert found.groups == {**state.groups, 4: 2, 5: 0, 6: 2, 8: 2}  # 7 stays outside
    assert found.models == state.models
    assert torch.equal(found.memory["seeds"], state.memory["seeds"])
    assert {o.task for o in fed.asked[-1][1].values()} == {"centre"}
    assert method.sends(found, 6)["2"] is not None


def test_who_did_not_answer_at_first_is_placed_at_its_turn():
    sent = {**SENT, 1: None}
    sent[0] = {0: 3, 10: 5}
    fed = by_hand(sent, dict.fromkeys(range(4), (1, 1)))
    method = k_fed(k=3, local=2)
    state = method.init(fed, setup(START, range(4)))
    assert state.groups == {0: 2, 2: 0, 3: 0}
    sent[1] = dict(SENT[1])
    state = method.round(fed, state, Round(0, [1, 2]))
    assert state.groups == {0: 2, 1: 2, 2: 0, 3: 0}
    assert [sorted(orders) for _, orders, _ in fed.asked[-2:]] == [[1], [1, 2]]
    with pytest.raises(TrainingError, match="no client sent its centres"):
        begun({0: None, 1: None}, 1)


def test_fewer_answers_than_clusters_are_fewer_clusters():
    state = begun({0: {0: 1, 9: 2}, 1: None, 2: None}, 4)
    assert (state.groups, state.notes["clusters"]) == ({0: 1}, 2)


# --- real data -----------------------------------------------------------------------------------


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return models(made, state, channel)


@pytest.mark.parametrize("settings", [{"rounds": 3}, {"rounds": 4, "cohort": 0.5}])
def test_one_cluster_is_fedavg_to_the_bit(settings, tmp_path):
    fedavg = trained(coterie.fedavg(), tmp_path / "f", settings=settings)
    assert same_bits(trained(k_fed(k=1), tmp_path / "one", settings=settings), fedavg)
    assert not same_bits(trained(k_fed(k=2), tmp_path / "two", settings=settings), fedavg)


def test_a_cluster_each_is_local_to_the_bit(tmp_path):
    """Six clients far from each other: with k = 6 and one centre each, every client is alone."""
    far = [100.0 * torch.eye(6)[i] + torch.randn(20, 6) for i in range(6)]
    ours = trained(k_fed(k=6, local=1), tmp_path / "a", population=table(*far))
    local = trained(coterie.local(), tmp_path / "b", population=table(*far))
    assert same_bits(ours, local)


def planted(seed):
    """Twelve clients in three groups; each has most points near its group's mean."""
    random = np.random.default_rng(seed)
    means = 30 * np.eye(20)[:4]
    truth = random.permutation(np.repeat(np.arange(3), 4))
    people = [
        means[random.permutation([g] * 20 + [3] * 9)] + random.normal(size=(29, 20)) for g in truth
    ]
    return table(*[p.astype(np.float32) for p in people]), truth


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found_in_any_order_and_from_any_seed(seed, tmp_path):
    people, truth = planted(seed)
    order = np.random.default_rng(seed).permutation(12)
    turned = replace(people, clients=tuple(people.clients[i] for i in order))
    labels = {}
    for name, population, settings in (
        ("a", people, {}), ("b", turned, {}), ("c", people, {"seed": 7}),
    ):  # fmt: skip
        made = experiment(k_fed(k=4), population, settings={"rounds": 1, **settings})
        state, _, _ = drive(made, tmp_path / name)
        labels[name] = [state.groups[c] for c in range(12)]
        assert len(state.models) == 3  # nobody has most of its points in the fourth cluster
    assert canonical(labels["a"]).tolist() == canonical(truth).tolist()
    assert labels["b"] == [labels["a"][i] for i in order]  # to the number of the group
    assert labels["c"] == labels["a"]


def test_a_lost_answer_places_a_client_where_it_would_have_been(tmp_path):
    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (3, "init.0"))

    people, truth = planted(0)
    state, channel, _ = drive(experiment(k_fed(k=4), people), tmp_path, lossy, rounds=1)
    assert canonical([state.groups[c] for c in range(12)]).tolist() == canonical(truth).tolist()
    assert channel.state.ledger.lost == 1


def test_only_centres_travel_before_the_first_round(tmp_path):
    _, channel, engine = drive(experiment(k_fed(k=4)), tmp_path, Spy, rounds=1)
    for seen in engine.of("init.0").values():
        assert (seen.task, seen.down, seen.payload) == ("centre", {}, (0, 528))
    assert {s.order for s in engine.seen} == {"init.0", "1.0"}
    assert channel.exposed == {"each", "means"}


def test_parameters_that_make_no_sense(tmp_path):
    for wrong in ({"k": 0}, {"k": 2.5}, {"k": 4, "local": 0}, {"k": 4, "local": 5}, {}):
        with pytest.raises(ConfigError, match="k-fed"):
            k_fed(**wrong)
    # Six clients with round(√k) centres each: 6·round(√36) = 36, but 6·round(√37) is less than 37.
    experiment(k_fed(k=36)).plan(tmp_path)
    with pytest.raises(ConfigError, match="6 clients with 6 centres each cannot form k = 37"):
        experiment(k_fed(k=37)).plan(tmp_path)
    experiment(k_fed(k=37, local=7)).plan(tmp_path)
