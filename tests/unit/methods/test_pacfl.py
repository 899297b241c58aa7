"""PACFL's groups, by angles worked by hand or from real data."""

import json
import math
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
from coterie.methods.pacfl import directions, pacfl, proximity
from faulty import Faulty
from scripted import Scripted, Spy, linears, opened, setup, weights
from support import digits, drive, experiment, models, same_bits

ONE = linears((1, 1))
START = weights(ONE, 0, 0)
X, Y, Z = torch.eye(3)


def line(degrees):
    """A line in the plane at this angle, as a basis of one vector."""
    a = math.radians(degrees)
    return torch.tensor([[math.cos(a)], [math.sin(a)]])


def columns(*vectors):
    return torch.stack(vectors, 1)


def by_hand(bases, sent=None):
    """Clients that send these bases (None is no answer), and in rounds these models."""

    def answer(order):
        if order.task == "span":
            basis = bases.get(order.client)
            return None if basis is None else Upload({"basis": basis})
        return Upload({"model": weights(ONE, *sent[order.client])})

    return Scripted(answer, range(len(bases)))


def begun(bases, **parameters):
    method = pacfl(**parameters)
    return method.init(by_hand(bases), setup(START, sorted(bases)))


def groups(bases, **parameters):
    return begun(bases, **parameters).groups


# Lines at 0°, 2°, 10° and 40°. Merges: the first two at 2; these and the third at (10 + 8)/2 = 9;
# all three and the fourth at the mean over pairs of clients, (40 + 38 + 30)/3 = 36.
LINES = {c: line(a) for c, a in enumerate((0, 2, 10, 40))}


# --- angles --------------------------------------------------------------------------------------


def test_the_linkage_is_the_mean_over_pairs_of_clients():
    """Halving at each merge (WPGMA) would give ((40 + 38)/2 + 30)/2 = 34.5 for the last one."""
    tree = begun(LINES, clusters=2).notes["dendrogram"]
    assert [m[:2] + m[3:] for m in tree] == [[0, 1, 2], [2, 4, 3], [3, 5, 4]]
    assert [m[2] for m in tree] == pytest.approx([2, 9, 36], abs=1e-4)
    assert groups(LINES, threshold=35.0) == {0: 0, 1: 0, 2: 0, 3: 1}


@pytest.mark.parametrize(
    ("threshold", "labels"),
    [
        (0.0, [0, 1, 2, 3]),
        (1.9, [0, 1, 2, 3]),
        (2.1, [0, 0, 1, 2]),
        (8.9, [0, 0, 1, 2]),
        (9.1, [0, 0, 0, 1]),
        (35.9, [0, 0, 0, 1]),
        (36.1, [0, 0, 0, 0]),
        (math.inf, [0, 0, 0, 0]),
    ],
)
def test_the_threshold_given_is_the_threshold_used(threshold, labels):
    state = begun(LINES, threshold=threshold)
    assert state.groups == dict(enumerate(labels))
    assert state.notes["threshold"] == threshold
    assert list(state.models) == sorted(set(labels))
    assert all(m is START for m in state.models.values())


def test_other_linkages():
    # The last merge: at the smallest angle 30, at the largest 40; the one before at 8 and 10.
    assert groups(LINES, threshold=30.1, linkage="single") == dict.fromkeys(range(4), 0)
    assert groups(LINES, threshold=36.1, linkage="complete") == {0: 0, 1: 0, 2: 0, 3: 1}
    assert groups(LINES, threshold=9.1, linkage="complete") == {0: 0, 1: 0, 2: 1, 3: 2}


def test_groups_by_number():
    assert groups(LINES, clusters=2) == {0: 0, 1: 0, 2: 0, 3: 1}
    assert groups(LINES, clusters=4) == {0: 0, 1: 1, 2: 2, 3: 3}
    state = begun({**LINES, 3: None}, clusters=4)  # a reply was lost: three groups, not an end
    assert state.groups == {0: 0, 1: 1, 2: 2}
    assert state.notes["threshold"] is None


@pytest.mark.parametrize("measure", ["smallest", "sum"])
def test_a_singular_vector_has_no_sign(measure):
    """Without the absolute value, 0° and 178° would be 178° apart, and equal lines 180°."""
    a, b = line(0), line(178)
    for one in (a, -a):
        for two in (b, -b):
            assert proximity([one, two, -two], measure)[0, 1] == pytest.approx(2, abs=1e-5)
            assert proximity([one, two, -two], measure)[1, 2] == pytest.approx(0, abs=1e-5)
    flipped = {c: -b if c % 2 else b for c, b in LINES.items()}
    assert groups(flipped, threshold=9.1, measure=measure) == {0: 0, 1: 0, 2: 0, 3: 1}


