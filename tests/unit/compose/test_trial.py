"""Trials of groups on validation data: what is judged, and what is averaged, sent and remembered.

How a verdict becomes a decision (``trial.decide``) is not tested here: where it matters, it is
replaced by one that takes a given cut.
"""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coterie
from coterie.clustering import canonical, find_evidence
from coterie.compose import trial
from coterie.compose.probing import ProbeAnswer
from coterie.compose.trial import candidates, judge, proposed, row_length
from coterie.core.messages import Order, Upload
from coterie.core.method import Round, State
from coterie.core.tree import read_tree, same, write_tree
from coterie.core.weights import Weights
from coterie.data import Split
from coterie.experiment.experiment import execute
from coterie.methods import make
from coterie.methods.by_evidence import EvidenceRule
from scripted import Scripted, Spy, halves, linears, opened, setup, weights
from scripted import steps as steps_
from support import (
    Stop,
    digits,
    drive,
    experiment,
    models,
    on_quadratics,
    same_bits,
    stop_after,
)

PLANE = linears((1, 1))


shortened = trial._shortened


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Models to be scored travel in full, so that numbers by hand can be told to the last digit."""
    monkeypatch.setattr(trial, "_shortened", lambda model: model)


def gaps(losses):
    """The first loss, and what the others are above it."""
    return [losses[0], *(v - losses[0] for v in losses[1:])]


def row(losses, within=0.0, others=None):
    """What a client with validation data sends: these losses, and this variance of all gaps.

    ``others`` are the losses without its own contribution, the same if not given.
    """
    pairs = [(a - b) ** 2 for i, a in enumerate(losses) for b in losses[i + 1 :]]
    both = [*gaps(losses), *gaps(losses if others is None else others)]
    return torch.tensor([1.0, *both, *pairs, *[within] * len(pairs)], dtype=torch.float64)


def forced(monkeypatch, cut):
    """Have every trial take this cut."""
    monkeypatch.setattr(trial, "decide", lambda *_, **__: (cut, "by force"))


# --- judge ----------------------------------------------------------------------------------------


def test_two_cuts_and_three_clients_by_hand():
    # Gaps 0.3, 0.2 and 0.1: 0.2 on average, their sample variance 0.01. Together with 0.02 from
    # few validation samples that makes √(0.03/3) = 0.1.
    rows = [row((1.0, 0.7), 0.01), row((1.2, 1.0), 0.02), row((0.8, 0.7), 0.03)]
    verdict = judge(torch.stack(rows).mean(0), 3, 2)
    assert verdict.losses == pytest.approx([1.0, 0.8])
    assert verdict.errors == pytest.approx([0.1, 0.0])
    assert (verdict.chosen, verdict.clients) == (1, 3)
    # With 0.12 more it is √(0.15/3) = 0.224: then 0.2 is no difference.
    rows = [replaced + torch.tensor([0, 0, 0, 0, 0, 0, 0.12]) for replaced in rows]
    verdict = judge(torch.stack(rows).mean(0), 3, 2)
    assert verdict.errors[0] == pytest.approx(math.sqrt(0.05))
    assert verdict.chosen == 0


def test_clients_that_are_alike_leave_the_error_of_few_samples():
    verdict = judge(row((1.0, 0.9), 0.04), 4, 2)
    assert verdict.errors == pytest.approx([math.sqrt(0.04 / 4), 0.0])
    assert judge(row((1.0, 0.9), 0.03), 4, 2).chosen == 1  # √0.0075 = 0.087
    assert judge(row((1.0, 0.9), 0.05), 4, 2).chosen == 0  # √0.0125 = 0.112


def test_the_coarsest_cut_within_one_standard_error_is_chosen():
    # From the lowest, the last: 0.5, 0.04 and 0.02 above it, each known to 0.03.
    losses = (1.0, 0.54, 0.52, 0.5)
    assert judge(row(losses, 0.0036), 4, 4).chosen == 2
    assert judge(row(losses, 0.0068), 4, 4).chosen == 1
    assert judge(row(losses, 0.0), 4, 4).chosen == 3
    assert judge(row(losses, 1.01), 4, 4).chosen == 0
    assert judge(row((0.5, 0.5, 0.5)), 4, 3).chosen == 0  # equal is no reason to part
    assert judge(row((0.5, 0.6)), 4, 2).chosen == 0


def test_standard_errors_are_those_of_the_gap_to_the_lowest():
    random = np.random.default_rng(0)
    losses = random.normal(1, 0.2, (7, 4))
    losses[:, 2] -= 0.5
    verdict = judge(torch.stack([row(tuple(r)) for r in losses]).mean(0), 7, 4)
    for errors, cut in ((verdict.errors, 2), (verdict.from_one, 0)):
        gaps = losses - losses[:, [cut]]
        assert errors == pytest.approx(gaps.std(axis=0, ddof=1) / math.sqrt(7), abs=1e-9)


def test_clients_without_validation_data_do_not_count():
    rows = [row((1.0, 0.7), 0.01), row((1.2, 1.0), 0.02), row((0.8, 0.7), 0.03)]
    three = judge(torch.stack(rows).mean(0), 3, 2)
    nothing = torch.zeros(row_length(2), dtype=torch.float64)
    five = judge(torch.stack([*rows, nothing, nothing]).mean(0), 5, 2)
    assert five.clients == pytest.approx(3)
    assert five.losses == pytest.approx(three.losses)
    assert five.errors == pytest.approx(three.errors)
    assert len(row((1.0, 2.0, 3.0))) == row_length(3) == 13


def test_losses_without_ones_own_contribution_are_averaged_alike():
    rows = [row((1.0, 0.7), others=(1.1, 0.9)), row((1.2, 1.0), others=(1.5, 1.1))]
    nothing = torch.zeros(row_length(2), dtype=torch.float64)
    verdict = judge(torch.stack([*rows, nothing]).mean(0), 3, 2)
    assert verdict.others == pytest.approx([1.3, 1.0])
    assert verdict.losses == pytest.approx([1.1, 0.85])


# --- candidates -----------------------------------------------------------------------------------


def planted(sizes, seed=0, width=6, noise=0.2):
    random = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    means = random.normal(size=(len(sizes), width))[truth]
    first, second = means + noise * random.normal(size=(2, *means.shape))
    return find_evidence(first, second, np.ones(len(truth))), truth


def counts(cuts):
    return [int(c.max()) + 1 for c in cuts]


def refines(fine, coarse):
    return all(len(set(coarse[fine == g])) == 1 for g in set(fine))


def test_the_candidates_are_the_cuts_of_the_tree_from_one_group_to_everybody_alone():
    evidence, truth = planted((3, 2, 2))
    cuts = candidates(evidence)
    assert counts(cuts) == [1, 2, 3, 4, 5, 6, 7]
    assert cuts[2].tolist() == truth.tolist() == evidence.labels.tolist()  # no cut is there twice
    assert all(refines(fine, coarse) for coarse, fine in pairwise(cuts))


def test_the_grouping_of_the_evidence_is_a_candidate_beside_the_cuts():
    evidence, _ = planted((3, 2, 2))
    other = np.array([0, 1, 0, 1, 0, 1, 0])
    cuts = candidates(replace(evidence, labels=other))
    assert counts(cuts) == [1, 2, 2, 3, 4, 5, 6, 7]
    assert sum(c.tolist() == other.tolist() for c in cuts) == 1


def test_groups_have_at_least_so_many_members_and_coarser_ones_are_sums():
    evidence, truth = planted((4, 3, 3))
    for least in (2, 3):
        cuts = candidates(evidence, least)
        assert all(np.bincount(c).min() >= least for c in cuts)
        assert counts(cuts)[0] == 1
        assert any(c.tolist() == truth.tolist() for c in cuts)
        assert all(refines(cuts[-1], c) for c in cuts)
    assert counts(candidates(evidence, 4)) == [1]  # two groups would be 4 and 6 only by chance
    # A grouping that is no sum of the finest cut's groups is left out.
    crossing = replace(evidence, labels=np.array([0, 1] * 5))
    assert not any(c.tolist() == [0, 1] * 5 for c in candidates(crossing, 3))
    assert any(c.tolist() == [0, 1] * 5 for c in candidates(crossing))


@pytest.mark.parametrize(
    ("clients", "last"), [(16, [14, 15, 16]), (17, [15, 16, 17]), (30, [16, 20, 25, 30])]
)
def test_of_many_groups_a_group_counts_is_tried(clients, last):
    first, second = np.random.default_rng(0).normal(size=(2, clients, 4))
    evidence = find_evidence(first, second, np.ones(clients))
    tried = counts(candidates(evidence))
    assert tried[:16] == list(range(1, 17))
    assert tried[-len(last) :] == last


def test_without_a_tree_the_evidence_is_all_there_is_to_try():
    evidence, truth = planted((3, 2, 2))
    cuts = candidates(replace(evidence, tree=None))
    assert [c.tolist() for c in cuts] == [[0] * 7, truth.tolist()]


# --- score-cuts: what a client sends --------------------------------------------------------------


def scoring(folder, validation, targets=(5.0, 5.0), **changes):
    """A channel to one client that trains towards these and is scored on those."""
    made = on_quadratics(coterie.fedclust(), [list(targets)], **changes)
    (person,) = made.population.clients
    y = torch.tensor(validation)
    person = replace(person, val=Split(torch.zeros(len(y), 1), y))
    made = replace(made, population=replace(made.population, clients=(person,)))
    channel, _, plan = opened(made, folder)
    return channel, plan.start


def scored(channel, start, cuts, number, totals=None, **offered):
    """The row that the client sends for these cuts, when it is offered these models.

    With whole losses again where it sends what they are above the first one.
    """
    channel.begin(number)
    arrays = {n: Weights(start.layout, torch.tensor([v])) for n, v in offered.items()}
    config = {"cuts": cuts} | ({} if totals is None else {"totals": totals})
    (reply,) = channel.gather([Order(0, "score-cuts", arrays, config)])
    result, k = reply.arrays["scores"].tolist(), len(cuts.split())
    for first in (1, 1 + k):
        result[first : first + k] = [
            result[first],
            *(result[first] + v for v in result[first + 1 : first + k]),
        ]
    return result


def test_a_row_by_hand(tmp_path):
    # On 1 and 3 the model 2 has losses 1 and 1, the model 1 losses 0 and 4. The squared difference
    # of the means is 1; the gaps are 1 and −3, of variance 8, that of their mean 4.
    channel, start = scoring(tmp_path, [1.0, 3.0])
    assert scored(channel, start, "a b", 0, a=2.0, b=1.0) == pytest.approx([1, *[1, 2] * 2, 1, 4])
    # A group that two cuts have in common is sent once, and scored alike.
    again = scored(channel, start, "a b b", 1, a=2.0, b=1.0)
    assert again == pytest.approx([1, *[1, 2, 2] * 2, 1, 1, 0, 4, 4, 0])


def test_one_validation_sample_has_no_variance(tmp_path):
    channel, start = scoring(tmp_path, [1.0])
    assert scored(channel, start, "a b", 0, a=2.0, b=4.0) == pytest.approx([1, *[1, 9] * 2, 64, 0])


def test_without_validation_data_a_client_sends_zeros(tmp_path):
    channel, start = scoring(tmp_path, [])
    assert scored(channel, start, "a b c", 0, a=2.0, b=1.0, c=0.0) == [0.0] * row_length(3)


def test_a_group_of_one_is_scored_with_the_model_that_its_client_kept(tmp_path):
    # From 0 a step goes a fifth of the way to 5: to 1. On 1 and 3 it has losses 0 and 4.
    channel, start = scoring(tmp_path, [1.0, 3.0])
    channel.begin(0)
    channel.reduce([Order(0, "train", {"0": start}, {trial.STEPS: 0})], {0: {0: 1.0}})
    assert scored(channel, start, "a alone", 0, a=2.0) == pytest.approx([1, *[1, 2] * 2, 1, 4])
    # It was kept until then, and not for longer: who has none to score says nothing.
    assert scored(channel, start, "a alone", 2, a=2.0) == [0.0] * row_length(2)


def test_the_loss_without_ones_own_contribution_by_hand(tmp_path):
    # It has two samples and trained from 0 to 1. Of 8 samples the mean is 2: the six others' is
    # (8·2 − 2·1)/6 = 7/3. Of 4 the mean is 1.5: the other two's is (4·1.5 − 2·1)/2 = 2. On 1 and 3
    # these have losses (16/9 + 4/9)/2 = 10/9 and 1. Alone it is scored with the coarser one's, 1.
    channel, start = scoring(tmp_path, [1.0, 3.0])
    channel.begin(0)
    channel.reduce([Order(0, "train", {"0": start}, {trial.STEPS: 0})], {0: {0: 1.0}})
    result = scored(channel, start, "a b alone", 0, totals="8 4 2", a=2.0, b=1.5)
    assert result[1:4] == pytest.approx([1, 1.25, 2])
    assert result[4:7] == pytest.approx([10 / 9, 1, 1])


def test_who_is_nearly_all_of_its_group_has_nobody_elses_model(tmp_path):
    # Of its group's samples 2 are its own: with 41 in all a twentieth is others', with 40 less.
    channel, start = scoring(tmp_path, [1.0, 3.0], targets=(5.0,) * 38)
    result = []
    for number, total in enumerate((41, 39)):
        channel.begin(number)
        channel.reduce([Order(0, "train", {"0": start}, {trial.STEPS: 0})], {0: {0: 1.0}})
        result.append(scored(channel, start, "a b", number, totals=f"80 {total}", a=2.0, b=1.5))
    assert result[0][4] != result[0][3]
    assert result[1][4] == result[1][3]


def test_models_to_be_scored_travel_in_half_the_bytes_unless_their_numbers_are_too_large():
    fine, large = weights(PLANE, 1.5, -0.1), weights(PLANE, 1.5, -70_000)
    short = shortened(fine)
    assert short.dtype == torch.float16
    restored = trial._restored(short, PLANE)
    assert restored.layout == PLANE
    assert restored.vector.tolist() == pytest.approx(fine.vector.tolist(), rel=5e-4)
    assert shortened(large) is large
    assert trial._restored(large, PLANE) is large


def test_models_are_scored_on_the_data_that_are_asked_for(tmp_path):
    # It trains towards 5 and is validated on 1 and 3: from 2 that is 9, and 1, in squares.
    channel, start = scoring(tmp_path, [1.0, 3.0])
    channel.begin(0)
    model = {"a": Weights(start.layout, torch.tensor([2.0]))}
    for on, wanted in (("val", 1.0), ("train", 9.0)):
        order = Order(0, "score-cuts", model, {"cuts": "a", "on": on})
        (reply,) = channel.gather([order])
        assert float(reply.arrays["scores"][1]) == pytest.approx(wanted)


def test_on_training_data_the_evidence_has_no_say():
    cuts = torch.tensor([[0, 0], [0, 1]])
    memory = {"clients": [0, 1], "slot": 0, "cuts": cuts, "rounds": 1, "own": 1, "decisive": True}
    assert trial._TrialPlan({**memory, "on": "val"}, 1).evidence_cut == 1
    assert trial._TrialPlan({**memory, "on": "train"}, 1).evidence_cut == -1
    assert trial._TrialPlan({**memory, "decisive": False}, 1).evidence_cut == -1


def test_who_has_no_model_of_its_own_contributed_nothing(tmp_path):
    channel, start = scoring(tmp_path, [1.0, 3.0])
    result = scored(channel, start, "a b", 0, totals="8 4", a=2.0, b=1.5)
    assert result[3:5] == result[1:3] == pytest.approx([1, 1.25])


def test_what_is_trained_is_kept_in_a_trial_only(tmp_path):
    channel, start = scoring(tmp_path, [1.0, 3.0])
    channel.begin(0)
    channel.reduce([Order(0, "train", {"0": start})], {0: {0: 1.0}})
    assert scored(channel, start, "a alone", 1, a=2.0) == [0.0] * row_length(2)


def test_what_is_scored_trains_as_long_as_it_takes_and_what_goes_on_as_a_round(tmp_path):
    channel, start = scoring(tmp_path, [1.0])
    for number, (least, scored_steps) in enumerate([(1, 1), (7, 7)]):
        channel.begin(number)
        order = Order(0, "train", {"0": start}, {trial.STEPS: least})
        arrays = channel.reduce([order], {0: {0: 1.0}})[0].arrays
        assert float(arrays["model"].vector) == pytest.approx(5 * (1 - 0.8), abs=1e-5)
        longer = 5 * (1 - 0.8**scored_steps)
        assert float(arrays[trial.SCORED].vector) == pytest.approx(longer, abs=1e-5)
        # The client keeps the longer-trained one: alone, its loss on 1 is that model's.
        alone = scored(channel, start, "a alone", number, a=2.0)
        assert alone[2] == pytest.approx((longer - 1) ** 2, abs=1e-4)


def test_a_round_that_is_longer_than_asked_for_is_not_cut_short(tmp_path):
    channel, start = scoring(tmp_path, [1.0], schedule={"epochs": 3})
    channel.begin(0)
    order = Order(0, "train", {"0": start}, {trial.STEPS: 2})
    arrays = channel.reduce([order], {0: {0: 1.0}})[0].arrays
    assert float(arrays[trial.SCORED].vector) == float(arrays["model"].vector)
    assert float(arrays["model"].vector) == pytest.approx(5 * (1 - 0.8**3), abs=1e-5)


def test_what_a_copy_takes_is_counted_and_nothing_but_the_copy_is_kept():
    aside = SimpleNamespace(samples=7.0, trained=5.0, state={})

    def train(client, begin):
        client.state["own"] = begin
        return SimpleNamespace(weights=begin)

    asked = []
    client = SimpleNamespace(
        samples=2.0, trained=1.0, state={}, steps=lambda: 4, round=6,
        aside=lambda steps: asked.append(steps) or aside,
    )  # fmt: skip
    start = weights(PLANE, 0, 0)
    assert trial.longer_trained(client, {trial.STEPS: 9}, start, train) == {trial.SCORED: start}
    assert (client.samples, client.trained, asked) == (9.0, 6.0, [9])
    kept = client.state.pop(trial.KEPT)
    assert kept.vector.equal(start.vector)
    assert client.state == {trial.KEPT_IN: 6}
    assert trial.longer_trained(client, {}, start, train) == {}
    assert (client.samples, asked, client.state) == (9.0, [9], {trial.KEPT_IN: 6})


def test_what_an_earlier_trial_left_behind_is_not_used(tmp_path):
    channel, start = scoring(tmp_path, [1.0, 3.0])
    channel.begin(0)
    channel.reduce([Order(0, "train", {"0": start}, {trial.STEPS: 0})], {0: {0: 1.0}})
    # Its scores were never asked for. In round 5 its training is lost: it is in no mean.
    result = scored(channel, start, "a b", 5, totals="8 4", a=2.0, b=1.5)
    assert result[3:5] == result[1:3] == pytest.approx([1, 1.25])
    assert scored(channel, start, "a alone", 5, a=2.0) == [0.0] * row_length(2)


@pytest.mark.parametrize("steps", [25, 0])
def test_a_trial_trains_as_long_as_the_probe_or_asks_how_long_that_must_be(steps):
    evidence, _ = planted((3, 3))
    memory = {"start": weights(PLANE, 0, 0), "round": 0, "steps": steps, "draw": 0, "by": "data"}
    notes = {"by": "data", "samples": 7.0}
    answer = ProbeAnswer(IDS, [1] * 6, evidence, torch.eye(6), [0.0] * 6, memory, notes)
    state = State({0: weights(PLANE, 0, 0)}, dict.fromkeys(IDS, 0))
    fed = Scripted(lambda order: steps_(50, samples=2.0), IDS)
    after = EvidenceRule().decided(fed, state, answer)
    assert after.memory["trial"]["steps"] == (steps or 50)
    asked = [order for _, orders, _ in fed.asked for order in orders.values()]
    assert [(o.client, o.task, o.config["keep"]) for o in asked] == [
        (c, "steps", False) for c in IDS if not steps
    ]
    assert after.notes["evidence"]["samples"] == (7.0 if steps else 19.0)


# --- run: what is averaged ------------------------------------------------------------------------

IDS = [3, 7, 8, 11, 12, 20]  # never a position in any list of them
SAMPLES = {3: 1, 7: 2, 8: 3, 11: 1, 12: 2, 20: 1}
MOVES = {3: (0, 1), 7: (8, 0), 8: (0, 2), 11: (9, 1), 12: (0, 4), 20: (7, 7)}
LONGER = 3  # times as far do they move when they train for longer
TREE = [
    [0, 0, 0, 0, 0, 0],
    [0, 1, 0, 1, 0, 1],
    [0, 1, 0, 1, 2, 1],
    [0, 1, 2, 3, 4, 5],
]


class People(Scripted):
    """Clients that move what they train by ``MOVES``, and whose loss is the squared distance to it.

    Whoever is in ``silent[task]`` does not answer.
    """

    def __init__(self, min_group=1, silent=None):
        super().__init__(self.answer, range(0), SAMPLES, min_group=min_group)
        self.silent, self.trained = silent or {}, {}

    def answer(self, order):
        client = order.client
        if client in self.silent.get(order.task, ()):
            return None
        if order.task == "train":
            (start,) = order.arrays.values()
            moved = Weights(PLANE, start.vector + torch.tensor(MOVES[client]))
            longer = Weights(PLANE, start.vector + LONGER * torch.tensor(MOVES[client]))
            more = bool(order.config.get(trial.STEPS))
            self.trained[client] = longer if more else moved
            sent = {"model": moved} | ({trial.SCORED: longer} if more else {})
            return Upload(sent, {"loss": 0.0})
        names = order.config["cuts"].split()
        used = [order.arrays.get(n, self.trained.get(client)) for n in names]
        losses = [self.loss(client, w.vector) for w in used]
        others = []
        if "totals" in order.config and client in self.trained:
            own, samples = self.trained[client].vector, SAMPLES[client]
            for total, model in zip(order.config["totals"].split(), used, strict=True):
                rest = int(total) - samples
                sums = int(total) * model.vector - samples * own
                others.append(self.loss(client, sums / rest) if rest else others[-1])
        return Upload({"scores": row(losses, others=others or None)})

    @staticmethod
    def loss(client, vector):
        return float((vector - torch.tensor(MOVES[client])).square().sum())

    def orders(self, task):
        return [orders for _, orders, _ in self.asked if next(iter(orders.values())).task == task]


def trains(state, places):
    return [Order(c, "train", {"model": state.models[s]}) for c, s in places.items()]


def offer(models, slots):
    return {str(s): models[s] for s in slots if s in models}


def begun(rounds=1, cuts=TREE, clients=IDS, first=0, **more):
    """The state of one model before a trial of these cuts."""
    memory = {
        "clients": list(clients), "cuts": torch.tensor(cuts), "places": torch.eye(len(clients)),
        "slot": 0, "own": -1, "decisive": False, "next": first, "rounds": rounds,
        "asked_rounds": rounds, "again": True, "later": more.get("later", 0),
        "steps": more.get("steps", 0),
    }  # fmt: skip
    groups = dict.fromkeys(clients, 0) | more.get("groups", {})
    models = {0: weights(PLANE, 1, 1)} | more.get("models", {})
    return State(models, groups, {"trial": memory})


def mean(members, start=(1, 1)):
    """By hand: the start and the mean move of these, by their samples."""
    total = sum(SAMPLES[c] for c in members)
    moves = sum(SAMPLES[c] * np.array(MOVES[c], float) for c in members) / total
    return pytest.approx((np.array(start) + moves).tolist(), rel=1e-6)


def group(cut, client, clients=IDS):
    at = list(clients).index(client)
    return [c for c, g in zip(clients, cut, strict=True) if g == cut[at]]


@pytest.mark.parametrize("min_group", [1, 2])
def test_every_group_of_every_cut_is_the_mean_of_its_members(min_group):
    cuts = TREE if min_group == 1 else [TREE[0], [0, 0, 1, 0, 1, 0], [0, 1, 2, 0, 2, 1]]
    people = People(min_group)
    trial.run(people, begun(cuts=cuts), Round(0, IDS), trains, offer)
    (scores,) = people.orders("score-cuts")
    assert sorted(scores) == IDS
    for client, order in scores.items():
        names = order.config["cuts"].split()
        for cut, name in zip(cuts, names, strict=True):
            members = group(cut, client)
            if len(members) == 1:
                assert name not in order.arrays  # it has that one already
            else:
                assert order.arrays[name].vector.tolist() == mean(members)
        # A group that two cuts have in common has one name, and travels once.
        assert len(set(names)) == len({tuple(group(cut, client)) for cut in cuts})


def test_where_single_clients_are_hidden_only_the_finest_sums_are_asked_for():
    cuts = [TREE[0], [0, 0, 1, 0, 1, 0], [0, 1, 2, 0, 2, 1]]
    people = People(min_group=2)
    trial.run(people, begun(cuts=cuts), Round(0, IDS), trains, offer)
    assert [kind for kind, _, _ in people.asked] == ["reduce", "reduce"]
    for _, _, into in people.asked:
        assert all(len(shares) == 1 for shares in into.values())
        slots = [next(iter(into[c])) for c in IDS]
        assert canonical(np.unique(slots, return_inverse=True)[1]).tolist() == cuts[-1]
    open_ones = People()
    trial.run(open_ones, begun(cuts=cuts), Round(0, IDS), trains, offer)
    (ours,), (theirs,) = people.orders("score-cuts"), open_ones.orders("score-cuts")
    for client in IDS:
        for name, model in theirs[client].arrays.items():
            torch.testing.assert_close(ours[client].arrays[name].vector, model.vector)


@pytest.mark.parametrize("cuts", [TREE, TREE[:2]], ids=["alone", "together"])
def test_the_verdict_is_of_the_losses_by_hand(cuts):
    """Everybody's loss counts alike, however many samples it has."""
    state = trial.run(People(), begun(cuts=cuts), Round(0, IDS), trains, offer)
    verdict = state.notes["verdict"]
    assert verdict["cuts"] == [max(c) + 1 for c in cuts]
    assert verdict["clients"] == 6
    for k, cut in enumerate(cuts):
        losses = []
        for client in IDS:
            members = group(cut, client)
            total = sum(SAMPLES[c] for c in members)
            model = 1 + sum(SAMPLES[c] * np.array(MOVES[c], float) for c in members) / total
            losses.append(((model - MOVES[client]) ** 2).sum())
        assert verdict["losses"][k] == pytest.approx(np.mean(losses), rel=1e-5)


