"""CFL, with rounds driven by hand: which clients are asked, which groups split, where newcomers go.

Models have two numbers; a script says how each client changes them in each round.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.compose.grouped import combined
from coterie.core.messages import Upload
from coterie.core.method import Round, State
from coterie.core.tree import same
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.methods.cfl import NO_CHANGE, TOO_FEW_UPDATES, cfl
from faulty import Faulty
from scripted import Scripted, Spy, halves, linears, opened, setup, steps, weights
from support import digits, drive, experiment, on_quadratics

PLANE = linears((1, 1))
IDS = [3, 7, 8, 11, 12, 20]  # never a position in any list of them
COUNTS = {3: 1, 8: 2, 20: 1, 7: 2, 11: 1, 12: 1}


class People(Scripted):
    """Clients that change what they receive: ``moves[round][client]``; None is no answer.

    A newcomer's answer to a walk is ``walks[round of the split][client]``. A client makes the same
    change from both halves of its data.
    """

    def __init__(self, moves, examples=COUNTS, walks=None):
        super().__init__(self.answer, range(0), examples)
        self.moves, self.walks, self.round, self.held = moves, walks or {}, 0, {}

    def answer(self, order):
        if order.task == "steps":
            self.held[order.client] = order.arrays["model"]
            return steps(25)
        at = order.config["round"] if order.task == "walk" else self.round
        move = (self.walks if order.task == "walk" else self.moves)[at][order.client]
        (start,) = order.arrays.values() or [self.held[order.client]]
        if move is None:
            return None
        moved = Weights(start.layout, start.vector + torch.tensor(move))
        return halves(moved) if order.task == "halves" else Upload({"model": moved})


def run(method, people, cohorts, clients=IDS, start=(1.0, 1.0), layout=PLANE):
    state = method.init(people, setup(weights(layout, *start), clients))
    for number, cohort in enumerate(cohorts):
        people.round = number
        state = method.round(people, state, Round(number, cohort))
    return state


def values(state):
    return {slot: model.vector.tolist() for slot, model in state.models.items()}


def asked(people):
    return [sorted(orders) for _, orders, _ in people.asked]


# --- two successive splits of six clients, by hand ------------------------------------------------

# Round 1, n·Δ: 3 (4,0), 8 2·(3,3), 20 (0,4): together (10,10). 7 2·(−2,−2), 11 (−6,0), 12 (0,−6):
# together (−10,−10). The mean is 0 < 0.2, the largest 6 > 2. Cosines inside {3,8,20} and inside
# {7,11,12} are up to 0.707, across them 0 at most (3 and 12, 20 and 11). Without weights the mean
# would be (−1/6,−1/6), of norm 0.236: no split.
FIRST = {3: (4, 0), 8: (3, 3), 20: (0, 4), 7: (-2, -2), 11: (-6, 0), 12: (0, -6)}
# Round 2: {3,8,20} move together, (1,1) each. {7,11,12}: 2·(2,0) + (2,0) + (−6,0) = 0, largest 6:
# 7 and 12 part from 11.
SECOND = {3: (1, 1), 8: (1, 1), 20: (1, 1), 7: (2, 0), 12: (2, 0), 11: (-6, 0)}
TWICE = {0: FIRST, 1: SECOND}
RULE = {"eps1": 0.2, "eps2": 2.0, "relative": False}
GROUPS = {3: "00", 8: "00", 20: "00", 7: "010", 12: "010", 11: "011"}


def test_the_first_split_by_hand():
    people = People(TWICE)
    state = run(cfl(**RULE), people, [IDS])
    assert state.groups == {3: "00", 8: "00", 20: "00", 7: "01", 11: "01", 12: "01"}
    # From (1,1): (10,10)/4 and (−10,−10)/4 on top.
    assert values(state) == {"00": [3.5, 3.5], "01": [-1.5, -1.5]}
    assert asked(people) == [IDS]


def test_two_successive_splits_by_hand():
    state = run(cfl(**RULE), People(TWICE), [IDS, IDS])
    assert state.groups == GROUPS
    # {7,12} from (−1.5,−1.5): (2·2 + 2)/3 = 2 more; 11: 6 less.
    assert values(state) == {"00": [4.5, 4.5], "010": [0.5, -1.5], "011": [-7.5, -1.5]}


def test_another_order_of_clients_changes_nothing():
    state = run(cfl(**RULE), People(TWICE), [IDS[::-1], [12, 3, 20, 7, 11, 8]], IDS[::-1])
    assert state.groups == GROUPS
    assert values(state)["011"] == [-7.5, -1.5]


@pytest.mark.parametrize(
    "rule",
    [
        RULE | {"eps1": 0.0},  # a mean of 0 is not below 0
        RULE | {"eps2": 6.0},  # the largest norm is not above 6
        RULE | {"gamma": 0.8},  # √((1 − 0)/2) = 0.707
    ],
)
def test_what_does_not_pass_the_test_stays_together(rule):
    state = run(cfl(**rule), People(TWICE), [IDS])
    assert set(state.groups.values()) == {"0"}
    assert values(state) == {"0": [1.0, 1.0]}


def test_the_guard_lets_through_what_is_far_enough_apart():
    below, above = (run(cfl(gamma=g, **RULE), People(TWICE), [IDS]) for g in (0.7071, 0.7072))
    assert set(below.groups.values()) == {"00", "01"}
    assert set(above.groups.values()) == {"0"}


def test_the_mean_is_weighted_by_samples():
    assert set(run(cfl(**RULE), People(TWICE, {}), [IDS]).groups.values()) == {"0"}


def test_what_happened_can_be_read():
    state = run(cfl(**RULE), People(TWICE), [IDS, IDS])
    notes = state.notes
    assert json.loads(json.dumps(notes)) == notes  # as a resumed run reads it
    assert notes["norms"]["00"] == pytest.approx([2**0.5, 2**0.5])
    assert notes["norms"]["01"] == [0.0, 6.0]
    assert notes["limits"] == [0.2, 2.0]
    (split,) = notes["splits"]
    assert split["group"] == "01"
    assert split["clients"] == [7, 11, 12]
    assert split["parts"] == [[7, 12], [11]]
    assert split["cross"] == -1.0
    assert split["similarity"] == [[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0], [1.0, -1.0, 1.0]]


def test_two_groups_can_split_in_one_round_after_one_question():
    apart = {**SECOND, 3: (4, 0), 20: (-4, 0), 8: (0, 0)}
    people = People({0: FIRST, 1: apart})
    state = run(cfl(**RULE), people, [IDS, [3, 20, 7, 11]])
    # 2·(2,0) + (−6,0) over 7 and 11 alone is (−2/3, 0), too much for 0.2: only 3 and 20 pass.
    assert asked(people)[1:] == [[3, 7, 11, 20], [8]]
    people = People({0: FIRST, 1: {**apart, 11: (-4, 0), 12: (0, 3)}})
    state = run(cfl(**RULE | {"eps1": 1.01}), people, [IDS, [3, 20, 7, 11]])
    assert asked(people)[1:] == [[3, 7, 11, 20], [8, 12]]
    assert len(set(state.groups.values())) == 4
    assert state.groups[7] == state.groups[12] != state.groups[11]
    assert set(state.models) == set(state.groups.values())


# --- partial participation: fresh updates only ----------------------------------------------------


def test_absent_members_are_asked_for_fresh_updates_and_stale_ones_are_never_used():
    """In round 1 all agree up to small deviations, which would put 8 and 11 in the other part."""
    before = {3: (9, 1), 8: (9, -1), 20: (9, 1), 7: (9, -1), 11: (9, 1), 12: (9, -1)}
    people = People({0: before, 1: FIRST})
    # Of the cohort, 2·(−2,−2) + 1·(4,0) + 1·(0,4): 0.
    state = run(cfl(**RULE), people, [IDS, [3, 7, 20]])
    assert asked(people) == [IDS, [3, 7, 20], [8, 11, 12]]
    assert all(order.task == "train" for order in people.asked[2][1].values())
    assert state.groups == {3: "00", 8: "00", 20: "00", 7: "01", 11: "01", 12: "01"}
    # Round 1 moved all by (72, 0)/8 on average: n·Δ is 9·8 and 1 − 2 + 1 − 2 + 1 − 1 = −2.
    assert values(state)["00"] == pytest.approx([10 + 2.5, 0.75 + 2.5])


def test_names_do_not_depend_on_who_was_in_the_cohort():
    """The part with the smallest id is the first, although client 3 answers last."""
    people = People({0: FIRST})
    state = run(cfl(**RULE | {"eps1": 0.6}), people, [[7, 8, 11, 12, 20]])
    assert asked(people) == [[7, 8, 11, 12, 20], [3]]
    assert state.groups == {3: "00", 8: "00", 20: "00", 7: "01", 11: "01", 12: "01"}
    assert state.notes["splits"][0]["clients"] == IDS


def test_only_members_of_the_group_in_question_are_asked():
    third = {**SECOND, 3: (5, 5), 8: (5, 5), 20: (5, 5)}
    people = People({0: FIRST, 1: third})
    run(cfl(**RULE), people, [IDS, [3, 8, 11, 12, 7]])
    assert asked(people) == [IDS, [3, 7, 8, 11, 12]]  # all of "01" were there already
    people = People({0: FIRST, 1: {**third, 7: (3, 0), 11: (-6, 0)}})
    run(cfl(**RULE), people, [IDS, [3, 8, 11, 7]])
    assert asked(people) == [IDS, [3, 7, 8, 11], [12]]


def test_when_all_do_not_pass_nobody_splits_but_what_was_trained_counts():
    still = {3: (4, 0), 8: (8, 8), 20: (0, 4), 7: (-2, -2), 11: (0, 0), 12: (0, 0)}
    people = People({0: still})
    state = run(cfl(**RULE), people, [[3, 7, 20]])
    assert asked(people) == [[3, 7, 20], [8, 11, 12]]
    assert set(state.groups.values()) == {"0"}
    assert values(state) == {"0": [3.0, 3.0]}  # 2·(8,8)/8 on top of (1,1)
    assert state.notes["splits"] == []


def test_a_cohort_at_odds_with_itself_less_than_the_limits_asks_nobody():
    people = People({0: {**FIRST, 7: (-1, -1)}})
    run(cfl(**RULE), people, [[3, 7, 20]])
    assert asked(people) == [[3, 7, 20]]


def test_one_reply_is_no_conflict():
    for cohort in ([7], [7, 11]):
        people = People({0: {**FIRST, 11: None}})
        state = run(cfl(eps1=100.0, eps2=0.0, relative=False), people, [cohort])
        assert set(state.groups.values()) == {"0"}
        assert asked(people) == [cohort]
        assert values(state) == {"0": [-1.0, -1.0]}


def test_nobody_answers():
    silent = People({0: dict.fromkeys(IDS)})
    state = run(cfl(eps1=100.0, eps2=0.0, relative=False), silent, [IDS])
    assert set(state.groups.values()) == {"0"}
    assert asked(silent) == [IDS]


# --- lost replies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [IDS, [3, 20, 7]])
def test_a_member_that_does_not_answer_at_a_split_walks_at_its_turn(cohort):
    """Client 8 does not answer in round 1, in the cohort or outside it; later it is selected again.

    Without it, 3 and 20 weigh (4,4), and the others (−4,−4) if 11 and 12 do not move.
    """
    first = {3: (4, 0), 8: None, 20: (0, 4), 7: (-2, -2), 11: (-1, 0), 12: (1, 0)}
    rule = RULE | {"gamma": 0.0}
    walks = {0: {8: (1, 3)}}
    people = People({0: first, 1: dict.fromkeys(IDS, (1, 0))}, walks=walks)
    method = cfl(**rule)
    state = run(method, people, [cohort])
    assert 8 not in state.groups
    assert state.groups == {3: "00", 12: "00", 20: "00", 7: "01", 11: "01"}
    people.round = 1
    people.asked.clear()
    state = method.round(people, state, Round(1, [8, 7]))
    assert [(k, sorted(o)) for k, o, _ in people.asked] == [("gather", [8]), ("gather", [7, 8])]
    assert people.asked[0][1][8].task == "walk"
    assert people.asked[0][1][8].arrays["model"].vector.tolist() == [1.0, 1.0]  # before the split
    assert state.groups[8] == "00"  # (1,3) is nearer to (1,0), (0,1), (1,0) than to (−1,−1)


# --- thresholds relative to what the run has seen ------------------------------------------------


def relative(second, cohorts=2, **more):
    """In round 1 two clients move by (3, 4) and (−1, 0): mean (1, 2), largest norm 5."""
    people = People({0: {0: (3, 4), 1: (-1, 0)}, 1: second, 2: second}, {})
    return run(cfl(**{"eps1": 0.1} | more), people, [[0, 1]] * cohorts, [0, 1], (0.0, 0.0))


def test_relative_thresholds_by_hand():
    # ε1 = 0.1·√5 = 0.2236, ε2 = 0.6·5 = 3.
    split = relative({0: (3.1, 0), 1: (-2.7, 0)})  # mean 0.2, largest 3.1
    assert set(split.groups.values()) == {"00", "01"}
    assert split.notes["limits"] == pytest.approx([0.1 * 5**0.5, 3.0])
    together = [
        relative({0: (3.1, 0), 1: (-2.6, 0)}),  # mean 0.25
        relative({0: (2.9, 0), 1: (-2.9, 0)}),  # largest 2.9
        relative({0: (3.1, 0), 1: (-2.7, 0)}, eps1=0.08),
        relative({0: (3.1, 0), 1: (-2.7, 0)}, eps2=0.63),
    ]
    assert [set(state.groups.values()) for state in together] == [{"0"}] * 4


def test_the_largest_norms_are_remembered():
    """Two quiet rounds do not lower the norms of the first round."""
    people = People(
        {0: {0: (3, 4), 1: (-1, 0)}, 1: {0: (1, 0), 1: (1, 0)}, 2: {0: (2, 0), 1: (-2, 0)}}, {}
    )
    state = run(cfl(eps1=0.1), people, [[0, 1]] * 3, [0, 1], (0.0, 0.0))
    assert set(state.groups.values()) == {"0"}  # 2 is not above 0.6·5
    assert state.memory["largest"] == pytest.approx((5**0.5, 5.0))


def test_the_first_round_has_nothing_to_compare_with():
    people = People({0: {0: (3, 4), 1: (-3, -4)}}, {})
    state = run(cfl(eps1=1.0, eps2=0.0), people, [[0, 1]], [0, 1])
    assert set(state.groups.values()) == {"0"}


# --- evidence, where no ε1 is given ---------------------------------------------------------------

SIX = dict.fromkeys(IDS, 1)


def asked_for(people):
    return [next(iter(orders.values())).task for _, orders, _ in people.asked]


def test_a_group_is_probed_when_its_mean_update_is_little_more_than_noise():
    # Six updates of length 1 that have nothing in common leave a mean of √6/6 = 0.408: below twice
    # that, 0.816, a group is at rest. With an angle of a to the right, half up and half down, the
    # mean is cos a: 0.8192 for 35°, 0.8090 for 36°.
    for degrees, at_rest in ((35, False), (36, True)):
        up, right = (f(math.radians(degrees)) for f in (math.sin, math.cos))
        moves = {c: (right, up if c in (3, 8, 20) else -up) for c in IDS}
        people = People({0: moves, 1: moves}, SIX)
        state = run(cfl(trial="off"), people, [IDS, IDS])
        (norms,) = [run(cfl(trial="off"), People({0: moves}, SIX), [IDS]).notes["norms"]["0"]]
        assert norms == pytest.approx([right, 1.0, 6**0.5 / 6], rel=1e-5)
        assert asked_for(people) == ["train", *["steps", "halves"] * at_rest, "train"]
        parted = {3: "1/0", 8: "1/0", 20: "1/0", 7: "1/1", 11: "1/1", 12: "1/1"}
        assert state.groups == (parted if at_rest else dict.fromkeys(IDS, 0))
        # Who was never asked is told why: the mean is √6·cos 35° = 2.01 times the noise.
        said = "is 2.01 times as long as noise alone would make it, and evidence is gathered only"
        assert (said in state.notes.get("why", "")) == (not at_rest)


@pytest.mark.parametrize(
    ("moves", "cohort", "why"),
    [
        (dict.fromkeys(IDS, (0.0, 0.0)), IDS, NO_CHANGE),
        (dict.fromkeys(IDS, (1.0, 0.0)), IDS[:1], TOO_FEW_UPDATES),
    ],
)
def test_one_group_without_anything_to_compare_has_a_reason(moves, cohort, why):
    people = People({0: moves}, SIX)
    state = run(cfl(trial="off"), people, [cohort])
    assert asked_for(people) == ["train"]
    assert state.notes["why"] == why


def test_a_group_that_stays_together_is_asked_again_after_twice_as_many_rounds():
    moves = {c: (1.0 if i % 2 else -1.0, 0.0) for i, c in enumerate(IDS)}
    people, method, asked = People(dict.fromkeys(range(20), moves), SIX), cfl(trial="off"), []
    state = method.init(people, setup(weights(PLANE, 1, 1), IDS))
    # Whose halves say the opposite of each other belong nowhere.
    people.script = lambda o: (
        halves(*[Weights(PLANE, people.held[o.client].vector + s) for s in (1.0, -1.0)])
        if o.task == "halves"
        else people.answer(o)
    )
    for number in range(20):
        people.asked.clear()
        people.round = number
        state = method.round(people, state, Round(number, IDS))
        asked += [number] * ("halves" in asked_for(people))
    assert state.groups == dict.fromkeys(IDS, 0)
    assert asked == [1, 5, 13]  # each time not before 2·n + 2 rounds are done, and then at rest


def test_nobody_answers_the_probe_of_a_group_at_rest():
    moves = {c: (1.0 if i % 2 else -1.0, 0.0) for i, c in enumerate(IDS)}
    people = People({0: moves, 1: dict.fromkeys(IDS), 2: moves}, SIX)
    people.script = lambda o: None if people.round == 1 else people.answer(o)
    state = run(cfl(trial="off"), people, [IDS, IDS])
    assert state.groups == dict.fromkeys(IDS, 0)
    assert asked_for(people)[1:] == ["steps", "train"]


# --- newcomers ------------------------------------------------------------------------------------

NEW = [30, 31, 32, 33, 34]
# At the first split "00" went (1,1)-wards, "01" the other way; at the second, of "01", the part of
# 7 and 12 went to the right, that of 11 to the left.
WALKS = {
    0: {30: (1, 0.5), 31: (-3, -1), 32: (-1, 0), 33: None, 34: (0, -1)},
    1: {31: (0.5, 2), 32: (-0.5, 9), 34: None},
}


def admitted():
    method, people = cfl(**RULE), People(TWICE, walks=WALKS)
    state = run(method, people, [IDS, IDS])
    people.asked.clear()
    return method.admit(people, state, Round(7, NEW)), state, people


def test_newcomers_walk_down_the_splits_in_an_exchange_a_level():
    after, _, people = admitted()
    assert [sorted(orders) for _, orders, _ in people.asked] == [NEW, [31, 32, 34]]
    assert {c: after.groups.get(c) for c in NEW} == {
        30: "00", 31: "010", 32: "011", 33: None, 34: None,
    }  # fmt: skip


def test_newcomers_train_the_models_that_were_split():
    _, _, people = admitted()
    first, second = ({c: o.arrays["model"] for c, o in e[1].items()} for e in people.asked)
    assert {tuple(w.vector.tolist()) for w in first.values()} == {(1.0, 1.0)}
    assert {tuple(w.vector.tolist()) for w in second.values()} == {(-1.5, -1.5)}
    assert {o.config["round"] for o in people.asked[1][1].values()} == {1}


def test_newcomers_change_nobody_else_and_no_model():
    after, before, _ = admitted()
    assert {c: after.groups[c] for c in IDS} == before.groups
    assert same(dict(after.models), dict(before.models))


def test_before_any_split_a_newcomer_joins_without_a_question():
    for method, root in ((cfl(eps1=0.1), "0"), (cfl(), 0)):
        people = People(TWICE)
        state = run(method, people, [IDS])
        people.asked.clear()
        assert method.admit(people, state, Round(1, NEW)).groups[30] == root
        assert people.asked == []


def test_the_length_of_an_update_does_not_matter_only_its_direction():
    """All members count equally in their part's direction, however far they moved."""
    moves = {0: {0: (100, 0), 1: (0, 1), 2: (-100, -1)}}
    people = People(moves, {}, walks={0: {9: (1, 2)}})
    method = cfl(eps1=0.5, eps2=1.0, relative=False)
    state = run(method, people, [[0, 1, 2]], [0, 1, 2])
    assert state.groups == {0: "00", 1: "00", 2: "01"}
    directions = state.memory["splits"]["0"]["directions"]
    assert directions[0].tolist() == [0.5, 0.5]
    assert torch.linalg.vector_norm(directions[1]) == pytest.approx(1.0)