def test_signs_of_any_vector_of_real_bases_change_no_angle():
    random = np.random.default_rng(0)
    bases = [torch.from_numpy(directions(random.normal(size=(9, 20)), 3)) for _ in range(4)]
    signs = [b * torch.from_numpy(random.choice([-1.0, 1.0], 3)) for b in bases]
    for measure in ("smallest", "sum"):
        np.testing.assert_allclose(proximity(signs, measure), proximity(bases, measure), atol=1e-6)


def test_vectors_that_are_not_orthonormal_are_made_so():
    """The plane of x and x + y contains y, so the angle is 0; the vectors as sent give 45°."""
    slanted = columns(X, (X + Y) / math.sqrt(2))
    assert proximity([slanted, columns(Y)], "smallest")[0, 1] == pytest.approx(0, abs=1e-5)
    # x + y and y + z in planes of z and of x: the angle of planes that share a line is 0, while
    # the largest entry of UᵀV is that of x + y with y + z, cos 60°.
    one, two = columns(X + Y, Z), columns(Y + Z, X)
    assert proximity([one, two], "smallest")[0, 1] == pytest.approx(0, abs=1e-5)
    # And long vectors do not make angles small: 3x against x + y is 45°.
    long = proximity([columns(3 * X), columns(X + Y)], "smallest")
    assert long[0, 1] == pytest.approx(45, abs=1e-5)


def test_planes_by_hand():
    flat, upright = columns(X, Y), columns(Y, Z)
    # They share y: the smallest angle is 0. Pair by pair, x with y and y with z are 90° each.
    assert proximity([flat, upright], "smallest")[0, 1] == pytest.approx(0, abs=1e-5)
    assert proximity([flat, upright], "sum")[0, 1] == pytest.approx(180)
    tilted = columns(math.cos(0.5) * X + math.sin(0.5) * Z, Y)
    assert proximity([flat, tilted], "sum")[0, 1] == pytest.approx(math.degrees(0.5), abs=1e-4)
    # A mixed basis of the same plane is the same space, but not the same vectors.
    turned = columns((X + Y) / math.sqrt(2), (X - Y) / math.sqrt(2))
    assert proximity([flat, turned], "smallest")[0, 1] == pytest.approx(0, abs=1e-5)
    assert proximity([flat, turned], "sum")[0, 1] == pytest.approx(90, abs=1e-4)
    assert groups({0: flat, 1: upright, 2: turned}, threshold=1.0) == {0: 0, 1: 0, 2: 0}
    assert groups({0: flat, 1: upright, 2: turned}, threshold=91.0, measure="sum") == {
        0: 0,
        1: 1,
        2: 0,
    }


def test_clients_with_fewer_vectors_are_compared_too():
    plane, cube = columns(X, Y), torch.eye(3)
    for other, smallest in ((columns(Z), 90), (columns(Y + Z), 45), (columns(X), 0)):
        found = proximity([plane, other, cube], "smallest")
        np.testing.assert_allclose(found[0, 1], smallest, atol=1e-5)
        np.testing.assert_allclose(found[2], [0, 0, 0], atol=1e-5)
    # One pair of two (or of three) that both have, scaled up: 45° counts thrice beside three.
    found = proximity([columns(X + Y), plane, cube], "sum")
    np.testing.assert_allclose(found, [[0, 135, 135], [135, 0, 0], [135, 0, 0]], atol=1e-4)


@pytest.mark.parametrize(("measure", "right"), [("smallest", 90), ("sum", 180)])
def test_what_spans_nothing_is_at_right_angles_to_all_but_its_like(measure, right):
    nothing = torch.zeros(3, 1)
    found = proximity([nothing, columns(X, Y), nothing, columns(Z)], measure)
    np.testing.assert_allclose(found[0], [0, right, 0, right], atol=1e-5)
    np.testing.assert_allclose(found, found.T)


# --- what a client sends -------------------------------------------------------------------------