def decided(**more):
    """Evidence that has decided for the second cut."""
    state = begun(**more)
    state.memory["trial"] |= {"own": 1, "decisive": True}
    return state


@pytest.mark.parametrize("steps", [0, 50])
def test_finer_cuts_are_judged_by_what_the_others_sent(steps):
    people = People()
    state = trial.run(people, decided(steps=steps), Round(0, IDS), trains, offer)
    scale = LONGER if steps else 1
    for k, cut in enumerate(TREE):
        losses = []
        for client in IDS:
            # Alone nobody else is left: the group of the cut before it, without the client.
            at = next(j for j in range(k, -1, -1) if len(group(TREE[j], client)) > 1)
            members = [c for c in group(TREE[at], client) if c != client]
            total = sum(SAMPLES[c] for c in members)
            moves = sum(SAMPLES[c] * np.array(MOVES[c], float) for c in members) / total
            losses.append(((1 + scale * moves - MOVES[client]) ** 2).sum())
        assert state.notes["verdict"]["others"][k] == pytest.approx(np.mean(losses), rel=1e-4), cut


def test_decided_evidence_keeps_its_groups_where_own_contributions_favour_everybody_alone():
    # Without the client itself the two groups have 31.7 − 14.3 = 17.4 of the 18.7 to be gained.
    ends = [
        trial.run(People(), state, Round(0, IDS), trains, offer).notes["verdict"]["chosen"]
        for state in (decided(), begun())
    ]
    assert ends == [2, 6]


