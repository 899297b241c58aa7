"""DC-PFL: distances, the bend of the loss, and the steps from one grouping to the next."""

import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import coterie
from coterie.compose.layerwise import KEY, WHOLE
from coterie.core.messages import Upload
from coterie.core.method import Round
from coterie.data import build_population, load
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods.dc_pfl_decrease import radii
from faulty import Faulty
from scripted import Scripted, Spy, linears, opened, setup, weights
from support import drive, experiment, models, on_quadratics, same_bits

# What the paper does, where the defaults differ.
PAPER = {
    "share": 0.1,
    "levels": 0.2,
    "trial": "two-models",
    "trial_on": "training",
    "bend": "absolute",
}
FOUR = linears((1, 1), (1, 1))  # four numbers in two layers
START = weights(FOUR, 0, 0, 0, 0)

# Each row is its own min-max scaling, so D is the mean absolute difference of four numbers:
# D01 = 0.04/4 = 0.01, D23 = 0.4/4 = 0.1; across: D02 = 1.6/4 = 0.4, D03 = 1.2/4 = 0.3,
# D12 = (0.76 + 0.8)/4 = 0.39, D13 = (0.76 + 0.4)/4 = 0.29, their mean 0.345.
# So the merges, over the last one's height: 0.029, 0.29, 1. At γ̃ = 0.8, 0.6 and 0.4 there are two
# groups, at 0.2 client 2 and 3 part, at 0 all do.
SENT = {0: (0, 0, 0, 1), 1: (0, 0.04, 0, 1), 2: (0, 0.8, 0.8, 1), 3: (0, 0.8, 0.4, 1)}
PAIRS = {0: "1/0", 1: "1/0", 2: "1/1", 3: "1/1"}

# With one-round smoothing. Slopes −1, −5, −2, −1, −0.4, −0.2, −0.1; bends 4, 3, 1, 0.6, 0.2, 0.1:
# r = 26^1.5/4 = 33.1, 5^1.5/3 = 3.73, 2^1.5/1 = 2.83, 1.16^1.5/0.6 = 2.08, 1.04^1.5/0.2 = 5.30,
# 1.01^1.5/0.1 = 10.2. It is smallest at the loss 0.6, and one round later that is known.
FALLING = [10.0, 9.0, 4.0, 2.0, 1.0, 0.6, 0.4, 0.3]
# Slopes −6, −2, −1; bends 4, 1: r = 5^1.5/4 = 2.80, 2^1.5/1 = 2.83: known with the fourth.
QUICK = [10.0, 4.0, 2.0, 1.0]


@dataclass
class Actors:
    """Clients that report scripted losses and always send the same model."""

    method: object
    losses: list = field(default_factory=list)  # by round: a number, or one for each client
    tried: dict = field(default_factory=lambda: dict.fromkeys(range(4), (1.0, 0.0)))
    lost: object = staticmethod(lambda number, order: False)
    sent: dict = field(default_factory=lambda: dict(SENT))
    settled: dict = field(default_factory=lambda: {c: (c, c, c, c) for c in range(4)})
    examples: dict = field(default_factory=dict)

    def __post_init__(self):
        self.fed = Scripted(self.answer, range(4), self.examples)
        self.state = self.method.init(self.fed, setup(START, range(4)))
        self.number, self.phases = 0, []

    def answer(self, order):
        if self.lost(self.number, order):
            return None
        if order.task == "try":
            old, new = self.tried[order.client]
            return Upload(metrics={"old": old, "new": new if "new" in order.arrays else old})
        alone = order.config.get("alone") or (order.task == "train" and not order.arrays)
        numbers = self.sent if order.task == "train" else self.settled
        arrays = {} if alone else {"model": weights(FOUR, *numbers[order.client])}
        if order.task == "settle":
            return Upload(arrays)
        loss = self.losses[self.number]
        return Upload(arrays, {"loss": loss[order.client] if isinstance(loss, dict) else loss})

    def rounds(self, count, cohort=(0, 1, 2, 3)):
        """Run this many rounds; ``last`` has the exchanges of the last one."""
        for _ in range(count):
            before, state = len(self.fed.asked), replace(self.state, notes={})
            self.state = self.method.round(self.fed, state, Round(self.number, list(cohort)))
            self.phases.append(self.state.memory["phase"])
            self.last, self.number = self.fed.asked[before:], self.number + 1
        return self

    def model(self, slot):
        return self.state.models[slot].vector.tolist()


def actors(losses=(), start=1, smooth=1, observe=1, sleep=2, alpha=1, **more):
    """A run by the paper's rules, which short curves can trigger."""
    own = {k: more.pop(k) for k in ("dynamic", "gamma", "share", "levels", "trial_on") if k in more}
    method = coterie.dc_pfl(
        **PAPER | own,
        start=start,
        smooth=smooth,
        observe=observe,
        sleep=sleep,
        alpha=alpha,
    )
    return Actors(method, [*losses, *[0.3] * 50], **more)


# --- distances -----------------------------------------------------------------------------------


