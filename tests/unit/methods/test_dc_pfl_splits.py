"""DC-PFL's groups at the defaults: evidence, and a trial of every cut, one group at a time."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coterie
from coterie.clustering import agglomerate, with_most
from coterie.compose import probing, trial
from coterie.compose.layerwise import KEY
from coterie.core.messages import Mean, Upload
from coterie.core.method import Round
from coterie.data import build_population, load
from coterie.experiment.experiment import execute
from coterie.methods import dc_pfl_two_models
from coterie.methods.dc_pfl_splits import Levels, mean_distances, without_rivals
from scripted import Scripted, Spy, halves, linears, setup, steps, weights
from support import Stop, drive, experiment, models, same_bits, stop_after

LAYOUT = linears((1, 2))  # four numbers in one layer
START = weights(LAYOUT, 0, 0, 0, 0)
CLIENTS = range(12)
THIRDS = {c: c % 3 for c in CLIENTS}  # three groups, of four clients each
DIRECTIONS = torch.eye(4)[:3]
# With one-round smoothing the paper's rule finds the end with the fourth of these losses.
QUICK = [10.0, 4.0, 2.0, 1.0]
SHORT = {"bend": "absolute", "smooth": 1, "observe": 1, "sleep": 2, "start": 1, "alpha": 1}


def sides(client, groups=THIRDS):
    """Both halves of a client: the direction of its group (or of all), and a little of its own."""
    rng = np.random.default_rng(client)
    base = DIRECTIONS[groups[client] if groups else 0]
    noise = torch.from_numpy(rng.normal(size=(2, 4))).float()
    return [weights(LAYOUT, *(base + 0.05 * n)) for n in noise]


def sent_by(client, groups):
    """A client's trained model, scaled to [0, 1]: its group's values, and a little of its own."""
    return weights(LAYOUT, 0, 0.3 * groups[client], 0.001 * client, 1)


@dataclass
class Play:
    """Clients that answer a probe by their groups, train to fixed models and report losses."""

    method: object
    losses: list = field(default_factory=list)
    groups: dict = field(default_factory=lambda: dict(THIRDS))
    enough: int = 25
    validation: int = 1
    lost: object = staticmethod(lambda number, order: False)
    tree_by: dict = field(default_factory=dict)  # what models look like, if not as the halves

    def __post_init__(self):
        self.fed = Scripted(self.answer, CLIENTS)
        self.state = self.method.init(self.fed, setup(START, CLIENTS))
        self.number, self.phases, self.tasks = 0, [], []

    def answer(self, order):
        if self.lost(self.number, order):
            return None
        if order.task == "steps":
            return steps(self.enough)
        if order.task == "halves":
            sent = sides(order.client, self.groups)
            return halves(*sent, by="final-layer", validation=self.validation)
        if order.task == "score-cuts":
            cuts = len(order.config["cuts"].split())
            return Upload({"scores": torch.ones(trial.row_length(cuts))})
        own = sent_by(order.client, self.tree_by or self.groups or THIRDS)
        alone = order.config.get("alone") or not order.arrays
        sent = {} if alone else {"model": own}
        if trial.STEPS in order.config:
            sent[trial.SCORED] = own
        return Upload(sent, {"loss": self.losses[self.number]})

    def rounds(self, count, cohort=CLIENTS):
        for _ in range(count):
            before, state = len(self.fed.asked), replace(self.state, notes={})
            self.state = self.method.round(self.fed, state, Round(self.number, list(cohort)))
            self.phases.append(self.state.memory["phase"])
            self.last, self.number = self.fed.asked[before:], self.number + 1
            asked = [(next(iter(o.values())).task, len(o)) for _, o, _ in self.last if o]
            self.tasks.append(asked)
        return self

    def partition(self):
        members = {}
        for client, slot in self.state.groups.items():
            members.setdefault(slot, set()).add(client)
        return sorted(map(sorted, members.values()))


def play(losses=(), early=True, groups=THIRDS, **more):
    own = {k: more.pop(k) for k in ("levels", "trial_on", "sleep", "dynamic", "start") if k in more}
    method = coterie.dc_pfl(**SHORT | own, early=early)
    groups = None if groups is None else dict(groups)
    return Play(method, [*losses, *[0.3] * 50], groups=groups, **more)


def taken(monkeypatch, *numbers):
    """Make trials adopt the first cut into each of these numbers of groups, in turn."""
    left = list(numbers)

    def decide(verdict, counts, *_):
        number = left.pop(0) if len(left) > 1 else left[0]
        return counts.index(number), f"{number} by force"

    monkeypatch.setattr(trial, "decide", decide)


def by_group(groups):
    return sorted(sorted(c for c in groups if groups[c] == g) for g in set(groups.values()))


# --- when ----------------------------------------------------------------------------------------


def test_groups_that_the_evidence_is_decided_about_are_tried_as_soon_as_there_is_a_tree(
    monkeypatch,
):
    taken(monkeypatch, 3)
    made = play().rounds(3)
    probe, training = [("steps", 12), ("halves", 12)], [("train", 12)]
    assert made.tasks == [training, [*probe, *training, ("score-cuts", 12)], training]
    assert made.partition() == by_group(THIRDS)
    # Nothing is left to divide, so the loss is not watched any more.
    assert made.phases == ["ask", "done", "done"]
    # Means of those who train together.
    for slot, model in made.state.models.items():
        members = [c for c, s in made.state.groups.items() if s == slot]
        wanted = [0, 0.3 * THIRDS[members[0]], 0.001 * np.mean(members), 1]
        assert model.vector.tolist() == pytest.approx(wanted)


def test_groups_that_the_evidence_is_decided_about_do_not_wait_for_the_tree(monkeypatch):
    taken(monkeypatch, 3)
    made = play(start=5).rounds(4)
    probe, training = [("steps", 12), ("halves", 12)], [("train", 12)]
    trial_round = [*probe, *training, ("score-cuts", 12)]
    assert made.tasks == [training, training, trial_round, training]
    assert made.partition() == by_group(THIRDS)
    # The tree is that of the two rounds before, and models are no longer seen one by one.
    assert made.state.memory["pairs"][1].unique().tolist() == [2.0]
    assert [kind for kind, *_ in made.last] == ["reduce"]


def test_where_it_is_not_decided_the_tree_is_of_all_first_rounds_and_nobody_is_asked_twice(
    monkeypatch,
):
    taken(monkeypatch, 3)
    undecided = property(lambda evidence: False)
    monkeypatch.setattr("coterie.clustering.Evidence.decisive", undecided)
    made = play([9.0] * 5 + [9.0, *QUICK], start=5).rounds(6)
    assert [t for asked in made.tasks for t, _ in asked].count("halves") == 1
    assert ("halves", 12) in made.tasks[2]
    assert made.state.memory["pairs"][1].unique().tolist() == [5.0]
    assert len(made.partition()) == 1
    made.rounds(6)
    assert made.partition() == by_group(THIRDS)


def test_clients_that_never_met_wait_for_the_tree(monkeypatch):
    taken(monkeypatch, 3)
    made = play(start=5).rounds(2, cohort=range(11)).rounds(3)
    assert [t for asked in made.tasks for t, _ in asked].count("halves") == 0
    made.rounds(1)
    assert made.partition() == by_group(THIRDS)


def test_where_the_evidence_is_not_decided_the_end_of_the_decrease_is_waited_for(monkeypatch):
    taken(monkeypatch, 3)
    undecided = property(lambda evidence: False)
    monkeypatch.setattr("coterie.clustering.Evidence.decisive", undecided)
    made = play([9.0, *QUICK]).rounds(5)
    assert made.phases == ["ask", "watch", "watch", "watch", "ask"]  # probed, and not tried yet
    assert [t for asked in made.tasks for t, _ in asked].count("halves") == 1
    made.rounds(1)
    assert made.partition() == by_group(THIRDS)


def test_without_early_trials_the_end_of_the_decrease_is_waited_for(monkeypatch):
    taken(monkeypatch, 3)
    made = play(QUICK, early=False).rounds(4)
    assert made.phases == ["watch"] * 3 + ["ask"]
    assert made.state.notes["ended"]
    assert {task for asked in made.tasks for task, _ in asked} == {"train"}
    made.rounds(1)
    assert made.partition() == by_group(THIRDS)
    assert made.state.notes["verdict"]["why"] == "3 by force"


def test_a_straight_loss_has_no_end_and_nobody_is_asked():
    made = play([20.0 - i for i in range(30)], early=False).rounds(30)
    assert set(made.phases) == {"watch"}
    assert {task for asked in made.tasks for task, _ in asked} == {"train"}


def test_clients_who_are_all_alike_are_asked_once_and_never_tried():
    made = play(QUICK, groups=None).rounds(10)
    assert made.phases == ["ask"] + ["done"] * 9
    assert [t for asked in made.tasks for t, _ in asked].count("halves") == 1
    assert not any(t == "score-cuts" for asked in made.tasks for t, _ in asked)
    assert len(set(made.state.groups.values())) == 1


def test_a_fixed_structure_asks_nobody():
    made = play(QUICK, dynamic=False).rounds(10)
    assert {task for asked in made.tasks for task, _ in asked} == {"train"}


# --- what comes of it ----------------------------------------------------------------------------


def test_after_a_trial_in_vain_monitoring_rests_and_nobody_is_probed_again(monkeypatch):
    taken(monkeypatch, 1, 3)
    made = play([9.0, 9.0, 50.0, 1.0, *QUICK]).rounds(2)
    assert made.phases == ["ask", "rest"]
    assert len(set(made.state.groups.values())) == 1
    made.rounds(2)
    assert made.phases[2:] == ["rest", "watch"]
    assert made.state.memory["losses"] == []
    made.rounds(5)
    assert made.phases[4:] == ["watch"] * 3 + ["ask", "done"]
    assert made.partition() == by_group(THIRDS)
    assert [t for asked in made.tasks for t, _ in asked].count("halves") == 1


def test_without_a_rest_the_loss_is_watched_at_once(monkeypatch):
    taken(monkeypatch, 1)
    assert play([9.0, 9.0, *QUICK], sleep=0).rounds(6).phases == ["ask", *["watch"] * 4, "ask"]


def test_a_group_that_still_holds_two_is_divided_later_and_the_other_trains_as_ever(monkeypatch):
    taken(monkeypatch, 2)
    made = play([9.0, 9.0, *QUICK]).rounds(2)
    first = made.partition()
    assert len(first) == 2
    (whole,) = [g for g in first if len({THIRDS[c] for c in g}) == 1]
    (mixed,) = [g for g in first if g != whole]
    assert made.phases[-1] == "watch"
    made.rounds(5)
    assert made.phases[2:] == ["watch"] * 3 + ["ask", "done"]
    # First the others train, then those on trial, who are then asked for their scores.
    assert made.tasks[-1] == [("train", 4), ("train", 8), ("score-cuts", 8)]
    assert sorted(made.last[0][1]) == whole
    assert sorted(made.last[1][1]) == sorted(made.last[2][1]) == mixed
    assert made.partition() == by_group(THIRDS)
    assert set(made.state.models) == set(made.state.groups.values())


def test_two_groups_that_are_divided_are_tried_one_after_the_other(monkeypatch):
    pairs = {c: c % 4 for c in CLIENTS}
    directions = torch.tensor(
        [[1.0, 0.3, 0, 0], [1.0, -0.3, 0, 0], [0, 0, 1.0, 0.3], [0, 0, 1, -0.3]]
    )
    monkeypatch.setitem(globals(), "DIRECTIONS", directions)
    taken(monkeypatch, 2)
    made = play(groups=pairs).rounds(2)
    assert made.partition() == by_group({c: c % 4 // 2 for c in CLIENTS})
    made.state = replace(made.state, memory={**made.state.memory, "phase": "ask", "early": False})
    slots = sorted(set(made.state.groups.values()))
    made.state = made.state.joined({}, queue=slots)
    made.rounds(1)
    assert (made.phases[-1], len(made.partition())) == ("ask", 3)
    made.rounds(1)
    assert made.phases[-1] == "done"
    assert made.partition() == by_group(pairs)


def test_when_nobody_answers_the_round_goes_on_and_they_are_asked_in_the_next(monkeypatch):
    taken(monkeypatch, 3)
    made = play()
    made.lost = lambda number, order: number == 1 and order.task == "steps"
    made.rounds(2)
    assert made.phases == ["ask", "ask"]
    assert made.tasks[-1] == [("steps", 12), ("train", 12)]
    made.rounds(1)
    assert made.partition() == by_group(THIRDS)


def test_whose_answer_is_lost_is_asked_again_before_anybody_is_tried(monkeypatch):
    taken(monkeypatch, 3)
    run = play(QUICK, lost=lambda number, o: o.task == "halves" and o.client == 5 and number < 3)
    run.rounds(4)
    asked = [[(t, n) for t, n in round if t in ("steps", "halves")] for round in run.tasks]
    assert asked == [[], [("steps", 12), ("halves", 12)], [("halves", 1)], [("halves", 1)]]
    known = run.state.memory["answers"]
    assert known["clients"] == list(CLIENTS)
    assert all(torch.allclose(known["halves"][:, c], complete(c)) for c in CLIENTS)
    assert run.partition() == by_group(THIRDS)
    assert [t for t, _ in run.tasks[2]] == ["halves", "train"]  # no trial without it


def complete(client):
    return torch.stack([torch.nn.functional.normalize(s.vector, dim=0) for s in sides(client)])


def test_who_never_answers_is_asked_three_times_and_goes_with_the_others(monkeypatch):
    taken(monkeypatch, 3)
    run = play(QUICK, lost=lambda number, o: o.task == "halves" and o.client == 5)
    run.rounds(6)
    assert sum(t == "halves" for round in run.tasks for t, _ in round) == 3
    assert 5 not in run.state.memory["answers"]["clients"]
    assert len(run.partition()) == 3
    assert 5 in run.state.groups


def test_a_trial_that_nobody_answers_is_put_off(monkeypatch):
    taken(monkeypatch, 3)
    made = play()
    made.lost = lambda number, order: number == 1 and trial.STEPS in order.config
    made.rounds(2)
    assert made.phases[-1] == "ask"
    assert len(made.partition()) == 1
    made.rounds(1)
    assert made.tasks[-1] == [("train", 12), ("score-cuts", 12)]  # without another probe
    assert made.partition() == by_group(THIRDS)


def test_answers_that_say_too_little_say_so_and_nobody_is_asked_again():
    """A second answer would be the same, because it is the same training of the same model."""
    made = play(QUICK, groups=None, enough=0).rounds(2)
    assert made.state.notes["why"] == probing.TOO_SHORT.format(steps=300)
    assert set(made.rounds(6).phases[1:]) == {"done"}


def test_a_round_without_anybody_puts_the_tree_off(monkeypatch):
    taken(monkeypatch, 3)
    made = play().rounds(1, cohort=())
    assert made.phases == ["ask"]  # a tree of nobody's models: all are average apart
    late = play()
    late.method = coterie.dc_pfl(**{**SHORT, "start": 2})
    late.rounds(1).rounds(1, cohort=())
    assert "merges" in late.state.memory


def test_without_validation_data_the_groups_of_the_evidence_are_taken_at_once():
    made = play(validation=0).rounds(2)
    assert made.partition() == by_group(THIRDS)
    assert made.state.notes["verdict"]["why"] == trial.NOBODY
    assert not any(t == "score-cuts" for asked in made.tasks for t, _ in asked)


def test_on_training_data_validation_data_are_not_needed(monkeypatch):
    taken(monkeypatch, 3)
    made = play(validation=0, trial_on="training").rounds(2)
    assert made.partition() == by_group(THIRDS)
    assert {o.config["on"] for o in made.last[-1][1].values()} == {"train"}


def test_newcomers_and_those_who_did_not_answer_go_with_most_of_their_group(monkeypatch):
    taken(monkeypatch, 3)
    made = play().rounds(1)
    made.lost = lambda number, order: order.task == "halves" and order.client == 11
    made.state = made.state.joined({99: made.state.groups[0]})
    made.rounds(1)
    # Of the others four are with client 0, four with 1, and three with 2.
    assert made.state.groups[11] == made.state.groups[99] == made.state.groups[0]


def test_the_paper_s_levels_limit_the_cuts_to_its_own(monkeypatch):
    taken(monkeypatch, 1)
    made = play(levels=0.5).rounds(2)
    tree = agglomerate(mean_distances(made.state.memory))
    wanted = [int(tree.cut_normalised(g).max()) + 1 for g in (1.0, 0.5, 0.0)]
    assert made.state.notes["verdict"]["cuts"] == sorted(set(wanted))


# --- the pieces ----------------------------------------------------------------------------------

# Merges at heights 1, 2 and 4: {0, 1}, {2, 3}, all.
TREE = agglomerate([[0, 1, 4, 4], [1, 0, 4, 4], [4, 4, 0, 2], [4, 4, 2, 0]])


def test_levels_of_merges_and_of_steps():
    merges, steps_of = Levels(1.0, "tree"), Levels(1.0, 0.2)
    assert [merges.labels(TREE, n).tolist() for n in range(5)] == [
        [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip
    assert [steps_of.labels(TREE, n).max() + 1 for n in range(6)] == [1, 2, 2, 3, 4, 4]
    assert (merges.deepest(TREE), steps_of.deepest(TREE)) == (3, 5)
    assert merges.restricted(TREE, [0, 2]) == []
    cuts = [cut.tolist() for cut in steps_of.restricted(TREE, [0, 2, 3])]
    assert cuts == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]
    begun = Levels(0.6, "tree")  # two groups to begin with
    assert [begun.labels(TREE, n).max() + 1 for n in range(3)] == [2, 3, 4]


def test_how_high_groups_reach_in_the_tree():
    for groups, wanted in (
        ("aaaa", 1.0),
        ("aabb", 0.5),
        ("aabc", 0.25),
        ("abcd", 0.0),
        ("abac", 1),
    ):
        assert TREE.reach_normalised(groups) == wanted


def test_going_with_most_of_an_old_group():
    before = {0: "x", 1: "x", 2: "x", 3: "x", 4: "y", 5: "z"}
    assert with_most(before, {0: "a", 1: "b", 2: "b", 5: "a"}) == {
        0: "a",
        1: "b",
        2: "b",
        3: "b",
        5: "a",
    }


def told(old, new, square, within, counted=1.0, clients=4):
    metrics = {"old": old, "new": new, "square": square, "within": within, "counted": counted}
    return Mean({}, 4, tuple(range(clients)), metrics)


@pytest.mark.parametrize(
    ("square", "within", "better"),
    [
        # A gain of 0.3. Four equal gains have no error; 0.36 within each is 0.36/4 = 0.3².
        (0.09, 0.0, True), (0.09, 0.35, True), (0.09, 0.37, False),
        # Between clients: (0.36 − 0.09)·4/3 = 0.36, and 0.36/4 = 0.3² again.
        (0.35, 0.0, True), (0.37, 0.0, False),
    ],
)  # fmt: skip
def test_two_models_on_validation_data_differ_by_more_than_a_standard_error(square, within, better):
    assert dc_pfl_two_models.is_better(told(1.0, 0.7, square, within), "val") == better
    # Half of the clients have no validation data: the other half's figures count.
    half = told(0.5, 0.35, square / 2, within / 2, counted=0.5, clients=8)
    assert dc_pfl_two_models.is_better(half, "val") == better
    assert dc_pfl_two_models.is_better(told(1.0, 0.999, square, within), "train")
    assert not dc_pfl_two_models.is_better(told(1.0, 1.0, square, within), "train")
    assert not dc_pfl_two_models.is_better(told(0.0, 0.0, 0.0, 0.0, counted=0.0), "val")


# --- real runs -----------------------------------------------------------------------------------

BUSY = {"epochs": 3, "batch_size": 10, "lr": 0.1, "momentum": 0.0}


def people(shift=None, clients=8, samples=400):
    more = {"shift": shift, "shift_params": {"groups": 2}} if shift else {}
    return build_population(
        load("digits"), clients=clients, partition="iid", samples=samples, seed=3, **more
    )


@pytest.mark.parametrize("shift", ["label-permutation", "rotation"])
def test_planted_groups_are_what_it_ends_with(shift, tmp_path):
    made = experiment(coterie.dc_pfl(start=3), people(shift), schedule=BUSY, settings={"rounds": 6})
    result = execute(made, tmp_path)
    truth = made.population.groups
    assert len({(truth[c], g) for c, g in result.groups.items()}) == 2
    assert len(set(result.groups.values())) == 2


def test_clients_with_identical_data_stay_together_and_train_as_in_fedavg(tmp_path):
    made = experiment(coterie.dc_pfl(start=2, alpha=1), people(), schedule=BUSY)
    one = made.population.clients[0]
    same = replace(made.population, clients=(one,) * 6)
    ours, theirs = (
        experiment(method, same, schedule=BUSY)
        for method in (coterie.dc_pfl(start=2, alpha=1), coterie.fedavg())
    )
    state, channel, engine = drive(ours, tmp_path / "a", Spy, rounds=22)
    assert len(set(state.groups.values())) == 1
    assert any(s.task == "halves" for s in engine.seen)
    end, other_door, _ = drive(theirs, tmp_path / "b", rounds=22)
    assert same_bits(models(ours, state, channel), models(theirs, end, other_door))


@pytest.mark.parametrize("taking", [1, 2])
def test_the_same_run_in_two_parts_around_a_trial(taking, monkeypatch, tmp_path):
    taken(monkeypatch, taking)
    method = coterie.dc_pfl(start=2, alpha=2)
    settings = {"rounds": 6, "cohort": 0.8, "evaluate_every": 0}
    made = experiment(method, people("rotation"), schedule=BUSY, settings=settings)
    whole = execute(made, tmp_path / "whole")
    phases = [e["notes"]["phase"] for e in whole.history]
    assert phases[1] == "ask"
    for stop in (2, 3):  # before the probe and the trial, and after them
        with pytest.raises(Stop):
            execute(made, tmp_path / str(stop), watch=stop_after(stop))
        parts = execute(made, tmp_path / str(stop), resume=True)
        pairs = [(whole.weights(c).vector, parts.weights(c).vector) for c in range(8)]
        assert all(a.equal(b) for a, b in pairs)
        assert [e["notes"] for e in whole.history] == [e["notes"] for e in parts.history]


def test_after_a_trial_in_vain_every_layer_of_the_mean_goes_out(monkeypatch, tmp_path):
    """Layers rested before the trial: each client has its own, and the trial has averaged them."""
    taken(monkeypatch, 1)
    method = coterie.dc_pfl(start=2, alpha=4, early=False)
    made = experiment(method, people("rotation"), schedule=BUSY)
    state, channel, engine = drive(made, tmp_path, Spy, rounds=4)
    (slot,) = state.models
    assert len(state.memory[KEY]["quiet"][slot]) == 1
    ask = {"phase": "ask", "early": False}
    state = replace(state, memory={**state.memory, **ask})
    for number in (4, 5):
        channel.begin(number)
        everybody = list(range(8))
        state = made.method.round(channel, replace(state, notes={}), Round(number, everybody))
    assert any(s.task == "score-cuts" for s in engine.seen)
    tensors = {s.down[slot] for s in engine.of("6.0").values()}
    assert tensors == {state.models[slot].layout.names}


def test_losses_of_models_with_layers_of_clients_own_do_not_count(tmp_path):
    method = coterie.dc_pfl(start=2, alpha=3, early=False)
    made = experiment(method, people(), schedule=BUSY, settings={"rounds": 9, "evaluate_every": 0})
    state, _, engine = drive(made, tmp_path, Spy, rounds=9)
    short = {  # rounds in which not all layers came down, so that clients used their own
        int(s.order.split(".")[0]) - 1
        for s in engine.seen
        if s.task == "train" and s.down["0/0"] != next(iter(state.models.values())).layout.names
    }
    assert short
    assert state.memory["rounds"] == [n for n in range(9) if n not in short]
    assert len(state.memory["losses"]) == len(state.memory["rounds"])


def test_the_evidence_stands_in_for_cuts_of_the_tree_into_as_many_other_groups():
    own = np.array([0, 1, 0, 1])
    cuts = [np.zeros(4, int), np.array([0, 0, 1, 1]), own, np.array([0, 1, 2, 2]), np.arange(4)]
    kept = without_rivals(cuts, SimpleNamespace(labels=own))
    assert [c.tolist() for c in kept] == [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 2], [0, 1, 2, 3]]


def test_a_trial_does_not_take_a_cut_with_as_many_groups_as_the_evidence_finds(monkeypatch):
    taken(monkeypatch, 3)  # the first cut into three
    made = play(tree_by={c: c // 4 for c in CLIENTS}).rounds(3)
    assert made.partition() == by_group(THIRDS)