@pytest.mark.parametrize(("rounds", "plain"), [(2, True), (1, False)])
def test_where_own_contributions_cannot_be_taken_out_the_evidence_stands(rounds, plain):
    people = People()
    people.plain_means = plain
    state = decided(rounds=rounds, steps=50)
    for number in range(rounds):
        state = trial.run(people, state, Round(number, IDS), trains, offer)
    (scores,) = people.orders("score-cuts")
    assert all("totals" not in o.config for o in scores.values())
    assert all(set(o.config["cuts"].split()) == set(o.arrays) for o in scores.values())
    assert "others" not in state.notes["verdict"]
    assert state.notes["verdict"]["chosen"] in (1, 2)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_groups_of_the_cut_go_on_from_the_models_just_made(cut, monkeypatch):
    forced(monkeypatch, cut)
    state = trial.run(People(), begun(), Round(4, IDS), trains, offer)
    assert state.groups == {c: f"5/{g}" for c, g in zip(IDS, TREE[cut], strict=True)}
    assert set(state.models) == set(state.groups.values())
    for client in IDS:
        members = group(TREE[cut], client)
        assert state.models[state.groups[client]].vector.tolist() == mean(members)
    assert "trial" not in state.memory
    assert state.notes["verdict"]["chosen"] == max(TREE[cut]) + 1
    assert state.notes["verdict"]["why"] == "by force"


