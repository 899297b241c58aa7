"""Rules that regroup clients: FL+HC, FLIS, Gong's adaptive clustering and ClusterFL, by hand."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.clustering import kmeans_up_to, manhattan
from coterie.compose.grouped import combined
from coterie.core.messages import Upload
from coterie.core.method import Public, Round
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, TrainingError
from coterie.methods.regrouped import adaptive, clusterfl, fl_hc, flis
from faulty import Faulty
from scripted import Scripted, Spy, halves, linears, opened, setup, steps, weights
from support import drive, experiment, models, on_quadratics

PLANE = linears((1, 1))
IDS = [2, 5, 6, 9]


class People(Scripted):
    """Clients that change what they receive by ``moves[round][client]``; None is no answer.

    A client makes the same change from both halves of its data.
    """

    def __init__(self, moves, examples=None):
        super().__init__(self.answer, range(0), examples or {})
        self.moves, self.round, self.held = moves, 0, {}

    def answer(self, order):
        if order.task == "count":
            return Upload()
        if order.task == "pick":
            return Upload(metrics={"slot": float(order.client % len(order.arrays))})
        move = self.moves[self.round][order.client]
        if move is None:
            return None
        if order.task == "steps":
            self.held[order.client] = order.arrays["model"]
            return steps(25)
        if order.task == "score-cuts":
            raise AssertionError("no trial was to be made")
        (start,) = order.arrays.values() or [self.held[order.client]]
        moved = Weights(start.layout, start.vector + torch.tensor(move))
        return halves(moved) if order.task == "halves" else Upload({"model": moved})


def run(method, people, cohorts, clients=IDS, start=(0.0, 0.0), layout=PLANE, public=None):
    state = method.init(people, setup(weights(layout, *start), clients))
    for number, cohort in enumerate(cohorts):
        people.round = number
        state = method.round(people, state, Round(number, cohort, public))
    return state


def parts(state):
    found = {}
    for c, slot in sorted(state.groups.items()):
        found.setdefault(slot, []).append(c)
    return sorted(found.values())


def exchanges(people):
    return [(kind, sorted(orders)) for kind, orders, _ in people.asked]


# --- the rule that all share ----------------------------------------------------------------------

ROUND = {2: (4, 0), 5: (0, 4), 6: (6, 0), 9: (0, 2)}
COUNTS = {2: 1, 5: 1, 6: 3, 9: 1}


def test_all_train_in_the_round_of_the_clustering_and_only_the_cohort_in_others():
    people = People(dict.fromkeys(range(3), ROUND), COUNTS)
    state = run(fl_hc(rounds=1, clusters=2), people, [[2, 5], [5, 9], [2, 6]])
    assert exchanges(people) == [
        ("reduce", [2, 5]),
        ("gather", [5, 9]),
        ("gather", [2, 6]),
        ("reduce", [2, 6]),
    ]
    assert parts(state) == [[2, 6], [5, 9]]


def test_each_groups_model_is_the_mean_by_samples_of_what_was_just_trained():
    people = People({0: ROUND}, COUNTS)
    state = run(fl_hc(rounds=0, clusters=2), people, [[5, 6]], start=(1.0, 1.0))
    assert {s: m.vector.tolist() for s, m in state.models.items()} == {
        "1/0": [1 + 22 / 4, 1.0],  # (4 + 3·6)/4
        "1/1": [1.0, 1 + 3.0],
    }
    assert state.groups == {2: "1/0", 5: "1/1", 6: "1/0", 9: "1/1"}


def test_clustering_and_the_round_after_it_are_one():
    """With all clients taking part, it is as if the groups had been known before the round."""
    people = People(dict.fromkeys(range(2), ROUND), COUNTS)
    ours = run(fl_hc(rounds=1, clusters=2), people, [IDS, IDS])
    # Round 1: (4 + 18, 4 + 2)/6 = (11/3, 1). Then 2 and 6 add (5.5, 0), 5 and 9 add (0, 3).
    assert ours.models["2/0"].vector.tolist() == pytest.approx([11 / 3 + 5.5, 1.0])
    assert ours.models["2/1"].vector.tolist() == pytest.approx([11 / 3, 4.0])


def test_what_happened_can_be_read():
    state = run(fl_hc(rounds=0, threshold=2.5), People({0: ROUND}), [IDS])
    notes = state.notes
    assert json.loads(json.dumps(notes)) == notes  # as a resumed run reads it
    assert notes["clients"] == IDS
    assert notes["distances"][0] == pytest.approx([0, 32**0.5, 2.0, 20**0.5], abs=1e-5)
    assert notes["threshold"] == 2.5
    assert len(notes["dendrogram"]) == 3
    assert notes["silhouette"].keys() == {"2", "3"}
    assert notes["why"] == "the threshold was given"


def test_who_does_not_answer_has_no_group_until_its_turn():
    """Client 5, not in the cohort, is asked and does not answer; later it picks a group."""
    people = People({0: {**ROUND, 5: None}, 1: ROUND}, COUNTS)
    method = fl_hc(rounds=0, clusters=2)
    state = run(method, people, [[2, 6, 9]])
    assert parts(state) == [[2, 6], [9]]
    people.round = 1
    people.asked.clear()
    state = method.round(people, state, Round(1, [5, 9]))
    assert exchanges(people) == [("gather", [5]), ("reduce", [5, 9])]
    assert list(people.asked[0][1][5].arrays) == ["1/0", "1/1"]
    assert parts(state) == [[2, 6], [5, 9]]
    assert state.models["1/1"].vector.tolist() == [0.0, 2 + 3.0]  # (4 + 2)/2 more


def test_nobody_answers_the_clustering():
    people = People({0: dict.fromkeys(IDS), 1: ROUND})
    state = run(fl_hc(rounds=0, clusters=2), people, [[2, 5]])
    assert parts(state) == [IDS]
    assert state.models[0].vector.tolist() == [0.0, 0.0]
    for periodic in (adaptive(threshold=0.5, every=1), adaptive(every=1, trial="off")):
        state = run(periodic, People({0: dict.fromkeys(IDS), 1: ROUND}), [[2], [2]])
        assert parts(state) == [[2, 6], [5, 9]]


def test_a_clustering_that_nobody_answered_is_made_up_for():
    silent = dict.fromkeys(IDS)
    people = People({0: silent, 1: ROUND, 2: ROUND})
    state = run(fl_hc(rounds=0, clusters=2), people, [IDS, IDS, IDS])
    assert set(state.groups.values()) == {"2/0", "2/1"}  # once, in the second round


def test_fewer_answers_than_groups():
    silent = {0: {2: (1, 0), 5: None, 6: None, 9: None}}
    public = Public(torch.zeros(2, 1), lambda model, x: torch.zeros(2, 3))
    for method in (
        fl_hc(rounds=0, clusters=3), clusterfl(k=3), flis(threshold=0.5), adaptive(threshold=0.5)
    ):  # fmt: skip
        assert parts(run(method, People(silent), [IDS], public=public)) == [[2]]
    for method in (flis(), adaptive(), fl_hc(0)):  # one client is no evidence: they stay together
        assert parts(run(method, People(silent), [IDS], public=public)) == [IDS]


def test_groups_have_new_names_so_that_a_servers_momentum_begins_anew():
    both = {"a": adaptive(threshold=-1.0, every=2), "fedavgm": coterie.fedavgm(momentum=0.5)}
    method = combined("adaptive+fedavgm", both)
    people = People(dict.fromkeys(range(4), dict.fromkeys(IDS, (1, 0))))
    states = [run(method, people, [IDS] * n) for n in range(1, 5)]
    assert [list(s.models) for s in states] == [["1/0"], ["1/0"], ["3/0"], ["3/0"]]
    # Every second round there is a new model; the one between steps by a fresh velocity of 1.
    assert [float(next(iter(s.models.values())).vector[0]) for s in states] == [1, 2, 3, 4]
    assert list(states[3].memory["server"]) == ["3/0"]


def test_models_that_nobody_has_are_gone():
    moves = {0: ROUND, 1: {2: (4, 0), 5: (9, 0), 6: (4, 0), 9: (9, 0)}}
    state = run(adaptive(threshold=0.5, every=1), People(moves), [IDS, IDS])
    assert set(state.models) == set(state.groups.values())


def test_with_nothing_shared_there_is_nothing_to_compare(tmp_path):
    both = {"fl-hc": fl_hc(rounds=0, clusters=2), "fedper": coterie.fedper(k=2)}
    state, _, _ = drive(experiment(combined("x", both)), tmp_path)
    assert set(state.groups.values()) == {0}


def test_buffers_are_averaged_but_not_compared():
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)))
    # By parameters 2 is with 5, by the running mean with 6.
    noisy = {0: {2: (4, 0, 0, 0, 0), 5: (5, 0, 0, 90, 0), 6: (0, 5, 0, 0, 0), 9: (0, 2, 0, 90, 0)}}
    for method in (fl_hc(rounds=0, clusters=2), adaptive(threshold=0.5), clusterfl(k=2)):
        state = run(method, People(noisy), [IDS], start=(0.0,) * 5, layout=layout)
        assert parts(state) == [[2, 5], [6, 9]]
        assert [float(m.vector[3]) for m in state.models.values()] == [45.0, 45.0]


# --- evidence, where nothing is given -------------------------------------------------------------


def tasks(people):
    """The tasks of each exchange, and the clients asked."""
    return [(next(iter(orders.values())).task, sorted(orders)) for _, orders, _ in people.asked]


def test_fl_hc_asks_everybody_once_after_its_rounds():
    people = People(dict.fromkeys(range(4), ROUND))
    state = run(fl_hc(rounds=2, trial="off"), people, [[2, 5]] * 4)
    assert tasks(people) == [
        ("train", [2, 5]), ("train", [2, 5]), ("steps", IDS), ("halves", IDS), ("train", [2, 5]),
        ("train", [2, 5]),
    ]  # fmt: skip
    assert state.groups == {2: "2/0", 5: "2/1", 6: "2/0", 9: "2/1"}
    # Two rounds of (4 + 0, 0 + 4)/2 = (2, 2), then (4, 0) and (0, 4) twice.
    assert state.models["2/0"].vector.tolist() == [4 + 8, 4]
    assert state.models["2/1"].vector.tolist() == [4, 4 + 8]


@pytest.mark.parametrize("given", [{}, {"clusters": 2}, {"threshold": 1.0}])
def test_a_run_of_fl_hc_that_ends_before_its_clustering_has_a_reason(given):
    people = People(dict.fromkeys(range(4), ROUND))
    state = fl_hc(rounds=2, **given).init(people, setup(weights(PLANE, 0, 0), IDS))
    assert state.notes == {"why": "clients are compared in round 3, after 2 rounds with one model"}
    result = coterie.simulate(
        [(torch.ones(9, 2), torch.arange(9) % 2)] * 3,
        "logistic",
        fl_hc(**given),
        rounds=1,
        engine="loop",
    )
    assert result.summary["grouping"] == {
        "sentence": "One group: clients are compared in round 6, after 5 rounds with one model."
    }


def test_adaptive_asks_again_while_there_is_one_group_and_ever_less_often():
    alike = dict.fromkeys(range(30), dict.fromkeys(IDS, (1, 1)))
    people = People(alike)
    asked = []
    method = adaptive(every=3, trial="off")
    state = method.init(people, setup(weights(PLANE, 0, 0), IDS))
    for number in range(30):
        people.asked.clear()
        state = method.round(people, state, Round(number, IDS))
        asked += [number] * any(task == "steps" for task, _ in tasks(people))
    assert asked == [0, 3, 6, 12, 24]
    apart = People(dict.fromkeys(range(9), ROUND))
    assert parts(run(method, apart, [IDS] * 9)) == [[2, 6], [5, 9]]
    assert [task for task, _ in tasks(apart)].count("steps") == 1


def test_flis_compares_what_models_answer():
    """By outputs client 2 is with 9, although by updates it is with 6."""

    def unlike(model, x):
        kind = {(4, 0): 0, (0, 4): 1, (6, 0): 1, (0, 2): 0}[tuple(map(int, model.vector))]
        return 200.0 * nn.functional.one_hot(torch.tensor([kind] * 5), 2)

    public = Public(torch.zeros(5, 1), unlike)
    state = run(flis(trial="off"), People({0: ROUND}), [IDS], public=public)
    assert parts(state) == [[2, 9], [5, 6]]
    assert parts(run(adaptive(trial="off"), People({0: ROUND}), [IDS])) == [[2, 6], [5, 9]]


def test_a_probe_that_nobody_answers_is_made_up_for():
    silent = dict.fromkeys(IDS)
    people = People({0: silent, 1: ROUND})
    state = run(fl_hc(rounds=0, trial="off"), people, [IDS, IDS])
    assert set(state.groups.values()) == {"1/0", "1/1"}
    assert [task for task, _ in tasks(people)] == ["steps", "train", "steps", "halves", "train"]


# --- FL+HC ----------------------------------------------------------------------------------------

# Of three updates, l1 finds the first and the last nearest (4 against 4.2), l2 the last two (2.97
# against 4), and the first two are parallel.
THREE = {0: {2: (6.1, 2.1), 5: (12.2, 4.2), 6: (10.1, 2.1)}}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("l1", [[2, 6], [5]]), ("l2", [[2], [5, 6]]), ("cosine", [[2, 5], [6]])],
)
def test_metrics_by_hand(metric, expected):
    state = run(fl_hc(0, clusters=2, metric=metric), People(THREE), [IDS[:3]], IDS[:3])
    assert parts(state) == expected


@pytest.mark.parametrize(
    ("linkage", "expected"), [("single", [[2, 5, 6], [9]]), ("complete", [[2, 5], [6, 9]])]
)
def test_linkages_by_hand(linkage, expected):
    line = {0: {2: (0, 0), 5: (1, 0), 6: (2.2, 0), 9: (4.2, 0)}}
    state = run(fl_hc(0, clusters=2, linkage=linkage), People(line), [IDS])
    assert parts(state) == expected


def test_threshold_by_hand():
    line = {0: {2: (0, 0), 5: (1, 0), 6: (5, 0), 9: (7, 0)}}
    # Merges at 1, 2 and (5 + 7 + 4 + 6)/4 = 5.5.
    cuts = {0.5: 4, 1.0: 3, 1.9: 3, 2.0: 2, 5.4: 2, 5.5: 1, float("inf"): 1}
    for height, groups in cuts.items():
        state = run(fl_hc(0, threshold=height), People(line), [IDS])
        assert len(parts(state)) == groups


def test_updates_are_compared_and_not_models():
    """Far from 0 all models point the same way, and changes of earlier rounds do not count."""
    moves = {0: {2: (9, 9), 5: (-9, -9), 6: (9, 9), 9: (-9, -9)}, 1: ROUND}
    rule = fl_hc(rounds=1, metric="cosine", threshold=0.5)
    state = run(rule, People(moves), [IDS, IDS], start=(100.0, 100.0))
    assert parts(state) == [[2, 6], [5, 9]]
    assert state.notes["distances"][0] == [0.0, 1.0, 0.0, 1.0]


def test_manhattan_in_blocks_is_manhattan():
    rows = np.random.default_rng(0).normal(size=(5, 10_000)).astype(np.float32)
    slow = abs(rows[:, None].astype(float) - rows[None]).sum(-1)
    assert np.allclose(manhattan(rows), slow, rtol=1e-12)
    assert manhattan(rows[:1]).tolist() == [[0.0]]


def test_what_fl_hc_refuses(tmp_path):
    with pytest.raises(ConfigError, match="fl-hc: give threshold or clusters, not both"):
        fl_hc(clusters=2, threshold=1.0)
    with pytest.raises(ConfigError, match="clusters = 7 groups for 6 clients"):
        experiment(fl_hc(clusters=7)).plan(tmp_path)
    for given in ({"rounds": -1}, {"threshold": -1.0}, {"clusters": 0}, {"metric": "cos"}):
        with pytest.raises(ConfigError, match=f"method fl-hc: {next(iter(given))}"):
            fl_hc(**given)


# --- FLIS -----------------------------------------------------------------------------------------

# What each client's model answers to five public samples, with certainty: 2 and 5 agree on four of
# them, 5 and 6 on three, 2 and 6 on two; 9 agrees with nobody. The cosine is the share.
ANSWERS = {2: [0, 0, 0, 0, 0], 5: [0, 0, 0, 0, 1], 6: [0, 0, 1, 1, 1], 9: [2, 2, 2, 2, 2]}


def certain(model, x):
    client = round(float(model.vector[0]))
    return 200.0 * nn.functional.one_hot(torch.tensor(ANSWERS[client]), 3)


PUBLIC = Public(torch.zeros(5, 1), certain)


def answered(public=PUBLIC, rounds=1, **given):
    people = People({n: {c: (float(c), 0) for c in IDS} for n in range(rounds)})
    return run(flis(**given), people, [IDS] * rounds, public=public), people


@pytest.mark.parametrize(
    ("graph", "threshold", "expected"),
    [
        ("hierarchical", 0.81, [[2], [5], [6], [9]]),
        ("hierarchical", 0.79, [[2, 5], [6], [9]]),
        ("hierarchical", 0.51, [[2, 5], [6], [9]]),
        ("hierarchical", 0.49, [[2, 5, 6], [9]]),  # 6 agrees with 2 and 5 on half of all
        ("threshold", 0.81, [[2], [5], [6], [9]]),
        ("threshold", 0.61, [[2, 5], [6], [9]]),
        ("threshold", 0.59, [[2, 5, 6], [9]]),  # 2 and 6 through 5
        ("threshold", 0.01, [[2, 5, 6], [9]]),
        ("hierarchical", 0.0, [IDS]),
        ("threshold", 0.0, [IDS]),
    ],
)
def test_similarity_of_answers_by_hand(graph, threshold, expected):
    assert parts(answered(graph=graph, threshold=threshold)[0]) == expected


def test_the_similarity_is_that_of_probabilities():
    def unsure(model, x):
        return torch.tensor([[1.0, 0.0], [0.0, 2.0]]) * float(model.vector[0])

    state, _ = answered(Public(torch.zeros(2, 1), unsure), threshold=0.5)
    p = {c: [1 / (1 + np.exp(-c)), 1 / (1 + np.exp(c)), 1 / (1 + np.exp(2 * c))] for c in IDS}
    rows = np.array([[a, b, d, 1 - d] for a, b, d in p.values()])
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.allclose(state.notes["distances"], 1 - unit @ unit.T, atol=1e-6)


def test_flis_clusters_once_or_every_so_many_rounds():
    _, once = answered(rounds=1, threshold=0.5)
    assert exchanges(once) == [("gather", IDS)]
    drifting = People({n: dict.fromkeys(IDS, (0, 0)) for n in range(1, 5)})
    drifting.moves[0] = {c: (float(c), 0) for c in IDS}
    public = Public(torch.zeros(4, 1), lambda model, x: torch.zeros(4, 3))
    run(flis(threshold=0.5, every=2), drifting, [IDS] * 5, public=public)
    assert [kind for kind, _, _ in drifting.asked] == [
        "gather", "reduce", "gather", "reduce", "gather",
    ]  # fmt: skip
    drifting.asked.clear()
    run(flis(threshold=0.5), drifting, [IDS] * 5, public=public)
    assert [kind for kind, _, _ in drifting.asked] == ["gather"] + ["reduce"] * 4


@pytest.mark.parametrize("public", [None, Public(torch.zeros(0, 1), certain)])
def test_flis_needs_public_samples_and_says_so_before_training(public):
    with pytest.raises(ConfigError, match=r"flis needs public samples.*data\.public"):
        flis().check(setup(weights(PLANE, 2, 0), IDS, public=public))
    flis().check(setup(weights(PLANE, 2, 0), IDS, public=PUBLIC))


def test_flis_needs_classes(tmp_path):
    with pytest.raises(ConfigError, match="flis needs classes"):
        flis().check(
            setup(weights(PLANE, 2, 0), IDS, public=Public(torch.zeros(4, 1), lambda m, x: x))
        )
    with pytest.raises(ConfigError, match="flis needs public samples"):
        on_quadratics(flis(), [[1.0], [2.0]]).plan(tmp_path)
    for given in ({"threshold": 1.1}, {"threshold": -0.1}, {"graph": "tree"}, {"every": -1}):
        with pytest.raises(ConfigError, match=f"method flis: {next(iter(given))}"):
            flis(**given)


# --- adaptive -------------------------------------------------------------------------------------

SIZES = [1, 2, 4, 5, 7, 10]
EPOCHS = [1, 1, 2, 2, 4, 5]  # max(1, round(5·n/10)): 0.5, 1, 2, 2.5 (even: 2), 3.5 (even: 4), 5


def epochs_done(spy):
    """A step leaves 0.8 of the distance: from 0 towards 8, θ = 8·(1 − 0.8^steps)."""
    sent = {c: float(seen.sent["model"].vector) for c, seen in sorted(spy.of("1.0").items())}
    return [round(np.log(1 - theta / 8) / np.log(0.8)) for theta in sent.values()]


def trained(method, folder, lost=None, sizes=SIZES):
    made = on_quadratics(method, [[8.0] * n for n in sizes], schedule={"epochs": 5})

    def engine(plan):
        made_engine = Faulty(Spy(plan), lose_reply=lambda c, o: (c, o) == lost)
        spies.append(made_engine.engine)
        return made_engine

    spies = []
    state, _, _ = drive(made, folder, engine, rounds=1)
    return state, spies[0]


def test_epochs_by_hand(tmp_path):
    state, spy = trained(adaptive(threshold=-1.0), tmp_path)
    assert epochs_done(spy) == EPOCHS
    assert state.memory["largest"] == 10
    assert all(not s.up and not s.down for s in spy.of("init.0").values())


def test_whoever_has_more_than_anybody_said_trains_as_long_as_the_run_says(tmp_path):
    _, spy = trained(adaptive(threshold=-1.0), tmp_path, lost=(5, "init.0"))
    assert epochs_done(spy) == [1, 1, 3, 4, 5, 5]  # of 7: 0.71, 1.4, 2.9, 3.6, 5, (7.1)


def test_nobody_says_how_much_it_has(tmp_path):
    mute = on_quadratics(adaptive(), [[1.0], [2.0]])
    with pytest.raises(TrainingError, match="no client reported its number"):
        drive(mute, tmp_path, lambda p: Faulty(Loop(p), lose_reply=lambda c, o: True))


def test_combined_with_another_objective_only_the_grouping_is_taken(tmp_path):
    for n, both in enumerate(
        [
            {"adaptive": adaptive(-1.0, every=3), "fedprox": coterie.fedprox(mu=0.0)},
            {"fedprox": coterie.fedprox(mu=0.0), "adaptive": adaptive(-1.0, every=3)},
        ]
    ):
        state, spy = trained(combined("+".join(both), both), tmp_path / str(n))
        assert epochs_done(spy) == [5] * 6
        assert set(state.groups.values()) == {"1/0"}
    server = {"adaptive": adaptive(-1.0), "fedavgm": coterie.fedavgm()}
    _, spy = trained(combined("adaptive+fedavgm", server), tmp_path / "server")
    assert epochs_done(spy) == EPOCHS


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.65, [[2], [5], [6, 9]]),
        (0.64, [[2, 5], [6, 9]]),
        (-0.82, [[2, 5], [6, 9]]),
        (-0.83, [IDS]),
    ],
)
def test_cut_at_one_minus_t_by_hand(threshold, expected):
    # At 0°, 50° and twice 180°: cos 50° = 0.643; then cos 180° and cos 130°, on average −0.821.
    angle = np.deg2rad(50)
    moves = {0: {2: (1, 0), 5: (9 * np.cos(angle), 9 * np.sin(angle)), 6: (-4, 0), 9: (-1, 0)}}
    assert parts(run(adaptive(threshold=threshold), People(moves), [IDS])) == expected


def test_groups_that_have_learnt_are_not_divided_by_noise():
    """Each group's own changes cancel, but the groups remain where they have moved."""
    moves = {
        0: {2: (4, 0), 5: (-4, 0), 6: (4, 0), 9: (-4, 0)},
        1: {2: (0, 0.1), 5: (0, 0.1), 6: (0, -0.1), 9: (0, -0.1)},
    }
    state = run(adaptive(threshold=0.5, every=1), People(moves), [IDS, IDS])
    assert parts(state) == [[2, 6], [5, 9]]
    assert {s: m.vector.tolist() for s, m in state.models.items()} == {
        "2/0": [4.0, 0.0],
        "2/1": [-4.0, 0.0],
    }