def test_distances_are_averaged_over_the_first_rounds_by_hand():
    # S of (1, 3, 2, 5) is (0, 1/2, 1/4, 1), of (5, 3, 1, 1) it is (1, 1/2, 0, 0), of (0, 0, 0, 4)
    # it is (0, 0, 0, 1). Round 1: D01 = (1 + 0 + 1/4 + 1)/4 = 0.5625, D02 = (1/2 + 1/4)/4 = 0.1875,
    # D12 = (1 + 1/2 + 0 + 1)/4 = 0.625. In round 2 client 0 sends what client 2 does: D02 = 0,
    # D01 = D12 = 0.625; but client 1's reply is lost, so its distances are round 1's alone.
    # Client 3 never takes part: its distances are the mean of the others',
    # (0.5625 + 0.09375 + 0.625)/3 = 0.427083.
    play = actors([1, 1], start=2, sent={0: (1, 3, 2, 5), 1: (5, 3, 1, 1), 2: (0, 0, 0, 4)})
    play.rounds(1, cohort=(0, 1, 2))
    assert "distances" not in play.state.notes
    play.sent[0] = (0, 0, 0, 8)
    play.lost = lambda number, order: order.client == 1
    play.rounds(1, cohort=(0, 1, 2))
    never = (0.5625 + 0.09375 + 0.625) / 3
    wanted = [
        [0, 0.5625, 0.09375, never],
        [0.5625, 0, 0.625, never],
        [0.09375, 0.625, 0, never],
        [never, never, never, 0],
    ]
    assert np.allclose(play.state.notes["distances"], wanted, atol=1e-6)
    # Without S: D01 = (4 + 0 + 1 + 4)/4 = 2.25, D12 = (5 + 3 + 1 + 3)/4 = 3, and D02 is the mean of
    # (1 + 3 + 2 + 1)/4 = 1.75 and of 4/4 = 1.
    never = (2.25 + 1.375 + 3) / 3
    wanted = [
        [0, 2.25, 1.375, never],
        [2.25, 0, 3, never],
        [1.375, 3, 0, never],
        [never, never, never, 0],
    ]
    assert np.allclose(play.state.notes["unscaled_distances"], wanted, atol=1e-5)
    assert "unscaled" not in play.state.memory  # nobody needs it any more
    play.rounds(1, cohort=(0, 1, 2))
    assert "distances" not in play.state.notes  # once and for all


def test_the_tree_and_its_levels_by_hand():
    play = actors([1.0]).rounds(1)
    merges = play.state.notes["dendrogram"]
    assert [m[:2] + m[3:] for m in merges] == [[0, 1, 2], [2, 3, 2], [4, 5, 4]]
    assert [m[2] for m in merges] == pytest.approx([0.01, 0.1, 0.345], abs=1e-6)
    for gamma, wanted in (
        (1.0, [0, 0, 0, 0]), (0.99, [0, 0, 1, 1]), (0.3, [0, 0, 1, 1]), (0.28, [0, 0, 1, 2]),
        (0.03, [0, 0, 1, 2]), (0.028, [0, 1, 2, 3]), (0.0, [0, 1, 2, 3]),
    ):  # fmt: skip
        fixed = actors([1.0], dynamic=False, gamma=gamma).rounds(1)
        assert list(fixed.state.groups.values()) == [f"0/{g}" for g in wanted]


def test_fixed_groups_stay_for_good():
    play = actors(FALLING, dynamic=False, gamma=0.8).rounds(20)
    assert play.state.groups == {0: "0/0", 1: "0/0", 2: "0/1", 3: "0/1"}
    assert set(play.phases) == {"watch"}
    assert play.state.notes["gamma"] == 0.8
    # Means inside: (0, 0.02, 0, 1) and (0, 0.8, 0.6, 1).
    assert play.model("0/0") == pytest.approx([0, 0.02, 0, 1])
    assert play.model("0/1") == pytest.approx([0, 0.8, 0.6, 1])


def test_the_server_sees_each_model_only_before_the_tree():
    play = actors(start=3).rounds(5)
    assert [kind for kind, _, _ in play.fed.asked] == ["gather"] * 3 + ["reduce"] * 2


# --- the bend of the loss ------------------------------------------------------------------------


def test_radii_by_hand():
    wanted = [26**1.5 / 4, 5**1.5 / 3, 2**1.5, 1.16**1.5 / 0.6, 1.04**1.5 / 0.2, 1.01**1.5 / 0.1]
    assert radii(FALLING, 1) == pytest.approx(wanted)
    # Smoothed over two: 4, 3, 1.5, 0.75; slopes −1, −1.5, −0.75; bends 0.5, 0.75.
    assert radii([4, 2, 1, 0.5], 2) == pytest.approx([3.25**1.5 / 0.5, 1.5625**1.5 / 0.75])
    # Over five: the mean of as many as there are: 4, 3, 7/3, 1.875 and then of the last five only.
    level = [4, 3, 7 / 3, 7.5 / 4, 7.5 / 5, 5.5 / 5]
    slopes = np.diff(level)
    expected = [(1 + s * s) ** 1.5 / abs(s - t) for s, t in zip(slopes[1:], slopes, strict=False)]
    assert radii([4, 2, 1, 0.5, 0, 2], 5) == pytest.approx(expected)


def test_a_straight_line_has_an_infinite_radius():
    assert radii([5, 4, 3, 2], 1) == [math.inf, math.inf]
    assert radii([1, 1, 1], 3) == [math.inf]
    assert radii([], 5) == radii([1], 5) == radii([1, 2], 5) == []