@pytest.mark.parametrize("min_group", [1, 2])
@pytest.mark.parametrize("rounds", [1, 2])
def test_longer_trained_models_are_scored_and_groups_go_on_from_ordinary_ones(
    min_group, rounds, monkeypatch
):
    forced(monkeypatch, 1)
    cuts = TREE if min_group == 1 else [TREE[0], [0, 0, 1, 0, 1, 0], [0, 1, 2, 0, 2, 1]]
    state, people = begun(rounds, cuts, steps=50), People(min_group)
    for number in range(rounds):
        state = trial.run(people, state, Round(number, IDS), trains, offer)
    (scores,) = people.orders("score-cuts")
    for client in IDS:
        members = group(cuts[1], client)
        total = sum(SAMPLES[c] for c in members)
        step = sum(SAMPLES[c] * np.array(MOVES[c], float) for c in members) / total
        before = 1 + (rounds - 1) * step  # a longer training is the last round's only
        name = scores[client].config["cuts"].split()[1]
        offered = scores[client].arrays[name].vector.tolist()
        assert offered == pytest.approx((before + LONGER * step).tolist(), rel=1e-6)
        ordinary = state.models[state.groups[client]].vector.tolist()
        assert ordinary == pytest.approx((before + step).tolist(), rel=1e-6)