def test_changes_are_measured_from_the_mean_of_the_models_over_clients_by_hand():
    # Groups at (3,0), of three, and at (−1,0): the mean is (2,0). From there to (3,1): (1,1); to
    # (−1,−1): (−3,−1). Their cosine is −4/√20.
    moves = {
        0: {2: (3, 0), 5: (3, 0), 6: (3, 0), 9: (-1, 0)},
        1: {2: (0, 1), 5: (0, 1), 6: (0, 1), 9: (0, -1)},
    }
    state = run(adaptive(threshold=0.5, every=1), People(moves), [IDS, IDS])
    gap = 1 + 4 / 20**0.5
    assert state.notes["distances"][3] == pytest.approx([gap, gap, gap, 0.0], abs=1e-5)
    assert parts(state) == [[2, 5, 6], [9]]


def test_when_adaptive_clusters():
    people = People(dict.fromkeys(range(7), ROUND))
    run(adaptive(threshold=0.5, every=3), people, [[2, 5]] * 7)
    assert [kind for kind, orders in exchanges(people) if orders == [6, 9]] == ["gather"] * 3
    kinds = [kind for kind, orders in exchanges(people) if orders == [2, 5]]
    assert kinds == ["gather", "reduce", "reduce", "gather", "reduce", "reduce", "gather"]