def test_a_walk_is_the_same_whenever_asked_and_leaves_nothing_behind(tmp_path):
    """Shuffled batches, dropout and momentum are those of the round of the split."""
    rule = cfl(eps1=100.0, eps2=0.0, relative=False)
    made = experiment(rule, digits(clients=12), settings={"rounds": 2, "holdout": 4})
    state, channel, engine = drive(made, tmp_path, Spy)
    assert len(state.memory["splits"]) > 1
    seen, new = [], made.newcomers
    for number in (2, 7):
        channel.begin(number, stage=f"admit{number}")
        after = rule.admit(channel, state, Round(number, new))
        assert {after.groups[c] for c in new} <= set(state.models)
        seen.append([engine.of(f"admit{number}.{level}") for level in range(2)])
    assert not set(new) & set(channel.state.versions)
    assert sorted(seen[0][0]) == new
    assert seen[0][1]
    for early, late in zip(*seen, strict=True):
        assert early.keys() == late.keys()
        for c in early:
            assert torch.equal(early[c].sent["model"].vector, late[c].sent["model"].vector)


def test_a_walk_does_not_repeat_the_batches_of_the_round(tmp_path, monkeypatch):
    """Client 1 trains, its reply is lost, and it walks with other batches and dropout."""
    from coterie.client import client as module

    used, original = [], module.fit

    def spy(model, training, criterion):
        used.append((training.order_seed, training.dropout_seed))
        return original(model, training, criterion)

    monkeypatch.setattr(module, "fit", spy)

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (1, "1.0"))

    made = experiment(cfl(eps1=100.0, eps2=0.0, relative=False), settings={"rounds": 2})
    state, channel, _ = drive(made, tmp_path, lossy, rounds=1)
    assert 1 not in state.groups
    assert len(used) == 6
    channel.begin(1)
    made.method.admit(channel, state, Round(1, [1]))
    assert len(used) == 7
    assert not set(used[6]) & {seed for pair in used[:6] for seed in pair}