def test_a_trial_that_keeps_one_model_is_a_round_of_one_model(monkeypatch):
    forced(monkeypatch, 0)
    state = trial.run(People(), begun(), Round(3, IDS), trains, offer)
    assert state.groups == dict.fromkeys(IDS, 0)
    assert list(state.models) == [0]
    assert state.models[0].vector.tolist() == mean(IDS)
    later = state.memory["trial"]
    assert later["next"] > 4
    assert not trial.due(state, Round(4, IDS))
    assert trial.due(state, Round(later["next"], IDS))
    soon = trial.run(People(), begun(later=5), Round(0, IDS), trains, offer)
    assert soon.memory["trial"]["next"] == 5
    over = begun()
    over.memory["trial"]["again"] = False
    assert "trial" not in trial.run(People(), over, Round(3, IDS), trains, offer).memory


def test_another_trial_takes_as_many_rounds_as_the_first(monkeypatch):
    forced(monkeypatch, 0)
    state = begun(rounds=2)
    for number in (0, 1):
        state = trial.run(People(), state, Round(number, IDS), trains, offer)
    assert state.notes["verdict"]["why"] == "by force"
    assert state.memory["trial"]["rounds"] == 2
    assert "models" not in state.memory["trial"]


def test_everybody_is_asked_once_whoever_is_in_the_cohort(monkeypatch):
    forced(monkeypatch, 1)
    people = People()
    state = trial.run(people, begun(), Round(0, [7, 20]), trains, offer)
    assert [sorted(orders) for _, orders, _ in people.asked] == [IDS, IDS]
    assert state.models["1/0"].vector.tolist() == mean([3, 8, 12])