def test_what_adaptive_refuses():
    for given in ({"threshold": 1.5}, {"threshold": -1.5}, {"every": 0}):
        with pytest.raises(ConfigError, match=f"method adaptive: {next(iter(given))}"):
            adaptive(**given)


# --- ClusterFL ------------------------------------------------------------------------------------


def owned(method, targets, folder, rounds, **changes):
    made = on_quadratics(method, targets, **changes)
    state, channel, _ = drive(made, folder, rounds=rounds)
    return state, [float(m) for m in models(made, state, channel)]


def test_two_rounds_of_clusterfl_by_hand(tmp_path):
    # Towards 1 and 3 from 0 with lr 0.1 and α = 0.5. Round 1: no pull yet, 0.2 and 0.6, mean 0.4.
    # Round 2: 0.2 − 0.1·(2·(0.2 − 1) + 2·0.5·(0.2 − 0.4)) = 0.38;
    # 0.6 − 0.1·(2·(0.6 − 3) + 2·0.5·(0.6 − 0.4)) = 1.06.
    rule = clusterfl(k=1, alpha=0.5)
    assert owned(rule, [[1.0], [3.0]], tmp_path / "1", 1)[1] == pytest.approx([0.2, 0.6])
    state, own = owned(rule, [[1.0], [3.0]], tmp_path / "2", 2)
    assert own == pytest.approx([0.38, 1.06])
    assert float(state.models["1/0"].vector) == pytest.approx(0.72)