def test_a_walk_has_the_learning_rate_of_the_split_by_hand(tmp_path):
    # lr 0.1, then half. From 1 to 4 and −4: changes 0.6 and −1, mean −0.2: no split, θ = 0.8. Then
    # 0.32 and −0.48, mean −0.08 < 0.1, largest > 0.4: a split at 0.8. Towards 3 with that round's
    # rate: 0.8 + 0.1·2.2.
    made = on_quadratics(
        cfl(eps1=0.1, eps2=0.4, relative=False), [[4.0], [-4.0], [3.0]], start=1.0,
        schedule={"lr_decay": 0.5},
    )  # fmt: skip
    channel, engine, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    state = made.method.init(channel, replace(made.setup(plan.start), clients=[0, 1]))
    for number in range(2):
        channel.begin(number)
        state = made.method.round(channel, state, Round(number, [0, 1]))
        assert len(state.models) == 1 + number
    channel.begin(9)
    state = made.method.admit(channel, state, Round(9, [2]))
    assert float(engine.of("10.0")[2].sent["model"].vector) == pytest.approx(1.02, abs=1e-6)
    assert state.groups == {0: "00", 1: "01", 2: "00"}


# --- what is compared -----------------------------------------------------------------------------


def test_buffers_are_averaged_but_not_compared():
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)))
    assert (layout.trainable, layout.size) == (3, 5)
    # The running means go apart, by 9 and twice by −4.5: on average not at all.
    apart = {0: {0: (0.1, 0, 0, 9.0, 0), 1: (0.1, 0, 0, -4.5, 0)}}
    people = People(apart, {0: 1, 1: 2})
    rule = cfl(eps1=1.0, eps2=1.0, relative=False)
    state = run(rule, people, [[0, 1]], [0, 1], (0.0,) * 5, layout)
    assert set(state.groups.values()) == {"0"}
    assert values(state)["0"] == pytest.approx([0.1, 0, 0, 0, 0])