def test_a_radius_is_of_rounds_in_a_row_only():
    # With smooth=1 it needs three losses; that of round 4, counted from 0, is lost.
    play = actors([20.0, 10.0, 5.0, 2.5, 0.0, 1.2, 0.6, 0.3, 0.15])
    play.lost = lambda number, order: number == 4
    found = []
    for _ in range(9):
        found.append(play.rounds(1).state.notes.get("radius"))
    assert [n for n, radius in enumerate(found) if radius is None] == [0, 1, 5, 6]
    # Of (1.2, 0.6, 0.3), as if there had been nothing before.
    assert found[7] == pytest.approx(radii([1.2, 0.6, 0.3], 1)[-1])


# --- phases --------------------------------------------------------------------------------------


def test_detection_comes_exactly_when_it_should():
    assert actors(FALLING).rounds(8).phases == ["watch"] * 6 + ["sync", "trial"]
    assert actors(FALLING, observe=2).rounds(8).phases == ["watch"] * 7 + ["sync"]
    # Not before the tree; it is built in round 8, and the loss still shows it then.
    assert actors(FALLING, start=8).rounds(8).phases == ["watch"] * 7 + ["sync"]
    assert actors(QUICK).rounds(4).phases == ["watch"] * 3 + ["sync"]
    straight = actors([20.0 - i for i in range(20)])
    assert straight.rounds(20).phases == ["watch"] * 20
    assert actors(QUICK, dynamic=False).rounds(20).phases == ["watch"] * 20


def test_a_round_that_nobody_answers_is_no_point_of_the_curve():
    play = actors([*QUICK[:2], 99.0, *QUICK[2:]])
    play.lost = lambda number, order: number == 2
    assert play.rounds(5).phases == ["watch"] * 4 + ["sync"]


def test_the_full_round_after_detection_asks_for_all_and_fills_old_and_new_groups():
    play = actors(QUICK, examples={0: 3}).rounds(4)
    assert play.state.groups == dict.fromkeys(range(4), "0/0")
    assert not any(WHOLE in o.config for _, orders, _ in play.fed.asked for o in orders.values())
    play.rounds(1)
    ((kind, orders, into),) = play.last
    assert kind == "reduce"
    assert into == {c: {"0/0": 1.0, PAIRS[c]: 1.0} for c in range(4)}
    assert all(o.config[WHOLE] and list(o.arrays) == ["0/0"] for o in orders.values())
    # 3/4·0 + 1/4·0.04 = 0.01 for the first pair, and over all (3·0 + 0.04 + 0.8 + 0.8)/6.
    assert play.model("1/0") == pytest.approx([0, 0.01, 0, 1])
    assert play.model("1/1") == pytest.approx([0, 0.8, 0.6, 1])
    assert play.model("0/0") == pytest.approx([0, 1.64 / 6, 1.2 / 6, 1])
    assert play.state.groups == dict.fromkeys(range(4), "0/0")  # nothing is decided yet


@pytest.mark.parametrize("phase", ["watch", "sync"])
def test_layers_that_could_wait_do_not_wait_in_the_full_round(phase):
    # As after a trial in vain, when the new groups are known too. All are due in another round.
    play = actors(QUICK, alpha=3).rounds(4)
    pace = {**play.state.memory[KEY], "quiet": {s: ["0"] for s in ("0/0", "1/0", "1/1")}}
    memory = {**play.state.memory, KEY: pace, "phase": phase}
    play.state = replace(play.state, memory=memory)
    play.rounds(1)
    assert not play.state.notes["layers"]["all_due"]
    for order in play.last[0][1].values():
        assert order.config.get(KEY) == (None if phase == "sync" else "0")


def test_a_trial_sends_two_models_and_is_two_exchanges():
    play = actors(QUICK).rounds(6)
    (first, tries, mixed), (second, verdicts, into) = play.last
    assert (first, second) == ("reduce", "reduce")
    assert mixed == {c: {"all": 1.0} for c in range(4)}
    means = {"old": [0, 0.41, 0.3, 1], "1/0": [0, 0.02, 0, 1], "1/1": [0, 0.8, 0.6, 1]}
    for client, order in tries.items():
        assert order.task == "try"
        sent = {name: w.vector.tolist() for name, w in order.arrays.items()}
        assert sent["old"] == pytest.approx(means["old"])
        assert sent["new"] == pytest.approx(means[PAIRS[client]])
    for order in verdicts.values():
        assert (order.task, dict(order.arrays), order.config["take"]) == ("settle", {}, "new")
    assert into == {c: {PAIRS[c]: 1.0} for c in range(4)}
    assert play.state.groups == PAIRS
    # What clients settled for: 0 and 1, 2 and 3, in the mean.
    assert {s: play.model(s) for s in play.state.models} == {"1/0": [0.5] * 4, "1/1": [2.5] * 4}
    assert play.phases[-1] == "watch"
    assert play.state.notes["trial"] == {"old": 1.0, "new": 0.0, "adopted": True}
    assert play.state.notes["gamma"] == 0.8