def test_the_pull_is_towards_the_group_and_not_towards_all(tmp_path):
    # At rest each group of two has w = (2y + 2αw̄)/(2 + 2α), w̄ the mean of its two y: with α = 1
    # halfway between. 8 and 10 end at 8.5 and 9.5.
    state, own = owned(clusterfl(k=2, alpha=1.0), [[8.0], [-8.0], [10.0], [-10.0]], tmp_path, 60)
    assert own == pytest.approx([8.5, -8.5, 9.5, -9.5], abs=1e-4)
    assert state.groups[0] == state.groups[2] != state.groups[1] == state.groups[3]


def test_more_samples_weigh_more_in_the_mean(tmp_path):
    state, _ = owned(clusterfl(k=1, alpha=0.5), [[1.0], [3.0] * 3], tmp_path, 1)
    assert float(state.models["1/0"].vector) == pytest.approx((0.2 + 3 * 0.6) / 4)


def test_one_group_for_k_one():
    assert parts(run(clusterfl(k=1), People({0: ROUND}), [IDS])) == [IDS]


def test_equal_models_form_fewer_groups():
    moves = {0: {2: (1, 0), 5: (1, 0), 6: (1, 0), 9: (5, 5)}}
    assert parts(run(clusterfl(k=3), People(moves), [IDS])) == [[2, 5, 6], [9]]
    rows = np.ones((4, 3), np.float32)
    assert kmeans_up_to(rows, 3)[0].tolist() == [0, 0, 0, 0]