def test_the_directions_are_those_of_the_data_as_they_are():
    # Not centred: the mean is by far the longest. Centred, the first direction would be y.
    rows = np.array([[10.0, 1.0], [10.0, -1.0], [10.0, 1.0], [10.0, -1.0]])
    np.testing.assert_allclose(abs(directions(rows, 1)), [[1], [0]], atol=1e-12)
    np.testing.assert_allclose(abs(directions(rows, 2)), np.eye(2), atol=1e-12)
    # By strength: σ = 3·√2 along z, 2 along x, 1 along y.
    rows = np.array([[0, 0, 3.0], [2.0, 0, 0], [0, 1.0, 0], [0, 0, -3.0]])
    np.testing.assert_allclose(abs(directions(rows, 2)), np.eye(3)[:, [2, 0]], atol=1e-12)


def test_no_more_directions_than_the_data_have():
    random = np.random.default_rng(1)
    assert directions(random.normal(size=(50, 2)), 3).shape == (2, 2)  # features
    assert directions(random.normal(size=(2, 50)), 3).shape == (50, 2)  # samples
    flat = random.normal(size=(40, 2)) @ random.normal(size=(2, 30))  # rank, in float32
    assert directions(flat.astype(np.float32), 5).shape == (30, 2)
    same = np.repeat(random.normal(size=(1, 30)), 12, axis=0).astype(np.float32)
    found = directions(same, 3)
    np.testing.assert_allclose(abs(found[:, 0]), abs(same[0]) / np.linalg.norm(same[0]), atol=1e-6)
    assert found.shape == (30, 1)
    assert directions(np.zeros((4, 3)), 2).tolist() == [[0.0]] * 3


def table(*clients):
    """A population whose clients hold these inputs, for both training and testing."""
    people = []
    for rows in clients:
        x = torch.as_tensor(rows)
        split = Split(x, torch.arange(len(x)) % 2)
        people.append(ClientData(split, split, split))
    shape = tuple(people[0].train.x.shape[1:])
    return Population(tuple(people), "table", shape, ("a", "b"), 2)


def asked(method, population, folder):
    """Each client's answer to the first question."""
    made = experiment(method, population)
    channel, engine, plan = opened(made, folder)
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    return {c: s.sent for c, s in engine.of("init.0").items()}


@pytest.mark.parametrize("asked_for", [{}, {"p": 1}, {"p": 2}, {"p": 5}])
def test_each_client_sends_p_vectors_and_three_by_default(asked_for, tmp_path):
    shape = (64, asked_for.get("p", 3))
    sent = asked(pacfl(clusters=2, **asked_for), digits(), tmp_path / "a")
    assert {tuple(s["basis"].shape) for s in sent.values()} == {shape}
    sent = asked(pacfl(**asked_for), digits(), tmp_path / "b")
    assert {tuple(v.shape) for s in sent.values() for v in s.values()} == {shape}
    assert {tuple(s) for s in sent.values()} == {("first data", "second data")}


def test_bytes_are_seen_as_the_model_sees_them(tmp_path):
    # 255 is 1 and 0 is −1: the direction is (1, −1, 1, 1)/2. As bytes it would be (1, 0, 1, 1)/√3.
    image = torch.tensor([255, 0, 255, 255], dtype=torch.uint8).reshape(1, 1, 2, 2)
    sent = asked(pacfl(p=1, clusters=1), table(image, image, image.repeat(3, 1, 1, 1)), tmp_path)
    for answer in sent.values():
        basis = answer["basis"]
        assert basis.dtype == torch.float32
        np.testing.assert_allclose(basis * basis[0].sign(), [[0.5], [-0.5], [0.5], [0.5]])


def test_words_are_refused_in_a_sentence(tmp_path):
    tokens = torch.randint(0, 50, (6, 8))
    for method, who in ((pacfl(clusters=1), "method pacfl"), (pacfl(), "a probe by data")):
        with pytest.raises(ConfigError, match=rf"{who} .* client 0 are token ind.*int64.*fedclust"):
            asked(method, table(tokens, tokens), tmp_path)


def test_test_data_have_no_say(tmp_path):
    people = table(*[torch.randn(9, 4) for _ in range(3)])
    noise = Split(torch.randn(50, 4) * 100, torch.zeros(50, dtype=torch.int64))
    other = replace(
        people, clients=tuple(replace(c, test=noise, val=noise) for c in people.clients)
    )
    for i, method in enumerate((pacfl(clusters=1), pacfl())):
        one, two = (asked(method, p, tmp_path / f"{i}{j}") for j, p in enumerate((people, other)))
        assert all(torch.equal(one[c][name], two[c][name]) for c in one for name in one[c])