@pytest.mark.parametrize(("worst", "adopted"), [(3.96, True), (4.0, False), (4.04, False)])
def test_the_structure_changes_if_the_mean_of_the_new_losses_is_lower(worst, adopted):
    # Old losses 1, new ones 0, 0, 0 and the worst: 0.99, 1 or 1.01 in the mean. Clients count
    # alike, whatever their samples: those of client 3 would make it 3.6 and more.
    tried = {**dict.fromkeys(range(3), (1.0, 0.0)), 3: (1.0, worst)}
    play = actors(QUICK, tried=tried, examples={3: 30}).rounds(6)
    assert (play.state.groups == PAIRS) == adopted
    verdicts = play.last[1][1]
    assert {o.config["take"] for o in verdicts.values()} == {"new" if adopted else "old"}
    assert play.phases[-1] == ("watch" if adopted else "rest")
    assert play.state.notes["gamma"] == (0.8 if adopted else 1.0)
    if not adopted:
        # (0 + 1 + 2 + 30·3)/33 in the group of all: the old model's weights are what is sent.
        assert {s: play.model(s) for s in play.state.models} == {
            "0/0": pytest.approx([93 / 33] * 4)
        }


@pytest.mark.parametrize("sleep", [0, 1, 2, 6])
def test_after_a_trial_in_vain_monitoring_rests_and_begins_anew_with_the_same_candidate(sleep):
    # The trial is round 6. What the loss does while monitoring rests does not count.
    resting = [50.0, 3.0, 80.0, 1.0, 90.0, 2.0][:sleep]
    losses = [*QUICK, 1.0, 1.0, *resting, *QUICK]
    play = actors(losses, sleep=sleep, tried=dict.fromkeys(range(4), (1.0, 2.0)))
    play.rounds(6 + sleep)
    assert play.phases[5:] == (["rest"] * sleep + ["watch"] if sleep else ["watch"])
    assert play.state.memory["losses"] == []
    play.rounds(4)
    assert play.phases[-4:] == ["watch"] * 3 + ["sync"]
    play.rounds(1)
    assert play.last[0][2] == {c: {"0/0": 1.0, PAIRS[c]: 1.0} for c in range(4)}
    play.tried = dict.fromkeys(range(4), (1.0, 0.0))
    play.rounds(1)
    assert play.state.groups == PAIRS


def test_structures_follow_one_another_down_to_single_clients():
    play = actors([*QUICK, 1, 1, *QUICK, 1, 1, *QUICK, 1, 1, *QUICK]).rounds(6)
    assert play.state.groups == PAIRS
    # 0.6 and 0.4 give the same groups; at 0.2 clients 2 and 3 part.
    play.rounds(5)
    assert play.phases[-2:] == ["sync", "trial"]
    thirds = {0: "4/0", 1: "4/0", 2: "4/1", 3: "4/2"}
    assert play.last[0][2] == {c: {PAIRS[c]: 1.0, thirds[c]: 1.0} for c in range(4)}
    play.rounds(1)
    tries = play.last[0][1]
    # Whose group stays the same has one model to try.
    assert {c: sorted(o.arrays) for c, o in tries.items()} == {
        0: ["old"], 1: ["old"], 2: ["new", "old"], 3: ["new", "old"]
    }  # fmt: skip
    assert play.state.groups == thirds
    assert play.state.notes["gamma"] == 0.2
    assert play.state.memory["alone"] == [2, 3]  # they kept what they settled for
    assert sorted(play.state.models) == ["4/0", "4/1", "4/2"]
    play.rounds(1)
    ((_, orders, _),) = play.last
    assert {c: bool(o.arrays) for c, o in orders.items()} == {0: True, 1: True, 2: False, 3: False}
    play.rounds(5)  # down to 0
    assert play.state.groups == {0: "5/0", 1: "5/1", 2: "5/2", 3: "5/3"}
    assert play.phases[-1] == "watch"
    play.rounds(4)
    assert play.phases[-1] == "done"  # nothing is left to split
    play.losses = [*play.losses[: play.number], *QUICK * 5]
    assert set(play.rounds(10).phases[-10:]) == {"done"}


def test_steps_of_gamma_are_whole_multiples():
    # 0.9 − 0.3·k: the last step reaches 0 although 0.9 − 0.3·3 is not 0 in floating point.
    play = actors([*QUICK, 1, 1] * 6, gamma=0.9, levels=0.3)
    seen = []
    for _ in range(18):
        play.rounds(1)
        seen.append((play.state.notes["gamma"], len(set(play.state.groups.values()))))
    # Pairs at once; 0.6 and 0.3 give no other groups (0.29), so the next is the third step.
    assert [k for i, k in enumerate(seen) if k not in seen[:i]] == [(0.9, 2), (0.0, 4)]


# --- replies that are lost, clients who are absent ----------------------------------------------


def test_nobody_answers_a_trial():
    play = actors(QUICK).rounds(5)
    before = play.state
    play.lost = lambda number, order: order.task == "try"
    play.rounds(2)
    assert len(play.last) == 1
    assert play.state.to_tree() == before.to_tree()
    play.lost = lambda number, order: False
    play.rounds(1)  # it is only put off
    assert play.state.groups == PAIRS


def test_a_client_whose_trial_was_lost_goes_with_the_others():
    play = actors(QUICK).rounds(5)
    play.tried[3] = (1.0, 99.0)  # never heard
    play.lost = lambda number, order: order.client == 3 and order.task == "try"
    play.rounds(1)
    assert sorted(play.last[1][1]) == [0, 1, 2]
    assert play.state.groups == PAIRS
    assert play.model("1/1") == [2.0] * 4  # client 2's alone