def test_with_personal_layers_only_what_travels_is_compared(tmp_path):
    both = {"cfl": cfl(eps1=100.0, eps2=0.0, relative=False), "fedper": coterie.fedper(k=1)}
    made = experiment(combined("cfl+fedper", both), settings={"rounds": 1, "holdout": 1})
    state, channel, engine = drive(made, tmp_path, Spy)
    split, whole = state.memory["splits"]["0"], state.models["00"].layout
    last = whole.layers[-1]
    travels = tuple(e.name for e in whole.entries if e.layer != last)
    assert split["model"].layout.names == travels
    assert split["directions"].shape == (2, split["model"].layout.size)
    channel.begin(1, stage="admit")
    after = made.method.admit(channel, state, Round(1, made.newcomers))
    ((new, seen),) = engine.of("admit.0").items()
    assert after.groups[new] in ("00", "01")
    assert seen.down == seen.up == {"model": travels}


def test_nothing_shared_is_nothing_to_compare(tmp_path):
    both = {"cfl": cfl(eps1=100.0, eps2=0.0, relative=False), "fedper": coterie.fedper(k=2)}
    state, _, _ = drive(experiment(combined("x", both)), tmp_path)
    assert set(state.groups.values()) == {"0"}


# --- the whole ------------------------------------------------------------------------------------