def test_clients_of_other_groups_train_as_ever(monkeypatch):
    forced(monkeypatch, 1)
    people = People()
    clients, cuts = IDS[:4], [c[:4] for c in TREE[:2]]
    state = begun(
        cuts=cuts, clients=clients, groups={12: "x", 20: "y"},
        models={"x": weights(PLANE, 5, 5), "y": weights(PLANE, 6, 6)},
    )  # fmt: skip
    after = trial.run(people, state, Round(0, [3, 12]), trains, offer)
    assert sorted(people.asked[0][1]) == [3, 7, 8, 11, 12]  # 20 is not in the cohort
    assert sorted(people.asked[1][1]) == [3, 7, 8, 11]
    assert after.models["x"].vector.tolist() == [5, 9]
    assert after.models["y"].vector.tolist() == [6, 6]
    assert after.groups == {12: "x", 20: "y", 3: "1/0", 7: "1/1", 8: "1/0", 11: "1/1"}


# --- run: sums of scores --------------------------------------------------------------------------


def scores_into(people, state):
    """Whose scores go into which sum of a trial, and the state after it."""
    after = trial.run(people, state, Round(0, IDS), trains, offer)
    (into,) = (into for _, orders, into in people.asked if orders[3].task == "score-cuts")
    return {c: tuple(slots) for c, slots in into.items()}, after


def test_scores_are_one_sum_of_all_where_single_clients_are_not_hidden():
    into, _ = scores_into(People(), decided(steps=50))
    assert len(set(into.values())) == 1
    hidden = [TREE[0], [0, 0, 1, 0, 1, 0], [0, 1, 2, 0, 2, 1]]
    into, _ = scores_into(People(2), begun(cuts=hidden, steps=50))
    assert len(set(into.values())) == 3


def test_scores_are_in_no_sum_with_others_where_a_robust_mean_may_stand_in_for_a_plain_one():
    people = People()
    people.plain_means = False
    assert len(set(scores_into(people, decided(steps=50))[0].values())) == 6


def test_one_sum_says_what_sums_of_single_clients_say():
    """Here rows are in float64; in a real run they are in float32, and so is their mean."""
    whole = scores_into(People(), decided(steps=50))[1].notes["verdict"]
    apart = People()
    apart.plain_means = False
    single = scores_into(apart, decided(steps=50))[1].notes["verdict"]
    assert whole["losses"] == pytest.approx(single["losses"], rel=1e-12)
    assert whole["errors"] == pytest.approx(single["errors"], rel=1e-12)


def test_models_that_are_alike_stay_alike_in_a_sum_of_short_numbers():
    random = np.random.default_rng(0)
    one, apart = random.uniform(1, 9, 40), random.uniform(1e-4, 2e-4, 40)
    rows = [row((a, a, a - b), others=(a, a, a)).float() for a, b in zip(one, apart, strict=True)]
    verdict = judge(torch.stack(rows).mean(0), 40, 3)
    assert verdict.losses[0] == verdict.losses[1]
    assert verdict.others[0] == verdict.others[1] == verdict.others[2]
    # Less than a digit of the losses is kept of it in float32, and all of the difference.
    assert verdict.losses[0] - verdict.losses[2] == pytest.approx(apart.mean(), rel=1e-6)


# --- run: replies that are lost -------------------------------------------------------------------


def test_who_is_lost_in_the_training_is_missing_from_the_means(monkeypatch):
    forced(monkeypatch, 3)
    people = People(silent={"train": [8]})
    state = trial.run(people, begun(), Round(0, IDS), trains, offer)
    (scores,) = people.orders("score-cuts")
    assert scores[3].arrays[scores[3].config["cuts"].split()[1]].vector.tolist() == mean([3, 12])
    # Its own group has no model: it scores, and goes on with, the model of all.
    names = scores[8].config["cuts"].split()
    assert names[-1] == names[0]
    assert state.models[state.groups[8]].vector.tolist() == mean([c for c in IDS if c != 8])
    assert state.models[state.groups[3]].vector.tolist() == mean([3])


def test_who_is_lost_in_the_scoring_does_not_count():
    whole = trial.run(People(), begun(), Round(0, IDS), trains, offer)
    part = trial.run(People(silent={"score-cuts": [8, 20]}), begun(), Round(0, IDS), trains, offer)
    assert part.notes["verdict"]["clients"] == 4
    one = {c: ((np.array(mean(IDS).expected) - MOVES[c]) ** 2).sum() for c in IDS}
    assert whole.notes["verdict"]["losses"][0] == pytest.approx(
        np.mean(list(one.values())), rel=1e-5
    )
    left = [one[c] for c in IDS if c not in (8, 20)]
    assert part.notes["verdict"]["losses"][0] == pytest.approx(np.mean(left), rel=1e-5)


def test_when_nobody_answers_there_is_another_round():
    before = begun()
    state = trial.run(People(silent={"train": IDS}), before, Round(0, IDS), trains, offer)
    assert same(state.to_tree(), before.to_tree())
    # Nobody scores: what was trained counts, and the trial is made up for.
    state = trial.run(People(silent={"score-cuts": IDS}), before, Round(0, IDS), trains, offer)
    assert state.models[0].vector.tolist() == mean(IDS)
    assert "verdict" not in state.notes
    assert trial.due(state, Round(1, IDS))
    after = trial.run(People(), state, Round(1, IDS), trains, offer)
    assert after.notes["verdict"]["clients"] == 6


def test_without_validation_data_there_is_no_verdict_and_no_further_trial():
    people = People()
    nothing = Upload({"scores": torch.zeros(row_length(4))})
    people.script = lambda o: nothing if o.task == "score-cuts" else people.answer(o)
    state = trial.run(people, begun(), Round(0, IDS), trains, offer)
    assert state.notes["verdict"] == {"cuts": [1, 2, 3, 6], "why": trial.NOBODY}
    assert state.groups == dict.fromkeys(IDS, 0)
    assert "trial" not in state.memory


# --- a trial of several rounds --------------------------------------------------------------------


def resumed(state, folder):
    """The state as a run reads it back."""
    write_tree(folder, state.to_tree(), PLANE, durable=False)
    return State.from_tree(read_tree(folder, PLANE))