def test_a_verdict_that_nobody_answers_leaves_the_models_of_the_full_round():
    play = actors(QUICK).rounds(5)
    play.lost = lambda number, order: order.task == "settle"
    play.rounds(1)
    assert play.state.groups == PAIRS
    assert play.model("1/0") == pytest.approx([0, 0.02, 0, 1])
    assert play.model("1/1") == pytest.approx([0, 0.8, 0.6, 1])
    assert play.state.memory["alone"] == []


def test_a_trial_by_some_of_the_clients_decides_for_all():
    play = actors(QUICK).rounds(4)
    play.rounds(1, cohort=(0, 1))  # the full round: of the second pair nothing is known
    play.rounds(1, cohort=(1, 2))
    tries, verdicts = play.last[0][1], play.last[1][1]
    assert {c: sorted(o.arrays) for c, o in tries.items()} == {1: ["new", "old"], 2: ["old"]}
    assert sorted(verdicts) == [1, 2]
    assert play.state.groups == PAIRS
    assert play.model("1/0") == [1.0] * 4
    assert play.model("1/1") == [2.0] * 4
    # Had client 2 been lost, its group would have its parent's model, the mean of 0 and 1.
    again = actors(QUICK).rounds(4)
    again.rounds(1, cohort=(0, 1))
    again.rounds(1, cohort=(1,))
    assert again.model("1/1") == pytest.approx([0, 0.02, 0, 1])


def test_the_loss_is_the_mean_over_clients_and_counts_those_who_are_alone():
    play = actors([1.0, *[{0: 1.0, 1: 1.0, 2: 4.0, 3: 10.0}] * 3], dynamic=False, gamma=0.2)
    play.rounds(1)
    assert play.state.groups == {0: "0/0", 1: "0/0", 2: "0/1", 3: "0/2"}
    for _ in range(3):
        play.rounds(1)
        assert play.state.notes["loss"] == 4.0  # by groups it would be (1 + 4 + 10)/3 = 5
    ((_, orders, _),) = play.last
    assert {c: list(o.arrays) for c, o in orders.items()} == {0: ["0/0"], 1: ["0/0"], 2: [], 3: []}


def test_who_is_alone_is_told_so_until_it_has_answered():
    play = actors(dynamic=False, gamma=0.2).rounds(1)
    play.lost = lambda number, order: order.client == 3 and number < 4
    for number in range(1, 6):
        play.rounds(1)
        orders = play.last[0][1]
        assert orders[2].config == orders[3].config == {"alone": True}
        assert bool(orders[2].arrays) == (number == 1)
        assert bool(orders[3].arrays) == (number <= 4)  # its model, until it has taken it over
        assert play.model("0/2") == pytest.approx(SENT[3])
    assert play.state.memory["alone"] == [2, 3]


# --- newcomers -----------------------------------------------------------------------------------


def test_a_newcomer_joins_the_group_whose_model_it_moves_least_and_is_never_split_from_it():
    play = actors(QUICK).rounds(6)
    moves = {"1/0": 0.3, "1/1": 0.2}
    fed = Scripted(lambda order: Upload(metrics=moves), range(5))
    state = play.method.admit(fed, play.state, Round(6, [4]))
    assert state.groups == {**PAIRS, 4: "1/1"}
    assert {n: w.vector.tolist() for n, w in fed.asked[0][1][4].arrays.items()} == {
        "1/0": [0.5] * 4, "1/1": [2.5] * 4
    }  # fmt: skip
    play.state, play.losses = state, [*play.losses[:6], *QUICK, 1, 1, *[1.0] * 9]
    play.sent[4] = play.settled[4] = SENT[2]
    play.tried[4] = (1.0, 0.0)
    everybody = (0, 1, 2, 3, 4)
    play.rounds(6, everybody)
    # Clients 2 and 3 part; the newcomer goes with the first of its old group's largest parts.
    assert play.state.groups == {0: "4/0", 1: "4/0", 2: "4/1", 3: "4/2", 4: "4/1"}
    play.rounds(1, everybody)
    assert sorted(c for c, o in play.last[0][1].items() if o.config.get("alone")) == [3]
    # The model of one who has gone on alone is not offered: the server's is out of date.
    fed = Scripted(lambda order: Upload(metrics={"4/0": 3.0, "4/1": 2.0, "4/2": 1.0}), range(6))
    assert play.method.admit(fed, play.state, Round(13, [5])).groups[5] == "4/1"
    assert list(fed.asked[0][1][5].arrays) == ["4/0", "4/1"]


def test_a_newcomer_among_clients_who_are_all_alone():
    play = actors(dynamic=False, gamma=0.0).rounds(2)
    assert play.state.memory["alone"] == [0, 1, 2, 3]
    fed = Scripted(lambda order: Upload(metrics={f"0/{i}": 4.0 - i for i in range(4)}), range(5))
    play.state = play.method.admit(fed, play.state, Round(2, [4]))
    assert play.state.groups[4] == "0/3"
    play.sent[4] = (7, 8, 9, 9)
    play.losses = [{0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 5.0}] * 9
    play.rounds(1, (0, 1, 2, 3, 4))
    assert play.state.notes["loss"] == 2.0
    assert play.model("0/3") == [7, 8, 9, 9]  # the one that is sent; the others go on alone