def test_the_vectors_cost_their_messages_to_the_byte(tmp_path):
    made = experiment(pacfl(clusters=2))
    channel, _, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    body = '{"order":"init.0","round":0,"task":"span","arrays":{},"config":{}}'
    for client, moved in channel.state.ledger.method.items():
        assert moved.down == 8 + len(f'{{"body":{body},"arrays":[]}}')
        examples = len(made.population.clients[client].train)
        reply = {"examples": examples, "arrays": {"basis": {"$tensor": 0}}, "metrics": {}}
        text = json.dumps(reply, separators=(",", ":"))
        # Three vectors of 64 pixels, four bytes each number.
        assert moved.up == 8 + len(f'{{"body":{text},"arrays":[["f4",[64,3],768]]}}') + 768
    assert channel.exposed == {"each"}


# --- rounds and newcomers ------------------------------------------------------------------------


def test_every_model_moves_with_its_own_group():
    sent = {0: (1, 1), 1: (3, 3), 2: (5, 5), 3: (7, 9)}
    fed = by_hand(LINES, sent)
    fed.examples = {0: 1, 1: 3}
    method = pacfl(threshold=9.1)
    state = method.round(fed, method.init(fed, setup(START, range(4))), Round(0, [0, 1, 3]))
    assert [m.vector.tolist() for m in state.models.values()] == [[2.5, 2.5], [7, 9]]


def test_a_newcomer_joins_the_group_at_the_smallest_mean_angle():
    # Groups at 0°, 20° and at 60°, 62°. From 38° the means are 28 and 23, though the nearest
    # member, 18 away, is of the first; from 35°: 25 and 26.
    bases = {c: line(a) for c, a in enumerate((0, 20, 60, 62))}
    new = {4: line(38), 5: line(35), 6: None, 7: -line(38)}
    fed = by_hand({**bases, **new}, dict.fromkeys(range(4), (1, 1)))
    method = pacfl(threshold=30.0)
    state = method.round(fed, method.init(fed, setup(START, range(4))), Round(0, range(4)))
    assert state.groups == {0: 0, 1: 0, 2: 1, 3: 1}
    found = method.admit(fed, state, Round(1, [4, 5, 6, 7]))
    assert found.groups == {**state.groups, 4: 1, 5: 0, 7: 1}  # 6 did not answer: it stays outside
    assert sorted(fed.asked[-1][1]) == [4, 5, 6, 7]
    assert {o.task for o in fed.asked[-1][1].values()} == {"span"}
    assert method.sends(found, 4)["1"].vector.tolist() == [1, 1]


def test_newcomers_are_not_clustered_with_the_others():
    """A client at 40° between groups at 0° and 80° would have joined them, or been alone."""
    bases = {0: line(0), 1: line(1), 2: line(80), 3: line(81), 4: line(40), 5: line(41)}
    fed = by_hand(bases)
    method = pacfl(threshold=41.0)
    state = method.init(fed, setup(START, range(4)))
    assert sorted(fed.asked[0][1]) == [0, 1, 2, 3]  # nobody else is asked before
    found = method.admit(fed, state, Round(1, [4]))
    assert found.groups == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}
    assert found.models == state.models
    # Nor does the first newcomer draw the second: alone, in any order, it goes where it went.
    both = method.admit(fed, state, Round(1, [4, 5]))
    later = method.admit(fed, found, Round(2, [5]))
    first = method.admit(fed, method.admit(fed, state, Round(1, [5])), Round(2, [4]))
    assert both.groups == later.groups == first.groups


def test_who_did_not_answer_at_first_is_placed_at_its_turn():
    bases = {**LINES, 3: None}
    fed = by_hand(bases, dict.fromkeys(range(4), (1, 1)))
    method = pacfl(threshold=9.1)
    state = method.init(fed, setup(START, range(4)))
    assert state.groups == {0: 0, 1: 0, 2: 0}
    bases[3] = line(5)
    state = method.round(fed, state, Round(0, [0, 3]))
    assert state.groups == dict.fromkeys(range(4), 0)
    assert [sorted(orders) for _, orders, _ in fed.asked[-2:]] == [[3], [0, 3]]
    with pytest.raises(TrainingError, match="no client sent its vectors"):
        groups({0: None, 1: None}, clusters=1)