def test_a_client_that_was_not_heard_keeps_its_model_and_picks_a_group(tmp_path):
    targets = [[8.0], [-8.0], [10.0], [-10.0]]
    made = on_quadratics(clusterfl(k=2, every=2), targets)

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (0, "3.0"))

    state, channel, _ = drive(made, tmp_path / "a", lossy, rounds=3)
    assert 0 not in state.groups
    whole, untouched = drive(made, tmp_path / "b", rounds=2)[:2]
    kept = models(made, state, channel)[0]
    assert torch.equal(kept, models(made, whole, untouched)[0])
    channel.begin(3)
    after = made.method.round(channel, state, Round(3, [0, 1]))
    assert after.groups[0] == after.groups[2] != after.groups[1]


def test_a_newcomer_of_clusterfl_uses_its_groups_mean(tmp_path):
    made = on_quadratics(clusterfl(k=2), [[8.0], [-8.0], [10.0], [-10.0], [9.0]])
    channel, _, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    members = setup(plan.start, range(4))
    state = made.method.init(channel, members)
    channel.begin(0)
    state = made.method.round(channel, state, Round(0, range(4)))
    channel.begin(1)
    state = made.method.admit(channel, state, Round(1, [4]))
    assert state.groups[4] == state.groups[0]
    received = channel.fetch(4, made.method.sends(state, 4))
    assert torch.equal(received.vector, state.models[state.groups[0]].vector)


def test_what_clusterfl_refuses(tmp_path):
    with pytest.raises(ConfigError, match="k = 7 groups for 6 clients"):
        experiment(clusterfl(k=7)).plan(tmp_path)
    with pytest.raises(ConfigError, match="method clusterfl"):
        clusterfl()
    for given in ({"k": 0}, {"k": 2, "alpha": -0.1}, {"k": 2, "every": 0}):
        with pytest.raises(ConfigError, match=f"method clusterfl: {list(given)[-1]}"):
            clusterfl(**given)