# --- real clients in a state made by hand --------------------------------------------------------

# Pairs {0, 1} and {2, 3}: merged at 0.1 and 0.3 of the height of the last merge.
MERGES = torch.tensor([[0, 1, 0.1, 2], [2, 3, 0.3, 2], [4, 5, 1.0, 4]], dtype=torch.float64)


def begun(method, targets, folder, engine=Spy):
    """Clients with quadratic losses, a channel to them, and a state with the tree of ``MERGES``."""
    made = on_quadratics(method, targets)
    channel, running, plan = opened(made, folder, engine)
    state = method.init(channel, made.setup(plan.start))
    return made, channel, running, replace(state, memory={**state.memory, "merges": MERGES})


def at(state, phase, models=None, **memory):
    layout = next(iter(state.models.values())).layout
    found = {s: weights(layout, v) for s, v in (models or {}).items()}
    return replace(
        state, models={**state.models, **found}, memory={**state.memory, "phase": phase, **memory}
    )


def play(method, channel, state, number, cohort=(0, 1, 2, 3)):
    channel.begin(number)
    return replace(method.round(channel, state, Round(number, list(cohort))), notes={})


def test_the_loss_reported_is_that_of_the_model_received(tmp_path):
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)
    _, channel, engine, state = begun(method, [[0.0], [2.0], [8.0], [10.0]], tmp_path)
    play(method, channel, at(state, "watch", {"0/0": 5.0}), 7)
    # (5 − y)², not that of the trained model: (0.8·5)² = 16 and so on.
    losses = {c: s.metrics["loss"] for c, s in engine.of("8.0").items()}
    assert losses == pytest.approx({0: 25, 1: 9, 2: 9, 3: 25})


def test_a_trial_costs_two_models_down_and_one_up_to_the_byte(tmp_path):
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)
    _, channel, engine, state = begun(method, [[1.0], [1.0], [9.0], [9.0]], tmp_path)
    state = at(state, "trial", {"0/0": 5.0, "1/0": 1.0, "1/1": 9.0}, next=1)
    state = play(method, channel, state, 7)
    # From 5 a step leads to 4.2 or 5.8, 3.2 from the target; from the new models nowhere.
    tries = engine.of("8.0")
    assert all(s.metrics == {"new": 0.0, "old": pytest.approx(10.24)} for s in tries.values())
    assert state.groups == PAIRS
    one = '["f4",[1],4]'
    body = (
        '{"order":"8.0","round":7,"task":"try",'
        '"arrays":{"old":{"$weights":0},"new":{"$weights":1}},"config":{"on":"train"}}'
    )
    down = 8 + len(f'{{"body":{body},"arrays":[{one},{one}]}}') + 8
    body = (
        '{"order":"8.1","round":7,"task":"settle","arrays":{},'
        '"config":{"whole":true,"take":"new"},"expects":"8.0"}'
    )
    down += 8 + len(f'{{"body":{body},"arrays":[]}}')
    sent = '{"examples":1,"arrays":{"model":{"$weights":0}},"metrics":{},"version":"8.1"}'
    for client, moved in channel.state.ledger.method.items():
        told = json.dumps(dict(tries[client].metrics), separators=(",", ":"))
        body = f'{{"examples":1,"arrays":{{}},"metrics":{told},"version":"8.0"}}'
        up = 8 + len(f'{{"body":{body},"arrays":[]}}')
        up += 8 + len(f'{{"body":{sent},"arrays":[{one}]}}') + 4
        assert (moved.down, moved.up) == (down, up)


def test_a_trial_on_the_same_batches_sends_what_was_tried(tmp_path):
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)
    _, channel, engine, state = begun(method, [[0.0], [2.0], [8.0], [10.0]], tmp_path)
    adopted = play(method, channel, at(state, "trial", {"0/0": 5, "1/0": 1, "1/1": 9}, next=1), 7)
    # A fifth of the way from 1 to 0 and 2, from 9 to 8 and 10.
    sent = {c: float(s.sent["model"].vector) for c, s in engine.of("8.1").items()}
    assert sent == pytest.approx({0: 0.8, 1: 1.2, 2: 8.8, 3: 9.2}, abs=1e-6)
    assert {s: float(m.vector) for s, m in adopted.models.items()} == pytest.approx(
        {"1/0": 1.0, "1/1": 9.0}
    )
    refused = play(method, channel, at(state, "trial", {"0/0": 5, "1/0": 9, "1/1": 1}, next=1), 8)
    # The new models are the worse ones: from 5 a fifth of the way to 0, 2, 8 and 10.
    sent = {c: float(s.sent["model"].vector) for c, s in engine.of("9.1").items()}
    assert sent == pytest.approx({0: 4.0, 1: 4.4, 2: 5.6, 3: 6.0}, abs=1e-6)
    assert refused.groups == dict.fromkeys(range(4), "0/0")
    assert float(refused.models["0/0"].vector) == pytest.approx(5.0)