# --- real data -----------------------------------------------------------------------------------


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return models(made, state, channel)


@pytest.mark.parametrize("settings", [{"rounds": 3}, {"rounds": 4, "cohort": 0.5}])
def test_limits_coincide_to_the_bit(settings, tmp_path):
    fedavg = trained(coterie.fedavg(), tmp_path / "f", settings=settings)
    local = trained(coterie.local(), tmp_path / "l", settings=settings)
    for i, (method, equal) in enumerate(
        [
            (pacfl(threshold=math.inf), fedavg),
            (pacfl(threshold=90.0), fedavg),
            (pacfl(threshold=270.0, measure="sum"), fedavg),
            (pacfl(clusters=1), fedavg),
            (pacfl(clusters=6), local),
            (pacfl(threshold=0.0), local),
        ]
    ):
        assert same_bits(trained(method, tmp_path / str(i), settings=settings), equal)
    two = trained(pacfl(clusters=2), tmp_path / "two", settings=settings)
    assert not same_bits(two, fedavg)
    assert not same_bits(two, local)


@pytest.mark.parametrize("seed", range(3))
def test_rotated_digits_are_told_apart_in_any_order(seed, tmp_path):
    people = digits(clients=12, samples=1200, seed=seed)
    truth = np.array(people.groups)
    order = np.random.default_rng(seed).permutation(12)
    turned = replace(people, clients=tuple(people.clients[i] for i in order), groups=None)
    for name, population, expected in (("a", people, truth), ("b", turned, truth[order])):
        made = experiment(pacfl(trial="off"), population)
        state, _, _ = drive(made, tmp_path / name, rounds=1)
        labels = canonical(expected).tolist()
        assert [state.groups[c] for c in range(12)] == [f"0/{g}" for g in labels]


@pytest.mark.parametrize("measure", ["smallest", "sum"])
def test_clients_with_the_same_data_are_never_separated(measure, tmp_path):
    """In any order, rounding errors of an angle of 0 count as no difference."""
    people = digits(clients=2, samples=240)
    twins = []
    for i in range(5):
        for client in people.clients:
            order = torch.randperm(len(client.train), generator=torch.Generator().manual_seed(i))
            shuffled = Split(client.train.x[order], client.train.y[order])
            twins.append(replace(client, train=shuffled))
    made = experiment(pacfl(threshold=0.0, measure=measure), replace(people, clients=tuple(twins)))
    state, _, _ = drive(made, tmp_path, rounds=1)
    assert [state.groups[c] for c in range(10)] == [0, 1] * 5
    one = replace(people, clients=tuple(twins[::2]), groups=None)
    state, _, _ = drive(replace(made, population=one), tmp_path / "one", rounds=1)
    assert set(state.groups.values()) == {0}


def test_a_lost_answer_places_a_client_where_it_would_have_been(tmp_path):
    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (3, "init.0"))

    people = digits(clients=12, samples=1200)
    method = pacfl(trial="off")
    state, channel, _ = drive(experiment(method, people), tmp_path, lossy, rounds=1)
    assert [state.groups[c] for c in range(12)] == [f"0/{g}" for g in people.groups]
    assert channel.state.ledger.lost == 1


def test_only_vectors_travel_before_the_first_round(tmp_path):
    _, channel, engine = drive(experiment(pacfl(clusters=2)), tmp_path, Spy, rounds=1)
    for seen in engine.of("init.0").values():
        assert (seen.task, seen.down, seen.payload) == ("span", {}, (0, 768))
        assert set(seen.sent) == {"basis"}
        gram = seen.sent["basis"].T @ seen.sent["basis"]
        torch.testing.assert_close(gram, torch.eye(3), atol=1e-5, rtol=0)
    assert {s.order for s in engine.seen} == {"init.0", "1.0"}
    assert channel.exposed == {"each", "means"}


def test_parameters_that_make_no_sense(tmp_path):
    for wrong in (
        {"threshold": -1.0}, {"threshold": math.nan}, {"threshold": "atuo"}, {"clusters": 0},
        {"clusters": 2, "threshold": 1.0}, {"p": 0}, {"measure": "largest"}, {"linkage": "wart"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="pacfl"):
            pacfl(**wrong)
    with pytest.raises(ConfigError, match="clusters = 7 groups for 6 clients"):
        experiment(pacfl(clusters=7)).plan(tmp_path)
    experiment(pacfl(clusters=6)).plan(tmp_path)