def test_in_two_rounds_every_group_trains_its_own_model_on(monkeypatch, tmp_path):
    forced(monkeypatch, 2)
    people = People()
    state = trial.run(people, begun(rounds=2), Round(0, IDS), trains, offer)
    assert not people.orders("score-cuts")
    assert state.models[0].vector.tolist() == mean(IDS)
    assert trial.due(state, Round(1, IDS))
    again = People()
    after = trial.run(again, resumed(state, tmp_path / "state"), Round(1, IDS), trains, offer)
    # Each group goes on from its own mean, by the same mean move.
    for client in IDS:
        members = group(TREE[2], client)
        start = np.array(mean(members).expected)
        assert after.models[after.groups[client]].vector.tolist() == mean(members, start)
    # What is scored is asked for in the last round only.
    for play, last in ((people, False), (again, True)):
        orders = [o for exchange in play.orders("train") for o in exchange.values()]
        assert {trial.STEPS in o.config for o in orders} == {last}
    # All train the model of all; then whoever is in a group that the coarser cuts do not have.
    asked = [sorted(orders) for orders in again.orders("train")]
    assert asked == [IDS, IDS, [3, 8, 12], [3, 7, 8, 11, 20]]
    # Nobody has kept a model of its own: those of groups of one travel, too.
    (scores,) = again.orders("score-cuts")
    for order in scores.values():
        assert set(order.config["cuts"].split()) == set(order.arrays)


def test_a_resumed_trial_goes_on_as_if_never_stopped(monkeypatch, tmp_path):
    forced(monkeypatch, 1)
    ends = []
    for stop in (False, True):
        state = begun(rounds=3)
        for number in range(3):
            if stop:
                state = resumed(state, tmp_path / f"{number}")
            state = trial.run(People(), state, Round(number, IDS), trains, offer)
        ends.append(state)
    assert same(ends[0].to_tree(), ends[1].to_tree())
    assert ends[0].notes == ends[1].notes
    assert set(ends[0].groups.values()) == {"3/0", "3/1"}


def test_a_plan_is_a_tree_that_can_be_saved(tmp_path):
    evidence, _ = planted((3, 3))
    plan = proposed(IDS, evidence, torch.eye(6), slot=0, first=2)
    assert [c.max().item() + 1 for c in plan["cuts"]] == [1, 2, 3, 4, 5, 6]
    assert plan["cuts"][plan["own"]].tolist() == evidence.labels.tolist()
    state = State({0: weights(PLANE, 1, 1)}, dict.fromkeys(IDS, 0), {"trial": plan})
    assert same(resumed(state, tmp_path / "state").to_tree(), state.to_tree())
    assert not trial.due(state, Round(1, IDS))
    assert trial.due(state, Round(2, IDS))


# --- in methods -----------------------------------------------------------------------------------

ANGLES = {0: (0, 8), 1: (90, 95), 2: (2, 5), 3: (98, 88), 4: (40, 30), 5: (50, 70)}


def turned(client):
    """A client's change of the final layer, half by half."""
    return [
        weights(PLANE, math.cos(math.radians(a)), math.sin(math.radians(a))) for a in ANGLES[client]
    ]


def test_newcomers_after_a_split_go_to_the_group_whose_mean_direction_is_nearest(monkeypatch):
    silent = set()

    def answer(order):
        if order.client in silent:
            return None
        if order.task == "steps":
            return steps_(25)
        if order.task == "halves":
            return halves(*turned(order.client))
        if order.task == "train":
            return Upload({"model": turned(order.client)[0]}, {"loss": 0.0})
        return Upload({"scores": row([1.0] * len(order.config["cuts"].split()))})

    forced(monkeypatch, 1)
    fed, method = Scripted(answer, range(6)), coterie.fedclust()
    state = method.init(fed, setup(weights(PLANE, 0, 0), range(4)))
    assert state.groups == dict.fromkeys(range(4), 0)
    # Before the split a newcomer joins the one group, without a question.
    fed.asked.clear()
    assert method.admit(fed, state, Round(0, [4])).groups[4] == 0
    assert not fed.asked
    when = state.memory["trial"]["next"]
    state = method.round(fed, state, Round(when, range(4)))
    one, two = (f"{when + 1}/{g}" for g in range(2))
    assert state.groups == {0: one, 1: two, 2: one, 3: two}
    # Mean directions of about 4° and 93°: 35° is nearer to the first, 60° to the second.
    assert method.admit(fed, state, Round(9, [4, 5])).groups == {**state.groups, 4: one, 5: two}
    silent.add(4)
    assert method.admit(fed, state, Round(9, [4, 5])).groups == {**state.groups, 5: two}


ROUNDS = 8  # within these a trial is made
SMALL = {"warmup_steps": 5, "trial": "always"}


def seen_by(name, folder, monkeypatch, cut, parameters=SMALL):
    """A real run in which the trial takes this cut: its state, channel, engine and experiment."""
    forced(monkeypatch, cut)
    made = experiment(make(name, parameters), digits(clients=4, samples=240))
    state, channel, engine = drive(made, folder, Spy, rounds=ROUNDS)
    assert any(s.task == "score-cuts" for s in engine.seen)
    return made, state, channel, engine


@pytest.mark.parametrize("plain", ["fedavg", "ditto", "fedper"])
@pytest.mark.parametrize("needed", [5, 40])
def test_a_trial_that_keeps_one_model_changes_no_bit(plain, needed, monkeypatch, tmp_path):
    """A round is shorter than 40 steps: then clients train longer for the trial, without a mark."""
    name = "fedclust" if plain == "fedavg" else f"fedclust+{plain}"
    parameters = {**SMALL, "warmup_steps": needed}
    made, state, channel, engine = seen_by(name, tmp_path / "a", monkeypatch, 0, parameters)
    assert set(state.groups.values()) == {0}
    tried = [s for s in engine.seen if s.task == "train" and trial.STEPS in s.config]
    assert {s.config[trial.STEPS] for s in tried} == {needed}
    other = experiment(make(plain, {}), digits(clients=4, samples=240))
    end, other_door, _ = drive(other, tmp_path / "b", rounds=ROUNDS)
    assert same_bits(models(made, state, channel), models(other, end, other_door))