def test_both_models_of_a_trial_see_the_same_batches(tmp_path):
    """From the same weights, with shuffled batches and dropout, both end at the same loss."""
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)
    made = experiment(method, permuted_digits(4))
    channel, engine, plan = opened(made, tmp_path)
    state = method.init(channel, made.setup(plan.start))
    memory = {**state.memory, "merges": MERGES, "phase": "trial", "next": 1}
    models = dict.fromkeys(["0/0", "1/0", "1/1"], plan.start)
    play(method, channel, replace(state, models=models, memory=memory), 7)
    for seen in engine.of("8.0").values():
        assert sorted(seen.down) == ["new", "old"]
        assert seen.metrics["old"] == seen.metrics["new"] != 0


def test_what_an_earlier_trial_left_behind_is_never_sent(tmp_path):
    """Client 0 never received the first verdict; in the second trial its group stays the same."""
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)

    def lossy(plan):
        return Faulty(Spy(plan), lose_order=lambda c, order: (c, order) == (0, "8.1"))

    _, channel, engine, state = begun(method, [[0.0], [0.0], [-10.0], [10.0]], tmp_path, lossy)
    state = play(method, channel, at(state, "trial", {"0/0": 9, "1/0": 5, "1/1": 0}, next=1), 7)
    assert state.groups == PAIRS
    models = {"1/0": 1.0, "1/1": 0.0, "4/0": 1.0, "4/1": -9.0, "4/2": 9.0}
    state = play(method, channel, at(state, "trial", models, next=4), 8)
    assert state.groups == {0: "4/0", 1: "4/0", 2: "4/1", 3: "4/2"}
    # A fifth of the way from 1 to 0; what it tried in the first trial was 5 − 1 = 4.
    sent = {c: float(s.sent["model"].vector) for c, s in engine.engine.of("9.1").items() if s.sent}
    assert sent == pytest.approx({0: 0.8, 1: 0.8}, abs=1e-6)


@pytest.mark.parametrize("lost", ["lose_order", "lose_reply"])
def test_who_is_alone_from_a_trial_on_keeps_its_model_whatever_is_lost(lost, tmp_path):
    """Client 3 gets neither the verdict nor the next order, and keeps the full round's model.

    It never falls back to θ⁰ (0 here), nor to the mean of the group that it left.
    """
    method = coterie.dc_pfl(**PAPER, start=1, alpha=1)
    mute = {"9.1", "10.0", "12.0"}

    def lossy(plan):
        return Faulty(Loop(plan), **{lost: lambda c, order: c == 3 and order in mute})

    made, channel, _, state = begun(method, [[0.0], [0.0], [4.0], [10.0]], tmp_path, lossy)
    now = {"1/0": 0.0, "1/1": 5.0}
    state = at(replace(state, groups=dict(PAIRS)), "sync", now, level=1, next=4)

    def mine(number):
        nonlocal state
        state = play(method, channel, state, number)
        return [float(m) for m in models_now(made, state, channel)]

    # The full round: from 5 a fifth of the way to 4 and 10, 4.8 and 6; their mean is 5.4.
    assert mine(7) == pytest.approx([0, 0, 5.4, 5.4], abs=1e-5)
    # The trial, of 4.8 and 6 against 5.4: 4.64 for client 2; client 3 has that of the full round.
    assert mine(8) == pytest.approx([0, 0, 4.64, 6.0], abs=1e-5)
    assert state.memory["alone"] == [2]
    assert mine(9) == pytest.approx([0, 0, 4.512, 6.0], abs=1e-5)
    assert mine(10) == pytest.approx([0, 0, 4.4096, 6.8], abs=1e-5)
    assert state.memory["alone"] == [2, 3]
    assert mine(11) == pytest.approx([0, 0, 4.32768, 6.8], abs=1e-5)
    assert mine(12) == pytest.approx([0, 0, 4.262144, 7.44], abs=1e-5)
    # The others' trial is a round of training for those who are alone.
    state = at(state, "trial", {"4/0": 5.0, "5/0": 1.0, "5/1": 1.0}, next=5)
    assert mine(13) == pytest.approx([0.8, 0.8, 4.2097152, 7.952], abs=1e-5)


def models_now(made, state, channel):
    return [channel.fetch(c, made.method.sends(state, c)).vector for c in channel.clients]


# --- whole runs ----------------------------------------------------------------------------------


def permuted_digits(clients=8):
    return build_population(
        load("digits"), clients=clients, partition="iid", shift="label-permutation",
        shift_params={"groups": 4}, samples=100 * clients,
    )  # fmt: skip