def test_the_tree_is_saved_and_read_exactly(tmp_path):
    from coterie.core.tree import read_tree, write_tree

    state = run(cfl(**RULE), People(TWICE), [IDS, IDS])
    write_tree(tmp_path / "state", state.to_tree(), PLANE, durable=False)
    assert same(State.from_tree(read_tree(tmp_path / "state", PLANE)).to_tree(), state.to_tree())


def test_cfl_with_fedprox_splits_by_what_fedprox_trains(tmp_path):
    """Clients pulled strongly towards the received model move less than the limit."""
    targets, rule = [[6.0], [6.2], [-6.0], [-6.2]], {"eps1": 9.0, "eps2": 2.0, "relative": False}
    free = on_quadratics(cfl(**rule), targets, schedule={"epochs": 20}, settings={"rounds": 1})
    assert set(drive(free, tmp_path / "a")[0].groups.values()) == {"00", "01"}
    parts = {"cfl": cfl(**rule), "fedprox": coterie.fedprox(mu=9.0)}
    tied = on_quadratics(
        combined("cfl+fedprox", parts), targets, schedule={"epochs": 20}, settings={"rounds": 1}
    )
    # (θ − 6.2)² + 4.5·θ² is least at 12.4/11 = 1.13, below 2.
    state = drive(tied, tmp_path / "b")[0]
    assert set(state.groups.values()) == {"0"}
    assert state.memory["largest"][1] == pytest.approx(12.4 / 11, abs=1e-5)


@pytest.mark.parametrize(
    "given", [{"eps1": -0.1}, {"eps2": -1.0}, {"gamma": -0.5}, {"relative": "yes"}]
)
def test_bad_parameters_are_refused(given):
    with pytest.raises(ConfigError, match=f"method cfl: {next(iter(given))}"):
        cfl(**given)


def test_a_lost_reply_at_a_split_leaves_the_engine_in_step(tmp_path):
    """The reply of client 1 is lost in the round of the split; it walks in the next one."""

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (1, "1.0"))

    made = on_quadratics(
        cfl(eps1=100.0, eps2=0.5, relative=False), [[5.0], [5.2], [-5.0], [-5.2]],
        settings={"rounds": 2},
    )  # fmt: skip
    state, channel, _ = drive(made, tmp_path, lossy)
    assert state.groups[1][:2] == state.groups[0][:2] == "00"
    assert channel.state.ledger.lost == 1