@pytest.mark.parametrize("name", ["fedclust", "fedclust+ditto", "fedclust+fedper", "pacfl"])
@pytest.mark.parametrize("cut", [1, 3])
def test_methods_and_combinations_split_by_a_trial(name, cut, monkeypatch, tmp_path):
    parameters = {"trial": "always"} if name == "pacfl" else SMALL
    made, state, channel, engine = seen_by(name, tmp_path, monkeypatch, cut, parameters)
    assert len(set(state.groups.values())) == cut + 1
    assert set(state.models) == set(state.groups.values())
    for found in models(made, state, channel):
        assert torch.isfinite(found).all()
    shared = {n for s in engine.seen if s.task == "score-cuts" for t in s.down.values() for n in t}
    head = {"head.weight", "head.bias"}
    assert (shared & head == set()) == (name == "fedclust+fedper")
    # What a client trained for the trial is not kept for longer.
    tried = [s for s in engine.seen if s.task == "train" and trial.STEPS in s.config]
    assert sorted(s.client for s in tried) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["fedclust", "fedclust+fedper", "pacfl"])
def test_shortened_models_have_nearly_the_same_losses(name, monkeypatch, tmp_path):
    parameters = {"trial": "always"} if name == "pacfl" else SMALL
    rows = []
    for folder, function in (("a", trial._shortened), ("b", shortened)):
        monkeypatch.setattr(trial, "_shortened", function)
        _, _, _, engine = seen_by(name, tmp_path / folder, monkeypatch, 1, parameters)
        asked = [s for s in engine.seen if s.task == "score-cuts"]
        rows.append(({s.client: s.sent["scores"] for s in asked}, sum(s.payload[0] for s in asked)))
    (full, bytes_full), (short, bytes_short) = rows
    assert bytes_short == bytes_full / 2 > 0
    for client in full:
        assert short[client].tolist() == pytest.approx(full[client].tolist(), abs=2e-3)
        assert short[client].tolist() != full[client].tolist()


def test_a_trial_of_two_rounds_in_a_real_run_can_be_resumed(monkeypatch, tmp_path):
    forced(monkeypatch, 1)
    settings = {"rounds": 4, "cohort": 0.5}
    method = coterie.fl_hc(rounds=1, trial="always", trial_rounds=2)
    made = experiment(method, digits(clients=4, samples=160), settings=settings)
    whole = execute(made, tmp_path / "whole")
    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(2))  # between the rounds of the trial
    parts = execute(made, tmp_path / "parts", resume=True)
    verdicts = [e["notes"]["verdict"] for e in parts.history if "verdict" in e.get("notes", {})]
    assert len(verdicts) == 1
    assert {e["round"] for e in parts.history if "verdict" in e.get("notes", {})} == {3}
    for client in range(4):
        assert same(whole.weights(client), parts.weights(client))


# --- which cut is taken -------------------------------------------------------------------------


COUNTS = [1, 2, 4, 8]


def said(losses, errors, chosen, others=None, from_one=None):
    others = losses if others is None else others
    return trial.Verdict(losses, errors, chosen, 20, others, from_one or errors)


def test_the_cut_chosen_is_taken_when_the_evidence_has_not_decided():
    verdict = said([1.0, 0.6, 0.5, 0.4], [0.2, 0.1, 0.05, 0.0], 2)
    chosen, why = trial.decide(verdict, COUNTS)
    assert chosen == 2
    assert why == "4 groups have a validation loss of 0.500, one model has 1.000"


def test_groups_that_the_evidence_has_decided_for_stand_against_finer_ones():
    # Without the client itself, finer groups gain little: 0.4 instead of 0.37.
    verdict = said([1.0, 0.6, 0.5, 0.4], [0.2, 0.1, 0.05, 0.0], 3, [1.1, 0.73, 0.72, 0.7])
    chosen, why = trial.decide(verdict, COUNTS, decided=1)
    assert chosen == 1
    assert why.startswith("2 groups have a validation loss of 0.600")
    assert why.endswith("these are the groups that the evidence finds")


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ([1.1, 0.75, 0.72, 0.7], 2),  # 0.35 is less than nine tenths of 0.4, 0.38 is not
        ([1.1, 0.75, 0.75, 0.7], 3),
        ([1.1, 0.70, 0.75, 0.9], 1),  # finer groups are worse
        ([1.1, 1.2, 1.2, 1.2], 1),  # nobody gains by others: the evidence stands
    ],
)
def test_they_give_way_to_finer_ones_that_do_better_without_the_client_itself(others, taken):
    verdict = said([1.0, 0.6, 0.5, 0.4], [0.2, 0.1, 0.05, 0.0], 3, others)
    chosen, why = trial.decide(verdict, COUNTS, decided=1)
    assert chosen == taken
    assert ("these are the groups that the evidence finds" in why) == (taken == 1)
    if taken == 2:
        assert why.endswith(
            "the evidence finds 2, but without a client's own update these have 0.750 and 4 groups "
            "0.720"
        )
    # Where the evidence has not decided, own contributions count.
    assert trial.decide(verdict, COUNTS)[0] == 3


def test_they_do_not_stand_against_coarser_ones():
    assert trial.decide(said([1.0, 0.6, 0.6, 0.6], [0.1] * 4, 1), COUNTS, decided=2)[0] == 1


def test_where_they_are_not_clearly_better_than_one_model_it_stays_for_now():
    worse = said([1.0, 1.1, 0.5, 0.4], [0.2, 0.2, 0.05, 0.0], 2)
    chosen, why = trial.decide(worse, COUNTS, decided=1)
    assert chosen == 0
    assert why == (
        "the 2 groups that the evidence finds have a validation loss of 1.100, not clearly less "
        "than one model's 1.000"
    )
    hardly = said([1.0, 0.99, 0.5, 0.4], [0.2, 0.0, 0.05, 0.0], 2, from_one=[0.0, 0.05, 0.1, 0.2])
    assert trial.decide(hardly, COUNTS, decided=1)[0] == 0


def test_where_groups_cannot_be_judged_without_the_client_they_stand():
    verdict = said([1.0, 0.6, 0.5, 0.4], [0.2, 0.1, 0.05, 0.0], 3, [])
    assert trial.decide(verdict, COUNTS, decided=1)[0] == 1
    assert trial.decide(verdict, COUNTS)[0] == 3


def test_one_model_stays_where_no_grouping_is_better():
    verdict = said([0.41, 0.4, 0.5, 0.6], [0.02, 0.0, 0.1, 0.1], 0)
    for decided in (-1, 2):
        chosen, why = trial.decide(verdict, COUNTS, decided)
        assert chosen == 0
        assert why == "no grouping is better than one model on validation data (loss 0.410)"