def refines(fine, coarse):
    return len({(fine[c], coarse[c]) for c in fine}) == len(set(fine.values()))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Sixty rounds with every event, and everything that passed through the engine."""
    method = coterie.dc_pfl(
        **{**PAPER, "share": 0.95}, smooth=2, observe=1, sleep=1, start=3, alpha=3
    )
    made = experiment(
        method, permuted_digits(), settings={"rounds": 60, "seed": 1}, schedule={"lr": 0.05}
    )
    channel, engine, plan = opened(made, tmp_path_factory.mktemp("long"))
    state, notes, groups, bytes_up = method.init(channel, made.setup(plan.start)), [], [], []
    for number in range(60):
        before = dict(channel.state.ledger.method)
        channel.begin(number)
        state = method.round(channel, replace(state, notes={}), Round(number, range(8)))
        notes.append(state.notes)
        groups.append(dict(state.groups))
        bytes_up.append({c: b.up - before[c].up if c in before else b.up
                         for c, b in channel.state.ledger.method.items()})  # fmt: skip
    return notes, groups, engine, bytes_up


def test_every_later_partition_refines_the_earlier(long_run):
    _, groups, _, _ = long_run
    partitions = [g for i, g in enumerate(groups) if i == 0 or g != groups[i - 1]]
    assert len(partitions) >= 3
    for i, earlier in enumerate(partitions):
        for later in partitions[i:]:
            assert refines(later, earlier)
    assert len(set(partitions[-1].values())) > len(set(partitions[0].values()))


def test_trials_and_the_rounds_before_them_are_full_whatever_the_pace_of_layers(long_run):
    notes, _, engine, _ = long_run
    whole = 4 * 910
    trials = [i for i, n in enumerate(notes) if "trial" in n]
    assert trials
    assert any(n["layers"]["quiet"].get(s) for n in notes for s in n["layers"]["quiet"])
    for number in trials:
        full = [s for s in engine.of(f"{number}.0").values() if s.up]
        assert full
        assert all(s.payload[1] == whole for s in full)
        for seen in engine.of(f"{number + 1}.0").values():
            assert seen.payload == (whole * len(seen.down), 0)
        for seen in engine.of(f"{number + 1}.1").values():
            assert seen.payload[0] == 0
            assert seen.payload[1] == (0 if seen.config.get("alone") else whole)
    assert any(0 < s.payload[1] < whole for s in engine.seen)  # layers do rest elsewhere


def test_layers_rest_from_the_tree_on(long_run):
    notes, _, _, _ = long_run
    full = [i for i, n in enumerate(notes) if n["layers"]["all_due"]]
    assert full == [0, 1, 2, *range(5, 60, 3)]  # three rounds before the tree, then every third


def test_a_client_alone_sends_and_receives_no_model_but_its_loss(long_run):
    notes, _, engine, bytes_up = long_run
    alone = {c: next(i for i, n in enumerate(notes) if c in n["alone"]) for c in notes[-1]["alone"]}
    assert alone
    for client, since in alone.items():
        for number in range(since + 1, 60):
            for seen in engine.seen:
                if seen.client == client and seen.order.split(".")[0] == str(number + 1):
                    assert seen.payload == (0, 0)
                    assert ("loss" if seen.task == "train" else "old") in seen.metrics
            assert bytes_up[number][client] < 400


def test_the_loss_shown_is_that_of_all_who_answered(long_run):
    notes, _, engine, _ = long_run
    for number, note in enumerate(notes):
        if "trial" not in note:
            told = [s.metrics["loss"] for s in engine.of(f"{number + 1}.0").values()]
            assert len(told) == 8
            assert note["loss"] == pytest.approx(np.mean(told))


def test_the_same_run_in_two_parts(tmp_path):
    from support import Stop, stop_after

    method = coterie.dc_pfl(
        **{**PAPER, "share": 0.95}, smooth=1, observe=1, sleep=1, start=2, alpha=2
    )
    settings = {"rounds": 10, "cohort": 0.7, "evaluate_every": 0}
    made = experiment(method, permuted_digits(6), settings=settings)
    whole = execute(made, tmp_path / "whole")
    phases = [e["notes"]["phase"] for e in whole.history]
    stops = [phases.index("sync"), phases.index("trial")]
    for stop in stops:
        with pytest.raises(Stop):
            execute(made, tmp_path / str(stop), watch=stop_after(stop + 1))
        parts = execute(made, tmp_path / str(stop), resume=True)
        assert same_bits(
            [whole.weights(c).vector for c in range(6)], [parts.weights(c).vector for c in range(6)]
        )
        assert [e["notes"] for e in whole.history] == [e["notes"] for e in parts.history]


def test_parameters_that_make_no_sense():
    for wrong in (
        {"gamma": -0.1}, {"gamma": 1.1}, {"gamma": math.nan}, {"levels": 0.0}, {"levels": 1.5},
        {"levels": "merges"}, {"trial": "one"}, {"trial_on": "test"},
        {"smooth": 0}, {"observe": 0}, {"start": 0}, {"sleep": -1}, {"alpha": 0}, {"share": -0.1},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            coterie.dc_pfl(**wrong)


def test_a_single_client_is_alone_from_the_tree_on(tmp_path):
    made = experiment(coterie.dc_pfl(start=2), permuted_digits(8), settings={"rounds": 6})
    one = replace(made, population=replace(made.population, clients=made.population.clients[:1]))
    state, channel, _ = drive(one, tmp_path / "a")
    theirs = replace(one, method=coterie.local())
    alone, door2, _ = drive(theirs, tmp_path / "b")
    assert same_bits(models(one, state, channel), models(theirs, alone, door2))


def test_the_loss_is_that_of_the_model_received_before_training():
    # From 0 the targets 2 and 4 have losses 4 and 16, whatever two epochs then make of them.
    made = on_quadratics(
        coterie.dc_pfl(), [[2.0], [4.0]], schedule={"epochs": 2}, settings={"rounds": 1}
    )
    assert execute(made).history[0]["notes"]["loss"] == pytest.approx(10.0)
